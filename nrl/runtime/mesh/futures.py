"""Futures: values that may not exist yet."""

import asyncio
import itertools
from collections.abc import Callable, Generator, Sequence
from concurrent import futures
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from nrl.errors import DeadlineExceeded

__all__ = ["Future", "RemoteFuture", "Submitted", "as_future", "done", "gather"]


class Future[T](Protocol):
    """The result of a call on a mesh. `nrl.assign` and other mesh calls accept it in place of the value.

    >>> future: Future[int] = done(3)
    >>> future.result()
    3
    """

    def result(self, timeout: float | None = None) -> T:
        """Wait for the value, ``timeout`` seconds at most, and return it, or raise what the call raised."""
        ...


def done[T](value: T) -> "futures.Future[T]":
    """Return a future that has its value already.

    >>> done("ready").result()
    'ready'
    """
    future: futures.Future[T] = futures.Future()
    future.set_result(value)
    return future


class Submitted[T](futures.Future[T]):
    """The future of a submitted function: the standard library's, whose `result` says what is late; it can be awaited.

    Args:
        caller: how errors name the function.
        mesh: the name of the mesh.

    >>> late = Submitted("submit(score)", "judges")
    >>> late.result(timeout=0.01)
    Traceback (most recent call last):
    nrl.errors.DeadlineExceeded: submit(score) on mesh 'judges' has not returned within 0.01 s; it goes on, and may \
be waited for again
    """

    def __init__(self, caller: str, mesh: str) -> None:
        super().__init__()
        self._who, self._mesh = caller, mesh
        self._abandon: Callable[[], object] | None = None

    def set_abandon(self, abandon: Callable[[], object]) -> None:
        """Set the function by which `give_up` tells the executor to abandon the call."""
        self._abandon = abandon

    def give_up(self) -> None:
        """Treat a function that runs as late: it fails, and its helper is killed once nothing else runs there.

        One that has not begun is cancelled.

        >>> asked = Submitted("submit(score)", "judges")
        >>> asked.give_up()
        >>> asked.cancelled()
        True
        """
        if not self.cancel() and self._abandon is not None and not self.done():
            self._abandon()

    def result(self, timeout: float | None = None) -> T:
        """Wait for the value, ``timeout`` seconds at most, and return it, or raise what the function raised."""
        try:
            return super().result(timeout)
        except TimeoutError:
            if self.done():  # The function raised this error, or has ended in this moment.
                return super().result()
            raise DeadlineExceeded(
                f"{self._who} on mesh '{self._mesh}' has not returned within {timeout:.3g} s; it goes on, and may be "
                "waited for again"
            ) from None

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self).__await__()

    def __reduce__(self) -> Any:
        raise TypeError("a future is known to its own program only; give it to the call as an argument of its own")


def gather[T](answers: Sequence["futures.Future[T]"]) -> "futures.Future[list[T]]":
    """Return a future of all results. It fails with the first that fails; then, or if it is cancelled, all are.

    >>> one, two = futures.Future(), futures.Future()
    >>> both = gather([one, two])
    >>> one.set_exception(ValueError("no"))
    >>> both.exception(), two.cancelled()
    (ValueError('no'), True)
    """
    combined: futures.Future[list[T]] = futures.Future()
    countdown = itertools.count(len(answers) - 1, -1)

    def one(answer: futures.Future[T]) -> None:
        last = next(countdown) == 0
        with suppress(futures.InvalidStateError):  # The combined future has failed, or was cancelled.
            try:
                answer.result()
                if last:
                    combined.set_result([item.result() for item in answers])
            except BaseException as error:
                combined.set_exception(error)

    def end(_: Any) -> None:
        if combined.cancelled() or combined.exception():
            for answer in answers:
                answer.cancel()

    combined.add_done_callback(end)
    for answer in answers:
        answer.add_done_callback(one)
    if not answers:
        combined.set_result([])
    return combined


@runtime_checkable
class RemoteFuture(Protocol):
    """A future of a value that other processes compute. Calls on a mesh pass it on without waiting for it."""

    rows: Sequence[Tensor] | None
    """Rows of the value that each part holds; None: the value is not assembled from rows."""

    like: Tensor | None
    """A tensor of the value's dtype and shape, with any numbers; None: dtype and shape are not known."""

    def part(self, index: Tensor) -> Any:
        """Return an argument of a call that stands for these rows of the value."""
        ...

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the value."""
        ...

    def failure(self) -> BaseException | None:
        """Return the error that `result` will raise, if it is known by now."""
        ...


def as_future(value: Any) -> Any:
    """Wait for a future, unless other processes can wait for it (`RemoteFuture`); any other value is returned as it is.

    >>> as_future(done(3)), as_future(4)
    (3, 4)
    """
    return value.result() if hasattr(value, "result") and not isinstance(value, RemoteFuture) else value
