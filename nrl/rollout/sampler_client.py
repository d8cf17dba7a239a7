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

__all__ = ["NO_LIMITS", "Key", "Limits", "Requests", "requests_to", "shortened"]

type Key = tuple[int, int]
"""An episode: its group, and its place there."""

_SLOW = 1.0  # seconds in which no request comes, until those that have come wait no longer for the others


class Limits(NamedTuple):
    """Where a turn ends, beside where the sampling ends it. A limit changes no probability.

    Args:
        stop: texts.
        max_new_tokens: the most tokens; None: as many as the sampling allows.

    >>> Limits(("END",), 9).of(Sampling(max_new_tokens=8, stop="."))
    Sampling(temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=8, stop_token_ids=(), stop=('.', 'END'))
    """

    stop: tuple[str, ...] = ()
    max_new_tokens: int | None = None

    def of(self, sampling: Sampling) -> Sampling:
        """The sampling with these limits, too."""
        most = sampling.max_new_tokens if self.max_new_tokens is None else self.max_new_tokens
        stop = dict.fromkeys([*sampling.stop, *self.stop])
        return attrs.evolve(sampling, stop=tuple(stop), max_new_tokens=min(most, sampling.max_new_tokens))


NO_LIMITS = Limits()


def shortened(completion: Completion, prompt_length: int, max_new_tokens: int | None) -> Completion:
    """Return a completion with at most so many tokens, where the sampler was asked for more together with others.

    >>> import torch
    >>> whole = Completion(torch.tensor([7, 2]), torch.tensor([-0.5, -0.1]), truncated=False, version=1)
    >>> shortened(whole, 3, 1).token_ids, shortened(whole, 3, 1).truncated
    (tensor([7]), True)
    """
    most = max_new_tokens
    if most is None or len(completion.token_ids) <= most:
        return completion
    versions, routes = completion.versions, completion.routes
    return completion._replace(
        token_ids=completion.token_ids[:most],
        logprobs=completion.logprobs[:most],
        truncated=True,
        versions=None if versions is None else versions[:most],
        routes=None if routes is None else routes[: prompt_length + most - 1],
    )


@attrs.define(eq=False)
class _Request:
    """A request, its answer, and what the sampler has promised."""

    tokens: list[int]
    seed: int
    answer: "asyncio.Future[Completion]"
    limits: Limits = NO_LIMITS
    promised: "futures.Future[Completion] | None" = None

    def give(self, completion: Completion) -> None:
        if self.answer.done():  # it has been cancelled
            return
        try:
            check_completion(completion)
        except LostRequest as error:
            self.fail(error)
        else:
            self.answer.set_result(shortened(completion, len(self.tokens), self.limits.max_new_tokens))

    def fail(self, error: BaseException) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class Requests(ABC):
    """Who is live, and what they ask; made and used on the loop of the episodes.

    Args:
        sampler: answers.
        sampling: instead of the sampler's own.
        most: how many episodes may be live at a time; None: all.
    """

    def __init__(self, sampler: Sampler, sampling: Sampling | None, most: int | None) -> None:
        self._sampler, self._sampling, self._most = sampler, sampling, most
        self._live: set[Key] = set()
        self._queue: deque[tuple[Key, asyncio.Future[None]]] = deque()
        self.given: dict[Key, int] = {}
        """How many tokens each episode was given."""
        self._over = False
        self._loop = asyncio.get_running_loop()

    def enter(self, key: Key) -> "asyncio.Future[None] | None":
        """An episode begins: at once (None), or when a place is free. Whoever got one has to `leave`."""
        if self._most is None or len(self._live) < self._most:
            self._live.add(key)
            return None
        place = self._loop.create_future()
        self._queue.append((key, place))
        return place

    def leave(self, key: Key) -> None:
        """An episode has ended; the next in the queue gets its place in the same moment."""
        if key not in self._live:  # it was cancelled in the queue
            return
        self._live.remove(key)
        while self._queue:
            other, place = self._queue.popleft()
            if not place.done():
                self._live.add(other)
                place.set_result(None)
                break

    def end(self) -> None:
        """Ask for nothing more."""
        self._over = True

    def _sampled(self, limits: Limits) -> Sampling | None:
        """How requests with limits are sampled; None: as the sampler says."""
        return limits.of(self._sampling or self._sampler.sampling) if any(limits) else self._sampling

    async def generate(self, key: Key, seed: int, tokens: list[int], limits: Limits = NO_LIMITS) -> Completion:
        """Continue the tokens of an episode."""
        request = _Request(list(tokens), seed, self._loop.create_future(), limits)
        self._add(key, request)
        try:
            completion = await request.answer
            self.given[key] = self.given.get(key, 0) + len(completion.token_ids)
            return completion
        except asyncio.CancelledError:
            if request.promised is not None:
                request.promised.cancel()
            raise

    @abstractmethod
    def _add(self, key: Key, request: _Request) -> None:
        """Ask the sampler, now or with others."""

    def _soon(self, then: Callable[[], None]) -> None:
        """Run on the loop, from any thread."""
        with suppress(RuntimeError):  # the loop is closed: nobody wants to know
            self._loop.call_soon_threadsafe(then)


def requests_to(sampler: Sampler, sampling: Sampling | None, most: int | None = None) -> Requests:
    """The requests of episodes, in the way that suits the sampler."""
    kind = _AsTheyCome if capabilities(sampler).streams else _Together
    return kind(sampler, sampling, most)


