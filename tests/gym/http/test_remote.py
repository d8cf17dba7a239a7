"""`remote`: connections that break, servers that die, and clients that leave; each call acts once."""

import asyncio
import contextlib
import gc
import json
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, cast

import aiohttp
import pytest

import nrl
import nrl.errors
from nrl.envs import STATUSES, Environment, Step, Trace, Turn, exact, of_group, single_turn
from nrl.envs.references import task_check
from nrl.errors import ConsumedState, DataError, EnvError, ForeignState
from nrl.gym.http import client, remote_env
from nrl.gym.http.remote_env import RemoteState
from nrl.gym.http.serve_app import Server
from tests.rollout.scripted import Scripted


def run(value: Any) -> Any:
    async def awaited() -> Any:
        return await value

    return asyncio.run(awaited())


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class Counting:
    """An environment that counts its calls; its reward is how many turns it has seen in this episode."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.go, self.waits = threading.Event(), threading.Event()

    def reset(self, task: Any) -> Any:
        self.calls.append("reset")
        self._wait(task.get("wait"))
        return 0, "?"

    def step(self, state: int, turn: Turn) -> Step:
        self.calls.append(f"step {turn.text}")
        self._wait(turn.text == "wait")
        return Step(state + 1, reward=float(state + 1), done=turn.text == "end", observation="?")

    def close(self, state: int) -> None:
        self.calls.append("close")

    def verifier(self, task: Any, trace: Trace) -> float:
        self.calls.append("verify")
        self._wait(trace.text == "wait")
        return 0.5

    def _wait(self, really: Any) -> None:
        if really:
            self.waits.set()
            assert self.go.wait(60)


@pytest.fixture
def env() -> Iterator[Counting]:
    made = Counting()
    yield made
    made.go.set()


class Always(Scripted):
    """One text, to however many prompts."""

    def generate(self, prompts: Any, *, seeds: Any = None, sampling: Any = None) -> Any:
        return Scripted(self.texts * len(prompts)).generate(prompts)


class Relay:
    """Passes connections on to a server, and breaks one after it has passed so many bytes of the answer to a path."""

    def __init__(self, server: Server) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        self._there = host, int(port)
        self._cut: dict[bytes, int] = {}
        self.cuts = 0
        self._on = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._on.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, path: str, times: int, passed: int = 0) -> None:
        """Break the next connections over which the path is asked for, once its answer has begun."""
        self._cut, self._passed = {path.encode(): times}, passed

    def close(self) -> None:
        self._on.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                own, _ = self._on.accept()
                threading.Thread(target=self._pass, args=(own,), daemon=True).start()

    def _pass(self, own: socket.socket) -> None:
        with own, socket.create_connection(self._there) as other, contextlib.suppress(OSError):
            while asked := own.recv(1 << 20):
                path = asked.split(b" ")[1]
                other.sendall(asked)
                while b"\r\n\r\n" not in asked or not _whole(asked):
                    asked += (more := own.recv(1 << 20))
                    other.sendall(more)
                answer = other.recv(1 << 20)
                while b"\r\n\r\n" not in answer or not _whole(answer):
                    answer += other.recv(1 << 20)
                # it has acted
                if self._cut.get(path, 0):
                    self._cut[path] -= 1
                    self.cuts += 1
                    own.sendall(answer[: self._passed])
                    own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset, no end
                    return
                own.sendall(answer)


def _whole(asked: bytes) -> bool:
    head, _, body = asked.partition(b"\r\n\r\n")
    lengths = [int(line.split(b":")[1]) for line in head.lower().splitlines() if line.startswith(b"content-length:")]
    return len(body) >= (lengths or [0])[0]


@pytest.fixture
def relay(env: Counting) -> Iterator[Relay]:
    with nrl.serve(env) as server:
        made = Relay(server)
        yield made
        made.close()


# --- Connections that break


@pytest.mark.parametrize("passed", [0, 10])
@pytest.mark.parametrize("path", ["/reset", "/step", "/close", "/verify"])
def test_what_is_lost_after_the_server_has_acted_acts_once(relay: Relay, env: Counting, path: str, passed: int) -> None:
    there = nrl.remote(relay.url)
    relay.cut(path, times=3, passed=passed)

    async def play() -> list[Any]:
        state, prompt = await there.reset({})
        first = await there.step(state, Turn("a"))
        second = await there.step(first.state, Turn("end"))
        verdict = await there.verifier({}, Trace("", ["x"]))
        await there.close(second.state)
        return [prompt, first.reward, second.reward, second.done, verdict]

    assert run(play()) == ["?", 1.0, 2.0, True, 0.5]
    assert relay.cuts == 3
    assert env.calls == ["reset", "step a", "step end", "verify", "close"]


def test_a_whole_rollout_over_connections_that_break(relay: Relay, env: Counting) -> None:
    there = nrl.remote(relay.url)
    for path in ("/reset", "/step", "/close"):
        relay.cut(path, times=2)
        batch = nrl.rollout(Always(["end"]), there, [{}] * 4)
        assert batch["valid"].all()
        assert batch["rewards"].tolist() == [1.5] * 4  # of a step and the verifier
    assert {each: env.calls.count(each) for each in ("reset", "step end", "close")} == dict.fromkeys(
        ("reset", "step end", "close"), 12
    )


def test_a_state_is_used_once() -> None:
    """By who asks again with another action, after a server has gone on."""
    with nrl.serve(Counting()) as server:
        there = nrl.remote(server)

        async def play() -> None:
            state, _ = await there.reset({})
            assert isinstance(state, RemoteState)
            await there.step(state, Turn("a"))
            await there.step(state, Turn("a"))
            with pytest.raises(ConsumedState, match=f"{server.url}: step: turn 0 of the session .* was taken already"):
                await there.step(state, Turn("b"))
            await there.close(state)
            with pytest.raises(ConsumedState, match="is closed; reset another"):
                await there.step(state, Turn("a"))
            lost = state._replace(session="unknown")
            with pytest.raises(ForeignState, match="the session unknown is not known here"):
                await there.step(lost, Turn("a"))
            await there.close(lost)  # there is nothing to give back

        run(play())


# --- Servers that answer otherwise, or not


class Says:
    """A server that gives one answer after the other; the last one for ever."""

    def __init__(self, *answers: tuple[int, Any, dict[str, str]]) -> None:
        self.answers, self.asked = list(answers), list[bytes]()
        self._on = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._on.getsockname()[1]}"
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._on.accept()
                with connection:
                    asked = b""
                    while b"\r\n\r\n" not in asked or not _whole(asked):
                        asked += connection.recv(1 << 16)
                    self.asked.append(asked)
                    status, body, headers = self.answers[0]
                    del self.answers[: len(self.answers) > 1]
                    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
                    lines = [f"HTTP/1.1 {status} X", f"content-length: {len(sent)}", "connection: close"]
                    lines += [f"{name}: {value}" for name, value in headers.items()]
                    connection.sendall("\r\n".join([*lines, "", ""]).encode() + sent)

    def close(self) -> None:
        self._on.close()


INFO = {
    "protocol": 1, "name": "it", "kind": "verifier", "verifies": True, "of_group": False, "tasks": False,
    "extracts": False, "timeout": 5.0, "lease": 60.0,
}  # fmt: skip
ONE = {"verdict": {"reward": 1.0}}


@contextlib.contextmanager
def saying(*answers: Any) -> Iterator[Says]:
    full = [each if isinstance(each, tuple) else (200, each, {}) for each in answers]
    made = Says(*((*each, {})[:3] for each in full))
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_server_that_is_busy_is_asked_again(status: int) -> None:
    busy = (status, {"error": {"code": "busy", "kind": "EnvError", "message": "later"}}, {"retry-after": "0.01"})
    with saying(INFO, busy, busy, ONE) as says:
        assert run(nrl.remote(says.url)({}, Trace())) == 1.0
        assert len(says.asked) == 4
        assert len({each.partition(b"\r\n\r\n")[2] for each in says.asked[1:]}) == 1  # the same call


def test_a_server_that_is_busy_for_ever_is_told_of() -> None:
    busy = (429, {"error": {"code": "busy", "kind": "EnvError", "message": "later"}}, {"retry-after": "0.01"})
    with saying({**INFO, "timeout": None}, busy) as says:
        there = nrl.remote(says.url, patience=0.05)
        with pytest.raises(
            EnvError,
            match=rf"remote: {says.url} has been too busy for /verify for [\d.]+ s; give it more replicas or a larger "
            r"most=, or give remote\(patience=\) more seconds, of which it waits 10 times as many",
        ):
            run(there({}, Trace()))
        assert len(says.asked) > 2


def test_a_server_that_is_busy_for_longer_than_patience_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_BUSIEST", 10_000)  # so that a slow machine passes, too
    with saying(INFO, *[(429, b"", {"retry-after": "0.01"})] * 12, ONE) as says:
        assert run(nrl.remote(says.url, patience=0.2)({}, Trace())) == 1.0
        assert len(says.asked) == 14


def test_each_attempt_says_what_time_is_left() -> None:
    """Whatever came of the last one: told to come again, told by a proxy that nobody is there, or cut off."""
    with saying(INFO, (429, b""), (503, b""), (200, b"short", {"content-length": "100"}), ONE) as says:
        assert run(nrl.remote(says.url)({}, Trace())) == 1.0
        assert len(says.asked) == 5
        left = [float(re.findall(rb"nrl-timeout: ([\d.]+)\r\n", each.lower())[0]) for each in says.asked[1:]]
    assert left == sorted(left, reverse=True)
    assert len(set(left)) == 4
    assert 5 + 30 < left[-1] < left[0] <= 5 + 30 + 10 * 60  # of a call, half a minute, and ten times the patience


def test_a_date_to_come_again_is_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = list[float]()
    slept = asyncio.sleep

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        await slept(0)

    with saying(INFO, (429, b"", {"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}), ONE) as says:
        there = nrl.remote(says.url)
        monkeypatch.setattr(asyncio, "sleep", sleep)
        assert run(there({}, Trace())) == 1.0
    assert 0.5 <= pauses[0] <= 1.5  # with jitter


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        ((401, {"error": {"code": "unauthorized", "kind": "EnvError", "message": "no token"}}), EnvError, "no token"),
        ((500, b"<html>oh no"), EnvError, "answered with the status 500: '<html>oh no'"),
        ((422, {"error": {"code": "failed", "kind": "ZeroDivisionError", "message": "no"}}), ZeroDivisionError, "^no$"),
        ((422, {"error": {"code": "failed", "kind": "KeyError", "message": "'a b'"}}), KeyError, "^'a b'$"),
        ((422, {"error": {"code": "failed", "kind": "KeyError", "message": "a b"}}), EnvError, "^KeyError: a b$"),
        ((422, {"error": {"code": "failed", "kind": "DataError", "message": "m"}}), nrl.errors.DataError, "^m$"),
        ((422, {"error": {"code": "failed", "kind": "LostActor", "message": "m"}}), EnvError, "^LostActor: m$"),
        ((422, {"error": {"code": "failed", "kind": "Own", "message": "m"}}), EnvError, "^Own: m$"),
        ((422, {"error": {"code": "failed", "kind": "print", "message": "m"}}), EnvError, "^print: m$"),
        ((422, {"error": {"code": "failed", "kind": "SystemExit", "message": "3"}}), RuntimeError, "^SystemExit: 3$"),
        ((422, {"error": {"code": "failed", "kind": "StopIteration", "message": ""}}), RuntimeError, "StopIteration"),
        ((200, b"{"), EnvError, "the answer of http://.* cannot be read: Input data was truncated"),
        ((200, {"verdicts": None}), EnvError, "remote: it has given no verdict"),
    ],
)
def test_what_a_server_refuses_is_raised(answer: Any, error: type[Exception], message: str) -> None:
    with saying(INFO, answer) as says, pytest.raises(error, match=message) as caught:
        run(nrl.remote(says.url)({}, Trace()))
    assert type(caught.value) is error


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((404, {"error": {"code": "unknown", "kind": "EnvError", "message": "never seen"}}), None),
        ((500, {"error": {"code": "raised", "kind": "OSError", "message": "no space"}}), "no space"),
    ],
)
def test_an_episode_that_a_server_does_not_know_has_ended(answer: Any, message: str | None) -> None:
    with saying({**INFO, "kind": "environment", "verifies": False}, answer) as says:
        env = nrl.remote(says.url)
        with contextlib.nullcontext() if message is None else pytest.raises(OSError, match=message):
            run(env.close(RemoteState(says.url, "gone", 0)))


def test_few_connections_are_made_at_a_time_and_many_may_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verifier answers nobody before all have come."""
    making, most, whole = 0, 0, aiohttp.TCPConnector.connect
    together = threading.Barrier(20, timeout=60)

    async def connect(self: Any, *args: Any, **how: Any) -> Any:
        nonlocal making, most
        making += 1
        most = max(most, making)
        try:
            return await whole(self, *args, **how)
        finally:
            making -= 1

    def verify(task: Any, trace: Trace) -> float:
        together.wait()
        return float(trace.text)

    monkeypatch.setattr(client, "_MAKING", 3)
    monkeypatch.setattr(aiohttp.TCPConnector, "connect", connect)
    with nrl.serve(verify) as server:
        there = nrl.remote(server.url)

        async def all_at_once() -> Any:
            return await asyncio.gather(*(there({}, Trace("", [str(n)])) for n in range(20)))

        assert asyncio.run(all_at_once()) == [float(n) for n in range(20)]
    assert 1 < most <= 3


