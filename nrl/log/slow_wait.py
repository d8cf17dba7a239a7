"""Long waits and slow blocks that report themselves, after a while and then less and less often."""

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from nrl.log.terminal import duration

__all__ = ["SILENCE", "say", "wait_for", "wait_until", "waiting"]

SILENCE = 10.0
"""Seconds before a wait writes its first line."""

_LONGEST = 600.0  # seconds between two lines


def say(line: str) -> None:
    """Write a line about a wait to standard error: where programs print their results there may be JSON."""
    print(line, file=sys.stderr, flush=True)  # noqa: T201


def wait_until(
    ready: Callable[[float], bool],
    limit: float,
    describe: Callable[[float], str],
    silence: float = SILENCE,
    poll_seconds: float = math.inf,
) -> bool:
    """Wait until something is ready, and write a line to standard error after a while, and then less and less often.

    Args:
        ready: waits for at most the given seconds, and returns whether it is ready.
        limit: seconds.
        describe: from the seconds so far to the line to write.
        silence: seconds before the first line; each further wait takes twice as long as the one before.
        poll_seconds: the most seconds that ``ready`` is given at once, where it has to look at something else, too.

    Returns:
        Whether it was ready in time.

    >>> from threading import Event
    >>> from contextlib import redirect_stderr
    >>> with redirect_stderr(sys.stdout):
    ...     wait_until(Event().wait, 0.08, lambda seconds: "waiting for Godot", silence=0.02)
    waiting for Godot
    waiting for Godot
    False
    """

    def poll(seconds: float) -> bool:
        until = time.monotonic() + seconds
        while seconds > poll_seconds:
            if ready(poll_seconds):
                return True
            seconds = max(0.0, until - time.monotonic())
        return bool(ready(seconds))

    started = time.monotonic()
    while (remaining := limit - (time.monotonic() - started)) > silence:
        if poll(silence):
            return True
        say(describe(time.monotonic() - started))
        silence = min(2 * silence, _LONGEST)
    return poll(max(0.0, remaining))


def wait_for(work: Future[Any], describe: Callable[[float], str]) -> None:
    """Wait until a future of a thread is done, however, and report it as `wait_until`.

    >>> done: Future[int] = Future()
    >>> done.set_result(3)
    >>> wait_for(done, lambda seconds: "waiting for three")
    """
    wait_until(lambda seconds: bool(futures.wait([work], seconds).done), math.inf, describe)


@contextmanager
def waiting(task: str) -> Iterator[Callable[[int, int], None]]:
    """Write what the block does and how far it is to standard error, if it takes long; as often as `wait_until`.

    Args:
        task: the beginning of the line, such as ``"loading the weights of X"``.

    Yields:
        ``(done, total) -> None``, for the block to call when it likes.

    >>> with waiting("reading rows") as far:
    ...     far(3, 10)
    """
    remaining, reached = threading.Event(), list[tuple[int, int]]()

    def describe(seconds: float) -> str:
        done = "".join(f", {done} of {total}" for done, total in reached[-1:])
        return f"{task}{done}, {duration(seconds)} so far"

    def far(done: int, total: int) -> None:
        reached[:] = [(done, total)]

    thread = threading.Thread(
        target=wait_until, args=(remaining.wait, math.inf, describe, SILENCE), name="waiting", daemon=True
    )
    thread.start()
    try:
        yield far
    finally:
        remaining.set()
        thread.join()
