"""A simulated engine: a sampler with slots, whose requests take time where a real one's take arithmetic."""

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

import torch

from nrl import tiny
from nrl.backends import Capabilities, Completion, Sampling
from nrl.errors import ClosedCluster
from nrl.runtime.mesh.futures import gather

__all__ = ["SimulatedEngine"]


class SimulatedEngine:
    """Answers every prompt after as long as its seed says. It works in a thread and takes on requests at any time.

    Args:
        slots: how many requests it works on at once; the others wait in their order.
        seconds: of a request, by its seed.
        tokens: what it answers.

    >>> engine = SimulatedEngine(2, lambda seed: 0.01)
    >>> engine.stream([[5]], [0])[0].result().token_ids.tolist()
    [5, 2]
    """

    capabilities = Capabilities(streams=True, remote=True)
    context_length, sampling = 4096, Sampling()

    def __init__(self, slots: int, seconds: Callable[[int], float], tokens: Sequence[int] = (5, 2)) -> None:
        self.tokenizer: Any = tiny.tokenizer()
        self.version = self.lag = 0
        self.worked = 0.0
        """Seconds that slots were taken, of requests that have ended."""
        self._slots, self._seconds, self._tokens = slots, seconds, torch.tensor(list(tokens))
        self._waiting: deque[tuple[int, futures.Future[Completion]]] = deque()
        self._running: list[tuple[float, int, float, futures.Future[Completion]]] = []
        self._changed, self._count, self._closed = threading.Condition(), 0, False
        threading.Thread(target=self._work, daemon=True).start()

    def stream(
        self, prompts: Sequence[Any], seeds: Sequence[int], sampling: Sampling | None = None
    ) -> "list[futures.Future[Completion]]":
        """A future for each prompt; one that is cancelled gives its slot back at once."""
        asked: list[futures.Future[Completion]] = [futures.Future() for _ in prompts]
        with self._changed:
            if self._closed:
                raise ClosedCluster("the engine has been closed")
            self._waiting.extend(zip(seeds, asked, strict=True))
            self._changed.notify()
        for each in asked:
            each.add_done_callback(self._look)
        return asked

    def generate(self, prompts: Any, *, seeds: Any = None, sampling: Any = None) -> Any:
        """All answers, together."""
        return gather(self.stream(prompts, seeds))

    def receive(self, buckets: Any, version: int, *, inflight: Any = "wait") -> None:
        """Have other weights; what is under way goes on."""
        self.version = version

    def close(self) -> None:
        """Answer nothing more."""
        with self._changed:
            self._closed = True
            left = [*(future for _, future in self._waiting), *(each[3] for each in self._running)]
            self._waiting.clear()
            self._running.clear()
            self._changed.notify()
        for future in left:
            if future.set_running_or_notify_cancel():
                future.set_exception(ClosedCluster("the engine has been closed"))

    def _look(self, future: "futures.Future[Completion]") -> None:
        if future.cancelled():
            with self._changed:
                self._changed.notify()

    def _work(self) -> None:
        while not self._closed:
            with self._changed:
                ended = self._advance()
                if not ended and not self._closed:
                    self._changed.wait(self._running[0][0] - time.monotonic() if self._running else None)
            for future in ended:
                if future.set_running_or_notify_cancel():
                    future.set_result(Completion(self._tokens, -torch.ones(len(self._tokens)), False, self.version))

    def _advance(self) -> "list[futures.Future[Completion]]":
        """Give slots to what waits; what has ended."""
        if any(each[3].cancelled() for each in self._running):
            self._running = [each for each in self._running if not each[3].cancelled()]
            heapq.heapify(self._running)
        now, ended = time.monotonic(), []
        while self._running and self._running[0][0] <= now:
            _, _, seconds, future = heapq.heappop(self._running)
            self.worked += seconds
            ended.append(future)
        while self._waiting and len(self._running) < self._slots:
            seed, future = self._waiting.popleft()
            if not future.cancelled():
                seconds, self._count = self._seconds(seed), self._count + 1
                heapq.heappush(self._running, (now + seconds, self._count, seconds, future))
        return ended
