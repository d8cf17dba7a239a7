"""Several nodes in one machine: where slots lie, an environment for each, a node that is lost, two drivers at once."""

import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import nrl
from nrl.errors import ClusterError, LostActor, PlacementError
from nrl.runtime import Executable, P, Slots, process, shard_map
from nrl.runtime.mesh.placement import Strategy
from nrl.runtime.ray import placement_groups
from nrl.runtime.ray.placement_groups import SlotRequest
from nrl.runtime.restart_state import mark_restart
from nrl.runtime.trace.timeline import recording
from nrl.runtime.venvs.environments import is_in_use
from tests.children import server
from tests.processes import descendants, settled, titles

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

SMALL = Executable("small", requirements=["cowsay==6.1"])  # beside what nrl itself needs


class Nodes:
    """A cluster of a head without slots, and nodes with two each, and programs that join it."""

    def __init__(self, folder: Path) -> None:
        from ray.cluster_utils import Cluster

        self.folder = folder
        self.spared = {pid for pid, _ in _meshes()}  # of other clusters that tests have started
        self.cluster = Cluster(initialize_head=True, connect=False, head_node_args={"num_cpus": 0})
        self.workers = {name: self.add(name) for name in "ab"}

    def add(self, name: str, **more: Any) -> Any:
        """A node with a folder of its own for environments."""
        return self.cluster.add_node(num_cpus=2, env_vars={"NRL_VENV_DIR": str(self.folder / name)}, **more)

    def start(self, program: Callable[..., Any], *args: Any) -> "Program":
        """Run ``program(cluster's address, a function that says something, *args)`` in a process."""
        said = self.folder / f"{program.__name__}.{time.monotonic_ns()}"
        said.touch()
        child = server().Process(target=_main, args=(program, self.cluster.address, str(said), args))
        child.start()
        return Program(child, said)

    def run(self, program: Callable[..., Any], *args: Any) -> list[Any]:
        """What it said, when it has ended well."""
        started = self.start(program, *args)
        started.process.join(400)
        assert started.process.exitcode == 0, started.said()
        return started.said()

    def busy(self) -> list[str]:
        """The processes of meshes."""
        return [title for pid, title in _meshes() if pid not in self.spared]


def _meshes() -> list[tuple[int, str]]:
    return [(pid, title) for pid, title in titles(descendants(os.getpid())).items() if title.startswith("ray::Actor")]


class Program:
    """A driver on these nodes."""

    def __init__(self, process: Any, path: Path) -> None:
        self.process, self.path = process, path

    def said(self) -> list[Any]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def until_it_says(self, word: str) -> None:
        settled(lambda: word not in self.said() and self.process.is_alive(), 200)
        assert self.process.is_alive(), self.said()


def _main(program: Callable[..., Any], address: str, path: str, args: tuple[Any, ...]) -> None:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    with Path(path).open("a") as file:
        program(address, lambda word: print(json.dumps(word), file=file, flush=True), *args)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        made = Nodes(tmp_path_factory.mktemp("nodes"))
        yield made
        made.cluster.shutdown()


def refused(address: str, n: int, strategy: Strategy) -> str:
    with nrl.cluster(address) as cluster, pytest.raises(PlacementError) as caught:
        cluster.reserve(n, strategy=strategy, deadline=2)
    return str(caught.value)