class _Together(Requests):
    """Collects one request of every live episode and asks the sampler once, so that they are decoded together.

    The call waits for all requests and orders them, so it does not depend on time. But an episode that has once been
    away for a second is waited for no longer.
    """

    def __init__(self, sampler: Sampler, sampling: Sampling | None, most: int | None) -> None:
        super().__init__(sampler, sampling, most)
        self._waiting: dict[Key, _Request] = {}
        self._away: set[Key] = set()
        self._came = 0.0  # when the last request did
        self._timer: asyncio.TimerHandle | None = None
        self._coming: futures.Future[list[Completion]] | None = None

    def end(self) -> None:
        """Ask for nothing more, and let the sampler forget what it was asked."""
        super().end()
        if self._coming is not None:
            self._coming.cancel()

    def _add(self, key: Key, request: _Request) -> None:
        self._waiting[key] = request
        self._came = self._loop.time()
        self._ask_once_all_wait()

    def leave(self, key: Key) -> None:
        """An episode has ended."""
        super().leave(key)
        self._waiting.pop(key, None)
        self._away.discard(key)
        self._ask_once_all_wait()

    def _ask_once_all_wait(self) -> None:
        if self._coming is not None or self._over or not self._waiting:
            return
        if self._live <= self._waiting.keys() | self._away:
            self._ask()
        elif self._timer is None:
            self._timer = self._loop.call_later(_SLOW, self._leave_the_slow_behind)

    def _leave_the_slow_behind(self) -> None:
        self._timer = None
        left = self._came + _SLOW - self._loop.time()
        if left > 1e-3 and self._waiting:
            self._timer = self._loop.call_later(left, self._leave_the_slow_behind)
            return
        self._away |= self._live - self._waiting.keys()
        self._ask_once_all_wait()

    def _ask(self) -> None:
        asked = self._alike()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not asked:
            return
        try:
            prompts, seeds = [each.tokens for each in asked], [each.seed for each in asked]
            stop, lengths = asked[0].limits.stop, [each.limits.max_new_tokens for each in asked]
            most = None if None in lengths else max(cast(list[int], lengths))
            coming = self._sampler.generate(prompts, seeds=seeds, sampling=self._sampled(Limits(stop, most)))
            found = coming if isinstance(coming, futures.Future) else done(coming.result())
        except Exception as error:
            found = futures.Future()
            found.set_exception(error)
        if found.done():
            self._answered(asked, found)
        else:
            self._coming = found
            found.add_done_callback(lambda found: self._soon(partial(self._answered, asked, found)))

    def _alike(self) -> list[_Request]:
        """Requests that wait and end at the same texts, those of who waits longest; the others wait on."""
        waiting = {key: each for key, each in self._waiting.items() if not each.answer.done()}
        stop = next((each.limits.stop for each in waiting.values()), ())
        asked = [each for _, each in sorted(waiting.items()) if each.limits.stop == stop]
        self._waiting = {key: each for key, each in waiting.items() if each.limits.stop != stop}
        return asked

    def _answered(self, asked: Sequence[_Request], found: "futures.Future[list[Completion]]") -> None:
        self._coming = None
        try:
            completions = found.result()
            _check_count(completions, asked)
        except (Exception, futures.CancelledError) as error:
            gone = LostRequest("generate: the sampler has forgotten requests that somebody waits for")
            for each in asked:
                each.fail(gone if isinstance(error, futures.CancelledError) else error)
        else:
            for each, completion in zip(asked, completions, strict=True):
                each.give(completion)
        self._ask_once_all_wait()


def _check_count(given: Sequence[object], asked: Sequence[object]) -> None:
    if len(given) != len(asked):
        raise GenerationError(f"generate: the sampler gave {len(given)} answers to {len(asked)} prompts")


def _done[T](value: T) -> "futures.Future[T]":
    future: futures.Future[T] = futures.Future()
    future.set_result(value)
    return future


class _AsTheyCome(Requests):
    """Asks the sampler as soon as an episode has a request, together with other requests of the same moment."""

    def __init__(self, sampler: Sampler, sampling: Sampling | None, most: int | None) -> None:
        super().__init__(sampler, sampling, most)
        self._new: list[_Request] = []
        self._ended, self._called = list[_Request](), False  # answered, and whether the loop will come to it
        self._guard = threading.Lock()

    def _add(self, key: Key, request: _Request) -> None:
        if not self._new:
            self._loop.call_soon(self._ask)
        self._new.append(request)

    def _ask(self) -> None:
        asked, self._new = [each for each in self._new if not each.answer.done()], []
        if not asked or self._over:
            return
        for limits in dict.fromkeys(each.limits for each in asked):
            self._stream([each for each in asked if each.limits == limits], limits)

    def _stream(self, asked: Sequence[_Request], limits: Limits) -> None:
        prompts, seeds = [each.tokens for each in asked], [each.seed for each in asked]
        try:
            sampling = self._sampled(limits)
            promised = cast(Streams, self._sampler).stream(prompts, seeds, sampling)
            _check_count(promised, asked)
        except Exception as error:
            for each in asked:
                each.fail(error)
            return
        for each, future in zip(asked, promised, strict=True):
            each.promised = future
            future.add_done_callback(partial(self._note, each))

    def _note(self, request: _Request, _: object) -> None:
        """Note, in any thread, that a request is answered; one call of the loop gives several answers."""
        with self._guard:
            self._ended.append(request)
            first, self._called = not self._called, True
        if first:
            self._soon(self._give)

    def _give(self) -> None:
        with self._guard:
            ended, self._ended, self._called = self._ended, [], False
        for request in ended:
            promised = request.promised
            assert promised is not None
            if promised.cancelled():
                request.fail(LostRequest("generate: the sampler has forgotten a request that somebody waits for"))
            elif error := promised.exception():
                request.fail(error)
            else:
                request.give(promised.result())
