"""Where things run, and the transforms that map functions onto it."""

from nrl.runtime.futures import Future, done
from nrl.runtime.handles import Handle
from nrl.runtime.local import Cluster, Mesh, Slots, as_mesh, cluster
from nrl.runtime.mapping import P, donated, merged, microbatched, resident, shard_map

__all__ = [
    "Cluster",
    "Future",
    "Handle",
    "Mesh",
    "P",
    "Slots",
    "as_mesh",
    "cluster",
    "donated",
    "done",
    "merged",
    "microbatched",
    "resident",
    "shard_map",
]
