"""Requests of a rollout's episodes to the sampler: all together, or each as soon as it is ready."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any, NamedTuple, cast

from nrl.backends.base import Completion, Sampling
from nrl.backends.samplers import Sampler, Streams, capabilities

__all__ = ["requests_to"]


def requests_to(sampler: Sampler, sampling: Sampling | None, seeds: Sequence[int]) -> "_Together | _AsTheyCome":
    """Make the requests of as many episodes as there are seeds, in the way that suits the sampler.

    ``generate(index, tokens)`` continues the tokens of an episode; ``leave()`` says that an episode has ended.
    """
    if capabilities(sampler).streams:
        return _AsTheyCome(cast(Streams, sampler), sampling, seeds)
    return _Together(sampler, sampling, seeds)


class _Unanswered(NamedTuple):
    tokens: list[int]
    seed: int
    answer: "asyncio.Future[Any]"


def _ask(waiting: Sequence[_Unanswered], call: Callable[[list[list[int]], list[int]], Sequence[Any]]) -> None:
    """Ask for all of them in one call, except for episodes that an interrupt has cancelled meanwhile."""
    asked = [each for each in waiting if not each.answer.done()]
    if not asked:
        return
    try:
        found = call([each.tokens for each in asked], [each.seed for each in asked])
    except Exception as error:
        for each in asked:
            each.answer.set_exception(error)
        return
    for each, value in zip(asked, found, strict=True):
        each.answer.set_result(value)


class _Together:
    """Collects one request of every live episode and asks the sampler once, so that they are decoded together.

    The call waits for all requests and orders them, so it does not depend on time.
    """

    def __init__(self, sampler: Sampler, sampling: Sampling | None, seeds: Sequence[int]) -> None:
        self.sampler, self.sampling, self.seeds = sampler, sampling, seeds
        self.live = len(seeds)
        self.waiting: dict[int, _Unanswered] = {}

    async def generate(self, index: int, tokens: list[int]) -> Completion:
        """Continue the tokens of an episode."""
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.waiting[index] = _Unanswered(list(tokens), self.seeds[index], answer)
        self._ask_once_all_wait()
        return await answer

    def leave(self) -> None:
        """An episode has ended."""
        self.live -= 1
        self._ask_once_all_wait()

    def _ask_once_all_wait(self) -> None:
        if len(self.waiting) < self.live:
            return
        waiting, self.waiting = self.waiting, {}
        _ask([waiting[index] for index in sorted(waiting)], self._completions)

    def _completions(self, prompts: list[list[int]], seeds: list[int]) -> Sequence[Completion]:
        return self.sampler.generate(prompts, seeds=seeds, sampling=self.sampling).result()


class _AsTheyCome:
    """Asks the sampler as soon as an episode has a request, together with other requests of the same moment."""

    def __init__(self, sampler: Streams, sampling: Sampling | None, seeds: Sequence[int]) -> None:
        self.sampler, self.sampling, self.seeds = sampler, sampling, seeds
        self.waiting: list[_Unanswered] = []

    async def generate(self, index: int, tokens: list[int]) -> Completion:
        """Continue the tokens of an episode."""
        loop = asyncio.get_running_loop()
        if not self.waiting:
            loop.call_soon(self._ask_now)
        answer: asyncio.Future[futures.Future[Completion]] = loop.create_future()
        self.waiting.append(_Unanswered(list(tokens), self.seeds[index], answer))
        return await asyncio.wrap_future(await answer)

    def leave(self) -> None:
        """An episode has ended; nothing waits for it."""

    def _ask_now(self) -> None:
        waiting, self.waiting = self.waiting, []
        _ask(waiting, lambda prompts, seeds: self.sampler.stream(prompts, seeds, self.sampling))
