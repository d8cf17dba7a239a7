"""Calling user code, which may raise anything and may never return: threads, loops and time limits.

Plain functions run in daemon threads: one after the other, in their order, as long as they are quick, and side by side
where they are not. Coroutines run on an event loop of their own. So the program's own loop waits for nothing but
answers. What does not answer in time is given up: a thread cannot be killed, but nobody waits for it any more, at the
end of the process neither.
"""

import asyncio
import contextvars
import functools
import inspect
import queue
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import attrs

from nrl.envs.contract import asynchronous
from nrl.log import redact
from nrl.runtime.threads import Daemons

__all__ = ["Calls", "Failed", "said", "stuck"]

_TICK = 0.05  # seconds: how often one looks for calls that are slow
_WORKERS = 32  # plain calls at once, besides those that were given up; loops, where one was blocked to the limit
_LONGEST = 1000  # characters of an error's message
_OWN = str(Path(__file__).parents[1])
_given_up: "list[_Call]" = []
_shown: set[tuple[str, str, int]] = set()  # kinds of failures: what was raised, and where


class Failed(Exception):
    """A call of user code has no value.

    >>> str(Failed("ValueError: no"))
    'ValueError: no'
    """


def said(error: BaseException) -> str:
    """What an exception says, whatever its ``__str__`` does; secrets are masked.

    >>> said(ValueError("no"))
    'ValueError: no'
    """
    try:
        text = str(error)
    except BaseException as other:
        text = f"(its message cannot be shown: its __str__ raised {type(other).__name__})"
    return f"{type(error).__name__}: {redact(text[: 5 * _LONGEST])[:_LONGEST]}"


def stuck() -> int:
    """How many threads of this process are still in a call that was given up."""
    _given_up[:] = [call for call in _given_up if not call.over]
    return len({call.aside or call.thread for call in _given_up})


