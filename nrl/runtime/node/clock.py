"""What a host says of itself: its clock, and how many processors Ray's processes may use there."""

import time

from nrl.runtime.node.cgroups import cores

__all__ = ["clock_and_cores"]


def clock_and_cores(deadline: float = 0.0) -> tuple[float, int]:
    """The time of day, in seconds since the epoch, and a number of processors.

    Args:
        deadline: seconds for the answer. `nrl.runtime.ray.nodes` gives it to every function that it calls on nodes;
            this one answers at once.

    >>> clock_and_cores()[1] > 0
    True
    """
    return time.time(), cores()
