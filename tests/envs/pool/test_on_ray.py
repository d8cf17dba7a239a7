"""`pooled(cluster=)`: processes on the nodes of a Ray cluster, by each kind of address, and with too few CPUs."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import nrl
from nrl.cli.cli import main
from nrl.envs import Trace
from nrl.gym.config.resolving import resolve
from nrl.gym.config.run_registry import Place
from tests.gym.cli.test_gym_run import folder, played, wrote

__all__ = ["folder"]

pytestmark = pytest.mark.ray

OPEN = {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}  # others do not know its token
OWN = """
import socket, subprocess, sys, ray
ray.init(address="local", num_cpus=2, include_dashboard=False, configure_logging=False)
gcs = ray.get_runtime_context().gcs_address
with socket.socket() as found:
    found.bind(("127.0.0.1", 0))
    port = found.getsockname()[1]
client = subprocess.Popen(
    [sys.executable, "-m", "ray.util.client.server", "--address", gcs, "--host", "127.0.0.1", "--port", str(port),
     "--mode", "legacy"])
while True:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
        break
    except OSError:
        pass
print(gcs, f"ray://127.0.0.1:{port}", flush=True)
sys.stdin.read()
client.terminate()
client.wait()
"""
PROGRAM = """
import asyncio, os, sys, time
import nrl
from nrl.envs import Environment, Step, Trace, Turn
from nrl.envs.pool import ray_worker

ray_worker._MORE_ROOM = 2.0

def right(task, trace):
    time.sleep(0.05)
    return {"right": float(trace.text == task["answer"]), "pid": float(os.getpid())}

def reset(task):
    return os.getpid(), "?"

def step(state, turn):
    return Step(state, float(state == os.getpid()))

async def main(kind, address, gcs):
    if kind == "scarce":  # two CPUs for six workers
        verify = nrl.pooled(right, workers=6, cluster=address)
        found = await asyncio.gather(*(verify({"answer": "4"}, Trace("2+2=", ["4"])) for _ in range(400)))
        assert {each["right"] for each in found} == {1.0}
        print(len({each["pid"] for each in found}), "processes")
        usual, on_ray._ROOM = on_ray._ROOM, 8.0
        try:
            await nrl.pooled(right, workers=2, cluster=gcs)({"answer": "4"}, Trace("2+2=", ["4"]))
        except nrl.errors.EnvError as error:
            print(error)
        del verify
        on_ray._ROOM = usual  # a busy machine frees what ended after seconds
        env = nrl.pooled(Environment(reset, step), workers=6, cluster="auto")
        states = await asyncio.gather(*(env.reset({}) for _ in range(12)))
        taken = await asyncio.gather(*(env.step(state, Turn("x")) for state, _ in states))
        print("rewards", {each.reward for each in taken})
    else:
        verify = nrl.pooled(right, workers=1, cluster=address)
        print((await verify({"answer": "4"}, Trace("2+2=", ["4"])))["right"])
        again = nrl.pooled(right, workers=1, cluster=gcs)
        print((await again({"answer": "5"}, Trace("2+2=", ["4"])))["right"])
        for other in ("10.0.0.9:6379", "ray"):
            try:
                await nrl.pooled(right, workers=1, cluster=other)({}, Trace())
            except nrl.errors.EnvError as error:
                print(error)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def addresses() -> Iterator[tuple[str, str]]:
    """Those of a cluster with two CPUs: its own, and that of Ray Client."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **OPEN},
    )
    assert owner.stdin is not None
    assert owner.stdout is not None
    gcs, client = next(line for line in owner.stdout if "ray://" in line).split()
    yield gcs, client
    owner.stdin.close()
    owner.wait(60)
    owner.stdout.close()


def told(kind: str, address: str, gcs: str, **env: str) -> list[str]:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind, address, gcs],
        capture_output=True,
        text=True,
        env={**os.environ, **OPEN, **env},
        timeout=200,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout.splitlines()


@pytest.mark.parametrize("kind", ["host:port", pytest.param("ray://", marks=pytest.mark.slow), "auto"])
def test_an_address_of_each_kind(addresses: tuple[str, str], kind: str) -> None:
    """What was joined by one address is known by its other ones."""
    gcs, client = addresses
    address = {"host:port": gcs, "ray://": client, "auto": "auto"}[kind]
    joined, right, wrong, other, none = told(kind, address, gcs, **({"RAY_ADDRESS": gcs} if kind == "auto" else {}))
    assert joined.startswith(f"cluster: joined Ray at {gcs}; the cluster has 1 node(s)")
    assert (right, wrong) == ("1.0", "0.0")
    assert f"this program is in the Ray cluster at {gcs}, and cannot join 10.0.0.9:6379 as well" in other
    assert "pooled(right): cluster='ray' would start a Ray cluster; give the address of one that runs" in none


@pytest.mark.slow
def test_more_workers_than_free_processors(addresses: tuple[str, str]) -> None:
    """The calls are made by those that could start; where none can, the error says what is free."""
    lines = told("scarce", addresses[0], addresses[0])
    assert "2 processes" in lines
    assert any("pooled(right): goes on with fewer workers: no CPU is free for more" in line for line in lines)
    (error,) = [line for line in lines if "was free for a process" in line]
    assert error.startswith("pooled(right): no CPU of the Ray cluster was free for a process within 8 s; the cluster")
    assert ": 2 CPU), of which 0 CPU are free. End what takes them, or add nodes" in error
    assert "rewards {1.0}" in lines


WHERE = """
import os

def where(task, trace):
    return {"parent": float(os.getppid()), "process": float(os.getpid()), "ray": float("RAY_JOB_ID" in os.environ)}
"""


@pytest.mark.parametrize("by", ["ray_head_node_address", "RAY_ADDRESS"])
def test_a_gym_has_its_workers_there(
    addresses: tuple[str, str], folder: Path, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in OPEN.items():
        monkeypatch.setenv(name, value)
    more = "head_server: {port: 0}"
    if by == "RAY_ADDRESS":
        monkeypatch.setenv(by, addresses[0])
    else:
        more += f"\n{by}: {addresses[1]}"
    (folder / "where.py").write_text(WHERE)

    def drive(_: Place) -> None:
        (server,) = resolve(["gym.yaml"]).values()
        found = asyncio.run(nrl.remote(server.urls, token=server.token)({}, Trace("", ["x"])))
        assert found["ray"] == 1.0

    assert played(wrote(folder, "  where: {environment: 'where.py:where', workers: 1}\n", more), drive) == 143


def test_a_gym_whose_cluster_is_not_there(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    more = "head_server: {port: 0}\nray_head_node_address: 127.0.0.1:1"
    assert main(wrote(folder, "  exact: {environment: exact, workers: 1}\n", more)) == 2
    assert "there is no Ray cluster at '127.0.0.1:1'" in (said := capfd.readouterr().err)
    assert "start one with `ray start --head`\n" in said
