"""A sampler behind OpenAI's APIs, for inference: each request is one conversation, and there are no episodes."""

import asyncio
import itertools
import random
import threading
from collections.abc import Mapping
from typing import Any

import attrs

from nrl.backends.base import Sampling
from nrl.backends.samplers import Sampler
from nrl.data import render
from nrl.data.rendering import encode
from nrl.envs.contract import Turn
from nrl.envs.endpoint.asked import Asked, Unusable, as_request
from nrl.episodes.conversations import Conversation
from nrl.episodes.requests import Requests, requests_to
from nrl.errors import ClusterError, DataError, DeadlineExceeded, GenerationError, LostRequest, ModelError

__all__ = ["Answers"]


class Answers:
    """Answers requests with a sampler, in a thread of its own; it is `nrl.envs.endpoint.application.Answering`.

    Args:
        sampler: draws tokens; its own sampling holds where a request says nothing.
        ids: whether all answers have the tokens that they are made of.
    """

    def __init__(self, sampler: Sampler, *, ids: bool = False) -> None:
        self.responses: dict[str, list[Mapping[str, Any]]] = {}
        self.ids, self._sampler = ids, sampler
        self._numbers, self._asked = itertools.count(1), itertools.count()
        self._requests: dict[Sampling, Requests] = {}
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="sampler", daemon=True).start()

    def number(self) -> int:
        """The number of an answer."""
        return next(self._numbers)

    async def ask(self, asked: Asked, left: "asyncio.Future[Any]") -> tuple[list[Turn], int] | None:
        """The turns that answer a request, and 0: no turn comes before them."""
        answer = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._ask(asked), self._loop))
        await asyncio.wait([answer, left], return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result(), 0
        answer.cancel()
        return None

    def tokenize(self, body: Any) -> dict[str, Any]:
        """The tokens of a ``"prompt"`` or of ``"messages"``, as vLLM tells them.

        Raises:
            Unusable: the request has neither.
        """
        of = self._sampler.tokenizer
        if isinstance(body, Mapping) and isinstance(body.get("prompt"), str):
            tokens = encode(body["prompt"], of)
        else:
            from nrl.envs.endpoint.chat_completions import read

            _, tokens = self._prompt(read(body))
        return {"tokens": tokens, "count": len(tokens), "max_model_len": self._sampler.context_length}

    def _prompt(self, asked: Asked) -> tuple[Conversation, list[int]]:
        try:
            chat = Conversation(as_request(attrs.evolve(asked, ids=True), []), (), self._sampler.tokenizer)
            return chat, chat.asked(render)
        except (DataError, ModelError) as error:
            raise Unusable(str(error)) from None

    async def _ask(self, asked: Asked) -> list[Turn]:
        chat, tokens = self._prompt(asked)
        room = self._sampler.context_length - len(tokens)
        if room < 1:
            raise Unusable(
                f"the request has {len(tokens)} tokens, and the context of this model {self._sampler.context_length}; "
                "ask something shorter",
                "context_length_exceeded",
            )
        sampling, seed = self._sampling(asked.sampling)
        requests = self._requests.get(sampling) or requests_to(self._sampler, sampling)
        self._requests[sampling] = requests
        keys = [(next(self._asked), 0) for _ in range(asked.n)]
        for key in keys:
            requests.enter(key)
        try:
            found = await asyncio.gather(
                *(requests.generate(key, seed + place, tokens) for place, key in enumerate(keys))
            )
        except (ClusterError, DeadlineExceeded, LostRequest) as error:
            raise Unusable(str(error), "server_error", 503) from None
        except GenerationError as error:
            raise Unusable(str(error)) from None
        finally:
            for key in keys:
                requests.leave(key)
                requests.given.pop(key, None)
        return [chat.said(each, [*tokens, *each.token_ids.tolist()]) for each in found]

    def _sampling(self, given: Mapping[str, Any]) -> tuple[Sampling, int]:
        """How to sample, and the seed of the noise: what a request says, and else the sampler's own, and chance."""
        own = {name: value for name, value in given.items() if name != "seed"}
        if "max_new_tokens" in own:
            own["max_new_tokens"] = int(own["max_new_tokens"])
        try:
            seed = int(given["seed"]) if "seed" in given else random.getrandbits(62)
            return attrs.evolve(self._sampler.sampling, **own), seed
        except ValueError as error:
            raise Unusable(str(error)) from None
