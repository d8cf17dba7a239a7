"""Entering a cluster by its address."""

from collections.abc import Iterator
from contextlib import contextmanager

from nrl.errors import PlacementError
from nrl.runtime.local import LocalCluster
from nrl.runtime.placement import Cluster

__all__ = ["cluster"]

_DEADLINE = 3600.0
"""Seconds that a single wait may take, where nothing else is said."""


@contextmanager
def cluster(address: str = "local", *, deadline: float = _DEADLINE) -> Iterator[Cluster]:
    """Enter a cluster: ``with nrl.cluster("local") as cluster``.

    On leaving, whatever lives on its meshes is gone, and handles to it say so. No process, actor or placement group is
    left behind.

    Args:
        address: ``"local"``, this process; ``"ray"``: the Ray cluster that ``RAY_ADDRESS`` names, or else a new one on
            this machine, which ends with the block; ``"auto"`` or ``"host:port"``: a running Ray cluster.
        deadline: seconds that any single wait may take: for slots, for a process to start, for a call. A call that
            takes longer has failed, and its mesh is ended.

    Raises:
        PlacementError: no cluster has this address.

    >>> with cluster("local") as here:
    ...     here.name
    'local'
    """
    if address == "local":
        entered: Cluster = LocalCluster(address)
    elif address in ("ray", "auto") or ":" in address:
        from nrl.runtime.ray_cluster import RayCluster

        entered = RayCluster(address, deadline)
    else:
        raise PlacementError(
            f"cluster: unknown address '{address}'; give 'local', 'ray', 'auto', or the host:port of a Ray cluster"
        )
    try:
        yield entered
    finally:
        entered.open = False
        entered.close()
