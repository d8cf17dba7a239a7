"""Episodes under way: groups of them begin, end, or are ended, by a schedule.

By default nothing of it depends on the clock: all episodes that one `EpisodeScheduler.play` asks for are played to
their end.
"""

import asyncio
import hashlib
import math
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import attrs

from nrl.arguments import described
from nrl.backends.sampling.base import Sampler
from nrl.backends.types import Completion, Sampling
from nrl.envs import Env, Task
from nrl.envs.inprocess.call_with_timeout import Caller, calling
from nrl.envs.types import is_env, judges_group
from nrl.errors import BatchError, DataError, EnvError
from nrl.rollout.episode import Episode, play, record_failure
from nrl.rollout.episode_group import EpisodeGroup
from nrl.rollout.sampler_client import NO_LIMITS, SamplerClient, TurnLimits, make_client
from nrl.runtime.threads import DaemonThreadPool

__all__ = ["ENDED", "EpisodeSchedule", "EpisodeScheduler", "check_env", "derive_seed"]

ENDED = "the stream was ended, as by the run in which it is; make another one"
_PATIENCE = 15.0  # seconds, for a thread that is to end; in ten of them environments are closed


@attrs.frozen
class EpisodeSchedule:
    """When episodes begin and end.

    Args:
        concurrency: how many episodes may be live at a time; None: all.
        deadline: seconds after which unfinished episodes are ended; None: no limit.
        keep: of each group's episodes, how many are waited for; None: all.
        extra: how many groups are under way beyond those that are asked for.
        in_order: whether the groups that began first are those that are handed out; else those that end first.
    """

    concurrency: int | None = None
    deadline: float | None = None
    keep: int | None = None
    extra: int = 0
    in_order: bool = True

    @classmethod
    def with_concurrency(cls, caller: str, concurrency: int | None) -> "EpisodeSchedule":
        """With no more live episodes than these at a time.

        Raises:
            DataError: that is none.
        """
        if concurrency is not None and concurrency < 1:
            raise DataError(f"{caller}: concurrency is {concurrency}; it must be at least 1, or None for all at once")
        return cls(concurrency)


def check_env(caller: str, env: Any) -> None:
    """Check that an argument is an environment.

    Raises:
        EnvError: the argument is no environment.
    """
    if is_env(env):
        return
    instead = "give an Environment, or single_turn(verifier)"
    if callable(env):
        name = getattr(env, "__name__", "verifier")
        instead = f"give single_turn({name}) if it is a verifier, or {name}(...) if it makes an environment"
    raise EnvError(f"{caller}: the environment is {described(env)}, which has no reset and step; {instead}")


