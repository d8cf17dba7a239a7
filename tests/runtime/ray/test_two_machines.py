"""Two machines with own addresses, ``/tmp`` and home, no shared folder, and host names that lead to 127.0.1.1."""

import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from nrl.runtime.venvs.environments import INVENTORY
from nrl.runtime.venvs.installer import find_uv
from tests.machines import ADDRESSES, Machines, machines
from tests.processes import settled
from tests.runtime.ray import across

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1800)]

A, B = ADDRESSES["a"], ADDRESSES["b"]
REFUSED = f"""
import socket, time
began = time.time()
socket.socket().connect_ex(("{B}", 9))
print(time.time() - began)
"""
"""The seconds until a machine has heard that another one does not take its connection."""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with machines(tmp_path_factory.mktemp("machines")) as made:
        made.ray("a")
        made.ray("b")
        yield made


class Program:
    """A program of `across` on machine ``a``, and what it has said so far."""

    def __init__(
        self,
        on: Machines,
        name: str,
        address: str = "auto",
        deadline: float = 300.0,
        times: int = 3,
        env: Mapping[str, str] | None = None,
    ) -> None:
        words = [sys.executable, "-m", "tests.runtime.ray.across", name, address, str(deadline), str(times)]
        self.process: subprocess.Popen[str] = on.start("a", words, env)
        self.lines: list[str] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            self.lines.extend(output)

    def said(self, word: str) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in list(self.lines) if line.startswith("{")]
        return [each for each in found if word in each]

    def until(self, word: str, count: int = 1, seconds: float = 600.0) -> dict[str, Any]:
        """Wait until it has said something so often; the last time."""
        settled(lambda: len(self.said(word)) < count and self.process.poll() is None, seconds)
        assert len(self.said(word)) >= count, "".join(self.lines)
        return self.said(word)[count - 1]

    def ended(self, seconds: float = 600.0) -> str:
        """Its output, when it has ended well."""
        self.process.wait(seconds)
        self.reader.join(10)
        assert self.process.returncode == 0, "".join(self.lines)
        return "".join(self.lines)


def alone(name: str, on: Machines, env: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """What the same program says in one process."""
    program = Program(on, name, "local", env=env)
    program.ended()
    return program.said("step")


def check_same(steps: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]], **tolerance: Any) -> None:
    """The steps of a program on both machines have the numbers of one process."""
    assert {*steps[0]["hosts"]} == {A, B}
    assert [each.get("tokens") for each in steps] == [each.get("tokens") for each in expected]
    assert [each["loss"] for each in steps] == pytest.approx([each["loss"] for each in expected], **tolerance)


@pytest.fixture(scope="module")
def undisturbed(two: Machines) -> list[dict[str, Any]]:
    """The steps of a trainer on both machines, which meets at a port that a firewall can name."""
    program = Program(two, "trains", env={"NRL_PORTS": "21000-21099"})
    program.until("step")
    listening = [line.split()[3] for name in two.first for line in two.run(name, "ss", "-Hltn").splitlines()]
    assert any(int(each.rpartition(":")[2]) in range(21000, 21100) for each in listening), listening
    program.ended()
    steps = program.said("step")
    check_same(steps, alone("trains", two), rel=1e-3)  # which adds in another order, and that grows in 12 steps
    return steps


def check_undisturbed(steps: Sequence[dict[str, Any]], undisturbed: Sequence[dict[str, Any]]) -> None:
    """Bit by bit: whatever befell the machines, two processes add the same numbers."""
    assert {*steps[0]["hosts"]} == {A, B}
    assert [each["loss"] for each in steps] == [each["loss"] for each in undisturbed]


def cut_within(on: Machines, program: Program, word: str, count: int, size: float) -> None:
    """Pull the cable of ``b`` when a program has said a word so often, and so many bytes have gone since."""
    program.until(word, count)
    before, steps = on.carried("b"), len(program.said("step"))
    settled(lambda: on.carried("b") - before < size, 60)
    on.plug("b", into=False)
    assert on.carried("b") - before >= size
    time.sleep(1)
    assert len(program.said("step")) == steps


def comes_back(on: Machines) -> None:
    """Put the cable of ``b`` back, and start Ray there again: what the head has given up ends itself."""
    on.plug("b", into=True)
    on.run("b", "ray", "stop", "--force")
    on.ray("b")


def test_a_trainer_and_a_sampler_on_two_machines(two: Machines) -> None:
    program = Program(two, "samples")
    out = program.ended()
    check_same(program.said("step"), alone("samples", two), abs=1e-5)
    assert "hostname of the client socket" not in out


