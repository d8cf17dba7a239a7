"""In what the hosts of a mesh differ that a program would otherwise learn from its timeline, or not at all."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from nrl.log.slow_wait import say
from nrl.runtime.node.clock import clock_and_cores
from nrl.runtime.ray.nodes import ask

__all__ = ["Host", "ahead", "looked_at", "say_if_uneven"]

_CLOCK = 1.0  # seconds that a clock may differ before anybody is told


class Host(NamedTuple):
    """A host.

    Args:
        ahead: seconds that its clock is ahead of the driver's.
        cores: how many processors there are for Ray's processes.
    """

    ahead: float
    cores: int


def ahead(sent: float, there: float, arrived: float) -> float:
    """Seconds that another clock is ahead, at least: 0 if it may be right.

    Args:
        sent: when it was asked, by the own clock.
        there: what it said.
        arrived: when the answer was there.

    >>> ahead(10.0, 10.5, 11.0), ahead(10.0, 71.5, 11.0), ahead(10.0, 5.0, 11.0)
    (0.0, 60.5, -5.0)
    """
    return max(there - arrived, 0.0) + min(there - sent, 0.0)


def looked_at(mesh: str, nodes: Sequence[str], addresses: Mapping[str, str], deadline: float) -> dict[str, Host]:
    """Ask nodes, on which a process of Ray's is ready, and say whose clock differs from the driver's.

    Args:
        mesh: how errors and lines name the mesh.
        nodes: their Ray ids.
        addresses: of them.
        deadline: seconds for all answers.

    Raises:
        DeadlineExceeded: a node did not answer in time.
        LostActor: a node is gone.
    """
    found = {}
    for node, (sent, (there, cores), arrived) in ask(
        mesh, "the clock", "read", deadline, clock_and_cores, nodes
    ).items():
        found[node] = host = Host(ahead(sent, there, arrived), cores)
        if abs(host.ahead) > _CLOCK:
            side = "ahead of" if host.ahead > 0 else "behind"
            say(
                f"mesh '{mesh}': the clock of node {addresses[node]} is {abs(host.ahead):.1f} s {side} the driver's; "
                "the timeline shows its calls by the driver's. Let both be set by NTP"
            )
    return found


def say_if_uneven(mesh: str, threads: Mapping[str, int], addresses: Mapping[str, str]) -> None:
    """Say that processes have more processors on some nodes than on others.

    Args:
        mesh: how the line names the mesh.
        threads: that a process of it has, by node.
        addresses: of the nodes.
    """
    if len(set(threads.values())) > 1:
        each = ", ".join(f"{count} on node {addresses[node]}" for node, count in sorted(threads.items()))
        say(
            f"mesh '{mesh}': its processes have unequal numbers of threads ({each}), so those with more wait for those "
            "with fewer in each step; reserve other slots, or set OMP_NUM_THREADS"
        )