@attrs.define(eq=False)
class _Call:
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    timeout: float | None
    context: contextvars.Context
    answer: "asyncio.Future[Any]"
    name: str = attrs.field(default=attrs.Factory(lambda self: _name(self.fn), takes_self=True))
    asked: float = 0.0
    began: float | None = None
    used: float = 0.0  # seconds that count, of a coroutine: not those in which another one blocked its loop
    thread: threading.Thread | None = None  # that it is in
    task: "asyncio.Task[None] | None" = None
    aside: "_Aside | None" = None
    over: bool = False  # it has returned or raised
    given_up: bool = False
    value: Any = None
    error: BaseException | None = None
    shown: str = ""  # a traceback, the first time

    @property
    def late(self) -> bool:
        return self.timeout is not None and self.used > self.timeout

    def run(self) -> None:
        """In a thread."""
        try:
            self.value = self.context.run(self.fn, *self.args)
        except BaseException as error:
            self.fail(error)

    async def wait(self) -> None:
        """On a loop."""
        self.task = asyncio.current_task()
        try:
            found = self.fn(*self.args)
            self.value = await found if inspect.isawaitable(found) else found
        except BaseException as error:  # also a CancelledError that is its own
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Here, since what exceptions say is user code too; frames, and so the arguments, are let go."""
        if isinstance(error, KeyboardInterrupt):
            self.error = error
            return
        self.error, self.shown = Failed(said(error)), "" if self.given_up else _traceback(error)


class Calls:
    """Calls of user code for the episodes of a rollout; made, used and closed on its loop.

    >>> async def once():
    ...     calls = Calls()
    ...     try:
    ...         return await calls.call(len, "abc", timeout=1.0, context=contextvars.copy_context())
    ...     finally:
    ...         calls.close()
    >>> asyncio.run(once())
    3
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()  # whether a call is over or given up
        self._new: list[_Call] = []
        self._open: dict[_Call, None] = {}
        self._over: deque[_Call] = deque()
        self._queue: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._workers = 0
        self._asides: list[_Aside] = []  # the last one is where calls begin
        self._looked = 0.0
        self._next: asyncio.TimerHandle | None = None

    async def call(
        self, fn: Callable[..., Any], *args: Any, timeout: float | None, context: contextvars.Context
    ) -> Any:
        """What a function returns, or the coroutine that it makes.

        Args:
            fn: plain or ``async``.
            *args: its arguments.
            timeout: seconds that it may take; None: no limit.
            context: in which it runs; no two calls at a time have the same.

        Raises:
            Failed: it raised, whatever that was (but for Ctrl-C), or did not return in time.
        """
        call = _Call(fn, args, timeout, context, self._loop.create_future())
        if not self._new:
            self._loop.call_soon(self._begin)  # with those of all episodes that come to one now
        self._new.append(call)
        return await call.answer

    def close(self) -> None:
        """Let go of the threads; those that are in a call end after it."""
        if self._next is not None:
            self._next.cancel()
        for _ in range(self._workers):
            self._queue.put(None)
        for aside in self._asides:
            aside.end()
        until = time.monotonic() + _TICK * 4  # so that only what is really stuck is said to be
        for aside in self._asides:
            aside.join(until)

    def _begin(self) -> None:
        new, self._new = self._new, []
        now = time.monotonic()
        later = []
        for call in new:
            call.asked = now
            self._open[call] = None
            if asynchronous(call.fn):
                later.append(call)
            else:
                self._queue.put(call)
        if len(later) < len(new) and not self._workers:
            self._hire()
        self._await(later)
        if self._next is None and self._open:
            self._next = self._loop.call_later(_TICK, self._look)

    def _hire(self) -> None:
        self._workers += 1
        threading.Thread(target=self._work, name="environment", daemon=True).start()

    def _work(self) -> None:
        """In a thread."""
        while (call := self._queue.get()) is not None:
            if call.answer.cancelled():
                continue
            call.thread, call.began = threading.current_thread(), time.monotonic()
            call.run()
            with self._lock:
                call.over = True
            if call.given_up:
                return
            self._over.append(call)
            if self._queue.empty():  # else who collects would be woken once a call
                self._wake()

    def _await(self, calls: Sequence[_Call]) -> None:
        """All of them together, so that what they do at the same moment does not depend on threads."""
        if not calls:
            return
        if not self._asides or self._asides[-1].deaf:
            self._asides.append(_Aside())
        for call in calls:
            call.began, call.used = None, 0.0
        self._asides[-1].begin(calls, self._claim, self._ended)

    def _claim(self, call: _Call, aside: "_Aside") -> bool:
        """On a loop aside: whether the call is to begin there; it may have been moved."""
        with self._lock:
            claimed = call.aside is aside and call.began is None
            if claimed:
                call.began = time.monotonic()
        return claimed

    def _ended(self, call: _Call) -> None:
        """On a loop aside."""
        with self._lock:
            call.over = True
        self._over.append(call)
        self._wake()

    def _move(self, blocked: "_Aside") -> None:
        """What has not begun on a loop that is blocked to the limit goes to several, since more of it may block."""
        calls = [call for call in self._open if call.aside is blocked and call.began is None]
        asides = [_Aside() for _ in calls[:_WORKERS]]
        with self._lock:
            calls = [call for call in calls if call.began is None]
            for number, call in enumerate(calls):
                call.aside, call.used = asides[number % len(asides)], 0.0
        for number, aside in enumerate(asides):
            aside.begin(calls[number :: len(asides)], self._claim, self._ended)
        self._asides += asides

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody wants to know
            self._loop.call_soon_threadsafe(self._collect)

    def _collect(self) -> None:
        later = []
        while self._over:
            call = self._over.popleft()
            if call.answer.done():
                self._open.pop(call, None)
            elif call.error is None and call.aside is None and inspect.isawaitable(call.value):
                call.fn, call.args, call.over = _given, (call.value,), False
                later.append(call)
            else:
                self._answer(call)
        self._await(later)

    def _answer(self, call: _Call) -> None:
        self._open.pop(call, None)
        if call.shown:
            print(call.shown, file=sys.stderr, flush=True)  # noqa: T201
        if call.error is None:
            call.answer.set_result(call.value)
        else:
            call.answer.set_exception(call.error)

    def _look(self) -> None:
        """Now and then, while there are calls: who is late, and is somebody waiting in vain."""
        self._collect()
        now, waits = time.monotonic(), False
        tasks = {call.task for call in self._open}
        for aside in self._asides:
            aside.look(tasks)
        for call in list(self._open):
            if call.answer.done():  # cancelled
                self._open.pop(call)
            elif call.aside is not None:
                if call.aside.holder in (None, call.task):
                    call.used += now - max(self._looked, call.began or call.asked)
                if call.late and call.began is None:
                    self._move(call.aside)
                elif call.late:
                    self._give_up(call)
            elif call.began is None:
                waits = waits or now - call.asked > _TICK / 2
            else:
                call.used = now - call.began
                if call.late:
                    self._give_up(call)
        self._looked = now
        if waits and self._workers < _WORKERS:
            self._hire()
        self._next = self._loop.call_later(_TICK, self._look) if self._open else None

    def _give_up(self, call: _Call) -> None:
        with self._lock:
            if call.over:
                return
            call.given_up = True
        _given_up.append(call)
        if call.aside is not None:
            call.aside.cancel(call)
            if call.aside.blocked:
                self._move(call.aside)
        elif call.thread is not None:
            self._workers -= 1
            call.shown = _where(sys._current_frames().get(call.thread.ident or 0))
        call.error = Failed(
            f"TimeoutError: {call.name} did not return within {call.timeout:g} s; mend it, or give the environment "
            "another timeout"
        )
        self._answer(call)


