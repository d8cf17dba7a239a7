"""Environments and verifiers made of others: one turn and a verdict, a verifier's last word, sums, gates, products."""

import asyncio
import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from types import EllipsisType
from typing import Any

from nrl.arguments import checked
from nrl.envs.references import TaskCheck, task_check
from nrl.envs.return_values import is_reset, score_of, verdicts_of
from nrl.envs.types import (
    TIMEOUT,
    Env,
    Environment,
    FailedScore,
    Prompt,
    Score,
    Step,
    Task,
    Trace,
    Turn,
    Verdict,
    Verifier,
    asynchronous,
    declared_rewards,
    judges_group,
    mapped,
    settled,
    timeout_of,
)
from nrl.errors import ArgumentError, EnvError

__all__ = ["by_source", "gated", "judged", "of_group", "product", "single_turn", "weighted"]


@checked("single_turn", finite=False)
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

    >>> env = single_turn(lambda task, trace: float(trace.answer == task["answer"]))
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
    return Environment(
        reset,
        later if asynchronous(verifier) else step,
        timeout=seconds,
        tasks=own,
        check_task=task_check(verifier),
        num_rewards=declared_rewards(verifier),
    )


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
    tasks, check = getattr(env, "tasks", None), _first_fault([env, verifier])
    declared = declared_rewards(verifier)
    num_rewards = declared_rewards(env) if declared is None else declared
    return Environment(env.reset, env.step, close, verifier, timeout, tasks, check, num_rewards)


def by_source(*envs: Env) -> Environment:
    """Choose the environment of each task by the task's ``"source"``, its place among the arguments.

    Args:
        envs: in the order of the streams that `nrl.data.mixture` mixes.

    Returns:
        An environment whose state is the place and the chosen environment's own state. Each keeps its own timeout,
        verifier and `close`.

    Raises:
        EnvError: by `reset`, if a task has no ``"source"``, or one without an environment.
        ArgumentError: an environment's timeout is no positive number, or two environments declare different numbers
            of rewards.

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
        return mapped(
            envs[source].reset(task),
            lambda value: ((source, value[0]), *value[1:]) if is_reset(value) else value,
        )

    def step(state: tuple[int, Any], turn: Turn) -> Any:
        source, own = state
        return mapped(
            envs[source].step(own, turn),
            lambda value: value._replace(state=(source, value.state)) if isinstance(value, Step) else value,
        )

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

    for env in envs:
        if not callable(getattr(env, "timeout", None)):
            timeout_of(env, {})
    reset.__name__, step.__name__, close.__name__ = (f"an environment's {name}" for name in ("reset", "step", "close"))
    closes = any(getattr(env, "close", None) for env in envs)
    verifies = any(getattr(env, "verifier", None) for env in envs)
    checks = [task_check(env) for env in envs]

    def check_task(task: Task) -> Any:
        check = checks[task["source"]]
        return None if check is None else check(task)

    declared = {place: number for place, env in enumerate(envs) if (number := declared_rewards(env)) is not None}
    if len(set(declared.values())) > 1:
        numbers = ", ".join(f"{number} (environment {place})" for place, number in declared.items())
        raise ArgumentError(
            f"by_source: the environments declare different num_rewards: {numbers}; rows of a batch have as many "
            "rewards, so give all environments as many"
        )
    num_rewards = next(iter(declared.values()), None)
    found = Environment(reset, step, close if closes else None, verifier if verifies else None, timeout)
    return found._replace(check_task=check_task if any(checks) else None, num_rewards=num_rewards)


async def _later(state: Task, reward: Awaitable[Verdict]) -> Step:
    return Step(state, await reward)


def of_group(verifier: Callable[[Task, Sequence[Trace]], Any]) -> Verifier:
    """A verifier that is asked once for all episodes of a group, such as one that compares them.

    Args:
        verifier: ``(task, traces) -> verdicts``, as many as traces, plain or ``async``. Episodes that failed are left
            out. If it fails, all rows of the group do. `weighted`, `product` and `gated` take it as a part; then they
            judge groups themselves.

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
            ``"ok"`` is that of the whole. Where one judges groups (`of_group`), so does the sum: that part is given
            all traces, the others each trace; a part that fails for one trace fails its row alone.

    >>> verify = weighted(right=(1.0, lambda task, trace: trace.answer == "4"), short=(0.5, lambda task, trace: 1.0))
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
    """The product of several verdicts; the parts are reported by name; statuses and groups are as in `weighted`.

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

    Groups are as in `weighted`; a verifier of groups is given those traces for which the gate is open.

    Args:
        gate: such as a check of the format.
        verifier: asked where the gate's reward is above 0.
        otherwise: the reward elsewhere.

    >>> verify = gated(lambda task, trace: "4" in trace.answer, lambda task, trace: 2.0)
    >>> verify({}, Trace("2+2=", ["5"])).reward, verify({}, Trace("2+2=", ["4"])).reward
    (0.0, 2.0)
    """

    def shut(first: Score) -> Score | None:
        if _status([first]) not in ("ok", "parse_fail"):
            return first
        return None if _number(first) > 0 else Score(otherwise, first.status, first.components)

    def one(task: Task, trace: Trace) -> Any:
        return mapped(gate(task, trace), lambda first: rest(task, trace, score_of(first)))

    def rest(task: Task, trace: Trace, first: Score) -> Any:
        closed = shut(first)
        return mapped(verifier(task, trace), score_of) if closed is None else closed

    def group(task: Task, traces: Sequence[Trace]) -> Any:
        return mapped(_each(gate, task, traces), lambda firsts: rests(task, traces, firsts))

    def rests(task: Task, traces: Sequence[Trace], firsts: Sequence[Score]) -> Any:
        closed = [_kept(shut, first) for first in firsts]
        passed = [trace for trace, each in zip(traces, closed, strict=True) if each is None]

        def filled(found: Sequence[Score]) -> list[Score]:
            verdicts = iter(found)
            return [next(verdicts) if each is None else each for each in closed]

        return mapped(_each(verifier, task, passed), filled) if passed else closed

    made: Any = _composed([gate, verifier], one, group)
    made.num_rewards = declared_rewards(verifier)
    return made  # type: ignore[no-any-return]


