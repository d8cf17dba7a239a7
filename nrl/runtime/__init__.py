"""The runtime: clusters, slots and meshes, and the transforms that map functions onto them.

`mesh` has slots, meshes, functions mapped over them, and the cluster that is this process; `ray` the meshes of actors;
`venvs` their Python environments, and `node` code that runs on a node alone; `trace` timelines and profiles; `transfer`
moves tensors from one mesh to others; `preemption` handles SIGTERM.
"""

from typing import TYPE_CHECKING

from nrl._lazy import on_demand

if TYPE_CHECKING:
    from nrl.runtime.clusters import cluster
    from nrl.runtime.mesh.current_process import Process, process
    from nrl.runtime.mesh.futures import Future, done
    from nrl.runtime.mesh.handles import Handle
    from nrl.runtime.mesh.layout import Layout
    from nrl.runtime.mesh.mapping import P, donated, merged, microbatched, resident, shard_map
    from nrl.runtime.mesh.placement import Cluster, Mesh, Slots, as_mesh
    from nrl.runtime.venvs.registry import Executable, register
else:
    __getattr__, __dir__ = on_demand(__name__)

__all__ = [
    "Cluster",
    "Executable",
    "Future",
    "Handle",
    "Layout",
    "Mesh",
    "P",
    "Process",
    "Slots",
    "as_mesh",
    "cluster",
    "donated",
    "done",
    "merged",
    "microbatched",
    "process",
    "register",
    "resident",
    "shard_map",
]
