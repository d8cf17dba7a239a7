"""The state of a restart after a loss: the program may then reserve fewer slots than it began with."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["is_restart", "mark_restart"]

_AGAIN = ContextVar("begun_again", default=False)


def is_restart() -> bool:
    """Return whether this is a further attempt of `nrl.retrying`.

    >>> with mark_restart():
    ...     is_restart()
    True
    >>> is_restart()
    False
    """
    return _AGAIN.get()


@contextmanager
def mark_restart() -> Iterator[None]:
    """Mark the block as a further attempt, after a process of a mesh was lost."""
    token = _AGAIN.set(True)
    try:
        yield
    finally:
        _AGAIN.reset(token)
