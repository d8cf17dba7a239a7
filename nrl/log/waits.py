"""What is being waited for, where that takes long."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nrl.log.terminal import duration

__all__ = ["waiting"]

_FIRST, _EVERY = 5.0, 30.0  # seconds until the first line, and between two


@contextmanager
def waiting(what: str) -> Iterator[Callable[[int, int], None]]:
    """Say, by a line after 5 seconds and then every 30, what the block does and how far it is.

    Args:
        what: as the line says it, such as ``"loading the weights of X"``.

    Yields:
        ``(done, total) -> None``, to be called as often as the block wants; or never.

    >>> with waiting("reading rows") as far:
    ...     far(3, 10)
    """
    started, left, reached = time.monotonic(), threading.Event(), list[tuple[int, int]]()

    def say() -> None:
        pause = _FIRST
        while not left.wait(pause):
            pause = _EVERY
            done = "".join(f", {done} of {total}" for done, total in reached[-1:])
            print(f"{what}{done}, {duration(time.monotonic() - started)} so far", flush=True)  # noqa: T201

    def far(done: int, total: int) -> None:
        reached[:] = [(done, total)]

    thread = threading.Thread(target=say, name="waiting", daemon=True)
    thread.start()
    try:
        yield far
    finally:
        left.set()
        thread.join()
