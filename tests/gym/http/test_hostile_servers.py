"""What hostile clients send to each of the three servers, in processes of their own: seconds, memory, and the log."""

import contextlib
import gzip
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nrl import tiny
from tests.http_clients import Reply, Server, request

pytestmark = pytest.mark.slow
KINDS = ("serve", "endpoint", "gym")
SECONDS, MEBIBYTES = 1.0, 50.0
KEY = "a-key-that-nobody-guesses"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "2+2="}], "max_tokens": 2}
ENDPOINT = """
import sys, nrl
from nrl import tiny
from nrl.backends import hf

def agent(task, endpoint):
    print(endpoint.base_url, endpoint.api_key, flush=True)
    sys.stdin.read()
    return 0.0

with nrl.cluster("local") as cluster:
    model = tiny.model(tokenizer=tiny.bpe(["user assistant 2+2= 4", tiny.CHATML]))
    sampler = hf.sampler(cluster.reserve(1), model, nrl.Sampling(max_new_tokens=2))
    nrl.rollout(sampler, nrl.driven(agent, timeout=None), [{"prompt": "Hi"}])
"""


class Target(NamedTuple):
    kind: str
    server: Server
    path: str  # that takes a body
    key: str  # of a client that may ask; empty: it needs none
    stranger: str  # the path as one asks who has no key

    def body(self, **fields: Any) -> bytes:
        """A request that is answered but for these fields."""
        own: Any = {"task": {"answer": "4"}, "trace": {"turns": ["4"]}} if self.kind == "gym" else CHAT
        return json.dumps({**own, **fields}).encode()

    def raw(self, field: str, value: bytes) -> bytes:
        """The same with a field as it is written."""
        if self.kind == "gym":
            return b'{"trace":{"turns":["4"]},"task":{"answer":"4","%s":%s}}' % (field.encode(), value)
        return self.body()[:-1] + b',"%s":%s}' % (field.encode(), value)

    def ask(self, body: bytes, seconds: float = 30.0, **headers: str) -> Reply:
        bearer = f"Bearer {self.key}" if self.key else ""
        return self.server.ask(request(self.path, body, authorization=bearer, **headers), seconds)

    def check(self) -> None:
        """It answers, and nothing in its log is a traceback, or an error that nobody has looked at."""
        assert self.server.ask(request("/health", method="GET")).status == 200
        log = self.server.log.read_text()
        assert "Traceback" not in log
        assert "never retrieved" not in log


