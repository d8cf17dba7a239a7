"""`serve` over HTTP: who may ask, what each path answers, and what ends when."""

import asyncio
import contextlib
import functools
import hmac
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

import nrl
from nrl.envs import Environment, Step, Trace, exact, single_turn
from nrl.errors import EnvError
from nrl.gym.http import application, serve_app, server_socket
from nrl.gym.http.prometheus import Numbers
from nrl.gym.http.serve_app import Server
from nrl.gym.http.service import Service


def ask(server: Server | str, path: str, body: Any = None, *, token: str | None = None, **headers: str) -> Any:
    """The response to a request."""
    url = (server if isinstance(server, str) else server.url) + path
    headers = {each.replace("_", "-"): value for each, value in headers.items()}
    if token is not None:
        headers["authorization"] = f"Bearer {token}"
    if body is None:
        return httpx2.get(url, headers=headers, trust_env=False, timeout=60)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx2.post(url, content=content, headers=headers, trust_env=False, timeout=60)


def failure(response: Any) -> tuple[int, str, str]:
    found = response.json()["error"]
    return response.status_code, found["code"], found["message"]


class Waits:
    """An environment in which the text "wait" waits until the test lets it go on."""

    tasks = None

    def __init__(self) -> None:
        self.waiting, self.go, self.closed = threading.Event(), threading.Event(), list[Any]()

    def reset(self, task: Any) -> Any:
        return task, str(task.get("prompt", ""))

    def step(self, state: Any, turn: Any) -> Step:
        if turn.text == "wait":
            self.waiting.set()
            assert self.go.wait(60)
        return Step(state, reward=1.0, done=True)

    def close(self, state: Any) -> None:
        self.closed.append(state)


@pytest.fixture
def waits() -> Iterator[Waits]:
    made = Waits()
    yield made
    made.go.set()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with nrl.serve(single_turn(exact), name="exactly", largest=10_000) as made:
        yield made


# --- Paths


def test_an_episode_over_http(server: Server) -> None:
    task = {"prompt": "2+2=", "answer": "4"}
    begun = ask(server, "/reset", {"session": "one", "task": task})
    assert (begun.status_code, begun.json()) == (200, {"prompt": "2+2="})
    assert begun.headers["content-type"] == "application/json"
    taken = ask(server, "/step", {"session": "one", "turn": 0, "action": "4"})
    assert taken.json() == {"verdict": {"reward": 1.0}, "done": True, "observation": None, "info": {}}
    assert ask(server, "/renew", {"sessions": ["one", "two", "one"]}).json() == {"sessions": 1}
    assert ask(server, "/close", {"session": "one"}).json() == {"session": "one"}


def test_a_call_of_verify_is_repeated_with_what_it_asked_alone() -> None:
    four = {"call": "c", "task": {"answer": "4"}, "trace": {"prompt": "2+2=", "turns": ["4"]}}
    with nrl.serve(exact) as server:
        assert ask(server, "/verify", four).json() == ask(server, "/verify", four).json()
        for other in ({**four, "task": {"answer": "5"}}, {**four, "trace": {"prompt": "2+2=", "turns": ["5"]}}):
            told = "verify: the call c was made already, with another request; choose another name"
            assert failure(ask(server, "/verify", other)) == (409, "consumed", told)
        assert ask(server, "/verify", {**four, "call": "d", "task": {"answer": "5"}}).json()["verdict"]["reward"] == 0.0


