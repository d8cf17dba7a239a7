"""A stream is a record of functions; `counting` is the one whose whole state is a cursor."""

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from nrl.arguments import check_argument, register_kind
from nrl.errors import DataError

__all__ = ["Source", "Stream", "counting", "map_stream", "transactional"]


class Stream[T](Protocol):
    """The functions of a stream; see `counting` for a small one."""

    @property
    def take(self) -> Callable[[int], list[T]]:
        """The next ``n`` items."""
        ...

    @property
    def state(self) -> Callable[[], dict[str, Any]]:
        """The state from which ``restore`` continues after the items taken so far."""
        ...

    @property
    def restore(self) -> Callable[[Mapping[str, Any]], None]:
        """Continue from a state."""
        ...


def _instead_of_stream(value: Any) -> str:
    if isinstance(value, int):
        return "give a stream; how many steps there are is the next argument: run.steps(stream, n)"
    if isinstance(value, list | tuple | range):
        return "give a stream, such as nrl.data.counting(items.__getitem__), or nrl.data.tasks(rows) of rows"
    return "give a stream, which has take, state and restore: nrl.data.tasks, nrl.rollouts or nrl.data.counting(item)"


def _is_stream(value: Any) -> bool:
    return not isinstance(value, type) and all(callable(getattr(value, key, None)) for key in _VERBS)


_VERBS = ("take", "state", "restore")
register_kind(Stream, _instead_of_stream, _is_stream)


class Source[T](NamedTuple):
    """A stream as a record of functions.

    Args:
        take: see `Stream`.
        state: see `Stream`.
        restore: see `Stream`.
        remote: whether other processes make its items.
        mark: remembers, at no cost, where the stream is, and returns a function that puts it back there, even after a
            ``take`` that was broken off. None: the stream cannot go back.
        sampler: the sampler that makes its items, if one does.
        scheduled: the same stream, whose episodes begin and end by another schedule; of `nrl.rollouts` alone.
        expect: says how many items will still be taken, so that no others are made early; None: nobody knows. Of
            `nrl.ahead`, and of the transforms in `nrl` of such a stream.

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
    scheduled: "Callable[..., Source[T]] | None" = None
    expect: Callable[[int | None], None] | None = None


def transactional[T](source: Source[T]) -> Source[T]:
    """The same stream, except that a ``take`` that raises, even by Ctrl-C, takes nothing.

    >>> def broken(n):
    ...     numbers.take(n)
    ...     raise KeyboardInterrupt
    >>> numbers = counting()
    >>> try:
    ...     transactional(numbers._replace(take=broken)).take(2)
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


def map_stream[T](
    stream: Stream[Any], take: Callable[[int], list[T]], expect: Callable[[int | None], None] | None = None
) -> Source[T]:
    """A stream whose state is that of another, from which it takes.

    Args:
        stream: the other one.
        take: see `Source`.
        expect: see `Source`. It says to ``stream`` how many of its items that takes at least: with more, it would make
            items that nobody takes. None: ``stream`` makes items early to the end.

    >>> numbers = counting()
    >>> pairs = map_stream(numbers, lambda n: [tuple(numbers.take(2)) for _ in range(n)])
    >>> pairs.take(2), pairs.state()
    ([(0, 1), (2, 3)], {'cursor': 4})
    """
    remote = bool(getattr(stream, "remote", False))
    mark, sampler = getattr(stream, "mark", None), getattr(stream, "sampler", None)
    return transactional(Source(take, stream.state, stream.restore, remote, mark, sampler, expect=expect))


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
        check_argument(name, "take(n)", n, int)
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