@pytest.fixture(scope="module", params=KINDS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder, kind = tmp_path_factory.mktemp("hostile"), request.param
    log = folder / "stderr"
    order = b""
    if kind == "serve":
        model = tiny.model(tokenizer=tiny.bpe(["user assistant 2+2= 4", tiny.CHATML]), max_position_embeddings=4096)
        tiny.save(model, folder / "small")
        command = [sys.executable, "-m", "nrl", "serve", str(folder / "small"), "port=0", "name=small"]
    elif kind == "endpoint":
        command = [sys.executable, "-c", ENDPOINT]
    else:
        command = [sys.executable, "-m", "nrl.gym.http.process"]
        order = json.dumps({"environment": "exact", "token": KEY, "largest": 2**24}).encode() + b"\n"
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdin=-1, stdout=-1, stderr=errors, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(order.decode())
    process.stdin.flush()
    said = next((line for line in process.stdout if "http://" in line), "")
    assert said, log.read_text()
    server = Server(process, said, log)
    if kind == "endpoint":
        session = said.split()[1]
        yield Target(kind, server, f"/s/{session}/v1/chat/completions", "", "/v1/chat/completions")
    elif kind == "serve":
        yield Target(kind, server, "/v1/chat/completions", "", "/v1/chat/completions")
    else:
        yield Target(kind, server, "/verify", KEY, "/verify")
    process.terminate()
    process.stdin.close()
    try:
        process.wait(30)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert "Traceback" not in log.read_text()


@contextlib.contextmanager
def within_budget(target: Target, seconds: float = SECONDS) -> Iterator[list[Reply]]:
    """Whatever the replies in the list are, they came within the budget of time and memory; and the server is well."""
    assert target.server.ask(request("/health", method="GET")).status == 200
    replies = list[Reply]()
    with target.server.measured() as more:
        yield replies
    assert replies
    assert max(reply.seconds for reply in replies) < seconds
    assert more[0] < MEBIBYTES
    target.check()


MANY = 20_000_000
BODIES: dict[str, Any] = {
    "a stop of 3 MB": lambda of: of.body(stop="x" * 3_000_000),
    "100,000 stops": lambda of: of.body(stop=[f"stop {number}" for number in range(100_000)]),
    "2,000 stops": lambda of: of.body(stop=[f"stop {number}" for number in range(2_000)]),
    "60 MB of {},": lambda of: b"{}," * MANY,
    "60 MB of {}, in a list": lambda of: b"[" + b"{}," * MANY + b"{}]",
    "60 MB of {}, in a field": lambda of: of.raw("metadata", b"[" + b"{}," * MANY + b"{}]"),
    "7 MB of {}, in a field": lambda of: of.raw("metadata", b"[" + b"{}," * 2_300_000 + b"{}]"),
    # Numbers are what a gym's requests have many of
    "7 MB of numbers": lambda of: of.raw(
        "metadata", b"[" + b"300," * (10**6 if of.kind == "gym" else 1_700_000) + b"1]"
    ),
    "7 MB of texts": lambda of: of.raw("metadata", b"[" + b'"",' * 2_300_000 + b"1]"),
    "7 MB of keys": lambda of: of.raw("metadata", b'{"a":1,' * 1_000_000 + b'"b":1}'),
    "brackets": lambda of: of.raw("metadata", b"[" * 5_000_000),
    "pairs of brackets": lambda of: of.raw("metadata", b"[" * 100_000 + b"]" * 100_000),
    "quotes that never end": lambda of: b'{"a":"' + b'\\"' * 3_000_000,
    "no UTF-8": lambda of: of.raw("model", b'"\xff\xfe"'),
    "half a surrogate": lambda of: of.raw("messages", b'[{"role":"user","content":"\\ud800"}]'),
    "a text that fills the context": lambda of: of.raw(
        "messages", b'[{"role":"user","content":"%s"}]' % (b"2+2= 4 " * 1_000_000)
    ),
    "30,000 messages": lambda of: of.raw("messages", b"[" + b'{"role":"user"},' * 30_000 + b'{"role":"user"}]'),
    "10,000 tools": lambda of: of.raw("tools", b"[" + b'{"type":"function"},' * 10_000 + b"{}]"),
    "arguments of {},": lambda of: of.raw(
        "messages",
        b'[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"{\\"a\\":[%s1]}"}}]},{"role":"user"}]'
        % (b"{}," * 2_000_000),
    ),
    "a number of 5 MB": lambda of: of.raw("seed", b"9" * 5_000_000),
    "a name of 5 MB": lambda of: of.body(model="m" * 5_000_000),
    "the same key a million times": lambda of: of.body()[:-1] + b',"n":1' * 1_000_000 + b"}",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_body_of_any_kind_is_answered_within_the_budget(target: Target, body: Any) -> None:
    sent = body(target)
    with within_budget(target) as replies:
        replies.append(target.ask(sent))
        assert replies[0].status >= 400 or target.kind == "gym"
        assert replies[0].status < 500


FIELDS: dict[str, bytes] = {
    "n": b"0 -1 129 1.5 true NaN",
    "temperature": b"1e-300 -1 NaN Infinity 1e999 101 true",
    "top_p": b"0 -1 1.1 1e-300 NaN",
    "top_k": b"-2 1.5 1e308",
    "max_tokens": b"0 -1 1.5 1e308 99999999999999999999",
    "max_completion_tokens": b"0 -1",
    "seed": b"1.5 9223372036854775808 -9223372036854775809 99999999999999999999999999999999999999999999999",
    "logprobs": b"5 -1",
    "top_logprobs": b"21 -1 1.5",
    "logit_bias": b'5 {"5":101} {"5":null} {"5":NaN}',
    "frequency_penalty": b"3 -3 NaN",
    "stop": b'5 {} [1] ["a","a","a","a","a","a","a","a","a","a","a","a","a","a","a","a","a"]',
    "stream": b'1 "yes"',
    "model": b"5 []",
    "tools": b"5 {}",
    "messages": b"5 [] {}",
}


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_out_of_its_range_is_named(target: Target, field: str) -> None:
    if target.kind == "gym":  # whose fields are those of its records, which its description has
        return
    for value in FIELDS[field].split(b" "):
        with within_budget(target) as replies:
            reply = target.ask(target.raw(field, value))
            replies.append(reply)
            assert (reply.status, reply.error["type"]) == (400, "invalid_request_error"), value
            assert reply.error["param"].split("[")[0].split(".")[0] == field
            assert field in reply.error["message"]


def test_paths_methods_and_models_are_told(target: Target) -> None:
    health = target.server.ask(request("/health", method="HEAD"))
    assert (health.status, health.body) == (200, b"")
    bearer = f"Bearer {target.key}" if target.key else ""
    unknown = target.server.ask(request("/v1/nothing", b"{}", authorization=bearer))
    assert (unknown.status, "error" in json.loads(unknown.body)) == (404, True)
    wrong = target.server.ask(request(target.path, method="DELETE", authorization=bearer))
    assert (wrong.status, wrong.headers["allow"]) == (405, "POST")
    if target.kind != "gym":
        reply = target.ask(target.body(model="gpt-9"))
        assert (reply.status, reply.error["code"], reply.error["param"]) == (404, "model_not_found", "model")
    target.check()


def test_other_hosts_and_sites_are_refused(target: Target) -> None:
    strangers: list[dict[str, Any]] = [
        {"host": "evil.example"},
        {"host": "evil.example:8000"},
        {"host": "localhost.evil.example"},
        {"host": "localhost", "origin": "http://evil.example"},
        {"host": "localhost", "origin": "null"},
        {"host": "localhost:1", "origin": "http://localhost:2"},
    ]
    for headers in strangers:
        with within_budget(target) as replies:
            replies.append(target.ask(target.body(), **headers))
            assert replies[0].status == 403, headers
            assert replies[0].error["message"]
    assert target.ask(target.body(), host="127.0.0.1:1", origin="http://127.0.0.1:1").status == 200


def test_thirty_half_bodies_of_sixty_megabytes(target: Target) -> None:
    """Of clients without a key, or of anybody where none is asked for."""
    head = request(target.stranger, content_length="60000000")
    with within_budget(target) as replies:
        threads = [
            threading.Thread(target=lambda: replies.append(target.server.ask(head + b"[" * 30_000_000)))
            for _ in range(30)
        ]
        for thread in threads:
            thread.start()
        began = time.monotonic()
        assert target.server.ask(request("/health", method="GET")).status == 200
        assert time.monotonic() - began < SECONDS
        for thread in threads:
            thread.join()
        assert {reply.status for reply in replies} <= {401, 413}


def test_half_bodies_within_the_limit_leave_room_for_others(target: Target) -> None:
    """As many as they are, they fill no more memory than some of them, and others are answered."""
    head = request(target.path, authorization=f"Bearer {target.key}" if target.key else "", content_length="8000000")
    with contextlib.ExitStack() as stack, target.server.measured() as more:
        for _ in range(20 if target.kind != "gym" else 5):
            connection = stack.enter_context(target.server.connect())
            connection.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                connection.send(head + b"[" * 4_000_000)
        began = time.monotonic()
        assert target.ask(target.body()).status == 200
        assert time.monotonic() - began < SECONDS
        large = target.ask(target.body(metadata={"a": "x" * 100_000}))
        assert large.status in (200, 400)
        assert large.seconds < 10
    assert more[0] < MEBIBYTES
    target.check()


def test_one_byte_a_second_is_cut_off_and_nobody_waits(target: Target) -> None:
    head = request(target.path, authorization=f"Bearer {target.key}" if target.key else "", content_length="5000")
    with target.server.connect(60) as slow, target.server.connect(60) as slower:
        slow.sendall(head)
        slower.sendall(head[:20])
        began, ended = time.monotonic(), dict[Any, float]()
        while len(ended) < 2 and time.monotonic() - began < 60:
            for connection, sent in ((slow, b" "), (slower, head[20:21])):
                try:
                    connection.sendall(sent)
                    connection.settimeout(0.01)
                    if not connection.recv(1000):
                        raise ConnectionResetError
                except TimeoutError:
                    pass
                except OSError:
                    ended.setdefault(connection, time.monotonic() - began)
            assert target.ask(target.body()).seconds < SECONDS
            time.sleep(1.0)
        assert len(ended) == 2
        assert max(ended.values()) < 45
    target.check()


ENDLESS: dict[str, tuple[str, bytes]] = {
    "chunks": ("POST", b"3e8\r\n" + b"[" * 1000 + b"\r\n"),
    "headers": ("", b"a: " + b"b" * 1000 + b"\r\n"),
    "a path": ("GET /", b"x" * 1000),
    "requests": ("", b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_what_never_ends_is_cut_off(target: Target, what: str) -> None:
    begin, more = ENDLESS[what]
    sent = begin.encode()
    if what == "chunks":
        bearer = f"Bearer {target.key}" if target.key else ""
        sent = request(target.path, authorization=bearer, transfer_encoding="chunked")
    if what == "headers":
        sent = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
    with within_budget(target, 45.0) as replies:
        began, size = time.monotonic(), 0
        with target.server.connect(40) as connection, contextlib.suppress(OSError):
            connection.sendall(sent)
            while size < 300_000_000:
                connection.sendall(more * 64)
                size += len(more) * 64
        replies.append(Reply(0, {}, b"", time.monotonic() - began))
        assert size < 300_000_000


def test_bodies_that_are_not_as_they_say(target: Target) -> None:
    bomb = gzip.compress(b"[" * 50_000_000)
    bearer = f"Bearer {target.key}" if target.key else ""
    longer = request(target.path, target.body() + b"x" * 100_000, authorization=bearer, content_length="20")
    with within_budget(target) as replies:
        replies.append(target.ask(bomb, content_encoding="gzip"))
        assert replies[0].status == 415
        replies.append(target.ask(bomb, content_type="application/gzip"))
        assert replies[1].status == 400
        replies.append(target.server.ask(longer))
        assert replies[2].status == 400
        with target.server.connect() as connection:  # less than it says, and then nothing
            connection.sendall(request(target.path, b"{", authorization=bearer, content_length="2000"))
    assert target.ask(target.body(), content_type="text/plain").status == 200


def test_many_idle_connections_keep_nobody_out(target: Target) -> None:
    with contextlib.ExitStack() as stack, within_budget(target) as replies:
        for _ in range(800):
            stack.enter_context(target.server.connect())
        replies.append(target.ask(target.body()))
        assert replies[0].status == 200


def test_a_client_that_hangs_up_leaves_no_trace(target: Target) -> None:
    bearer = f"Bearer {target.key}" if target.key else ""
    whole = request(target.path, target.body(), authorization=bearer)
    streamed = request(target.path, target.body(stream=True), authorization=bearer)
    for sent in (whole[:10], whole[:-5], whole, streamed, whole * 20, whole + whole[:30]):
        for reset in (False, True):
            with target.server.connect() as connection:
                if reset:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                connection.sendall(sent)
    time.sleep(2.0)
    target.check()


def test_work_ends_when_its_client_has_left(target: Target) -> None:
    """Of `nrl serve`: an agent that asks the same again gets the answer of its episode, which goes on."""
    if target.kind != "serve":
        return
    for fields in ({}, {"stream": True}, {"n": 8}):
        sent = request(target.path, target.body(**fields, max_tokens=4000, temperature=1.0))
        for many in (sent, sent + sent):  # the second waits for the first
            with target.server.connect() as connection:
                connection.sendall(many)
                time.sleep(1.0)
            reply = target.ask(target.body())
            assert (reply.status, reply.seconds < SECONDS) == (200, True)
            before = target.server.cpu_seconds()
            time.sleep(1.0)
            assert target.server.cpu_seconds() - before < 0.3


def test_an_answer_that_is_not_read_is_no_burden(target: Target) -> None:
    if target.kind != "serve":
        return
    with target.server.connect() as connection, within_budget(target) as replies:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = target.body(n=128, logprobs=True, stream=True)
        connection.sendall(request(target.path, body) * 10)
        time.sleep(5.0)
        replies.append(target.ask(target.body()))
        assert replies[0].status == 200


def test_open_files_that_are_used_up_end_what_is_too_much_and_nothing_else(tmp_path: Path) -> None:
    order = json.dumps({"environment": "exact"}) + "\n"
    command = ["bash", "-c", f"ulimit -n 160; exec {sys.executable} -m nrl.gym.http.process"]
    with (tmp_path / "stderr").open("w") as errors:
        process = subprocess.Popen(command, stdin=-1, stdout=-1, stderr=errors, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(order)
    process.stdin.flush()
    server = Server(process, process.stdout.readline(), tmp_path / "stderr")
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(400):
                stack.enter_context(server.connect())
            time.sleep(0.5)
            before = server.cpu_seconds()
            time.sleep(1.0)
            assert server.cpu_seconds() - before < 0.3
        time.sleep(0.5)
        assert server.ask(request("/health", method="GET")).status == 200
        assert "Traceback" not in server.log.read_text()
    finally:
        process.terminate()
        process.stdin.close()
        process.wait(30)
        process.stdout.close()
