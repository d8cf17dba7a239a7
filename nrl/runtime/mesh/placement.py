"""Clusters, the slots that they lend, and meshes over slots.

Clusters differ in two things: a `Cluster` reserves slots and starts processes, and its `Processes` call a function in
each of them. Everything above, from `nrl.shard_map` to a trainer, uses these two.
"""

import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent import futures
from functools import partial
from typing import Any, Literal, get_args

import attrs

from nrl.algos import name_of
from nrl.arguments import check_argument, register_kind
from nrl.errors import ClosedCluster, PlacementError
from nrl.log.slow_wait import wait_for
from nrl.runtime.mesh.futures import Submitted
from nrl.runtime.mesh.layout import Layout
from nrl.runtime.mesh.processes import Processes
from nrl.runtime.venvs.registry import Executable
from nrl.runtime.venvs.registry import executable as find

__all__ = ["Cluster", "Kind", "Mesh", "Slots", "Strategy", "as_mesh"]

type Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]

type Kind = Literal["gpu", "cpu"]
"""The resources of a slot: a GPU and a CPU, or a CPU alone."""

_NUMBERS = itertools.count()


class Cluster(ABC):
    """A cluster that has been entered; made by `cluster`.

    >>> from nrl.runtime import cluster
    >>> with cluster("local") as here:
    ...     len(here.reserve(4))
    4
    """

    remote = False
    """Whether its meshes have processes of their own, other than this one."""

    def __init__(self, name: str) -> None:
        self.name, self.open = name, True
        self._awaited: list[futures.Future[Any]] = []
        self._threads: list[threading.Thread] = []
        self._guard = threading.Lock()

    def wait_for_on_exit(self, work: "futures.Future[Any]") -> None:
        """Keep processes alive until this work has ended. Its errors are reported elsewhere."""
        self._awaited = [*(future for future in self._awaited if not future.done()), work]

    def settle(self) -> None:
        """Wait for the work of `wait_for_on_exit`; called when the ``with`` block is left, also after an error."""
        while self._awaited:
            wait_for(
                self._awaited.pop(), partial("cluster '{0}': waiting for a checkpoint ({1:.0f} s)".format, self.name)
            )

    @abstractmethod
    def reserve(
        self,
        n: int,
        *,
        strategy: Strategy | None = None,
        per_host: int | None = None,
        kind: Kind | None = None,
        least: int | None = None,
        deadline: float | None = None,
    ) -> "Slots":
        """Reserve ``n`` slots, each of which holds one process of a mesh. Slots of one host follow one another.

        Args:
            n: how many.
            strategy: of Ray's placement groups: slots on few nodes or spread over them, preferably or strictly; None:
                on few (``"PACK"``).
            per_host: so many on each host, and on the last one what is left; instead of ``strategy``. This process,
                ``local``, stands for all hosts.
            kind: ``"gpu"``: a GPU and a CPU each, also if they have yet to join; ``"cpu"``: a CPU each; None: GPUs if
                the cluster has any by the time that the slots are there, else CPUs.
            least: so many will do after a loss. A mesh whose host is gone waits a minute for another place, instead of
                the cluster's deadline; and where `nrl.retrying` then begins again and ``n`` are not to be had within a
                minute, there are fewer. A first start waits for all. None: all or none.
            deadline: seconds to wait for the slots; None: the cluster's.

        Raises:
            PlacementError: an argument is not one of those, or the cluster does not have so many.
            ClosedCluster: the cluster has been left.
        """

    @abstractmethod
    def hosts(self, indices: Sequence[int]) -> tuple[str, ...]:
        """Return the host of each slot; `Slots.hosts` calls it."""

    def thread(self, work: Callable[..., object], *args: Any, name: str) -> None:
        """Let a daemon thread do what needs this cluster. On leaving it is waited for: `check_open` tells it to end.

        Args:
            work: what to do.
            args: for it.
            name: of the thread.
        """
        thread = threading.Thread(target=work, args=args, name=name, daemon=True)
        with self._guard:
            thread.start()
            self._threads = [*(other for other in self._threads if other.is_alive()), thread]

    def join(self, seconds: float) -> bool:
        """Return whether every `thread` has ended within this many seconds."""
        until = time.monotonic() + seconds
        while alive := [thread for thread in self._threads if thread.is_alive()]:  # a thread may have started another
            if (remaining := until - time.monotonic()) <= 0:
                return False
            alive[0].join(remaining)
        return True

    @abstractmethod
    def are_gpus(self, indices: Sequence[int]) -> bool:
        """Return whether slots are GPUs; `Slots.gpus` calls it."""

    @abstractmethod
    def start(self, mesh: "Mesh", executable: Executable) -> Processes:
        """Start the processes of a mesh; `Slots.mesh` calls it."""

    def finish(self) -> None:
        """Wait for calls that are under way; called when the ``with`` block ends without an error.

        Raises:
            Exception: what a call raised whose results nobody has read.
        """
        return

    def close(self) -> None:
        """Take back slots and end processes; called when the ``with`` block is left."""
        return

    def closed_error(self, caller: str) -> ClosedCluster:
        """Return the error for a caller that needs the cluster after its ``with`` block."""
        return ClosedCluster(
            f"{caller}: the cluster '{self.name}' has been left, and what it held is gone; "
            "keep the call inside `with nrl.cluster(...)`"
        )

    def check_open(self, caller: str) -> None:
        """Raise `ClosedCluster` if the ``with`` block of this cluster has been left."""
        if not self.open:
            raise self.closed_error(caller)

    def check_reserve(
        self, n: int, strategy: Strategy | None, per_host: int | None, kind: Kind | None, least: int | None
    ) -> None:
        """Raise if no cluster can reserve slots by these arguments of `reserve`."""
        self.check_open("reserve")
        check_argument("reserve", "n", n, int)
        if n < 1:
            raise PlacementError(f"reserve: n is {n}; reserve at least one slot")
        if strategy not in (None, *get_args(Strategy.__value__)):
            raise PlacementError(
                f"reserve: strategy={strategy!r} is unknown; choose from {', '.join(get_args(Strategy.__value__))}"
            )
        if kind not in (None, *get_args(Kind.__value__)):
            raise PlacementError(f"reserve: kind={kind!r} is unknown; choose 'gpu' or 'cpu', or leave it out")
        if per_host is not None and per_host < 1:
            raise PlacementError(f"reserve: per_host is {per_host}; give the number of slots on each host")
        if least is not None and not 1 <= least <= n:
            raise PlacementError(f"reserve: least is {least}; give a number from 1 to n={n}")
        if per_host is not None and strategy is not None:
            raise PlacementError(
                f"reserve: strategy='{strategy}' and per_host={per_host} both say where slots lie; leave one out"
            )


