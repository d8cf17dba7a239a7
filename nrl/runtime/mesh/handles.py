"""Handles: names, held by the driver, for values that live on a mesh.

A handle knows its owner. It can be borrowed any number of times and donated once: state is linear, and using a handle
after its donation is an error, as it is in JAX.
"""

from collections.abc import Sequence

from nrl.errors import ConsumedState, ForeignState
from nrl.runtime.mesh.placement import Mesh
from nrl.runtime.mesh.processes import Value

__all__ = ["Handle"]


class Handle:
    """A value on a mesh: one local value for each process.

    Args:
        mesh: where the value lives.
        owner: the object that may use it, by identity: a trainer, or the mesh itself for values of `shard_map`.
        name: the name of the value in errors.
        values: the names of the local values.

    >>> from nrl.runtime import cluster
    >>> with cluster("local") as here:
    ...     mesh = here.reserve(1).mesh()
    ...     state = Handle(mesh, mesh, "counter", [0])
    ...     state.borrow(mesh, "count")
    [0]
    """

    def __init__(self, mesh: Mesh, owner: object, name: str, values: Sequence[Value]) -> None:
        self.mesh, self.owner, self.name = mesh, owner, name
        self._values: list[Value] | None = list(values)
        self._consumer = ""

    def borrow(self, owner: object, caller: str) -> list[Value]:
        """Return the names of the local values, to read.

        Raises:
            ConsumedState: the handle has been donated.
            ForeignState: ``owner`` is not the handle's.
            ClosedCluster: the mesh is gone.
        """
        if self._values is None:
            raise ConsumedState(
                f"{caller}: this {self.name} was consumed by {self._consumer} already, and so was everything borrowed "
                "from it; use what that call returned (state, metrics = step(state, batch)), or what a checkpoint has, "
                "where Ctrl-C kept it from returning"
            )
        self.mesh.cluster.check_open(caller)
        if owner is not self.owner:
            raise ForeignState(
                f"{caller}: this {self.name} belongs to {self.owner}, not to {owner}; "
                "pass the state of the same trainer or mesh"
            )
        return self._values

    def donate(self, owner: object, caller: str) -> list[Value]:
        """Return the names of the local values, and mark this handle as consumed. Raises as `borrow`."""
        values = self.borrow(owner, caller)
        self._values, self._consumer = None, caller
        return values

    @property
    def is_consumed(self) -> bool:
        """True if the value has been donated."""
        return self._values is None

    def __repr__(self) -> str:
        return f"<{self.name} on {self.mesh.size} process(es){', consumed' if self.is_consumed else ''}>"
