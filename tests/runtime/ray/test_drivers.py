"""What a driver on Ray writes to its terminal, and what it leaves behind however it ends: nothing."""

import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import attrs
import pytest
import torch
from torch import Tensor

import nrl
from nrl.errors import LostActor
from nrl.runtime import P, process, shard_map
from tests.children import server
from tests.processes import marked, settled, titles

pytestmark = pytest.mark.ray


def talking(x: Tensor) -> Tensor:
    print("alike")
    print(f"rank {process().rank}")
    print("a warning", file=sys.stderr)
    return x


def last_words(x: Tensor) -> Tensor:
    print("last words")
    return x


def dying(x: Tensor) -> Tensor:
    if process().rank == 1:
        print("about to die")
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
    return x


def parent(x: Tensor) -> Tensor:
    """It starts a process of its own, as an environment of code might."""
    child = subprocess.Popen(["sleep", "600"])
    print("with a child", child.pid)
    child.wait()
    return x


def talks(address: str) -> None:
    """A program that sees a process of its mesh die, and goes on with another mesh."""
    with nrl.cluster(address, deadline=200) as cluster:
        slots = cluster.reserve(2)
        mesh = slots.mesh(executable="system", name="trainer")
        for _ in range(2):
            shard_map(talking, mesh, P("dp"), P("dp"))(torch.zeros(2)).result()
        try:
            shard_map(dying, mesh, P("dp"), P("dp"))(torch.zeros(2)).result()
        except LostActor as error:
            print(f"lost rank {error.rank}")
        mesh = slots[:1].mesh(executable="system", name="trainer")
        shard_map(last_words, mesh, P("dp"), P("dp"))(torch.zeros(2)).result()


def works(address: str) -> None:
    """A program in a long call."""
    with nrl.cluster(address, deadline=200) as cluster:
        mesh = cluster.reserve(1).mesh(executable="system", name="long")
        shard_map(parent, mesh, P("dp"), P("dp"))(torch.zeros(2)).result()


def starts(address: str) -> None:
    """A program whose mesh is about to start."""
    with nrl.cluster(address, deadline=200) as cluster:
        mesh = cluster.reserve(1).mesh(executable="system", name="young")
        coming = shard_map(last_words, mesh, P("dp"), P("dp"))(torch.zeros(2))
        print("with nothing", flush=True)
        coming.result()


def fails(address: str) -> None:
    """A program that ends by an exception of its own."""
    with nrl.cluster(address, deadline=200) as cluster:
        mesh = cluster.reserve(1).mesh(executable="system", name="short")
        shard_map(talking, mesh, P("dp"), P("dp"))(torch.zeros(2)).result()
        raise ValueError("on the driver")


def lags(address: str) -> None:
    """A program that leaves the cluster while a thread of it still asks Ray."""
    import ray

    def late() -> None:
        while cluster.open:
            time.sleep(0.05)
        time.sleep(2)
        print(len(ray.nodes()), "node", flush=True)

    with nrl.cluster(address, deadline=200) as cluster:
        cluster.thread(late, name="late")
    print("left", ray.is_initialized(), flush=True)


def clings(address: str) -> None:
    """A program whose thread does not notice that the cluster has been left."""
    from nrl.runtime.ray import cluster as module

    module._NOTICE = 0.1
    with nrl.cluster(address, deadline=200) as cluster:
        cluster.thread(time.sleep, 600, name="deaf")
    print("left", flush=True)