@attrs.frozen(repr=False)
class Slots:
    """Reserved places. Slicing gives disjoint slots (disaggregated); the same slots twice are colocated.

    >>> from nrl.runtime import cluster
    >>> with cluster("local") as here:
    ...     slots = here.reserve(4)
    ...     train, sample = slots[:3], slots[3:]
    ...     train.mesh(dp=3).axes
    {'dp': 3, 'tp': 1, 'pp': 1, 'cp': 1}
    """

    cluster: Cluster
    indices: tuple[int, ...]

    def __repr__(self) -> str:
        by_host = defaultdict[str, list[int]](list)
        for index, host in zip(self.indices, self.hosts, strict=True):
            by_host[host].append(index)
        return f"Slots({'; '.join(f'{", ".join(map(str, slots))} on {host}' for host, slots in by_host.items())})"

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of each slot: its address on Ray; on the local cluster the name of this host."""
        return self.cluster.hosts(self.indices)

    @property
    def gpus(self) -> bool:
        """True if each slot is a GPU of its own on the cluster."""
        return self.cluster.are_gpus(self.indices)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int | slice) -> "Slots":
        """Return a subset of the slots; a single index gives a single slot."""
        chosen = self.indices[index]
        return Slots(self.cluster, chosen if isinstance(chosen, tuple) else (chosen,))

    def mesh(
        self,
        dp: int = -1,
        tp: int = 1,
        pp: int = 1,
        cp: int = 1,
        executable: str | Executable = "base",
        name: str | None = None,
        layout: Layout | None = None,
    ) -> "Mesh":
        """Make a mesh over all of these slots; ``dp=-1`` takes the slots that the other axes leave.

        Args:
            dp: data parallel; batches are split along it.
            tp: tensor parallel.
            pp: pipeline parallel.
            cp: context parallel.
            executable: the environment of its processes: a registered name, or an `Executable`.
            name: how errors, logs, profiles and the timeline name it.
            layout: all axes, in place of those above.

        Raises:
            PlacementError: the axes do not use all slots, or are said twice, or the executable is unknown or cannot be
                imported.
            ExecutableError: its environment cannot be built.
            LostActor: a process died while it started.
        """
        self.cluster.check_open("mesh")
        for axis, value in (("dp", dp), ("tp", tp), ("pp", pp), ("cp", cp)):
            check_argument("mesh", axis, value, int)
        if not self.indices:
            raise PlacementError("mesh: there are no slots to make a mesh of; reserve more, or slice differently")
        if layout is not None and (dp, tp, pp, cp) != (-1, 1, 1, 1):
            raise PlacementError(f"mesh: dp={dp}, tp={tp}, pp={pp}, cp={cp} and a layout; give one of the two")
        if min(tp, pp, cp) < 1 or (dp < 1 and dp != -1):
            raise PlacementError(
                f"mesh: axes must be positive (dp may be -1); found dp={dp}, tp={tp}, pp={pp}, cp={cp}"
            )
        model_axes = tp * pp * cp
        if dp == -1 and len(self) % model_axes == 0:
            dp = len(self) // model_axes
        if layout is None and dp * model_axes == len(self):
            layout = Layout(dp, tp=tp, cp=cp, pp=pp)
        if layout is None or layout.slots != len(self):
            axes = layout or Layout(abs(dp), tp=tp, cp=cp, pp=pp)
            raise PlacementError(
                f"mesh: dp={axes.dp if layout else dp} tp={axes.tp} pp={axes.pp} cp={axes.cp} is {axes.slots} "
                f"processes, but there are {len(self)} slots; slice the slots, or choose axes whose product is their "
                "number"
            )
        return Mesh(self, layout, executable, name or f"mesh{next(_NUMBERS)}")


@attrs.frozen(eq=False)
class Mesh:
    """Processes in a grid with the axes dp, tp, pp and cp; made by `Slots.mesh`.

    Ranks run over (pp, dp, cp, tp), the last one fastest, so that those that talk most are neighbours. On the local
    cluster one process stands for all: it is called once for each shard.

    >>> from nrl.runtime import cluster
    >>> with cluster("local") as here:
    ...     here.reserve(2).mesh().size
    2
    """

    slots: Slots
    layout: Layout
    executable: str | Executable
    name: str
    processes: Processes = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "processes", self.cluster.start(self, find(self.executable)))

    @property
    def axes(self) -> dict[str, int]:
        """The axes and their sizes."""
        return {"dp": self.dp, "tp": self.tp, "pp": self.layout.pp, "cp": self.layout.cp}

    @property
    def dp(self) -> int:
        """Number of shards that a batch is split into."""
        return self.layout.dp

    @property
    def tp(self) -> int:
        """Number of processes that every layer is split over."""
        return self.layout.tp

    @property
    def size(self) -> int:
        """The number of ranks; on the local cluster one process stands for all of them."""
        return self.layout.slots

    @property
    def called_shards(self) -> list[int]:
        """Shards that the processes are called for, one for each call."""
        return [*range(self.dp)] if self.processes.count == 1 else [self.shard_of(rank) for rank in range(self.size)]

    @property
    def cluster(self) -> Cluster:
        """The cluster that the slots are from."""
        return self.slots.cluster

    def shard_of(self, rank: int) -> int:
        """Return the shard of a batch that a rank gets: its dp coordinate."""
        return self.layout.coordinates(rank)["dp"]

    def submit[T](
        self, fn: Callable[..., T], *args: Any, rank: int | None = None, deadline: float | None = None
    ) -> Submitted[T]:
        """Call ``fn(*args)`` beside one process of the mesh; a slow one delays no other, and no call in all processes.

        Functions run side by side and in no order, in a helper: a second process in the rank's slot, or local threads.

        Args:
            fn: what to call; `nrl.process` tells it its rank. It travels as with `nrl.shard_map`.
            *args: of the function; futures are waited for first.
            rank: beside which process; None: where the fewest run or wait.
            deadline: seconds that it may run; None: the cluster's. Then its helper is killed, once nothing else runs.

        Returns:
            The standard library's future, of the function's value or error, or of what a call raises; to await, too.

        Raises:
            PlacementError: the mesh has no such rank, or an argument is a handle.
            ShippingError, ClosedCluster, LostActor: as a call.

        >>> from nrl.runtime import cluster
        >>> with cluster("local") as here:
        ...     here.reserve(2).mesh().submit(len, "abc").result()
        3
        """
        self.cluster.check_open(caller := f"submit({name_of(fn)})")
        return self.processes.submit(caller, fn, args, rank, deadline)


def _suggest_slots(value: Any) -> str:
    if isinstance(value, Cluster):
        return "reserve slots of it: cluster.reserve(8), or cluster.reserve(1) on one device"
    return "give slots, as cluster.reserve(8) returns them, or a mesh"


register_kind(Slots, _suggest_slots)
register_kind(Mesh, lambda value: "give a mesh, as slots.mesh() returns one")


def as_mesh(
    slots: Slots | Mesh, executable: str | Executable, name: str | None = None, layout: Layout | None = None
) -> Mesh:
    """Return a mesh as it is; make one of slots, with this layout, or with all of them along dp.

    Raises:
        PlacementError: the mesh has another layout, or the slots are not as many as it takes.

    >>> from nrl.runtime import cluster
    >>> with cluster("local") as here:
    ...     as_mesh(here.reserve(2), "base").dp
    2
    """
    if not isinstance(slots, Mesh):
        return slots.mesh(executable=executable, name=name, layout=layout)
    if layout not in (None, slots.layout):
        raise PlacementError(f"{name}: layout={layout}, but a mesh was given that has {slots.layout}; leave one out")
    return slots
