"""Ports of a range that a firewall lets through."""

import errno
import re
import socket
from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import nrl
from nrl.errors import PlacementError
from nrl.gym.cli.supervising import free_port
from nrl.gym.http.server_socket import listening
from nrl.runtime.ports import first_free, ports, store


@pytest.mark.parametrize("said", ["20000", "0-3", "30-20", "20000-65536", "a-b", "1-2-3"])
def test_what_is_no_range(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    message = f"NRL_PORTS is '{said}'; give the first and the last of the ports that nrl may open, such as 20000-20999"
    with pytest.raises(PlacementError, match=message):
        ports({"NRL_PORTS": said})
    monkeypatch.setenv("NRL_PORTS", said)
    with pytest.raises(PlacementError, match=message), nrl.cluster("127.0.0.1:1"):  # before it looks for Ray
        pass


def test_without_a_range_any_port_will_do() -> None:
    assert ports({}) is ports({"NRL_PORTS": ""}) is None
    assert store("127.0.0.1", timedelta(seconds=10)).port > 0


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch) -> int:
    """The only port of the range."""
    with socket.create_server(("", 0)) as found:
        port = int(found.getsockname()[1])
    monkeypatch.setenv("NRL_PORTS", f"{port}-{port}")
    return port


def test_processes_meet_at_a_port_of_the_range(one: int, capfd: pytest.CaptureFixture[str]) -> None:
    made = store("127.0.0.1", timedelta(seconds=10))
    assert (made.host, made.port) == ("127.0.0.1", one)
    TCPStore("127.0.0.1", one, timeout=timedelta(seconds=10)).set("a", "b")
    assert made.get("a") == b"b"
    taken = f"all ports of NRL_PORTS={one}-{one} are taken on host {socket.gethostname()}; name more of them: a mesh "
    with pytest.raises(PlacementError, match=taken):
        store("127.0.0.1", timedelta(seconds=10))
    assert "socket" not in capfd.readouterr().err  # torch would warn of the port


def kept_for_root(port: int) -> int:
    """Opens a port as most systems let all but root, whom a test may be."""
    if port < 1024:
        raise PermissionError(errno.EACCES, "Permission denied")
    if port < 1030:
        raise OSError(errno.EADDRINUSE, "Address already in use")
    return port


@pytest.mark.parametrize(
    ("range_", "told"),
    [
        ("1022-1023", "2 ports of NRL_PORTS=1022-1023 on host {}; name others: most systems keep those below 1024 for"),
        ("1020-1025", "4 ports of NRL_PORTS=1020-1025 on host {}, and the other 2 are taken; name others: most"),
    ],
)
def test_ports_that_this_process_may_not_open(range_: str, told: str) -> None:
    said = f"this process may not open {told.format(socket.gethostname())}"
    with pytest.raises(PlacementError, match=re.escape(said)):
        first_free(kept_for_root, {"NRL_PORTS": range_})


def test_ports_that_this_process_may_open_are_found_among_others() -> None:
    assert {first_free(kept_for_root, {"NRL_PORTS": "1000-1030"}) for _ in range(20)} == {1030}


def test_servers_take_one_of_the_range_where_none_is_named(one: int) -> None:
    assert free_port("gym", "127.0.0.1") == one
    with listening("127.0.0.1", 0, "serve") as made:
        assert made.getsockname()[1] == one
        with pytest.raises(OSError, match=f"serve: cannot listen at 127.0.0.1:{one}: Address already in use; give"):
            listening("127.0.0.1", one, "serve")
        with pytest.raises(PlacementError, match="are taken on host"):
            listening("127.0.0.1", 0, "serve")
