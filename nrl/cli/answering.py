"""A sampler behind OpenAI's APIs, for inference: each request is one conversation, and there are no episodes."""

import asyncio
import itertools
import random
import threading
import warnings
from collections.abc import Mapping, Sequence
from concurrent import futures
from contextlib import suppress
from typing import Any, cast

import attrs

from nrl.backends.engine import GIVEN_UP
from nrl.backends.sampling.base import Sampler, Streams, capabilities
from nrl.backends.types import Chunks, Completion, Sampling
from nrl.data import render
from nrl.data.encoding import encode
from nrl.envs.contract import Turn
from nrl.envs.endpoint.asked import Asked, as_request, cut, wrong_type
from nrl.envs.endpoint.chat_completions import read
from nrl.envs.endpoint.fields import Unusable
from nrl.envs.endpoint.sessions import KeptConversations
from nrl.errors import ClusterError, DataError, DeadlineExceeded, GenerationError, LostRequest, ModelError
from nrl.rollout.conversations import Conversation
from nrl.rollout.sampler_client import Limits, shortened
from nrl.runtime.threads import DaemonThreadPool

__all__ = ["Answers"]

_ROWS = 256  # of one call of a sampler that does not stream


class Answers:
    """Answers requests with a sampler, in a thread of its own; it is `nrl.envs.endpoint.application.Answering`.

    Args:
        sampler: draws tokens; its own sampling holds where a request says nothing.
        ids: whether all answers have the tokens that they are made of.
    """

    def __init__(self, sampler: Sampler, *, ids: bool = False) -> None:
        self.responses = KeptConversations()
        self.ids, self._sampler = ids, sampler
        self._turns = itertools.count()
        self._noted: set[str] = set()
        self._beside = cast(Streams, sampler) if capabilities(sampler).streams else _Beside(sampler)
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

        None: its client has left, and the sampler is told to forget it. What nothing meets is said once.
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
            self._check([body["prompt"]])
            tokens = self._fitting(encode(body["prompt"], of, self._sampler.context_length + 1, spelled=True))
        else:
            try:
                asked = read(body)
            except (AttributeError, TypeError) as error:
                raise wrong_type(error) from None
            _, tokens = self._prompt(asked)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": self._sampler.context_length}

    def _check(self, texts: Sequence[str]) -> None:
        """Refuse what cannot fit into the context, before it is encoded, which takes a second a megabyte."""
        length = self._sampler.context_length
        characters = sum(map(len, texts))
        if characters > self._most:
            raise _too_long(f"{characters} characters, which do not fit into the {length} tokens of")

    def _fitting(self, tokens: list[int]) -> list[int]:
        """The tokens, of which no more than the context and one were encoded; refuse what does not fit."""
        length = self._sampler.context_length
        if len(tokens) > length:
            raise _too_long(f"more than {length} tokens, which do not fit into the {length} of")
        return tokens

    def _prompt(self, asked: Asked) -> tuple[Conversation, list[int]]:
        self._check([message["content"] for message in asked.messages])
        request = as_request(attrs.evolve(asked, ids=True), [])
        try:
            chat = Conversation(request, (), self._sampler.tokenizer, self._sampler.context_length + 1)
            return chat, self._fitting(chat.asked(render))
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
        sampling, seed = self._sampling(asked.sampling, chat.limits)
        # The noise of several answers differs; a seed is a signed number of 64 bits
        seeds = [(seed + index + 2**63) % 2**64 - 2**63 for index in range(asked.n)]
        promised: list[futures.Future[Completion]] = []
        coming: asyncio.Future[list[Completion]] | None = None
        try:
            promised = list(self._beside.stream([tokens] * asked.n, seeds, sampling))
            coming = asyncio.gather(*map(asyncio.wrap_future, promised))
            either: list[asyncio.Future[Any]] = [coming, self._closed]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                raise Unusable("the server ends; ask another one", "server_error", 503)
            if any(each.cancelled() for each in promised):
                raise Unusable("the sampler has forgotten the request; ask again", "server_error", 503)
            found = coming.result()
        except (ClusterError, DeadlineExceeded, LostRequest) as error:
            raise Unusable(str(error), "server_error", 503) from None
        except GenerationError as error:
            raise Unusable(str(error)) from None
        finally:
            for each in promised:
                each.cancel()
            if coming is not None:  # asyncio logs what nobody retrieves, and a client that leaves is no error
                coming.add_done_callback(lambda done: done.cancelled() or done.exception())
                coming.cancel()
        return [chat.said(each, [*tokens, *each.token_ids.tolist()]) for each in found]

    def _sampling(self, given: Mapping[str, Any], limits: Limits) -> tuple[Sampling, int]:
        """How to sample, and the seed of the noise: what a request says, and else the sampler's own, and chance."""
        own = {name: given[name] for name in ("temperature", "top_p", "top_k") if name in given}
        most = self._sampler.sampling.max_new_tokens if limits.max_new_tokens is None else limits.max_new_tokens
        try:
            seed = int(given["seed"]) if "seed" in given else random.getrandbits(62)
            longest = min(most, self._sampler.context_length)
            return limits.of(attrs.evolve(self._sampler.sampling, **own, max_new_tokens=longest)), seed
        except ValueError as error:
            raise Unusable(str(error)) from None


