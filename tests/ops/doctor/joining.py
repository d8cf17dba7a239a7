"""Hosts that the doctor asks: two nodes of Ray, a folder that one does not see, ports that are closed.

`tests/runtime/ray/test_remote_object.py` runs it, in a process that has joined no cluster of Ray yet.
"""

import functools
import json
import socket
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from nrl.ops.doctor import cluster, network_checks
from nrl.ops.doctor.findings import Finding
from nrl.runtime.node.machine import collect_facts
from nrl.runtime.node.probe import Probe
from nrl.runtime.node.shared_fs_probe import answer_note

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a cluster of two nodes, which are one host."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        with socket.create_server(("127.0.0.1", 0)) as free:  # another cluster on this machine may have the usual one
            dashboard = free.getsockname()[1]
        head = {"num_cpus": 1, "dashboard_port": dashboard}
        made = Cluster(initialize_head=True, connect=False, head_node_args=head)
        made.add_node(num_cpus=1)
        yield made.address
        made.shutdown()


@pytest.mark.timeout(600)
def test_all_hosts_are_asked_compared_and_meet(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another interpreter than Ray's, as on nodes whose own has no torch."""
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    other.chmod(stat.S_IRWXU)
    monkeypatch.setenv("NRL_PORTS", "21000-21999")
    with_torch = {"python_with_torch": str(other)}
    monkeypatch.setattr(Probe, "collect_facts", lambda self, ray: {**collect_facts(), **with_torch})
    (tmp_path / "shared").mkdir()
    found = list(cluster.check_hosts(address, str(tmp_path / "shared"), 1 << 20, 200, expected=2))
    by = {each.check: each for each in found}
    assert (by["cluster"].level, by["cluster"].values["address"]) == ("ok", address)
    names = by["cluster"].values["hosts"]
    assert len(names) == 2
    assert all(name.startswith(f"{socket.gethostname()}:") for name in names)
    assert {each.host for each in found if each.check == "slots"} == set(names)
    asked = {"cores", "memory", "disk", "open_files", "uv", "environments", "hub", "sandbox", "torch"}
    [other_one] = {each.host for each in found if each.check == "uv"}
    assert asked <= {each.check for each in found if each.host == other_one}
    torch = by["torch"]
    assert (torch.level, torch.host, torch.values["python"]) == ("ok", other_one, sys.executable)
    come, same = [each for each in found if each.check == "hosts"]
    assert (come.level, come.found) == ("ok", "2 of 2 have come")
    assert (same.level, "lock" in same.values["same"]) == ("ok", True)
    assert abs(by["clock"].values["offset"]) < 0.5
    assert (by["shared"].level, list((tmp_path / "shared").iterdir())) == ("ok", [])
    picked, named = [each for each in found if each.check == "ports"]
    assert (picked.level, picked.found.endswith(" that the system picked")) == ("ok", True)
    assert (named.level, named.found.endswith(" of NRL_PORTS=21000-21999")) == ("ok", True)
    assert all(21000 <= port < 22000 for port in named.values["ports"].values())
    met = by["gloo"]
    assert set(met.values["hosts"]) == set(names)
    assert met.values["there"]["rate"] > 1e6
    assert met.values["back"]["rate"] > 1e6
    assert met.values["there"]["interface"] not in ("", "lo")
    assert [each for each in found if each.level == "failed"] == []
    json.dumps([dict(each.values) for each in found])


_come = cluster._await_hosts


def come_within(seconds: float, expected: int, limit: float) -> Finding:
    return _come(expected, seconds)


def nobody_meets(*args: object) -> Iterator[Finding]:
    yield from ()


def nowhere(address: str) -> str:
    return "nowhere0"


def elsewhere(self: Probe, folder: str, note: str, name: str) -> str:
    return answer_note(Path("/nowhere"), note, name)


def closed(self: Probe, address: str, ports: Sequence[int]) -> int:
    with socket.create_server((address, 0)) as gone:
        return int(gone.getsockname()[1])


def wrong(found: list[Finding], check: str) -> list[tuple[str, str, str, str]]:
    return [(each.level, each.host, each.found, each.todo) for each in found if each.check == check]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_interface_that_is_not_there_and_a_folder_that_is_another(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Probe, "check_folder", elsewhere)
    monkeypatch.setattr(network_checks, "find_interface", nowhere)
    found = list(cluster.check_hosts(address, str(tmp_path), 1 << 20, 200))
    names = next(each for each in found if each.check == "cluster").values["hosts"]
    shared = wrong(found, "shared")
    assert {(level, host) for level, host, _, _ in shared} == {("failed", name) for name in names}
    assert all("it has no such folder" in said and "mount" in todo for _, _, said, todo in shared)
    assert list(tmp_path.iterdir()) == []
    [(level, _, said, todo)] = wrong(found, "gloo")
    assert (level, "do not meet" in said, "nowhere0" in said) == ("failed", True, True)
    assert "GLOO_SOCKET_IFNAME" in todo


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ports_that_are_closed_are_told_by_host(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Probe, "listen", closed)
    monkeypatch.setenv("NRL_PORTS", "21000-21999")
    found = list(cluster.check_hosts(address, None, 1 << 20, 200))
    names = next(each for each in found if each.check == "cluster").values["hosts"]
    ports = wrong(found, "ports")
    assert {(level, host) for level, host, _, _ in ports} == {("failed", name) for name in names}
    assert all("refused" in said for _, _, said, _ in ports)
    assert ["ip_local_port_range" in todo for _, _, _, todo in ports] == [True, True, False, False]
    assert ["ports of NRL_PORTS=21000-21999" in todo for _, _, _, todo in ports] == [False, False, True, True]
    [(level, _, said, _)] = wrong(found, "gloo")
    assert (level, "a port is closed between them" in said) == ("note", True)
    assert [level for level, _, _, _ in wrong(found, "shared")] == ["note"]


@pytest.mark.timeout(600)
def test_a_host_that_has_not_come_and_a_folder_that_is_missing_are_told(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cluster, "SILENCE", 0.2)
    monkeypatch.setattr(network_checks, "_measure_links", nobody_meets)
    monkeypatch.setattr(cluster, "_await_hosts", functools.partial(come_within, 2.0))
    found = list(cluster.check_hosts(address, str(tmp_path / "mistyped"), 1 << 20, 200, expected=3))
    [(level, host, said, _)] = wrong(found, "shared")
    assert (level, host, said) == ("failed", socket.gethostname(), f"{tmp_path / 'mistyped'} does not exist")
    assert list(tmp_path.iterdir()) == []
    (level, _, said, todo), _ = wrong(found, "hosts")
    assert (level, said.startswith("2 of 3 have come within 2 s: ")) == ("failed", True)
    assert "`ray start`" in todo
    assert "deadline= waits longer (2 s now)" in todo
    assert "doctor: 2 of 3 hosts have come, " in capsys.readouterr().err


def test_where_no_cluster_is_that_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    [finding] = cluster.check_hosts("127.0.0.1:1", None, 1 << 20, 20)
    assert (finding.check, finding.level) == ("cluster", "failed")
    assert "there is no Ray cluster at '127.0.0.1:1'" in finding.found
