"""Linear states of an environment: a call that is repeated is answered from memory, and never acts twice."""

import asyncio
import inspect
import reprlib
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import attrs

from nrl.envs.return_values import is_reset
from nrl.envs.types import TIMEOUT, Env, Environment, Step, Task, Turn, alike, declared_rewards, mapped
from nrl.errors import ArgumentError, ConsumedState, EnvError, ForeignState

__all__ = ["LinearState", "linear"]


class LinearState(NamedTuple):
    """The state of an episode, by name: `linear` knows what is behind it, and what became of it.

    Args:
        episode: unique, also among environments and processes.
        turn: how many turns came before, from 0.

    >>> LinearState("a4", 0)
    LinearState(episode='a4', turn=0)
    """

    episode: str
    turn: int


def linear(env: Env, *, remembered: int = 1000) -> Environment:
    """The environment whose states are linear: each is stepped from once, however often a call is repeated.

    - `step` with a state and the turn that consumed it gives the answer that it gave. While the first call is under
      way, the second one waits for it. So a call that is repeated, because its answer was lost, acts once.
    - `step` with a state and another turn raises. Turns are equal if all that they have is: text, token ids, stop
      reason, calls, what was malformed, reasoning.
    - A call that raised may have acted half-way, so it is not made again: the same turn raises the same exception
      again. A call that was interrupted (cancelled, or Ctrl-C) raises `EnvError` then. From there on an episode can
      only be closed.
    - `close` closes the episode with the newest of its states, whichever it is given, and does so once; after that it
      returns what it returned. It does not wait for a step that is under way.
    - `reset` begins another episode each time: a repeated one is not known by its task.

    The states themselves are names, a `LinearState` each, and may be pickled, compared, and used as keys. What is
    behind them, the environment's own states and the answers, stays in memory where `linear` was called. So call it
    where the environment runs: ``linear(remote)`` has the record here, and of a pickled ``linear(env)`` each process
    has a record of its own, which begins empty. An episode is kept until it is closed; of those that are closed, the
    last ``remembered``.

    Args:
        env: its functions are plain or ``async``, and stay so; they may be called from any thread and event loop.
        remembered: how many closed episodes are kept, for calls that are repeated late.

    Returns:
        An environment that always has a ``close``, and the verifier and timeout of ``env``.

    Raises:
        ConsumedState: (by `step`) the state was consumed by another turn, or the episode was closed.
        ForeignState: (by `step` and `close`) the episode did not begin here, or was closed long ago.
        ValueError: ``remembered`` is negative.

    >>> from nrl.envs import Environment, Step
    >>> acts = []
    >>> def step(state, turn):
    ...     acts.append(turn)
    ...     return Step(state + 1, done=False, observation=f"That was turn {state}.")
    >>> env = linear(Environment(lambda task: (1, task["prompt"]), step))
    >>> first, prompt = env.reset({"prompt": "Begin."})
    >>> env.step(first, "a") == env.step(first, "a"), acts
    (True, ['a'])
    >>> env.step(first, "b")
    Traceback (most recent call last):
        ...
    nrl.errors.ConsumedState: step: turn 0 of this episode was taken already, and this is another one (text: now 'b', \
before 'a'). Go on from the state that the first call returned, or reset for another episode
    """
    if remembered < 0:
        raise ArgumentError(f"linear: remembered is {remembered}; give how many closed episodes to keep, 0 or more")
    episodes = _Episodes(remembered)
    own_close: Callable[[Any], Any] | None = getattr(env, "close", None)

    def reset(task: Task) -> Any:
        return mapped(
            env.reset(task), lambda value: (episodes.begin(value[0]), *value[1:]) if is_reset(value) else value
        )

    def step(state: LinearState, turn: Turn) -> Any:
        act, first = episodes.turn(state, turn)
        if not first:
            return act.again()
        return act.made(lambda: env.step(act.state, turn), lambda found: episodes.stepped(state, found))

    def close(state: LinearState) -> Any:
        act, first = episodes.closing(state)
        if not first:
            return act.again()
        return act.made(lambda: None if own_close is None else own_close(act.state), lambda found: found)

    verifier, tasks = getattr(env, "verifier", None), getattr(env, "tasks", None)
    closes = close if own_close is None else alike(own_close, close)
    timeout = getattr(env, "timeout", TIMEOUT)
    check = getattr(env, "check_task", None)
    steps, num_rewards = alike(env.step, step), declared_rewards(env)
    return Environment(alike(env.reset, reset), steps, closes, verifier, timeout, tasks, check, num_rewards)