def over_a_slow_cable(on: Machines, name: str) -> list[dict[str, Any]]:
    """The steps of a program where a frame takes 50 ms, and one of a hundred is lost."""
    with on.far("b", 50, 1):
        assert float(on.run("a", sys.executable, "-c", REFUSED)) >= 0.1
        program = Program(on, name)
        program.ended(1200)
    return program.said("step")


def test_a_sampler_over_a_slow_cable_that_loses_packets(two: Machines) -> None:
    check_same(over_a_slow_cable(two, "samples"), alone("samples", two), abs=1e-5)


def test_a_trainer_over_a_slow_cable_that_loses_packets(two: Machines, undisturbed: list[dict[str, Any]]) -> None:
    check_undisturbed(over_a_slow_cable(two, "trains"), undisturbed)


def test_a_short_cut_of_the_cable_costs_nothing(two: Machines, undisturbed: list[dict[str, Any]]) -> None:
    program = Program(two, "trains")
    program.until("step", 3)
    two.plug("b", into=False)
    time.sleep(10)
    assert len(program.said("step")) < across.LONGER
    two.plug("b", into=True)
    program.ended()
    steps = program.said("step")
    check_undisturbed(steps, undisturbed)
    assert max(later["at"] - each["at"] for each, later in itertools.pairwise(steps)) > 8  # it did wait


def test_a_short_cut_within_a_publish_costs_nothing(two: Machines) -> None:
    with two.narrow("b", 5):  # a publish takes 5 seconds
        program = Program(two, "publishes")
        cut_within(two, program, "publishing", 1, 2e6)
        time.sleep(10)
        assert not program.said("step")
        two.plug("b", into=True)
        program.ended()
    check_same(program.said("step"), alone("publishes", two), abs=1e-5)


@pytest.mark.parametrize(
    ("name", "call", "mesh"),
    [("publishes", "receive", "sampler"), ("publishes_from_afar", "publish", "trainer")],
)
def test_a_cut_of_the_cable_within_a_publish(two: Machines, name: str, call: str, mesh: str) -> None:
    """The error names the call and the machine; `nrl.retrying` waits for the machine."""
    with two.narrow("b", 5):
        program = Program(two, name, deadline=400.0)
        cut_within(two, program, "publishing", 1, 2e6)
        gone = time.time()
        settled(lambda: not any(line.startswith("retrying: ") for line in program.lines), 200)
        assert time.time() - gone < 120
    comes_back(two)
    out = program.ended()
    assert f"retrying: {call}: rank 0 of mesh '{mesh}' on node {B} is lost: " in out
    check_same(program.said("step")[-across.STEPS :], alone("publishes", two), abs=1e-5)


def test_a_cut_of_the_cable_within_a_step_is_an_error_by_the_deadline(two: Machines) -> None:
    program = Program(two, "trains", deadline=60.0, times=0)
    program.until("step", 3)
    two.plug("b", into=False)
    gone = time.time()
    error = program.until("error")
    comes_back(two)
    program.process.wait(100)
    assert error["error"] in ("DeadlineExceeded", "LostActor")
    assert error["at"] - gone < 60 + 30
    assert "train_step(sft_loss)" in error["text"]


def doctor(on: Machines, env: Mapping[str, str]) -> dict[str, list[dict[str, Any]]]:
    """What the doctor of machine ``a`` says of both, by checks."""
    words = ["sh", "-c", "nrl doctor cluster=auto hosts=2 megabytes=8 --json >/tmp/doctor.json"]
    out, _ = on.start("a", words, env).communicate(timeout=300)
    said = (on.folder / "a/tmp/doctor.json").read_text()
    assert said, out
    found = dict[str, list[dict[str, Any]]]()
    for each in json.loads(said)["findings"]:
        found.setdefault(each["check"], []).append(each)
    return found


def test_two_machines_behind_firewalls_that_pass_what_the_docs_name(
    two: Machines, undisturbed: list[dict[str, Any]]
) -> None:
    if shutil.which("iptables") is None:
        pytest.skip("a firewall needs the command iptables")
    env = {"NRL_PORTS": "21000-21099"}
    of_ray, of_nrl, picked = ("6379", "10002:19999"), "21000:21099", "24000:24999"
    with two.picking(24000, 24999):
        with two.firewalls(*of_ray, of_nrl, picked):
            passing = doctor(two, env)
            trained = Program(two, "trains", env=env)
            trained.ended()
            sampled = Program(two, "samples", env=env)
            sampled.ended()
        with two.firewalls(*of_ray, picked):
            dropping = doctor(two, env)
    assert [each["level"] for check in ("hosts", "ports", "clock", "gloo") for each in passing[check]] == ["ok"] * 6
    check_undisturbed(trained.said("step"), undisturbed)
    check_same(sampled.said("step"), alone("samples", two), abs=1e-5)
    system, *own = dropping["ports"]
    assert (system["level"], {each["level"] for each in own}) == ("ok", {"failed"})
    assert {each["host"] for each in own} == {"host-a", "host-b"}
    assert all("NRL_PORTS=21000-21099" in each["todo"] for each in own)


