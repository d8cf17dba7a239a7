"""The doctor of a cluster, as far as it joins none; `joining.py` has the rest."""

import socket
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from nrl.command.cli import main
from nrl.runtime.doctor import cluster
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


def test_a_node_that_ray_has_lost_is_told_unless_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray takes up to a minute to lose a node, so its list of nodes is put in its place."""
    listed = [("a", True), ("b", False), ("c", False), ("c", True)]
    nodes = [
        {"Alive": alive, "NodeManagerHostname": name, "NodeManagerAddress": f"10.0.0.{name}"} for name, alive in listed
    ]
    monkeypatch.setattr(cluster, "_nodes", lambda alive: [each for each in nodes if each["Alive"] == alive])
    [lost] = cluster._lost()
    assert (lost.level, lost.host, lost.found) == ("warning", "b", "Ray has lost it (10.0.0.b)")


def test_a_cluster_that_is_gone_after_it_was_joined_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "entered", lambda address, deadline: nullcontext())
    [finding] = cluster.hosts("10.0.0.1:6379", None, 1 << 20, 20)
    assert (finding.check, finding.level) == ("cluster", "failed")
    assert "Ray has not been started yet" in finding.found
    assert "`ray status`" in finding.todo