def _combined(verifiers: Sequence[Verifier], combine: Callable[[Sequence[Score]], Score]) -> Verifier:
    """One verifier of several."""

    async def combined(found: Sequence[Any]) -> Score:
        return combine([await _scored(each) for each in found])

    def one(task: Task, trace: Trace) -> Any:
        found: list[Any] = [verifier(task, trace) for verifier in verifiers]
        return combined(found) if any(map(inspect.isawaitable, found)) else combine([score_of(each) for each in found])

    def row(scores: Sequence[Score]) -> Score:
        bad = next((score for score in scores if isinstance(score, FailedScore)), None)
        return combine(scores) if bad is None else bad

    def rows(found: Sequence[Sequence[Score]]) -> list[Score]:
        return [_kept(row, scores) for scores in zip(*found, strict=True)]

    def group(task: Task, traces: Sequence[Trace]) -> Any:
        return mapped(_together([_each(verifier, task, traces) for verifier in verifiers]), rows)

    return _composed(verifiers, one, group)


def _composed(parts: Sequence[Verifier], one: Callable[..., Any], group: Callable[..., Any]) -> Verifier:
    """A verifier made of parts: ``async`` if one of them is, and of groups where one of them is.

    Args:
        parts: the verifiers.
        one: judges a trace.
        group: judges all traces of a task, where a part does.
    """
    every = [getattr(part, "of_group", False) for part in parts]

    def verify(task: Task, given: Any) -> Any:
        return one(task, given) if isinstance(given, Trace) or not any(every) else group(task, given)

    async def later(task: Task, given: Any) -> Any:
        return await settled(verify(task, given))

    made: Any = later if any(map(asynchronous, parts)) else verify
    if any(each and not callable(each) for each in every):
        made.of_group = True
    elif any(every):  # it depends on the task
        made.of_group = lambda task: any(judges_group(part, task) for part in parts)
    if forgetting := [part.forget for part in parts if hasattr(part, "forget")]:
        made.forget = lambda: _together([forget() for forget in forgetting])
    if check := _first_fault(parts):
        made.check_task = check
    return made  # type: ignore[no-any-return]


def _first_fault(parts: Sequence[Any]) -> TaskCheck | None:
    """Return the check that finds what the first of several parts finds; None: none of them has a check."""
    checks = [check for part in parts if (check := task_check(part)) is not None]
    if not checks:
        return None

    def check_task(task: Task) -> Any:
        return mapped(_together([check(task) for check in checks]), lambda found: next(filter(None, found), None))

    return check_task


def _each(part: Any, task: Task, traces: Sequence[Trace]) -> Any:
    """A part's verdicts on these traces, or an awaitable of them. It raises nothing: what fails is a `FailedScore`."""
    if not judges_group(part, task):
        return _together([_tried(functools.partial(part, task, trace), score_of, FailedScore.of) for trace in traces])

    def counted(found: Any) -> list[Score]:
        return [_kept(score_of, verdict) for verdict in verdicts_of(found, len(traces))]

    return _tried(lambda: part(task, traces), counted, lambda error: [FailedScore.of(error)] * len(traces))


def _tried(ask: Callable[[], Any], read: Callable[[Any], Any], instead: Callable[[Exception], Any]) -> Any:
    """What is read of an answer, or what stands for the error; of one that is awaited, an awaitable."""

    async def later(found: Awaitable[Any]) -> Any:
        try:
            return read(await found)
        except Exception as error:
            return instead(error)

    try:
        found = ask()
        return later(found) if inspect.isawaitable(found) else read(found)
    except Exception as error:
        return instead(error)


def _kept(read: Callable[[Any], Any], given: Any) -> Any:
    """What is read, or the error in its place, so that others are not lost with it."""
    return _tried(lambda: given, read, FailedScore.of)


def _together(found: Sequence[Any]) -> Any:
    """A list of values; an awaitable of it, if some have to be awaited, which wait side by side."""

    async def later() -> list[Any]:
        return list(await asyncio.gather(*map(settled, found)))

    return later() if any(map(inspect.isawaitable, found)) else list(found)


async def _scored(found: Any) -> Score:
    """A verdict in full, of one that may be awaited."""
    return score_of(await found if inspect.isawaitable(found) else found)


def _number(score: Score) -> float:
    if isinstance(score.reward, Sequence):
        raise EnvError(f"a verifier gave the rewards {score.reward}; where verdicts are combined, each is one number")
    return float(score.reward)


def _status(scores: Sequence[Score]) -> Any:
    return next((score.status for score in scores if score.status != "ok"), "ok")