def test_no_more_calls_are_under_way_than_there_may_be_connections() -> None:
    now, most = 0, 0

    async def slow(task: Any, trace: Trace) -> float:
        nonlocal now, most
        now, most = now + 1, max(most, now + 1)
        await asyncio.sleep(0.01)
        now -= 1
        return 1.0

    async def all_of(verifier: Any) -> Any:
        return await asyncio.gather(*(verifier({}, Trace()) for _ in range(20)))

    with nrl.serve(slow) as server:
        assert run(all_of(nrl.remote(server, connections=3))) == [1.0] * 20
    assert 1 < most <= 3


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ((404, b"nothing here"), "answered with the status 404: 'nothing here'"),
        ((200, b"<html>"), "is no server of nrl; give the address of one that `serve` made"),
        ({**INFO, "protocol": 7}, "speaks version 7 of the protocol, and this is 1; install the same version of nrl"),
    ],
)
def test_what_is_no_server_is_told_at_once(info: Any, message: str) -> None:
    with saying(info) as says, pytest.raises(EnvError, match=message):
        nrl.remote(says.url)


def test_a_wrong_token_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with nrl.serve(exact, token="right") as server:
        monkeypatch.setenv("NRL_GYM_TOKEN", "wrong")
        with pytest.raises(EnvError, match=f"^{server.url}: the token is missing or wrong"):
            nrl.remote(server.url)
        assert run(nrl.remote(server)({"answer": "4"}, Trace("", ["4"]))) == 1.0  # it knows its own
        monkeypatch.setenv("NRL_GYM_TOKEN", "right")
        assert run(nrl.remote(server.url)({"answer": "4"}, Trace("", ["4"]))) == 1.0
        assert run(nrl.remote(server.url, token="right")({"answer": "4"}, Trace("", ["4"]))) == 1.0


