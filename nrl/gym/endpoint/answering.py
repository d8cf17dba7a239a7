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
from nrl.envs.types import Turn
from nrl.errors import ClusterError, DataError, DeadlineExceeded, GenerationError, LostRequest, ModelError
from nrl.gym.endpoint.chat_completions import read
from nrl.gym.endpoint.chat_request import Asked, as_request, cut, wrong_type
from nrl.gym.endpoint.fields import Unusable
from nrl.gym.endpoint.sessions import KeptConversations
from nrl.rollout.conversations import Conversation
from nrl.rollout.sampler_client import TurnLimits, truncate
from nrl.runtime.threads import DaemonThreadPool

__all__ = ["SamplerAnswers"]

_ROWS = 256  # limit of one call of a sampler that does not stream


class SamplerAnswers:
    """Answers requests with a sampler, in a thread of its own; it is `nrl.gym.endpoint.endpoint_app.Answering`.

    Args:
        sampler: draws tokens; its own sampling holds where a request says nothing.
        ids: whether all answers have the tokens that they are made of.
    """

    def __init__(self, sampler: Sampler, *, ids: bool = False) -> None:
        self.responses = KeptConversations()
        self.ids, self._sampler = ids, sampler
        self._turns = itertools.count()
        self._warned: set[str] = set()
        self._streams = cast(Streams, sampler) if capabilities(sampler).streams else _ThreadedSampler(sampler)
        longest = max(map(len, sampler.tokenizer.get_vocab()))
        self._max_characters = 4 * longest * sampler.context_length  # characters; normalisation may leave fewer
        self._loop = asyncio.new_event_loop()
        self._closed: asyncio.Future[None] = self._loop.create_future()
        threading.Thread(target=self._loop.run_forever, name="sampler", daemon=True).start()

    @property
    def busy(self) -> bool:
        """Return whether the sampler decodes in this process; decoding cannot be interrupted."""
        return isinstance(self._streams, _ThreadedSampler) and self._streams.busy

    def close(self) -> None:
        """Answer no more requests; waiting clients get an error."""
        self._loop.call_soon_threadsafe(self._closed.cancel)

    async def ask(self, request: Asked, client_left: "asyncio.Future[Any]") -> tuple[list[Turn], int] | None:
        """Return the turns that answer a request, and a unique number for the first of them.

        None: its client has left, and the sampler is told to forget it. What nothing meets is said once.
        """
        for name in request.unmet:
            if name not in self._warned:
                self._warned.add(name)
                warnings.warn(f"serve: a request asks for {name}, which nothing here meets", stacklevel=2)
        answer = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._ask(request), self._loop))
        await asyncio.wait([answer, client_left], return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            turns = [cut(turn, request.sampling.get("stop", ())) for turn in answer.result()]
            first, *_ = [next(self._turns) for _ in turns]
            return turns, first
        answer.cancel()
        return None

    def tokenize(self, body: Any) -> dict[str, Any]:
        """The tokens of a ``"prompt"`` or of ``"messages"``, as vLLM tells them.

        Raises:
            Unusable: the request has neither.
        """
        tokenizer = self._sampler.tokenizer
        if isinstance(body, Mapping) and isinstance(body.get("prompt"), str):
            self._check([body["prompt"]])
            tokens = self._check_length(
                encode(body["prompt"], tokenizer, self._sampler.context_length + 1, spelled=True)
            )
        else:
            try:
                request = read(body)
            except (AttributeError, TypeError) as error:
                raise wrong_type(error) from None
            _, tokens = self._prompt(request)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": self._sampler.context_length}

    def _check(self, texts: Sequence[str]) -> None:
        """Refuse what cannot fit into the context, before it is encoded, which takes a second a megabyte."""
        length = self._sampler.context_length
        characters = sum(map(len, texts))
        if characters > self._max_characters:
            raise _make_too_long_error(f"{characters} characters, which do not fit into the {length} tokens of")

    def _check_length(self, tokens: list[int]) -> list[int]:
        """The tokens, of which no more than the context and one were encoded; refuse what does not fit."""
        length = self._sampler.context_length
        if len(tokens) > length:
            raise _make_too_long_error(f"more than {length} tokens, which do not fit into the {length} of")
        return tokens

    def _prompt(self, chat_request: Asked) -> tuple[Conversation, list[int]]:
        self._check([message["content"] for message in chat_request.messages])
        request = as_request(attrs.evolve(chat_request, ids=True), [])
        try:
            chat = Conversation(request, (), self._sampler.tokenizer, self._sampler.context_length + 1)
            return chat, self._check_length(chat.render_prompt(render))
        except (DataError, ModelError) as error:
            raise Unusable(str(error)) from None

    async def _ask(self, request: Asked) -> list[Turn]:
        chat, tokens = self._prompt(request)
        room = self._sampler.context_length - len(tokens)
        if room < 1:
            raise Unusable(
                f"the request has {len(tokens)} tokens, and the context of this model {self._sampler.context_length}; "
                "ask something shorter",
                "context_length_exceeded",
            )
        sampling, seed = self._sampling(request.sampling, chat.limits)
        # The noise of several answers differs; a seed is a signed number of 64 bits
        seeds = [(seed + index + 2**63) % 2**64 - 2**63 for index in range(request.n)]
        promised: list[futures.Future[Completion]] = []
        coming: asyncio.Future[list[Completion]] | None = None
        try:
            promised = list(self._streams.stream([tokens] * request.n, seeds, sampling))
            coming = asyncio.gather(*map(asyncio.wrap_future, promised))
            either: list[asyncio.Future[Any]] = [coming, self._closed]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                raise Unusable("the server ends; ask another one", "server_error", 503)
            if any(promise.cancelled() for promise in promised):
                raise Unusable("the sampler has forgotten the request; ask again", "server_error", 503)
            completions = coming.result()
        except (ClusterError, DeadlineExceeded, LostRequest) as error:
            raise Unusable(str(error), "server_error", 503) from None
        except GenerationError as error:
            raise Unusable(str(error)) from None
        finally:
            for promise in promised:
                promise.cancel()
            if coming is not None:  # asyncio logs what nobody retrieves, and a client that leaves is no error
                coming.add_done_callback(lambda done: done.cancelled() or done.exception())
                coming.cancel()
        return [chat.add_turn(promise, [*tokens, *promise.token_ids.tolist()]) for promise in completions]

    def _sampling(self, fields: Mapping[str, Any], limits: TurnLimits) -> tuple[Sampling, int]:
        """Return sampling and seed of a request; other fields are the sampler's, and an absent seed is random."""
        overrides = {name: fields[name] for name in ("temperature", "top_p", "top_k") if name in fields}
        max_new_tokens = (
            self._sampler.sampling.max_new_tokens if limits.max_new_tokens is None else limits.max_new_tokens
        )
        try:
            seed = int(fields["seed"]) if "seed" in fields else random.getrandbits(62)
            longest = min(max_new_tokens, self._sampler.context_length)
            return limits.of(attrs.evolve(self._sampler.sampling, **overrides, max_new_tokens=longest)), seed
        except ValueError as error:
            raise Unusable(str(error)) from None


def _make_too_long_error(size: str) -> Unusable:
    message = f"the request has {size} the context of this model; ask something shorter"
    return Unusable(message, "context_length_exceeded")


@attrs.define(eq=False)
class _QueuedPrompt:
    """A prompt that waits for its completion."""

    prompt: Chunks
    seed: int
    sampling: Sampling
    answer: "futures.Future[Completion]" = attrs.field(factory=futures.Future)


class _ThreadedSampler:
    """A sampler that does not stream as one that does: its calls run in a thread, each of all prompts that wait."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler, self._thread, self.busy = sampler, DaemonThreadPool(1, "decoding"), False
        self._waiting: list[_QueuedPrompt] = []
        self._guard = threading.Lock()

    def stream(
        self, prompts: Sequence[Chunks], seeds: Sequence[int], sampling: Sampling | None = None
    ) -> "list[futures.Future[Completion]]":
        """Complete prompts together with others that come in the same turn of the loop, or while it decodes."""
        queued = [
            _QueuedPrompt(prompt, seed, sampling or self._sampler.sampling)
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        with self._guard:
            self._waiting += queued
        asyncio.get_running_loop().call_soon(self._thread.submit, self._decode)
        return [prompt.answer for prompt in queued]

    def _decode(self) -> None:
        """Complete what waits longest, and what is sampled alike but for its length; at most so many rows."""

        def kind(queued_prompt: _QueuedPrompt) -> Sampling:
            return attrs.evolve(queued_prompt.sampling, max_new_tokens=1)

        with self._guard:
            waiting = [queued for queued in self._waiting if not queued.answer.cancelled()]
            matching = [queued for queued in waiting if kind(queued) == kind(waiting[0])]
            alike, rest = matching[:_ROWS], matching[_ROWS:]
            taken = set(alike)
            self._waiting = [queued for queued in waiting if queued not in taken]
            self.busy = bool(alike)
        if rest:  # Their own call found nothing to decode.
            self._thread.submit(self._decode)
        if not alike:
            return
        longest = max(queued.sampling.max_new_tokens for queued in alike)
        sampling = attrs.evolve(alike[0].sampling, max_new_tokens=longest)
        token = GIVEN_UP.set(lambda: [queued.answer.cancelled() for queued in alike])
        try:
            prompts, seeds = [queued.prompt for queued in alike], [queued.seed for queued in alike]
            completions = self._sampler.generate(prompts, seeds=seeds, sampling=sampling).result()
            if len(completions) != len(alike):
                raise GenerationError(f"generate: the sampler gave {len(completions)} answers to {len(alike)} prompts")
            for queued, completion in zip(alike, completions, strict=True):
                with suppress(futures.InvalidStateError):  # its client has just left
                    queued.answer.set_result(truncate(completion, len(queued.prompt), queued.sampling.max_new_tokens))
        except Exception as error:
            for queued in alike:
                with suppress(futures.InvalidStateError):
                    queued.answer.set_exception(error)
        finally:
            GIVEN_UP.reset(token)
            self.busy = False
