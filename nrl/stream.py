"""Streams: endless sources that are pulled, and the transforms between them.

A stream is pulled by ``take(n)`` and produces nothing that was not asked for, so what is sampled together is a function
of how the stream is pulled alone. Its ``state()`` is the cursor after what was consumed, with what is pending, and
``restore`` continues from there.
"""

import operator
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple, Protocol, cast

import torch

from nrl.algos._rows import check_finite, valid_rows
from nrl.algos.protocol import name_of
from nrl.batch import Batch, assign, concatenate, require
from nrl.errors import DataError
from nrl.runtime.mesh.futures import done
from nrl.runtime.preemption import patience as patience_left
from nrl.runtime.threads import Daemons

__all__ = [
    "Source",
    "Stream",
    "Versioned",
    "ahead",
    "batched",
    "counting",
    "drop_uniform",
    "filtered",
    "fresh",
    "whole",
]


_LOOK = 1.0  # seconds: how often one who waits looks whether there is still time to


class Stream[T](Protocol):
    """What every stream can do; see `counting` for a small one."""

    @property
    def take(self) -> Callable[[int], list[T]]:
        """The next ``n`` items."""
        ...

    @property
    def state(self) -> Callable[[], dict[str, Any]]:
        """All that ``restore`` needs to continue after what has been taken."""
        ...

    @property
    def restore(self) -> Callable[[Mapping[str, Any]], None]:
        """Continue from a state."""
        ...


class Source[T](NamedTuple):
    """A stream as a record of functions.

    Args:
        take: as `Stream`'s, and the next two.
        state: all that ``restore`` needs.
        restore: continue from a state.
        remote: other processes make its items.
        mark: remembers, at no cost, where the stream is; what it returns puts the stream back there, whatever has been
            taken since, or broken off. None: that cannot be done.
        sampler: that makes its items, if one does.

    >>> numbers = counting()
    >>> numbers.take(2), numbers.state()
    ([0, 1], {'cursor': 2})
    """

    take: Callable[[int], list[T]]
    state: Callable[[], dict[str, Any]]
    restore: Callable[[Mapping[str, Any]], None]
    remote: bool = False
    mark: Callable[[], Callable[[], None]] | None = None
    sampler: Any = None


def whole[T](source: Source[T]) -> Source[T]:
    """The same stream, of which a ``take`` that raises has taken nothing: Ctrl-C, too.

    >>> def broken(n):
    ...     numbers.take(n)
    ...     raise KeyboardInterrupt
    >>> numbers = counting()
    >>> try:
    ...     whole(numbers._replace(take=broken)).take(2)
    ... except KeyboardInterrupt:
    ...     numbers.state()
    {'cursor': 0}
    """
    if source.mark is None:
        return source
    mark = source.mark

    def take(n: int) -> list[T]:
        back = mark()
        try:
            return source.take(n)
        except BaseException:
            back()
            raise

    return source._replace(take=take)


def _over[T](stream: Stream[Any], take: Callable[[int], list[T]]) -> Source[T]:
    """A stream whose state is that of another."""
    remote = bool(getattr(stream, "remote", False))
    mark, sampler = getattr(stream, "mark", None), getattr(stream, "sampler", None)
    return whole(Source(take, stream.state, stream.restore, remote, mark, sampler))


class Versioned(Protocol):
    """Whatever has a ``version``: a sampler, a train state."""

    @property
    def version(self) -> int:
        """How often weights had been published."""
        ...


