"""Evaluation: sample answers to tasks, verify them, and measure."""

from collections.abc import Sequence
from contextlib import suppress
from types import EllipsisType
from typing import Any

import attrs
import torch

from nrl.algos import majority, pass_at_k
from nrl.backends.base import Sampling
from nrl.backends.samplers import Sampler
from nrl.data import render
from nrl.envs import Task, Verifier, extractor, single_turn
from nrl.episodes.rollout_batch import rollout
from nrl.errors import DataError, NrlError
from nrl.reduce import Mean, Metrics, Sum

__all__ = ["Graded", "grade", "measure"]


@attrs.frozen
class Graded:
    """A task, the samples for it, and their rewards. Lists have an entry for each sample, in order.

    Args:
        prompt: the task's.
        answer: the task's right answer; None: it has none.
        samples: texts.
        rewards: of each sample, several added up; None: the verifier failed, which is no reward of 0.
        answers: of each sample, found by the verifier's extractor; None: it found none. None in place of the list: the
            verifier has no extractor.
        lengths: sampled tokens.
        truncated: whether a length limit stopped the sample.

    >>> graded = Graded("1+1=", "2", ["2", "3"], [1.0, 0.0], ["2", "3"], [2, 2], [False, False])
    >>> Graded(**attrs.asdict(graded)) == graded
    True
    """

    prompt: Any
    answer: Any
    samples: Sequence[str]
    rewards: Sequence[float | None]
    answers: Sequence[str | None] | None
    lengths: Sequence[int]
    truncated: Sequence[bool]


def grade(
    sampler: Sampler,
    verifier: Verifier,
    tasks: Sequence[Task],
    *,
    n: int = 1,
    sampling: Sampling | None = None,
    seed: int = 0,
    first_group: int = 0,
    timeout: float | EllipsisType | None = ...,
) -> list[Graded]:
    """Sample ``n`` answers to each task and verify them. `nrl.rollout` draws all of them together.

    Args:
        sampler: the policy.
        verifier: such as `nrl.envs.number`.
        tasks: with a ``"prompt"``, and the fields that the verifier reads.
        n: samples a task.
        sampling: instead of the sampler's own.
        seed: of the noise; a sample's noise is a function of the seed, the number of its task and its place there.
        first_group: the number of the first task.
        timeout: seconds that one call of the verifier may take; None: no limit. Left out, as in `nrl.envs.single_turn`.

    Returns:
        One for each task, in order.

    Raises:
        DataError: there are no tasks, or ``n`` is not positive.
        GenerationError: the sampler could not serve a request. Its other errors are passed on, too.

    >>> import nrl
    >>> from nrl import tiny
    >>> from nrl.backends import hf
    >>> from nrl.envs import number
    >>> with nrl.cluster("local") as cluster:
    ...     sampler = hf.sampler(cluster.reserve(1), tiny.model(), nrl.Sampling(max_new_tokens=3))
    ...     (graded,) = grade(sampler, number, [{"prompt": "1+1=", "answer": "2"}], n=4)
    >>> graded.answer, len(graded.samples)
    ('2', 4)
    """
    env = single_turn(verifier, timeout=timeout)
    batch = rollout(sampler, env, tasks, n=n, sampling=sampling, seed=seed, first_group=first_group)
    rewards = batch["rewards"].sum(-1) if batch["rewards"].ndim > 1 else batch["rewards"]
    given = [x if valid else None for x, valid in zip(rewards.tolist(), batch["valid"].tolist(), strict=True)]
    ids, ends, truncated = batch["input_ids"], batch["attention_mask"].sum(-1).tolist(), batch["truncated"].tolist()
    extract = extractor(verifier)

    def graded(place: int, task: Task) -> Graded:
        start, rows = _prompt_tokens(task, sampler.tokenizer), range(place * n, (place + 1) * n)
        # By the length of the prompt rather than by the loss mask, which is empty where the verifier failed
        texts = [sampler.tokenizer.decode(ids[row, start : ends[row]], skip_special_tokens=True) for row in rows]
        return Graded(
            task.get("prompt"),
            task.get("answer"),
            texts,
            [given[row] for row in rows],
            None if extract is None else [extract(text) for text in texts],
            [max(0, ends[row] - start) for row in rows],
            [truncated[row] for row in rows],
        )

    return [graded(place, task) for place, task in enumerate(tasks)]


