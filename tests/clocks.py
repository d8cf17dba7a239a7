"""A clock that a test sets forward: a limit is a minute, and over when the test says so, however fast a machine is."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from weakref import WeakSet

import pytest

__all__ = ["MINUTE", "Clock"]

MINUTE = 60.0  # seconds: so much for a wait that ends by itself, or whose end a test brings about


class Clock:
    """What `time.monotonic` and event loops go by. It runs on as ever, and a test skips what nobody should wait for.

    What holds ``monotonic`` under a name of its own, such as `threading`, does not see what is skipped.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.skips = 0
        self._ahead, self._now = 0.0, time.monotonic
        self._loops: WeakSet[asyncio.AbstractEventLoop] = WeakSet()
        self._guard = threading.Lock()
        monkeypatch.setattr(time, "monotonic", self.now)
        monkeypatch.setattr(asyncio.BaseEventLoop, "time", self._of_loop)

    @property
    def _of_loop(self) -> Callable[[asyncio.AbstractEventLoop], float]:
        def now(loop: asyncio.AbstractEventLoop) -> float:
            with self._guard:
                self._loops.add(loop)
            return self.now()

        return now

    def now(self) -> float:
        """Seconds, those that were skipped included."""
        return self._now() + self._ahead

    def skip(self, seconds: float) -> None:
        """Set the clock forward, and wake the loops that wait for a time."""
        with self._guard:
            self.skips += 1
            self._ahead += seconds
            loops = list(self._loops)
        for loop in loops:
            _on(loop, lambda: None)

    @contextmanager
    def passes(self, seconds: float, once: Callable[[], bool]) -> Iterator[None]:
        """Skip so many seconds while the block runs, as soon as ``once``, called on a loop, says so; it has to."""
        over, skipped = threading.Event(), threading.Event()

        def watch() -> None:
            while not over.wait(0.001):
                with self._guard:
                    loops = [loop for loop in self._loops if loop.is_running()]
                if any(_answer(loop, once) for loop in loops):
                    skipped.set()  # before the block may end of it
                    self.skip(seconds)
                    return

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            yield
            assert skipped.is_set(), "what was to wait for the clock has not waited"
        finally:
            over.set()
            watching.join()


def _on(loop: asyncio.AbstractEventLoop, fn: Callable[[], object]) -> bool:
    try:
        loop.call_soon_threadsafe(fn)
    except RuntimeError:  # it is closed
        return False
    return True


def _answer(loop: asyncio.AbstractEventLoop, once: Callable[[], bool]) -> bool:
    """What a loop says; False: it has ended meanwhile, or is busy."""
    answer: futures.Future[bool] = futures.Future()
    if not _on(loop, lambda: answer.set_result(once())):
        return False
    try:
        return answer.result(0.05)
    except TimeoutError:
        return False
