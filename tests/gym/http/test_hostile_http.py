"""Clients of any kind at each kind of server: what they send is answered or refused, and harms no others."""

import asyncio
import contextlib
import json
import logging
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode, checks
from schemathesis.core.result import Ok

import nrl
from nrl.envs import Step, exact
from nrl.gym.cli import head_server
from nrl.gym.http import server_socket

KINDS = ("verifier", "environment", "head")
CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]
FEW, MANY = 8, 400
slow = pytest.mark.slow
ENDED = (ConnectionResetError, BrokenPipeError)


class Echo:
    """An environment with a state, which says everything again, also where it fails."""

    def reset(self, task: Any) -> Any:
        return 0, task.get("prompt", "")

    def step(self, state: int, turn: Any) -> Step:
        if turn.text.startswith("x"):
            raise ValueError(turn.text)
        return Step(state + 1, reward=1.0, done=state > 3, observation=str(turn))

    def tasks(self, seed: int, index: int) -> Any:
        return {"prompt": f"{seed % 10} {index}"}

    def close(self, state: int) -> None:
        pass


class Served(NamedTuple):
    kind: str
    url: str
    errors: list[str]  # of requests that no server expected

    @property
    def path(self) -> str:
        """One that takes a body, if one does."""
        return {"verifier": "/verify", "environment": "/reset", "head": "/servers"}[self.kind]

    def get(self, path: str, **options: Any) -> Any:
        return httpx2.get(self.url + path, trust_env=False, timeout=60, **options)

    def post(self, body: bytes) -> Any:
        return httpx2.post(self.url + self.path, content=body, trust_env=False, timeout=60)

    def connect(self) -> socket.socket:
        host, port = self.url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=60)

    def talk(self, sent: bytes) -> bytes:
        """What it answers to bytes that are all there is."""
        found = b""
        with self.connect() as connection, contextlib.suppress(*ENDED):
            with contextlib.suppress(*ENDED, OSError):  # it may have closed already
                connection.sendall(sent)
                connection.shutdown(socket.SHUT_WR)
            while more := connection.recv(65536):
                found += more
        return found

    def check(self) -> None:
        """It is well."""
        assert self.get("/health").status_code == 200
        assert self.errors == []


@contextlib.contextmanager
def a_head(ready: bool = True) -> Iterator[str]:
    """A head server, in a thread."""
    replica = {"number": 0, "url": "http://127.0.0.1:1", "state": "ready", "note": "", "since": 1.5, "restarts": 0}
    server = {
        "name": "a",
        "kind": "environment",
        "serves": "verifier",
        "executable": "system",
        "auth": "token",
        "state": "ready",
    }
    shown = [{**server, "replicas": [{**replica, "pid": 7}, {**replica, "pid": None, "url": None}]}]
    app = head_server.application(lambda: shown, lambda: ready, None)
    loop, stopped = asyncio.new_event_loop(), asyncio.Event()
    with server_socket.listening("127.0.0.1", 0, "a test") as on:
        thread = threading.Thread(target=loop.run_until_complete, args=(head_server.serving(app, on, stopped),))
        thread.start()
        try:
            yield f"http://127.0.0.1:{on.getsockname()[1]}"
        finally:
            loop.call_soon_threadsafe(stopped.set)
            thread.join()
            loop.close()


@pytest.fixture(scope="module", params=KINDS)
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    errors = list[str]()
    noted = logging.Handler(logging.ERROR)
    noted.emit = lambda record: errors.append(record.getMessage())  # type: ignore[method-assign]
    log, env = logging.getLogger("uvicorn.error"), Echo()
    with contextlib.ExitStack() as stack:
        if request.param == "head":
            url = stack.enter_context(a_head())
        else:
            f: Any = exact if request.param == "verifier" else env
            url = stack.enter_context(nrl.serve(f, largest=2**24)).url
        log.addHandler(noted)
        yield Served(request.param, url, errors)
        log.removeHandler(noted)
    assert errors == []


# --- What its description allows, and what it does not


