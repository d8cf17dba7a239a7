"""The local cluster: this process.

Its slots are numbers. A mesh of ``dp=3`` splits batches into three, runs the shards one after the other, and merges, so
that a unit test shows a mistake of layout. Calls are done when they return; submitted functions run in threads.
"""

import math
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

import attrs
from tensordict import TensorDict
from torch import Tensor

from nrl.batch.ragged import is_ragged, parts_of
from nrl.errors import PlacementError
from nrl.runtime.mesh.current_process import Process, enter_process, perform
from nrl.runtime.mesh.futures import Future, Submitted, done
from nrl.runtime.mesh.placement import Cluster, Kind, Mesh, Slots, Strategy
from nrl.runtime.mesh.processes import Donated, Out, Processes, RowSlice, Value
from nrl.runtime.mesh.task_queue import SIDE_BY_SIDE, Desk, Helper, Task
from nrl.runtime.threads import DaemonThreadPool
from nrl.runtime.trace import profiles, timeline
from nrl.runtime.venvs.registry import Executable, check_importable

__all__ = ["DIFFER", "LocalCluster"]

DIFFER = (
    "out_specs says P(), the same from every shard, but the shards differ; return rows with P('dp'), or sums with "
    "merged"
)


class LocalCluster(Cluster):
    """This process, as a cluster.

    Args:
        name: its address.
        deadline: seconds that a submitted function may run.
    """

    def __init__(self, name: str, deadline: float = math.inf) -> None:
        super().__init__(name)
        self._reserved, self._deadline = 0, deadline
        self._desks: WeakSet[Desk] = WeakSet()

    def reserve(
        self,
        n: int,
        *,
        strategy: Strategy | None = None,
        per_host: int | None = None,
        kind: Kind | None = None,
        least: int | None = None,
        deadline: float | None = None,
    ) -> Slots:
        """Return ``n`` numbers for places in this process."""
        self.check_reserve(n, strategy, per_host, kind, least)
        first, self._reserved = self._reserved, self._reserved + n
        return Slots(self, tuple(range(first, first + n)))

    def hosts(self, indices: Sequence[int]) -> tuple[str, ...]:
        """Return the name of this host for each slot."""
        return (socket.gethostname(),) * len(indices)

    def are_gpus(self, indices: Sequence[int]) -> bool:
        """Return False: the slots are places in one process, whatever its device."""
        return False

    def start(self, mesh: Mesh, executable: Executable) -> Processes:
        """Check that this process can import what the executable is for."""
        check_importable(executable)
        desk = Desk(mesh.name, mesh.size, self._deadline, partial(_ThreadHelper, mesh.size))
        self._desks.add(desk)
        return _LocalProcesses(mesh, desk)

    def close(self) -> None:
        """Give up submitted functions."""
        for desk in list(self._desks):
            desk.close(self.closed_error)


@attrs.frozen
class _LocalValue:
    """A value in this process, as its own name."""

    value: Any


@attrs.frozen
class _LocalResults:
    results: list[Any]

    def then[T](
        self, combine: Callable[[list[Any]], T], rows: Sequence[Tensor] | None = None, like: Tensor | None = None
    ) -> Future[T]:
        return done(combine(self.results))


@attrs.frozen
class _LocalProcesses:
    mesh: Mesh
    desk: Desk

    @property
    def count(self) -> int:
        return 1

    @property
    def has_ended(self) -> bool:
        return False

    def end(self, reason: BaseException) -> None:
        """Do nothing: the process is the program itself."""

    def call(
        self,
        caller: str,
        fn: Callable[..., Any],
        args: Sequence[Sequence[Any]],
        outs: Out | tuple[Out, ...],
        *,
        turn: bool = True,
        sent: Callable[[], object] | None = None,
    ) -> list[Any]:
        started, clock = timeline.stopwatch()
        results = []
        with profiles.tracing(profiles.trace_path(self.mesh.name, caller)):
            for rank, values in enumerate(args):
                with enter_process(Process(rank, len(args), None, self.mesh.name)):
                    results.append(perform(caller, fn, [_resolve(arg) for arg in values], outs))
        if timeline.are_calls_shown():
            timeline.record(self.mesh.name, 0, caller, started, clock())
        kinds = outs if isinstance(outs, tuple) else (outs,)
        columns = zip(*results, strict=True)
        values = [_wrap_results(caller, list(column), kind) for column, kind in zip(columns, kinds, strict=True)]
        if sent is not None:
            sent()
        return values

    def submit(
        self, caller: str, fn: Callable[..., Any], args: Sequence[Any], rank: int | None, deadline: float | None
    ) -> Submitted[Any]:
        return self.desk.submit(caller, fn, args, rank, deadline, partial)


class _ThreadHelper(Helper):
    """Threads of this process, which are not awaited on exit."""

    fate = "its thread cannot be ended, and goes on"

    def __init__(self, size: int, desk: Desk, rank: int) -> None:
        super().__init__(desk, rank)
        self.process = Process(rank, size, None, desk.mesh)
        self.ready, self._threads = True, DaemonThreadPool(SIDE_BY_SIDE, desk.label)

    def begin(self, task: Task) -> None:
        self._threads.submit(self._run, task)

    def _run(self, task: Task) -> None:
        started, clock = timeline.stopwatch()
        value, error = None, None
        try:
            with enter_process(self.process):
                value = task.load()
        except BaseException as raised:
            error = raised
        if task.shown:
            timeline.record(self.desk.label, self.rank, task.who, started, clock())
        self.desk.over(self, task)
        task.settle(value, error)

    def end(self) -> None:
        """Do nothing: the threads end when their functions return."""


def _resolve(arg: Any) -> Any:
    """Return the value that an argument stands for."""
    match arg:
        case _LocalValue(value) | Donated(_LocalValue(value)):
            return value
        case RowSlice():
            return arg.open()
        case _:
            return arg


def _wrap_results(caller: str, results: list[Any], kind: Out) -> list[Value] | _LocalResults:
    match kind:
        case Out.on_rank:
            return [_LocalValue(result) for result in results]
        case Out.per_shard | Out.all:
            return _LocalResults(results)
        case Out.first:
            return _LocalResults(results[:1])
        case Out.replicated:
            if not all(_are_equal(results[0], other) for other in results[1:]):
                raise PlacementError(f"{caller}: {DIFFER}")
            return _LocalResults(results[:1])


def _are_equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if is_ragged(a) and is_ragged(b):
        return _are_equal(parts_of(a), parts_of(b))
    if isinstance(a, Tensor):
        alike = a.shape == b.shape and a.dtype == b.dtype
        return alike and bool(((a == b) | ((a != a) & (b != b))).all())  # NaN is the same as NaN here
    if isinstance(a, Mapping | TensorDict):
        return set(a.keys()) == set(b.keys()) and all(_are_equal(a[key], b[key]) for key in a.keys())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_are_equal, a, b))
    return bool(a == b) or (a != a and b != b)