class _Act:
    """A call that is made once. Others wait for its plain part, and then for what is to be awaited, if it is."""

    def __init__(self, state: Any, turn: Turn | None = None) -> None:
        self.state, self.turn = state, turn
        self._later: Future[bool] = Future()
        self._rest: list[tuple[Any, Callable[[Any], Any]]] = []  # taken by whoever awaits it first
        self._outcome: Future[tuple[Any, BaseException | None]] = Future()
        self._outcome.set_running_or_notify_cancel()  # so that nobody who waits for it and is cancelled, cancels it

    def made(self, call: Callable[[], Any], change: Callable[[Any], Any]) -> Any:
        """Make the call. Its value may have to be awaited."""
        try:
            found = call()
            if inspect.isawaitable(found):
                self._rest.append((found, change))
                self._later.set_result(True)
                return self._awaited()
            value = change(found)
        except BaseException as error:
            self._failed(error)
            raise
        self._ended(value)
        return value

    def again(self) -> Any:
        """What came of the call, or will; its value may have to be awaited, as the call's own."""
        return self._awaited() if self._later.result() else _value(*self._outcome.result())

    async def _awaited(self) -> Any:
        try:
            found, change = self._rest.pop()
        except IndexError:
            return _value(*await asyncio.wrap_future(self._outcome))
        try:
            value = change(await found)
        except BaseException as error:
            self._failed(error)
            raise
        self._ended(value)
        return value

    def _failed(self, error: BaseException) -> None:
        if not isinstance(error, Exception | SystemExit):
            who, then = ("close", "see what it left behind") if self.turn is None else ("step", "close the episode")
            error = EnvError(
                f"{who}: the first call was interrupted ({type(error).__name__}) and may have acted half-way, so it is "
                f"not made again; {then}"
            )
        self._ended(None, error)

    def _ended(self, value: Any, error: BaseException | None = None) -> None:
        self.state = None  # which may be large
        self._outcome.set_result((value, error))
        if not self._later.done():
            self._later.set_result(False)


def _value(value: Any, error: BaseException | None) -> Any:
    if error is not None:
        raise error
    return value


@attrs.define
class _Episode:
    """The environment's newest state, its turn, and the acts that led to it."""

    state: Any
    turn: int = 0
    turns: list[_Act] = attrs.field(factory=list)
    closing: _Act | None = None


class _Episodes:
    """The episodes of an environment in this process, by name. A pickled one begins empty."""

    def __init__(self, remembered: int) -> None:
        self._remembered, self._lock = remembered, threading.Lock()
        self._open: dict[str, _Episode] = {}
        self._closed: dict[str, _Episode] = {}  # the oldest first

    def __reduce__(self) -> tuple[Any, ...]:
        return _Episodes, (self._remembered,)

    def begin(self, state: Any) -> LinearState:
        """The first state of a new episode."""
        name = uuid.uuid4().hex
        with self._lock:
            self._open[name] = _Episode(state)
        return LinearState(name, 0)

    def turn(self, state: LinearState, turn: str) -> tuple[_Act, bool]:
        """The act of a turn, and whether it has to be made."""
        taken = turn if isinstance(turn, Turn) else Turn(turn)
        with self._lock:
            episode = self._find("step", state)
            if state.turn < len(episode.turns):
                act = episode.turns[state.turn]
                _check_same(state, taken, act.turn)
                return act, False
            if episode.closing is not None:
                raise ConsumedState(
                    f"step: this episode was closed before turn {state.turn} was taken; reset for another episode"
                )
            act = _Act(episode.state, taken)
            episode.turns.append(act)
            return act, True

    def stepped(self, state: LinearState, found: Any) -> Any:
        """The answer of a turn, with the next state by name."""
        if not isinstance(found, Step):
            return found  # for its caller to complain about
        with self._lock:
            episode = self._known(state)
            if episode is not None:
                episode.turn = state.turn + 1
                episode.state = found.state if episode.closing is None else None
        return found._replace(state=LinearState(state.episode, state.turn + 1))

    def closing(self, state: LinearState) -> tuple[_Act, bool]:
        """The act that closes an episode, and whether it has to be made."""
        with self._lock:
            episode = self._find("close", state)
            if episode.closing is not None:
                return episode.closing, False
            act = episode.closing = _Act(episode.state)
            episode.state = None
            self._closed[state.episode] = self._open.pop(state.episode)
            while len(self._closed) > self._remembered:
                del self._closed[next(iter(self._closed))]
            return act, True

    def _find(self, who: str, state: LinearState) -> _Episode:
        if not isinstance(state, LinearState):
            raise ArgumentError(
                f"{who}: expected the state that reset or step of a linear environment returned, found "
                f"{type(state).__name__}"
            )
        episode = self._known(state)
        if episode is None or not 0 <= state.turn <= episode.turn:
            raise ForeignState(
                f"{who}: turn {state.turn} of episode {state.episode} is not known in this process. It began in "
                f"another process or environment, or was closed long ago (linear(..., remembered={self._remembered})); "
                "make all calls of an episode where its reset was called"
            )
        return episode

    def _known(self, state: LinearState) -> _Episode | None:
        return self._open.get(state.episode) or self._closed.get(state.episode)


def _check_same(state: LinearState, turn: Turn, taken: Turn | None) -> None:
    """See that a turn is the one that consumed the state."""
    for name in ("text", "token_ids", "stop_reason", "calls", "malformed", "reasoning"):
        now, before = getattr(turn, name), getattr(taken, name)
        if now != before:
            raise ConsumedState(
                f"step: turn {state.turn} of this episode was taken already, and this is another one ({name}: now "
                f"{reprlib.repr(now)}, before {reprlib.repr(before)}). Go on from the state that the first call "
                "returned, or reset for another episode"
            )
