"""Where things run, and the transforms that map functions onto it."""

from nrl.runtime.clusters import cluster
from nrl.runtime.executables import Executable, register
from nrl.runtime.futures import Future, done
from nrl.runtime.handles import Handle
from nrl.runtime.mapping import P, donated, merged, microbatched, resident, shard_map
from nrl.runtime.placement import Cluster, Mesh, Slots, as_mesh
from nrl.runtime.process import Process, process

__all__ = [
    "Cluster",
    "Executable",
    "Future",
    "Handle",
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