def test_what_a_server_says_of_itself(server: Server) -> None:
    assert ask(server, "/health").json() == ask(server, "/ready").json() == {"status": "ok"}
    info = ask(server, "/info").json()
    assert info == {
        "protocol": 1, "name": "exactly", "kind": "environment", "verifies": False, "of_group": False, "tasks": False,
        "extracts": False, "timeout": 60.0, "lease": 60.0, "checks": True,
    }  # fmt: skip
    described = ask(server, "/openapi.json").json()
    assert described["info"]["title"] == "nrl gym: exactly"
    assert {"/reset", "/step", "/close", "/verify", "/health", "/metrics"} <= set(described["paths"])
    assert described["components"]["securitySchemes"] == {}


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "message"),
    [
        ("/", None, 404, "unknown", "there is no /; there are /reset, /step,"),
        ("/" + "x" * 200, None, 404, "unknown", "there is no /" + "x" * 79 + ";"),
        ("/reset", None, 405, "invalid", "/reset takes POST, and not GET"),
        ("/info", {}, 405, "invalid", "/info takes GET, and not POST"),
        ("/reset", b"{", 400, "invalid", "/reset: Input data was truncated"),
        ("/reset", b"\xff", 400, "invalid", "/reset: JSON is malformed"),
        ("/reset", {"session": "a"}, 400, "invalid", "/reset: Object missing required field `task`"),
        ("/reset", {"session": "a b", "task": {}}, 400, "invalid", "- at `$.session`"),
        ("/reset", {"session": "a", "task": {"x": {"$nrl": "?"}}}, 400, "invalid", "is no value"),
        ("/reset", b'{"session":"a","task":{"x":' + b"[" * 5000, 400, "invalid", "nested too deeply"),
        ("/reset", b'{"session":"a","task":{"$nrl":' + b"[" * 4000 + b"]" * 4000 + b"}}", 400, "invalid", "deeply"),
        ("/step", {"session": "a", "turn": -1, "action": ""}, 400, "invalid", "- at `$.turn`"),
        ("/reset", b" " * 10_001, 413, "too_large", "the request has more than 10000 bytes; send less"),
    ],
)
def test_what_cannot_be_answered(server: Server, path: str, body: Any, status: int, code: str, message: str) -> None:
    found = failure(ask(server, path, body))
    assert found[:2] == (status, code)
    assert message in found[2]


def test_a_request_whose_client_has_no_more_time_is_given_up(waits: Waits) -> None:
    with nrl.serve(waits) as server:
        ask(server, "/reset", {"session": "a", "task": {}})
        step = {"session": "a", "turn": 0, "action": "wait"}
        found = failure(ask(server, "/step", step, nrl_timeout="0.05"))
        assert found == (408, "late", "/step was not over within the 0.05 s of its client")
        waits.go.set()
        assert ask(server, "/step", step, nrl_timeout="60").status_code == 200  # it has gone on meanwhile
        assert failure(ask(server, "/step", step, nrl_timeout="soon"))[::2] == (
            400,
            "nrl-timeout is b'soon'; give seconds",
        )
        assert ask(server, "/step", step, nrl_timeout="-3").status_code in (200, 408)


def test_numbers_for_prometheus(waits: Waits) -> None:
    with nrl.serve(waits) as server:
        for _ in range(2):
            ask(server, "/reset", {"session": "a", "task": {}})
        for i in range(5):
            ask(server, f"/{i}")
        ask(server, "/reset", {})
        thread = threading.Thread(target=ask, args=(server, "/step", {"session": "a", "turn": 0, "action": "wait"}))
        thread.start()
        assert waits.waiting.wait(60)
        shown = ask(server, "/metrics")
        waits.go.set()
        thread.join()
    assert shown.headers["content-type"].startswith("text/plain")
    numbers = dict(line.rsplit(" ", 1) for line in shown.text.splitlines() if not line.startswith("#"))
    assert numbers['nrl_gym_requests_total{path="/reset",status="200"}'] == "2.0"
    assert numbers['nrl_gym_requests_total{path="/reset",status="400"}'] == "1.0"
    assert numbers['nrl_gym_requests_total{path="",status="404"}'] == "5.0"  # whatever it was
    assert numbers['nrl_gym_seconds_count{path="/reset"}'] == "3.0"
    assert (numbers["nrl_gym_sessions"], numbers["nrl_gym_under_way"]) == ("1.0", "1.0")
    assert (numbers["nrl_gym_replayed_total"], numbers["nrl_gym_evicted_total"]) == ("1.0", "0.0")
    families = {family.name: family for family in text_string_to_metric_families(shown.text)}
    assert {name.removeprefix("nrl_gym_"): family.type for name, family in families.items()} == {
        "requests": "counter", "seconds": "histogram", "sessions": "gauge", "under_way": "gauge",
        "evicted": "counter", "replayed": "counter",
    }  # fmt: skip
    sums = {s.labels["path"]: s.value for s in families["nrl_gym_seconds"].samples if s.name.endswith("_sum")}
    assert 0 < sums["/reset"] < 60
    assert not [line for line in numbers if "_created" in line]


