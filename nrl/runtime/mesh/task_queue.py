"""Functions that are submitted to one process of a mesh: which of them wait, which run, and which are late.

Each mesh has a `Desk`, which gives the functions to `Helper`s, one for each rank. A helper runs them beside the mesh's
own calls: in threads on the local cluster, in a second process of the slot on Ray. The desk's state belongs to its
thread alone, which carries out what others post to it.
"""

import functools
import math
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent import futures
from contextlib import suppress
from typing import Any

import attrs

from nrl.algos import name_of
from nrl.errors import ArgumentError, DeadlineExceeded, PlacementError
from nrl.runtime.mesh.futures import Submitted, as_future
from nrl.runtime.mesh.handles import Handle
from nrl.runtime.mesh.rpc import watched
from nrl.runtime.threads import DaemonThreadPool
from nrl.runtime.trace import timeline

__all__ = ["SIDE_BY_SIDE", "THREADS", "Desk", "Helper", "Task"]

SIDE_BY_SIDE = 32
"""How many functions a helper runs at once."""

THREADS = DaemonThreadPool(32, "submitted")
"""Where results are opened and errors are looked into, for whoever waits for them."""

_ARGUMENTS = DaemonThreadPool(1000, "arguments")  # each waits for futures that a function is to be given
_ENDING = 5.0  # seconds for the desk's thread to end


@attrs.define(eq=False)
class Task:
    """A function that has been submitted.

    Args:
        who: how errors name it.
        rank: where it has to run; None: anywhere.
        deadline: seconds that it may run.
        future: of its result.
        load: what the helper makes the call of.
        shown: whether the timeline shows it.
    """

    who: str
    rank: int | None
    deadline: float
    future: Submitted[Any]
    load: Any = None
    shown: bool = True
    due: float = math.inf
    late: bool = False

    def settle(self, value: Any = None, error: BaseException | None = None, late: bool = False) -> None:
        """Give the future its value or error, unless it has one, or the desk has given the function up."""
        if self.late and not late:
            return
        with suppress(futures.InvalidStateError):
            if error is None:
                self.future.set_result(value)
            else:
                self.future.set_exception(error)


class Helper(ABC):
    """What runs functions for a rank, up to `SIDE_BY_SIDE` at once; the desk's thread lets them begin, and ends it.

    Args:
        desk: which is told, by ``started``, ``over`` and ``lost``, what becomes of the helper and its functions.
        rank: of the process beside which it is.
    """

    fate = ""
    """What becomes of a function that is late."""

    def __init__(self, desk: "Desk", rank: int) -> None:
        self.desk, self.rank = desk, rank
        self.ready, self.due = False, math.inf  # when it must have started
        self.running: set[Task] = set()

    @abstractmethod
    def begin(self, task: Task) -> None:
        """Let a function begin; whoever runs it settles the task."""

    @abstractmethod
    def end(self) -> None:
        """Kill it, if that is possible."""

    def log(self) -> str:
        """The last lines that it wrote; may wait for them."""
        return ""

    def late(self, task: Task) -> DeadlineExceeded:
        """The error of a function that has not returned in time; may wait."""
        return DeadlineExceeded(
            f"{task.who}: rank {self.rank} of mesh '{self.desk.mesh}' did not return within {task.deadline:.3g} s; "
            f"{self.fate}. If it needs longer, give submit(..., deadline=) more seconds{self._said()}"
        )

    def unstarted(self, who: str) -> DeadlineExceeded:
        """The error of a function whose helper has not started in time; may wait."""
        return DeadlineExceeded(
            f"{who}: the helper of rank {self.rank} of mesh '{self.desk.mesh}' did not start within "
            f"{self.desk.deadline:.3g} s. If it needs longer, give nrl.cluster(..., deadline=) more seconds"
            f"{self._said()}"
        )

    def _said(self) -> str:
        lines = [f"    {line}" for line in self.log().rstrip().splitlines()]
        return "\n".join([". The last lines of its log:", *lines]) if lines else ""


@attrs.define
class _Lane:
    """A rank: its helper, and what waits for it."""

    helper: Helper | None = None
    waiting: deque[Task] = attrs.field(factory=deque)

    @property
    def load(self) -> int:
        return len(self.waiting) + (len(self.helper.running) if self.helper else 0)


