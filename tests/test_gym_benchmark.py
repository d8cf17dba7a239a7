"""What `benchmarks/gym.py` measures with: a load that notices wrong answers, bodies of the right size, CPU time."""

import asyncio
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import nrl
from benchmarks import gym, starting
from benchmarks._http_load import NUMBER, Load, children, cpu_seconds, request, run
from benchmarks._nemo_gym import body, nemo_gym
from nrl.envs import Trace
from tests.gym.http.test_remote import INFO, ONE, saying

RIGHT = '{"reward":1.0}'


@contextmanager
def answering(answer: Callable[[int, bytes], tuple[int, str] | None]) -> Iterator[tuple[str, list[bytes]]]:
    """A small HTTP server: from how many requests came before and the body, to status and body, or None: it closes the
    connection. An answer comes in three pieces. Also what was asked: head and body of each."""
    seen, one_at_a_time = list[bytes](), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked = self.rfile.read(int(self.headers["content-length"]))
            with one_at_a_time:
                seen.append(bytes(self.headers) + asked)
                found = answer(len(seen) - 1, asked)
            if found is None:
                self.close_connection = True
                return
            status, text = found
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text[:4].encode())
            self.wfile.write(text[4:].encode())

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    class Server(ThreadingHTTPServer):
        daemon_threads = False  # so that closing waits for them

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/verify", seen
        finally:
            server.shutdown()
            thread.join()


def asked(url: str, requests: int, answer: bytes = b"{}") -> float:
    return asyncio.run(run(url, request(url, {}, answer), '"reward":1', requests, connections=3))


def test_every_request_is_asked_once_over_connections_that_stay_open() -> None:
    with answering(lambda number, body: (200, RIGHT)) as (url, seen):
        assert asked(url, 20) > 0
    assert len(seen) == 20


def test_each_request_has_a_number_of_its_own_where_there_is_a_place_for_it() -> None:
    sent = json.dumps({"call": NUMBER}).encode()
    with answering(lambda number, body: (200, RIGHT)) as (url, seen):
        asked(url, 10, sent)
    bodies = [each[-len(sent) :] for each in seen]
    assert len(set(bodies)) == 10
    assert all(json.loads(each)["call"] != NUMBER for each in bodies)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((200, '{"reward":0.0}'), "not a 200 with"),
        ((500, RIGHT), "not a 200 with"),
        (None, "closed a connection before it answered"),
    ],
)
def test_one_wrong_answer_among_many_ends_the_measurement(answer: tuple[int, str] | None, why: str) -> None:
    with (
        answering(lambda number, body: answer if number == 7 else (200, RIGHT)) as (url, _),
        pytest.raises(RuntimeError, match=why),
    ):
        asked(url, 20)


def test_the_load_is_a_process_that_goes_on_after_a_failure() -> None:
    load = Load(sorted(os.sched_getaffinity(0))[:1])
    try:
        with answering(lambda number, body: (200, RIGHT if number else "{}")) as (url, seen):
            with pytest.raises(RuntimeError, match=r"http://127.0.0.1:\d+/verify: not a 200"):
                load(url, b"{}", requests=1)
            assert load(url, b"{}", requests=5, connections=2, headers={"X-Token": "a"}) > 0
        assert len(seen) == 6
        assert b"\nx-token: a\n" in seen[-1]
        with pytest.raises(RuntimeError, match="refused|Connect call failed"):
            load("http://127.0.0.1:1/verify", b"{}", requests=1)
    finally:
        load.close()


def test_cpu_time_is_that_of_the_processes_that_are_named() -> None:
    load = Load()
    try:
        before, own = cpu_seconds([os.getpid()]), children(os.getpid())
        sum(number * number for number in range(2_000_000))
        assert cpu_seconds([os.getpid()]) > before
        assert len(own) > 1
        assert set(own) > {os.getpid()}
    finally:
        load.close()


@pytest.mark.parametrize("make", [gym.our_body, body])
@pytest.mark.parametrize("name", list(gym.BODIES))
def test_bodies_have_the_size_that_is_asked_for(make: Callable[[list[str]], bytes], name: str) -> None:
    size, turns = gym.BODIES[name]
    found = gym.sized(make, size, turns)
    assert size - turns < len(found) <= size
    json.loads(found)


def test_requests_are_those_of_a_client() -> None:
    with saying({**INFO, "timeout": 60.0}, ONE) as says:
        asyncio.run(nrl.remote(says.url, token=gym.TOKEN)({"prompt": "?", "answer": "4"}, Trace("?", ["4"])))
    sent = says.asked[-1]
    made = request(says.url, gym.HEADERS | {"authorization": f"Bearer {gym.TOKEN}"}, gym.our_body(["4"]))

    def shape(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shape(each) for key, each in value.items()}
        return [shape(each) for each in value] if isinstance(value, list) else type(value)

    def parts(whole: bytes) -> Any:
        head, _, body = whole.partition(b"\r\n\r\n")
        return {line.split(b":")[0].lower() for line in head.split(b"\r\n")[1:]}, shape(json.loads(body))

    assert parts(sent) == parts(made)


def test_the_other_side_needs_its_command_beside_the_interpreter(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match=r"bin/gym: not found; name the interpreter of an environment that has nemo"),
        nemo_gym(tmp_path / "bin" / "python", tmp_path),
    ):
        raise AssertionError("it did not start")


def test_a_server_that_does_not_start_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    bin_folder = tmp_path / "venv" / "bin"
    bin_folder.mkdir(parents=True)
    (bin_folder / "gym").write_text("#!/bin/sh\necho no ray here\nexit 3\n")
    (bin_folder / "gym").chmod(0o755)
    with (
        pytest.raises(RuntimeError, match=r"did not answer(.|\n)*no ray here"),
        nemo_gym(bin_folder / "python", tmp_path / "files"),
    ):
        raise AssertionError("it did not start")


def test_all_measurements_are_made_where_none_is_named() -> None:
    assert gym.options([]).what == ["verify", "burst", "sessions", "rollouts"]
    assert gym.options(["burst", "--quick"]).calls == 64


def test_without_the_other_side_there_is_no_ratio() -> None:
    assert gym.table({"1.7 KB": {"microseconds": [(50.0,)]}}).endswith("| 1.7 KB | 50 (50-50) | - | - |")


def test_what_starts_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    starting.main(starting.options(["--turns", "2"]))
    helped, ready, _ = capsys.readouterr().out.splitlines()
    assert helped.startswith("nrl --help: ")
    assert ready.startswith("a server is ready: ")


@pytest.mark.slow
def test_servers_hold_what_is_asked_of_them() -> None:
    """Each call and each episode is answered, and rollouts over HTTP take three times what others do, at most."""
    found = gym.main(gym.options(["burst", "sessions", "rollouts"]))
    assert found["burst"]["calls"] == 16_000
    assert found["sessions"]["episodes"] == 2_048
    assert found["rollouts"]["a_second_without_http"] <= 3 * found["rollouts"]["a_second"]


@pytest.mark.slow
def test_a_verify_costs_a_fifteenth_of_nemo_gyms() -> None:
    found = gym.main(gym.options(["verify", "--other", "new"]))["verify"]
    for name, each in found.items():
        ratios = sorted(theirs / ours for ours, theirs in each["microseconds"])
        assert ratios[len(ratios) // 2] >= 15, (name, ratios)
