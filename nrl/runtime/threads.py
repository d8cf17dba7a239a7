"""Daemon threads for calls and for an event loop. The process ends without waiting for them."""

import asyncio
import functools
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent import futures
from typing import Any

__all__ = ["DaemonThreadPool", "run_in_loop"]


def run_in_loop[T](work: Coroutine[Any, Any, T]) -> futures.Future[T]:
    """Run a coroutine in a thread beside the program; cancelling the future cancels the coroutine.

    >>> async def answer() -> int:
    ...     return 42
    >>> run_in_loop(answer()).result()
    42
    """
    return asyncio.run_coroutine_threadsafe(work, _loop())


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of a thread that does not keep the program from ending."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="asking", daemon=True).start()
    return loop


class DaemonThreadPool(futures.ThreadPoolExecutor):
    """A pool of daemon threads. The standard library's pool keeps a process alive until its threads are done.

    A thread lives as long as calls wait; calls begin in their order.

    Args:
        workers: how many threads at once.
        name: of each thread.

    >>> DaemonThreadPool(1).submit(len, "abc").result()
    3
    """

    def __init__(self, workers: int = 32, name: str = "daemon") -> None:
        super().__init__(workers)  # The base class starts no thread; an event loop accepts no other class.
        self._name, self._workers, self._running = name, workers, 0
        self._waiting: deque[tuple[futures.Future[Any], Callable[[], Any]]] = deque()
        self._guard = threading.Lock()

    def submit[T](self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> "futures.Future[T]":
        """Call a function in one of the threads; return a future of its result."""
        future: futures.Future[T] = futures.Future()
        with self._guard:
            self._waiting.append((future, lambda: fn(*args, **kwargs)))
            start = self._running < self._workers
            self._running += start
        if start:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        return future

    def _work(self) -> None:
        while True:
            with self._guard:
                if not self._waiting:
                    self._running -= 1
                    return
                future, call = self._waiting.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            del future, call  # an idle thread must not keep them alive
