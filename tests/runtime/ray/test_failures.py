"""What becomes of a mesh when a process of it dies, hangs, raises or does not start."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import nrl
from nrl.errors import DeadlineExceeded, ExecutableError, FailedStart, LostActor, PlacementError
from nrl.runtime import Cluster, Executable, Future, Mesh, P, Slots, process, resident, shard_map
from tests.processes import alive, settled

pytestmark = pytest.mark.ray

SOON = 100.0  # seconds until an error must have come, far below the cluster's deadline


@pytest.fixture(scope="module")
def slots(on_ray: Cluster) -> Slots:
    return on_ray.reserve(2)


def on(mesh: Mesh, fn: Callable[[Tensor], Any], x: Tensor | None = None) -> Future[Tensor]:
    """Call a function in each of two processes."""
    found: Future[Tensor] = shard_map(fn, mesh, P("dp"), P("dp"))(torch.zeros(2) if x is None else x)
    return found


def pids(mesh: Mesh) -> list[int]:
    return [int(pid) for pid in on(mesh, lambda x: torch.full_like(x, os.getpid(), dtype=torch.long)).result()]


def started(slots: Slots, name: str) -> tuple[Mesh, list[int]]:
    mesh = slots.mesh(executable="system", name=name)
    return mesh, pids(mesh)


def after(seconds: float, what: Callable[[], Any]) -> None:
    threading.Timer(seconds, what).start()


def lost(call: Callable[[], Any], mesh: str, rank: int | None) -> LostActor:
    """What a call raises, and that it does so soon."""
    began = time.monotonic()
    with pytest.raises(LostActor) as caught:
        call()
    assert time.monotonic() - began < SOON
    assert (caught.value.mesh, caught.value.rank) == (mesh, rank)
    assert caught.value.node != "?"
    return caught.value


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def test_killed_while_idle(slots: Slots) -> None:
    mesh, (first, second) = started(slots, "idle")
    kill(second)
    error = lost(lambda: pids(mesh), "idle", 1)
    assert error.cause == f"process {second} was killed, or crashed"
    assert settled(lambda: alive(first), 60) is False  # its peer is ended
    with pytest.raises(LostActor):  # and the mesh stays lost
        pids(mesh)


def test_killed_in_a_call(slots: Slots) -> None:
    mesh, (first, second) = started(slots, "busy")

    def work(x: Tensor) -> Tensor:
        print(f"rank {process().rank} works")
        time.sleep(600)
        return x

    coming = on(mesh, work)
    after(0.5, lambda: kill(first))
    error = lost(coming.result, "busy", 0)
    assert error.who == "shard_map(work)"
    assert error.log == "rank 0 works\n"
    assert settled(lambda: alive(second), 60) is False


def test_where_processes_meet(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a port of the program's range; those of gloo are the system's choice."""

    def port(x: Tensor) -> Tensor:
        from torch.distributed import distributed_c10d

        store: Any = distributed_c10d._get_default_store()
        return torch.full_like(x, store.underlying_store.port, dtype=torch.long)

    monkeypatch.setenv("NRL_PORTS", "21000-21999")
    found = on(slots.mesh(executable="system", name="meeting"), port).result().tolist()
    assert len({*found}) == 1
    assert 21000 <= found[0] <= 21999


@pytest.mark.slow
def test_ended_by_itself(slots: Slots) -> None:
    mesh, _ = started(slots, "quitter")

    def leave(x: Tensor) -> Tensor:
        if process().rank == 1:
            os._exit(3)
        return x

    lost(on(mesh, leave).result, "quitter", 1)