class Desk:
    """Gives submitted functions to helpers, which it makes when they are needed.

    A function that is not bound to a rank waits for a place anywhere. One that is late is given up: its helper gets no
    more functions, and is ended once its other functions have returned; what waits gets a new helper.

    Args:
        mesh: the name of the mesh.
        size: how many ranks it has.
        deadline: seconds that a helper may take to start, and a function that says nothing else to run.
        helper: makes the helper of a rank.
    """

    def __init__(self, mesh: str, size: int, deadline: float, helper: Callable[["Desk", int], Helper]) -> None:
        self.mesh, self.deadline, self._make = mesh, deadline, helper
        self.label = f"{mesh}.helper"  # in logs and in the timeline
        self._posted: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._guard = threading.Lock()  # held for a moment, so that nothing is posted to a desk that has closed
        self._thread = threading.Thread(target=self._work, name=f"{mesh}.desk", daemon=True)
        self._closed: Callable[[str], BaseException] | None = None
        self._lanes = [_Lane() for _ in range(size)]
        self._anywhere: deque[Task] = deque()
        self._leaving: set[Helper] = set()
        self._next = math.inf  # when something may be late

    def submit(
        self,
        who: str,
        fn: Callable[..., Any],
        args: Sequence[Any],
        rank: int | None,
        deadline: float | None,
        packed: Callable[..., Any],
    ) -> Submitted[Any]:
        """Let a function run; returns at once.

        Args:
            who: how errors name it.
            fn: the function.
            args: its arguments; futures are waited for first, wherever they are from.
            rank: where it runs; None: where the fewest are.
            deadline: seconds that it may run; None: the desk's.
            packed: ``(fn, *args) -> load`` of a task.

        Raises:
            PlacementError: the mesh has no such rank, or an argument is a handle.
            ValueError: the deadline is not positive.
        """
        if rank is not None and not 0 <= rank < len(self._lanes):
            raise PlacementError(
                f"{who}: rank is {rank}, but mesh '{self.mesh}' has ranks 0 to {len(self._lanes) - 1}; give one of "
                "them, or none"
            )
        if deadline is not None and not deadline > 0:
            raise ArgumentError(f"{who}: deadline is {deadline}; give seconds, or None for the cluster's")
        if any(isinstance(arg, Handle) for arg in args):
            raise PlacementError(
                f"{who}: a handle was given; submitted functions run beside the processes that hold values, and cannot "
                "reach them. Use nrl.shard_map, or submit what it returns of the value with P()"
            )
        task = Task(who, rank, deadline or self.deadline, Submitted(who, self.mesh), shown=timeline.are_calls_shown())
        task.future.set_abandon(lambda: self._posted.put(functools.partial(self._give_up, task)))
        fn = functools.partial(watched, fn, name_of(fn))

        def arrive() -> None:
            task.load = packed(fn, *(as_future(arg) for arg in args))
            self._admit(task)

        if any(hasattr(arg, "result") for arg in args):
            _ARGUMENTS.submit(_settling, task, arrive)
        else:
            arrive()
        return task.future

    def started(self, helper: Helper) -> None:
        """A helper is there."""
        self._posted.put(functools.partial(setattr, helper, "ready", True))

    def over(self, helper: Helper, task: Task) -> None:
        """A function has returned or raised, or its helper is gone."""
        self._posted.put(functools.partial(self._over, helper, task))

    def lost(self, helper: Helper, error: Callable[[str], BaseException]) -> None:
        """A helper is gone; where it had not started, functions that wait for it fail with ``error(who)``."""
        self._posted.put(functools.partial(self._lost, helper, error))

    def close(self, error: Callable[[str], BaseException]) -> None:
        """End all helpers. What waits or runs fails with ``error(who)``, and so does what comes later."""
        with self._guard:
            if self._closed is None:
                self._closed = error
                self._posted.put(lambda: None)
        if self._thread.ident not in (None, threading.get_ident()):
            self._thread.join(_ENDING)

    def _admit(self, task: Task) -> None:
        with self._guard:
            if self._closed is None:
                if self._thread.ident is None:
                    self._thread.start()
                self._posted.put(functools.partial(self._arrive, task))
                return
        task.settle(error=self._closed(task.who))

    # --- From here on in the desk's thread.

    def _work(self) -> None:
        while self._closed is None:
            with suppress(queue.Empty):
                left = self._next - time.monotonic()
                self._posted.get(timeout=None if math.isinf(left) else max(0.0, left))()
            self._look()
            self._hand_out()
        while not self._posted.empty():
            self._posted.get()()
        waiting = [*self._anywhere, *(task for lane in self._lanes for task in lane.waiting)]
        for helper in self._helpers():
            waiting += helper.running
            helper.end()
        for task in waiting:
            THREADS.submit(_settling, task, functools.partial(self._fail, task, self._closed))

    def _helpers(self) -> list[Helper]:
        return [*(lane.helper for lane in self._lanes if lane.helper), *self._leaving]

    def _arrive(self, task: Task) -> None:
        (self._anywhere if task.rank is None else self._lanes[task.rank].waiting).append(task)

    def _hand_out(self) -> None:
        while self._anywhere:
            lane = min(self._lanes, key=lambda each: each.load)
            if lane.load >= SIDE_BY_SIDE:
                break
            lane.waiting.append(self._anywhere.popleft())
        for rank, lane in enumerate(self._lanes):
            if lane.waiting and lane.helper is None:
                self._hire(rank, lane)
            while lane.waiting and lane.helper and lane.helper.ready and len(lane.helper.running) < SIDE_BY_SIDE:
                self._begin(lane.helper, lane.waiting.popleft())

    def _hire(self, rank: int, lane: _Lane) -> None:
        try:
            lane.helper = self._make(self, rank)
        except Exception as error:
            self._fail_all(lane, functools.partial(_same, error))
            return
        lane.helper.due = time.monotonic() + self.deadline
        self._next = min(self._next, lane.helper.due)

    def _begin(self, helper: Helper, task: Task) -> None:
        if not task.future.set_running_or_notify_cancel():
            return
        task.due = time.monotonic() + task.deadline
        self._next = min(self._next, task.due)
        helper.running.add(task)
        try:
            helper.begin(task)
        except Exception as error:
            task.settle(error=error)
            self._over(helper, task)

    def _look(self) -> None:
        """Give up what is late."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = math.inf
        for helper in self._helpers():
            if not helper.ready and helper.due <= now:
                self._lost(helper, helper.unstarted)
                continue
            late = [task for task in helper.running if task.due <= now]
            for task in late:
                task.late = True
                THREADS.submit(_settling, task, functools.partial(self._fail_late, helper, task))
            helper.running.difference_update(late)
            if late:
                self._leaving.add(helper)
                self._vacate(helper)
                self._dismiss(helper)
            self._next = min([self._next, *(task.due for task in helper.running)])
            if not helper.ready:
                self._next = min(self._next, helper.due)

    def _give_up(self, task: Task) -> None:
        task.due = self._next = -math.inf

    def _over(self, helper: Helper, task: Task) -> None:
        helper.running.discard(task)
        self._dismiss(helper)

    def _lost(self, helper: Helper, error: Callable[[str], BaseException]) -> None:
        lane = self._lanes[helper.rank]
        if lane.helper is helper and not helper.ready:
            self._fail_all(lane, error)
        self._vacate(helper)
        self._leaving.discard(helper)
        helper.end()

    def _vacate(self, helper: Helper) -> None:
        lane = self._lanes[helper.rank]
        if lane.helper is helper:
            lane.helper = None

    def _dismiss(self, helper: Helper) -> None:
        if helper in self._leaving and not helper.running:
            self._leaving.discard(helper)
            helper.end()

    def _fail_all(self, lane: _Lane, error: Callable[[str], BaseException]) -> None:
        while lane.waiting:
            task = lane.waiting.popleft()
            THREADS.submit(_settling, task, functools.partial(self._fail, task, error))

    # --- In `THREADS`.

    def _fail(self, task: Task, error: Callable[[str], BaseException]) -> None:
        task.settle(error=error(task.who))

    def _fail_late(self, helper: Helper, task: Task) -> None:
        task.settle(error=helper.late(task), late=True)


def _same(error: BaseException, who: str) -> BaseException:
    return error


def _settling(task: Task, what: Callable[[], object]) -> None:
    """Let the task fail with what a function raises that was to settle it."""
    try:
        what()
    except BaseException as error:
        task.settle(error=error, late=True)
