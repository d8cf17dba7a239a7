"""Calls of verifiers and environments: user code, which may raise anything, and may never return.

`nrl.rollout.episode` asks for a call of ``env.reset`` or ``env.step``; in `nrl.envs.single_turn` the step calls the
verifier. `nrl.envs.inprocess.threads` has the threads.

Plain functions run in daemon threads: in their order, one after the other, as long as they are quick, and side by side
when they are slow. Coroutines run on an event loop of their own. So the program's own loop only waits for answers.
Calls that do not answer in time are given up.
"""

import asyncio
import contextvars
import inspect
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from nrl.envs.inprocess.threads import NAME, LoopThread, UserCall, give_up
from nrl.envs.inprocess.tracebacks import Failed, stack_text
from nrl.envs.types import Env, Task, asynchronous, timeout_of
from nrl.log import error_text
from nrl.log.slow_wait import SILENCE
from nrl.runtime.threads import DaemonThreadPool

__all__ = ["Caller", "Calls", "calling"]

_TICK = 0.05  # seconds between two looks for slow calls
_WORKERS = 32  # plain calls at once, where some end; also the loops that replace a blocked one
_STANDSTILL = 512  # plain calls at once, where none ends; both without those that were given up

_DROPPING = DaemonThreadPool(name=f"{NAME}: closing")

_CLOSING = 10.0  # seconds that a `close` may take, so that an interrupt does not wait for long


class Caller:
    """Calls an environment's functions for one task, with the task's timeout and in a context of its own."""

    def __init__(self, calls: "Calls", env: Env, timeout: float | None) -> None:
        self._call = partial(calls.begin, timeout=timeout, context=contextvars.copy_context())
        self._close = getattr(env, "close", None)

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Awaitable[Any]:
        """The value of ``fn(*args)``; raises `Failed`."""
        return self._call(fn, *args)

    def reset(self, fn: Callable[..., Any], task: Task) -> Awaitable[Any]:
        """As a call; the state of one that was given up is closed when it comes."""
        return self._call(fn, task, unwanted=self._unwanted if self._close else None)

    def _unwanted(self, found: Any) -> None:
        assert self._close is not None
        if isinstance(found, tuple) and inspect.isawaitable(closed := self._close(found[0])):
            asyncio.run(_awaited(closed))

    async def close(self, state: Any) -> None:
        """Call ``close``, if there is one, and wait for it also when cancelled meanwhile; it has few seconds."""
        if self._close is None:
            return
        limit = min(_CLOSING, self._call.keywords["timeout"] or _CLOSING)
        # In a copy of the context, since a call that was given up may be in it
        closed = self._call(self._close, state, timeout=limit, context=self._call.keywords["context"].copy())
        cancelled: asyncio.CancelledError | None = None
        while not closed.done():
            try:
                await asyncio.shield(closed)
            except asyncio.CancelledError as error:
                cancelled = error
            except Failed:
                pass
        if cancelled is not None:
            raise cancelled
        closed.result()


@contextmanager
def calling(env: Env) -> Iterator[Callable[[Task], Caller]]:
    """Make callers of an environment's functions, one a task.

    Where the environment's own function of timeouts fails for a task, so does each call for it.
    """
    calls = Calls()

    def caller(task: Task) -> Caller:
        try:
            return Caller(calls, env, timeout_of(env, task))
        except Exception as error:
            if not callable(getattr(env, "timeout", None)):
                raise
            return _Broken(calls, env, Failed(f"{error_text(error)} (from the environment's timeout)"))

    try:
        yield caller
    finally:
        calls.close()


class _Broken(Caller):
    """A caller for a task that has no timeout: each call raises why."""

    def __init__(self, calls: "Calls", env: Env, error: Failed) -> None:
        super().__init__(calls, env, None)
        self._error = error

    async def _raised(self) -> Any:
        raise self._error

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Awaitable[Any]:
        """Raise the error."""
        return self._raised()

    def reset(self, fn: Callable[..., Any], task: Task) -> Awaitable[Any]:
        """Raise the error."""
        return self._raised()