def _main(program: Callable[[str], None], address: str, mark: str, folder: str) -> None:
    for descriptor, name in ((1, "out"), (2, "err")):
        with (Path(folder) / name).open("a") as file:
            os.dup2(file.fileno(), descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["NRL_TEST_MARK"] = mark
    program(address)


@attrs.frozen
class Driver:
    """A program in a process of its own, the processes that it started, and what it wrote."""

    process: BaseProcess
    mark: str
    folder: Path

    def out(self) -> str:
        return (self.folder / "out").read_text()

    def err(self) -> str:
        return (self.folder / "err").read_text()

    def left(self, seconds: float = 30) -> dict[int, str]:
        """What of it runs still, when there was time to end."""
        return settled(lambda: titles(marked(self.mark)), seconds)

    def working(self) -> dict[int, str]:
        """The same, without the agents of Ray, which look for a head that was killed for a minute."""

        def look() -> dict[int, str]:
            return {pid: title for pid, title in titles(marked(self.mark)).items() if title not in _AGENTS}

        return settled(look, 30)


_AGENTS = {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}


def driver(program: Callable[[str], None], folder: Path, address: str = "ray") -> Driver:
    mark = uuid.uuid4().hex
    for name in ("out", "err"):
        (folder / name).touch()
    started = server().Process(target=_main, args=(program, address, mark, str(folder)))
    started.start()
    return Driver(started, mark, folder)


def test_what_processes_write_is_said_once(tmp_path: Path) -> None:
    """With its rank; and nothing else is written: neither Ray's own words, nor a loss that the program knows of."""
    program = driver(talks, tmp_path)
    program.process.join(200)
    assert program.process.exitcode == 0, program.err()
    waits = r"mesh 'trainer': waiting for . of . processes to start \(system, \d+ s\)"  # on a machine that is busy
    said = [re.sub("[01]", "*", line) for line in program.err().splitlines() if not re.match(waits, line)]
    assert said == ["(trainer[*]) a warning"] * 2
    lines = program.out().splitlines()
    assert sorted(line.partition(") ")[2] for line in lines if line.startswith("(trainer[")) == sorted(
        ["alike", "rank 0", "rank 1"] * 2 + ["about to die", "last words"]
    )
    assert [line for line in lines if not line.startswith("(trainer[")] == ["lost rank 1"]
    for rank in (0, 1):
        assert lines.count(f"(trainer[{rank}]) rank {rank}") == 2
    assert program.left() == {}


def test_ray_is_left_when_threads_that_ask_it_have_ended(tmp_path: Path) -> None:
    """It would be entered anew by one that asked later, or end the process."""
    program = driver(lags, tmp_path)
    program.process.join(100)
    assert (program.process.exitcode, program.out()) == (0, "1 node\nleft False\n"), program.err()


def test_a_thread_that_goes_on_is_said(tmp_path: Path) -> None:
    program = driver(clings, tmp_path)
    program.process.join(100)
    assert (program.process.exitcode, program.out()) == (0, "left\n"), program.err()
    assert program.err().splitlines() == [
        "cluster 'ray': left with threads that go on; where one asks Ray now, this process may end"
    ]


@pytest.mark.parametrize(
    ("program", "how"),
    [
        pytest.param(works, signal.SIGINT, marks=pytest.mark.slow),
        (works, signal.SIGKILL),
        (starts, signal.SIGINT),
        pytest.param(works, signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(fails, None, marks=pytest.mark.slow),
    ],
)
def test_nothing_is_left_behind(tmp_path: Path, program: Callable[[str], None], how: signal.Signals | None) -> None:
    running = driver(program, tmp_path)
    pid = running.process.pid
    assert pid is not None
    if how is not None:
        settled(lambda: "with " not in running.out() and running.process.is_alive(), 200)
        assert running.process.is_alive(), running.err()
        assert running.left(0) != {}
        os.kill(pid, how)
    running.process.join(100)
    assert running.process.exitcode == (-9 if how is signal.SIGKILL else 1)
    if how is signal.SIGINT:
        assert running.err().rstrip().endswith("KeyboardInterrupt")
    assert (running.working() if how is signal.SIGKILL else running.left()) == {}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_nothing_is_left_behind_at_random_moments(tmp_path: Path) -> None:
    draw = random.Random(20)
    for number in range(20):
        folder = tmp_path / str(number)
        folder.mkdir()
        running = driver(works, folder)
        running.process.join(draw.uniform(0, 25))
        assert running.process.is_alive(), running.err()
        running.process.kill()
        running.process.join(10)
        assert running.working() == {}
        if number % 5 == 1:
            assert running.left(90) == {}