def test_a_token_goes_where_it_was_given_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each server's own to it; that of the environment to addresses; none through a redirect, or with a state."""
    monkeypatch.setenv("NRL_GYM_TOKEN", "of-all")

    def shown(says: Says) -> set[bytes]:
        return {each for asked in says.asked for each in re.findall(rb"[Aa]uthorization: Bearer (\S+)", asked)}

    env = {**INFO, "kind": "environment"}
    with saying(env) as elsewhere, saying((307, b"", {"location": f"{elsewhere.url}/info"})) as moved:
        with pytest.raises(EnvError, match="answered with the status 307"):
            nrl.remote(moved.url)
        assert (shown(moved), elsewhere.asked) == ({b"of-all"}, [])
    with saying({**env, "prompt": "?"}) as one, saying({**env, "prompt": "?"}) as other:
        there = nrl.remote([Server(one.url, "own", None), other.url])
        run(_resets_only(there, 8))
        assert (shown(one), shown(other)) == ({b"own"}, {b"of-all"})
    with saying(env) as one, saying(env) as open_, saying(env) as given:
        there = nrl.remote(one.url, token="")
        nrl.remote(Server(open_.url, None, None))
        assert (shown(one), shown(open_)) == (set(), set())
        nrl.remote([given.url], token="given")
        assert shown(given) == {b"given"}
        for call in (there.step(RemoteState(given.url, "s", 0), Turn("")), there.close(RemoteState(given.url, "s", 0))):
            with pytest.raises(ForeignState, match=f"one of {given.url}, and this client has {one.url}; go on with"):
                run(call)
        assert len(given.asked) == 1


