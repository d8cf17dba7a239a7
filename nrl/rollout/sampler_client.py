"""Requests of episodes to the sampler: all together, or each as soon as it is ready; and how many episodes are live."""

import asyncio
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent import futures
from contextlib import suppress
from functools import partial
from typing import NamedTuple, cast

import attrs

from nrl.backends.sampling.base import Sampler, Streams, capabilities
from nrl.backends.sampling.validation import check_completion
from nrl.backends.types import Completion, Sampling
from nrl.errors import GenerationError, LostRequest
from nrl.runtime.mesh.futures import done

__all__ = [
    "NO_LIMITS",
    "BatchedClient",
    "Key",
    "SamplerClient",
    "StreamingClient",
    "TurnLimits",
    "make_client",
    "truncate",
]

type Key = tuple[int, int]
"""An episode: its group, and its place there."""

_SLOW = 1.0  # seconds without a request, after which the waiting requests are sent without the others


class TurnLimits(NamedTuple):
    """Limits of a turn beside those of the sampling. A limit changes no probability.

    Args:
        stop: texts.
        max_new_tokens: limit of the number of tokens; None: the limit of the sampling.

    >>> TurnLimits(("END",), 9).of(Sampling(max_new_tokens=8, stop="."))
    Sampling(temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=8, stop_token_ids=(), stop=('.', 'END'))
    """

    stop: tuple[str, ...] = ()
    max_new_tokens: int | None = None

    def of(self, sampling: Sampling) -> Sampling:
        """Return the sampling with these limits added."""
        max_new_tokens = sampling.max_new_tokens if self.max_new_tokens is None else self.max_new_tokens
        stop = dict.fromkeys([*sampling.stop, *self.stop])
        return attrs.evolve(sampling, stop=tuple(stop), max_new_tokens=min(max_new_tokens, sampling.max_new_tokens))


NO_LIMITS = TurnLimits()


def truncate(completion: Completion, prompt_length: int, max_new_tokens: int | None) -> Completion:
    """Return a completion with at most so many tokens, where the sampler was asked for more together with others.

    >>> import torch
    >>> whole = Completion(torch.tensor([7, 2]), torch.tensor([-0.5, -0.1]), truncated=False, version=1)
    >>> truncate(whole, 3, 1).token_ids, truncate(whole, 3, 1).truncated
    (tensor([7]), True)
    """
    limit = max_new_tokens
    if limit is None or len(completion.token_ids) <= limit:
        return completion
    versions, routes = completion.versions, completion.routes
    return completion._replace(
        token_ids=completion.token_ids[:limit],
        logprobs=completion.logprobs[:limit],
        truncated=True,
        versions=None if versions is None else versions[:limit],
        routes=None if routes is None else routes[: prompt_length + limit - 1],
    )