def test_seconds_lie_in_buckets_that_verdicts_need() -> None:
    service: Any = SimpleNamespace(sessions=0, under_way=0, evicted=0, replayed=0)
    numbers = Numbers(service)
    for seconds in (0.00004, 0.0001, 0.0002, 0.0003, 70.0):
        numbers.note("/verify", 200, seconds)
    lines = dict(line.rsplit(" ", 1) for line in numbers.shown().decode().splitlines())
    bounds = ("5e-05", "0.0001", "0.00025", "0.0005", "0.001", "50.0", "+Inf")
    found = [lines[f'nrl_gym_seconds_bucket{{le="{bound}",path="/verify"}}'] for bound in bounds]
    assert found == ["1.0", "2.0", "3.0", "4.0", "4.0", "4.0", "5.0"]
    assert float(lines['nrl_gym_seconds_sum{path="/verify"}']) == pytest.approx(70.00064)


# --- Who may ask


def test_without_the_token_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = list[tuple[bytes, bytes]]()
    compare = hmac.compare_digest

    def noted(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return compare(a, b)

    monkeypatch.setattr(hmac, "compare_digest", noted)
    with nrl.serve(exact, token="a secret") as server:
        assert ask(server, "/health").status_code == ask(server, "/ready").status_code == 200
        for token in (None, "another", "a secret2", "A SECRET"):
            for path, body in (("/info", None), ("/metrics", None), ("/nowhere", None), ("/verify", {})):
                found = ask(server, path, body, **({} if token is None else {"authorization": f"Bearer {token}"}))
                assert failure(found) == (
                    401,
                    "unauthorized",
                    "the token is missing or wrong; send 'Authorization: Bearer TOKEN'",
                )
                assert found.headers["www-authenticate"] == "Bearer"
        for given in ("Basic a secret", "a secret", "Bearera secret", ""):
            assert failure(ask(server, "/info", authorization=given))[0] == 401
        for given in ("bearer a secret", "BEARER a secret", "Bearer  a secret"):  # RFC 9110, 11.1
            assert ask(server, "/info", authorization=given).status_code == 200
        asked = len(compared)
        assert ask(server, "/info", token="a secret").status_code == 200
        assert len(compared) == asked + 1  # in constant time
        described = ask(server, "/openapi.json", token="a secret").json()
        assert described["paths"]["/verify"]["post"]["security"] == [{"bearer": []}]
        assert described["paths"]["/health"]["get"]["security"] == []
        verify = nrl.remote(server)
        assert asyncio.run(verify({"answer": "4"}, Trace("", ["4"]))) == 1.0


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "node-7"])
def test_other_machines_need_a_token_or_to_be_trusted(host: str) -> None:
    with pytest.raises(ValueError, match=f"every machine that reaches {host} could use this server; give a token"):
        nrl.serve(exact, host=host)


def test_trust_is_warned_of() -> None:
    said = r"serve: http://0\.0\.0\.0:[1-9]\d* takes calls from every machine that reaches it"
    with pytest.warns(UserWarning, match=said) as told:
        server = nrl.serve(exact, host="0.0.0.0", auth="none")
    assert told[0].filename == __file__
    with server:
        port = server.url.rpartition(":")[2]
        assert ask(f"http://127.0.0.1:{port}", "/info").status_code == 200


def test_a_token_makes_every_address_good() -> None:
    with nrl.serve(exact, host="0.0.0.0", token="t") as server:
        port = server.url.rpartition(":")[2]
        assert ask(f"http://127.0.0.1:{port}", "/info").status_code == 401
        assert ask(f"http://127.0.0.1:{port}", "/info", token="t").status_code == 200


@pytest.mark.parametrize("host", ["::1", "localhost", "127.0.0.2"])
def test_loopback_has_several_names(host: str) -> None:
    try:
        server = nrl.serve(exact, host=host)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    with server:
        verify = nrl.remote(server.url)
        assert asyncio.run(verify({"answer": "4"}, Trace("", ["4"]))) == 1.0


