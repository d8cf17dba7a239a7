"""Clusters, the slots that they lend, and meshes over slots.

Clusters differ in two things: a `Cluster` reserves slots and starts processes, and its `Processes` call a function in
each of them. Everything above, from `nrl.shard_map` to a trainer, uses these two.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Literal, Protocol

import attrs
import torch
from tensordict import TensorDict
from torch import Tensor

from nrl.algos import name_of
from nrl.batch.ragged import take
from nrl.errors import ClosedCluster, PlacementError
from nrl.runtime.executables.registry import Executable
from nrl.runtime.executables.registry import executable as find
from nrl.runtime.mesh.futures import Future, Submitted
from nrl.runtime.mesh.layout import Layout

__all__ = [
    "Cluster",
    "Donated",
    "Mesh",
    "Out",
    "Processes",
    "Results",
    "Rows",
    "Slots",
    "Strategy",
    "Value",
    "as_mesh",
]

type Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]

_NUMBERS = itertools.count()


class Out(Enum):
    """How a result of a function that runs in each process comes back."""

    kept = "kept"  # it stays where it is; the driver holds a `Value` for each process
    each = "each"  # for every shard, in their order, from the rank that speaks for it; see `Layout.speaker`
    all = "all"  # from every rank, in their order
    same = "same"  # once, and it is checked that all have the same
    first = "first"  # from the rank that speaks for the first shard


class Value(Protocol):
    """A name, on the driver, of a value that lives in a process."""


@attrs.frozen
class Donated:
    """An argument: a value that the call consumes unless it fails."""

    value: Value


@attrs.frozen(eq=False)
class Rows:
    """An argument: some rows of a tensor or batch, locked if it is one.

    >>> import torch
    >>> Rows(torch.arange(3) + 10, torch.tensor([2, 0])).open().tolist()
    [12, 10]
    """

    whole: Tensor | TensorDict
    index: Tensor

    def open(self) -> Tensor | TensorDict:
        """The rows themselves."""
        part: Tensor | TensorDict = take(self.whole, self.index)
        return part.lock_() if isinstance(part, TensorDict) else part

    def are_all(self) -> bool:
        """Whether these are all rows in their order, so that ``whole`` will do."""
        return len(self.index) == len(self.whole) and torch.equal(self.index, torch.arange(len(self.whole)))


class Results(Protocol):
    """Results on their way from processes, for one of the `Out` of a call."""

    def then[T](
        self, combine: Callable[[list[Any]], T], rows: Sequence[Tensor] | None = None, like: Tensor | None = None
    ) -> Future[T]:
        """A future of ``combine(results)``; it may run in this process or in another.

        Args:
            combine: makes the value of the list of results.
            rows: which rows of the value each result holds, where ``combine`` puts rows in order, in new memory.
            like: stands for the value; see `nrl.runtime.mesh.futures.Coming`.
        """
        ...


class Processes(Protocol):
    """The processes of a mesh."""

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    @property
    def ended(self) -> bool:
        """Whether they are gone, since one died or a call exceeded its deadline."""
        ...

    def end(self, why: BaseException) -> None:
        """Kill them, unless they are this process; from now on calls raise ``why``."""
        ...

    def call(
        self,
        who: str,
        fn: Callable[..., Any],
        args: Sequence[Sequence[Any]],
        outs: Out | tuple[Out, ...],
        *,
        turn: bool = True,
        sent: Callable[[], object] | None = None,
    ) -> list[Any]:
        """Call ``fn`` in each process, with that process's arguments.

        Args:
            who: how errors name the call.
            fn: what to call.
            args: a list of arguments for each process: plain values, a `Value` (borrowed) or `Donated`, `Rows`, and
                futures of other meshes (`nrl.runtime.mesh.futures.Coming`) or parts of them. One process that stands
                for many calls ``fn`` with each list in turn.
            outs: one for each result if ``fn`` returns a tuple, else one.
            turn: whether this mesh takes its turn on devices that it shares with others: their values leave the
                devices, and its own come back. False: all values stay where they are.
            sent: called once the call cannot be taken back, before the handler of a signal can run. Whoever donates a
                value marks it here as consumed.

        Returns:
            For each of ``outs``, a list of `Value` where it is kept, else `Results`.
        """
        ...

    def submit(
        self, who: str, fn: Callable[..., Any], args: Sequence[Any], rank: int | None, deadline: float | None
    ) -> Submitted[Any]:
        """Call ``fn`` beside one process, and beside its calls; see `Mesh.submit`."""
        ...


class Cluster(ABC):
    """A cluster that has been entered; made by `cluster`.

    >>> from nrl.runtime import cluster
    >>> with cluster("local") as here:
    ...     len(here.reserve(4))
    4
    """

    remote = False
    """Whether its meshes have processes of their own, other than this one."""

    gpus = False
    """Whether its slots are GPUs."""

    def __init__(self, name: str) -> None:
        self.name, self.open = name, True

    @abstractmethod
    def reserve(self, n: int, *, strategy: Strategy = "PACK", deadline: float | None = None) -> "Slots":
        """Reserve ``n`` slots, each of which holds one process of a mesh.

        Args:
            n: how many; a GPU each, or a CPU each where there is none.
            strategy: of Ray's placement groups: slots on few nodes or spread over them, preferably or strictly.
            deadline: seconds to wait for the slots; None: the cluster's.

        Raises:
            PlacementError: ``n`` is not positive, or the cluster does not have so many.
            ClosedCluster: the cluster has been left.
        """

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

    def left(self, who: str) -> ClosedCluster:
        """The error of what needs the cluster after its ``with`` block."""
        return ClosedCluster(
            f"{who}: the cluster '{self.name}' has been left, and what it held is gone; "
            "keep the call inside `with nrl.cluster(...)`"
        )

    def check_open(self, who: str) -> None:
        """Raise `ClosedCluster` if the ``with`` block of this cluster has been left."""
        if not self.open:
            raise self.left(who)

    def check_count(self, n: int) -> None:
        """Raise if nobody can reserve ``n`` slots here."""
        self.check_open("reserve")
        if n < 1:
            raise PlacementError(f"reserve: n is {n}; reserve at least one slot")


@attrs.frozen
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

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int | slice) -> "Slots":
        """Some of the slots; a single index gives a single slot."""
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
        """A mesh over all of these slots; ``dp=-1`` takes what the other axes leave.

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
        if not self.indices:
            raise PlacementError("mesh: there are no slots to make a mesh of; reserve more, or slice differently")
        if layout is not None and (dp, tp, pp, cp) != (-1, 1, 1, 1):
            raise PlacementError(f"mesh: dp={dp}, tp={tp}, pp={pp}, cp={cp} and a layout; give one of the two")
        if min(tp, pp, cp) < 1 or (dp < 1 and dp != -1):
            raise PlacementError(
                f"mesh: axes must be positive (dp may be -1); found dp={dp}, tp={tp}, pp={pp}, cp={cp}"
            )
        others = tp * pp * cp
        if dp == -1 and len(self) % others == 0:
            dp = len(self) // others
        if layout is None and dp * others == len(self):
            layout = Layout(dp, tp=tp, cp=cp, pp=pp)
        if layout is None or layout.slots != len(self):
            of = layout or Layout(abs(dp), tp=tp, cp=cp, pp=pp)
            raise PlacementError(
                f"mesh: dp={of.dp if layout else dp} tp={of.tp} pp={of.pp} cp={of.cp} is {of.slots} processes, but "
                f"there are {len(self)} slots; slice the slots, or choose axes whose product is their number"
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
        """How many shards a batch is split into."""
        return self.layout.dp

    @property
    def tp(self) -> int:
        """How many processes every layer is split over."""
        return self.layout.tp

    @property
    def size(self) -> int:
        """The number of ranks; on the local cluster one process stands for all of them."""
        return self.layout.slots

    @property
    def called(self) -> list[int]:
        """The shards that its processes are called for, one for each call."""
        return [*range(self.dp)] if self.processes.count == 1 else [self.shard_of(rank) for rank in range(self.size)]

    @property
    def cluster(self) -> Cluster:
        """The cluster that the slots are from."""
        return self.slots.cluster

    def shard_of(self, rank: int) -> int:
        """Which shard of a batch a rank gets: its dp coordinate."""
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
        self.cluster.check_open(who := f"submit({name_of(fn)})")
        return self.processes.submit(who, fn, args, rank, deadline)


def as_mesh(
    place: Slots | Mesh, executable: str | Executable, name: str | None = None, layout: Layout | None = None
) -> Mesh:
    """Return a mesh as it is; make one of slots, with this layout, or with all of them along dp.

    Raises:
        PlacementError: the mesh has another layout, or the slots are not as many as it takes.

    >>> from nrl.runtime import cluster
    >>> with cluster("local") as here:
    ...     as_mesh(here.reserve(2), "base").dp
    2
    """
    if not isinstance(place, Mesh):
        return place.mesh(executable=executable, name=name, layout=layout)
    if layout not in (None, place.layout):
        raise PlacementError(f"{name}: layout={layout}, but a mesh was given that has {place.layout}; leave one out")
    return place