def reserves(address: str, say: Callable[[Any], None]) -> None:
    import ray
    from ray.util.placement_group import placement_group_table

    for strategy, n in (("PACK", 2), ("STRICT_PACK", 2), ("SPREAD", 2), ("STRICT_SPREAD", 2), ("PACK", 4)):
        with nrl.cluster(address, deadline=60) as cluster:
            settled(lambda: ray.available_resources().get("CPU", 0) != 4, 20)  # Ray gives slots back a moment later
            cluster.reserve(n, strategy=strategy)  # type: ignore[arg-type]
            made = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
            say([len(made), len(set(made[0]["bundles_to_node_id"].values()))])
            if n == 4:
                with pytest.raises(PlacementError) as caught:
                    cluster.reserve(1, deadline=2)
                say(str(caught.value))
    say(refused(address, 3, "STRICT_PACK"))
    say(refused(address, 3, "STRICT_SPREAD"))
    for n, per_host in ((4, 2), (3, 2), (2, 1)):
        with nrl.cluster(address, deadline=60) as cluster:
            slots = cluster.reserve(n, per_host=per_host)
            nodes = [slot.node for slot in cluster._slots]  # type: ignore[attr-defined]
            say([nodes.count(node) for node in dict.fromkeys(nodes)])
            assert nodes == sorted(nodes, key=nodes.index)  # those of a host follow one another
            [host] = {*slots.hosts}
            assert host in {node["NodeManagerAddress"] for node in ray.nodes()}
            assert repr(slots[1:2]) == f"Slots(1 on {host})"
            assert not slots.gpus
    with nrl.cluster(address, deadline=60) as cluster, pytest.MonkeyPatch.context() as patch:
        settled(lambda: ray.available_resources().get("CPU", 0) != 4, 20)
        patch.setattr(placement_groups, "PATIENCE", 2.0)
        with pytest.raises(PlacementError, match=r"reserve: 9 slots .* cannot be had \(waited 3 s\)"):
            cluster.reserve(9, least=3, deadline=3)  # a first start waits for all
        with redirect_stderr(io.StringIO()) as lines, mark_restart():
            say([len(cluster.reserve(9, least=3)), lines.getvalue()])
    with nrl.cluster(address, deadline=60) as cluster, pytest.raises(PlacementError) as caught:
        cluster.reserve(3, per_host=3, deadline=2)
    say(str(caught.value))


def test_where_slots_lie(nodes: Nodes) -> None:
    *found, taken, too_many, too_few, two_each, two_and_one, one_each, fewer, too_large = nodes.run(reserves)
    assert fewer == [4, "reserve: 9 slots of 1 CPU each, PACK, are not to be had within 2 s; 4 will do\n"]
    assert (two_each, two_and_one, one_each) == ([2, 2], [2, 1], [1, 1])
    assert "3 slots of 1 CPU each, 3 on each host, cannot be had (waited 2 s)" in too_large
    assert found == [[1, 1], [1, 1], [1, 2], [1, 2], [1, 2]]  # one group each: an earlier one is gone
    assert taken.startswith(
        "reserve: 1 slots of 1 CPU each, PACK, cannot be had (waited 2 s); the cluster has 3 node(s)"
    )
    assert taken.endswith(", of which 0 CPU are free. Ask for fewer slots, another strategy, or add nodes")
    assert "3 slots of 1 CPU each, STRICT_PACK, cannot be had" in too_many
    assert too_many.count(": 2 CPU") == 2
    assert too_many.count(": 0 CPU") == 1
    assert "3 slots of 1 CPU each, STRICT_SPREAD, cannot be had" in too_few


def where(x: Tensor) -> Tensor:
    """Its node's letter, whether a process runs in an environment of it and holds that, and a sum over all of them.

    It imports nrl from a folder beside, which it holds, too, and which what it starts finds.
    """
    import cowsay  # type: ignore[import-not-found]

    folder = os.environ["NRL_VENV_DIR"]
    total = torch.ones(1)
    if process().size > 1:
        dist.all_reduce(total)
    source = Path(nrl.__file__).parents[1]
    program = "from importlib.util import find_spec; print(find_spec('nrl').origin)"
    child = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    here = sys.prefix.startswith(folder) and cowsay.__file__.startswith(folder) and is_in_use(Path(sys.prefix))
    here = (
        here
        and source.parent == Path(folder) / ".sources"
        and is_in_use(source)
        and child.stdout.strip() == nrl.__file__
    )
    return torch.tensor([["ab".index(Path(folder).name), float(here), float(total)]]).expand(len(x), 3).clone()


def builds(address: str, say: Callable[[Any], None], folder: str) -> None:
    def built() -> list[int]:
        return [len(list((Path(folder) / name).glob("small-*"))) for name in "ab"]

    os.chdir(folder)  # which Ray puts on the path of processes before everything else
    with nrl.cluster(address, deadline=400) as cluster:
        slots = cluster.reserve(2, strategy="STRICT_SPREAD")
        for n in (1, 2):
            mesh = slots[:n].mesh(executable=SMALL, name=f"on{n}")
            say([shard_map(where, mesh, P("dp"), P("dp"))(torch.zeros(n)).result().tolist(), built()])


