"""The workers of a pool, and the calls that wait for them: the same for processes of this machine and for a mesh."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent import futures
from contextlib import suppress
from types import EllipsisType
from typing import Any, Protocol

import attrs

from nrl.envs.types import TIMEOUT, Task
from nrl.errors import EnvError

__all__ = ["NoRoom", "NotBegun", "Place", "Pool", "Worker"]

_AGAIN = 60.0  # seconds after which a pool looks again for room for more workers


class NoRoom(Exception):
    """A place has found no room to start in; the argument says why."""


class NotBegun(Exception):
    """A place is gone, and had not begun the call that it was given; the argument says why it is gone."""


class Place(Protocol):
    """Where a worker's calls are made, one after the other: a process."""

    after_late: str
    """What becomes of a call that is late, for its error."""

    def start(self) -> None:
        """Start it; raises what a call that waits is to raise.

        Raises:
            NoRoom: other workers have to do without this one; where there are none, all calls that wait fail.
        """
        ...

    def ask(self, what: str, args: tuple[Any, ...], timeout: float | None) -> tuple[bool, Any]:
        """Make a call: whether it returned, and its value, or what it raised.

        Raises:
            TimeoutError: it took too long; the worker kills the place.
            EOFError, OSError: the place is gone; `fate` tells why.
            NotBegun: the place was gone before.
        """
        ...

    def kill(self) -> None:
        """End it, with all that it has started; called in any thread, also before it has started."""
        ...

    def fate(self, why: str) -> str:
        """How it ended; ``why`` it was killed, if it was."""
        ...

    def leave(self) -> None:
        """Give back what belongs to it; it is not used any more."""
        ...


@attrs.define(eq=False)
class _Call:
    """A call, and who waits for it."""

    what: str
    args: tuple[Any, ...]
    timeout: float | None
    answer: "futures.Future[tuple[Worker, Any]]" = attrs.field(factory=futures.Future)

    def begins(self) -> bool:
        """Whether somebody waits for it."""
        return self.answer.running() or self.answer.set_running_or_notify_cancel()  # once more after `NotBegun`


class Pool:
    """Workers, and the calls that wait for one of them or for a certain one.

    Args:
        f: a verifier or an environment.
        transform: how errors name what made the pool.
        most: how many workers it may have.
        place: makes the place of a worker, by the worker's number, which is below ``most``; it starts nothing yet.
        timeout: seconds of a call; None: no limit; ...: as ``f`` says, or a minute.
    """

    def __init__(
        self,
        f: Any,
        transform: str,
        most: int,
        place: Callable[[int], Place],
        timeout: float | EllipsisType | None,
    ) -> None:
        self.most, self.place, self.transform = most, place, transform
        self._timeout = getattr(f, "timeout", TIMEOUT) if isinstance(timeout, EllipsisType) else timeout
        self.who = f"{transform}({getattr(f, '__name__', type(f).__name__)})"
        self.changed = threading.Condition()
        self.waiting: deque[_Call] = deque()
        self.workers: list[Worker] = []
        self.ended = False
        self.again = 0.0  # when to look for room again, after a worker has found none; 0: none has

    async def call(self, what: str, task: Task, *args: Any, worker: "Worker | None" = None) -> Any:
        """The value of a call."""
        return (await self.placed(what, task, *args, worker=worker))[1]

    async def placed(self, what: str, task: Task, *args: Any, worker: "Worker | None" = None) -> Any:
        """The worker that made a call, and its value. If this is cancelled while it runs, the worker is killed."""
        timeout = self._timeout(task) if callable(self._timeout) else self._timeout
        call = _Call(what, args, timeout)
        with self.changed:
            if worker is not None and worker.dead:
                raise worker.gone()
            if worker is None and what == "reset":  # its episode stays there, so they are spread evenly
                if self.room() and all(each.load for each in self.workers):
                    self.hire()
                worker = min(self.workers, key=lambda each: (bool(self.again) and not each.started, each.load))
            if worker is not None and what == "close":  # which takes no time
                worker.waiting.appendleft(call)
            elif worker is not None:
                worker.waiting.append(call)
            else:
                self.waiting.append(call)
                if len(self.waiting) > sum(each.idle for each in self.workers) and self.room():
                    self.hire()
            self.changed.notify_all()
        answer = asyncio.wrap_future(call.answer)
        try:
            return await (asyncio.shield(answer) if what == "close" else answer)
        except asyncio.CancelledError:
            if what == "close":  # it is made all the same
                raise
            with self.changed:
                with suppress(ValueError):  # it waits once more, after `NotBegun`
                    self.waiting.remove(call)
                for each in self.workers:
                    if each.running is call:
                        each.kill("the call was given up")
            raise

    def works(self) -> bool:
        """Whether some worker can make calls."""
        return any(each.started for each in self.workers)

    def room(self) -> bool:
        """Whether there may be another worker now; the caller holds the lock."""
        return len(self.workers) < self.most and (not self.workers or time.monotonic() >= self.again)

    def hire(self) -> None:
        """Have another worker, with the lowest number that is free; the caller holds the lock."""
        number = min(set(range(self.most)) - {each.number for each in self.workers})
        self.workers.append(Worker(self, number))

    def end(self) -> None:
        """End all workers."""
        with self.changed:
            self.ended = True
            for worker in self.workers:
                worker.kill("the pool has ended")
            self.changed.notify_all()


