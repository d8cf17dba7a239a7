"""The doctor of a cluster, as far as it joins none; `joining.py` has the rest."""

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import cloudpickle
import filelock
import pytest

from nrl.cli.cli import main
from nrl.errors import ExecutableError
from nrl.ops.doctor import cluster, host_probe, network_checks
from nrl.ops.doctor.findings import Finding
from nrl.ops.doctor.remote_checks import ProbedHost, make_unanswered
from nrl.runtime.node.probe import Probe
from nrl.runtime.node.shared_fs_probe import answer_note
from nrl.runtime.ray.nodes import PORTABLE
from tests.ops.doctor.test_host import GPU


def test_a_note_is_answered_where_the_folder_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nrl.runtime.node.shared_fs_probe._PATIENCE", 0.1)
    (tmp_path / "note").touch()
    assert answer_note(tmp_path, "note", "host-a") == ""
    assert (tmp_path / "note.host-a").exists()
    assert answer_note(tmp_path / "other", "note", "host-a") == "has no such folder"
    (tmp_path / "other").mkdir()
    assert answer_note(tmp_path / "other", "note", "host-a") == "has another folder there"
    (tmp_path / "note.host-b").mkdir()
    assert answer_note(tmp_path, "note", "host-b") == "cannot write there (Is a directory)"


@pytest.fixture
def probes() -> Iterator[tuple[Probe, Probe]]:
    """Two of them, which in a cluster end with their processes."""
    made = Probe(), Probe()
    yield made
    for each in made:
        for server in each._servers:
            server.close()


def test_a_probe_reaches_who_listens(probes: tuple[Probe, Probe]) -> None:
    one, other = probes
    assert other.check_reachable("127.0.0.1", one.listen("127.0.0.1"), 5.0) == ""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    assert "refused" in other.check_reachable("127.0.0.1", port, 5.0)
    with pytest.raises(OSError, match="assign"):
        one.listen("192.0.2.77")