async def _resets_only(there: Any, n: int) -> None:
    await asyncio.gather(*(there.reset({}) for _ in range(n)))


@pytest.mark.parametrize(
    ("server", "options", "error", "message"),
    [
        ([], {}, ValueError, "remote: there is no server; give the address of at least one"),
        ("localhost:8000", {}, EnvError, "remote: 'localhost:8000' is no address; give one such as http://10.0.0.5:80"),
        ("http://a:port", {}, EnvError, "remote: 'http://a:port' is no address"),
        ("http://a:0", {}, EnvError, "remote: 'http://a:0' is no address"),
        ("http://a", {"patience": 0}, ValueError, "remote: patience is 0 and connections 1024; both must be positive"),
        ("http://a", {"connections": 0}, ValueError, "connections 0; both must be positive"),
    ],
)
def test_mistakes_are_told(server: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        nrl.remote(server, **options)


def nobody() -> str:
    """An address at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as on:
        return f"http://127.0.0.1:{on.getsockname()[1]}"


def test_a_server_that_is_not_there_is_waited_for_and_then_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(remote_env, "_SILENCE", 0.1)
    url = nobody()
    with pytest.raises(EnvError, match=f"remote: {url} has not answered /info for 0.5 s .*; see whether the server"):
        nrl.remote(url, patience=0.5)
    assert f"remote: waiting for {url} to answer, 0 s of 0.5 so far " in (said := capsys.readouterr()).err
    assert f"(cannot connect to {url.removeprefix('http://')}: Connection refused)" in said.err
    assert said.out == ""  # where a program may print JSON


def test_a_host_that_does_not_exist_is_told() -> None:
    with pytest.raises(EnvError, match=r"\(cannot connect to nowhere\.invalid:80: [^()]+\); see whether"):
        nrl.remote("http://nowhere.invalid", patience=0.1)


def test_a_server_that_comes_late_is_waited_for() -> None:
    url = nobody()
    made = list[Server]()
    starting = threading.Timer(0.3, lambda: made.append(nrl.serve(exact, port=int(url.rpartition(":")[2]))))
    starting.start()
    assert run(nrl.remote(url)({"answer": "4"}, Trace("", ["4"]))) == 1.0
    starting.join()
    made[0].stop()


# --- Calls that are given up


def test_a_verdict_that_is_cancelled_is_given_up_there(env: Counting) -> None:
    async def play(there: Any, work: Any) -> None:
        task = asyncio.ensure_future(work)
        while not env.waits.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with nrl.serve(env) as server:
        there = nrl.remote(server)
        run(play(there, there.verifier({}, Trace("", ["wait"]))))
        until(lambda: under_way(server) == 0)
        env.waits.clear()
        run(play(there, there.reset({"wait": True})))
        until(lambda: under_way(server) == 0 and sessions(server) == 0)
        env.go.set()
        until(lambda: "close" in env.calls)  # the state came late
        env.go.clear()
        env.waits.clear()
        run(play(there, stepped(there)))
        until(lambda: sessions(server) == 1)
        env.go.set()


async def stepped(there: Any) -> None:
    state, _ = await there.reset({})
    await there.step(state, Turn("wait"))


def numbers(server: Server) -> dict[str, float]:
    from urllib.request import urlopen

    with urlopen(f"{server.url}/metrics") as found:
        lines = [line.rsplit(" ", 1) for line in found.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(number) for name, number in lines}


def under_way(server: Server) -> float:
    return numbers(server)["nrl_gym_under_way"]


def sessions(server: Server) -> float:
    return numbers(server)["nrl_gym_sessions"]


# --- Leases


def test_episodes_are_kept_while_their_client_lives(env: Counting) -> None:
    with nrl.serve(env, lease=1.6) as server:
        there = nrl.remote(server)
        state, _ = run(there.reset({}))
        renewed = 'nrl_gym_requests_total{path="/renew",status="200"}'
        until(lambda: numbers(server).get(renewed, 0) >= 6)  # longer than the lease
        assert run(there.step(state, Turn("a"))).reward == 1.0
        run(there.close(state))
        asked = numbers(server).get(renewed, 0)
        time.sleep(1.0)
        assert numbers(server)[renewed] <= asked + 1


LEAVES = """
import asyncio, sys, nrl
there = nrl.remote(sys.argv[1])
async def main():
    for _ in range(3):
        await there.reset({})
asyncio.run(main())
print("there", flush=True)
sys.stdin.readline()
"""


def test_episodes_of_a_client_that_died_are_closed_after_the_lease(env: Counting) -> None:
    with nrl.serve(env, lease=0.5) as server:
        client = subprocess.Popen(
            [sys.executable, "-c", LEAVES, server.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert client.stdout is not None
        assert client.stdout.readline() == "there\n"
        assert sessions(server) == 3
        client.kill()
        client.communicate()
        until(lambda: env.calls.count("close") == 3)
        assert numbers(server)["nrl_gym_evicted_total"] == 3


# --- Several servers, and other processes


def test_episodes_stay_where_they_began_and_are_spread() -> None:
    envs = [Counting() for _ in range(3)]
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(nrl.serve(each)) for each in envs]
        there = nrl.remote(servers)

        async def play(i: int) -> None:
            state, _ = await there.reset({})
            for _ in range(3):
                taken = await there.step(state, Turn(f"{i}"))
                state = taken.state
            assert taken.reward == 3.0
            await there.close(state)

        async def everybody() -> None:
            await asyncio.gather(*(play(i) for i in range(30)))

        run(everybody())
    assert sum(each.calls.count("reset") for each in envs) == 30
    for each in envs:
        assert each.calls.count("reset") == each.calls.count("close") >= 5
        assert {each.calls.count(f"step {i}") for i in range(30)} <= {0, 3}


def program(port: int = 0, more: str = "") -> tuple["subprocess.Popen[str]", str]:
    """A server in a process of its own, and its address."""
    made = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.replace("MORE", more), str(port)],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert made.stdout is not None
    return made, made.stdout.readline().strip()


PROGRAM = """
import sys, nrl
from nrl.envs import Environment, Step
env = Environment(lambda task: (0, "?"), lambda n, turn: Step(n + 1, reward=1.0, done=n == 2, observation="?"))
server = nrl.serve(env, port=int(sys.argv[1]), MORE)
print(server.url, flush=True)
sys.stdin.read()
"""


def test_a_server_that_is_killed_takes_only_its_own_episodes_along() -> None:
    """Their rows have a status and no reward; and it is asked again when it is back."""
    programs = [program() for _ in range(3)]
    try:
        urls = [url for _, url in programs]
        there, killed = nrl.remote(urls, patience=1.0), list[str]()

        async def step(state: RemoteState, turn: Turn) -> Step:
            if state.turn == 1 and not killed:
                killed.append(state.url)
                victim = programs[urls.index(state.url)][0]
                victim.kill()
                victim.wait()
            return cast(Step, await there.step(state, turn))

        resets = list[str]()

        async def reset(task: Any) -> Any:
            found = await there.reset(task)
            resets.append(found[0].url)
            return found

        env = Environment(reset, step, there.close, timeout=None)
        with pytest.warns(match="of 12 episodes failed and are not trained on"):
            batch = nrl.rollout(Always(["x"]), env, [{"prompt": "?"}] * 12)
        lost = sum(url in killed for url in resets)
        assert 0 < lost < 12
        assert int((~batch["valid"]).sum()) == lost
        assert set(batch["rewards"][batch["valid"]].tolist()) == {3.0}
        after = run(_resets(there, 12))
        assert set(after) == set(urls) - set(killed)
        place = urls.index(killed[0])
        programs.append(program(int(killed[0].rpartition(":")[2])))
        assert programs[-1][1] == urls[place]
        until(lambda: killed[0] in run(_resets(there, 6)))
    finally:
        for each, _ in programs:
            each.kill()
            each.communicate()


async def _resets(there: Any, n: int) -> list[str]:
    found = [await there.reset({}) for _ in range(n)]
    for state, _ in found:
        await there.close(state)
    return [state.url for state, _ in found]


def _verify(there: Any, results: Any) -> None:
    results.put(asyncio.run(there({"answer": "4"}, Trace("", ["4"]))))


def test_a_client_that_is_sent_elsewhere_asks_on_connections_of_its_own() -> None:
    from ray import cloudpickle

    with nrl.serve(exact) as server, nrl.serve(single_turn(exact)) as other:
        made = pickle.loads(cloudpickle.dumps(nrl.remote(server)))
        assert run(made({"answer": "4"}, Trace("", ["4"]))) == 1.0
        env = pickle.loads(cloudpickle.dumps(nrl.remote(other)))
        state, prompt = run(env.reset({"prompt": "2+2=", "answer": "4"}))
        assert (prompt, run(env.step(state, Turn("4"))).reward) == ("2+2=", 1.0)


FORKS = """
import asyncio, os, sys, nrl
from nrl.envs import Trace
there = nrl.remote(sys.argv[1])
ask = lambda: asyncio.run(there({"answer": "4"}, Trace("", ["4"])))
assert ask() == 1.0
pid = os.fork()
if not pid:
    os._exit(ask() != 1.0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert ask() == 1.0
"""


def test_a_fork_asks_on_connections_of_its_own() -> None:
    with nrl.serve(exact) as server:
        program = [sys.executable, "-W", "ignore", "-c", FORKS, server.url]
        assert subprocess.run(program, capture_output=True, text=True, timeout=60).stderr == ""


def test_a_client_that_nobody_holds_closes_its_connections() -> None:
    with nrl.serve(exact) as server:
        there: Any = nrl.remote(server)
        client = there.func.__self__
        session = client.places._session
        assert not session.closed
        del there, client
        gc.collect()
        until(lambda: session.closed)


# --- What a verifier may have beside


def test_a_group_tasks_and_what_is_read_in_an_answer() -> None:
    @of_group
    def compared(task: Any, traces: Any) -> list[float]:
        return [float(len(trace.text)) for trace in traces]

    made: Any = compared
    made.tasks = lambda seed, index: {"prompt": f"{seed}/{index}", "odd": (1, b"x")}
    made.extract = lambda text: None if text == "nothing" else text.upper()
    with nrl.serve(compared) as server:
        there = nrl.remote(server)
        assert there.of_group is True
        assert run(there({}, [Trace("", ["a"]), Trace("", ["bb"])])) == [1.0, 2.0]
        assert there.tasks(3, 4) == {"prompt": "3/4", "odd": (1, b"x")}
        assert (there.extract("a"), there.extract("nothing")) == ("A", None)
        with pytest.raises(EnvError, match="the task has an object"):
            run(there({"x": object()}, [Trace()]))

    def judge(task: Any, trace: Any) -> float:
        return 1.0

    judging: Any = judge
    judging.of_group = lambda task: task["together"]
    with nrl.serve(judge) as server:
        there = nrl.remote(server)
        assert (there.of_group({"together": True}), there.of_group({"together": False})) == (True, False)
        with pytest.raises(KeyError, match="together"):
            there.of_group({})


@pytest.mark.parametrize("later", [False, True])
def test_a_server_checks_tasks(later: bool) -> None:
    """Its fault, and none where the server or the way to it is at fault."""

    def reason(task: Any) -> str | None:
        if task["answer"] == "raise":
            raise EnvError("it cannot be read \udcff")
        if task["answer"] == "bug":
            raise KeyError("a mistake")
        return None if task["answer"] else "it is empty"

    async def reason_later(task: Any) -> str | None:
        return reason(task)

    def judge(task: Any, trace: Any) -> float:
        return 1.0

    judging: Any = judge
    judging.check_task = reason_later if later else reason
    with nrl.serve(judge) as server:
        there = nrl.remote(server)
        check: Any = task_check(single_turn(pickle.loads(pickle.dumps(there))))
        assert [run(check({"answer": answer})) for answer in ("4", "", "raise")] == [
            *(None, "it is empty", "it cannot be read \udcff")
        ]
        with pytest.raises(KeyError, match="a mistake"):
            run(check({"answer": "bug"}))
        rows = [{"prompt": "2+2=", "answer": "4"}, {"prompt": "?", "answer": ""}]
        assert nrl.data.tasks(rows, check=task_check(there)).dropped == {"check": 1}
        gone = nrl.remote(server, patience=0.1)
    with pytest.raises(DataError, match="remote: .*judge has not checked a task: "):
        nrl.data.tasks(rows, check=task_check(gone))
    with nrl.serve(single_turn(judge)) as server:
        assert task_check(nrl.remote(server)) is not None


def test_a_server_that_does_not_say_that_it_checks_is_not_asked() -> None:
    with saying({**INFO, "kind": "verifier"}) as says:
        assert task_check(nrl.remote(says.url)) is None


def test_tasks_are_asked_for_together() -> None:
    """Each waits on the server until all of a ``take`` are there, so that they come together or not at all."""
    asked = list[int]()

    async def tasks(seed: int, index: int) -> Any:
        asked.append(index)
        takes = (len(asked) + 49) // 50
        while len(asked) < 50 * takes:
            await asyncio.sleep(0.001)
        if index == 149:
            raise ValueError("no such task")
        return {"prompt": f"{seed} {index}"}

    env = Environment(lambda task: (0, ""), lambda state, turn: Step(state), tasks=cast(Any, tasks))
    with nrl.serve(env) as server:
        stream = nrl.data.tasks(pickle.loads(pickle.dumps(nrl.remote(server))).tasks, seed=7)
        assert [task["prompt"] for task in stream.take(50)] == [f"7 {index}" for index in range(50)]
        assert stream.state() == {"cursor": 50}
        assert [task["prompt"] for task in stream.take(50)] == [f"7 {index}" for index in range(50, 100)]
        with pytest.raises(ValueError, match="no such task"):
            stream.take(50)
        assert stream.state() == {"cursor": 100}
        stream.restore({"cursor": 50})
        assert [task["prompt"] for task in stream.take(50)] == [f"7 {index}" for index in range(50, 100)]
    assert sorted(asked) == sorted([*range(150), *range(50, 100)])


def test_an_environment_brings_its_verifier_and_its_tasks(env: Counting) -> None:
    with nrl.serve(env) as server:
        there = nrl.remote(server)
        assert (there.timeout, there.tasks) == (None, None)
        assert there.verifier is not None
    with nrl.serve(single_turn(exact)) as server:
        assert nrl.remote(server).verifier is None


@pytest.fixture
def hanging() -> Iterator[tuple[str, Any]]:
    """A server without a limit, in a process of its own, which may be stopped."""
    made, url = program(0, "timeout=None")
    yield url, made
    made.kill()
    made.communicate()


def test_a_server_without_a_limit_that_hangs_fails_the_call(
    hanging: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_LOOKS", 0.1)
    monkeypatch.setattr(client, "_CONNECT", 0.3)
    url, server = hanging
    there = nrl.remote(url, patience=1.0)
    state, _ = run(there.reset({}))
    server.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    for call in (there.step(state, Turn("x")), there.reset({})):
        with pytest.raises(EnvError, match=rf"{url} has not answered /\w+ for 1 s \(/health, neither\); see whether"):
            run(call)
    assert time.monotonic() - began < 30
    server.send_signal(signal.SIGCONT)
    assert run(there.step(state, Turn("x"))).reward == 1.0  # the turn was taken, once
    env = there._replace(step=_stopping(server, there))
    with pytest.warns(match="of 2 episodes failed and are not trained on"):
        batch = nrl.rollout(Always(["x"]), env, [{"prompt": "?"}] * 2)
    assert [STATUSES[int(each)] for each in batch["status"]] == ["infra_error"] * 2


def _stopping(server: Any, there: Any) -> Any:
    async def step(state: Any, turn: Turn) -> Any:
        server.send_signal(signal.SIGSTOP)
        return await there.step(state, turn)

    return step


def test_calls_go_elsewhere_while_a_server_without_a_limit_hangs(
    hanging: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_LOOKS", 0.1)
    monkeypatch.setattr(client, "_CONNECT", 0.3)
    url, stopped = hanging
    other, second = program(0, "timeout=None")
    try:
        there = nrl.remote([url, second], patience=30.0)
        stopped.send_signal(signal.SIGSTOP)

        async def play() -> list[str]:
            begun = [asyncio.ensure_future(there.reset({})) for _ in range(2)]  # one goes to each
            await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
            monkeypatch.setattr(client, "_CONNECT", 1000.0)  # no call sees whether it is back
            await asyncio.sleep(1.0)
            found = [(await there.reset({}))[0].url for _ in range(8)]
            stopped.send_signal(signal.SIGCONT)
            await asyncio.gather(*begun)  # the one that hung goes on
            return found

        assert run(play()) == [second] * 8
        assert set(run(_resets(there, 8))) == {url, second}
    finally:
        other.kill()
        other.communicate()


def test_a_long_call_without_a_limit_is_waited_for_while_its_server_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes; many calls that wait ask for it together."""
    monkeypatch.setattr(client, "_LOOKS", 0.05)

    async def slow(task: Any, trace: Trace) -> float:
        await asyncio.sleep(1.5)
        return 1.0

    looks, look = list[float](), client.Places._look

    async def counted(places: Any, here: Any) -> None:
        looks.append(time.monotonic())
        await look(places, here)

    monkeypatch.setattr(client.Places, "_look", counted)

    async def many(verify: Any) -> list[float]:
        return list(await asyncio.gather(*(verify({}, Trace()) for _ in range(50))))

    with nrl.serve(slow, timeout=None) as server:
        assert run(many(nrl.remote(server, patience=0.5))) == [1.0] * 50
    assert len(looks) > 2
    assert all(then - now > 0.025 for now, then in pairwise(looks))  # of 50 calls, each of which could look by itself


def test_a_call_without_a_limit_is_asked_without_one() -> None:
    with saying({**INFO, "timeout": None}, ONE) as says:
        assert run(nrl.remote(says.url)({}, Trace())) == 1.0
        assert b"nrl-timeout" not in says.asked[1].lower()
