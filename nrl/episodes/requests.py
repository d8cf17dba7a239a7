"""The requests of a rollout's episodes to the sampler: all at once, or each as soon as it is ready."""

import asyncio
from collections.abc import Sequence
from concurrent import futures
from typing import Protocol

from nrl.backends.base import Completion, Sampling
from nrl.backends.samplers import Sampler, Streams

__all__ = ["asker"]


class _Asker(Protocol):
    """Asks a sampler for the episodes of a rollout."""

    async def generate(self, index: int, tokens: list[int]) -> Completion:
        """Continue the tokens of an episode."""
        ...

    def leave(self) -> None:
        """An episode has ended."""
        ...


def asker(sampler: Sampler, sampling: Sampling | None, seeds: Sequence[int]) -> _Asker:
    """What asks this sampler, for as many episodes as there are seeds."""
    if isinstance(sampler, Streams):
        return _AsTheyCome(sampler, sampling, seeds)
    return _Together(sampler, sampling, seeds)


class _Together:
    """Collects one request of every live episode and asks the sampler once, so that they are decoded together.

    What is decoded together does not depend on time: the call waits for all of them, and orders them.
    """

    def __init__(self, sampler: Sampler, sampling: Sampling | None, seeds: Sequence[int]) -> None:
        self.sampler, self.sampling, self.seeds = sampler, sampling, seeds
        self.live = len(seeds)
        self.waiting: dict[int, tuple[list[int], asyncio.Future[Completion]]] = {}

    async def generate(self, index: int, tokens: list[int]) -> Completion:
        """Continue the tokens of an episode."""
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.waiting[index] = (list(tokens), answer)
        self._ask()
        return await answer

    def leave(self) -> None:
        """An episode has ended."""
        self.live -= 1
        self._ask()

    def _ask(self) -> None:
        if not self.waiting or len(self.waiting) < self.live:
            return
        # An interrupted rollout cancels its episodes, one after the other
        asked, self.waiting = [each for each in sorted(self.waiting.items()) if not each[1][1].done()], {}
        if not asked:
            return
        prompts = [tokens for _, (tokens, _) in asked]
        try:
            seeds = [self.seeds[index] for index, _ in asked]
            completions = self.sampler.generate(prompts, seeds=seeds, sampling=self.sampling).result()
        except Exception as error:
            for _, (_, answer) in asked:
                answer.set_exception(error)
            return
        for (_, (_, answer)), completion in zip(asked, completions, strict=True):
            answer.set_result(completion)


class _AsTheyCome:
    """Asks the sampler as soon as an episode has a request, together with what others have at that moment."""

    def __init__(self, sampler: Streams, sampling: Sampling | None, seeds: Sequence[int]) -> None:
        self.sampler, self.sampling, self.seeds = sampler, sampling, seeds
        self.waiting: list[tuple[int, list[int], asyncio.Future[futures.Future[Completion]]]] = []

    async def generate(self, index: int, tokens: list[int]) -> Completion:
        """Continue the tokens of an episode."""
        loop = asyncio.get_running_loop()
        if not self.waiting:
            loop.call_soon(self._ask)
        self.waiting.append((index, list(tokens), loop.create_future()))
        return await asyncio.wrap_future(await self.waiting[-1][2])

    def leave(self) -> None:
        """An episode has ended; nobody waits for it."""

    def _ask(self) -> None:
        asked, self.waiting = [each for each in self.waiting if not each[2].done()], []
        if not asked:
            return
        try:
            seeds = [self.seeds[index] for index, _, _ in asked]
            rows = self.sampler.stream([tokens for _, tokens, _ in asked], seeds, self.sampling)
        except Exception as error:
            for _, _, answer in asked:
                answer.set_exception(error)
            return
        for (_, _, answer), row in zip(asked, rows, strict=True):
            answer.set_result(row)
