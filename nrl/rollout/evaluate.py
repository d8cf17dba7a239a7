"""Evaluation: sample answers to tasks, or play episodes, verify them, and measure."""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import EllipsisType
from typing import Any

import attrs
import torch

from nrl.algos import majority, pass_at_k
from nrl.arguments import checked
from nrl.backends.sampling.base import Sampler
from nrl.backends.types import Sampling
from nrl.batch import Batch
from nrl.batch.metrics import Mean, Metrics, Sum
from nrl.data import render
from nrl.envs import STATUSES, Env, Task, Verifier, extractor, single_turn
from nrl.envs.types import is_env
from nrl.errors import DataError, EnvError, NrlError
from nrl.rollout.episode import Episode
from nrl.rollout.lengths import check_answer_length
from nrl.rollout.rollout_batch import play_batch
from nrl.rollout.transcripts import last_turn, rows_of_episodes, transcriber

__all__ = ["Graded", "failures_of", "fields_of", "grade", "measure"]


@attrs.frozen
class Graded:
    """A task, the samples for it, and their rewards. Lists have an entry for each sample, in order.

    Args:
        prompt: the task's.
        answer: the task's right answer; None: unknown.
        samples: texts; of an episode of several turns, the last turn of the policy.
        rewards: of each sample, several added up; None: the verifier or the environment failed, unlike a reward of 0.
        answers: of each sample, found by the verifier's extractor; None: no answer was found. None in place of the
            list: the verifier has no extractor.
        lengths: sampled tokens, of all turns.
        truncated: whether a length limit stopped the sample.
        numbers: by name, for each sample; None: not reported. ``"reward/<name>"`` are components of the reward,
            ``"env/<name>"`` the last numbers of the environment.
        turns: number of turns of the policy in each episode. None, as for all following fields: a verifier's samples.
        statuses: the status of each sample, one of `nrl.envs.STATUSES`.
        conversations: the parts of each sample in order, with ``role``, ``text``, ``reward`` and more; see
            `nrl.rollout.transcripts.RowTranscript`. A forked episode has a prompt for each fork.
        failures: ``status`` and ``error`` of each sample without a reward; None: the sample has a reward. None in
            place of the list: all samples have rewards.
        fields: the task's other fields with values of JSON.
        traces: the input of an environment's verifier for each episode: ``prompt``, ``turns`` and ``observations``.
            None: the sample is the whole input, or the input has values outside of JSON.
        replies: ``answer``, ``reasoning`` and ``reasoning_ended`` of the last turn of each sample, unless its text has
            these, for example after a prompt with an opening mark of reasoning. None in place of the list: all texts
            have these.

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
    numbers: Mapping[str, Sequence[float | None]] = attrs.field(factory=dict)
    turns: Sequence[int] | None = None
    statuses: Sequence[str] | None = None
    conversations: Sequence[Sequence[Mapping[str, Any]]] | None = None
    failures: Sequence[Mapping[str, str] | None] | None = None
    fields: Mapping[str, Any] = attrs.field(factory=dict)
    traces: Sequence[Mapping[str, Any]] | None = None
    replies: Sequence[Mapping[str, Any]] | None = None


@checked("grade")
def grade(
    sampler: Sampler,
    verifier: Verifier | Env,
    tasks: Sequence[Task],
    *,
    n: int = 1,
    sampling: Sampling | None = None,
    seed: int = 0,
    first_group: int = 0,
    timeout: float | EllipsisType | None = ...,
) -> list[Graded]:
    """Sample ``n`` answers to each task and verify them, or play ``n`` episodes. `nrl.rollout` draws all together.

    Args:
        sampler: the policy.
        verifier: a verifier, for example `nrl.envs.number`, or an environment. A sample of an environment is an
            episode, counted once even if forked, without extracted answers, and with the environment's own timeout.
        tasks: with a ``"prompt"``, and the fields of the verifier; or with the fields of the environment.
        n: samples a task.
        sampling: instead of the sampler's own.
        seed: of the noise, a function of the seed, the number of the task, and the index of the sample.
        first_group: the number of the first task.
        timeout: seconds for one call of the verifier; None: no limit. Default: as in `nrl.envs.single_turn`.

    Returns:
        One for each task, in order.

    Raises:
        DataError: ``tasks`` is empty, or ``n`` is not positive.
        ArgumentError: ``max_new_tokens`` of the sampling are more than the sampler's context has tokens.
        EnvError: the verifier is neither a function nor an environment, or ``timeout`` is given for an environment.
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
    check_answer_length("grade", sampler, sampling)
    if is_env(verifier):
        if not isinstance(timeout, EllipsisType):
            raise EnvError(
                f"grade: timeout is {timeout}, and an environment has its own; leave it out, and make the environment "
                "with it, as in Environment(reset, step, timeout=...)"
            )
        batch, episodes = play_batch(sampler, verifier, tasks, n, sampling, seed, first_group)
        results = _grade_episodes(batch, tasks, n, sampler.tokenizer)
        traces = [_traces(group) if getattr(verifier, "verifier", None) else None for group in episodes]
        return [
            attrs.evolve(result, failures=failures_of(group), traces=group_traces, replies=_replies(group))
            for result, group, group_traces in zip(results, episodes, traces, strict=True)
        ]
    if not callable(verifier):
        raise EnvError(
            f"grade: the verifier is {verifier!r}; give a function of a task and a trace, or an environment, which has "
            "the functions reset and step"
        )
    env = single_turn(verifier, timeout=timeout)
    batch, episodes = play_batch(sampler, env, tasks, n, sampling, seed, first_group)
    ids, ends, truncated = batch["input_ids"], batch["attention_mask"].sum(-1).tolist(), batch["truncated"].tolist()
    rewards, extract = _rewards(batch), extractor(verifier)

    def grade_task(index: int, task: Task) -> Graded:
        start, rows = _prompt_tokens(task, sampler), range(index * n, (index + 1) * n)
        # By the length of the prompt rather than by the loss mask, which is empty where the verifier failed
        texts = [sampler.tokenizer.decode(ids[row, start : ends[row]], skip_special_tokens=True) for row in rows]
        return Graded(
            task.get("prompt"),
            task.get("answer"),
            texts,
            [rewards[row] for row in rows],
            None if extract is None else [extract(episode.trace.answer) for episode in episodes[index]],
            [max(0, ends[row] - start) for row in rows],
            [truncated[row] for row in rows],
            _numbers(batch, rows),
            failures=failures_of(episodes[index]),
            fields=fields_of(task),
            replies=_replies(episodes[index]),
        )

    return [grade_task(index, task) for index, task in enumerate(tasks)]