@attrs.define(eq=False)
class _Request:
    """A request, its answer, and the future of the sampler."""

    tokens: list[int]
    seed: int
    answer: "asyncio.Future[Completion]"
    limits: TurnLimits = NO_LIMITS
    promised: "futures.Future[Completion] | None" = None

    def give(self, completion: Completion) -> None:
        if self.answer.done():  # it has been cancelled
            return
        try:
            check_completion(completion)
        except LostRequest as error:
            self.fail(error)
        else:
            self.answer.set_result(truncate(completion, len(self.tokens), self.limits.max_new_tokens))

    def fail(self, error: BaseException) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class SamplerClient(ABC):
    """Live episodes and their requests to the sampler. It is created and used on the event loop of the episodes.

    Args:
        sampler: answers the requests.
        sampling: instead of the sampler's own.
        max_live: limit of live episodes; None: no limit.
    """

    def __init__(self, sampler: Sampler, sampling: Sampling | None, max_live: int | None) -> None:
        self._sampler, self._sampling, self._max_live = sampler, sampling, max_live
        self._live: set[Key] = set()
        self._queue: deque[tuple[Key, asyncio.Future[None]]] = deque()
        self.num_sampled: dict[Key, int] = {}
        """Number of sampled tokens of each episode."""
        self._ended = False
        self._loop = asyncio.get_running_loop()

    def acquire(self, key: Key) -> "asyncio.Future[None] | None":
        """Acquire a slot for an episode: at once (None), or when the future is done; `release` ends it."""
        if self._max_live is None or len(self._live) < self._max_live:
            self._live.add(key)
            return None
        slot = self._loop.create_future()
        self._queue.append((key, slot))
        return slot

    def release(self, key: Key) -> None:
        """Release the slot of an ended episode to the next one in the queue."""
        if key not in self._live:  # it was cancelled in the queue
            return
        self._live.remove(key)
        while self._queue:
            other, slot = self._queue.popleft()
            if not slot.done():
                self._live.add(other)
                slot.set_result(None)
                break

    def end(self) -> None:
        """Send no more requests."""
        self._ended = True

    def _sampling_with(self, limits: TurnLimits) -> Sampling | None:
        """Return the sampling of requests with limits; None: the sampler's own."""
        return limits.of(self._sampling or self._sampler.sampling) if any(limits) else self._sampling

    async def generate(self, key: Key, seed: int, tokens: list[int], limits: TurnLimits = NO_LIMITS) -> Completion:
        """Continue the tokens of an episode."""
        request = _Request(list(tokens), seed, self._loop.create_future(), limits)
        self._add(key, request)
        try:
            completion = await request.answer
            self.num_sampled[key] = self.num_sampled.get(key, 0) + len(completion.token_ids)
            return completion
        except asyncio.CancelledError:
            if request.promised is not None:
                request.promised.cancel()
            raise

    @abstractmethod
    def _add(self, key: Key, request: _Request) -> None:
        """Send a request to the sampler, now or together with others."""

    def _call_soon(self, callback: Callable[[], None]) -> None:
        """Run a callback on the event loop; may be called in any thread."""
        with suppress(RuntimeError):  # the loop is closed: nobody wants to know
            self._loop.call_soon_threadsafe(callback)


def make_client(sampler: Sampler, sampling: Sampling | None, max_live: int | None = None) -> SamplerClient:
    """Return a client of the kind that the sampler supports."""
    kind = StreamingClient if capabilities(sampler).streams else BatchedClient
    return kind(sampler, sampling, max_live)


class BatchedClient(SamplerClient):
    """Client that sends one request of every live episode in one call, so that they are decoded together.

    The call waits for all requests and orders them, so it does not depend on time. An episode that has sent no request
    for a second is not waited for.
    """

    def __init__(self, sampler: Sampler, sampling: Sampling | None, max_live: int | None) -> None:
        super().__init__(sampler, sampling, max_live)
        self._waiting: dict[Key, _Request] = {}
        self._away: set[Key] = set()
        self._last_request = 0.0  # when the last request did
        self._timer: asyncio.TimerHandle | None = None
        self._pending: futures.Future[list[Completion]] | None = None

    def end(self) -> None:
        """Send no more requests, and cancel the pending call."""
        super().end()
        if self._pending is not None:
            self._pending.cancel()

    def _add(self, key: Key, request: _Request) -> None:
        self._waiting[key] = request
        self._last_request = self._loop.time()
        self._ask_when_complete()

    def release(self, key: Key) -> None:
        """Release the slot of an ended episode."""
        super().release(key)
        self._waiting.pop(key, None)
        self._away.discard(key)
        self._ask_when_complete()

    def _ask_when_complete(self) -> None:
        if self._pending is not None or self._ended or not self._waiting:
            return
        if self._live <= self._waiting.keys() | self._away:
            self._ask()
        elif self._timer is None:
            self._timer = self._loop.call_later(_SLOW, self._skip_slow_episodes)

    def _skip_slow_episodes(self) -> None:
        self._timer = None
        remaining = self._last_request + _SLOW - self._loop.time()
        if remaining > 1e-3 and self._waiting:
            self._timer = self._loop.call_later(remaining, self._skip_slow_episodes)
            return
        self._away |= self._live - self._waiting.keys()
        self._ask_when_complete()

    def _ask(self) -> None:
        requests = self._take_alike()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not requests:
            return
        try:
            prompts, seeds = [request.tokens for request in requests], [request.seed for request in requests]
            stop, lengths = requests[0].limits.stop, [request.limits.max_new_tokens for request in requests]
            max_new_tokens = None if None in lengths else max(cast(list[int], lengths))
            answer = self._sampler.generate(
                prompts, seeds=seeds, sampling=self._sampling_with(TurnLimits(stop, max_new_tokens))
            )
            future = answer if isinstance(answer, futures.Future) else done(answer.result())
        except Exception as error:
            future = futures.Future()
            future.set_exception(error)
        if future.done():
            self._answer(requests, future)
        else:
            self._pending = future
            future.add_done_callback(lambda future: self._call_soon(partial(self._answer, requests, future)))

    def _take_alike(self) -> list[_Request]:
        """Take the waiting requests that have the same stop texts as the one that waits longest."""
        waiting = {key: request for key, request in self._waiting.items() if not request.answer.done()}
        stop = next((request.limits.stop for request in waiting.values()), ())
        requests = [request for _, request in sorted(waiting.items()) if request.limits.stop == stop]
        self._waiting = {key: request for key, request in waiting.items() if request.limits.stop != stop}
        return requests

    def _answer(self, requests: Sequence[_Request], future: "futures.Future[list[Completion]]") -> None:
        self._pending = None
        try:
            completions = future.result()
            _check_count(completions, requests)
        except (Exception, futures.CancelledError) as error:
            lost = LostRequest("generate: the sampler has forgotten requests that somebody waits for")
            for request in requests:
                request.fail(lost if isinstance(error, futures.CancelledError) else error)
        else:
            for request, completion in zip(requests, completions, strict=True):
                request.give(completion)
        self._ask_when_complete()