def explore(served: Served, examples: int, token: str = "") -> set[int]:
    """Ask for all that a description allows, with the token if there is one; the statuses of the answers."""
    shown, statuses = {"Authorization": f"Bearer {token}"} if token else {}, set[int]()
    schema = schemathesis.openapi.from_dict(served.get("/openapi.json", headers=shown).json())
    with requests.Session() as session:
        session.trust_env = False
        for found in schema.get_all_operations():
            assert isinstance(found, Ok)
            operation: Any = found.ok()
            cases = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
            if operation.body:
                cases |= operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)

            @settings(
                max_examples=examples,
                deadline=None,
                derandomize=True,
                database=None,
                suppress_health_check=list(HealthCheck),
            )
            @given(cases, st.booleans())
            def check(case: Any, known: bool) -> None:
                if known and isinstance(case.body, dict) and "session" in case.body:
                    case.body = {**case.body, "session": "known"}
                case.headers.update(shown)
                found = case.call_and_validate(base_url=served.url, session=session, checks=CHECKS, timeout=60)
                statuses.add(found.status_code)

            if served.kind == "environment":
                asked: Any = {"session": "known", "task": {}}
                session.post(f"{served.url}/reset", json=asked, timeout=60, headers=shown)
            check()
    served.check()
    return statuses


def test_answers_are_as_described(served: Served) -> None:
    explore(served, FEW)


def test_answers_to_who_has_the_token_and_who_has_not_are_as_described() -> None:
    with nrl.serve(Echo(), largest=2**24, token="a-secret") as server:
        served = Served("environment", server.url, [])
        assert {200, 400, 401, 404} <= explore(served, FEW, "a-secret")  # it leaves out the token at times
        described = served.get("/openapi.json", headers={"authorization": "Bearer a-secret"}).json()
        for path, operations in described["paths"].items():
            for method, operation in operations.items():
                found = httpx2.request(method, server.url + path, trust_env=False)
                assert (found.status_code == 401) == (operation["security"] == [{"bearer": []}])
                schemathesis.openapi.from_dict(described)[path][method.upper()].validate_response(found)


@slow
def test_many_answers_are_as_described(served: Served) -> None:
    explore(served, MANY)


def test_a_head_that_is_not_ready_says_so_as_described() -> None:
    with a_head(ready=False) as url:
        schema = schemathesis.openapi.from_dict(httpx2.get(f"{url}/openapi.json", trust_env=False).json())
        response = httpx2.get(f"{url}/ready", trust_env=False)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "unready")
        schema["/ready"]["GET"].Case().validate_response(response, checks=CHECKS[1:])


def test_a_method_that_a_path_does_not_take_is_named_with_those_that_it_takes(served: Served) -> None:
    found = httpx2.request("DELETE", served.url + served.path, trust_env=False)
    assert (found.status_code, found.headers["allow"]) == (405, "GET, HEAD" if served.kind == "head" else "POST")
    found = httpx2.request("HEAD", f"{served.url}/health", trust_env=False)
    assert (found.status_code, found.text) == (200, "")


# --- Bodies


def nested(depth: int) -> bytes:
    return b'{"session":"deep","task":{"prompt":' + b"[" * depth + b"]" * depth + b'},"trace":{"turns":["4"]}}'


