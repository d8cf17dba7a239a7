"""The contract of environments and verifiers: the types that an episode is made of.

An environment is two functions, `reset` and `step`, each plain or ``async``. They keep nothing between calls except the
state that they pass on. A verifier is one function of a task and a response; `single_turn` makes an environment of it.
"""

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import EllipsisType
from typing import Any, Literal, NamedTuple, Protocol

from nrl.errors import EnvError

__all__ = [
    "TIMEOUT",
    "Env",
    "Environment",
    "Message",
    "Prompt",
    "Step",
    "Task",
    "Turn",
    "Verifier",
    "asynchronous",
    "by_source",
    "single_turn",
    "timeout_of",
]

TIMEOUT = 60.0
"""Seconds that a call of an environment or a verifier may take, unless it has a timeout of its own."""

type Message = dict[str, str]
"""One message of a chat: ``{"role": ..., "content": ...}``."""

type Prompt = str | Sequence[Message] | Sequence[int]
"""The question to a model: text, a chat, or token ids that are used as they are."""

type Task = Mapping[str, Any]
"""One row of data: ``"prompt"``, a `Prompt`, and the fields that the verifier reads, such as ``"answer"``."""

type Verifier = Callable[[Task, str], float | Sequence[float] | Awaitable[float | Sequence[float]]]
"""``(task, response) -> reward``, or several rewards; plain or ``async``. A failure is an exception, never a 0."""


class Turn(str):
    """What the model wrote in one turn, as `step` is given it: a text, which knows the tokens that were sampled.

    A test may give a plain text in its place.

    Args:
        text: without special tokens.
        token_ids: what was sampled, with the token that ended it; decode them where special tokens mean something.
        stop_reason: ``"stop"``, a token or text that ends a turn; ``"length"``, a limit.

    >>> turn = Turn("4", token_ids=[19, 2], stop_reason="stop")
    >>> turn == "4", int(turn), turn.token_ids
    (True, 4, (19, 2))
    """

    token_ids: tuple[int, ...]
    stop_reason: Literal["stop", "length"]

    def __new__(
        cls, text: str = "", token_ids: Sequence[int] = (), stop_reason: Literal["stop", "length"] = "stop"
    ) -> "Turn":
        """A turn of these."""
        made = super().__new__(cls, text)
        made.token_ids, made.stop_reason = tuple(token_ids), stop_reason
        return made

    @property
    def text(self) -> str:
        """The text alone."""
        return str.__str__(self)


class Step(NamedTuple):
    """The value of `step`.

    Args:
        state: for the next `step`.
        reward: of this turn; an episode's is the sum over its turns. Several rewards have the same number every turn.
        done: whether the episode ends here.
        observation: if not, the model's next input: text, or token ids.
        info: numbers to report, by name. Those of every step are kept.

    >>> Step(state=None, reward=1.0)
    Step(state=None, reward=1.0, done=True, observation=None, info={})
    """

    state: Any
    reward: float | Sequence[float] = 0.0
    done: bool = True
    observation: str | Sequence[int] | None = None
    info: Mapping[str, float] = {}


class Env(Protocol):
    """Anything with `reset` and `step`: an `Environment`, a module, an object. Each may be plain or ``async``.

    It may have a ``timeout``, too: the seconds that one call may take, None, or a function from the task to these.
    Without one it is a minute.

    >>> def play(env: Env, task: Task) -> Step:
    ...     state, prompt = env.reset(task)
    ...     return env.step(state, Turn(prompt.upper()))
    >>> play(single_turn(lambda task, response: float(response == "A")), {"prompt": "a"}).reward
    1.0
    """

    def reset(self, task: Task, /) -> tuple[Any, Prompt] | Awaitable[tuple[Any, Prompt]]:
        """The first state of an episode, and the prompt."""
        ...

    def step(self, state: Any, turn: Turn, /) -> Step | Awaitable[Step]:
        """Answer one turn of the model."""
        ...


class Environment(NamedTuple):
    """The two functions of an environment, as a value; it is an `Env`.

    Args:
        reset: ``task -> (state, prompt)``.
        step: ``(state, turn) -> Step``, of a `Turn`.
        timeout: seconds that one call of either may take, or a function from the task to these; None: no limit. A
            call that takes longer makes its row invalid, as an error does.

    Guess a number; the state is the number and how many turns are left.

    >>> def reset(task):
    ...     return (task["number"], 3), "Guess a number."
    >>> def step(state, turn):
    ...     number, left = state
    ...     if int(turn) == number or left == 1:
    ...         return Step(state, reward=float(int(turn) == number))
    ...     return Step((number, left - 1), done=False, observation="less" if number < int(turn) else "more")
    >>> guess = Environment(reset, step)
    >>> state, prompt = guess.reset({"number": 7})
    >>> state, reward, done, observation, info = guess.step(state, "9")
    >>> done, observation, guess.step(state, "7").reward
    (False, 'less', 1.0)
    """

    reset: Callable[[Task], tuple[Any, Prompt] | Awaitable[tuple[Any, Prompt]]]
    step: Callable[[Any, Any], Step | Awaitable[Step]]
    timeout: float | Callable[[Task], float | None] | None = TIMEOUT