class Worker:
    """A place, and the thread that makes its calls."""

    def __init__(self, pool: Pool, number: int) -> None:
        self.pool, self.number = pool, number
        self.waiting: deque[_Call] = deque()
        self.running: _Call | None = None
        self.idle, self.started, self.episodes = True, False, 0
        self.dead = ""
        """Why it is gone; empty: it is there."""
        self._place = pool.place(number)
        threading.Thread(target=self._work, name=pool.who, daemon=True).start()

    def kill(self, why: str) -> None:
        """End the place and all that it has started."""
        self.dead = self.dead or why
        self._place.kill()

    @property
    def load(self) -> int:
        """How many episodes it has or is to have."""
        return self.episodes + sum(call.what == "reset" for call in (*self.waiting, self.running) if call)

    def gone(self) -> EnvError:
        """The error of an episode that it had."""
        return EnvError(
            f"{self.pool.who}: the process that had this episode is gone, with all that it had: {self.dead}"
        )

    def _next(self) -> _Call | None:
        pool = self.pool
        with pool.changed:
            self.running, self.idle = None, True
            pool.changed.wait_for(lambda: self.dead or self.waiting or pool.waiting)
            if self.dead:
                return None
            call = (self.waiting or pool.waiting).popleft()
            self.running, self.idle = call, False
            return call

    def _work(self) -> None:
        error: Exception | None = None
        try:
            self._place.start()  # before it takes a call, which another worker may make sooner
            with self.pool.changed:
                self.started, self.pool.again = True, 0.0
            while (call := self._next()) is not None:
                if call.begins():
                    self._make(call)
        except Exception as found:
            error = found
        with self.pool.changed:
            self.kill("it has failed")
            self.pool.workers.remove(self)
            running, left = self.running, [each for each in self.waiting if each.what != "reset"]
            anew = [each for each in self.waiting if each.what == "reset"]
            if isinstance(error, NotBegun) and running is not None:
                (anew if running.what in ("reset", "verify") else left).insert(0, running)
                running = None
            self.pool.waiting.extendleft(reversed(anew))  # nothing of theirs is lost
            failed = [] if running is None else [running]
            if not self.started:
                failed, error = self._refused(error)
            if self.pool.waiting and not self.pool.ended and self.pool.room():  # for which another one has to start
                self.pool.hire()
            self.pool.changed.notify_all()
        for each, raised in [*((each, error) for each in failed), *((each, self.gone()) for each in left)]:
            if raised is not None:
                with suppress(futures.InvalidStateError):  # nobody waits for it any more
                    each.answer.set_exception(raised)
        self._place.leave()

    def _refused(self, error: Exception | None) -> tuple[list[_Call], Exception | None]:
        """The calls that fail since this worker has not started, and with what; the caller holds the lock."""
        waiting = self.pool.waiting
        if not isinstance(error, NoRoom):
            return [waiting.popleft()] if waiting else [], error
        self.pool.again = time.monotonic() + _AGAIN
        if self.pool.works():  # which does without
            return [], None
        failed = list(waiting)
        waiting.clear()
        return failed, EnvError(f"{self.pool.who}: {error}")

    def _make(self, call: _Call) -> None:
        """Make a call; raises what ends the worker."""
        who = self.pool.who
        try:
            good, value = self._place.ask(call.what, call.args, call.timeout)
        except TimeoutError:
            self.kill(f"a {call.what} of another episode did not return within {call.timeout:g} s")
            raise TimeoutError(
                f"{who} did not return within {call.timeout:g} s, and {self._place.after_late}; mend it, or give "
                f"{self.pool.transform.partition('(')[0]}(timeout=) more seconds"
            ) from None
        except NotBegun as error:
            self.dead = self.dead or str(error)
            raise
        except (EOFError, OSError):
            self.dead = self._place.fate(self.dead)
            raise EnvError(f"{who}: {self.dead}") from None
        self.episodes += {"reset": int(good), "close": -1}.get(call.what, 0)
        with self.pool.changed:  # before the answer, since who has it may ask again: that takes no other process
            self.running, self.idle = None, True
        if good:
            call.answer.set_result((self, value))
        else:
            # A StopIteration asyncio gives nobody, so that one would wait for ever. A KeyboardInterrupt that comes from
            # elsewhere is nobody's Ctrl-C here, nor is a CancelledError the end of who waits
            own = isinstance(value, Exception | SystemExit) and not isinstance(value, StopIteration)
            call.answer.set_exception(value if own else RuntimeError(f"{type(value).__name__}: {value}"))
