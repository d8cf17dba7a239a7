"""Verify again what was sampled before: a verifier, and stored samples in place of a policy."""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import attrs
import torch

from nrl.envs import Env, Environment, Task, Verifier, extractor
from nrl.envs.inprocess.call_with_timeout import Caller, calling
from nrl.envs.return_values import verdicts_of
from nrl.envs.types import TIMEOUT, Turn, is_env, judges_group
from nrl.errors import EnvError
from nrl.rollout.episode import Episode, earn, failed
from nrl.rollout.evaluate import Graded, failures_of, fields_of
from nrl.rollout.scheduler import hashed

__all__ = ["is_asked_again", "regrade"]


def regrade(
    judges: Sequence[Verifier | Env],
    tasks: Sequence[Task],
    graded: Sequence[Graded],
    *,
    seed: int = 0,
    first_group: int = 0,
) -> list[Graded]:
    """Give samples the rewards of other verifiers. A verifier of groups is asked once a task.

    Of a sample without a reward only the verifier may be asked again: where nothing was sampled, or an environment's
    episode failed, it stays without one.

    Args:
        judges: verifiers, or environments that have one, whose reward alone counts; of several the one that is at the
            task's ``source``.
        tasks: of the samples, in their order.
        graded: from `nrl.grade`.
        seed: as for `nrl.grade`; the task's ``"seed"`` depends on it.
        first_group: the number of the first task.

    Raises:
        EnvError: an environment has no verifier.

    >>> old = Graded("1+1=", "2", ["2", "3"], [1.0, 0.0], None, [1, 1], [False, False])
    >>> regrade([lambda task, trace: float(trace.text)], [{"prompt": "1+1="}], [old])[0].rewards
    [2.0, 3.0]
    """
    envs = [_judging(each) for each in judges]
    episodes = asyncio.run(_judged(envs, tasks, graded, seed, first_group))
    names = sorted({name for some in episodes for each in some for name in each.components})
    alone: Any = judges[0] if len(judges) == 1 and not is_env(judges[0]) else None
    extract = None if alone is None else extractor(alone)

    def again(task: Task, old: Graded, some: Sequence[Episode]) -> Graded:
        numbers = {name: values for name, values in old.numbers.items() if not name.startswith("reward/")}
        for name in names:
            numbers[f"reward/{name}"] = [
                _float32(each.components[name]) if each.counts and name in each.components else None for each in some
            ]
        return attrs.evolve(
            old,
            answer=task.get("answer"),
            rewards=[_float32(each.reward) if each.counts else None for each in some],
            answers=None if extract is None else [extract(each.trace.answer) for each in some],
            numbers=dict(sorted(numbers.items())),
            statuses=None if old.statuses is None else [each.status for each in some],
            failures=failures_of(some),
            fields=fields_of(task),
        )

    return [again(task, old, some) for task, old, some in zip(tasks, graded, episodes, strict=True)]


def _judging(judge: Any) -> Env:
    """An environment that is asked for its verifier and its timeout alone."""
    if not is_env(judge):
        seconds = TIMEOUT if getattr(judge, "of_group", False) else getattr(judge, "timeout", TIMEOUT)
        return Environment(lambda task: (task, ""), lambda state, turn: state, None, judge, seconds)
    if getattr(judge, "verifier", None) is None:
        raise EnvError(
            "rescore: the environment has no verifier, its steps give the reward; play it again with a model, or give "
            "a verifier as env="
        )
    return judge


async def _judged(
    envs: Sequence[Env], tasks: Sequence[Task], graded: Sequence[Graded], seed: int, first_group: int
) -> list[list[Episode]]:
    with ExitStack() as stack:
        callers = [stack.enter_context(calling(env)) for env in envs]

        async def judged(number: int, task: Any, old: Graded) -> list[Episode]:
            task = task.copy()
            task.setdefault("seed", hashed(seed, number))
            own = task.get("source", 0) if len(envs) > 1 else 0
            episodes = [_episode(task, old, place) for place in range(len(old.samples))]
            verifier: Any = envs[own].verifier  # type: ignore[attr-defined]
            live = [each for each in episodes if each.counts]
            if judges_group(verifier, task):
                await _judge(live, verifier, callers[own](task), task, True)
            else:
                await asyncio.gather(*(_judge([each], verifier, callers[own](task), task, False) for each in live))
            return episodes

        return await asyncio.gather(
            *(judged(number, *each) for number, each in enumerate(zip(tasks, graded, strict=True), first_group))
        )


async def _judge(episodes: Sequence[Episode], verifier: Any, call: Caller, task: Any, group: bool) -> None:
    if not episodes:
        return
    try:
        traces = [each.trace for each in episodes]
        found = await call(verifier, task.copy(), traces if group else traces[0])
        verdicts = verdicts_of(found, len(episodes)) if group else [found]
    except Exception as error:
        for episode in episodes:
            failed(error, episode)
    else:
        for episode, verdict in zip(episodes, verdicts, strict=True):
            earn(episode, verdict)


def _episode(task: Task, old: Graded, place: int) -> Episode:
    reply: Any = old.replies[place] if old.replies else {}
    if old.traces:
        stored = old.traces[place]
        turns = [Turn(text) for text in stored["turns"]]
        turns[-1:] = [Turn(turn, **reply) for turn in turns[-1:]]
        observations = list(stored["observations"])
        episode = Episode(prompt=stored["prompt"], turns=turns, observations=observations)
    else:
        stop: Any = "length" if old.truncated[place] else "stop"
        turn = Turn(old.samples[place], stop_reason=stop, **reply)
        episode = Episode(prompt=task.get("prompt", ""), turns=[turn])
    episode.truncated = old.truncated[place]
    if not is_asked_again(old, place):
        known = (old.failures[place] if old.failures else None) or {}
        episode.fail(known.get("error", "nothing was sampled"), known.get("status", "infra_error"))  # type: ignore[arg-type]
    return episode


def is_asked_again(old: Graded, place: int) -> bool:
    """Whether there is something to verify in a sample: it was sampled, and its episode did not fail."""
    return old.rewards[place] is not None or (old.statuses is None and old.lengths[place] > 0)


def _float32(value: float | Sequence[float]) -> float:
    """As the column of a batch has it."""
    return float(torch.tensor(value, dtype=torch.float32).sum())
