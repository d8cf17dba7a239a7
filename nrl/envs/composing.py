"""Environments and verifiers made of others: one turn and a verdict, a verifier's last word, sums, gates, products."""

import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from types import EllipsisType
from typing import Any

from nrl.envs.contract import (
    TIMEOUT,
    Env,
    Environment,
    Prompt,
    Score,
    Step,
    Task,
    Trace,
    Turn,
    Verdict,
    Verifier,
    asynchronous,
    judges_group,
    mapped,
    score_of,
    timeout_of,
)
from nrl.errors import EnvError

__all__ = ["by_source", "gated", "judged", "of_group", "product", "single_turn", "weighted"]


def single_turn(verifier: Verifier, *, timeout: float | EllipsisType | None = ...) -> Environment:
    """The environment that asks a task's prompt, and rewards the answer with the verifier's verdict.

    Args:
        verifier: plain or ``async``; `step` is of the same kind.
        timeout: seconds that one call of it may take; None: no limit. Left out, the verifier's attribute ``timeout``,
            or a minute if it has none.

    Returns:
        An environment whose state is the task.

    Raises:
        EnvError: by `reset`, if a task has no ``"prompt"``.

    >>> env = single_turn(lambda task, trace: float(trace.text == task["answer"]))
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

    own = getattr(verifier, "tasks", None)
    if getattr(verifier, "of_group", False):  # which has to wait for the others
        seconds = TIMEOUT if isinstance(timeout, EllipsisType) else timeout
        return Environment(reset, lambda task, turn: Step(task), None, verifier, seconds, own)
    names = functools.wraps(verifier, assigned=(), updated=())  # so that messages name the verifier

    @names
    def step(state: Task, turn: Turn) -> Step | Awaitable[Step]:
        reward: Any = verifier(state, _answer(state, turn))
        return _later(state, reward) if inspect.isawaitable(reward) else Step(state, reward)

    @names
    async def later(state: Task, turn: Turn) -> Step:
        return await _later(state, verifier(state, _answer(state, turn)))  # type: ignore[arg-type]

    seconds = getattr(verifier, "timeout", TIMEOUT) if isinstance(timeout, EllipsisType) else timeout
    return Environment(reset, later if asynchronous(verifier) else step, timeout=seconds, tasks=own)


def _answer(task: Task, turn: str) -> Trace:
    return Trace(task.get("prompt", ""), (turn,), truncated=getattr(turn, "stop_reason", "stop") == "length")


def judged(env: Env, verifier: Verifier) -> Environment:
    """An environment on whose episodes a verifier has the last word: its reward is added to those of the steps.

    Args:
        env: the environment.
        verifier: plain or ``async``; called once an episode, also where a limit ended it.

    >>> def reset(task):
    ...     return 0, task["prompt"]
    >>> def step(state, turn):
    ...     return Step(state + 1, done=state == 1, observation="Go on.")
    >>> env = judged(Environment(reset, step), lambda task, trace: {"turns": len(trace.turns)})
    >>> env.verifier({}, Trace("a", ["b", "c"]))
    {'turns': 2}
    """
    close, timeout = getattr(env, "close", None), getattr(env, "timeout", TIMEOUT)
    return Environment(env.reset, env.step, close, verifier, timeout, getattr(env, "tasks", None))


def by_source(*envs: Env) -> Environment:
    """Choose the environment of each task by the task's ``"source"``, its place among the arguments.

    Args:
        envs: in the order of the streams that `nrl.data.mixture` mixes.

    Returns:
        An environment whose state is the place and the chosen environment's own state. Each keeps its own timeout,
        verifier and `close`.

    Raises:
        EnvError: by `reset`, if a task has no ``"source"``, or one without an environment.

    >>> sums, letters = (single_turn(lambda task, trace, x=x: x) for x in (1.0, 2.0))
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
        return mapped(envs[source].reset(task), lambda found: ((source, found[0]), *found[1:]))

    def step(state: tuple[int, Any], turn: Turn) -> Any:
        source, own = state
        return mapped(envs[source].step(own, turn), lambda found: found._replace(state=(source, found.state)))

    def close(state: tuple[int, Any]) -> Any:
        source, own = state
        return ending(own) if (ending := getattr(envs[source], "close", None)) else None

    def own_verifier(task: Task) -> Any:
        return getattr(envs[task["source"]], "verifier", None)

    def verifier(task: Task, trace: Any) -> Any:  # or the traces of a group
        own = own_verifier(task)
        return own(task, trace) if own else 0.0

    verifier.of_group = lambda task: judges_group(own_verifier(task), task)  # type: ignore[attr-defined]

    def timeout(task: Task) -> float | None:
        source = task.get("source")
        if not isinstance(source, int) or not 0 <= source < len(envs):
            return TIMEOUT  # `reset` reports it
        return timeout_of(envs[source], task)

    reset.__name__, step.__name__, close.__name__ = (f"an environment's {name}" for name in ("reset", "step", "close"))
    closes = any(getattr(env, "close", None) for env in envs)
    verifies = any(getattr(env, "verifier", None) for env in envs)
    return Environment(reset, step, close if closes else None, verifier if verifies else None, timeout)


