"""A call of user code and the thread that it is in: its own, or that of an event loop, which it may block.

A thread cannot be killed. One that is in a call that was given up is left to it, and nobody waits for it any more, at
the end of the process neither.
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

from nrl.episodes.user_errors import Failed, raised_at, said
from nrl.runtime.threads import Daemons

__all__ = ["LoopThread", "UserCall", "give_up", "stuck"]

_given_up: "list[UserCall]" = []


def give_up(call: "UserCall") -> None:
    """Count it as given up, until it is over.

    >>> async def hangs():
    ...     call = UserCall(len, (), None, contextvars.copy_context(), asyncio.get_running_loop().create_future())
    ...     give_up(call)
    ...     before = stuck()
    ...     call.over = True
    ...     return before - stuck()
    >>> asyncio.run(hangs())
    1
    """
    call.given_up = True
    _given_up.append(call)


def stuck() -> int:
    """How many threads of this process are still in a call that was given up.

    >>> stuck()
    0
    """
    _given_up[:] = [call for call in _given_up if not call.over]
    return len({call.loop or call.thread for call in _given_up})


@attrs.define(eq=False)
class UserCall:
    """A call of user code, and what came of it.

    >>> async def quick():
    ...     answer = asyncio.get_running_loop().create_future()
    ...     call = UserCall(len, ("abc",), None, contextvars.copy_context(), answer)
    ...     call.run()
    ...     return call.value
    >>> asyncio.run(quick())
    3
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    timeout: float | None
    context: contextvars.Context
    answer: "asyncio.Future[Any]"  # on the loop of who asked
    name: str = attrs.field(default=attrs.Factory(lambda self: _name(self.fn), takes_self=True))
    asked: float = 0.0
    began: float | None = None
    used: float = 0.0  # seconds that count, of a coroutine: not those in which another one blocked its loop
    thread: threading.Thread | None = None  # of a plain function
    loop: "LoopThread | None" = None  # of a coroutine
    task: "asyncio.Task[None] | None" = None
    over: bool = False  # it has returned or raised
    given_up: bool = False
    value: Any = None
    error: BaseException | None = None
    shown: str = ""  # a traceback, the first time

    @property
    def late(self) -> bool:
        """Whether it has had its time."""
        return self.timeout is not None and self.used > self.timeout

    def run(self) -> None:
        """In a thread."""
        try:
            self.value = self.context.run(self.fn, *self.args)
        except BaseException as error:
            self._fail(error)

    async def wait(self) -> None:
        """On a loop."""
        self.task = asyncio.current_task()
        try:
            found = self.fn(*self.args)
            self.value = await found if inspect.isawaitable(found) else found
        except BaseException as error:  # also a CancelledError that is its own
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Here, since what exceptions say is user code too; frames, and so the arguments, are let go."""
        if isinstance(error, KeyboardInterrupt):
            self.error = error
            return
        self.error, self.shown = Failed(said(error)), "" if self.given_up else raised_at(error)


def _name(fn: Any) -> str:
    """Of what the user wrote, within what nrl or `functools` made of it."""
    while (inner := fn.func if isinstance(fn, functools.partial) else getattr(fn, "__wrapped__", None)) is not None:
        fn = inner
    return str(getattr(fn, "__name__", type(fn).__name__))


class LoopThread:
    """An event loop in a thread of its own, for coroutines that may block it.

    >>> loop = LoopThread()
    >>> loop.blocked, loop.cancelling
    (False, False)
    >>> loop.end()
    """

    def __init__(self) -> None:
        self.cancelling = False  # it was asked to cancel something, and has not come to it
        self.blocked = False  # it did not come to anything between the last two looks
        self.blocked_by: asyncio.Task[Any] | None = None
        self._answered = True  # it has come to what the last look asked
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
        self,
        calls: Sequence[UserCall],
        claim: Callable[[UserCall, "LoopThread"], bool],
        ended: Callable[[UserCall], None],
    ) -> None:
        """Start those that are still to begin here, and say when each has ended."""

        async def run(call: UserCall) -> None:
            await call.wait()
            ended(call)  # here, and not by a callback, which would wait for what others do

        def start(call: UserCall) -> None:
            if claim(call, self):  # and it begins at once, so that until then it may be moved
                asyncio.Task(run(call), loop=self._loop, context=call.context, eager_start=True)

        def every() -> None:
            for call in calls:
                self._loop.call_soon(start, call)

        for call in calls:
            call.loop = self
        self._loop.call_soon_threadsafe(every)

    def look(self, tasks: Set[Any]) -> None:
        """Is it blocked, and by which of these: then only its time counts.

        Where it is none of them, everybody's does: nobody waits for ever for what was given up.
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
        if any(call.loop is self and not call.over for call in _given_up):
            self._thread.join(max(0.0, until - time.monotonic()))
