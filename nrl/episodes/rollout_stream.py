"""The stream of groups: the episodes of each task of a stream, decoded together with those that one pull asks for."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from nrl.backends.base import Sampling
from nrl.backends.samplers import Sampler, capabilities
from nrl.batch import Batch
from nrl.envs import Env, Task
from nrl.episodes.rollout_batch import rows_and_failures
from nrl.errors import DataError, EnvError, LostRequest
from nrl.stream import Source, Stream, whole

__all__ = ["rollouts"]


def rollouts(
    sampler: Sampler,
    env: Env,
    tasks: Stream[Task],
    *,
    n: int,
    sampling: Sampling | None = None,
    seed: int = 0,
    patience: int = 3,
) -> Source[Batch]:
    """The stream of groups: ``n`` episodes of each task of a stream; the groups of one ``take`` are decoded together.

    Args:
        sampler: the policy.
        env: the environment.
        tasks: a stream of tasks, such as `nrl.data.tasks`.
        n: episodes of each task.
        sampling: instead of the sampler's own.
        seed: of the noise.
        patience: how many rollouts in a row may fail whole; counted in rows, as so many of the largest rollout.

    Raises:
        DataError: ``n`` or ``patience`` is not positive.
        EnvError: (when taken from) the patience is used up.
        LostRequest: the same, if it was the sampler that failed.

    >>> import nrl
    >>> from nrl import data, tiny
    >>> from nrl.backends import hf
    >>> from nrl.envs import exact, single_turn
    >>> with nrl.cluster("local") as cluster:
    ...     sampler = hf.sampler(cluster.reserve(1), tiny.model(), nrl.Sampling(max_new_tokens=3))
    ...     groups = rollouts(sampler, single_turn(exact), data.tasks("arithmetic"), n=4)
    ...     [group["group_ids"].tolist() for group in groups.take(2)]
    [[0, 0, 0, 0], [1, 1, 1, 1]]
    """
    if n < 1:
        raise DataError(f"rollouts: n is {n}; a group needs at least one episode")
    if patience < 1:
        raise DataError(f"rollouts: patience is {patience}; it must be at least 1")
    drawn = largest = failed = in_a_row = 0

    def take(count: int) -> list[Batch]:
        nonlocal drawn
        first, drawn = drawn, drawn + count
        batch, failures = rows_and_failures(sampler, env, tasks.take(count), n, sampling, seed, first)
        check(count * n, failures)
        sizes = batch["group_ids"].unique_consecutive(return_counts=True)[1].tolist()
        return [cast(Batch, part.lock_()) for part in batch.split(sizes)]

    def check(rows: int, failures: Sequence[str]) -> None:
        nonlocal largest, failed, in_a_row
        largest = max(largest, rows)
        failed, in_a_row = (failed + rows, in_a_row + 1) if len(failures) == rows else (0, 0)
        if failed >= patience * largest:
            lost = failures[0].startswith(LostRequest.__name__)
            raise (LostRequest if lost else EnvError)(
                f"rollouts: all rows of {in_a_row} rollouts in a row failed, {failed} of them, so there is nothing to "
                f"learn from; {'look at the sampler' if lost else 'mend the environment or its verifier'}. The first "
                f"of the last: {failures[0]}"
            )

    def restore(state: Mapping[str, Any]) -> None:
        nonlocal drawn
        tasks.restore(state["tasks"])
        drawn = int(state["groups"])

    def mark() -> Callable[[], None]:
        before = {"tasks": tasks.state(), "groups": drawn}
        return lambda: restore(before)

    remote = capabilities(sampler).remote
    return whole(Source(take, lambda: {"tasks": tasks.state(), "groups": drawn}, restore, remote, mark, sampler))