@pytest.fixture
def store(two: Machines) -> dict[str, str]:
    """The environment of programs that have s3fs, and reach a store with the API of S3 on machine ``a``."""
    for name in two.first:
        words = [
            "pip",
            "install",
            "--quiet",
            f"--python={sys.executable}",
            "--target",
            str(two.folder / name / "tmp/s3"),
        ]
        made = subprocess.run([*find_uv(), *words, "moto[server]>=5", "s3fs"], capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"moto and s3fs cannot be installed here: {made.stderr[-300:]}")
    env = {"PYTHONPATH": "/tmp/s3"}
    found = Program(two, "stores", "local", env={"AT": A, **env}).until("AWS_ENDPOINT_URL")
    return env | {word: value for word, value in found.items() if word.startswith("AWS_")}


def test_a_cut_of_the_cable_within_a_save(two: Machines, store: dict[str, str]) -> None:
    """An error by the deadline; the same program then goes on from the checkpoint before."""
    where = {"OUT": "/tmp/run", "TO": "s3://bucket/run", **store}
    with two.narrow("b", 1):  # the part of a checkpoint that b writes takes 2.5 seconds
        program = Program(two, "saves", deadline=60.0, times=0, env=where)
        cut_within(two, program, "saving", 2, 5e5)
        gone = time.time()
        error = program.until("error")
    comes_back(two)
    assert error["error"] in ("DeadlineExceeded", "LostActor")
    assert error["at"] - gone < 60 + 30
    assert any(each in error["text"] for each in ("save: ", "train_step(sft_loss): "))
    again = Program(two, "saves", env=where)
    out = again.ended()
    assert f"train: 2 of {across.SAVED} steps were done; going on after them" in out
    expected = alone("saves", two, {"OUT": "/tmp/alone"})
    check_same(program.said("step"), expected[:4], rel=1e-3)
    check_same(again.said("step"), expected[2:], rel=1e-3)


def test_an_environment_that_each_machine_builds(
    two: Machines, undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    """From a cache of uv's of its own, once: the second start finds it."""
    filling = {**os.environ, "NRL_VENV_DIR": str(tmp_path)}  # the cache, which may be empty
    subprocess.run([sys.executable, "-m", "nrl", "venvs", "build", "base"], env=filling, check=True)
    cache = subprocess.run([*find_uv(), "cache", "dir"], capture_output=True, text=True, check=True).stdout.strip()
    own = [Path(f"{two.folder / name}{Path.home()}") / ".cache" for name in two.first]
    try:
        for each in own:
            shutil.rmtree(each, ignore_errors=True)  # the doctor has asked uv there, which made an empty cache
            each.mkdir(parents=True)
            subprocess.run(["cp", "-al", cache, str(each / "uv")], check=True)
        built, steps = list[dict[Path, str]](), list[list[dict[str, Any]]]()
        for _ in range(2):
            program = Program(two, "builds", deadline=600.0)
            program.ended()
            steps.append(program.said("step"))
            inventories = [path for each in own for path in each.glob(f"nrl/venvs/base-*/{INVENTORY}")]
            built.append({path: path.read_text() for path in inventories})
    finally:
        for each in own:
            shutil.rmtree(each)
    assert len(built[0]) == len(own)
    assert built[0] == built[1]
    for each_start in steps:
        check_undisturbed(each_start, undisturbed[: across.STEPS])


def test_a_machine_that_is_gone_and_comes_back(two: Machines, undisturbed: list[dict[str, Any]]) -> None:
    """A loss is told with the address of the machine; `nrl.retrying` waits for what replaces it, and says so."""
    program = Program(two, "trains", deadline=400.0)
    program.until("step", 3)
    two.off("b")
    gone = time.time()
    settled(lambda: not any(line.startswith("retrying: ") for line in program.lines), 200)
    assert time.time() - gone < 120
    two.boot("b")
    two.ray("b")
    out = program.ended()
    assert f"on node {B} is lost: " in out
    assert len(program.said("step")) >= 3 + across.LONGER
    check_undisturbed(program.said("step")[-across.LONGER :], undisturbed)