def test_each_node_builds_what_it_runs(nodes: Nodes) -> None:
    (alone, one), (both, two) = nodes.run(builds, str(nodes.folder))
    ((letter, here, total),) = alone
    assert (here, total) == (1, 1)
    assert one == [1 - letter, letter]  # and not where nothing runs
    assert sorted(both) == [[0, 1, 2], [1, 1, 2]]
    assert two == [1, 1]


def sleeping(x: Tensor) -> Tensor:
    time.sleep(600)
    return x


def stays(address: str, say: Callable[[Any], None]) -> None:
    """A driver in a long call, on every slot."""
    with nrl.cluster(address, deadline=200) as cluster:
        mesh = cluster.reserve(2).mesh(executable="system", name="stays")
        shard_map(lambda x: x, mesh, P("dp"), P("dp"))(torch.zeros(2)).result()
        say("at it")
        shard_map(sleeping, mesh, P("dp"), P("dp"))(torch.zeros(2)).result()


def passes(address: str, say: Callable[[Any], None], ready: str) -> None:
    """A driver that waits until a file is there and then goes on with its mesh, which is still well."""
    import ray

    with nrl.cluster(address, deadline=200) as cluster:
        mesh = cluster.reserve(1).mesh(executable="system", name="passes")
        call = shard_map(lambda x: x + 1, mesh, P("dp"), P("dp"))
        call(torch.zeros(2)).result()
        say("at it")
        settled(lambda: not Path(ready).exists(), 200)
        say(call(torch.zeros(2)).result().tolist())
        say(settled(lambda: ray.available_resources().get("CPU", 0) != 3, 20))


def test_a_driver_that_is_killed_leaves_nothing_and_others_alone(nodes: Nodes) -> None:
    ready = nodes.folder / "killed"
    other, victim = nodes.start(passes, str(ready)), nodes.start(stays)
    other.until_it_says("at it")
    victim.until_it_says("at it")
    assert len(nodes.busy()) == 3
    os.kill(victim.process.pid, signal.SIGKILL)
    assert settled(lambda: len(nodes.busy()) > 1, 15) is False
    ready.touch()
    other.process.join(100)
    assert other.said() == ["at it", [1, 1], False]  # its slots are free again
    assert settled(nodes.busy, 15) == []


def reads(address: str, say: Callable[[Any], None]) -> None:
    """A driver that gives one mesh what another has made on a node that is lost meanwhile."""
    import ray

    with nrl.cluster(address, deadline=200) as cluster:
        slots = cluster.reserve(2, strategy="STRICT_SPREAD")
        maker, reader = (slots[place].mesh(executable="system", name=name) for place, name in enumerate(("maker", "r")))
        made = shard_map(lambda x: x.new_zeros(2, 2**18), maker, P("dp"), P("dp"))(torch.zeros(2))
        for mesh in (maker, reader):
            shard_map(lambda x: x, mesh, P("dp"), P("dp"))(torch.zeros(2)).result()
        say(node := maker.processes.nodes[0].node)  # type: ignore[attr-defined]
        say("made")
        assert not settled(lambda: any(each["Alive"] and each["NodeID"] == node for each in ray.nodes()), 100)
        with pytest.raises(LostActor) as caught:
            shard_map(lambda x: x, reader, P("dp"), P("dp"))(made).result()
        say([caught.value.mesh, caught.value.rank, caught.value.cause])


def test_the_node_of_a_value_is_lost(nodes: Nodes) -> None:
    """The mesh that made it is blamed, and not the one that was to read it."""
    nodes.workers["c"] = nodes.add("c")
    driver = nodes.start(reads)
    driver.until_it_says("made")
    [name] = [name for name, node in nodes.workers.items() if node.node_id == driver.said()[0]]
    nodes.cluster.remove_node(nodes.workers.pop(name), allow_graceful=False)
    nodes.workers = dict(zip("ab", nodes.workers.values(), strict=True))
    driver.process.join(200)
    assert driver.said()[2:] == [["maker", 0, "its node is gone"]]


