"""The clock of a host, and the number of processors for Ray's processes."""

import time

from nrl.runtime.node.cgroups import usable_cores

__all__ = ["read_clock_and_cores"]


def read_clock_and_cores(deadline: float = 0.0) -> tuple[float, int]:
    """Return the time of day, in seconds since the epoch, and the number of usable processors.

    Args:
        deadline: not used. `nrl.runtime.ray.nodes` passes it to every function that it calls on nodes.

    >>> read_clock_and_cores()[1] > 0
    True
    """
    return time.time(), usable_cores()