class Odd(Exception):
    """Its constructor wants other arguments than those that it keeps, and it holds what cannot be sent."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(f"{text} {number}")
        self.number, self.lock = number, threading.Lock()


@pytest.fixture(scope="module")
def pair(slots: Slots) -> Mesh:
    """A mesh that no test ends."""
    return slots.mesh(executable="system", name="pair")


def test_any_exception_arrives_as_itself(pair: Mesh) -> None:
    def fails(x: Tensor) -> Tensor:
        raise Odd(3, "odd")

    with pytest.raises(Odd) as caught:
        on(pair, fails).result()
    assert (str(caught.value), caught.value.args) == ("odd 3", ("odd 3",))
    left, note = caught.value.__notes__
    assert left == "Left behind in the process that raised this: lock (it cannot be sent)"
    assert caught.value.number == 3
    assert re.match(
        r"raised in rank [01] of mesh 'pair':\nTraceback \(most recent call last\):\n  File .*, line \d+, in fails\n",
        note,
    )
    assert not hasattr(caught.value, "lock")  # which could not be sent

    def opens(x: Tensor) -> Tensor:
        return x + len(Path("/nowhere").read_text())

    with pytest.raises(FileNotFoundError) as not_found:
        on(pair, opens).result()
    assert not_found.value.filename == "/nowhere"


def test_a_value_that_one_rank_could_not_make(pair: Mesh) -> None:
    """The error of its maker, though the other rank is still at it, and whichever is asked for first."""

    def make(x: Tensor) -> Tensor:
        if process().rank == 0:
            raise ValueError("not made")
        time.sleep(1)
        return x

    value = shard_map(make, pair, P("dp"), resident)(torch.zeros(2))
    more = shard_map(lambda x: x + 1, pair, resident, resident)(value)
    last = shard_map(lambda x: x, pair, resident, P("dp"))
    with pytest.raises(PlacementError):
        last(more)
    with pytest.raises(ValueError, match="not made"):
        shard_map(lambda x: {}, pair, resident, P())(more).result()
    with pytest.raises(ValueError, match="not made"):
        shard_map(lambda x: {}, pair, resident, P())(value).result()
    assert pids(pair)  # which goes on


def test_an_error_of_one_rank_ends_those_that_wait_for_it(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nrl.runtime.ray.pending_call._GRACE", 1.0)
    mesh, both = started(slots, "partial")

    def add_up(x: Tensor) -> Tensor:
        if process().rank == 1:
            raise ValueError("not with me")
        dist.all_reduce(x)
        return x

    with pytest.raises(ValueError, match="not with me") as caught:
        on(mesh, add_up).result()
    assert caught.value.__notes__[1] == (
        "rank 0 did not return within 1 s after that, as when they wait for rank 1; mesh 'partial' has been ended"
    )
    assert settled(lambda: any(map(alive, both)), 60) is False


def test_long_waits_say_what_they_are_for(
    slots: Slots, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("nrl.runtime.ray.pending_call.SILENCE", 0.3)

    def naps(x: Tensor) -> Tensor:
        time.sleep(1.5 * process().rank)
        return x

    mesh = slots.mesh(executable="system", name="late")
    on(mesh, naps).result()
    start, *more = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("(")]
    assert start == "mesh 'late': waiting for 2 of 2 processes to start (system, 0 s)"
    assert re.fullmatch(r"mesh 'late': waiting for shard_map\(naps\) in 1 of 2 processes \(\d+ s\)", more[-1])
    on(mesh, naps).result()  # which takes as long as it always does
    assert "waiting" not in "".join(capsys.readouterr())


def test_a_call_has_a_deadline(slots: Slots) -> None:
    mesh, both = started(slots, "slow")
    mesh.processes.deadline = 2.0  # type: ignore[attr-defined]  # the cluster's is for the start as well

    def work(x: Tensor) -> Tensor:
        print("at it")
        time.sleep(600 if process().rank == 1 else 0)
        return x

    coming = on(mesh, work)
    with pytest.raises(DeadlineExceeded, match=r"rank 1 of mesh 'slow' did not return within 0.5 s; it goes on"):
        coming.result(timeout=0.5)
    with pytest.raises(DeadlineExceeded) as caught:
        coming.result()
    assert str(caught.value) == (
        "shard_map(work): rank 1 of mesh 'slow' did not return within 2 s, so the mesh has been ended. If it needs "
        "longer, give nrl.cluster(..., deadline=) more seconds. The last lines of the log of rank 1:\n    at it"
    )
    assert settled(lambda: any(map(alive, both)), 60) is False


def test_the_mesh_that_is_late_is_blamed(slots: Slots) -> None:
    """And not one that waits for what it makes."""
    slow, waiting = (slots[at : at + 1].mesh(executable="system", name=name) for at, name in enumerate(["a", "b"]))
    for mesh in (slow, waiting):
        on(mesh, lambda x: x).result()
    waiting.processes.deadline = 2.0  # type: ignore[attr-defined]

    def late(x: Tensor) -> Tensor:
        time.sleep(5)
        return x

    coming: Any = on(slow, late)
    assert on(waiting, lambda x: x + 1, coming).result().tolist() == [1, 1]


def test_a_process_that_raises_while_it_starts(slots: Slots, tmp_path: Path) -> None:
    (tmp_path / "xxhash.py").write_text("raise RuntimeError('a broken package')\n")
    broken = Executable("system", env={"PYTHONPATH": str(tmp_path)})
    mesh = slots.mesh(executable=broken, name="broken")
    with pytest.raises(FailedStart) as caught:
        on(mesh, lambda x: x).result()
    assert caught.value.cause == "it raised RuntimeError: a broken package"
    assert "xxhash.py" in caught.value.log
    with pytest.raises(FailedStart):  # another attempt would end in the same way
        nrl.retrying(lambda _: raising(caught.value), pause=0)(None)


def raising(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo no library >&2; exit 3", "it ended with exit code 3 and wrote: no library"),
        ('exec {python} -S -E "$@"', "it cannot import ray and torch"),
        ("echo 3 11 {ray}", "it is Python 3.11, and the driver Python 3.12"),
        ("echo 3 12 1.0", "it has Ray 1.0, and the driver Ray {ray}"),
        (None, "it cannot be started: No such file or directory"),
    ],
)
def test_an_interpreter_that_cannot_run_a_process(
    slots: Slots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, why: str
) -> None:
    """Ray would start it again and again, and say nothing."""
    import ray

    python = tmp_path / "python"
    if script is not None:
        python.write_text("#!/bin/sh\n" + script.format(python=sys.executable, ray=ray.__version__) + "\n")
        python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ExecutableError) as caught:
        slots.mesh(executable="system", name="broken")
    assert "mesh 'broken': executable 'system' cannot run on node" in str(caught.value)
    assert f"{python}: {why.format(ray=ray.__version__)}. Hint: " in str(caught.value)


def test_another_python_than_the_drivers(slots: Slots) -> None:
    with pytest.raises(ExecutableError, match="'old' is of Python 3.11, and the driver of Python 3.12"):
        slots.mesh(executable=Executable("old", python="3.11"))


def test_a_second_address(on_ray: Cluster) -> None:
    import ray

    here = ray.get_runtime_context().gcs_address
    with pytest.raises(PlacementError, match=f"is on the Ray cluster at '{here}' already, and cannot join '10.0.0.1:6"):
        nrl.cluster("10.0.0.1:6379").__enter__()
    with nrl.cluster(here) as same:
        assert same.name == here


def test_slots_that_there_are_not(on_ray: Cluster) -> None:
    with pytest.raises(PlacementError) as caught:
        on_ray.reserve(1000)
    assert re.fullmatch(
        r"reserve: 1000 slots of 1 CPU each, PACK, cannot be had; the cluster has 1 node\(s\) \(node [\d.]+: 64 CPU\), "
        r"of which \d+ CPU are free. Ask for fewer slots, another strategy, or add nodes",
        str(caught.value),
    )
    with pytest.raises(PlacementError, match="2 slots of 1 CPU each, STRICT_SPREAD, cannot be had"):
        on_ray.reserve(2, strategy="STRICT_SPREAD")


def test_addresses_that_are_none(on_ray: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session is on a cluster, so another process tries them."""
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    script = """
import sys, time, nrl
for address in sys.argv[1:]:
    began = time.monotonic()
    try:
        with nrl.cluster(address):
            print("entered")
    except nrl.errors.PlacementError as error:
        print(time.monotonic() - began < 60, error)
"""
    run = subprocess.run(
        [sys.executable, "-c", script, "ray", "127.0.0.1:1", "nowhere.invalid:6379"], capture_output=True, text=True
    )
    client, nobody, unknown = run.stdout.splitlines()
    assert client.startswith("True cluster: ray://head:10001 is an address of Ray Client, through which")
    assert nobody.startswith("True cluster: there is no Ray cluster at '127.0.0.1:1' (")
    assert unknown.startswith("True cluster: there is no Ray cluster at 'nowhere.invalid:6379' (")
    assert run.stderr == ""


