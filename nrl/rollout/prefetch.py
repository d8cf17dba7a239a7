"""`ahead`: produces the items of a stream early, while the program trains."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import islice
from typing import Any

from nrl.arguments import checked
from nrl.data.cursors import Source, Stream
from nrl.errors import DataError
from nrl.runtime.mesh.futures import done
from nrl.runtime.preemption import patience_left
from nrl.runtime.threads import DaemonThreadPool

__all__ = ["ahead", "at_end", "close_early", "is_closed"]

_LOOK = 1.0  # seconds between two looks whether there is still time to wait
_SOON = 0.01  # seconds between two looks where there is none, for an item to begin whose turn it is

_ends = 0  # how often this program has ended all its streams
_AT_END: ContextVar[bool] = ContextVar("at end", default=False)
_ASKED: ContextVar[int | None] = ContextVar("asked", default=None)  # how often it had, when an item was asked for early


def close_early() -> None:
    """Cancel the requested items that have not begun; items under way are not touched."""
    global _ends
    _ends += 1


@contextmanager
def at_end(last: bool = True) -> Iterator[None]:
    """Read states without waiting for items under way: a resumed program makes them anew.

    Args:
        last: whether to; else the block changes nothing.
    """
    token = _AT_END.set(last)
    try:
        yield
    finally:
        _AT_END.reset(token)


def is_closed() -> bool:
    """Return whether this thread makes an item that was requested before `close_early`."""
    return _ASKED.get() not in (None, _ends)


@checked("ahead")
def ahead[T](stream: Stream[T], n: int) -> Source[T]:
    """Produce items up to ``n`` versions early: pull ``k`` gets an item made before pull ``max(k - n, 0)`` returned.

    Before each pull returns, production is ``n`` items ahead of the consumer, so a row's lag is at most ``n``. If
    weights are published once a pull, the lag of pull ``k`` is exactly ``min(k, n)`` on the local cluster. With ``n=0``
    the loop is synchronous. If other processes make the items, for example a sampler on a Ray mesh, a pull waits for
    its own item alone: later items are produced in order while the program trains. The lag is at most ``n`` then, too;
    reading the state waits for pending items. Near the end of a loop over `Run.steps` these processes make no surplus
    items, also behind `batched`, `drop_uniform`, `filtered` and `fresh`; a transform of your own has to pass ``expect``
    on.

    On the local cluster the last pulls make ``n`` surplus items. A longer run continues with these, because items made
    later have newer weights, and numbers would differ from a run with more steps from the start.

    A sampler on a Ray mesh that shares GPUs with the trainer cannot work while that trains: `nrl.publish` refuses it.

    Args:
        stream: makes the items.
        n: limit of waiting items.

    Raises:
        DataError: ``n`` is negative.

    >>> from nrl.data import counting
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
    items: deque[tuple[futures.Future[T], list[dict[str, Any]]]] = deque()  # items; if remote, with the state before
    handed = 0  # how many of these the last pull handed out
    expected: float = math.inf  # how many will still be taken
    pool = DaemonThreadPool(1, "ahead") if n and getattr(stream, "remote", False) else None

    def one() -> T:
        return stream.take(1)[0]

    def work(generation: int) -> None:
        """Make the items that have not begun, in the thread of the pool."""
        _ASKED.set(generation)
        for future, before in list(items):
            if future.running() or future.done():
                continue
            future.set_running_or_notify_cancel()
            try:
                before.append(stream.state())
                future.set_result(one())
            except BaseException as error:
                future.set_exception(error)
                if not isinstance(error, Exception):  # the run has ended, and with it this
                    return

    def produce() -> None:
        # An interrupt may come between any two calls: entries of `items` will be made, and no others have been
        if pool is not None:
            items.append((futures.Future(), []))
            pool.submit(work, _ends)
            return
        back, size = mark_source() if mark_source else None, len(items)
        try:
            items.append((done(one()), []))
        except BaseException:
            if back and len(items) == size:
                back()
            raise

    def forget_handed() -> None:
        """Forget the items that were handed out: from now on they cannot come back."""
        nonlocal items, handed
        items, handed = deque(islice(items, handed, None)), 0

    def take(count: int) -> list[T]:
        nonlocal handed
        forget_handed()
        taken = []
        early = n if pool is None else min(n, max(0, expected - count))  # here their lag is exact, also of those left
        for index in range(count):
            while len(items) <= index + early:
                produce()
            taken.append(items[index][0].result())
        handed = count  # One assignment, since an interrupt may come at any moment.
        return taken

    def expect(count: int | None) -> None:
        nonlocal expected
        expected = math.inf if count is None else count

    def mark() -> Callable[[], None]:
        forget_handed()

        def back() -> None:
            nonlocal handed
            handed = 0

        return back

    def state() -> dict[str, Any]:
        pending: list[T] = []
        if pool is not None:
            pool.submit(work, _ends)
        for future, before in islice(list(items), handed, None):  # before the source is asked where it is
            while not future.done():
                remaining = 0.0 if _AT_END.get() else patience_left()  # It may begin to count meanwhile.
                futures.wait([future], timeout=_LOOK if remaining is None else max(remaining, _SOON))
                if remaining is not None and not future.done() and before:
                    return {"source": before[0], "pending": pending}  # the item under way is made anew
            if _AT_END.get() and before and future.exception() is not None:  # nobody has asked for the item yet
                return {"source": before[0], "pending": pending}
            pending.append(future.result())
        return {"source": stream.state(), "pending": pending}

    def restore(state: Mapping[str, Any]) -> None:
        nonlocal items, handed
        for future, _ in items:
            with suppress(Exception):  # nobody wants the item any more
                future.result()
        stream.restore(state["source"])
        items, handed = deque((done(item), []) for item in state["pending"]), 0

    return Source(
        take,
        state,
        restore,
        getattr(stream, "remote", False),
        mark if mark_source or pool else None,
        sampler,
        expect=expect,
    )
