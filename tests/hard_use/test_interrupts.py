"""Ctrl-C while a call goes out to the processes of a mesh: all of them get it, or none goes on."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import nrl
from nrl.errors import ClusterError
from nrl.runtime import Cluster, Mesh, P, shard_map
from nrl.runtime.ray_processes import RayProcesses

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
        if name == "call":
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


_CALLS = """
import itertools, sys, torch
import nrl
from nrl.runtime import P, shard_map
from tests.hard_use.test_interrupts import summed

with nrl.cluster("ray", deadline=200) as cluster:
    run = shard_map(summed, cluster.reserve(2).mesh(executable="system"), P("dp"), P("dp"))
    seen = 0
    run(torch.zeros(2)).result()
    print("ready", flush=True)
    for number in itertools.count():
        try:
            got = run(torch.full((2,), float(number))).result().tolist()
            assert got == [2.0 * number] * 2, (number, got)
        except KeyboardInterrupt:
            seen += 1
            if seen == 20:
                break
            print("interrupted", flush=True)
"""


def test_a_program_that_is_interrupted_again_and_again_gets_no_wrong_sum(tmp_path: Path) -> None:
    """At moments that nobody chose, and with the handler that Python itself installs."""
    script = tmp_path / "program.py"
    script.write_text(_CALLS)
    variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        for line in program.stdout:
            if line.strip() in ("ready", "interrupted"):
                time.sleep(0.1)
                program.send_signal(signal.SIGINT)
        errors = program.stderr.read()
        assert program.wait(60) == 0, errors