def test_a_head_that_is_gone_or_says_nothing(on_ray: Cluster, tmp_path: Path) -> None:
    """Ray itself would try for a quarter of an hour. No other cluster of this machine is to be found in the process."""
    script = """
import functools, sys, time, nrl
from ray._private import services
for address, running in (("auto", ()), ("auto", ["127.0.0.1:1"]), (sys.argv[1], ())):
    services.find_gcs_addresses = functools.cache(lambda: running)
    began = time.monotonic()
    try:
        with nrl.cluster(address, deadline=2):
            print("entered")
    except nrl.errors.PlacementError as error:
        print(time.monotonic() - began < 30, error)
"""
    file = tmp_path / "ray" / "ray_current_cluster"
    file.parent.mkdir()
    file.write_text("127.0.0.1:2")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # as of a process that has been stopped
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        env |= {"RAY_TMPDIR": str(tmp_path)}
        run = subprocess.run([sys.executable, "-c", script, address], capture_output=True, text=True, env=env)
    stale, left, stopped = run.stdout.splitlines()
    assert stale.startswith("True cluster: no head of a Ray cluster answers at 127.0.0.1:2 ([Errno 111] Connection ")
    assert f"where the file {file} says that it is; that is stale: delete it, or end what is left by `ray s" in stale
    assert "answers at 127.0.0.1:1 (" in left
    assert "where processes of Ray on this machine look for it; they are left over: end them by `ray stop`. " in left
    assert stopped.startswith(f"True cluster: there is no Ray cluster at '{address}' (something listens there, and s")
    assert run.stderr == ""