def test_a_probe_listens_at_the_first_port_that_is_not_taken(probes: tuple[Probe, Probe]) -> None:
    one, other = probes
    taken = one.listen("127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as gone:
        free = gone.getsockname()[1]
    assert other.listen("127.0.0.1", (taken, free, 1)) == free
    assert one.check_reachable("127.0.0.1", taken, 5.0) == one.check_reachable("127.0.0.1", free, 5.0) == ""
    with pytest.raises(OSError, match="all of them are taken"):
        other.listen("127.0.0.1", (taken, free))


def test_a_probe_passes_over_ports_that_only_root_may_open(
    probes: tuple[Probe, Probe], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = socket.create_server

    def kept_for_root(address: tuple[str, int], **more: Any) -> socket.socket:  # whom this test may be
        if 0 < address[1] < 1024:
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(address, **more)

    monkeypatch.setattr(socket, "create_server", kept_for_root)
    assert probes[0].listen("127.0.0.1", (80, 0)) > 1023
    with pytest.raises(OSError, match="all of them are kept from this process, as those below 1024 are from all but"):
        probes[0].listen("127.0.0.1", (80, 81))


def test_hosts_of_which_one_cannot_listen_do_not_all_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    said = iter([({"a": 5000}, {"b": "Cannot assign requested address"}), ({("b", "a"): ""}, {})])
    monkeypatch.setattr(network_checks, "collect_replies", lambda what, asked, limit: next(said))
    there = {name: ProbedHost(name, f"10.0.0.{name}", {}, Mock()) for name in ("a", "b")}
    [finding] = network_checks._check_reachable(there, "that the system picked", (0,), 1.0, "mend it", "open it")
    assert (finding.level, finding.host, finding.todo) == ("failed", "b", "mend it")
    assert "it cannot listen at 10.0.0.b" in finding.found


def test_ports_that_are_no_range_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NRL_PORTS", "20000")
    [finding] = network_checks._check_ports({}, 1.0)
    assert (finding.level, finding.found.partition(";")[0]) == ("failed", "NRL_PORTS is '20000'")


@pytest.mark.parametrize(
    ("given", "said"),
    [("cluster=ray://10.0.0.1:10001", "give local, ray, auto"), ("cluster=here", "give local, ray, auto")],
)
def test_what_is_no_address_is_a_mistake(given: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", given]) == 2
    assert said in capsys.readouterr().err


def test_a_node_that_ray_has_lost_is_told_unless_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray takes up to a minute to lose a node, so its list of nodes is put in its place."""
    listed = [("a", True), ("b", False), ("c", False), ("c", True)]
    nodes = [
        {"Alive": alive, "NodeManagerHostname": name, "NodeManagerAddress": f"10.0.0.{name}"} for name, alive in listed
    ]
    monkeypatch.setattr(cluster, "list_nodes", lambda alive=True: [each for each in nodes if each["Alive"] == alive])
    [lost] = cluster._find_lost()
    assert (lost.level, lost.host, lost.found) == ("warning", "b", "Ray has lost it (10.0.0.b)")


def test_hosts_that_are_late_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()

    def nodes(alive: bool = True) -> list[dict[str, Any]]:
        return [{"NodeManagerHostname": name} for name in ("b", "a")[: 1 + (time.monotonic() - began > 0.5)]]

    monkeypatch.setattr(cluster, "list_nodes", nodes)
    monkeypatch.setattr(cluster, "SILENCE", 0.2)
    monkeypatch.setattr(cluster, "_POLL", 0.1)
    come = cluster._await_hosts(2, 60.0)
    assert (come.level, come.found, come.values["come"]) == ("ok", "2 of 2 have come", ["a", "b"])
    assert "doctor: 1 of 2 hosts have come, 0 s so far" in capsys.readouterr().err
    missing = cluster._await_hosts(3, 0.3)
    assert (missing.level, missing.found) == ("failed", "2 of 3 have come within 0.3 s: a, b")
    assert "deadline= waits longer (0.3 s now)" in missing.todo


TORCH: dict[str, Any] = {"version": "2.13", "cuda": "13.0", "hip": None, "devices": 0, "said": [], "chosen": None}
THERE: dict[str, Any] = {
    "uv": {"version": "0.13.8", "command": ["uv"]},
    "environments": {"folder": "/venvs", "writable": True, "whole": [], "begun": [], "sources": []},
    "hub": {"home": "/hub", "token": False, "endpoint": "https://hub", "offline": [], "reached": True, "why": ""},
    "sandbox": {"why": ""},
    "torch": {"python": "/venvs/base-1/bin/python", **TORCH},
}


def unmade(name: str) -> Any:
    raise ExecutableError(f"no lock for {name}")


def seen(gpus: Any, **looked: Any) -> dict[str, Finding]:
    found = cluster.judge_host({**THERE, **looked}, {"gpus": gpus}, "2.60.0", unmade, lambda: TORCH)
    return {each.check: each for each in found}


def test_what_is_installed_on_another_host_is_judged_here() -> None:
    assert {name: each.level for name, each in seen(None).items()} == {
        "uv": "ok", "environments": "note", "hub": "ok", "sandbox": "ok", "torch": "ok",
    }  # fmt: skip
    old = seen(GPU)["torch"]
    assert old.level == "failed"
    assert "driver 550.54 runs CUDA 12.4 at most, so torch sees none of 2" in old.found
    none = seen(GPU, torch={"python": None})["torch"]
    assert none.level == "failed"
    assert "no Python here has torch and Ray 2.60.0; the program's is built for CUDA 13.0" in none.found
    assert "a driver for CUDA 13.0" in none.todo
    broken = seen(None, hub={"error": "OSError: gone"}, torch={"python": "/x", "error": "libcudart"})
    assert (broken["hub"].level, broken["hub"].found) == ("failed", "the look itself failed: OSError: gone")
    assert (broken["torch"].level, broken["torch"].found) == ("failed", "it cannot be imported: libcudart")


def test_a_host_without_uv_has_failed_unless_an_environment_is_there() -> None:
    less = {"error": "none that runs"}
    assert seen(None, uv=less)["uv"].level == "failed"
    whole = {"name": "base-1", "executable": "base", "built": "", "wrong": []}
    found = seen(None, uv=less, environments={**THERE["environments"], "whole": [whole]})
    assert (found["uv"].level, found["environments"].found) == ("warning", "base: no lock for base")
    assert "those that are there do without" in found["uv"].todo


def test_what_is_late_is_not_known_and_what_is_broken_has_failed() -> None:
    late = make_unanswered("gloo", "not known", "no answer within 10 s", 10.0)
    assert (late.level, late.todo.partition(":")[0]) == ("warning", "deadline= waits longer (10 s now)")
    broken = make_unanswered("gloo", "not known", "ModuleNotFoundError: torch", 10.0)
    assert (broken.level, broken.todo) == ("failed", "look at Ray's logs there")


def test_a_look_travels_to_a_python_that_has_no_nrl(tmp_path: Path) -> None:
    for module in (*PORTABLE, host_probe):
        cloudpickle.register_pickle_by_value(module)
    try:
        (tmp_path / "shipped").write_bytes(cloudpickle.dumps(host_probe.look_at_host))
    finally:
        for module in (*PORTABLE, host_probe):
            cloudpickle.unregister_pickle_by_value(module)
    (tmp_path / "site").mkdir()
    for package in (cloudpickle, filelock):
        shutil.copytree(Path(str(package.__file__)).parent, tmp_path / "site" / package.__name__)
    program = (
        f"import json, pickle, sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
        "import importlib.util; assert importlib.util.find_spec('nrl') is None\n"
        f"look = pickle.load(open({str(tmp_path / 'shipped')!r}, 'rb'))\n"
        "print(json.dumps(look('2.60.0', ('base',))))"
    )
    base = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([base, "-I", "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.keys() == THERE.keys()
    folder = f"{tmp_path}/.cache/nrl/venvs"
    assert found["environments"] == {**THERE["environments"], "folder": folder, "writable": False}
    assert "error" not in found["sandbox"]
    assert found["torch"] == {"python": None}
    assert found["hub"]["offline"] == ["HF_HUB_OFFLINE"]


def test_what_listens_and_is_no_head_has_failed_in_time_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    began = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"127.0.0.1:{server.getsockname()[1]}"
        [finding] = cluster.check_hosts(where, None, 1 << 20, 8.0)
    assert (finding.check, finding.level) == ("cluster", "failed")
    assert finding.found.startswith(f"something listens at {where}, and is no head of a Ray cluster")
    assert time.monotonic() - began < 30
    assert capfd.readouterr() == ("", "")
    assert [cluster._describe_silence(each, 1.0) for each in (where, "ray", "auto", "ray://10.0.0.1:1")] == [""] * 4


def test_a_cluster_that_is_gone_after_it_was_joined_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_describe_silence", lambda address, limit: "")
    monkeypatch.setattr(cluster, "enter_cluster", lambda address, deadline: nullcontext())
    [finding] = cluster.check_hosts("10.0.0.1:6379", None, 1 << 20, 20)
    assert (finding.check, finding.level) == ("cluster", "failed")
    assert "Ray has not been started yet" in finding.found
    assert "`ray status`" in finding.todo