def _prompt_tokens(task: Task, tokenizer: Any) -> int:
    with suppress(KeyError, NrlError):  # then nothing was sampled, and the rows are not valid
        return len(render(task["prompt"], tokenizer))
    return 0


def measure(graded: Sequence[Graded], k: Sequence[int] = (), *, passing: float = 1.0) -> Metrics:
    """Measure samples, leaving out those whose verifier failed.

    - ``eval/reward``: the mean reward of a sample.
    - ``eval/pass@<k>``: the probability that one of k samples passes (`nrl.algos.pass_at_k`).
    - ``eval/majority``: how often the most frequent answer passes (`nrl.algos.majority`), and ``eval/unanswered``, the
      fraction of samples without an answer. Both need several samples a task, and a verifier with an extractor.
    - ``eval/length``: the mean number of sampled tokens; ``eval/truncated``: the fraction that hit a length limit.
    - ``eval/invalid``: the number of samples that are left out.

    ``eval/pass@<k>`` leaves out tasks with fewer than k samples left, and the majority those with none. The weight of
    each metric is the number of tasks, or samples, that were measured.

    Args:
        graded: from `grade`; of several calls, one after the other.
        k: the numbers for pass@k; none above the number of samples of a task.
        passing: a sample passes where its reward is at least this.

    Returns:
        Metrics for ``run.log`` or `nrl.finalize`. Merged metrics of parts are the metrics of the whole.

    Raises:
        DataError: ``k`` is less than 1, or more than the number of samples of a task.

    >>> import nrl
    >>> graded = Graded("1+1=", "2", ["2", "3", "2"], [1.0, 0.0, 1.0], ["2", "3", "2"], [1, 1, 1], [False] * 3)
    >>> nrl.finalize(measure([graded], k=(1, 2)))
    {'eval/reward': 0.6666666666666666, 'eval/pass@1': 0.6666666666666666, 'eval/pass@2': 1.0, 'eval/majority': 1.0,
     'eval/unanswered': 0.0, 'eval/length': 1.0, 'eval/truncated': 0.0, 'eval/invalid': 0.0}
    """
    fewest = min((len(each.rewards) for each in graded), default=0)
    for wrong in (each for each in k if not 1 <= each <= fewest):
        raise DataError(f"measure: k is {wrong}, and there are {fewest} samples a task; give k from 1 to {fewest}")
    rows = [
        (group, place)
        for group, each in enumerate(graded)
        for place, reward in enumerate(each.rewards)
        if reward is not None
    ]

    def column(name: str) -> list[Any]:
        return [getattr(graded[group], name)[place] for group, place in rows]

    def mean(values: Sequence[float]) -> Mean:
        return Mean(torch.tensor(sum(values), dtype=torch.float64), torch.tensor(len(rows), dtype=torch.float64))

    rewards, group_ids = column("rewards"), torch.tensor([group for group, _ in rows], dtype=torch.int64)
    passed = torch.tensor([reward >= passing for reward in rewards], dtype=torch.bool)
    metrics: Metrics = {"eval/reward": mean(rewards)}
    metrics |= {f"eval/pass@{each}": pass_at_k(passed, group_ids, each) for each in k}
    if fewest > 1 and all(each.answers is not None for each in graded):
        answers = column("answers")
        metrics["eval/majority"] = majority(passed, group_ids, answers)
        metrics["eval/unanswered"] = mean([answer is None for answer in answers])
    metrics["eval/length"], metrics["eval/truncated"] = mean(column("lengths")), mean(column("truncated"))
    metrics["eval/invalid"] = Sum(torch.tensor(sum(len(each.rewards) for each in graded) - len(rows)))
    return metrics