def loses(address: str, say: Callable[[Any], None]) -> None:
    from ray.util.placement_group import placement_group_table

    def add_up(x: Tensor) -> Tensor:
        if process().rank == 0:
            time.sleep(600)
        dist.all_reduce(x)
        return x

    with nrl.cluster(address, deadline=200) as cluster:
        slots = cluster.reserve(2, strategy="STRICT_SPREAD")
        mesh = slots.mesh(executable="system", name="wide")
        shard_map(lambda x: x, mesh, P("dp"), P("dp"))(torch.zeros(2)).result()
        coming = shard_map(add_up, mesh, P("dp"), P("dp"))(torch.zeros(2))
        say("at it")
        with pytest.raises(LostActor) as caught:
            coming.result()
        say([time.time(), caught.value.mesh, caught.value.cause])
        settled(lambda: placement_group_table(cluster._groups[0])["state"] == "CREATED", 60)  # type: ignore[attr-defined]
        cluster.deadline = 3.0  # type: ignore[attr-defined]
        with pytest.raises(PlacementError) as refused, redirect_stderr(io.StringIO()) as at_once:
            slots.mesh(executable="system", name="moved")
        say([at_once.getvalue(), str(refused.value)])
        cluster.deadline = 200.0  # type: ignore[attr-defined]
        mesh = cluster.reserve(1, deadline=60).mesh(executable="system", name="next")
        say(shard_map(lambda x: x + 1, mesh, P("dp"), P("dp"))(torch.zeros(2)).result().tolist())


def test_a_node_is_lost(nodes: Nodes) -> None:
    driver = nodes.start(loses)
    driver.until_it_says("at it")
    gone = time.time()
    nodes.cluster.remove_node(nodes.workers.pop("b"), allow_graceful=False)
    driver.process.join(200)
    _, (when, mesh, cause), moved, result = driver.said()
    assert mesh == "wide"
    assert cause
    assert when - gone < 30
    at_once, refused = moved
    lost = re.match(r"mesh 'moved': node \S+ of its slots is gone", at_once)
    assert lost
    waits = f"{lost[0]}; waiting for a place for slots [01] on other nodes \\(0 of 3 s\\); the cluster has "
    assert re.match(waits, at_once)
    assert refused.startswith(f"{lost[0]}, and no other had room for them within 3 s; leave the cluster, and reserve ")
    assert result == [1, 1]
    assert settled(nodes.busy, 15) == []


def goes_on(address: str, say: Callable[[Any], None]) -> None:
    """A driver that loses a node some time, and then works with what is left."""
    with nrl.cluster(address, deadline=200) as cluster:
        try:
            mesh = cluster.reserve(2, strategy="STRICT_SPREAD", deadline=10).mesh(executable="system", name="wide")
            shard_map(sleeping, mesh, P("dp"), P("dp"))(torch.zeros(2)).result()
        except (ClusterError, PlacementError) as error:
            say([time.time(), type(error).__name__])
        mesh = cluster.reserve(1, deadline=60).mesh(executable="system", name="next")
        say(shard_map(lambda x: x + 1, mesh, P("dp"), P("dp"))(torch.zeros(2)).result().tolist())


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_node_is_lost_at_random_moments(nodes: Nodes) -> None:
    draw, hit = random.Random(0), []
    for _ in range(20):
        if "b" not in nodes.workers:
            nodes.workers["b"] = nodes.add("b")
        driver = nodes.start(goes_on)
        time.sleep(draw.uniform(0, 20))
        gone = time.time()
        nodes.cluster.remove_node(nodes.workers.pop("b"), allow_graceful=False)
        driver.process.join(200)
        assert driver.process.exitcode == 0, driver.said()
        (when, error), result = driver.said()
        assert when - gone < 40
        assert result == [1, 1]
        assert settled(nodes.busy, 15) == []
        hit.append(error)
    assert "LostActor" in hit, hit


