"""Ctrl-C while a call goes out to the processes of a mesh: all of them get it, or none goes on."""

import os
import signal
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import nrl
from nrl.errors import ClusterError
from nrl.runtime import Cluster, Mesh, P, shard_map
from nrl.runtime.ray.ray_processes import RayProcesses

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def summed(x: Tensor) -> Tensor:
    """The sum over the ranks, in each of them."""
    total = x.clone()
    dist.all_reduce(total)
    return total


def call(mesh: Mesh, value: float) -> Any:
    return shard_map(summed, mesh, P("dp"), P("dp"))(torch.full((2,), value))


@attrs.frozen
class Late:
    """An actor to which something happens just before it gets a call; all else is the actor's own."""

    actor: Any
    happens: Callable[[], None]

    def __getattr__(self, name: str) -> Any:
        if name == "do":
            self.happens()
        return getattr(self.actor, name)


def before_rank_1(mesh: Mesh, happens: Callable[[], None]) -> Any:
    """Let it happen once, when the next call has reached rank 0 alone."""
    processes = mesh.processes
    assert isinstance(processes, RayProcesses)
    actor = processes.actors[1]

    def once() -> None:
        processes.actors[1] = actor
        happens()

    processes.actors[1] = Late(actor, once)


@pytest.fixture(scope="module")
def cluster() -> Any:
    with nrl.cluster("ray", deadline=200) as found:
        yield found


def test_an_interrupt_between_two_ranks_never_adds_up_two_different_calls(cluster: Cluster) -> None:
    mesh = cluster.reserve(2).mesh(executable="system", name="interrupted")
    assert call(mesh, 1.0).result().tolist() == [2.0, 2.0]
    before_rank_1(mesh, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        call(mesh, 10.0)
    assert call(mesh, 100.0).result().tolist() == [200.0, 200.0]  # and not 110, of the two calls


def test_a_call_that_went_out_in_part_ends_the_mesh(cluster: Cluster) -> None:
    mesh = cluster.reserve(2).mesh(executable="system", name="torn")
    assert call(mesh, 1.0).result().tolist() == [2.0, 2.0]

    def fails() -> None:
        raise MemoryError

    before_rank_1(mesh, fails)
    text = (
        "shard_map(summed) had gone out to 1 of 2 processes of mesh 'torn' when MemoryError was raised, so the mesh "
        "has been ended; make another one"
    )
    with pytest.raises(MemoryError) as caught:
        call(mesh, 10.0)
    assert caught.value.__notes__ == [text]
    with pytest.raises(ClusterError) as ended:
        call(mesh, 100.0)
    assert str(ended.value) == text
    again = mesh.slots.mesh(executable="system", name="new")
    assert call(again, 100.0).result().tolist() == [200.0, 200.0]
