"""The processes that run submitted functions: what becomes of them, of their functions and of their mesh."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import nrl
from nrl.batch import Batch
from nrl.errors import ClosedCluster, DeadlineExceeded, FailedStart, LostActor, MutatedBatch, ShippingError
from nrl.runtime import Cluster, Executable, Mesh, P, shard_map
from tests.processes import alive, settled

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def mesh(on_ray: Cluster) -> Mesh:
    """Of one process, which no test ends."""
    return on_ray.reserve(1).mesh(executable="system", name="judge")


def pid_of(mesh: Mesh) -> int:
    """The process that answers calls."""
    return int(shard_map(os.getpid, mesh, (), P())().result())


def stays(path: Path) -> str:
    """Says which process it is in, and does not return."""
    print("judging\n", end="")  # in one piece, since another thread prints, too
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)
    time.sleep(600)
    return "never"


def begun(path: Path) -> int:
    """The process that runs `stays`."""
    assert not settled(lambda: not path.exists(), 120)
    return int(path.read_text())


def test_a_helper_that_is_killed(mesh: Mesh, tmp_path: Path) -> None:
    """Its functions are lost, and nothing else: the mesh answers, and the next function has a new helper."""
    both = [mesh.submit(stays, tmp_path / name) for name in "ab"]
    helper, own = begun(tmp_path / "a"), pid_of(mesh)
    assert begun(tmp_path / "b") == helper != own
    os.kill(helper, signal.SIGKILL)
    for future in both:
        with pytest.raises(LostActor) as caught:
            future.result(timeout=60)
        error = caught.value
        assert (error.who, error.mesh, error.rank) == ("submit(stays)", "judge", 0)
        assert error.cause == f"process {helper} was killed, or crashed"
        assert error.log == "judging\njudging\n"
        assert error.node.count(".") == 3
    assert pid_of(mesh) == own
    new = mesh.submit(os.getpid).result()
    assert new not in (helper, own)
    os.kill(new, signal.SIGKILL)  # with nothing to do
    assert settled(lambda: alive(new), 5) is False
    lane: Any = mesh.processes._queue._lanes[0]  # type: ignore[attr-defined]
    assert settled(lambda: lane.helper is not None, 30) is False  # Ray tells the driver
    assert mesh.submit(os.getpid).result() not in (new, own)


def test_an_overrun_is_gone_even_if_it_never_lets_go(mesh: Mesh, tmp_path: Path) -> None:
    """It holds the interpreter's lock, so no thread of its process could stop it."""

    def counts(path: Path) -> None:
        path.write_text(str(os.getpid()))
        9**9**9

    future = mesh.submit(counts, tmp_path / "pid", deadline=1.0)
    with pytest.raises(DeadlineExceeded, match=r"submit\(counts\): rank 0 of mesh 'judge' did not return within 1 s;"):
        future.result(timeout=60)
    helper, own = begun(tmp_path / "pid"), pid_of(mesh)
    assert settled(lambda: alive(helper), 5) is False
    assert mesh.submit(os.getpid).result() not in (helper, own)
    assert pid_of(mesh) == own


def test_what_is_sent(mesh: Mesh) -> None:
    with pytest.raises(ShippingError, match=r"submit\(len\): an object of type _thread.lock, which is reached through"):
        mesh.submit(len, [threading.Lock()])
    with pytest.raises(ShippingError, match=r"submit\(<lambda>\): an object of type _thread.lock"):
        mesh.submit(lambda *_: 0, nrl.runtime.done(3), threading.Lock()).result()
    with pytest.raises(ShippingError, match=r"the result of submit\(.*\): an object of type _thread.lock"):
        mesh.submit(threading.Lock).result()

    def writes(batch: Batch) -> None:
        batch["row"].add_(1)

    batch = Batch({"row": torch.zeros(100_000)}, batch_size=[100_000]).lock_()
    with pytest.raises(MutatedBatch, match=r"submit\(writes\) wrote into its arguments"):
        mesh.submit(writes, batch).result()
    assert mesh.submit(lambda batch: float(batch["row"].sum()), batch).result() == 0.0


def test_a_result_of_a_call_does_not_pass_through_the_program(mesh: Mesh) -> None:
    made: Any = shard_map(lambda x: x + 1, mesh, P(), P())(torch.zeros(50_000))
    assert mesh.submit(lambda x: float(x.sum()), made).result() == 50_000.0
    assert not made._value


def test_helpers_end_with_their_mesh(on_ray: Cluster, tmp_path: Path) -> None:
    mesh = on_ray.reserve(1).mesh(executable="system", name="short")
    future = mesh.submit(stays, tmp_path / "pid")
    helper, own = begun(tmp_path / "pid"), pid_of(mesh)
    os.kill(own, signal.SIGKILL)
    with pytest.raises(LostActor, match="rank 0 of mesh 'short'"):
        pid_of(mesh)
    for late in (future.result, lambda: mesh.submit(len, "")):
        with pytest.raises(LostActor, match=r"shard_map\(getpid\): rank 0 of mesh 'short' on node .* is lost"):
            late()
    assert settled(lambda: alive(helper), 5) is False


def test_helpers_end_with_their_cluster(on_ray: Cluster, tmp_path: Path) -> None:
    import ray

    with nrl.cluster(ray.get_runtime_context().gcs_address) as same:
        mesh = same.reserve(1).mesh(executable="system", name="left")
        future = mesh.submit(stays, tmp_path / "pid")
        helper = begun(tmp_path / "pid")
    with pytest.raises(ClosedCluster, match="has been left, and what it held is gone"):
        future.result(timeout=60)
    with pytest.raises(ClosedCluster, match=r"submit\(len\): the cluster '.*' has been left"):
        mesh.submit(len, "")
    assert settled(lambda: alive(helper), 5) is False


def test_a_helper_that_raises_while_it_starts(on_ray: Cluster, tmp_path: Path) -> None:
    """All that waits for it fails; the mesh goes on, and so do later functions, once it can start."""
    mesh = on_ray.reserve(1).mesh(executable=Executable("system", env={"PYTHONPATH": str(tmp_path)}), name="fresh")
    own = pid_of(mesh)
    broken = tmp_path / "xxhash.py"
    broken.write_text("raise RuntimeError('a broken package')\n")
    for future in [mesh.submit(len, "") for _ in range(2)]:
        with pytest.raises(FailedStart) as caught:
            future.result(timeout=120)
        assert caught.value.who == "submit(len)"
        assert caught.value.cause == "it raised RuntimeError: a broken package"
    assert pid_of(mesh) == own
    broken.unlink()
    assert mesh.submit(len, "abc").result(timeout=120) == 3
