"""How an episode calls user code, which is anybody's: it may raise whatever there is, and it may never return.

Plain functions run in daemon threads: one after the other, in their order, as long as they are quick, and side by side
where they are not. Coroutines run on an event loop of their own. So the program's own loop waits for nothing but
answers. What does not answer in time is given up: a thread cannot be killed, but nobody waits for it any more, at the
end of the process neither.
"""

import asyncio
import contextvars
import inspect
import queue
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import attrs

from nrl.envs.base import asynchronous
from nrl.threads import Daemons

__all__ = ["Calls", "Failed", "said", "stuck"]

_TICK = 0.05  # seconds: how often one looks for calls that are slow
_WORKERS = 32  # plain calls at once, besides those that were given up
_LONGEST = 1000  # characters of an error's message
_OWN = str(Path(__file__).parent)
_given_up: "list[_Call]" = []
_shown: set[tuple[str, str, int]] = set()  # kinds of failures: what was raised, and where


class Failed(Exception):
    """A call of user code has no value.

    >>> str(Failed("ValueError: no"))
    'ValueError: no'
    """


def said(error: BaseException) -> str:
    """What an exception says, whatever its ``__str__`` does.

    >>> said(ValueError("no"))
    'ValueError: no'
    """
    try:
        text = str(error)
    except BaseException as other:
        text = f"(its message cannot be shown: its __str__ raised {type(other).__name__})"
    return f"{type(error).__name__}: {text[:_LONGEST]}"


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
    asked: float = 0.0
    began: float | None = None
    thread: threading.Thread | None = None  # that it is in
    task: "asyncio.Task[None] | None" = None
    aside: "_Aside | None" = None
    over: bool = False  # it has returned or raised
    given_up: bool = False
    value: Any = None
    error: BaseException | None = None
    shown: str = ""  # a traceback, the first time

    def run(self) -> None:
        """In a thread."""
        try:
            self.value = self.context.run(self.fn, *self.args)
        except BaseException as error:
            self.fail(error)

    async def wait(self) -> None:
        """On a loop."""
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
        self._aside: _Aside | None = None
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
        if self._aside is not None:
            self._aside.end()

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
        if self._aside is None or self._aside.deaf:
            if self._aside is not None:
                self._aside.end()
            self._aside = _Aside()
        for call in calls:
            call.began, call.aside = time.monotonic(), self._aside
        self._aside.begin(calls, self._ended)

    def _ended(self, call: _Call) -> None:
        """On the loop aside."""
        with self._lock:
            call.over = True
        self._over.append(call)
        self._wake()

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
        for call in list(self._open):
            if call.answer.done():  # cancelled
                self._open.pop(call)
            elif call.began is None:
                waits = waits or now - call.asked > _TICK / 2
            elif call.timeout is not None and now - call.began > call.timeout:
                self._give_up(call)
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
        elif call.thread is not None:
            self._workers -= 1
            call.shown = _where(sys._current_frames().get(call.thread.ident or 0))
        name = getattr(call.fn, "__name__", type(call.fn).__name__)
        call.error = Failed(
            f"TimeoutError: {'what the environment awaits' if call.fn is _given else name} did not return within "
            f"{call.timeout:g} s; mend it, or give the environment another timeout"
        )
        self._answer(call)


async def _given(awaitable: Any) -> Any:
    return await awaitable


def _after(ended: Callable[[_Call], None], call: _Call, task: Any) -> None:
    ended(call)


class _Aside:
    """An event loop in a thread of its own, for coroutines that may block it."""

    def __init__(self) -> None:
        self.deaf = False  # it was asked to cancel something, and has not come to it
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

    def begin(self, calls: Sequence[_Call], ended: Callable[[_Call], None]) -> None:
        """Start them, and say when each has ended."""

        def start() -> None:
            for call in calls:
                call.task = self._loop.create_task(call.wait(), context=call.context)
                call.task.add_done_callback(partial(_after, ended, call))

        self._loop.call_soon_threadsafe(start)

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
        if any(call.aside is self and not call.over for call in _given_up):
            self._thread.join(_TICK * 4)  # so that only what is really stuck is said to be


def _traceback(error: BaseException) -> str:
    """The frames of user code, where there are any, and where none was shown for such an error before."""
    tb, last = error.__traceback__, error.__traceback__
    while tb is not None and not _user(tb.tb_frame):
        tb = tb.tb_next
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if tb is None or last is None or not _first(type(error).__name__, last.tb_frame, last.tb_lineno):
        return ""
    text = "".join(traceback.TracebackException(type(error), error, tb).format())
    return f"rollout: an environment or verifier raised (said once for each place):\n{text[-5 * _LONGEST :].rstrip()}"


def _where(frame: FrameType | None) -> str:
    """Where a thread is that does not return."""
    users = [each for each in traceback.walk_stack(frame) if frame and _user(each[0])]
    if not users or not _first("TimeoutError", users[-1][0], 0):
        return ""
    text = "".join(traceback.StackSummary.extract(iter(reversed(users))).format())
    return f"rollout: an environment or verifier does not return (said once for each); it is at\n{text.rstrip()}"


def _user(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith((_OWN, asyncio.__path__[0], threading.__file__))


def _first(what: str, frame: FrameType, line: int) -> bool:
    kind = what, f"{frame.f_code.co_filename} {frame.f_code.co_qualname}", line
    new = kind not in _shown
    _shown.add(kind)
    return new