class Calls:
    """Calls of user code for the episodes of a rollout; made, used and closed on the rollout's loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()  # whether a call is over or given up
        self._new: list[UserCall] = []
        self._open: dict[UserCall, None] = {}
        self._over: deque[UserCall] = deque()
        self._queue: queue.SimpleQueue[UserCall | None] = queue.SimpleQueue()
        self._workers = 0
        self._loops: list[LoopThread] = []  # the last one is where coroutines begin
        self._looked = 0.0
        self._silence = SILENCE
        self._threads: list[threading.Thread] = []
        self._dropping: list[futures.Future[None]] = []
        self._closed, self._ends = False, 0
        self._next: asyncio.TimerHandle | None = None

    def begin(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float | None,
        context: contextvars.Context,
        unwanted: Callable[[Any], Any] | None = None,
    ) -> "asyncio.Future[Any]":
        """Begin to call a function, and to await its value if that is awaitable.

        Args:
            fn: plain or ``async``.
            *args: its arguments.
            timeout: seconds that it may take; None: no limit.
            context: in which it runs; no two calls at a time have the same.
            unwanted: called in a thread, once, with a value that nobody waits for any more.

        Returns:
            Its value, later; or `Failed`, if it raised anything but Ctrl-C or an `ExecutableError`, or did not return
            in time.
        """
        call = UserCall(fn, args, timeout, context, self._loop.create_future(), unwanted)
        if not self._new:
            self._loop.call_soon(self._begin)  # together with the other episodes' calls of this moment
        self._new.append(call)
        return call.answer

    def _drop_unwanted(self) -> None:
        """Hand on what has come for nobody, such as the states of resets that were cancelled."""
        with suppress(IndexError):  # there is none, or another thread has taken it
            while True:
                self._drop(self._over.popleft())

    def _drop(self, call: UserCall) -> None:
        if call.unwanted is not None and call.returned:
            self._dropping.append(_DROPPING.submit(call.drop))

    def close(self) -> None:
        """Let the threads end, each after the call that it is in."""
        self._closed = True
        self._drop_unwanted()
        if self._next is not None:
            self._next.cancel()
        for _ in range(self._workers):
            self._queue.put(None)
        for loop in self._loops:
            loop.end()
        until = time.monotonic() + _TICK * 4  # so that `stuck` does not count threads that are just ending
        for loop in self._loops:
            loop.join(until)
        futures.wait(self._dropping, _CLOSING)
        busy = {call.thread for call in self._open}
        until = max(until, time.monotonic() + _TICK * 4)
        for thread in self._threads:  # so that the exit of the program does not meet one that is just ending
            if thread not in busy:
                thread.join(max(0.0, until - time.monotonic()))

    # --- Calls begin: plain functions in threads, coroutines on the last loop.

    def _begin(self) -> None:
        new, self._new = self._new, []
        now = time.monotonic()
        coroutines = []
        for call in new:
            call.asked = now
            self._open[call] = None
            if asynchronous(call.fn):
                coroutines.append(call)
            else:
                self._queue.put(call)
        if len(coroutines) < len(new) and not self._workers:
            self._hire()
        self._begin_on_loop(coroutines)
        if self._next is None and self._open:
            self._next = self._loop.call_later(_TICK, self._look)

    def _hire(self) -> None:
        self._workers += 1
        thread = threading.Thread(target=self._work, name=NAME, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self) -> None:
        """Make plain calls, one after the other, in a worker's thread."""
        while (call := self._queue.get()) is not None:
            if call.answer.cancelled():
                continue
            call.thread, call.began = threading.current_thread(), time.monotonic()
            call.run()
            with self._lock:
                call.over = True
            if call.given_up:
                with suppress(Exception):
                    call.drop()
                return
            self._note(call)
            if self._queue.empty():  # else `_collect` would run once a call
                self._wake()

    def _begin_on_loop(self, calls: Sequence[UserCall]) -> None:
        """Begin coroutines together, so that their order does not depend on threads."""
        if not calls:
            return
        if not self._loops or self._loops[-1].cancelling:
            self._loops.append(LoopThread())
        for call in calls:
            call.began, call.used = None, 0.0
        self._loops[-1].begin(calls, self._claim, self._ended)

    def _claim(self, call: UserCall, loop: LoopThread) -> bool:
        """Tell a loop, in its thread, whether the call is to begin there; it may have been moved."""
        with self._lock:
            claimed = call.loop is loop and call.began is None and not call.answer.cancelled()
            if claimed:
                call.began = time.monotonic()
        return claimed

    def _ended(self, call: UserCall) -> None:
        """Note, in the thread of a loop, that a call has ended."""
        with self._lock:
            call.over = True
        self._note(call)
        self._wake()

    # --- Calls end.

    def _note(self, call: UserCall) -> None:
        """Note, in any thread, that a call is over; where nobody will look any more, drop it."""
        self._over.append(call)
        if self._closed:
            self._drop_unwanted()

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody wants to know
            self._loop.call_soon_threadsafe(self._collect)

    def _collect(self) -> None:
        coroutines = []
        while self._over:
            call = self._over.popleft()
            self._ends += 1
            if call.answer.done():
                self._open.pop(call, None)
                self._drop(call)
            elif call.error is None and call.loop is None and inspect.isawaitable(call.value):
                call.fn, call.args, call.over = _awaited, (call.value,), False
                coroutines.append(call)
            else:
                self._answer(call)
        self._begin_on_loop(coroutines)

    def _answer(self, call: UserCall) -> None:
        self._open.pop(call, None)
        if call.shown:
            print(call.shown, file=sys.stderr, flush=True)  # noqa: T201
        if call.error is None:
            call.answer.set_result(call.value)
        else:
            call.answer.set_exception(call.error)

    # --- Calls take too long.

    def _look(self) -> None:
        """Every tick while there are calls: give up late ones, and hire a worker if calls wait for one."""
        self._collect()
        now, waits = time.monotonic(), 0
        ended, self._ends = self._ends, 0
        tasks = {call.task for call in self._open}
        for loop in self._loops:
            loop.look(tasks)
        for call in list(self._open):
            if call.answer.done():  # cancelled
                self._open.pop(call)
                if call.loop is not None:
                    call.loop.cancel(call)
                elif call.began is not None:
                    self._abandon(call)
            elif call.loop is not None:
                if call.loop.blocked_by in (None, call.task):
                    call.used += now - max(self._looked, call.began or call.asked)
                if call.late and call.began is None:
                    self._move(call.loop)
                elif call.late:
                    self._give_up(call)
            elif call.began is None:
                waits += now - call.asked > _TICK / 2
            else:
                call.used = now - call.began
                if call.late:
                    self._give_up(call)
        self._looked = now
        self._say()
        # All workers may be in calls that wait for something: then twice as many
        more = 1 if ended else max(1, self._workers)
        for _ in range(min(waits, more, (_WORKERS if ended else _STANDSTILL) - self._workers)):
            self._hire()
        self._next = self._loop.call_later(_TICK, self._look) if self._open else None

    def _say(self) -> None:
        """Say what a rollout waits for, after a while and then less and less often."""
        slow = [call for call in self._open if call.used > self._silence]
        if slow:
            longest = max(slow, key=lambda call: call.used)
            print(  # noqa: T201
                f"rollout: {len(slow)} of {len(self._open)} calls of the environment have not returned, {longest.name} "
                f"for {longest.used:.0f} s",
                file=sys.stderr,
                flush=True,
            )
            self._silence *= 2

    def _move(self, blocked: LoopThread) -> None:
        """Move calls that have not begun on a blocked loop to several loops, since more of them may block."""
        calls = [call for call in self._open if call.loop is blocked and call.began is None]
        loops = [LoopThread() for _ in calls[:_WORKERS]]
        with self._lock:
            calls = [call for call in calls if call.began is None]
            for number, call in enumerate(calls):
                call.loop, call.used = loops[number % len(loops)], 0.0
        for number, loop in enumerate(loops):
            loop.begin(calls[number :: len(loops)], self._claim, self._ended)
        self._loops += loops

    def _leave(self, call: UserCall) -> bool:
        """Mark a call as given up, unless it is over."""
        with self._lock:
            if not call.over:
                give_up(call)
            return not call.over

    def _abandon(self, call: UserCall) -> bool:
        """Leave a plain call, and its thread, to itself; another worker may take its place."""
        if not self._leave(call):
            return False
        self._workers -= 1
        if call.thread in self._threads:
            self._threads.remove(call.thread)
        return True

    def _give_up(self, call: UserCall) -> None:
        if call.loop is not None:
            if not self._leave(call):
                return
            call.loop.cancel(call)
            if call.loop.blocked:
                self._move(call.loop)
        elif not self._abandon(call):
            return
        elif call.thread is not None:
            call.shown = stack_text(sys._current_frames().get(call.thread.ident or 0))
        call.error = Failed(
            f"TimeoutError: {call.name} did not return within {call.timeout:g} s; mend it, or give the environment "
            "another timeout"
        )
        self._answer(call)


async def _awaited(awaitable: Any) -> Any:
    return await awaitable
