"""The front of all servers: who may ask, how large JSON may be, and whose body is read first."""

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

import nrl
from nrl.envs import exact
from nrl.gym.http import application, server_socket
from nrl.gym.http.application import Bodies
from nrl.gym.http.front import Headers, allowed_hosts
from nrl.gym.http.idempotency import Refused
from nrl.gym.http.json_limits import StrangeNumber, check_json, read_json


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with nrl.serve(exact, hosts=["gym.example.org"]) as server:
        yield server.url


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 403),
        ({"host": "localhost.evil.example"}, 403),
        ({"host": "127.0.0.1.evil.example:8000"}, 403),
        ({"host": "localhost", "origin": "http://evil.example"}, 403),
        ({"host": "localhost:1", "origin": "http://localhost:2"}, 403),
        ({"host": "localhost", "origin": "null"}, 403),
        ({"host": "LOCALHOST:1"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"host": "localhost:1", "origin": "http://localhost:1"}, 200),
        ({"host": "gym.example.org"}, 200),
        ({"host": "localhost", "origin": "https://gym.example.org"}, 200),
        ({"host": ""}, 200),
    ],
)
def test_hosts_and_sites_that_may_ask(headers: dict[str, str], status: int, url: str) -> None:
    reply = httpx2.get(f"{url}/info", headers=headers, trust_env=False)
    assert reply.status_code == status
    assert (status == 200) == ("error" not in reply.json())


def test_a_server_with_a_token_for_other_machines_is_known_by_any_name() -> None:
    assert allowed_hosts("0.0.0.0", secured=True) is None
    assert "proxy.example" in (allowed_hosts("0.0.0.0", ["Proxy.example."], secured=True) or ())
    assert socket.gethostname().lower() in (allowed_hosts("0.0.0.0", secured=False) or ())


def test_json_is_bounded_by_what_it_becomes() -> None:
    for body in (b"[" + b"{}," * 1000 + b"{}]", b"[" + b"1," * 1000 + b"1]", b'["' + b'","' * 1000 + b'"]'):
        with pytest.raises(ValueError, match="more than (500 values|1000 texts)"):
            check_json(body, containers=5000, values=500)
    for text in (b"{" * 1000, b'\\"[' * 1000, b"\\\\", b",[" * 1000):
        check_json(b'{"a":"' + text + b'"}', containers=2, depth=1, values=9)
    with pytest.raises(ValueError, match="more than 10 arrays and objects"):
        check_json(b"[" * 6 + b"]" * 6 + b"{}" * 6, containers=10)
    with pytest.raises(ValueError, match="nested more than 5 deep"):
        check_json(b"[" * 6, containers=10, depth=5)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", "9" * 5000])
def test_a_number_that_json_does_not_have_is_named(number: str) -> None:
    with pytest.raises(StrangeNumber) as strange:
        read_json(b'{"messages": [{"x": %s}]}' % number.encode())
    assert strange.value.where == "messages[0].x"


def body_of(*parts: bytes, length: int) -> tuple[Callable[[], Awaitable[dict[str, Any]]], Headers]:
    """A client that sends some of a body of a certain length, and then no more."""
    left = list(parts)

    async def receive() -> dict[str, Any]:
        if not left:
            await asyncio.get_running_loop().create_future()
        part = left.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(left) or sum(map(len, parts)) < length}

    return receive, Headers([(b"content-length", str(length).encode())])


def test_who_stalls_is_given_up_for_those_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "_STALLED", 0.05)
    size = 2**16

    async def main() -> None:
        bodies = Bodies(size, arriving=2 * size)
        stalled = [asyncio.ensure_future(bodies.read(*body_of(b"x", length=size))) for _ in range(2)]
        await asyncio.sleep(0.2)
        assert not any(task.done() for task in stalled)  # nobody waits
        whole, held = await bodies.read(*body_of(b"y" * size, length=size))
        assert (len(whole), held) == (size, size)
        for task in stalled:
            with pytest.raises(Refused) as late:
                await task
            assert (late.value.status, late.value.unread) == (408, True)
        assert (bodies.held, bodies._reserved) == (size, 0)

    asyncio.run(main())


def test_short_bodies_need_no_turn_and_those_that_wait_too_long_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_socket, "SLOWEST", 0.1)
    size = 2**16

    async def endless() -> dict[str, Any]:
        await asyncio.sleep(0.001)
        return {"type": "http.request", "body": b"x", "more_body": True}

    async def main() -> None:
        bodies = Bodies(size, arriving=size)
        slow = asyncio.ensure_future(bodies.read(endless, Headers([(b"content-length", b"65536")])))
        await asyncio.sleep(0)
        assert (await bodies.read(*body_of(b"{}", length=2)))[0] == b"{}"
        waiting = asyncio.ensure_future(bodies.read(*body_of(b"y" * size, length=size)))
        leaving = asyncio.ensure_future(bodies.read(*body_of(b"y" * size, length=size)))
        await asyncio.sleep(0.01)
        leaving.cancel()
        statuses = list[int]()
        for task in (slow, waiting):
            try:
                await task
                statuses.append(200)
            except Refused as error:
                statuses.append(error.status)
        assert statuses[0] == 408
        assert statuses[1] in (200, 429)
        await asyncio.gather(leaving, return_exceptions=True)
        assert (bodies._reserved, len(bodies._waiting)) == (0, 0)

    asyncio.run(main())


@pytest.mark.parametrize("largest", [2**22, 2**26])
def test_half_sent_bodies_do_not_fill_the_memory(largest: int) -> None:
    """Those that wait for their turn are not read, whatever the server serves: this is what all have by default."""
    half = b"x" * 2**19

    async def main() -> None:
        bodies = Bodies(largest)
        coming = [asyncio.ensure_future(bodies.read(*body_of(half, length=largest))) for _ in range(100)]
        await asyncio.sleep(0.05)
        assert bodies.held == len(half) * max(1, application.ARRIVING // largest)
        for task in coming:
            task.cancel()
        await asyncio.gather(*coming, return_exceptions=True)
        assert (bodies.held, bodies._reserved, len(bodies._waiting)) == (0, 0, 0)

    asyncio.run(main())


def test_compressed_bodies_are_refused(url: str) -> None:
    headers = {"content-encoding": "gzip"}
    reply = httpx2.post(f"{url}/verify", content=b"x" * 100_000, headers=headers, trust_env=False)
    assert reply.status_code == 415


def test_more_connections_than_there_may_be_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_socket, "_CONNECTIONS", 2)
    with nrl.serve(exact) as server:
        host, port = server.url.removeprefix("http://").split(":")
        address = (host, int(port))
        with socket.create_connection(address, 30), socket.create_connection(address, 30):
            third = socket.create_connection(address, 30)
            assert third.recv(65536).startswith(b"HTTP/1.1 503 ")
            third.close()
        assert nrl.remote(server) is not None  # there is room again


def test_no_module_brings_a_server_of_its_own() -> None:
    """Every server has the front of `listening`, but for those of nemo-gym, of which docs/serving.md says so."""
    server = re.compile(r"uvicorn\.(run|Server|Config)\b|\bHTTPServer\b|aiohttp\.web\b|\bstart_server\(")
    root = Path(nrl.__file__).parent
    modules = {path.relative_to(root).as_posix() for path in root.rglob("*.py") if server.search(path.read_text())}
    assert modules == {"gym/http/server_socket.py", "gym/adapters/nemo/processes.py"}
