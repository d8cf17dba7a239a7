"""How episodes ask a sampler, where some of them are cancelled while they wait."""

import asyncio
from collections.abc import Sequence
from concurrent import futures
from typing import Any

import pytest
import torch

from nrl.backends import Capabilities
from nrl.backends.types import Completion
from nrl.rollout.sampler_client import make_client


def completed(value: Any) -> futures.Future[Any]:
    future: futures.Future[Any] = futures.Future()
    future.set_result(value)
    return future


class Whole:
    """Says to each prompt its first token."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], int]] = []

    def _complete(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[Completion]:
        self.asked += [(list(prompt), seed) for prompt, seed in zip(prompts, seeds, strict=True)]
        return [Completion(torch.tensor(prompt[:1]), torch.zeros(1), truncated=False, version=0) for prompt in prompts]

    def generate(self, prompts: Any, *, seeds: Any, sampling: Any) -> futures.Future[list[Completion]]:
        return completed(self._complete(prompts, seeds))


class Streaming(Whole):
    capabilities = Capabilities(streams=True)

    def stream(self, prompts: Any, seeds: Any, sampling: Any) -> list[futures.Future[Completion]]:
        return [completed(each) for each in self._complete(prompts, seeds)]


@pytest.mark.parametrize("sampler", [Whole(), Streaming()], ids=["together", "streaming"])
def test_who_is_cancelled_while_it_waits_is_not_asked_for(sampler: Any) -> None:
    async def every() -> list[Any]:
        requests = make_client(sampler, None)
        for place in range(3):
            requests.acquire((0, place))
        first, second = (
            asyncio.create_task(requests.generate((0, place), 10 + place, [place + 5])) for place in (0, 1)
        )
        asyncio.get_running_loop().call_soon(first.cancel)  # when both wait, and nobody has been asked
        await asyncio.sleep(0.01)
        requests.release((0, 0))
        last = asyncio.create_task(requests.generate((0, 2), 12, [7]))
        return list(await asyncio.wait_for(asyncio.gather(first, second, last, return_exceptions=True), 60))

    cancelled, *rest = asyncio.run(every())
    assert isinstance(cancelled, asyncio.CancelledError)
    assert [each.token_ids.tolist() for each in rest] == [[6], [7]]
    assert sampler.asked == [([6], 11), ([7], 12)]
