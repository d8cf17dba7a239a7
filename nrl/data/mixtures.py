"""Mixtures: several streams as one, in fixed proportions."""

from bisect import bisect_right
from collections.abc import Mapping
from fractions import Fraction
from itertools import accumulate
from typing import Any

import numpy as np

from nrl.arguments import checked, described
from nrl.data.cursors import Stream, counting, transactional
from nrl.data.task_streams import Tasks, tasks
from nrl.envs.references import TaskCheck
from nrl.envs.seeds import check_not_negative
from nrl.envs.types import Task
from nrl.errors import DataError

__all__ = ["mixture"]

# Steps of the circle over the golden ratio spread most evenly. All is in integers, so nothing is rounded; they have 128
# bits, because with 64 the counts of a million million draws are off by tens.
_CIRCLE = 1 << 128
_STEP = 0x9E3779B97F4A7C15F39CC0605CEDC835


@checked("mixture")
def mixture(streams: Mapping[str, float | tuple[Stream[Task], float]], *, seed: int = 0) -> Tasks:
    """A stream that draws its tasks from several, each as often as its weight says.

    Each stream has an arc of a circle, as long as its share of the weights. Draw k comes from the stream whose arc
    holds the point ``offset + k * phi``, with phi the golden ratio and an offset from the seed. So any n draws in a row
    have n times its share from each stream, give or take a few, and the number of earlier draws from a stream is a
    function of the cursor. Each task gets ``source``, the number of its stream, which rollouts carry as a column.

    Args:
        streams: by name, in order. The value is a weight, if `tasks` can read a source of that name; or a pair
            ``(stream, weight)`` of a stream whose state is a cursor, as that of `tasks` is.
        seed: of the offset, and of the streams made here.

    Returns:
        A stream whose state is the number of tasks taken, with the fingerprint of each source. ``names`` are the
        streams' by their number in ``source``, ``sizes`` theirs, and ``dropped`` the sums over them.

    Raises:
        DataError: no streams, a weight that is no positive number, a stream without a cursor, or a negative seed.

    Source: Weyl, 1916, on the equidistribution of ``k * phi``.

    >>> sums = tasks([{"prompt": "1+1="}], chat=False)
    >>> mixed = mixture({"sums": (sums, 3), "arithmetic": 1})
    >>> [task["source"] for task in mixed.take(12)], mixed.names
    ([0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0], ('sums', 'arithmetic'))
    """
    check_not_negative("mixture", seed=seed)
    if not streams:
        raise DataError("mixture: there are no streams; give at least one")
    names = tuple(streams)
    parts: list[Any] = []
    weights: list[Fraction] = []
    for name, value in streams.items():
        stream, weight = value if isinstance(value, tuple) and len(value) == 2 else (None, value)
        weights.append(_weight(name, weight))
        parts.append(tasks(name, seed=seed) if stream is None else stream)
        if parts[-1].state().keys() - {"data"} != {"cursor"}:
            raise DataError(
                f"mixture: the state of the stream '{name}' is more than a cursor ({', '.join(parts[-1].state())}); "
                "give streams such as data.tasks makes, and put transforms around the mixture"
            )
    ends = [int(end / sum(weights) * _CIRCLE) for end in accumulate(weights)]
    ends[-1] = _CIRCLE
    offset = int.from_bytes(np.random.default_rng([seed, len(names)]).bytes(16), "little")
    draws = counting(name="mixture")

    def given(count: int) -> list[int]:
        """The number of draws from each stream among the first ones."""
        below = [_count_below(count, end, offset) for end in ends]
        return [end - start for start, end in zip([0, *below], below, strict=False)]

    def take(n: int) -> list[Task]:
        before = given(draws.state()["cursor"])
        which = [bisect_right(ends, (offset + k * _STEP) % _CIRCLE) for k in draws.take(n)]
        drawn = []
        for number, part in enumerate(parts):
            part.restore({"cursor": before[number]})
            drawn.append(iter(part.take(which.count(number))))
        return [{**next(drawn[number]), "source": number} for number in which]

    sizes = tuple(getattr(part, "size", None) for part in parts)
    fingerprints = [part.state().get("data") for part in parts]

    def state() -> dict[str, Any]:
        return draws.state() | ({"data": fingerprints} if any(fingerprints) else {})

    def restore(state: Mapping[str, Any]) -> None:
        saved = state.get("data", []) if isinstance(state, Mapping) else []
        if not isinstance(saved, list | tuple):
            raise DataError(f"mixture: the state has 'data', {described(saved)}; restore what state() returned")
        draws.restore(state)
        if saved and len(saved) != len(parts):
            raise DataError(
                f"mixture: the saved state is of {len(saved)} streams, and there are {len(parts)}; give the same ones"
            )
        for part, fingerprint in zip(parts, saved, strict=False):
            if fingerprint is not None:
                part.restore({"cursor": 0, "data": fingerprint})

    dropped: dict[str, int] = {}
    for part in parts:
        for reason, count in getattr(part, "dropped", {}).items():
            dropped[reason] = dropped.get(reason, 0) + count

    def mixture_with_check(check: TaskCheck) -> Tasks:
        usable = []
        for number, part in enumerate(parts):
            own = getattr(part, "with_check", None)
            usable.append(part if own is None else own(lambda task, number=number: check({**task, "source": number})))
        if all(part is other for part, other in zip(parts, usable, strict=True)):
            return mixed
        shares = [value[1] if isinstance(value, tuple) else value for value in streams.values()]
        pairs = zip(usable, shares, strict=True)
        return mixture(dict(zip(names, pairs, strict=True)), seed=seed)._replace(with_check=None)

    verbs = transactional(draws._replace(take=take, state=state, restore=restore))[:3]
    mixed = Tasks(*verbs, names, None, dropped, sizes, mixture_with_check)
    return mixed


def _weight(name: str, weight: Any) -> Fraction:
    try:
        found = Fraction(weight) if not isinstance(weight, bool | str) else Fraction(0)
    except (TypeError, ValueError, OverflowError):
        found = Fraction(0)
    if found <= 0:
        raise DataError(f"mixture: the weight of '{name}' is {weight!r}; it must be a positive number")
    return found


def _count_below(draws: int, end: int, offset: int) -> int:
    """How many of the first draws lie before ``end``: the sum of floor((x + m) / m) - floor((x + m - end) / m)."""
    if end == _CIRCLE:
        return draws
    return _floor_sum(draws, _STEP, offset + _CIRCLE) - _floor_sum(draws, _STEP, offset + _CIRCLE - end)


def _floor_sum(n: int, a: int, b: int, m: int = _CIRCLE) -> int:
    """The sum of floor((a k + b) / m) over k from 0 to n - 1, in as many steps as Euclid's algorithm takes."""
    total = 0
    while n:
        total += n * (n - 1) // 2 * (a // m) + n * (b // m)
        a, b = a % m, b % m
        top = a * n + b
        n, b = divmod(top, m)
        a, m = m, a
    return total