def counting(item: Callable[[int], Any] = operator.index, *, name: str = "counting") -> Source[Any]:
    """The endless stream ``item(0), item(1), ...``, whose whole state is a cursor.

    Args:
        item: a pure function of the index.
        name: how errors name the stream.

    Raises:
        DataError: (when taken from) a negative number of items; (when restored) a state that is none.

    >>> squares = counting(lambda index: index**2)
    >>> squares.restore({"cursor": 3})
    >>> squares.take(2)
    [9, 16]
    """
    cursor = 0

    def take(n: int) -> list[Any]:
        nonlocal cursor
        if n < 0:
            raise DataError(f"{name}: take({n}); the number of items cannot be negative")
        cursor += n
        return [item(index) for index in range(cursor - n, cursor)]

    def restore(state: Mapping[str, Any]) -> None:
        nonlocal cursor
        found = state.get("cursor") if isinstance(state, Mapping) else None
        if isinstance(found, bool) or not isinstance(found, int) or found < 0:
            raise DataError(f"{name}: restore({state!r}); give what state() returned, such as {{'cursor': 0}}")
        cursor = found

    def mark() -> Callable[[], None]:
        before = {"cursor": cursor}
        return lambda: restore(before)

    return Source(take, lambda: {"cursor": cursor}, restore, mark=mark)


_concatenate = cast(Callable[[Sequence[Any]], Batch], concatenate)


def batched[T](stream: Stream[T], n: int, collate: Callable[[Sequence[T]], Batch] = _concatenate) -> Source[Batch]:
    """Batches of ``n`` items; they are asked for at once, so that a sampler decodes them together.

    Args:
        stream: of groups, or of rows that ``collate`` understands.
        n: items in a batch.
        collate: from ``n`` items to a batch.

    Raises:
        DataError: ``n`` is not positive.

    >>> batched(counting(), 3, collate=tuple).take(2)
    [(0, 1, 2), (3, 4, 5)]
    """
    if n < 1:
        raise DataError(f"batched: n is {n}; a batch needs at least one item")

    def take(count: int) -> list[Batch]:
        return [collate(stream.take(n)) for _ in range(count)]

    return _over(stream, take)


def drop_uniform(stream: Stream[Batch], patience: int = 32) -> Source[Batch]:
    """Groups without those whose rewards are all equal, which teach nothing; what is missing is asked for again.

    What was dropped is not lost: the next group that is kept carries it, in the columns ``dropped`` (the number of
    valid rows), ``dropped_rewards`` (their sum) and ``dropped_invalid`` (the number of failed rows), which add up over
    rows. A group with fewer than two valid rows is uniform. A reward that is NaN or infinite is refused, since it is
    equal to nothing: a row whose reward could not be computed has to be invalid, as `nrl.rollout` makes it.

    Args:
        stream: of groups.
        patience: how many draws in a row may be dropped whole.

    Raises:
        DataError: so many draws held no group that teaches anything, or ``patience`` is not positive.
        NotFinite: the reward of a valid row is NaN or infinite.

    Source: dynamic sampling, Yu et al., 2025 (2503.14476), section 3.2.

    >>> def group(index):
    ...     rewards = torch.tensor([0.0, float(index % 2)])
    ...     return Batch({"input_ids": torch.zeros(2, 3, dtype=torch.int64), "rewards": rewards}, batch_size=[2])
    >>> kept = drop_uniform(counting(group)).take(2)
    >>> [int(batch["dropped"].sum()) for batch in kept]
    [2, 2]
    """
    if patience < 1:
        raise DataError(f"drop_uniform: patience is {patience}; it must be at least 1")

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

    return _filtered(stream, teaches, patience, complain)


