"""Environments and verifiers: what an episode is made of.

An environment is two functions over explicit state, `reset` and `step`, each plain or ``async``; nothing is kept
between calls but the state that they hand on. A verifier is one function of a task and a response. `single_turn` makes
the first of the second.
"""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from nrl.errors import EnvError

__all__ = ["Env", "Environment", "Message", "Prompt", "Step", "Task", "Verifier", "single_turn"]

type Message = dict[str, str]
"""One message of a chat: ``{"role": ..., "content": ...}``."""

type Prompt = str | Sequence[Message] | Sequence[int]
"""What a model is asked: text, a chat, or token ids that are used as they are."""

type Task = Mapping[str, Any]
"""One row of data: ``"prompt"``, a `Prompt`, and whatever the verifier reads, such as ``"answer"``."""

type Verifier = Callable[[Task, str], float | Sequence[float] | Awaitable[float | Sequence[float]]]
"""``(task, response) -> reward``, or several rewards; plain or ``async``. A failure is an exception, never a 0."""


class Step(NamedTuple):
    """What `step` returns.

    Args:
        state: what the next `step` is given.
        reward: of this turn; an episode's is the sum over its turns. Several rewards have the same number every turn.
        done: whether the episode ends here.
        observation: if not, what the model reads next: text, or token ids.
        info: numbers to report, by name.

    >>> Step(state=None, reward=1.0)
    Step(state=None, reward=1.0, done=True, observation=None, info={})
    """

    state: Any
    reward: float | Sequence[float] = 0.0
    done: bool = True
    observation: str | Sequence[int] | None = None
    info: Mapping[str, float] = {}


class Env(Protocol):
    """Whatever has `reset` and `step`: an `Environment`, a module, an object; each may be plain or ``async``.

    >>> def play(env: Env, task: Task) -> Step:
    ...     state, prompt = env.reset(task)
    ...     return env.step(state, prompt.upper())
    >>> play(single_turn(lambda task, response: float(response == "A")), {"prompt": "a"}).reward
    1.0
    """

    def reset(self, task: Task, /) -> tuple[Any, Prompt] | Awaitable[tuple[Any, Prompt]]:
        """The state an episode starts from, and what the model is asked."""
        ...

    def step(self, state: Any, action: str, /) -> Step | Awaitable[Step]:
        """One turn: ``action`` is the decoded text that the model wrote, without special tokens."""
        ...


class Environment(NamedTuple):
    """The two functions of an environment, as a value; it is an `Env`.

    Args:
        reset: ``task -> (state, prompt)``.
        step: ``(state, action) -> Step``.

    Guess a number; the state is the number and how many turns are left.

    >>> def reset(task):
    ...     return (task["number"], 3), "Guess a number."
    >>> def step(state, action):
    ...     number, left = state
    ...     if int(action) == number or left == 1:
    ...         return Step(state, reward=float(int(action) == number))
    ...     return Step((number, left - 1), done=False, observation="less" if number < int(action) else "more")
    >>> guess = Environment(reset, step)
    >>> state, prompt = guess.reset({"number": 7})
    >>> state, reward, done, observation, info = guess.step(state, "9")
    >>> done, observation, guess.step(state, "7").reward
    (False, 'less', 1.0)
    """

    reset: Callable[[Task], tuple[Any, Prompt] | Awaitable[tuple[Any, Prompt]]]
    step: Callable[[Any, str], Step | Awaitable[Step]]


def single_turn(verifier: Verifier) -> Environment:
    """The environment that asks a task's prompt, and ends with what the verifier says of the answer.

    Args:
        verifier: plain or ``async``; `step` is what it is.

    Returns:
        An environment whose state is the task.

    Raises:
        EnvError: by `reset`, where a task has no ``"prompt"``.

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

    def step(state: Task, action: str) -> Step | Awaitable[Step]:
        reward: Any = verifier(state, action)
        return _later(state, reward) if inspect.isawaitable(reward) else Step(state, reward)

    return Environment(reset, step)


async def _later(state: Task, reward: Awaitable[float | Sequence[float]]) -> Step:
    return Step(state, await reward)
