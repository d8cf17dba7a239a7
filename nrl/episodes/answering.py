"""A sampler behind OpenAI's APIs, for inference: each request is one conversation, and there are no episodes."""

import asyncio
import itertools
import random
import threading
import warnings
from collections.abc import Mapping, Sequence
from concurrent import futures
from typing import Any, cast

import attrs

from nrl.backends.base import Chunks, Completion, Sampling
from nrl.backends.samplers import Sampler, capabilities
from nrl.data import render
from nrl.data.rendering import encode
from nrl.envs.contract import Turn
from nrl.envs.endpoint.asked import Asked, Unusable, as_request, cut, wrong_type
from nrl.envs.endpoint.chat_completions import read
from nrl.episodes.conversations import Conversation
from nrl.episodes.requests import Requests, requests_to
from nrl.errors import ClusterError, DataError, DeadlineExceeded, GenerationError, LostRequest, ModelError
from nrl.runtime.threads import Daemons

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
        self._asked, self._turns = itertools.count(), itertools.count()
        self._noted: set[str] = set()
        self._requests: dict[Sampling, Requests] = {}
        self._beside = sampler if capabilities(sampler).streams else _Beside(sampler)
        longest = max(map(len, sampler.tokenizer.get_vocab()))
        self._most = 4 * longest * sampler.context_length  # characters; normalisation may leave fewer
        self._loop = asyncio.new_event_loop()
        self._closed: asyncio.Future[None] = self._loop.create_future()
        threading.Thread(target=self._loop.run_forever, name="sampler", daemon=True).start()

    @property
    def busy(self) -> bool:
        """Whether the sampler decodes in this process, which nothing can end."""
        return isinstance(self._beside, _Beside) and self._beside.busy

    def close(self) -> None:
        """Answer nothing more; who waits is told so."""
        self._loop.call_soon_threadsafe(self._closed.cancel)

    async def ask(self, asked: Asked, left: "asyncio.Future[Any]") -> tuple[list[Turn], int] | None:
        """The turns that answer a request, and a number for the first of them, which no other has.

        What nothing meets is said once.
        """
        for name in asked.unmet:
            if name not in self._noted:
                self._noted.add(name)
                warnings.warn(f"serve: a request asks for {name}, which nothing here meets", stacklevel=2)
        answer = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._ask(asked), self._loop))
        await asyncio.wait([answer, left], return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            turns = [cut(turn, asked.sampling.get("stop", ())) for turn in answer.result()]
            first, *_ = [next(self._turns) for _ in turns]
            return turns, first
        answer.cancel()
        return None

    def tokenize(self, body: Any) -> dict[str, Any]:
        """The tokens of a ``"prompt"`` or of ``"messages"``, as vLLM tells them.

        Raises:
            Unusable: the request has neither.
        """
        of = self._sampler.tokenizer
        if isinstance(body, Mapping) and isinstance(body.get("prompt"), str):
            self._check(len(body["prompt"]))
            tokens = encode(body["prompt"], of)
        else:
            try:
                asked = read(body)
            except (AttributeError, TypeError) as error:
                raise wrong_type(error) from None
            _, tokens = self._prompt(asked)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": self._sampler.context_length}

    def _check(self, characters: int) -> None:
        """Refuse what cannot fit into the context, before it is encoded, which takes a second a megabyte."""
        if characters > self._most:
            raise Unusable(
                f"the request has {characters} characters, which do not fit into the {self._sampler.context_length} "
                "tokens of the context of this model; ask something shorter",
                "context_length_exceeded",
            )

    def _prompt(self, asked: Asked) -> tuple[Conversation, list[int]]:
        self._check(sum(len(each["content"]) for each in asked.messages))
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
        requests = self._requests.get(sampling) or requests_to(cast(Sampler, self._beside), sampling)
        self._requests[sampling] = requests
        limits = chat.limits
        if limits.max_new_tokens is None:
            limits = limits._replace(max_new_tokens=self._sampler.sampling.max_new_tokens)
        keys = [(next(self._asked), 0) for _ in range(asked.n)]
        for key in keys:
            requests.enter(key)
        try:
            coming = asyncio.gather(
                *(requests.generate(key, seed + place, tokens, limits) for place, key in enumerate(keys))
            )
            either: list[asyncio.Future[Any]] = [coming, self._closed]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                raise Unusable("the server ends; ask another one", "server_error", 503)
            found = coming.result()
        except (ClusterError, DeadlineExceeded, LostRequest) as error:
            raise Unusable(str(error), "server_error", 503) from None
        except GenerationError as error:
            raise Unusable(str(error)) from None
        finally:
            coming.cancel()
            for key in keys:
                requests.leave(key)
                requests.given.pop(key, None)
        return [chat.said(each, [*tokens, *each.token_ids.tolist()]) for each in found]

    def _sampling(self, given: Mapping[str, Any]) -> tuple[Sampling, int]:
        """How to sample, and the seed of the noise: what a request says, and else the sampler's own, and chance."""
        own = {name: given[name] for name in ("temperature", "top_p", "top_k") if name in given}
        try:
            seed = int(given["seed"]) if "seed" in given else random.getrandbits(62)
            most = self._sampler.context_length  # each request says its own, so that they are decoded together
            return attrs.evolve(self._sampler.sampling, **own, max_new_tokens=most), seed
        except ValueError as error:
            raise Unusable(str(error)) from None


class _Beside:
    """A sampler whose calls run in a thread, so that who looks after requests hears of others meanwhile."""

    def __init__(self, sampler: Sampler) -> None:
        self._own, self._thread, self.busy = sampler, Daemons(1, "decoding"), False
        self.sampling, self.capabilities = sampler.sampling, capabilities(sampler)

    def generate(
        self, prompts: Sequence[Chunks], *, seeds: Sequence[int] | None = None, sampling: Sampling | None = None
    ) -> futures.Future[list[Completion]]:
        """As the sampler's, in the thread."""
        return self._thread.submit(self._generate, prompts, seeds, sampling)

    def _generate(self, *how: Any) -> list[Completion]:
        self.busy = True
        try:
            return self._own.generate(how[0], seeds=how[1], sampling=how[2]).result()
        finally:
            self.busy = False