def filtered(stream: Stream[Batch], keep: Callable[[Batch], bool], patience: int = 32) -> Source[Batch]:
    """Groups or batches that a predicate lets through; what is missing is asked for again.

    What was dropped is carried in columns, as by `drop_uniform`, so that the metrics count it.

    Args:
        stream: of groups or batches.
        keep: whether to keep one; it must not change it.
        patience: how many draws in a row may be dropped whole.

    Raises:
        DataError: so many draws held nothing to keep, or ``patience`` is not positive.

    >>> def group(index):
    ...     rewards = torch.tensor([0.0, float(index)])
    ...     return Batch({"input_ids": torch.zeros(2, 3, dtype=torch.int64), "rewards": rewards}, batch_size=[2])
    >>> solved = filtered(counting(group), lambda group: bool((group["rewards"] > 1).any()))
    >>> solved.take(1)[0]["rewards"].tolist()
    [0.0, 2.0]
    """
    if patience < 1:
        raise DataError(f"filtered: patience is {patience}; it must be at least 1")

    def complain(draws: int, groups: int) -> str:
        return (
            f"filtered: {name_of(keep)} let nothing through in {draws} draws in a row ({groups} items); ask for less, "
            "use other tasks, or sample more answers to each"
        )

    return _filtered(stream, keep, patience, complain)


def fresh(stream: Stream[Batch], lag: int, sampler: Versioned, patience: int = 32) -> Source[Batch]:
    """Groups or batches without those that have a row older than ``lag`` versions; others are pulled in their place.

    What was dropped is carried in columns, as by `drop_uniform`.

    Args:
        stream: of groups or batches, with ``version``.
        lag: how many publishes ago a row may have been sampled.
        sampler: whose version is the present.
        patience: how many draws in a row may be dropped whole.

    Raises:
        DataError: so many draws were too old, ``lag`` is negative, or ``patience`` is not positive.

    >>> class Now:
    ...     version = 5
    >>> def group(index):
    ...     version = torch.tensor([index])
    ...     return Batch({"input_ids": torch.zeros(1, 3, dtype=torch.int64), "version": version}, batch_size=[1])
    >>> fresh(counting(group), 1, Now()).take(1)[0]["version"].tolist()
    [4]
    """
    if lag < 0:
        raise DataError(f"fresh: lag is {lag}; it must not be negative")
    if patience < 1:
        raise DataError(f"fresh: patience is {patience}; it must be at least 1")

    def is_fresh(batch: Batch) -> bool:
        require(batch, "version", reader="fresh")
        return int(batch["version"].min()) >= sampler.version - lag

    def complain(draws: int, _: int) -> str:
        return (
            f"fresh: {draws} draws in a row were more than {lag} versions old; allow a larger lag, or sample fewer "
            "batches ahead"
        )

    return _filtered(stream, is_fresh, patience, complain)


def _filtered(
    stream: Stream[Batch], keep: Callable[[Batch], bool], patience: int, complain: Callable[[int, int], str]
) -> Source[Batch]:
    """What ``keep`` lets through; as much as was dropped is asked for again, and what is kept carries it."""

    def take(n: int) -> list[Batch]:
        kept: list[Batch] = []
        dropped: list[Batch] = []
        empty = 0
        while len(kept) < n:
            before = len(kept)
            for item in stream.take(n - len(kept)):
                if keep(item):
                    kept.append(_carrying(item, dropped))
                    dropped = []
                else:
                    dropped.append(item)
            empty = empty + 1 if len(kept) == before else 0
            if empty >= patience:
                raise DataError(complain(empty, len(dropped)))
        return kept

    return _over(stream, take)


def _carrying(batch: Batch, dropped: Iterable[Batch]) -> Batch:
    """The batch with what was dropped before it added to its first row."""
    carried = {
        "dropped": torch.zeros(batch.batch_size, dtype=torch.int64),
        "dropped_invalid": torch.zeros(batch.batch_size, dtype=torch.int64),
        "dropped_rewards": torch.zeros(batch.batch_size),
    }
    for other in dropped:
        valid = valid_rows(other)
        carried["dropped"].view(-1)[0] += valid.sum()
        carried["dropped_invalid"].view(-1)[0] += (~valid).sum()
        if "rewards" in other.keys():
            carried["dropped_rewards"].view(-1)[0] += other["rewards"][valid].sum()
        for name in carried.keys() & set(other.keys()):
            carried[name].view(-1)[0] += other[name].sum()
    return assign(batch, **{name: x + batch[name] if name in batch.keys() else x for name, x in carried.items()})