BODIES = {
    "nothing": b"",
    "half": b'{"session": "a", "task": {',
    "brackets": b"[" * 100_000,
    "pairs": b"[" * 100_000 + b"]" * 100_000,
    "objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "not UTF-8": b'{"session": "a", "task": {"a": "\xff\xfe"}}',
    "half a surrogate": b'{"session": "a", "task": {"prompt": "\\ud800"}, "trace": {"turns": ["\\udfff"]}}',
    "NaN": b'{"session": "a", "task": {"prompt": NaN}}',
    "Infinity": b'{"session": "a", "task": {"prompt": -Infinity}}',
    "a large float": b'{"session": "a", "task": {"prompt": 1e999}}',
    "many digits": b'{"session": "a", "task": {"prompt": ' + b"9" * 100_000 + b"}}",
    "NUL": b"\0" * 1000,
    "UTF-16": '{"session": "a"}'.encode("utf-16"),
    "twice the same key": b'{"session": "a", "session": 1, "task": []}',
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_what_is_no_request_is_refused(served: Served, body: bytes) -> None:
    if served.kind == "head":
        found = httpx2.request("GET", f"{served.url}/servers", content=body, trust_env=False, timeout=60)
        assert found.status_code == (400 if body else 200)
    else:
        found = served.post(body)
        assert 400 <= found.status_code < 500
    assert "error" in found.json() or not body
    served.check()


@pytest.mark.parametrize("depth", [10, 100, *range(150, 1200, 50), 2000, 5000])
def test_depth_that_can_be_read_but_not_written_is_refused(served: Served, depth: int) -> None:
    assert served.post(nested(depth)).status_code < 500
    said = {"text": "4", "malformed": [{"text": "", "reason": ""}], "calls": [{"name": "f", "arguments": {}}]}
    deep = json.dumps(said).replace('"arguments": {}', '"arguments": {"a":' + "[" * depth + "]" * depth + "}")
    if served.kind == "environment":
        served.post(b'{"session":"steps","task":{}}')
        body = b'{"session":"steps","turn":0,"action":%s}' % deep.encode()
        assert httpx2.post(f"{served.url}/step", content=body, trust_env=False, timeout=60).status_code < 500
    served.check()


def test_an_error_that_quotes_half_a_surrogate_can_be_told(served: Served) -> None:
    if served.kind == "environment":
        served.post(b'{"session":"quotes","task":{}}')
        text = {"$nrl": "text", "value": [0x78, 0xD800]}
        for action in (text, {"text": text}):
            body = json.dumps({"session": "quotes", "turn": 0, "action": action}).encode()
            found = httpx2.post(f"{served.url}/step", content=body, trust_env=False, timeout=60)
            assert 400 <= found.status_code < 500
    served.check()


@pytest.mark.parametrize("seconds", ["nan", "-nan", "inf", "-inf", "1e999", "-1", "", "0x1", "1" * 5000])
def test_strange_times_of_clients_are_no_harm(served: Served, seconds: str) -> None:
    body, headers = b'{"task":{},"session":"late"}', {"nrl-timeout": seconds}
    found = httpx2.post(served.url + served.path, content=body, headers=headers, trust_env=False, timeout=60)
    assert found.status_code < 500
    served.check()


# --- Bytes

TOKENS = st.sampled_from([
    b"GET ", b"POST ", b"CONNECT a:1", b"*", b"/", b"/health", b"/reset", b"/verify", b"/%ff%00", b"/\xc3\xa9", b"//",
    b" HTTP/1.1", b" HTTP/1.0", b" HTTP/9.9", b"\r\n", b"\r\n\r\n", b"\n", b"\r", b"host: localhost\r\n", b"\0", b": ",
    b"content-length: ", b"transfer-encoding: chunked\r\n", b"transfer-encoding: gzip, chunked\r\n", b"5", b"-1", b"0",
    b"18446744073709551616", b"expect: 100-continue\r\n", b"connection: upgrade\r\nupgrade: websocket\r\n", b"{}",
    b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"0\r\n\r\n",
    b"1\r\n{\r\n", b"ffffffffffffffff\r\n", b"5;a=b\r\nhello\r\n", b"authorization: \xff\r\n", b"a" * 5000,
])  # fmt: skip
START = st.sampled_from([
    b"", b"POST /reset HTTP/1.1\r\n", b"POST /verify HTTP/1.1\r\nhost: localhost\r\n", b"GET /servers HTTP/1.1\r\n",
    b"POST /reset HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n",
    b"POST /verify HTTP/1.1\r\ncontent-length: 20\r\ncontent-length: 5\r\n\r\n",
])  # fmt: skip
RAW = st.tuples(START, st.lists(TOKENS | st.binary(max_size=50), max_size=12).map(b"".join)).map(b"".join)


def throw(served: Served, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(RAW)
    def check(sent: bytes) -> None:
        assert not re.search(rb"HTTP/1\.1 5\d\d", served.talk(sent))

    check()
    served.check()


def test_bytes_of_any_kind_are_no_harm(served: Served) -> None:
    throw(served, 100)


@slow
def test_many_bytes_of_any_kind_are_no_harm(served: Served) -> None:
    throw(served, 10_000)


POST = b"POST %s HTTP/1.1\r\nhost: localhost\r\n"
BROKEN = {
    "no HTTP": b"hello\r\n\r\n",
    "TLS": bytes.fromhex("16030100c8010000c40303") + b"\0" * 40,
    "a length below zero": POST + b"content-length: -1\r\n\r\n",
    "a length that is too large to be one": POST + b"content-length: " + b"9" * 40 + b"\r\n\r\n",
    "two lengths": POST + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}x",
    "a length and chunks": POST + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "a chunk of no size": POST + b"transfer-encoding: chunked\r\n\r\nxyz\r\n",
    "a chunk that is too large to be one": POST + b"transfer-encoding: chunked\r\n\r\n" + b"f" * 17 + b"\r\n",
    "a chunk that is longer than it says": POST + b"transfer-encoding: chunked\r\n\r\n1\r\n{{{{\r\n",
    "a name with spaces": POST + b"a b: c\r\n\r\n",
}


@pytest.mark.parametrize("sent", BROKEN.values(), ids=BROKEN)
def test_what_is_no_http_is_refused(served: Served, sent: bytes) -> None:
    with served.connect() as connection:
        connection.sendall(sent.replace(b"%s", served.path.encode()))
        found = connection.recv(65536)
    assert re.match(rb"HTTP/1\.1 4\d\d", found)
    assert json.loads(found.split(b"\r\n\r\n")[1])["error"]["code"] == "invalid" or b" 405 " in found[:20]
    served.check()


# --- Too much


ENDLESS = {
    "headers": (b"GET /health HTTP/1.1\r\n", b"a: " + b"b" * 1000 + b"\r\n"),
    "a header": (b"GET /health HTTP/1.1\r\na: ", b"b" * 1000),
    "a path": (b"GET /", b"x" * 1000),
    "trailers": (POST + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n", b"a: " + b"b" * 1000 + b"\r\n"),
    "a trailer": (POST + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\na: ", b"b" * 1000),
    "the length of a chunk": (POST + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n", b"0" * 1000),
    "a body": (POST + b"content-length: 99999999999\r\n\r\n", b"[" * 1000),
    "chunks": (POST + b"transfer-encoding: chunked\r\n\r\n", b"3e8\r\n" + b"[" * 1000 + b"\r\n"),
    "requests": (b"", b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n"),
}


@pytest.mark.parametrize(("begin", "more"), ENDLESS.values(), ids=ENDLESS)
def test_what_never_ends_is_cut_off_though_no_answer_is_read(
    served: Served, begin: bytes, more: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_socket, "SLOWEST", 0.2)  # until a connection is closed of which nothing is read
    with served.connect() as connection:
        connection.sendall(begin.replace(b"%s", served.path.encode()))
        with contextlib.suppress(*ENDED):
            while True:  # or the time limit of a test
                connection.sendall(more * 64)
    served.check()


def test_who_reads_no_answer_is_left_while_others_are_served(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    lost, of_client, known = threading.Event(), list[int](), server_socket._Bounded.connection_lost

    def noted(self: Any, error: Exception | None) -> None:
        known(self, error)
        if self.client[1] in of_client:
            lost.set()

    monkeypatch.setattr(server_socket._Bounded, "connection_lost", noted)
    monkeypatch.setattr(server_socket, "SLOWEST", 0.5)
    if served.kind == "environment":  # the others have no answer that the system would not hold
        body = json.dumps({"session": "large", "task": {"prompt": "x" * 15_000_000}}).encode()
        sent = POST % b"/reset" + b"content-length: %d\r\n\r\n" % len(body) + body
    else:
        sent = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * 60
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = served.url.removeprefix("http://").split(":")
        connection.connect((host, int(port)))
        of_client.append(connection.getsockname()[1])
        connection.sendall(sent)
        served.check()
        if served.kind == "environment":
            assert lost.wait(60)
        served.check()


@slow
def test_memory_stays_bounded(served: Served) -> None:
    def resident() -> int:
        return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1]) // 1024  # type: ignore[index]

    served.check()
    before = resident()
    for _ in range(20):
        for begin, more in ENDLESS.values():
            with served.connect() as connection, contextlib.suppress(*ENDED, TimeoutError):
                connection.settimeout(1)
                connection.sendall(begin.replace(b"%s", served.path.encode()))
                for _ in range(200):
                    connection.sendall(more * 64)
    served.check()
    assert resident() - before < 300