def _check_count(answers: Sequence[object], requests: Sequence[object]) -> None:
    if len(answers) != len(requests):
        raise GenerationError(f"generate: the sampler gave {len(answers)} answers to {len(requests)} prompts")


class StreamingClient(SamplerClient):
    """Client that sends requests as they come, together with other requests of the same turn of the loop."""

    def __init__(self, sampler: Sampler, sampling: Sampling | None, max_live: int | None) -> None:
        super().__init__(sampler, sampling, max_live)
        self._new: list[_Request] = []
        self._answered, self._scheduled = list[_Request](), False  # answered, and whether the loop will come to it
        self._guard = threading.Lock()

    def _add(self, key: Key, request: _Request) -> None:
        if not self._new:
            self._loop.call_soon(self._ask)
        self._new.append(request)

    def _ask(self) -> None:
        requests, self._new = [request for request in self._new if not request.answer.done()], []
        if not requests or self._ended:
            return
        for limits in dict.fromkeys(request.limits for request in requests):
            self._stream([request for request in requests if request.limits == limits], limits)

    def _stream(self, requests: Sequence[_Request], limits: TurnLimits) -> None:
        prompts, seeds = [request.tokens for request in requests], [request.seed for request in requests]
        try:
            sampling = self._sampling_with(limits)
            promised = cast(Streams, self._sampler).stream(prompts, seeds, sampling)
            _check_count(promised, requests)
        except Exception as error:
            for request in requests:
                request.fail(error)
            return
        for request, future in zip(requests, promised, strict=True):
            request.promised = future
            future.add_done_callback(partial(self._note, request))

    def _note(self, request: _Request, _: object) -> None:
        """Note, in any thread, that a request is answered; one call of the loop gives several answers."""
        with self._guard:
            self._answered.append(request)
            first, self._scheduled = not self._scheduled, True
        if first:
            self._call_soon(self._give)

    def _give(self) -> None:
        with self._guard:
            ended, self._answered, self._scheduled = self._answered, [], False
        for request in ended:
            promised = request.promised
            assert promised is not None
            if promised.cancelled():
                request.fail(LostRequest("generate: the sampler has forgotten a request that somebody waits for"))
            elif error := promised.exception():
                request.fail(error)
            else:
                request.give(promised.result())