def ahead[T](stream: Stream[T], n: int) -> Source[T]:
    """Items up to ``n`` versions early: pull ``k`` gets what was produced before pull ``max(k - n, 0)`` returned.

    Before each pull returns, production catches up to ``n`` items beyond what is handed out, so a row's lag is at most
    ``n``; where weights are published once a pull, the lag of pull ``k`` is exactly ``min(k, n)`` on the local cluster.
    With ``n=0`` nothing is early, and the loop is synchronous. Where other processes make the items, as a sampler on a
    Ray mesh does, a pull waits for its own item only: the others are produced, one after the other, while the program
    goes on and trains. The lag is at most ``n`` then, too; who asks for the state waits for what is pending.

    A sampler on a Ray mesh that shares GPUs with the trainer cannot work while that trains: `nrl.publish` refuses it.

    Args:
        stream: what is produced.
        n: how many items may be waiting.

    Raises:
        DataError: ``n`` is negative.

    >>> early = ahead(counting(), 2)
    >>> early.take(1), early.state()["pending"]
    ([0], [1, 2])
    """
    if n < 0:
        raise DataError(f"ahead: n is {n}; it must not be negative")
    sampler: Any = getattr(stream, "sampler", None)
    if n and hasattr(sampler, "lag"):
        sampler.lag = max(n, sampler.lag)
    mark_source = getattr(stream, "mark", None)
    made: deque[tuple[futures.Future[T], list[dict[str, Any]]]] = deque()  # where others work: with the state before it
    handed = 0  # how many of these have been handed out, by the last pull
    beside = Daemons(1, "ahead") if n and getattr(stream, "remote", False) else None

    def one() -> T:
        return stream.take(1)[0]

    def work() -> None:
        """In the thread beside: make what has not been begun."""
        for future, before in list(made):
            if future.running() or future.done():
                continue
            future.set_running_or_notify_cancel()
            try:
                before.append(stream.state())
                future.set_result(one())
            except BaseException as error:
                future.set_exception(error)

    def produce() -> None:
        # An interrupt may come between any two calls: what is in `made` will be made, and nothing else has been
        if beside is not None:
            made.append((futures.Future(), []))
            beside.submit(work)
            return
        back, size = mark_source() if mark_source else None, len(made)
        try:
            made.append((done(one()), []))
        except BaseException:
            if back and len(made) == size:
                back()
            raise

    def settle() -> None:
        """No item that was handed out can come back any more."""
        nonlocal made, handed
        made, handed = deque(islice(made, handed, None)), 0

    def take(count: int) -> list[T]:
        nonlocal handed
        settle()
        taken = []
        for place in range(count):
            while len(made) <= place + n:
                produce()
            taken.append(made[place][0].result())
        handed = count  # in one step: an interrupt may come at any moment
        return taken

    def mark() -> Callable[[], None]:
        settle()

        def back() -> None:
            nonlocal handed
            handed = 0

        return back

    def state() -> dict[str, Any]:
        pending: list[T] = []
        if beside is not None:
            beside.submit(work)
        for future, before in islice(list(made), handed, None):  # before the source is asked where it is
            while not future.done():
                left = patience_left()  # which may begin to count meanwhile
                futures.wait([future], timeout=_LOOK if left is None else left)
                if left is not None and not future.done() and before:
                    return {"source": before[0], "pending": pending}  # what is under way is made anew
            pending.append(future.result())
        return {"source": stream.state(), "pending": pending}

    def restore(state: Mapping[str, Any]) -> None:
        nonlocal made, handed
        for future, _ in made:
            with suppress(Exception):  # nobody wants it any more
                future.result()
        stream.restore(state["source"])
        made, handed = deque((done(each), []) for each in state["pending"]), 0

    return Source(
        take, state, restore, getattr(stream, "remote", False), mark if mark_source or beside else None, sampler
    )
