"""The stream of groups: the episodes of each task of a stream, decoded together with those that one pull asks for."""

import asyncio
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from attrs import evolve

from nrl.arguments import checked
from nrl.backends.sampling.base import Sampler, capabilities
from nrl.backends.types import Sampling
from nrl.batch import Batch
from nrl.data.cursors import Source, Stream, transactional
from nrl.envs import Env, Task
from nrl.envs.references import task_check
from nrl.envs.types import declared_rewards
from nrl.errors import DataError, EnvError, LostRequest
from nrl.rollout import prefetch
from nrl.rollout.episode import Episode
from nrl.rollout.episode_group import EpisodeGroup
from nrl.rollout.lengths import check_answer_length
from nrl.rollout.rollout_batch import batch_of
from nrl.rollout.scheduler import ENDED, EpisodeSchedule, EpisodeScheduler, check_env

__all__ = ["close_all", "rollouts"]


@checked("rollouts")
def rollouts(
    sampler: Sampler,
    env: Env,
    tasks: Stream[Task],
    *,
    n: int,
    sampling: Sampling | None = None,
    seed: int = 0,
    patience: int = 3,
    concurrency: int | None = None,
) -> Source[Batch]:
    """The stream of groups: ``n`` episodes of each task of a stream; the groups of one ``take`` are decoded together.

    Args:
        sampler: the policy.
        env: the environment.
        tasks: a stream of tasks, such as `nrl.data.tasks`. Where that was made without ``check``, the environment's own
            check runs now: tasks to which no answer can be right are printed and left out.
        n: episodes of each task.
        sampling: instead of the sampler's own.
        seed: of the noise.
        patience: how many rollouts in a row may fail whole; counted in rows, as so many of the largest rollout. In a
            mixture, those of each source by themselves.
        concurrency: how many episodes may be live at a time; None: all that a ``take`` asks for. When one ends, the
            next begins.

    Raises:
        EnvError: ``env`` is no environment.
        DataError: ``n``, ``patience`` or ``concurrency`` is not positive; or no task has a right answer.
        ArgumentError: ``max_new_tokens`` of the sampling are more than the sampler's context has tokens.
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
    check_env("rollouts", env)
    if n < 1:
        raise DataError(f"rollouts: n is {n}; a group needs at least one episode")
    if patience < 1:
        raise DataError(f"rollouts: patience is {patience}; it must be at least 1")
    check_answer_length("rollouts", sampler, sampling)
    tasks = _with_right_answers(tasks, env)
    return _stream(
        _Arguments(sampler, env, tasks, n, sampling, seed, patience),
        EpisodeSchedule.with_concurrency("rollouts", concurrency),
    )


def _with_right_answers(tasks: Stream[Task], env: Env) -> Stream[Task]:
    """Leave out tasks to which no answer can be right, as `nrl.data.tasks` does with ``check=``."""
    check, with_check = task_check(env), getattr(tasks, "with_check", None)
    if check is None or with_check is None:
        return tasks
    usable = cast(Stream[Task], with_check(check))
    if usable is not tasks and "cursor" in (state := tasks.state()):
        usable.restore({"cursor": state["cursor"]})
    return usable


class _Arguments(NamedTuple):
    """The arguments of `rollouts`."""

    sampler: Sampler
    env: Env
    tasks: Stream[Task]
    n: int
    sampling: Sampling | None
    seed: int
    patience: int


_CURSORS: "weakref.WeakSet[_Cursor]" = weakref.WeakSet()


def close_all() -> None:
    """End the episodes of all streams of this program, as a run does at its end: environments are closed.

    Items that `nrl.ahead` has requested and that have not begun get a CancelledError.
    """
    prefetch.close_early()
    for cursor in list(_CURSORS):
        cursor.end()


class _Streak(NamedTuple):
    """Number of consecutive rollouts that failed whole, their rows, and the rows of the largest rollout."""

    rollouts: int = 0
    rows: int = 0
    largest: int = 0

    def after(self, rows: int, failed: int) -> "_Streak":
        """Return the streak after a rollout of so many rows."""
        largest = max(self.largest, rows)
        all_failed = failed == rows
        return _Streak(self.rollouts + 1, self.rows + rows, largest) if all_failed else _Streak(largest=largest)


class _Cursor:
    """Position of a stream.

    Args:
        drawn: how many groups have begun.
        begun: those among them that have not been handed out, with their tasks.
        running: where they are played; None: they have to begin anew.
    """

    def __init__(self) -> None:
        self.drawn, self.begun = 0, list[tuple[int, Task]]()
        self.running: EpisodeScheduler | None = None
        self._lock = threading.RLock()  # the garbage collector may end it at any moment, in any thread
        _CURSORS.add(self)

    def play(self, begin: Callable[[], EpisodeScheduler]) -> tuple[EpisodeScheduler, list[tuple[int, Task]]]:
        """Return the scheduler, and the groups that have to begin anew in it.

        Raises:
            CancelledError: this was asked for before all streams were ended.
        """
        with self._lock:
            if self.running is not None:
                return self.running, []
            if prefetch.is_closed():
                raise asyncio.CancelledError(ENDED)
            self.running = begin()
            return self.running, self.begun

    def end(self) -> None:
        """End the episodes under way."""
        with self._lock:
            running, self.running = self.running, None
        if running is not None:
            running.close()


def _stream(arguments: _Arguments, schedule: EpisodeSchedule) -> Source[Batch]:
    sampler, _, tasks, n, sampling, *_ = arguments
    cursor = _Cursor()
    streaks: dict[int, _Streak] = {}  # keys: sources
    declared = declared_rewards(arguments.env)
    num_rewards: int | None = None  # known once an episode was valid

    def take(count: int) -> list[Batch]:
        nonlocal num_rewards
        if count < 1:
            return []
        running, anew = cursor.play(
            lambda: EpisodeScheduler(sampler, arguments.env, n, sampling, arguments.seed, schedule)
        )
        new = max(0, count + schedule.extra - len(cursor.begun))
        begun = list(enumerate(tasks.take(new), cursor.drawn))
        cursor.drawn, cursor.begun = cursor.drawn + new, [*cursor.begun, *begun]
        groups = running.play([*anew, *begun], count)
        still = {group.number for group in running.open}
        cursor.begun = [numbered for numbered in cursor.begun if numbered[0] in still]
        if not cursor.begun:
            cursor.end()
        batch = batch_of(groups, sampler, sampling, schedule, num_rewards, declared)
        if bool(batch["valid"].any()):
            num_rewards = batch["rewards"].shape[1] if batch["rewards"].ndim > 1 else 0
        check(groups)
        sizes = batch["group_ids"].unique_consecutive(return_counts=True)[1].tolist()
        return [cast(Batch, part.lock_()) for part in batch.split(sizes)]

    def check(groups: Sequence[EpisodeGroup]) -> None:
        by_source: dict[int, list[Episode]] = {}
        for group in groups:
            by_source.setdefault(group.task.get("source", 0), []).extend(episode for _, episode in group.ended)
        for source, episodes in by_source.items():
            failures = [str(episode.failure) for episode in episodes if episode.failure is not None]
            streak = streaks[source] = streaks.get(source, _Streak()).after(len(episodes), len(failures))
            if streak.rows >= arguments.patience * streak.largest:
                lost, whose = failures[0].startswith(LostRequest.__name__), f" of source {source}"
                raise (LostRequest if lost else EnvError)(
                    f"rollouts: all rows{whose if len(streaks) > 1 else ''} of {streak.rollouts} rollouts in a row "
                    f"failed, {streak.rows} of them, so there is nothing to learn from; "
                    f"{'look at the sampler' if lost else 'mend the environment or its verifier'}. The first of the "
                    f"last: {failures[0]}"
                )

    def restore(state: Mapping[str, Any]) -> None:
        nonlocal num_rewards
        cursor.end()
        tasks.restore(state["tasks"])
        cursor.drawn, cursor.begun = int(state["groups"]), list(state.get("begun", ()))
        num_rewards = state.get("num_rewards")

    def state() -> dict[str, Any]:
        begun = {"begun": list(cursor.begun)} if cursor.begun else {}
        rewards_state = {} if num_rewards is None else {"num_rewards": num_rewards}
        return {"tasks": tasks.state(), "groups": cursor.drawn} | begun | rewards_state

    def mark() -> Callable[[], None]:
        before = state()
        return lambda: restore(before)

    # Where nobody takes any more, environments are closed, too; but at the exit of the interpreter no thread begins
    weakref.finalize(take, cursor.end).atexit = False
    if schedule.extra and hasattr(sampler, "lag"):
        sampler.lag = max(1, sampler.lag)

    def reschedule(caller: str, **how: Any) -> Source[Batch]:
        if how.get("keep", 0) > n:
            raise DataError(
                f"{caller}: m is {how['keep']}, and rollouts begins n={n} episodes a group; keep fewer, or begin more"
            )
        if schedule.deadline is not None and "deadline" in how:
            raise DataError(
                f"{caller}: the stream is cut after {schedule.deadline:g} s already; leave one of the two out"
            )
        if schedule.extra and "extra" in how:
            kind = "refilled" if schedule.in_order else "partial"
            raise DataError(f"{caller}: the stream is {kind} already; take one of the two")
        return _stream(arguments, evolve(schedule, **how))

    return transactional(Source(take, state, restore, capabilities(sampler).remote, mark, sampler, reschedule))