async def _given(awaitable: Any) -> Any:
    return await awaitable


def _name(fn: Any) -> str:
    """Of what the user wrote, within what nrl or `functools` made of it."""
    while (inner := fn.func if isinstance(fn, functools.partial) else getattr(fn, "__wrapped__", None)) is not None:
        fn = inner
    return str(getattr(fn, "__name__", type(fn).__name__))


class _Aside:
    """An event loop in a thread of its own, for coroutines that may block it."""

    def __init__(self) -> None:
        self.deaf = False  # it was asked to cancel something, and has not come to it
        self.blocked = False  # it did not come to anything between the last two looks
        self.holder: asyncio.Task[Any] | None = None  # the call that blocks it
        self._beats = True  # it has come to what the last look asked
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(Daemons())
        self._thread = threading.Thread(target=self._run, name="environment: loop", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()

    def begin(
        self, calls: Sequence[_Call], claim: Callable[[_Call, "_Aside"], bool], ended: Callable[[_Call], None]
    ) -> None:
        """Start those that are still to begin here, and say when each has ended."""

        async def run(call: _Call) -> None:
            await call.wait()
            ended(call)  # here, and not by a callback, which would wait for what others do

        def start(call: _Call) -> None:
            if claim(call, self):  # and it begins at once, so that until then it may be moved
                asyncio.Task(run(call), loop=self._loop, context=call.context, eager_start=True)

        def every() -> None:
            for call in calls:
                self._loop.call_soon(start, call)

        for call in calls:
            call.aside = self
        self._loop.call_soon_threadsafe(every)

    def look(self, tasks: Set[Any]) -> None:
        """Is it blocked, and by which of these: then only its time counts.

        Where it is none of them, everybody's does: nobody waits for ever for what was given up.
        """
        self.blocked = not self._beats
        running = asyncio.current_task(self._loop) if self.blocked else None
        self.holder = running if running in tasks else None
        if self._beats:
            self._beats = False
            self._loop.call_soon_threadsafe(lambda: setattr(self, "_beats", True))

    def cancel(self, call: _Call) -> None:
        """Ask a coroutine to end."""

        def ask() -> None:
            self.deaf = False
            if call.task is not None:
                call.task.cancel()

        self.deaf = True
        self._loop.call_soon_threadsafe(ask)

    def end(self) -> None:
        """Cancel what runs, and end; where something does not let itself be cancelled, the thread is left to it."""

        async def every() -> None:
            tasks = asyncio.all_tasks(self._loop) - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._loop.stop()

        self._loop.call_soon_threadsafe(lambda: setattr(self, "_last", self._loop.create_task(every())))

    def join(self, until: float) -> None:
        """Wait for what was given up to end."""
        if any(call.aside is self and not call.over for call in _given_up):
            self._thread.join(max(0.0, until - time.monotonic()))


def _traceback(error: BaseException) -> str:
    """The frames of user code, where there are any, and where none was shown for such an error before."""
    tb, last = error.__traceback__, error.__traceback__
    while tb is not None and not _user(tb.tb_frame):
        tb = tb.tb_next
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if tb is None or last is None or not _first(type(error).__name__, last.tb_frame, last.tb_lineno):
        return ""
    text = redact("".join(traceback.TracebackException(type(error), error, tb).format()))
    return f"rollout: an environment or verifier raised (said once for each place):\n{text[-5 * _LONGEST :].rstrip()}"


def _where(frame: FrameType | None) -> str:
    """Where a thread is that does not return."""
    users = [each for each in traceback.walk_stack(frame) if frame and _user(each[0])]
    if not users or not _first("TimeoutError", users[-1][0], 0):
        return ""
    text = redact("".join(traceback.StackSummary.extract(iter(reversed(users))).format()))
    return f"rollout: an environment or verifier does not return (said once for each); it is at\n{text.rstrip()}"


def _user(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith((_OWN, asyncio.__path__[0], threading.__file__))


def _first(what: str, frame: FrameType, line: int) -> bool:
    kind = what, f"{frame.f_code.co_filename} {frame.f_code.co_qualname}", line
    new = kind not in _shown
    _shown.add(kind)
    return new