class EpisodeScheduler:
    """Groups under way, on an event loop that runs while somebody waits for some of them.

    Args:
        sampler: the policy.
        env: the environment.
        n: episodes of each task.
        sampling: instead of the sampler's own.
        seed: of the noise.
        schedule: when episodes begin and end.
    """

    def __init__(
        self, sampler: Sampler, env: Env, n: int, sampling: Sampling | None, seed: int, schedule: EpisodeSchedule
    ) -> None:
        self._sampler, self._env, self._n, self._sampling, self._seed = sampler, env, n, sampling, seed
        check_env("rollout", env)
        self.schedule = schedule
        self.open: list[EpisodeGroup] = []
        """What has begun and has not been handed out, in order."""
        self._loop, self._turn = asyncio.new_event_loop(), threading.Lock()  # held by who runs it
        self._stack = ExitStack()
        self._requests: SamplerClient | None = None
        self._caller_of: Callable[[Task], Caller]
        self._broken: asyncio.Future[None]  # has the first error that ends all

    def play(self, tasks: Sequence[tuple[int, Task]], count: int) -> list[EpisodeGroup]:
        """Begin groups, each with its number, and wait for so many of those that are open, which are so no longer.

        Returns:
            Groups in the order of their numbers.

        Raises:
            DataError: a task is no mapping, or a source is no integer.
            Exception: whatever the sampler raises.
        """
        for number, task in tasks:
            if not isinstance(task, Mapping):
                raise DataError(
                    f"rollout: the task of group {number} is {task!r:.200}; give mappings, such as {{'prompt': ...}}"
                )
            source = task.get("source", 0)
            if isinstance(source, bool) or not isinstance(source, int) or not -(2**63) <= source < 2**63:
                raise DataError(
                    f"rollout: the task of group {number} has the source {task['source']!r}; give an integer for each "
                    "source"
                )
        return self._wait(self._play(tasks, count))

    async def _play(self, tasks: Sequence[tuple[int, Task]], count: int) -> list[EpisodeGroup]:
        self._begin(tasks)
        return await self._take(count)

    def _begin(self, tasks: Sequence[tuple[int, Task]]) -> None:
        if self._requests is None:
            self._broken = self._loop.create_future()
            self._broken.add_done_callback(_seen)
            self._requests = make_client(self._sampler, self._sampling, self.schedule.concurrency)
            self._caller_of = self._stack.enter_context(calling(self._env))
        for number, task in tasks:
            seeded = {"seed": derive_seed(self._seed, number), **task}
            group = EpisodeGroup(number, seeded, [Episode() for _ in range(self._n)])
            calls = [self._caller_of(seeded) for _ in group.episodes]
            # All are live from the beginning, so that a sampler of many prompts waits for all of them
            places = [self._requests.acquire((number, place)) for place in range(self._n)]
            group.start(partial(self._one, group, places, calls))
            group.run_task = asyncio.create_task(self._whole(group, calls[0]))
            group.run_task.add_done_callback(_seen)
            self.open.append(group)

    async def _whole(self, group: EpisodeGroup, call: Caller) -> None:
        await group.play(self.schedule.keep or self._n)
        verifier: Any = getattr(self._env, "verifier", None)
        try:
            together = judges_group(verifier, group.task)
        except Exception as error:  # it may be a function of the user's; each episode has failed by that, too
            together = False
            for _, episode in group.ended:
                record_failure(error, episode)
        if together:
            await group.judge(verifier, call)
        for place, episode in enumerate(group.episodes):
            if episode.cut:
                seconds = self.schedule.deadline or math.nan
                episode.fail(f"cut: it was not over after {seconds:g} s", "timeout")
            self._check(group.number, place, episode)

    def _check(self, number: int, place: int, episode: Episode) -> None:
        """See that the rows of an episode account for each token that the sampler gave it.

        Of one that was cut, the last turn may have come too late to be in a row; it is counted nevertheless.
        """
        assert self._requests is not None
        drawn = sum(row.drawn for row in (episode, *episode.earlier))
        given = self._requests.num_sampled.pop((number, place), 0)
        if episode.cut and drawn < given:
            episode.last.drawn += given - drawn
        elif drawn != given:
            raise BatchError(
                f"rollout: the sampler gave {given} tokens to episode {place} of group {number}, and its rows account "
                f"for {drawn}; this is a defect of nrl, please report it"
            )

    async def _one(
        self,
        group: EpisodeGroup,
        places: "Sequence[asyncio.Future[None] | None]",
        calls: Sequence[Caller],
        place: int,
    ) -> None:
        assert self._requests is not None
        key, episode, sampler = (group.number, place), group.episodes[place], self._sampler
        requests = self._requests

        async def generate(tokens: list[int], limits: TurnLimits = NO_LIMITS) -> Completion:
            # Each turn has noise of its own: else an engine that counts from a request's beginning draws what it drew
            # in the turn before, and a question that is asked again has the same answer again
            turn = [len(episode.turns)] if episode.turns else []
            return await requests.generate(key, derive_seed(self._seed, *key, *turn), tokens, limits)

        try:
            if (entry := places[place]) is not None:
                await entry
            limits = sampler.tokenizer, sampler.context_length
            own = dict(group.task)  # what an environment notes in it is not for the others
            await play(episode, generate, self._env, own, *limits, render=group.render, call=calls[place])
        except BaseException as error:
            if not (episode.cut and isinstance(error, asyncio.CancelledError)):
                self._requests.end()  # all episodes end, too
                if isinstance(error, Exception) and not self._broken.done():
                    self._broken.set_exception(error)
                raise
        finally:
            self._requests.release(key)

    async def _take(self, count: int) -> list[EpisodeGroup]:
        deadline, in_order = self.schedule.deadline, self.schedule.in_order
        until = None if deadline is None else self._loop.time() + deadline
        pending = {group.run_task: group for group in (self.open[:count] if in_order else self.open)}
        ended: list[EpisodeGroup] = []
        while len(ended) < count:
            left = None if until is None else max(0.0, until - self._loop.time())
            when = asyncio.FIRST_EXCEPTION if in_order else asyncio.FIRST_COMPLETED
            waiting = asyncio.ensure_future(asyncio.wait(pending, timeout=left, return_when=when))
            either: list[asyncio.Future[Any]] = [waiting, self._broken]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._broken.done():  # also of a group that is not waited for
                self._broken.result()
            over, _ = waiting.result()
            for whole in over:
                whole.result()
                ended.append(pending.pop(whole))
            if until is not None and self._loop.time() >= until:
                break
        ended = sorted(ended, key=lambda group: group.number)[:count]
        late = list(pending.values())[: count - len(ended)]
        for group in late:
            group.cut_off()
        if late:
            await asyncio.wait([group.run_task for group in late])
        for group in late:
            group.run_task.result()
        ended = sorted([*ended, *late], key=lambda group: group.number)
        self.open = [group for group in self.open if group not in ended]
        return ended

    def close(self) -> None:
        """End everything, also what another thread waits for, which gets a CancelledError; environments are closed."""
        if self._loop.is_closed() or (_inside_a_loop() and asyncio.get_running_loop() is self._loop):
            return
        if not self._turn.acquire(blocking=False):
            with self._interrupting():
                if not self._turn.acquire(timeout=_PATIENCE):
                    return
        try:
            if not (self._loop.is_closed() or self._loop.is_running()):  # as in a thread that was left behind
                self._run(_ended(self._cancel()))
                self._stack.close()
                self._run(self._loop.shutdown_asyncgens())
                self._loop.close()
                self.open = []
        finally:
            self._turn.release()

    @contextmanager
    def _interrupting(self) -> Iterator[None]:
        """End what another thread's loop run waits for; what comes after that run is not meant."""
        try:
            asked = self._loop.call_soon_threadsafe(self._cancel)
        except RuntimeError:  # the loop was closed in this moment
            yield
            return
        yield
        asked.cancel()

    def _cancel(self) -> "set[asyncio.Task[Any]]":
        if self._requests is not None:
            self._requests.end()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        return tasks

    def _wait[T](self, work: Coroutine[Any, Any, T]) -> T:
        with self._turn:
            if self._loop.is_closed():
                work.close()
                raise asyncio.CancelledError(ENDED)
            return self._run(work)

    def _run[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Run to the end; in another thread if a loop is running already, as in a notebook."""
        if not _inside_a_loop():
            # Not `asyncio.run`, which would delay Ctrl-C until the sampler has decoded its last row
            return self._loop.run_until_complete(work)
        beside: futures.Future[T] = DaemonThreadPool(1).submit(self._loop.run_until_complete, work)
        try:
            return beside.result()
        except BaseException:
            with self._interrupting():
                futures.wait([beside], _PATIENCE)
            raise


def _inside_a_loop() -> bool:
    try:
        return asyncio.get_running_loop().is_running()
    except RuntimeError:
        return False


def _seen(task: "asyncio.Future[None]") -> None:
    """See an error that nobody may come to see, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


async def _ended(tasks: "set[asyncio.Task[Any]]") -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


def derive_seed(*parts: int) -> int:
    """63 bits that depend on all parts: a hash, so that neighbours have nothing in common."""
    digest = hashlib.blake2b(" ".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
