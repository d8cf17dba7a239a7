"""Values that may not be there yet."""

from concurrent import futures
from typing import Protocol

__all__ = ["Future", "done"]


class Future[T](Protocol):
    """What a call on a mesh returns. `nrl.assign` and other mesh calls accept it in place of the value.

    >>> future: Future[int] = done(3)
    >>> future.result()
    3
    """

    def result(self, timeout: float | None = None) -> T:
        """Wait for the value, ``timeout`` seconds at most, and return it, or raise what the call raised."""
        ...


def done[T](value: T) -> Future[T]:
    """A future whose value is there already.

    >>> done("ready").result()
    'ready'
    """
    future: futures.Future[T] = futures.Future()
    future.set_result(value)
    return future