def timeout_of(env: Env, task: Task) -> float | None:
    """Seconds that a call of an environment may take for a task; None: no limit.

    Raises:
        ValueError: they are not positive.
    """
    timeout = getattr(env, "timeout", TIMEOUT)
    seconds: float | None = timeout(task) if callable(timeout) else timeout
    if seconds is not None and not seconds > 0:
        raise ValueError(f"rollout: the environment's timeout is {seconds}; give seconds, or None for no limit")
    return seconds


def asynchronous(fn: Any) -> bool:
    """Whether a call only makes a coroutine."""
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(type(fn), "__call__", None))  # noqa: B004


def single_turn(verifier: Verifier, *, timeout: float | EllipsisType | None = ...) -> Environment:
    """The environment that asks a task's prompt, and rewards the answer with the verifier's number.

    Args:
        verifier: plain or ``async``; `step` is of the same kind.
        timeout: seconds that one call of it may take; None: no limit. Left out, the verifier's attribute ``timeout``,
            or a minute if it has none.

    Returns:
        An environment whose state is the task.

    Raises:
        EnvError: by `reset`, if a task has no ``"prompt"``.

    >>> env = single_turn(lambda task, response: float(response == task["answer"]))
    >>> state, prompt = env.reset({"prompt": "2+2=", "answer": "4"})
    >>> prompt, env.step(state, "4").reward
    ('2+2=', 1.0)
    """

    def reset(task: Task) -> tuple[Task, Prompt]:
        if "prompt" not in task:
            raise EnvError(
                f"single_turn: the task has no 'prompt', only {', '.join(map(repr, task)) or 'nothing'}; "
                "name the column that holds what the model is asked 'prompt'"
            )
        return task, task["prompt"]

    names = functools.wraps(verifier, assigned=(), updated=())  # so that messages name the verifier

    @names
    def step(state: Task, turn: Turn) -> Step | Awaitable[Step]:
        reward: Any = verifier(state, turn)
        return _later(state, reward) if inspect.isawaitable(reward) else Step(state, reward)

    @names
    async def later(state: Task, turn: Turn) -> Step:
        return await _later(state, verifier(state, turn))  # type: ignore[arg-type]

    seconds = getattr(verifier, "timeout", TIMEOUT) if isinstance(timeout, EllipsisType) else timeout
    return Environment(reset, later if asynchronous(verifier) else step, seconds)


def by_source(*envs: Env) -> Environment:
    """Choose the environment of each task by the task's ``"source"``, its place among the arguments.

    Args:
        envs: in the order of the streams that `nrl.data.mixture` mixes.

    Returns:
        An environment whose state is the place and the chosen environment's own state. Each keeps its own timeout.

    Raises:
        EnvError: by `reset`, if a task has no ``"source"``, or one without an environment.

    >>> sums, letters = (single_turn(lambda task, response, x=x: x) for x in (1.0, 2.0))
    >>> env = by_source(sums, letters)
    >>> state, prompt = env.reset({"prompt": "b", "source": 1})
    >>> prompt, env.step(state, "B").reward
    ('b', 2.0)
    """

    def reset(task: Task) -> Any:
        source = task.get("source")
        if not isinstance(source, int) or not 0 <= source < len(envs):
            raise EnvError(
                f"by_source: the task has the source {source!r}, and there are {len(envs)} environments; mix tasks "
                "with nrl.data.mixture, in the order of the environments"
            )
        found: Any = envs[source].reset(task)
        return _begun(source, found) if inspect.isawaitable(found) else ((source, found[0]), found[1])

    def step(state: tuple[int, Any], turn: Turn) -> Any:
        source, own = state
        found: Any = envs[source].step(own, turn)
        return _stepped(source, found) if inspect.isawaitable(found) else found._replace(state=(source, found.state))

    def timeout(task: Task) -> float | None:
        source = task.get("source")
        if not isinstance(source, int) or not 0 <= source < len(envs):
            return TIMEOUT  # `reset` reports it
        return timeout_of(envs[source], task)

    reset.__name__, step.__name__ = "an environment's reset", "an environment's step"
    return Environment(reset, step, timeout)


async def _begun(source: int, found: Awaitable[tuple[Any, Prompt]]) -> tuple[tuple[int, Any], Prompt]:
    state, prompt = await found
    return (source, state), prompt


async def _stepped(source: int, found: Awaitable[Step]) -> Step:
    taken = await found
    return taken._replace(state=(source, taken.state))


async def _later(state: Task, reward: Awaitable[float | Sequence[float]]) -> Step:
    return Step(state, await reward)
