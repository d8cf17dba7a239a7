"""A call of user code and its thread: a worker's, or that of an event loop, which the call may block.

A thread cannot be killed. If its call is given up, nobody waits for the thread any more, even at the end of the
process.
"""

import asyncio
import contextvars
import functools
import inspect
import threading
import time
from collections.abc import Callable, Sequence, Set
from typing import Any

import attrs

from nrl.envs.inprocess.tracebacks import Failed, traceback_text
from nrl.errors import ExecutableError
from nrl.log import error_text
from nrl.runtime.threads import DaemonThreadPool

__all__ = ["NAME", "LoopThread", "UserCall", "give_up", "stuck"]

NAME = "nrl.environment"
"""How the names of threads begin that make calls of user code."""

_given_up: "list[UserCall]" = []


def give_up(call: "UserCall") -> None:
    """Mark a call as given up; `stuck` counts its thread until the call is over."""
    call.given_up = True
    _given_up.append(call)


def stuck() -> int:
    """Count the threads of this process that are still in a call that was given up."""
    _given_up[:] = [call for call in _given_up if not call.over]
    return len({call.loop or call.thread for call in _given_up})


@attrs.define(eq=False)
class UserCall:
    """A call of user code, and its outcome."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    timeout: float | None
    context: contextvars.Context
    answer: "asyncio.Future[Any]"  # on the caller's loop
    unwanted: Callable[[Any], Any] | None = None  # gets the value of a plain function that nobody waits for any more
    name: str = attrs.field(default=attrs.Factory(lambda self: _name(self.fn), takes_self=True))
    asked: float = 0.0
    began: float | None = None
    used: float = 0.0  # seconds that count against the limit: not those in which another coroutine blocked the loop
    thread: threading.Thread | None = None  # of a plain function
    loop: "LoopThread | None" = None  # of a coroutine
    task: "asyncio.Task[None] | None" = None
    over: bool = False  # has returned or raised
    given_up: bool = False
    returned: bool = False  # a value, whatever became of the call since
    value: Any = None
    error: BaseException | None = None
    shown: str = ""  # a traceback to print, the first time

    @property
    def late(self) -> bool:
        """Whether it has used up its time."""
        return self.timeout is not None and self.used > self.timeout

    def run(self) -> None:
        """Call a plain function, in a worker's thread."""
        try:
            _wait_until_left(self.context)
            self.value = self.context.run(self.fn, *self.args)
            self.returned = True
            if self.given_up or self.answer.cancelled():
                self.drop()
        except BaseException as error:
            self._fail(error)

    def drop(self) -> None:
        """Hand a value that nobody waits for to ``unwanted``, once; in a thread without a loop."""
        unwanted, self.unwanted = self.unwanted, None
        if unwanted is not None and self.returned:
            self.context.copy().run(unwanted, self.value)

    async def wait(self) -> None:
        """Call a coroutine function and await it, on a loop."""
        self.task = asyncio.current_task()
        try:
            found = self.fn(*self.args)
            self.value = await found if inspect.isawaitable(found) else found
            self.returned = True
        except BaseException as error:  # also a CancelledError that is its own
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Keep the error as text, without its frames, which hold the arguments. Its ``__str__`` is user code too."""
        if isinstance(error, KeyboardInterrupt | ExecutableError):  # no fault of what was called
            self.error = error
            return
        self.error, self.shown = Failed(error_text(error)), "" if self.given_up else traceback_text(error)


def _wait_until_left(context: contextvars.Context) -> None:
    """Wait for a loop that has told the end of the call before, in its context, and is about to leave it.

    A call that was given up may stay in it. After a tenth of a second entering it is left to raise.
    """
    for _ in range(100):
        try:
            context.run(lambda: None)
            break
        except RuntimeError:
            time.sleep(1e-3)


def _name(fn: Any) -> str:
    """The name of the user's own function, inside the wrappers of nrl and `functools`."""
    while (inner := fn.func if isinstance(fn, functools.partial) else getattr(fn, "__wrapped__", None)) is not None:
        fn = inner
    return str(getattr(fn, "__name__", type(fn).__name__))


class LoopThread:
    """An event loop in a thread of its own, for coroutines that may block it."""

    def __init__(self) -> None:
        self.cancelling = False  # was asked to cancel something, and has not got to it
        self.blocked = False  # ran nothing of ours between the last two looks
        self.blocked_by: asyncio.Task[Any] | None = None
        self._answered = True  # has run the callback of the last look
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(DaemonThreadPool())
        self._thread = threading.Thread(target=self._run, name=f"{NAME}: loop", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()

    def begin(
        self,
        calls: Sequence[UserCall],
        claim: Callable[[UserCall, "LoopThread"], bool],
        ended: Callable[[UserCall], None],
    ) -> None:
        """Start the calls.

        Args:
            calls: of coroutine functions.
            claim: whether a call is still to begin here; it may have been moved to another loop.
            ended: called with each call when it has ended.
        """

        async def run(call: UserCall) -> None:
            await call.wait()
            ended(call)  # here: a callback would wait for other tasks

        def start(call: UserCall) -> None:
            if claim(call, self):  # it begins at once; until then it may be moved
                _wait_until_left(call.context)
                asyncio.Task(run(call), loop=self._loop, context=call.context, eager_start=True)

        def every() -> None:
            for call in calls:
                self._loop.call_soon(start, call)

        for call in calls:
            call.loop = self
        self._loop.call_soon_threadsafe(every)

    def look(self, tasks: Set[Any]) -> None:
        """Find out whether a task blocks the loop, and which of these.

        While one of these blocks it, only that call's time counts. While another one does, such as one that was given
        up, all calls' time counts, so that nobody waits for ever.
        """
        self.blocked = not self._answered
        running = asyncio.current_task(self._loop) if self.blocked else None
        self.blocked_by = running if running in tasks else None
        if self._answered:
            self._answered = False
            self._loop.call_soon_threadsafe(lambda: setattr(self, "_answered", True))

    def cancel(self, call: UserCall) -> None:
        """Ask a coroutine to end."""

        def ask() -> None:
            self.cancelling = False
            if call.task is not None:
                call.task.cancel()

        self.cancelling = True
        self._loop.call_soon_threadsafe(ask)

    def end(self) -> None:
        """Cancel the tasks and end the thread. If a task resists, the thread is left to it."""

        async def every() -> None:
            tasks = asyncio.all_tasks(self._loop) - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._loop.stop()

        self._loop.call_soon_threadsafe(lambda: setattr(self, "_last", self._loop.create_task(every())))

    def join(self, until: float) -> None:
        """Wait for the calls that were given up to end, until a time of `time.monotonic`."""
        if any(call.loop is self and not call.over for call in _given_up):
            self._thread.join(max(0.0, until - time.monotonic()))
