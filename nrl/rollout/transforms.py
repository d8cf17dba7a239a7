"""Transforms of streams: `batched`, `drop_uniform`, `filtered` and `fresh`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from nrl.algos._episodes import check_finite, valid_rows
from nrl.algos.loss_contract import name_of
from nrl.arguments import checked, described
from nrl.batch import Batch, assign, concatenate, require
from nrl.batch.columns import DROPPED_TOKENS
from nrl.data.cursors import Source, Stream, map_stream
from nrl.errors import ArgumentError, DataError

__all__ = ["Versioned", "batched", "drop_uniform", "filtered", "fresh"]


class Versioned(Protocol):
    """Anything with a ``version``: a sampler, a train state."""

    @property
    def version(self) -> int:
        """Number of times that weights have been published."""
        ...


_concatenate = cast(Callable[[Sequence[Any]], Batch], concatenate)


@checked("batched")
def batched[T](stream: Stream[T], n: int, collate: Callable[[Sequence[T]], Batch] = _concatenate) -> Source[Batch]:
    """Collate ``n`` items into a batch; they are pulled at once, so that a sampler decodes them together.

    Args:
        stream: of groups, or of rows that ``collate`` understands.
        n: items in a batch.
        collate: from ``n`` items to a batch.

    Raises:
        DataError: ``n`` is not positive.

    >>> from nrl.data import counting
    >>> batched(counting(), 3, collate=tuple).take(2)
    [(0, 1, 2), (3, 4, 5)]
    """
    if n < 1:
        raise DataError(f"batched: n is {n}; a batch needs at least one item")

    def take(count: int) -> list[Batch]:
        return [collate(stream.take(n)) for _ in range(count)]

    expect_items: Any = getattr(stream, "expect", None)

    def expect(count: int | None) -> None:
        expect_items(None if count is None else count * n)

    return map_stream(stream, take, expect if expect_items else None)


@checked("drop_uniform")
def drop_uniform(stream: Stream[Batch], patience: int = 32) -> Source[Batch]:
    """Drop the groups with equal rewards, which teach nothing, and replace them by further groups.

    The next kept group carries the counts of the dropped ones, in the columns ``dropped`` (valid rows),
    ``dropped_rewards`` (the sum of their rewards), ``dropped_invalid`` (failed rows) and ``dropped_tokens/uniform`` (of
    the policy, in all dropped rows); the counts add up over rows. A group with fewer than two valid rows is uniform. A
    reward of NaN or infinity is refused, since it equals no number: a row without a computed reward has to be invalid,
    as in `nrl.rollout`.

    Args:
        stream: of groups.
        patience: how many draws in a row may be dropped whole.

    Raises:
        DataError: ``patience`` draws had no group with different rewards, or ``patience`` is not positive.
        NotFinite: the reward of a valid row is NaN or infinite.

    Source: dynamic sampling, Yu et al., 2025 (2503.14476), section 3.2.

    >>> from nrl.data import counting
    >>> def group(index):
    ...     rewards = torch.tensor([0.0, float(index % 2)])
    ...     return Batch({"input_ids": torch.zeros(2, 3, dtype=torch.int64), "rewards": rewards}, batch_size=[2])
    >>> kept = drop_uniform(counting(group)).take(2)
    >>> [int(batch["dropped"].sum()) for batch in kept]
    [2, 2]
    """

    def teaches(group: Batch) -> bool:
        require(group, "rewards", reader="drop_uniform")
        check_finite(group, "rewards", reader="drop_uniform")
        rewards = group["rewards"][valid_rows(group)]
        return len(rewards) > 1 and not bool((rewards == rewards[0]).all())

    def complain(draws: int, groups: int) -> str:
        return (
            f"drop_uniform: {draws} draws in a row ({groups} groups) had equal rewards or failed throughout, so there "
            "is nothing to learn; look for warnings of failed episodes, use other tasks, or sample more answers to each"
        )

    return _filter_stream("drop_uniform", "uniform", stream, teaches, patience, complain)


@checked("filtered")
def filtered(stream: Stream[Batch], keep: Callable[[Batch], bool], patience: int = 32) -> Source[Batch]:
    """Keep the groups or batches accepted by a predicate, and replace the rejected ones.

    Columns carry the counts of the dropped items, as with `drop_uniform`, for the metrics; their tokens are
    ``dropped_tokens/filtered``.

    Args:
        stream: of groups or batches.
        keep: returns whether to keep an item, without changing the item.
        patience: how many draws in a row may be dropped whole.

    Raises:
        DataError: ``patience`` draws had no accepted item, ``patience`` is not positive, or ``keep`` returned no truth
            value.

    >>> from nrl.data import counting
    >>> def group(index):
    ...     rewards = torch.tensor([0.0, float(index)])
    ...     return Batch({"input_ids": torch.zeros(2, 3, dtype=torch.int64), "rewards": rewards}, batch_size=[2])
    >>> solved = filtered(counting(group), lambda group: bool((group["rewards"] > 1).any()))
    >>> solved.take(1)[0]["rewards"].tolist()
    [0.0, 2.0]
    """

    def complain(draws: int, groups: int) -> str:
        return (
            f"filtered: {name_of(keep)} let nothing through in {draws} draws in a row ({groups} items); ask for less, "
            "use other tasks, or sample more answers to each"
        )

    def is_kept(batch: Batch) -> bool:
        verdict: Any = keep(batch)
        plain = verdict.tolist() if hasattr(verdict, "tolist") and getattr(verdict, "ndim", 1) == 0 else verdict
        if not isinstance(plain, bool):
            raise DataError(
                f"filtered: {name_of(keep)} returned {verdict!r:.80}; return True or False, such as by bool(... .any())"
            )
        return plain

    return _filter_stream("filtered", "filtered", stream, is_kept, patience, complain)


@checked("fresh")
def fresh(stream: Stream[Batch], lag: int, sampler: Versioned, patience: int = 32) -> Source[Batch]:
    """Drop groups or batches with a row older than ``lag`` versions, and replace them by newer ones.

    Columns carry the numbers of the dropped ones, as with `drop_uniform`; their tokens are ``dropped_tokens/stale``.

    Args:
        stream: of groups or batches, with ``version``.
        lag: limit of publishes since a row was sampled.
        sampler: its version is the present.
        patience: how many draws in a row may be dropped whole.

    Raises:
        DataError: ``patience`` draws were too old, ``lag`` is negative, or ``patience`` is not positive.

    >>> from nrl.data import counting
    >>> class Now:
    ...     version = 5
    >>> def group(index):
    ...     version = torch.tensor([index])
    ...     return Batch({"input_ids": torch.zeros(1, 3, dtype=torch.int64), "version": version}, batch_size=[1])
    >>> fresh(counting(group), 1, Now()).take(1)[0]["version"].tolist()
    [4]
    """
    if not hasattr(sampler, "version"):
        raise ArgumentError(f"fresh: sampler is {described(sampler)}, without a version; give the sampler", "sampler")
    if lag < 0:
        raise DataError(f"fresh: lag is {lag}; it must not be negative")

    def is_fresh(batch: Batch) -> bool:
        require(batch, "version", reader="fresh")
        return int(batch["version"].min()) >= sampler.version - lag

    def complain(draws: int, _: int) -> str:
        return (
            f"fresh: {draws} draws in a row were more than {lag} versions old; allow a larger lag, or sample fewer "
            "batches ahead"
        )

    return _filter_stream("fresh", "stale", stream, is_fresh, patience, complain)


def _filter_stream(
    caller: str,
    reason: str,
    stream: Stream[Batch],
    keep: Callable[[Batch], bool],
    patience: int,
    complain: Callable[[int, int], str],
) -> Source[Batch]:
    """Keep the items that ``keep`` accepts and ask for others; the next one kept carries the numbers of the dropped.

    The number of dropped items is not known in advance, so ``stream`` expects one item for each item still to be kept.
    """
    if patience < 1:
        raise DataError(f"{caller}: patience is {patience}; it must be at least 1")
    expect_items: Any = getattr(stream, "expect", None)
    expected: int | None = None

    def take(n: int) -> list[Batch]:
        accepted: list[Batch] = []
        dropped: list[Batch] = []
        empty = 0
        while len(accepted) < n:
            before = len(accepted)
            if expect_items and expected is not None:
                expect_items(expected - before)
            for item in stream.take(n - len(accepted)):
                if keep(item):
                    accepted.append(_add_dropped_counts(item, dropped, f"dropped_tokens/{reason}"))
                    dropped = []
                else:
                    dropped.append(item)
            empty = empty + 1 if len(accepted) == before else 0
            if empty >= patience:
                raise DataError(complain(empty, len(dropped)))
        return accepted

    def expect(count: int | None) -> None:
        nonlocal expected
        expected = count
        expect_items(count)

    return map_stream(stream, take, expect if expect_items else None)


def _add_dropped_counts(batch: Batch, dropped: Iterable[Batch], tokens: str) -> Batch:
    """Return the batch with the counts of the batches dropped before it added to its first row."""
    carried = {name: torch.zeros(batch.batch_size, dtype=torch.int64) for name in (*_COUNTS, tokens)}
    carried["dropped_rewards"] = torch.zeros(batch.batch_size)
    for other in dropped:
        for name, number in _iter_counts(other, tokens):
            carried.setdefault(name, torch.zeros(batch.batch_size, dtype=torch.int64)).view(-1)[0] += number
    return assign(batch, **{name: x + batch[name] if name in batch.keys() else x for name, x in carried.items()})


_COUNTS = ("dropped", "dropped_invalid")
_CARRIED = (*_COUNTS, *DROPPED_TOKENS.values(), "dropped_rewards", "dropped_cut", "left_out", "asked_again")


def _iter_counts(batch: Batch, tokens: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the counts of a dropped batch, including the counts that it carries of earlier ones."""
    valid = valid_rows(batch)
    yield "dropped", valid.sum()
    yield "dropped_invalid", (~valid).sum()
    if "rewards" in batch.keys():
        yield "dropped_rewards", batch["rewards"][valid].sum()
    if "sampled" in batch.keys():
        yield tokens, batch["sampled"].sum()
    if "cut" in batch.keys():
        yield "dropped_cut", batch["cut"].sum()
    for name in _CARRIED:
        if name in batch.keys():
            yield name, batch[name].sum()