async def _later(state: Task, reward: Awaitable[Verdict]) -> Step:
    return Step(state, await reward)


def of_group(verifier: Callable[[Task, Sequence[Trace]], Any]) -> Verifier:
    """A verifier that is asked once for all episodes of a group, such as one that compares them.

    Args:
        verifier: ``(task, traces) -> verdicts``, as many as traces, plain or ``async``. Episodes that failed are left
            out. If it fails, all rows of the group do.

    >>> longest = of_group(lambda task, traces: [len(x.text) == max(len(y.text) for y in traces) for x in traces])
    >>> env = single_turn(longest)
    """
    made: Any = functools.wraps(verifier)(lambda task, traces: verifier(task, traces))
    if asynchronous(verifier):

        @functools.wraps(verifier)
        async def made(task: Task, traces: Any) -> Any:
            return await verifier(task, traces)

    made.of_group = True
    return made  # type: ignore[no-any-return]


def weighted(**parts: tuple[float, Verifier]) -> Verifier:
    """The sum of several verdicts, each times its weight; the parts are reported by name.

    Args:
        **parts: ``name=(weight, verifier)``; of each verifier the reward is one number. The first status that is not
            ``"ok"`` is that of the whole.

    >>> verify = weighted(right=(1.0, lambda task, trace: trace.text == "4"), short=(0.5, lambda task, trace: 1.0))
    >>> verify({}, Trace("2+2=", ["4"]))
    Score(reward=1.5, status='ok', components={'right': 1.0, 'short': 1.0})
    """
    weights = [weight for weight, _ in parts.values()]

    def combine(scores: Sequence[Score]) -> Score:
        rewards = [_number(score) for score in scores]
        total = sum(weight * reward for weight, reward in zip(weights, rewards, strict=True))
        return Score(total, _status(scores), dict(zip(parts, rewards, strict=True)))

    return _combined([verifier for _, verifier in parts.values()], combine)


def product(**parts: Verifier) -> Verifier:
    """The product of several verdicts; the parts are reported by name, and statuses are as in `weighted`.

    >>> verify = product(right=lambda task, trace: 1.0, short=lambda task, trace: 0.5)
    >>> verify({}, Trace("2+2=", ["4"])).reward
    0.5
    """

    def combine(scores: Sequence[Score]) -> Score:
        rewards = [_number(score) for score in scores]
        return Score(math.prod(rewards), _status(scores), dict(zip(parts, rewards, strict=True)))

    return _combined(list(parts.values()), combine)


def gated(gate: Verifier, verifier: Verifier, otherwise: float = 0.0) -> Verifier:
    """A verdict that only counts where another one is above 0; where it is not, the verifier is not asked.

    Args:
        gate: such as a check of the format.
        verifier: asked where the gate's reward is above 0.
        otherwise: the reward elsewhere.

    >>> verify = gated(lambda task, trace: "4" in trace.text, lambda task, trace: 2.0)
    >>> verify({}, Trace("2+2=", ["5"])).reward, verify({}, Trace("2+2=", ["4"])).reward
    (0.0, 2.0)
    """

    def shut(first: Score) -> Score | None:
        if _status([first]) not in ("ok", "parse_fail"):
            return first
        return None if _number(first) > 0 else Score(otherwise, first.status, first.components)

    def verify(task: Task, trace: Trace) -> Any:
        first: Any = gate(task, trace)
        if inspect.isawaitable(first):
            return later(task, trace, first)
        closed = shut(score_of(first))
        if closed is not None:
            return closed
        found: Any = verifier(task, trace)
        return _scored(found) if inspect.isawaitable(found) else score_of(found)

    async def later(task: Task, trace: Trace, first: Any) -> Score:
        closed = shut(await _scored(first))
        return await _scored(verifier(task, trace)) if closed is None else closed

    async def always_later(task: Task, trace: Trace) -> Score:
        return await later(task, trace, gate(task, trace))

    return always_later if asynchronous(gate) or asynchronous(verifier) else verify


def _combined(verifiers: Sequence[Verifier], combine: Callable[[Sequence[Score]], Score]) -> Verifier:
    """One verifier of several; ``async`` if one of them is."""

    async def combined(found: Sequence[Any]) -> Score:
        return combine([await _scored(each) for each in found])

    def verify(task: Task, trace: Trace) -> Any:
        found: list[Any] = [verifier(task, trace) for verifier in verifiers]
        return combined(found) if any(map(inspect.isawaitable, found)) else combine([score_of(each) for each in found])

    async def later(task: Task, trace: Trace) -> Score:
        return await combined([verifier(task, trace) for verifier in verifiers])

    return later if any(asynchronous(verifier) for verifier in verifiers) else verify


async def _scored(found: Any) -> Score:
    """A verdict in full, of one that may be awaited."""
    return score_of(await found if inspect.isawaitable(found) else found)


def _number(score: Score) -> float:
    if isinstance(score.reward, Sequence):
        raise EnvError(f"a verifier gave the rewards {score.reward}; where verdicts are combined, each is one number")
    return float(score.reward)


def _status(scores: Sequence[Score]) -> Any:
    return next((score.status for score in scores if score.status != "ok"), "ok")
