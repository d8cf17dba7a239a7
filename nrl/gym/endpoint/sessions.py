"""Episodes that an agent drives: what it asks, in order, and the turns of the policy that answer."""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import attrs

from nrl.envs.types import Turn
from nrl.gym.endpoint.chat_request import Asked, as_request, cut, said_by
from nrl.gym.endpoint.fields import Unusable

__all__ = ["Exchange", "KeptConversations", "Session"]

_KEPT = 10_000  # responses of a session
_KEPT_TEXT = 2**26  # characters of the conversations that they end, as `_size` counts them
_VALUE = 100  # characters as which each key and value counts besides its text, for the object that it is
_SEEN = 0.25  # seconds until it is seen that a client has left


@attrs.define(eq=False)
class Exchange:
    """A request of an agent, and the turns that answer it.

    Args:
        asked: the request.
        answer: of as many turns as it asks for, and the number of the first of them.
        turns: those that there are.
        first: the number of the first.
        left: set when the agent has left before it was answered. One that asks the same again gets this answer.
    """

    asked: Asked
    answer: "asyncio.Future[tuple[list[Turn], int]]"
    turns: list[Turn] = attrs.field(factory=list)
    first: int = 0
    left: asyncio.Event = attrs.field(factory=asyncio.Event)


class KeptConversations:
    """Conversations that a later request may go on with, by the id of the response at their end; the newest."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[int, list[Mapping[str, Any]]]] = OrderedDict()
        self._size = 0

    def get(self, name: str) -> list[Mapping[str, Any]] | None:
        """Return the messages of a conversation; None: it is not known, or not any more."""
        return self._kept[name][1] if name in self._kept else None

    def add(self, name: str, messages: list[Mapping[str, Any]]) -> None:
        """Keep a conversation, and forget the oldest where there are too many."""
        size = _size(messages)
        self._kept[name] = size, messages
        self._size += size
        while len(self._kept) > _KEPT or (self._size > _KEPT_TEXT and len(self._kept) > 1):
            self._size -= self._kept.popitem(last=False)[1][0]


def _size(value: Any) -> int:
    """Return how much a value of JSON takes in memory, in characters: all of its texts, and a constant for each part.

    >>> _size([{"role": "user", "content": "1+1="}])
    619
    """
    size, left = 0, [value]
    while left:
        part = left.pop()
        size += _VALUE
        if isinstance(part, str):
            size += len(part)
        elif isinstance(part, Mapping):
            left += [*part, *part.values()]
        elif isinstance(part, list | tuple):
            left += part
    return size


class Session:
    """One episode: a queue of exchanges, one of which is answered at a time. Used on the loop of the endpoint alone.

    Args:
        name: of the episode, which nobody can guess.
        ids: whether all answers have the tokens that they are made of.
    """

    def __init__(self, name: str, ids: bool) -> None:
        self.name, self.ids = name, ids
        self.responses = KeptConversations()
        self._said: list[Mapping[str, Any]] = []
        self._waiting: asyncio.Queue[Exchange | asyncio.Future[Any]] = asyncio.Queue()
        self._current: Exchange | None = None
        self._left: list[Exchange] = []  # whose agent has left
        self._asked: list[Exchange] = []  # whose agent waits
        self._closed = ""

    async def ask(self, asked: Asked, left: "asyncio.Future[Any]") -> tuple[list[Turn], int] | None:
        """The turns that answer a request, and the number of the first of them; None: its client has left.

        Args:
            asked: the request.
            left: done when its client leaves.

        Raises:
            Unusable: the episode is over, or the request does not fit into the context.
        """
        if self._closed:
            raise Unusable(self._closed, "session_closed", 410)
        # Who asks again may be heard before it is seen that it has left
        for other in [each for each in self._asked if each.asked == asked]:
            with suppress(TimeoutError):
                await asyncio.wait_for(other.left.wait(), _SEEN)
        exchange = next((each for each in self._left if each.asked == asked), None)
        if exchange is None:
            exchange = Exchange(asked, asyncio.get_running_loop().create_future())
            self._waiting.put_nowait(exchange)
        else:
            self._left.remove(exchange)
            exchange.left.clear()
        self._asked.append(exchange)
        try:
            await asyncio.wait([exchange.answer, left], return_when=asyncio.FIRST_COMPLETED)
            for _ in range(3):  # turns of the loop, in which it sees what has come
                await asyncio.sleep(0)
            if not left.done():
                return exchange.answer.result()
            exchange.left.set()
            self._left.append(exchange)
            return None
        finally:
            self._asked.remove(exchange)

    @property
    def unmet(self) -> tuple[str, ...]:
        """What the request that is answered wishes besides, and nothing meets."""
        return () if self._current is None else self._current.asked.unmet

    def tokenize(self, body: Any) -> dict[str, Any]:
        """Refuse: the tokens are where the policy is."""
        raise Unusable("an episode's endpoint has no tokenizer; ask for return_token_ids with a request", status=404)

    def ended(self, outcome: "asyncio.Future[Any]") -> None:
        """The agent has ended; what it returned, or raised, is the end of the episode."""
        self._waiting.put_nowait(outcome)

    async def next(self) -> Any:
        """Wait for the next request, a `nrl.envs.types.Request`; or for what the agent returns, which is a future.

        What an agent that left had asked, and nobody has begun to answer, is left out.
        """
        while True:
            found = await self._waiting.get()
            if isinstance(found, asyncio.Future):
                return found
            if not found.left.is_set():
                self._current, found.first = found, len(self._said)
                return as_request(found.asked, self._said)
            self._left.remove(found)
            found.answer.cancel()

    def take(self, turn: Turn) -> Any:
        """Take a turn of the policy. What is still to be answered, if more are asked for; None: that was the last."""
        exchange = self._current
        assert exchange is not None
        if turn.stop_reason in ("length", "refused") and not turn.token_ids:
            self._answered(exchange)
            exchange.answer.set_exception(_why(turn))
            return None
        turn = cut(turn, exchange.asked.sampling.get("stop", ()))
        exchange.turns.append(turn)
        self._said.append(said_by(turn, len(self._said)))
        if len(exchange.turns) < exchange.asked.n:
            return as_request(exchange.asked, self._said)
        self._answered(exchange)
        exchange.answer.set_result((exchange.turns, exchange.first))
        return None

    def _answered(self, exchange: Exchange) -> None:
        self._current = None
        exchange.answer.add_done_callback(lambda future: future.cancelled() or future.exception())  # if nobody reads it

    def close(self, why: str) -> None:
        """End the episode: what is asked from now on, or waits, is told why."""
        self._closed = why
        waiting = [] if self._current is None else [self._current]
        while not self._waiting.empty():
            found = self._waiting.get_nowait()
            waiting += [found] if isinstance(found, Exchange) else []
        for exchange in waiting:
            if not exchange.answer.done():
                self._answered(exchange)
                exchange.answer.set_exception(Unusable(why, "session_closed", 410))


def _why(turn: Turn) -> Unusable:
    """Why a request is not answered."""
    if turn.stop_reason == "refused":
        return Unusable(turn.text)
    return Unusable(
        f"the request has {turn.prompt_tokens} tokens, which leaves no room for an answer in this model's maximum "
        "context length; ask something shorter",  # words that agents look for
        "context_length_exceeded",
    )