def _grade_episodes(batch: Batch, tasks: Sequence[Task], n: int, tokenizer: Any) -> list[Graded]:
    """Grade the episodes of an environment: each counts once, with all its rows."""
    columns: dict[str, Any] = {str(key): value for key, value in batch.items()}
    episodes, rewards = rows_of_episodes(columns, len(batch)), _rewards(batch)
    transcript = transcriber(tokenizer)

    def grade_task(index: int, task: Task) -> Graded:
        group = episodes[index * n : (index + 1) * n]
        firsts, rows = [rows[0] for rows in group], [[transcript(columns, row) for row in rows] for rows in group]
        conversations = [[part for row in transcripts for part in row.parts] for transcripts in rows]
        return Graded(
            task.get("prompt"),
            task.get("answer"),
            [
                last_turn(transcripts[-1], columns, rows[-1], tokenizer)
                for transcripts, rows in zip(rows, group, strict=True)
            ],
            [rewards[row] for row in firsts],
            None,
            [int(columns["sampled"][rows].sum()) for rows in group],
            columns["truncated"][firsts].tolist(),
            _numbers(batch, firsts),
            [sum(part["role"] == "policy" for part in parts) for parts in conversations],
            [STATUSES[status] for status in columns["status"][firsts].tolist()],
            conversations,
            fields=fields_of(task),
        )

    return [grade_task(index, task) for index, task in enumerate(tasks)]


def failures_of(episodes: Sequence[Episode]) -> list[dict[str, str] | None] | None:
    """Return the failure of each episode; None: none failed.

    >>> failures_of([Episode(), Episode(failure="OSError: away", status="infra_error")])
    [None, {'status': 'infra_error', 'error': 'OSError: away'}]
    """
    failures = [
        None if episode.failure is None else {"status": episode.status, "error": episode.failure}
        for episode in episodes
    ]
    return failures if any(failures) else None


def fields_of(task: Task) -> dict[str, Any]:
    """Return the fields of a task beside prompt and answer, without values that JSON cannot hold, such as images."""
    return {key: value for key, value in task.items() if key not in ("prompt", "answer") and _is_json(value)}


def _traces(episodes: Sequence[Episode]) -> list[dict[str, Any]] | None:
    traces = [
        {"prompt": episode.prompt, "turns": [turn.text for turn in episode.turns], "observations": episode.observations}
        for episode in episodes
    ]
    return traces if _is_json(traces) else None


def _replies(episodes: Sequence[Episode]) -> list[dict[str, Any]] | None:
    replies = [episode.turns[-1].beyond_text if episode.turns else {} for episode in episodes]
    return replies if any(replies) else None


