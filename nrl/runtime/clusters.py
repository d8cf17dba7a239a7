"""Entering a cluster by its address."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from nrl.arguments import checked
from nrl.errors import PlacementError
from nrl.runtime.mesh.local import LocalCluster
from nrl.runtime.mesh.placement import Cluster

__all__ = ["cluster"]

_DEADLINE = 3600.0
"""Seconds that a single wait may take by default."""


_RAY_SETTINGS = {
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # Under `uv run`, Ray would pack the working folder and choose interpreters.
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # The caller that waits gets the error.
    # Ray prints guesses about a dead worker or node; the caller that waits gets a better error.
    "RAY_DEDUP_LOGS_SKIP_REGEX": r"^A worker died or was killed while executing a task|\(raylet\) worker\.cc:\d+: "
    r"|^Raylet is terminated\.|^Traceback \(most recent call last\):\n  File \"python/ray/_raylet",
    # These two are for a cluster that starts here. Ray's agents watch their node through pipes, and an agent may hold
    # another's end open for minutes. The children of a process that dies end with it.
    "RAY_enable_pipe_based_agent_to_parent_health_check": "0",
    "RAY_process_group_cleanup_enabled": "1",
}


@contextmanager
@checked("cluster")
def cluster(address: str = "local", *, deadline: float = _DEADLINE) -> Iterator[Cluster]:
    """Enter a cluster: ``with nrl.cluster("local") as cluster``.

    At its end the block waits for running calls, and raises the error of a call whose results were not read. After an
    error in the block it waits only for a checkpoint that is being written. On leaving, all values on its meshes are
    gone, and using a handle raises. No process, actor or placement group is left behind.

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
        entered: Cluster = LocalCluster(address, deadline)
    elif address in ("ray", "auto") or ":" in address:
        from nrl.runtime.ray.cluster import RayCluster

        for name, value in _RAY_SETTINGS.items():  # Ray reads them when it is imported.
            os.environ.setdefault(name, value)
        constants = sys.modules.get("ray._private.ray_constants")  # The program may have imported Ray already.
        if constants is not None and os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] == "0":
            constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = False  # type: ignore[attr-defined]
        entered = RayCluster(address, deadline)
    else:
        raise PlacementError(
            f"cluster: unknown address '{address}'; give 'local', 'ray', 'auto', or the host:port of a Ray cluster"
        )
    try:
        try:
            yield entered
        finally:
            entered.settle()
        entered.finish()
    finally:
        entered.open = False
        entered.close()
