"""The doctor of a cluster: two nodes of Ray in this machine, a folder that one does not see, ports that are closed."""

import json
import socket
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest

from nrl.command.cli import main
from nrl.runtime.doctor import cluster
from nrl.runtime.doctor.findings import Finding
from nrl.runtime.node.machine import facts
from nrl.runtime.node.probe import Probe, answer


def test_a_note_is_answered_where_the_folder_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nrl.runtime.node.probe._PATIENCE", 0.1)
    (tmp_path / "note").touch()
    assert answer(tmp_path, "note", "host-a") == ""
    assert (tmp_path / "note.host-a").exists()
    assert answer(tmp_path / "other", "note", "host-a") == "has no such folder"
    (tmp_path / "other").mkdir()
    assert answer(tmp_path / "other", "note", "host-a") == "has another folder there"
    (tmp_path / "note.host-b").mkdir()
    assert answer(tmp_path, "note", "host-b") == "cannot write there (Is a directory)"


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
    assert other.reaches("127.0.0.1", one.listen("127.0.0.1"), 5.0) == ""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    assert "refused" in other.reaches("127.0.0.1", port, 5.0)
    with pytest.raises(OSError, match="assign"):
        one.listen("192.0.2.77")


def test_a_probe_listens_at_the_first_port_that_is_not_taken(probes: tuple[Probe, Probe]) -> None:
    one, other = probes
    taken = one.listen("127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as gone:
        free = gone.getsockname()[1]
    assert other.listen("127.0.0.1", (taken, free, 1)) == free
    assert one.reaches("127.0.0.1", taken, 5.0) == one.reaches("127.0.0.1", free, 5.0) == ""
    with pytest.raises(OSError, match="all of them are taken"):
        other.listen("127.0.0.1", (taken, free))


def test_ports_that_are_no_range_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NRL_PORTS", "20000")
    [finding] = cluster._ports({}, 1.0, {})
    assert (finding.level, finding.found.partition(";")[0]) == ("failed", "NRL_PORTS is '20000'")


@pytest.mark.parametrize(
    ("given", "said"),
    [("cluster=ray://10.0.0.1:10001", "give local, ray, auto"), ("cluster=here", "give local, ray, auto")],
)
def test_what_is_no_address_is_a_mistake(given: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", given]) == 2
    assert said in capsys.readouterr().err


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a cluster of two nodes, which are one host."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        made = Cluster(initialize_head=True, connect=False, head_node_args={"num_cpus": 1})
        made.add_node(num_cpus=1)
        yield made.address
        made.shutdown()


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_all_hosts_are_asked_compared_and_meet(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another interpreter than Ray's, as on nodes whose own has no torch."""
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    other.chmod(stat.S_IRWXU)
    monkeypatch.setenv("NRL_PORTS", "21000-21999")
    with_torch = {"python_with_torch": str(other)}
    monkeypatch.setattr(Probe, "facts", lambda self, ray: {**facts(), **with_torch})
    found = list(cluster.hosts(address, str(tmp_path / "shared"), 1 << 20, 200))
    by = {each.check: each for each in found}
    assert (by["cluster"].level, by["cluster"].values["address"]) == ("ok", address)
    names = by["cluster"].values["hosts"]
    assert len(names) == 2
    assert all(name.startswith(f"{socket.gethostname()}:") for name in names)
    assert {each.host for each in found if each.check == "slots"} == set(names)
    assert {"cores", "memory", "disk", "open_files"} <= {each.check for each in found if each.host in names}
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


def nowhere(address: str) -> str:
    return "nowhere0"


def elsewhere(self: Probe, folder: str, note: str, name: str) -> str:
    return answer(Path("/nowhere"), note, name)


def closed(self: Probe, address: str, ports: Sequence[int]) -> int:
    with socket.create_server((address, 0)) as gone:
        return int(gone.getsockname()[1])


def wrong(found: list[Finding], check: str) -> list[tuple[str, str, str, str]]:
    return [(each.level, each.host, each.found, each.todo) for each in found if each.check == check]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_interface_that_is_not_there_and_a_folder_that_is_another(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Probe, "sees", elsewhere)
    monkeypatch.setattr(cluster, "interface_of", nowhere)
    found = list(cluster.hosts(address, str(tmp_path), 1 << 20, 200))
    names = next(each for each in found if each.check == "cluster").values["hosts"]
    shared = wrong(found, "shared")
    assert {(level, host) for level, host, _, _ in shared} == {("failed", name) for name in names}
    assert all("it has no such folder" in said and "mount" in todo for _, _, said, todo in shared)
    assert list(tmp_path.iterdir()) == []
    [(level, _, said, todo)] = wrong(found, "gloo")
    assert (level, "do not meet" in said, "nowhere0" in said) == ("failed", True, True)
    assert "GLOO_SOCKET_IFNAME" in todo


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_ports_that_are_closed_are_told_by_host(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Probe, "listen", closed)
    monkeypatch.setenv("NRL_PORTS", "21000-21999")
    found = list(cluster.hosts(address, None, 1 << 20, 200))
    names = next(each for each in found if each.check == "cluster").values["hosts"]
    ports = wrong(found, "ports")
    assert {(level, host) for level, host, _, _ in ports} == {("failed", name) for name in names}
    assert all("refused" in said for _, _, said, _ in ports)
    assert ["ip_local_port_range" in todo for _, _, _, todo in ports] == [True, True, False, False]
    assert ["ports of NRL_PORTS=21000-21999" in todo for _, _, _, todo in ports] == [False, False, True, True]
    [(level, _, said, _)] = wrong(found, "gloo")
    assert (level, "a port is closed between them" in said) == ("note", True)
    assert [level for level, _, _, _ in wrong(found, "shared")] == ["note"]


def test_a_node_that_ray_has_lost_is_told_unless_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray takes up to a minute to lose a node, so its list of nodes is put in its place."""
    listed = [("a", True), ("b", False), ("c", False), ("c", True)]
    nodes = [
        {"Alive": alive, "NodeManagerHostname": name, "NodeManagerAddress": f"10.0.0.{name}"} for name, alive in listed
    ]
    monkeypatch.setattr(cluster, "_nodes", lambda alive: [each for each in nodes if each["Alive"] == alive])
    [lost] = cluster._lost()
    assert (lost.level, lost.host, lost.found) == ("warning", "b", "Ray has lost it (10.0.0.b)")


@pytest.mark.ray
def test_where_no_cluster_is_that_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    [finding] = cluster.hosts("127.0.0.1:1", None, 1 << 20, 20)
    assert (finding.check, finding.level) == ("cluster", "failed")
    assert "there is no Ray cluster at '127.0.0.1:1'" in finding.found


def test_a_cluster_that_is_gone_after_it_was_joined_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "entered", lambda address, deadline: nullcontext())
    [finding] = cluster.hosts("10.0.0.1:6379", None, 1 << 20, 20)
    assert (finding.check, finding.level) == ("cluster", "failed")
    assert "Ray has not been started yet" in finding.found
    assert "`ray status`" in finding.todo