def _is_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)  # The value read back has to be equal.
    except (TypeError, ValueError):
        return False


def _rewards(batch: Batch) -> list[float | None]:
    """Return the reward of each row; several are added up. None: the row is not valid."""
    rewards = batch["rewards"].sum(-1) if batch["rewards"].ndim > 1 else batch["rewards"]
    return [x if valid else None for x, valid in zip(rewards.tolist(), batch["valid"].tolist(), strict=True)]


def _numbers(batch: Batch, rows: Sequence[int]) -> dict[str, list[float | None]]:
    """Return components of rewards, and numbers that the environment reported."""
    names = sorted(str(key) for key in batch.keys() if str(key).startswith(("env/", "reward/")))
    columns = {name: batch[name][list(rows)].tolist() for name in names}
    return {name: [x if math.isfinite(x) else None for x in values] for name, values in columns.items()}


def _prompt_tokens(task: Task, sampler: Sampler) -> int:
    with suppress(KeyError, NrlError):  # then nothing was sampled, and the rows are not valid
        return len(render(task["prompt"], sampler.tokenizer, max_tokens=sampler.context_length))
    return 0


@checked("measure")
def measure(graded: Sequence[Graded], k: Sequence[int] = (), *, passing: float = 1.0) -> Metrics:
    """Measure samples, leaving out those whose verifier or environment failed.

    - ``eval/reward``: the mean reward of a sample.
    - ``eval/pass@<k>``: the probability that one of k samples passes (`nrl.algos.pass_at_k`).
    - ``eval/majority``: how often the most frequent answer passes (`nrl.algos.majority`), and ``eval/unanswered``, the
      fraction of samples without an answer. Both need several samples a task, and a verifier with an extractor.
    - ``eval/reward/<name>``: the means of components of rewards; ``eval/env/<name>`` of an environment's own numbers,
      over the samples that have them.
    - ``eval/length``: the mean number of sampled tokens; ``eval/truncated``: the fraction that hit a length limit.
    - ``eval/turns``: the mean number of turns, and ``eval/status/<name>``: the number of samples whose status was not
      ``"ok"``, by what became of them. Both are of environments.
    - ``eval/invalid``: the number of omitted samples.

    ``eval/pass@<k>`` leaves out tasks with fewer than k valid samples, the majority tasks without a valid sample. The
    weight of each metric is the number of measured tasks or samples.

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
    fewest = min((len(result.rewards) for result in graded), default=0)
    for wrong in (value for value in k if not 1 <= value <= fewest):
        raise DataError(f"measure: k is {wrong}, and there are {fewest} samples a task; give k from 1 to {fewest}")
    rows = [
        (group, index)
        for group, result in enumerate(graded)
        for index, reward in enumerate(result.rewards)
        if reward is not None
    ]

    def column(name: str) -> list[Any]:
        return [getattr(graded[group], name)[index] for group, index in rows]

    rewards, group_ids = column("rewards"), torch.tensor([group for group, _ in rows], dtype=torch.int64)
    passed = torch.tensor([reward >= passing for reward in rewards], dtype=torch.bool)
    metrics: Metrics = {"eval/reward": _mean(rewards)}
    metrics |= {f"eval/pass@{count}": pass_at_k(passed, group_ids, count) for count in k}
    if fewest > 1 and all(result.answers is not None for result in graded):
        answers = column("answers")
        metrics["eval/majority"] = majority(passed, group_ids, answers)
        metrics["eval/unanswered"] = _mean([answer is None for answer in answers])
    for name in sorted({name for result in graded for name in result.numbers}):
        numbers = [graded[group].numbers[name][index] for group, index in rows if name in graded[group].numbers]
        metrics[f"eval/{name}"] = _mean([x for x in numbers if x is not None])
    if graded and all(result.turns is not None for result in graded):
        metrics["eval/turns"] = _mean(column("turns"))
    metrics["eval/length"], metrics["eval/truncated"] = _mean(column("lengths")), _mean(column("truncated"))
    if graded and all(result.statuses is not None for result in graded):
        statuses = [status for result in graded for status in result.statuses or ()]
        metrics |= {f"eval/status/{name}": Sum(torch.tensor(statuses.count(name))) for name in STATUSES[1:]}
    metrics["eval/invalid"] = Sum(torch.tensor(sum(len(result.rewards) for result in graded) - len(rows)))
    return metrics


def _mean(values: Sequence[float]) -> Mean:
    return Mean(torch.tensor(sum(values), dtype=torch.float64), torch.tensor(len(values), dtype=torch.float64))
