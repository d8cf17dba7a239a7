"""Where things run: clusters, the slots that they lend, and meshes over slots.

The local cluster is this process. Its slots are names: a mesh of ``dp=3`` on it really splits batches into three, runs
the shards one after the other, and merges, so that a mistake of layout shows up in a unit test.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import overload

import attrs

from nrl.errors import ClosedCluster, PlacementError
from nrl.runtime.executables import check_importable

__all__ = ["Cluster", "Mesh", "Slots", "as_mesh", "cluster"]


@attrs.define(eq=False)
class Cluster:
    """A cluster that has been entered; made by `cluster`.

    >>> with cluster("local") as here:
    ...     len(here.reserve(4))
    4
    """

    name: str
    open: bool = True
    reserved: int = 0

    def reserve(self, n: int) -> "Slots":
        """Reserve ``n`` slots: places that hold one process of a mesh each.

        Raises:
            PlacementError: ``n`` is not positive.
            ClosedCluster: the cluster has been left.
        """
        self.check_open("reserve")
        if n < 1:
            raise PlacementError(f"reserve: n is {n}; reserve at least one slot")
        first, self.reserved = self.reserved, self.reserved + n
        return Slots(self, tuple(range(first, first + n)))

    def check_open(self, who: str) -> None:
        """Raise `ClosedCluster` if the ``with`` block of this cluster has been left."""
        if not self.open:
            raise ClosedCluster(
                f"{who}: the cluster '{self.name}' has been left, and what it held is gone; "
                "keep the call inside `with nrl.cluster(...)`"
            )


@attrs.frozen
class Slots:
    """Reserved places. Slicing gives disjoint slots (disaggregated); the same slots twice are colocated.

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

    @overload
    def __getitem__(self, index: int) -> "Slots": ...
    @overload
    def __getitem__(self, index: slice) -> "Slots": ...
    def __getitem__(self, index: int | slice) -> "Slots":
        """Some of the slots; a single index gives a single slot."""
        chosen = self.indices[index]
        return Slots(self.cluster, chosen if isinstance(chosen, tuple) else (chosen,))

    def mesh(self, dp: int = -1, tp: int = 1, pp: int = 1, cp: int = 1, executable: str = "base") -> "Mesh":
        """A mesh over all of these slots; ``dp=-1`` takes what the other axes leave.

        Raises:
            PlacementError: the axes do not use all slots, the cluster cannot provide an axis, or the executable is
                unknown or cannot be imported.
        """
        self.cluster.check_open("mesh")
        check_importable(executable)
        others = tp * pp * cp
        if not self.indices:
            raise PlacementError("mesh: there are no slots to make a mesh of; reserve more, or slice differently")
        if min(tp, pp, cp) < 1 or (dp < 1 and dp != -1):
            raise PlacementError(
                f"mesh: axes must be positive (dp may be -1); found dp={dp}, tp={tp}, pp={pp}, cp={cp}"
            )
        if dp == -1 and len(self) % others == 0:
            dp = len(self) // others
        if dp * others != len(self):
            raise PlacementError(
                f"mesh: dp={dp} tp={tp} pp={pp} cp={cp} is {abs(dp) * others} processes, but there are {len(self)} "
                "slots; slice the slots, or choose axes whose product is their number"
            )
        if others != 1:
            raise PlacementError(
                f"mesh: the local cluster has the axis dp only; found tp={tp}, pp={pp}, cp={cp}, which need processes"
            )
        return Mesh(self, dp=dp, tp=tp, pp=pp, cp=cp, executable=executable)


@attrs.frozen(eq=False)
class Mesh:
    """Processes in a grid with the axes dp, tp, pp and cp; made by `Slots.mesh`.

    >>> with cluster("local") as here:
    ...     here.reserve(2).mesh().size
    2
    """

    slots: Slots
    dp: int
    tp: int
    pp: int
    cp: int
    executable: str

    @property
    def axes(self) -> dict[str, int]:
        """The axes and their sizes."""
        return {"dp": self.dp, "tp": self.tp, "pp": self.pp, "cp": self.cp}

    @property
    def size(self) -> int:
        """The number of processes."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def cluster(self) -> Cluster:
        """The cluster that the slots are from."""
        return self.slots.cluster


def as_mesh(place: Slots | Mesh, executable: str) -> Mesh:
    """A mesh as it is, or a mesh made of slots with all of them along dp.

    >>> with cluster("local") as here:
    ...     as_mesh(here.reserve(2), "base").dp
    2
    """
    return place if isinstance(place, Mesh) else place.mesh(executable=executable)


@contextmanager
def cluster(address: str = "local") -> Iterator[Cluster]:
    """Enter a cluster: ``with nrl.cluster("local") as cluster``.

    On leaving, whatever lives on its meshes is gone, and handles to it say so.

    Args:
        address: ``"local"``, this process.

    Raises:
        PlacementError: no cluster has this address.

    >>> with cluster("local") as here:
    ...     here.name
    'local'
    """
    if address != "local":
        raise PlacementError(f"cluster: unknown address '{address}'; this version of nrl knows 'local'")
    entered = Cluster(address)
    try:
        yield entered
    finally:
        entered.open = False
