"""Verification of stored samples by another verifier."""

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
from nrl.rollout.episode import Episode, earn, record_failure
from nrl.rollout.evaluate import Graded, failures_of, fields_of
from nrl.rollout.scheduler import derive_seed

__all__ = ["can_rescore", "regrade"]


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
    envs = [_make_judge_env(judge) for judge in judges]
    episodes = asyncio.run(_judge_all(envs, tasks, graded, seed, first_group))
    names = sorted({name for group in episodes for episode in group for name in episode.components})
    alone: Any = judges[0] if len(judges) == 1 and not is_env(judges[0]) else None
    extract = None if alone is None else extractor(alone)

    def regrade_task(task: Task, old: Graded, samples: Sequence[Episode]) -> Graded:
        numbers = {name: values for name, values in old.numbers.items() if not name.startswith("reward/")}
        for name in names:
            numbers[f"reward/{name}"] = [
                _sum_float32(sample.components[name]) if sample.counts and name in sample.components else None
                for sample in samples
            ]
        return attrs.evolve(
            old,
            answer=task.get("answer"),
            rewards=[_sum_float32(sample.reward) if sample.counts else None for sample in samples],
            answers=None if extract is None else [extract(sample.trace.answer) for sample in samples],
            numbers=dict(sorted(numbers.items())),
            statuses=None if old.statuses is None else [sample.status for sample in samples],
            failures=failures_of(samples),
            fields=fields_of(task),
        )

    return [regrade_task(task, old, samples) for task, old, samples in zip(tasks, graded, episodes, strict=True)]


def _make_judge_env(judge: Any) -> Env:
    """Return an environment, of which only the verifier and the timeout are used."""
    if not is_env(judge):
        seconds = TIMEOUT if getattr(judge, "of_group", False) else getattr(judge, "timeout", TIMEOUT)
        return Environment(lambda task: (task, ""), lambda state, turn: state, None, judge, seconds)
    if getattr(judge, "verifier", None) is None:
        raise EnvError(
            "rescore: the environment has no verifier, its steps give the reward; play it again with a model, or give "
            "a verifier as env="
        )
    return judge


async def _judge_all(
    envs: Sequence[Env], tasks: Sequence[Task], graded: Sequence[Graded], seed: int, first_group: int
) -> list[list[Episode]]:
    with ExitStack() as stack:
        callers = [stack.enter_context(calling(env)) for env in envs]

        async def judge_task(number: int, task: Any, old: Graded) -> list[Episode]:
            task = task.copy()
            task.setdefault("seed", derive_seed(seed, number))
            source = task.get("source", 0) if len(envs) > 1 else 0
            episodes = [_restore_episode(task, old, index) for index in range(len(old.samples))]
            verifier: Any = envs[source].verifier  # type: ignore[attr-defined]
            live = [episode for episode in episodes if episode.counts]
            if judges_group(verifier, task):
                await _judge_episodes(live, verifier, callers[source](task), task, True)
            else:
                await asyncio.gather(
                    *(_judge_episodes([episode], verifier, callers[source](task), task, False) for episode in live)
                )
            return episodes

        return await asyncio.gather(
            *(
                judge_task(number, *arguments)
                for number, arguments in enumerate(zip(tasks, graded, strict=True), first_group)
            )
        )


async def _judge_episodes(episodes: Sequence[Episode], verifier: Any, call: Caller, task: Any, group: bool) -> None:
    if not episodes:
        return
    try:
        traces = [episode.trace for episode in episodes]
        result = await call(verifier, task.copy(), traces if group else traces[0])
        verdicts = verdicts_of(result, len(episodes)) if group else [result]
    except Exception as error:
        for episode in episodes:
            record_failure(error, episode)
    else:
        for episode, verdict in zip(episodes, verdicts, strict=True):
            earn(episode, verdict)


def _restore_episode(task: Task, old: Graded, index: int) -> Episode:
    reply: Any = old.replies[index] if old.replies else {}
    if old.traces:
        stored = old.traces[index]
        turns = [Turn(text) for text in stored["turns"]]
        turns[-1:] = [Turn(turn, **reply) for turn in turns[-1:]]
        observations = list(stored["observations"])
        episode = Episode(prompt=stored["prompt"], turns=turns, observations=observations)
    else:
        stop: Any = "length" if old.truncated[index] else "stop"
        turn = Turn(old.samples[index], stop_reason=stop, **reply)
        episode = Episode(prompt=task.get("prompt", ""), turns=[turn])
    episode.truncated = old.truncated[index]
    if not can_rescore(old, index):
        failure = (old.failures[index] if old.failures else None) or {}
        episode.fail(failure.get("error", "nothing was sampled"), failure.get("status", "infra_error"))  # type: ignore[arg-type]
    return episode


def can_rescore(old: Graded, index: int) -> bool:
    """Return whether a sample can be verified again: it was sampled, and its episode did not fail."""
    return old.rewards[index] is not None or (old.statuses is None and old.lengths[index] > 0)


def _sum_float32(value: float | Sequence[float]) -> float:
    """Return the sum of rewards, rounded as in the column of a batch."""
    return float(torch.tensor(value, dtype=torch.float32).sum())