# --- Options, and the end


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"f": 3}, EnvError, "serve: 3 is neither a verifier nor an environment"),
        ({"lease": 0}, ValueError, "serve: lease is 0; it must be positive"),
        ({"most": -1}, ValueError, "serve: most is -1; it must be positive"),
        ({"largest": 0}, ValueError, "serve: largest is 0; it must be positive"),
        ({"timeout": 0.0}, ValueError, "serve: timeout is 0.0; it must be positive"),
        ({"auth": "basic"}, ValueError, "serve: auth is 'basic'; give 'token', or 'none' for a network that"),
        ({"host": "nowhere.invalid", "token": "t"}, OSError, "serve: cannot listen at nowhere.invalid:0"),
    ],
)
def test_mistakes_are_told(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        nrl.serve(options.pop("f", exact), **options)


def test_what_fails_while_a_server_starts_is_raised_here() -> None:
    class Wrong:
        reset = step = len

        @property
        def timeout(self) -> float:
            raise LookupError("no limit is known")

    with pytest.raises(LookupError, match="no limit is known"):
        nrl.serve(cast(Any, Wrong()))


def test_a_port_that_is_taken(server: Server) -> None:
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(OSError, match=f"serve: cannot listen at 127.0.0.1:{port}: .*; give another port"):
        nrl.serve(exact, port=port)


def test_options_reach_the_server(waits: Waits) -> None:
    with nrl.serve(waits, lease=7.0, timeout=None, most=1, largest=200) as server:
        assert (ask(server, "/info").json()["lease"], ask(server, "/info").json()["timeout"]) == (7.0, None)
        assert ask(server, "/info").json()["name"] == "Waits"
        assert repr(server) == f"Server({server.url})"
        assert ask(server, "/reset", {"session": "a", "task": {}}).status_code == 200
        busy = ask(server, "/reset", {"session": "b", "task": {}})
        assert failure(busy)[:2] == (429, "busy")
        assert busy.headers["retry-after"] == "1"
        assert failure(ask(server, "/reset", {"session": "b", "task": {"x": "y" * 200}}))[0] == 413
    with nrl.serve(waits, timeout=0.01) as server:
        ask(server, "/reset", {"session": "a", "task": {}})
        found = failure(ask(server, "/step", {"session": "a", "turn": 0, "action": "wait"}))
        assert found[:2] == (422, "failed")


def test_the_time_to_come_again_is_in_whole_seconds(waits: Waits) -> None:
    with nrl.serve(waits, lease=1.0, most=1) as server:  # which looks four times in it, and says as much
        ask(server, "/reset", {"session": "a", "task": {}})
        assert ask(server, "/reset", {"session": "b", "task": {}}).headers["retry-after"] == "1"


LEFT = """
import time, nrl
from nrl.envs import Environment, Step, Turn

def close(state):
    print("closed", flush=True)

env = Environment(lambda task: (0, "?"), lambda state, turn: Step(state, 0.0), close)
there = nrl.remote(nrl.serve(env))
import asyncio
for _ in range(2):
    asyncio.run(there.reset({}))
"""


@pytest.mark.parametrize(("more", "status"), [("", 0), ("raise SystemExit(3)", 3)])
def test_the_end_of_the_program_closes_all(more: str, status: int) -> None:
    done = subprocess.run([sys.executable, "-c", LEFT + more], stdout=subprocess.PIPE, timeout=120)
    assert (done.stdout.decode().split(), done.returncode) == (["closed"] * 2, status)


def test_the_end_of_the_program_does_not_wait_for_ever(waits: Waits, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a `close` that hangs."""
    ends = list[Any]()
    monkeypatch.setattr("atexit.register", lambda *end: ends.append(end))
    monkeypatch.setattr(serve_app, "_EXIT", 0.2)
    waits.close = lambda state: waits.go.wait(60)  # type: ignore[method-assign,assignment]
    server = nrl.serve(waits)
    ask(server, "/reset", {"session": "a", "task": {}})
    ((stop, *most),) = ends
    stop(*most)
    waits.go.set()
    server.stop()


def test_the_end_answers_what_is_under_way_and_closes_all(waits: Waits) -> None:
    server = nrl.serve(waits)
    ask(server, "/reset", {"session": "a", "task": {}})
    ask(server, "/reset", {"session": "b", "task": {}})
    found = list[Any]()
    step = {"session": "a", "turn": 0, "action": "wait"}
    asking = threading.Thread(target=lambda: found.append(ask(server, "/step", step)))
    asking.start()
    assert waits.waiting.wait(60)
    stopping = [threading.Thread(target=server.stop) for _ in range(2)]
    for each in stopping:
        each.start()
    waits.go.set()
    for each in (asking, *stopping):
        each.join(60)
    assert [each.status_code for each in found] == [200]
    assert len(waits.closed) == 2
    server.stop()
    with pytest.raises(httpx2.ConnectError):
        ask(server, "/health")


def test_what_takes_longer_than_the_grace_is_told_that_the_server_stops(
    waits: Waits, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_app, "Settings", functools.partial(serve_app.Settings, grace=1.0))
    found = list[Any]()
    with nrl.serve(waits) as server:
        ask(server, "/reset", {"session": "a", "task": {}})
        step = {"session": "a", "turn": 0, "action": "wait"}
        asking = threading.Thread(target=lambda: found.append(ask(server, "/step", step)))
        asking.start()
        assert waits.waiting.wait(60)
    asking.join(60)
    assert failure(found[0]) == (503, "stopping", "Waits is stopping; ask another server")
    assert "Traceback" not in capfd.readouterr().err


def test_while_it_stops_it_is_not_ready(waits: Waits) -> None:
    """A connection that is open is still answered."""
    with nrl.serve(waits) as server:
        ask(server, "/reset", {"session": "a", "task": {}})
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as step, socket.create_connection((host, int(port))) as other:
            body = json.dumps({"session": "a", "turn": 0, "action": "wait"}).encode()
            step.sendall(b"POST /step HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
            assert waits.waiting.wait(60)
            other.sendall(b"POST /renew HTTP/1.1\r\nhost: localhost\r\ncontent-length: 15\r\n\r\n")  # not whole
            other.sendall(b'{"sessions":[')
            stopping = threading.Thread(target=server.stop)
            stopping.start()
            other.sendall(b"]}")
            assert b"200 OK" in other.recv(1000)
            waits.go.set()
            assert b"200 OK" in step.recv(1000)
            stopping.join(60)


def test_a_server_that_stops_is_not_ready_and_begins_nothing(waits: Waits) -> None:
    async def main() -> list[Any]:
        service = Service(waits, "it", lease=60, most=9)
        app, sent = application.application(service, token=None, largest=1000), list[Any]()

        async def ask_it(method: str, path: str, body: bytes) -> None:
            async def receive() -> dict[str, Any]:
                return {"body": body}

            async def send(message: dict[str, Any]) -> None:
                sent.append(message)

            await app({"path": path, "method": method, "headers": []}, receive, send)

        await ask_it("GET", "/ready", b"")
        service.refuse()
        await ask_it("GET", "/ready", b"")
        await ask_it("POST", "/reset", b'{"session":"a","task":{}}')
        await service.stop()
        return sent

    sent = asyncio.run(main())
    assert [message["status"] for message in sent[::2]] == [200, 503, 503]
    assert (b"retry-after", b"1") in sent[2]["headers"]
    assert json.loads(sent[3]["body"])["error"]["message"] == "it is stopping; ask another server"


# --- Slow and strange clients


def talk(server: Server, *parts: bytes, pause: float = 0.0) -> bytes:
    """What a server answers to bytes, all of which are sent, until it closes the connection."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=120) as connection:
        found = b""
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            for part in parts:
                connection.sendall(part)
                time.sleep(pause)
        with contextlib.suppress(ConnectionResetError):
            while more := connection.recv(65536):
                found += more
        return found


def test_headers_that_never_end_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_socket, "SLOWEST", 0.2)
    with nrl.serve(exact) as server:
        assert talk(server) == b""
        assert talk(server, b"GET /health HTTP/1.1\r\n", b"a: b\r\n", b"c: ") == b""
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert b"200 OK" in connection.recv(1000)
            connection.sendall(b"GET /hea")
            assert connection.recv(1000) == b""
        assert ask(server, "/health").status_code == 200


def test_headers_that_are_too_long_are_refused(server: Server) -> None:
    many = b"".join(b"x-%d: %s\r\n" % (i, b"y" * 1000) for i in range(100))
    for asked in (
        b"GET /health HTTP/1.1\r\n" + many,
        b"GET /" + b"x" * 100_000,
        b"GET / HTTP/1.1\r\na:" + b"b" * 99_999,
    ):
        parts = [asked[i : i + 10_000] for i in range(0, len(asked), 10_000)]
        assert talk(server, *parts)[:13] == b"HTTP/1.1 431 "
    assert talk(server, b"GET /health HTTP/1.1\r\n", *([many[:40_000]] * 2))[:12] == b"HTTP/1.1 431"
    assert ask(server, "/health").status_code == 200


def test_bodies_that_never_end_are_cut_off(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    monkeypatch.setattr(server_socket, "SLOWEST", 0.2)
    found = talk(server, b"POST /reset HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
    assert b" 408 " in found.splitlines()[0]
    assert b"the request had not arrived within 0.2 s; send it faster" in found
    assert b"connection: close" in found.lower()


def test_a_body_that_is_too_large_is_not_read(server: Server) -> None:
    found = talk(server, b"POST /reset HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000000\r\n\r\n{")
    assert b" 413 " in found.splitlines()[0]
    chunk = b"1000\r\n" + b"x" * 4096 + b"\r\n"
    found = talk(server, b"POST /reset HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n", *[chunk] * 5)
    assert b" 413 " in found.splitlines()[0]
    large = b"x" * (1 << 22)  # which is under way when the server refuses it
    found = talk(server, b"POST /reset HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000000\r\n\r\n", *[large] * 5)
    assert b" 413 " in found.splitlines()[0]
    assert talk(server, b"nonsense\r\n", *[large] * 5)[:13] == b"HTTP/1.1 400 "


def test_a_server_that_stops_does_not_wait_for_whom_it_has_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_socket, "SLOWEST", 1000.0)
    monkeypatch.setattr(serve_app, "Settings", functools.partial(serve_app.Settings, grace=1000.0))
    with nrl.serve(exact) as server:
        host, port = server.url.removeprefix("http://").split(":")
        connection = socket.create_connection((host, int(port)), timeout=120)
        connection.sendall(b"POST /verify HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000000\r\n\r\n{")
        found = b""
        while more := connection.recv(65536):
            found += more
        assert b" 413 " in found.splitlines()[0]
        began = time.monotonic()
    with connection:
        assert time.monotonic() - began < 500


def test_large_bodies_that_come_together_are_told_to_come_again(monkeypatch: pytest.MonkeyPatch, waits: Waits) -> None:
    monkeypatch.setattr(application, "_HELD", 2)
    body = json.dumps({"session": "a", "turn": 0, "action": "wait"}).encode().ljust(1000)
    with nrl.serve(waits, largest=1000) as server:
        ask(server, "/reset", {"session": "a", "task": {}})

        def step() -> None:
            while ask(server, "/step", body).status_code == 429:
                pass  # what asks below was sooner

        threads = [threading.Thread(target=step) for _ in range(2)]
        for each in threads:
            each.start()
        deadline = time.monotonic() + 60
        while (found := ask(server, "/reset", body)).status_code == 400 and time.monotonic() < deadline:
            pass  # not both are there yet
        assert failure(found) == (429, "busy", "requests of 2000 bytes are under way; ask again")
        assert found.headers["retry-after"] == "1"
        waits.go.set()
        for each in threads:
            each.join()
        assert ask(server, "/reset", body).status_code == 400  # it has room again, and reads it


def test_a_client_that_leaves_in_the_middle_is_no_harm(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    for part in (b"", b"GET", b"POST /reset HTTP/1.1\r\ncontent-length: 99\r\n\r\n{"):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(part)
    assert ask(server, "/health").status_code == 200


def test_requests_that_come_together_are_answered_in_their_order(server: Server) -> None:
    one = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    last = b"GET /nowhere HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    found = talk(server, one * 3 + last)
    assert re.findall(rb"HTTP/1.1 (\d+)", found) == [b"200"] * 3 + [b"404"]


# --- A process of its own


def process(told: Any, folder: Path) -> subprocess.Popen[str]:
    line = told if isinstance(told, str) else json.dumps(told)
    made = subprocess.Popen(
        [sys.executable, "-m", "nrl.gym.http.process"], text=True, cwd=folder,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert made.stdin is not None
    made.stdin.write(line + "\n")
    made.stdin.flush()
    return made


OWN = """
import sys
from nrl.envs import Environment, Step

def close(state):
    print("closed", state, flush=True)

print("imported", flush=True)
env = Environment(lambda task: (task["n"], "?"), lambda state, turn: Step(state, reward=2.0), close)
"""


@pytest.mark.parametrize("how", ["stdin", signal.SIGTERM, signal.SIGINT])
def test_a_process_serves_until_it_is_told_to_stop(tmp_path: Path, how: Any) -> None:
    (tmp_path / "own.py").write_text(OWN)
    made = process({"environment": "own.py:env", "name": "mine", "token": "t"}, tmp_path)
    assert made.stdout is not None
    url = json.loads(made.stdout.readline())["url"]
    assert ask(url, "/info", token="t").json()["name"] == "mine"
    assert ask(url, "/info").status_code == 401
    ask(url, "/reset", {"session": "a", "task": {"n": 7}}, token="t")
    if how == "stdin":
        assert made.stdin is not None
        made.stdin.write("ignored\n")
        made.stdin.flush()
        assert ask(url, "/health").status_code == 200
        made.stdin.close()
        made.stdin = None
    else:
        made.send_signal(how)
    out, err = made.communicate(timeout=60)
    assert (made.returncode, out, err) == (0, "", "imported\nclosed 7\n")


def test_a_process_brings_the_tasks_that_ship(tmp_path: Path) -> None:
    made = process({"environment": "number"}, tmp_path)
    assert made.stdout is not None
    url = json.loads(made.stdout.readline())["url"]
    assert ask(url, "/task", {"seed": 0, "index": 0}).json()["task"]["prompt"].endswith("=")
    made.communicate(timeout=60)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ("{", "Input data was truncated"),
        ({"environment": "numbr"}, "did you mean 'number'?"),
        ({"environment": "number", "colour": 1}, "unknown field `colour`"),
        ({"environment": "number", "host": "0.0.0.0"}, "gym: every machine that reaches 0.0.0.0 could use this"),
        ({"environment": "number", "host": "nowhere.invalid", "token": "t"}, "cannot listen at nowhere.invalid:0"),
    ],
)
def test_a_process_says_why_it_cannot_start(told: Any, message: str, tmp_path: Path) -> None:
    out, err = process(told, tmp_path).communicate(timeout=60)
    assert out == ""
    assert err.startswith("gym: ")
    assert message in err
    assert err.count("\n") == 1


def test_a_gigabyte_takes_no_memory(tmp_path: Path) -> None:
    made = process({"environment": "number"}, tmp_path)
    assert made.stdout is not None
    url = json.loads(made.stdout.readline())["url"]

    def resident() -> int:
        return int(Path(f"/proc/{made.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    ask(url, "/verify", b"x" * (1 << 20))
    before = resident()
    server = Server(url, None, None)
    for head in (b"content-length: 1000000000", b"transfer-encoding: chunked"):
        part = b"x" * (1 << 20)
        if b"chunked" in head:
            part = b"100000\r\n" + part + b"\r\n"
        found = talk(server, b"POST /verify HTTP/1.1\r\nhost: localhost\r\n" + head + b"\r\n\r\n", *[part] * 1000)
        assert b" 413 " in found.splitlines()[0]
    assert resident() - before < 100 << 20  # it reads 64 MiB where no length is declared
    assert ask(url, "/health").status_code == 200
    made.communicate(timeout=60)


def test_an_environment_with_its_own_tasks_keeps_them() -> None:
    env = Environment(lambda task: (0, ""), lambda state, turn: Step(state), tasks=lambda seed, index: {"n": index})
    with nrl.serve(env) as server:
        assert ask(server, "/task", {"seed": 0, "index": 5}).json() == {"task": {"n": 5}}
