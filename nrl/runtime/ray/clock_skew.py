"""Differences between the hosts of a mesh that skew a timeline or slow down steps: clocks and numbers of threads."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from nrl.log.slow_wait import say
from nrl.runtime.node.clock import read_clock_and_cores
from nrl.runtime.ray.nodes import call_with_times

__all__ = ["HostClock", "estimate_skew", "read_clocks", "warn_if_uneven"]

_CLOCK = 1.0  # seconds of clock skew that are tolerated without a warning


class HostClock(NamedTuple):
    """The clock and the processors of a host.

    Args:
        clock_skew: seconds by which its clock is ahead of the driver's.
        cores: the number of processors for Ray's processes.
    """

    clock_skew: float
    cores: int


def estimate_skew(sent: float, remote: float, arrived: float) -> float:
    """Estimate the seconds by which another clock is ahead, at least: 0 if it may be right.

    Args:
        sent: the time of the request, by the local clock.
        remote: the time by the remote clock.
        arrived: the time of the reply, by the local clock.

    >>> estimate_skew(10.0, 10.5, 11.0), estimate_skew(10.0, 71.5, 11.0), estimate_skew(10.0, 5.0, 11.0)
    (0.0, 60.5, -5.0)
    """
    return max(remote - arrived, 0.0) + min(remote - sent, 0.0)


def read_clocks(mesh: str, nodes: Sequence[str], addresses: Mapping[str, str], deadline: float) -> dict[str, HostClock]:
    """Read the clocks of nodes with a running Ray process, and warn of clocks that differ from the driver's.

    Args:
        mesh: how errors and lines name the mesh.
        nodes: their Ray ids.
        addresses: of them.
        deadline: seconds for all answers.

    Raises:
        DeadlineExceeded: a node did not answer in time.
        LostActor: a node is gone.
    """
    clocks = {}
    for node, (sent, (remote, cores), arrived) in call_with_times(
        mesh, "the clock", "read", deadline, read_clock_and_cores, nodes
    ).items():
        clocks[node] = clock = HostClock(estimate_skew(sent, remote, arrived), cores)
        if abs(clock.clock_skew) > _CLOCK:
            side = "ahead of" if clock.clock_skew > 0 else "behind"
            say(
                f"mesh '{mesh}': the clock of node {addresses[node]} is {abs(clock.clock_skew):.1f} s {side} the "
                "driver's; the timeline shows its calls by the driver's. Let both be set by NTP"
            )
    return clocks


def warn_if_uneven(mesh: str, threads: Mapping[str, int], addresses: Mapping[str, str]) -> None:
    """Warn if processes have more processors on some nodes than on others.

    Args:
        mesh: how the line names the mesh.
        threads: threads of a process of the mesh, by node.
        addresses: of the nodes.
    """
    if len(set(threads.values())) > 1:
        counts = ", ".join(f"{count} on node {addresses[node]}" for node, count in sorted(threads.items()))
        say(
            f"mesh '{mesh}': its processes have unequal numbers of threads ({counts}), so those with more wait for "
            "those with fewer in each step; reserve other slots, or set OMP_NUM_THREADS"
        )
