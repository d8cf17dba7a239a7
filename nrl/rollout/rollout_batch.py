"""Many episodes at once, as a batch."""

import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from nrl.arguments import checked
from nrl.backends.sampling.base import Sampler
from nrl.backends.types import Sampling
from nrl.batch import Batch
from nrl.envs import Env, Task
from nrl.envs.inprocess.threads import stuck
from nrl.envs.types import declared_rewards
from nrl.errors import DataError
from nrl.rollout.episode import Episode
from nrl.rollout.episode_group import EpisodeGroup
from nrl.rollout.scheduler import EpisodeSchedule, EpisodeScheduler
from nrl.rollout.to_batch import rows_of

__all__ = ["batch_of", "play_batch", "rollout"]

_FEWEST, _NEARLY_ALL = 4, 0.9  # episodes of a batch, and the share of them whose reasoning did not end


@checked("rollout")
def rollout(
    sampler: Sampler,
    env: Env,
    tasks: Sequence[Task],
    *,
    n: int = 1,
    sampling: Sampling | None = None,
    seed: int = 0,
    first_group: int = 0,
    concurrency: int | None = None,
) -> Batch:
    """Run ``n`` episodes of each task and return them as rows, group after group.

    Args:
        sampler: the policy.
        env: the environment; see `nrl.envs`.
        tasks: each is a group.
        n: episodes of each task.
        sampling: instead of the sampler's own.
        seed: of the noise, a function of the seed, the group, the index in the group, and the turn.
        first_group: the number of the first group; numbers have to be unique in the run.
        concurrency: limit of live episodes; None: no limit.

    Returns:
        A batch ``[B, T]``, a row for each of ``len(tasks) * n`` episodes, and further rows of forked episodes, whose
        chat template changed earlier turns; ``episode_ids`` links their rows. Columns: ``input_ids``,
        ``attention_mask``, ``loss_mask``, ``rollout_logprobs``, ``turns`` (the policy's, from 0; -1: not sampled),
        ``temperature``, ``rewards`` (NaN in failed rows), ``group_ids``, ``version``, ``valid``, ``truncated``,
        ``reasoning_ended`` (false: the last turn is cut within its reasoning), ``sampled`` (number of sampled tokens
        of a row, including tokens beyond the context) and ``status`` (index in `nrl.envs.STATUSES`). With single
        rewards: ``token_rewards`` (of each turn, at its last token). With sources of tasks: ``source``. With a
        streaming sampler: ``asked_again``. With a streaming sampler or a schedule that continues episodes:
        ``versions`` (of each token; -1: not sampled). With a sampler that records routes: ``routes``.
        ``reward/<name>`` are components of rewards, and the ragged ``("components", <name>)`` has the components of
        every turn, NaN if absent. ``env/<name>`` is the last number that an episode reported; the ragged ``("info",
        <name>)`` has the numbers of every step, NaN if absent.

    Raises:
        DataError: ``tasks`` is empty, or ``n`` or ``concurrency`` is not positive.
        GenerationError: the sampler could not serve a request. Its other errors are passed on, too.

    >>> import nrl
    >>> from nrl import tiny
    >>> from nrl.backends import hf
    >>> from nrl.envs import exact, single_turn
    >>> with nrl.cluster("local") as cluster:
    ...     sampler = hf.sampler(cluster.reserve(1), tiny.model(), nrl.Sampling(max_new_tokens=3))
    ...     batch = rollout(sampler, single_turn(exact), [{"prompt": "1+1=", "answer": "2"}], n=4)
    >>> batch["group_ids"].tolist()
    [0, 0, 0, 0]
    """
    return play_batch(sampler, env, tasks, n, sampling, seed, first_group, concurrency)[0]


def play_batch(
    sampler: Sampler,
    env: Env,
    tasks: Sequence[Task],
    n: int,
    sampling: Sampling | None,
    seed: int,
    first_group: int,
    concurrency: int | None = None,
) -> tuple[Batch, list[list[Episode]]]:
    """Return the batch of `rollout`, and the episodes of each task, which also have texts and failures."""
    if not tasks or n < 1:
        raise DataError(f"rollout: {len(tasks)} tasks with n={n}; there must be at least one of each")
    declared = declared_rewards(env)
    running = EpisodeScheduler(
        sampler, env, n, sampling, seed, EpisodeSchedule.with_concurrency("rollout", concurrency)
    )
    try:
        groups = running.play(list(enumerate(tasks, first_group)), len(tasks))
        batch = batch_of(groups, sampler, sampling, running.schedule, declared=declared)
        return batch, [[episode for _, episode in group.ended] for group in groups]
    finally:
        running.close()


def batch_of(
    groups: Sequence[EpisodeGroup],
    sampler: Sampler,
    sampling: Sampling | None,
    schedule: EpisodeSchedule,
    num_rewards: int | None = None,
    declared: int | None = None,
) -> Batch:
    """Return the rows of groups (`rows_of`), and warn where episodes failed or ended within their reasoning."""
    batch = rows_of(groups, sampler, sampling, schedule, num_rewards, declared)
    ended = [episode for group in groups for _, episode in group.ended]
    _warn([episode.failure for episode in ended if episode.failure and not episode.cut], len(ended))
    answered = [episode for episode in ended if episode.turns and not episode.cut]
    unfinished = sum(not episode.reasoning_ended for episode in answered)
    if len(answered) >= _FEWEST and unfinished >= _NEARLY_ALL * len(answered):
        # The text has no counts, so Python shows it once and not with every batch
        warnings.warn(
            "rollout: nearly all answers of a batch end within their reasoning, so there is nothing to verify; raise "
            f"sampling.max_new_tokens, which is {(sampling or sampler.sampling).max_new_tokens}, or the context",
            skip_file_prefixes=(str(Path(__file__).parents[1]),),
        )
    return batch


def _warn(failures: Sequence[str], total: int) -> None:
    if not failures:
        return
    kinds = Counter(failure.partition(":")[0] for failure in failures)
    counted = f" ({', '.join(f'{count} {kind}' for kind, count in kinds.items())})" if len(kinds) > 1 else ""
    num_stuck = stuck()
    hung = (
        f"; {num_stuck} {'thread is' if num_stuck == 1 else 'threads are'} still in calls that did not return"
        if num_stuck
        else ""
    )
    warnings.warn(
        f"rollout: {len(failures)} of {total} episodes failed{counted} and are not trained on; the first: "
        f"{failures[0]}{hung}",
        skip_file_prefixes=(str(Path(__file__).parents[1]),),  # the warning names the caller's line
    )