def _too_long(found: str) -> Unusable:
    message = f"the request has {found} the context of this model; ask something shorter"
    return Unusable(message, "context_length_exceeded")


@attrs.define(eq=False)
class _Wanted:
    """A prompt that waits for its completion."""

    prompt: Chunks
    seed: int
    sampling: Sampling
    answer: "futures.Future[Completion]" = attrs.field(factory=futures.Future)


class _Beside:
    """A sampler that does not stream as one that does: its calls run in a thread, each of all prompts that wait."""

    def __init__(self, sampler: Sampler) -> None:
        self._own, self._thread, self.busy = sampler, DaemonThreadPool(1, "decoding"), False
        self._waiting: list[_Wanted] = []
        self._guard = threading.Lock()

    def stream(
        self, prompts: Sequence[Chunks], seeds: Sequence[int], sampling: Sampling | None = None
    ) -> "list[futures.Future[Completion]]":
        """Complete prompts together with others that come in the same turn of the loop, or while it decodes."""
        asked = [
            _Wanted(prompt, seed, sampling or self._own.sampling) for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        with self._guard:
            self._waiting += asked
        asyncio.get_running_loop().call_soon(self._thread.submit, self._decode)
        return [wanted.answer for wanted in asked]

    def _decode(self) -> None:
        """Complete what waits longest, and what is sampled alike but for its length; at most so many rows."""

        def kind(wanted: _Wanted) -> Sampling:
            return attrs.evolve(wanted.sampling, max_new_tokens=1)

        with self._guard:
            waiting = [wanted for wanted in self._waiting if not wanted.answer.cancelled()]
            every = [wanted for wanted in waiting if kind(wanted) == kind(waiting[0])]
            alike, rest = every[:_ROWS], every[_ROWS:]
            taken = set(alike)
            self._waiting = [wanted for wanted in waiting if wanted not in taken]
            self.busy = bool(alike)
        if rest:  # which had been counted on this call
            self._thread.submit(self._decode)
        if not alike:
            return
        longest = max(wanted.sampling.max_new_tokens for wanted in alike)
        sampling = attrs.evolve(alike[0].sampling, max_new_tokens=longest)
        token = GIVEN_UP.set(lambda: [wanted.answer.cancelled() for wanted in alike])
        try:
            prompts, seeds = [wanted.prompt for wanted in alike], [wanted.seed for wanted in alike]
            completions = self._own.generate(prompts, seeds=seeds, sampling=sampling).result()
            if len(completions) != len(alike):
                raise GenerationError(f"generate: the sampler gave {len(completions)} answers to {len(alike)} prompts")
            for wanted, completion in zip(alike, completions, strict=True):
                with suppress(futures.InvalidStateError):  # its client has just left
                    wanted.answer.set_result(shortened(completion, len(wanted.prompt), wanted.sampling.max_new_tokens))
        except Exception as error:
            for wanted in alike:
                with suppress(futures.InvalidStateError):
                    wanted.answer.set_exception(error)
        finally:
            GIVEN_UP.reset(token)
            self.busy = False