def alive() -> list[Any]:
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def shares_gpus(address: str, say: Callable[[Any], None]) -> None:
    """It enters the cluster before there is a GPU, and waits for more CPUs than there are."""
    import ray

    with nrl.cluster(address, deadline=200) as cluster:
        settled(lambda: ray.available_resources()["CPU"] < sum(n["Resources"].get("CPU", 0) for n in alive()), 20)
        assert not cluster.reserve(int(ray.available_resources()["CPU"]) - 1).gpus
        say(SlotRequest(2, "PACK", None, gpu=True).describe_wait(3))
        say("at it")
        slots = cluster.reserve(2)
        assert slots.gpus
        for mesh in [slots.mesh(executable="system", name=name) for name in ("one", "two")]:  # both on the same GPUs
            look = shard_map(
                lambda x: torch.full_like(x, int(os.environ["CUDA_VISIBLE_DEVICES"])), mesh, P("dp"), P("dp")
            )
            say(sorted(look(torch.zeros(2)).result().tolist()))
        with pytest.raises(FileNotFoundError) as raised:
            shard_map(lambda x: x + len(Path("/nowhere").read_text()), mesh, P("dp"), P("dp"))(torch.zeros(2)).result()
        say(raised.value.__notes__[0])
        with pytest.raises(PlacementError) as caught:
            cluster.reserve(1, deadline=2)
        say(str(caught.value))
        say(cluster.reserve(1, kind="cpu").gpus)


def test_slots_with_gpus_that_join_later(nodes: Nodes) -> None:
    """Logical ones: Ray counts what a node declares, and tells processes which are theirs."""
    driver = nodes.start(shares_gpus)
    driver.until_it_says("at it")
    nodes.add("a", num_gpus=2)
    driver.process.join(200)
    waits, _, one, two, raised, taken, gpus = driver.said()
    assert re.match(r"raised in rank [01] of mesh 'two' on node \d+\.\d+\.\d+\.\d+:\nTraceback", raised)
    assert waits.startswith(
        "reserve: waiting for 2 slots of 1 GPU and 1 CPU each, PACK, since no node has a GPU yet (3 s); the cluster has"
    )
    assert "0 GPU, 2 CPU" in waits
    assert gpus is False
    assert one == two == [0, 1]
    assert taken.startswith(
        "reserve: 1 slots of 1 GPU and 1 CPU each, PACK, cannot be had (waited 2 s); the cluster has"
    )
    assert "0 GPU, 0 CPU" in taken
    assert ": 2 GPU, 2 CPU" in taken


OTHER = """
import os, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
now = time.time
time.time = lambda: now() + 100
"""


def differs(address: str, say: Callable[[Any], None], folder: str, node: str) -> None:
    import ray

    os.environ.pop("OMP_NUM_THREADS", None)
    began = time.time()
    with nrl.cluster(address, deadline=200) as cluster, redirect_stderr(io.StringIO()) as lines:
        settled(lambda: ray.available_resources()["CPU"] < sum(n["Resources"].get("CPU", 0) for n in alive()), 20)
        hosts = [each["NodeID"] for each in alive() if each["Resources"].get("CPU")]
        every = cluster.reserve(len(hosts), per_host=1, kind="cpu")
        there = [each.node for each in cluster._slots].index(node)  # type: ignore[attr-defined]
        slots = Slots(cluster, (there, (there + 1) % len(every)))
        with recording(Path(folder)) as file:
            mesh = slots.mesh(executable="system", name="uneven")
            shard_map(lambda x: x, mesh, P("dp"), P("dp"))(torch.zeros(2)).result()
            say(lines.getvalue())
        events = json.loads(file.read_text().rstrip().removesuffix("]") + "]")
        rows = [event for event in events if event["ph"] == "X" and event["pid"] != 1]  # not the driver's
    say([len(rows), min(row["ts"] for row in rows) / 1e6 - began, max(row["ts"] + row["dur"] for row in rows) / 1e6])
    say(time.time())


def test_a_host_with_another_clock_and_fewer_cores(nodes: Nodes, tmp_path: Path) -> None:
    """As Python sees them there: this machine has one clock."""
    (tmp_path / "sitecustomize.py").write_text(OTHER)
    there = {"PYTHONPATH": str(tmp_path), "NRL_VENV_DIR": str(nodes.folder / "c")}
    other = nodes.cluster.add_node(num_cpus=2, env_vars=there)
    lines, (count, before, last), now = nodes.run(differs, str(tmp_path), other.node_id)
    assert re.search(
        r"mesh 'uneven': the clock of node \S+ is (99|100)\.\d s ahead of the driver's; the timeline ", lines
    )
    assert lines.count("the clock of") == 1
    if len(os.sched_getaffinity(0)) > 1:
        assert re.search(r"mesh 'uneven': its processes have unequal numbers of threads \(.*1 on node ", lines)
    assert count == 4  # the start and the call of each rank
    assert before > 0
    assert last < now
