"""Futures: values that may not exist yet."""

import asyncio
import itertools
from collections.abc import Callable, Generator, Sequence
from concurrent import futures
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from nrl.errors import DeadlineExceeded

__all__ = ["Coming", "Future", "Submitted", "done", "gathered", "on_its_way"]


class Future[T](Protocol):
    """What a call on a mesh returns. `nrl.assign` and other mesh calls accept it in place of the value.

    >>> future: Future[int] = done(3)
    >>> future.result()
    3
    """

    def result(self, timeout: float | None = None) -> T:
        """Wait for the value, ``timeout`` seconds at most, and return it, or raise what the call raised."""
        ...


def done[T](value: T) -> "futures.Future[T]":
    """A future whose value is there already.

    >>> done("ready").result()
    'ready'
    """
    future: futures.Future[T] = futures.Future()
    future.set_result(value)
    return future


class Submitted[T](futures.Future[T]):
    """The future of a submitted function: the standard library's, whose `result` says what is late; it can be awaited.

    Args:
        who: how errors name the function.
        mesh: the name of the mesh.

    >>> late = Submitted("submit(score)", "judges")
    >>> late.result(timeout=0.01)
    Traceback (most recent call last):
    nrl.errors.DeadlineExceeded: submit(score) on mesh 'judges' has not returned within 0.01 s; it goes on, and may \
be waited for again
    """

    def __init__(self, who: str, mesh: str) -> None:
        super().__init__()
        self._who, self._mesh = who, mesh
        self._leave: Callable[[], object] | None = None

    def may_be_left(self, leave: Callable[[], object]) -> None:
        """Say how `give_up` reaches who runs the function."""
        self._leave = leave

    def give_up(self) -> None:
        """Treat a function that runs as late: it fails, and its helper is killed once nothing else runs there.

        One that has not begun is cancelled.

        >>> asked = Submitted("submit(score)", "judges")
        >>> asked.give_up()
        >>> asked.cancelled()
        True
        """
        if not self.cancel() and self._leave is not None and not self.done():
            self._leave()

    def result(self, timeout: float | None = None) -> T:
        """Wait for the value, ``timeout`` seconds at most, and return it, or raise what the function raised."""
        try:
            return super().result(timeout)
        except TimeoutError:
            if self.done():  # the function raised it, or has ended in this moment
                return super().result()
            raise DeadlineExceeded(
                f"{self._who} on mesh '{self._mesh}' has not returned within {timeout:.3g} s; it goes on, and may be "
                "waited for again"
            ) from None

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self).__await__()

    def __reduce__(self) -> Any:
        raise TypeError("a future is known to its own program only; give it to the call as an argument of its own")


def gathered[T](answers: Sequence["futures.Future[T]"]) -> "futures.Future[list[T]]":
    """A future of all results. It fails with the first answer that fails; if it fails or is cancelled, so are all.

    >>> one, two = futures.Future(), futures.Future()
    >>> both = gathered([one, two])
    >>> one.set_exception(ValueError("no"))
    >>> both.exception(), two.cancelled()
    (ValueError('no'), True)
    """
    whole: futures.Future[list[T]] = futures.Future()
    left = itertools.count(len(answers) - 1, -1)

    def one(answer: futures.Future[T]) -> None:
        last = next(left) == 0
        with suppress(futures.InvalidStateError):  # it has failed, or been cancelled
            try:
                answer.result()
                if last:
                    whole.set_result([each.result() for each in answers])
            except BaseException as error:
                whole.set_exception(error)

    def end(_: Any) -> None:
        if whole.cancelled() or whole.exception():
            for answer in answers:
                answer.cancel()

    whole.add_done_callback(end)
    for answer in answers:
        answer.add_done_callback(one)
    if not answers:
        whole.set_result([])
    return whole


@runtime_checkable
class Coming(Protocol):
    """A future of a value that other processes compute. Calls on a mesh pass it on without waiting for it."""

    rows: Sequence[Tensor] | None
    """Which rows of the value each part holds; None: it is not put together from rows."""

    like: Tensor | None
    """A tensor of the value's dtype and shape, for where its numbers do not matter; None: these are not known."""

    def part(self, index: Tensor) -> Any:
        """An argument of a call that stands for these rows of the value."""
        ...

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the value."""
        ...

    def failure(self) -> BaseException | None:
        """What `result` will raise, if that is known by now."""
        ...


def on_its_way(value: Any) -> Any:
    """Wait for a future, unless other processes can wait for it (`Coming`); any other value is returned as it is.

    >>> on_its_way(done(3)), on_its_way(4)
    (3, 4)
    """
    return value.result() if hasattr(value, "result") and not isinstance(value, Coming) else value
