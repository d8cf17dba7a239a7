"""Whether a program has begun again after a loss: what it reserves may then be fewer slots than it began with."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["beginning_again", "begun_again"]

_AGAIN = ContextVar("begun_again", default=False)


def begun_again() -> bool:
    """Whether this is a further attempt of `nrl.retrying`.

    >>> with beginning_again():
    ...     begun_again()
    True
    >>> begun_again()
    False
    """
    return _AGAIN.get()


@contextmanager
def beginning_again() -> Iterator[None]:
    """The block is a further attempt, after a process of a mesh was lost."""
    token = _AGAIN.set(True)
    try:
        yield
    finally:
        _AGAIN.reset(token)
