"""`nrl gym run` and `nrl gym status`, with programs that are started, killed, too late, deaf, and wrong."""

import asyncio
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

import nrl
from nrl.cli.cli import main
from nrl.envs import Trace, exact
from nrl.errors import ExecutableError
from nrl.gym.cli import replicas, supervising
from nrl.gym.config.resolving import ask, resolve
from nrl.gym.config.run_registry import Place, places
from nrl.gym.config.servers import Endpoint
from nrl.runtime.venvs import building
from tests.gym.config.test_gym_places import a_head

PROGRAM = """
import http.server, os, signal, subprocess, sys, time
port, mode = int(sys.argv[1]), os.environ.get("MODE", "")
print("my key is", os.environ.get("KEY"), "and the gym's", os.environ.get("NRL_GYM_TOKEN"), flush=True)
if "leaves a child" in mode:
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    print("child", child.pid, file=sys.stderr, flush=True)
if "is deaf" in mode:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "ends" in mode:
    print("x" * 10_000, "I have to end", sep="\\n", end="", flush=True)
    sys.exit(int(mode.split()[1]))
if "never" in mode:
    time.sleep(1000)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        busy = "is busy" in mode and os.path.exists("busy")
        self.send_response(503 if busy else 200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("NRL_GYM_DIR", str(tmp_path / "gyms"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    yield tmp_path
    assert not any((tmp_path / "gyms").glob("*"))
    assert not [pid for pid, told in cmdlines().items() if str(tmp_path) in told or told == "sleep 1000"]


def cmdlines() -> dict[int, str]:
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found[int(path.name)] = (path / "cmdline").read_text().replace("\0", " ").strip()
    return found


def lives(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def until(what: Callable[[], Any], seconds: float = 60.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.02)
    return found


def wrote(folder: Path, servers: str, more: str = "head_server: {port: 0}") -> list[str]:
    (folder / "gym.yaml").write_text(f"{more}\nservers:\n{servers}")
    return ["gym", "run", "gym.yaml"]


def program(name: str = "agent", mode: str = "", more: str = "") -> str:
    env = f"MODE: '{mode}', KEY: '${{oc.env:AGENT_KEY,none}}'"
    command = f"[{sys.executable}, {Path.cwd()}/program.py, '{{port}}']"
    return f"  {name}: {{command: {command}, env: {{{env}}}{more}}}\n"


def played(args: list[str], drive: Callable[[Place], None], end: int = signal.SIGTERM, *, ready: bool = True) -> int:
    """Run the command in this thread, drive it from another one, and send a signal; the exit status."""
    problems = list[BaseException]()

    def other() -> None:
        try:
            place = until(places)[0]
            until(lambda: not ready or ask(place)["ready"])
            drive(place)
        except BaseException as error:
            problems.append(error)
        finally:
            if places():
                os.kill(os.getpid(), end)

    thread = threading.Thread(target=other)
    thread.start()
    status = main(args)
    thread.join()
    if problems:
        raise problems[0]
    return status


def restarted(place: Place, times: int) -> bool:
    return bool(the(place)["restarts"] == times)


def the(place: Place, name: str = "agent", number: int = 0) -> dict[str, Any]:
    found = next(each for each in ask(place)["servers"] if each["name"] == name)
    return dict(found["replicas"][number])


def test_a_gym_runs_until_it_is_stopped(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    args = wrote(folder, program(more=", replicas: 2") + program("other"))
    seen = dict[str, Any]()

    def drive(place: Place) -> None:
        before = {name: the(place, name)["pid"] for name in ("agent", "other")} | {
            "second": the(place, number=1)["pid"]
        }
        assert main(["gym", "status"]) == 0
        assert main(["gym", "status", "gym.yaml", "head_server.port=0", "json=true"]) == 0
        assert resolve(["gym.yaml"])["agent"].urls == (the(place)["url"], the(place, number=1)["url"])
        began, url = time.monotonic(), the(place)["url"]
        os.kill(before["agent"], signal.SIGKILL)
        after = until(lambda: (found := the(place)) and found["restarts"] and found["state"] == "ready" and found)
        seen["seconds"] = time.monotonic() - began
        assert after["url"] == url
        assert after["pid"] != before["agent"]
        assert (the(place, "other")["pid"], the(place, number=1)["pid"]) == (before["other"], before["second"])
        assert the(place, "other")["restarts"] == 0

    assert played(args, drive) == 143
    out, err = capfd.readouterr()
    assert "gym: agent/1 is ready at http://127.0.0.1:" in out
    assert "(3 of 3)" in out
    assert "2 servers, 3 replicas; the head is http://127.0.0.1:" in out
    assert "gym: agent/0 was ended by signal 9; it starts again now (restart 1)\n    my key is none" in out
    assert "gym: SIGTERM: stopping, within 10 s (grace); once more ends all at once" in out
    assert out.rstrip().endswith("gym: all have stopped")
    assert "agent/1 | my key is none and the gym's ***" in err
    assert "│ agent/0 │ program │ ready │ 0:0" in out
    assert '"kind": "program"' in out
    assert seen["seconds"] < 30  # of which most are those of a busy machine


def test_no_secret_is_written_anywhere(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "open-sesame-and-nothing-else"
    (folder / "env.yaml").write_text(f"key_of_agents: {secret}\n")
    args = wrote(folder, program().replace("oc.env:AGENT_KEY,none", "key_of_agents"))
    found = list[str]()

    def drive(place: Place) -> None:
        assert place.token is not None
        main(["gym", "status", "json=true"])
        found.extend([json.dumps(ask(place)), *cmdlines().values()])
        os.kill(the(place)["pid"], signal.SIGKILL)
        until(lambda: the(place)["restarts"] and the(place)["state"] == "ready")
        found.append(place.token)

    played(args, drive)
    out, err = capfd.readouterr()
    *texts, token = found
    assert "my key is *** and the gym's ***" in err
    for text in (out, err, *texts):
        assert secret not in text
        assert token not in text


def test_no_secret_is_in_what_a_served_verifier_raises(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "open-sesame-and-nothing-else"
    (folder / "env.yaml").write_text(f"key_of_agents: {secret}\n")
    code = "def leaks(task, trace, *, key):\n    raise ValueError(f'bad key {key}')\n"
    (folder / "leaks.py").write_text(code)
    monkeypatch.chdir(folder)
    found = list[str]()

    def drive(place: Place) -> None:
        verify: Any = nrl.remote(the(place, "leak")["url"], token=place.token)
        with pytest.raises(ValueError, match="bad key") as error:
            asyncio.run(verify({"answer": "4"}, Trace("2+2=", ["4"])))
        found.append(str(error.value))

    options = "{environment: 'leaks.py:leaks', options: {key: '${key_of_agents}'}}"
    played(wrote(folder, f"  leak: {options}\n", "head_server: {port: 0}"), drive)
    assert found == ["bad key ***"]


def test_what_the_head_answers(folder: Path) -> None:
    def drive(place: Place) -> None:
        def get(path: str, method: str = "GET", **headers: str) -> httpx2.Response:
            return httpx2.request(method, place.url + path, headers=headers, trust_env=False)

        assert (get("/health").status_code, get("/ready").json()) == (200, {"status": "ok"})
        assert get("/servers").status_code == 401
        assert get("/servers", Authorization="Bearer wrong").headers["www-authenticate"] == "Bearer"
        assert get("/servers", Authorization=f"Bearer {place.token}").json()["ready"] is True
        assert get("/servers", "POST").status_code == 405
        assert (get("/health", "HEAD").status_code, get("/health", "HEAD").text) == (200, "")
        there = "there is no /nothing; there are /servers, /ready, /health, /openapi.json"
        assert (get("/nothing").status_code, get("/nothing").json()["error"]["message"]) == (404, there)
        assert get("/openapi.json").json()["info"]["title"] == "nrl gym: head"

    assert played(wrote(folder, program()), drive, signal.SIGINT) == 130

    def open_to_all(place: Place) -> None:
        assert place.token is None
        assert httpx2.get(f"{place.url}/servers", trust_env=False).status_code == 200

    assert played([*wrote(folder, program()), "auth=none"], open_to_all) == 143


def test_who_trusts_the_network_is_served_without_a_token(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    seen = dict[str, Any]()

    def drive(place: Place) -> None:
        port = the(place, "judge")["url"].rpartition(":")[2]
        seen["info"] = httpx2.get(f"http://127.0.0.1:{port}/info", trust_env=False)
        seen["urls"] = resolve(["gym.yaml"])["judge"]

    more = "default_host: 0.0.0.0\nauth: none\nhead_server: {port: 0}"
    assert played(wrote(folder, "  judge: {environment: exact}\n", more), drive) == 143
    assert (seen["info"].status_code, seen["info"].json()["name"]) == (200, "judge")
    assert (seen["urls"].token, seen["urls"].urls[0].rpartition(":")[0]) == ("", "http://127.0.0.1")
    out, err = capfd.readouterr()
    assert out.count("servers.judge listens on 0.0.0.0 with auth: none: whoever reaches it may use it") == 1
    assert (err, "every machine" in out) == ("", False)


def test_nothing_survives_that_a_server_has_started(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    played(wrote(folder, program(mode="leaves a child")), lambda place: None)
    pid = int(capfd.readouterr().err.partition("child ")[2].split()[0])
    until(lambda: not lives(pid))


def test_the_second_signal_ends_all_at_once(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    args = wrote(folder, program(mode="is deaf, leaves a child"), "head_server: {port: 0}\ngrace: 1000")

    def drive(place: Place) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        until(lambda: the(place)["state"] == "stopping")  # two signals at once are one

    assert played(args, drive, signal.SIGINT) == 130
    assert "gym: ending all servers at once" in capfd.readouterr().out


def test_who_does_not_stop_is_killed(folder: Path) -> None:
    args = wrote(folder, program(mode="is deaf"), "head_server: {port: 0}\ngrace: 0.2")
    assert played(args, lambda place: None) == 143


def test_nothing_survives_the_end_of_the_supervisor(folder: Path) -> None:
    args = wrote(
        folder, program(mode="is deaf, leaves a child", more=", replicas: 2"), "head_server: {port: 0}\ngrace: 1"
    )
    with subprocess.Popen(
        [sys.executable, "-m", "nrl", *args], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as run:
        place = until(places)[0]
        until(lambda: ask(place)["ready"])
        pids = [the(place, number=number)["pid"] for number in (0, 1)]
        run.kill()
    until(lambda: not any(map(lives, pids)))
    until(lambda: "sleep 1000" not in cmdlines().values())
    assert places() == []


@pytest.mark.parametrize(
    ("servers", "message"),
    [
        (
            ("agent", "ends 2"),
            "servers.agent: agent ended with status 2 before it was ready; mend servers.agent, and run",
        ),
        (("agent", "ends 2"), "Its last lines:\n    my key is none"),
        (("agent", "ends 0"), "agent ended with status 0 before it was ready"),
        (("agent", "ends 0"), "\n    I have to end"),
    ],
)
def test_what_ends_before_it_is_ready_ends_the_gym(
    folder: Path, servers: tuple[str, str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(wrote(folder, program(*servers) + program("other", "leaves a child"))) == 2
    assert message in capfd.readouterr().err


def test_a_program_that_is_not_there(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(wrote(folder, "  agent: {command: [no-such-program]}")) == 2
    err = capfd.readouterr().err
    assert "agent ended with status 127 before it was ready; mend" in err
    assert "no-such-program: No such file or directory" in err


def test_a_gym_that_is_not_ready_in_time(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervising, "_EVERY", 0.2)
    args = wrote(folder, program(mode="never"), "head_server: {port: 0}\ndeadline: 1.5")
    assert main(args) == 2
    out, err = capfd.readouterr()
    assert re.search(r"gym: waiting since [\d.]+ s for agent \(starting: ", out)
    assert re.search(r"nrl: gym: waiting since [\d.]+ s for agent \(starting: http://127\.0\.0\.1:", err)
    assert "); give a longer deadline=1.5" in err


def test_a_gym_that_is_stopped_before_it_is_ready(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def drive(place: Place) -> None:
        until(lambda: the(place)["pid"])
        assert httpx2.get(f"{place.url}/ready", trust_env=False).status_code == 503
        assert main(["gym", "status"]) == 1

    assert played(wrote(folder, program(mode="never")), drive, ready=False) == 143
    out = capfd.readouterr().out
    assert "gym: ready" not in out
    assert "starting: http://127.0.0.1:" in out


def test_a_taken_port_is_named(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main([*wrote(folder, program()), f"servers.agent.port={port}"]) == 2
        told = capfd.readouterr().err
        assert (
            f"servers.agent.port: {port} on 127.0.0.1 is taken by another program; `nrl gym status` shows the" in told
        )
        assert "or give servers.agent.port=0 for one that is free" in told
        assert main([*wrote(folder, program()), f"head_server.port={port}"]) == 2
        assert f"head_server.port: {port} on 127.0.0.1 is taken" in capfd.readouterr().err
    assert main([*wrote(folder, program()), "head_server.host=192.0.2.1", "auth=none"]) == 2
    assert "head_server.host: cannot listen on 192.0.2.1:0: " in capfd.readouterr().err


def killed_again_and_again(place: Place, times: int) -> None:
    """Kill the program as soon as it is ready; in the end it is ready again."""
    for restarts in range(1, times + 1):
        until(lambda: the(place)["state"] == "ready")
        os.kill(the(place)["pid"], signal.SIGKILL)
        until(functools.partial(restarted, place, restarts))
    until(lambda: the(place)["state"] == "ready")


def test_pauses_grow_between_deaths(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervising, "_PAUSES", (0.0, 0.2, 0.4))
    monkeypatch.setattr(supervising, "_HEALTHY", 1000.0)

    def drive(place: Place) -> None:
        killed_again_and_again(place, 4)
        (folder / "program.py").write_text("raise SystemExit('edited')")  # it was ready once: nobody gives up
        os.kill(the(place)["pid"], signal.SIGKILL)
        until(lambda: the(place)["restarts"] >= 7)
        (folder / "program.py").write_text(PROGRAM)
        until(lambda: the(place)["state"] == "ready")

    played(wrote(folder, program(mode="leaves a child")), drive)
    out = capfd.readouterr().out
    for restart, pause in enumerate(("now", "in 0.2 s", "in 0.4 s", "in 0.4 s"), 1):
        assert f"agent was ended by signal 9; it starts again {pause} (restart {restart})" in out
    assert "agent ended with status 1; it starts again in 0.4 s (restart 7)\n    edited" in out


def test_who_has_served_for_a_while_starts_again_at_once(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervising, "_HEALTHY", 0.0)

    def drive(place: Place) -> None:
        killed_again_and_again(place, 3)

    assert played(wrote(folder, program()), drive) == 143
    out = capfd.readouterr().out
    assert [f"starts again now (restart {restart})" in out for restart in (1, 2, 3)] == [True] * 3


@pytest.mark.slow
def test_each_death_of_an_environment_is_over_within_three_seconds(folder: Path) -> None:
    took = list[float]()

    def drive(place: Place) -> None:
        for restarts in range(1, 7):
            time.sleep(supervising._HEALTHY + 0.2)
            began = time.monotonic()
            os.kill(the(place, "exact")["pid"], signal.SIGKILL)
            until(lambda n=restarts: (it := the(place, "exact"))["restarts"] == n and it["state"] == "ready")  # type: ignore[misc]
            took.append(time.monotonic() - began)
            assert the(place, "other")["restarts"] == 0

    servers = "  exact: {environment: exact}\n  other: {environment: number}\n"
    assert played(wrote(folder, servers), drive) == 143
    print([f"{each:.2f}" for each in took])
    assert max(took) < 3.0


def test_a_server_that_does_not_answer_any_more(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "_LOOKS", 0.05)
    monkeypatch.setattr(replicas, "_PATIENCE", 0.2)

    def drive(place: Place) -> None:
        os.kill(the(place)["pid"], signal.SIGSTOP)
        until(lambda: the(place)["state"] == "silent")
        assert main(["gym", "status"]) == 1
        os.kill(the(place)["pid"], signal.SIGCONT)
        until(lambda: the(place)["state"] == "ready")

    played(wrote(folder, program()), drive)
    assert "gym: agent does not answer any more: http://127.0.0.1:" in capfd.readouterr().out


@pytest.mark.parametrize("kind", ["program", "environment"])
def test_a_server_that_hangs_is_started_again(
    kind: str, folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "_LOOKS", 0.05)
    monkeypatch.setattr(replicas, "_PATIENCE", 0.2)
    one = program(more=", silence: 1")
    servers = {"program": one, "environment": "  agent: {environment: exact, silence: 1}\n"}[kind]

    def drive(place: Place) -> None:
        before = the(place)
        os.kill(before["pid"], signal.SIGSTOP)
        until(lambda: (now := the(place))["restarts"] == 1 and now["state"] == "ready")
        assert the(place)["pid"] != before["pid"]
        assert the(place)["url"] == before["url"]
        assert not lives(before["pid"])

    assert played(wrote(folder, servers), drive) == 143
    told = "gym: agent has not answered for 1 s (silence), and was killed; it starts again now (restart 1)"
    assert told in capfd.readouterr().out


def test_a_server_may_be_silent_for_ever(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that answers that it is not ready is not silent."""
    monkeypatch.setattr(replicas, "_LOOKS", 0.05)
    monkeypatch.setattr(replicas, "_PATIENCE", 0.2)

    def drive(place: Place) -> None:
        os.kill(the(place)["pid"], signal.SIGSTOP)
        (folder / "busy").touch()
        until(lambda: the(place)["state"] == the(place, "busy")["state"] == "silent")
        time.sleep(1.0)
        assert the(place)["restarts"] == the(place, "busy")["restarts"] == 0
        os.kill(the(place)["pid"], signal.SIGCONT)

    servers = program(more=", silence: null") + program("busy", "is busy", ", silence: 0.5")
    assert played(wrote(folder, servers), drive) == 143


def test_servers_elsewhere_are_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_LOOKS", 0.05)
    with a_head(200, {"data": [{"id": "tiny"}], "protocol": 1}) as (port, shown):
        url = f"http://127.0.0.1:{port}"
        servers = (
            f"  judge: {{model: {url}/v1, api_key: a-key-of-judges, name: tiny}}\n  far: {{url: '{url}/', token: abc}}"
        )

        def drive(place: Place) -> None:
            assert the(place, "judge")["url"] == f"{url}/v1"
            assert the(place, "far")["pid"] is None
            assert main(["gym", "status"]) == 0

        played(wrote(folder, servers), drive)
        assert set(shown) == {"Bearer a-key-of-judges", "Bearer abc"}
        monkeypatch.setattr(replicas, "_MISSED", 1)


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (401, {}, "/v1/models refuses the api_key (401); give the right one"),
        (200, {"data": [{"id": "large"}]}, "/v1/models serves large, and not tiny; mend its name"),
        (200, [], "/v1/models serves no model, and not tiny; mend its name"),
    ],
)
def test_mistakes_about_models_are_told(
    folder: Path, status: int, body: Any, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with a_head(status, body) as (port, _):
        servers = f"  judge: {{model: 'http://127.0.0.1:{port}/v1', api_key: a-key-of-judges, name: tiny}}"
        assert main(wrote(folder, servers)) == 2
    assert message in capfd.readouterr().err


def test_an_environment_elsewhere_that_refuses_the_token(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its `/ready` asks for none, and says that it is there."""
    with nrl.serve(exact, token="right") as server:
        assert main(wrote(folder, f"  far: {{url: '{server.url}', token: wrong}}")) == 2
        assert f"servers.far: {server.url}/info refuses the token (401); give the right one" in capfd.readouterr().err


def test_replicas_elsewhere_are_one_environment(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    seen = list[Any]()
    together = threading.Barrier(2)  # a call that ends before the other begins could go to the same replica

    def pays(reward: float) -> Any:
        def verifier(task: Any, trace: Trace) -> float:
            together.wait(60)
            return reward

        return verifier

    async def both(verify: Any) -> Any:
        return await asyncio.gather(verify({}, Trace("", ["x"])), verify({}, Trace("", ["x"])))

    with nrl.serve(pays(1.0), token="abc") as a, nrl.serve(pays(2.0), token="abc") as b:

        def drive(place: Place) -> None:
            assert [the(place, "far", number)["url"] for number in (0, 1)] == [a.url, b.url]
            made = nrl.environments("gym.yaml")
            seen.extend([made.names, sorted(asyncio.run(both(made.graded)))])

        assert played(wrote(folder, f"  far: {{url: ['{a.url}', '{b.url}'], token: abc}}"), drive) == 143
    assert seen == [("far",), [1.0, 2.0]]
    out = capfd.readouterr().out
    assert all(f"gym: far/{number} is ready at http" in out for number in (0, 1))


def test_one_that_stops_is_no_mistake() -> None:
    assert replicas._mistake(Endpoint(url="http://127.0.0.1:1"), "http://127.0.0.1:1/info", 503, "") == ""


@pytest.mark.parametrize("body", [{}, [], {"protocol": None}])
def test_what_is_elsewhere_and_no_environment(folder: Path, body: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with a_head(200, body) as (port, _):
        assert main(wrote(folder, f"  far: {{url: 'http://127.0.0.1:{port}'}}")) == 2
    said = f"http://127.0.0.1:{port}/info is not that of a served environment; mend its url"
    assert f"servers.far: {said}" in capfd.readouterr().err


def test_models_that_are_not_there_yet(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with a_head(503, {}) as (port, _):
        servers = f"  judge: {{model: 'http://127.0.0.1:{port}/v1'}}\n  far: {{url: 'http://127.0.0.1:1'}}"
        assert main(wrote(folder, servers, "head_server: {port: 0}\ndeadline: 0.5")) == 2
    err = capfd.readouterr().err
    assert (
        f"judge (starting: http://127.0.0.1:{port}/v1/models answers 503); far (starting: http://127.0.0.1:1/ready: "
        "cannot connect to 127.0.0.1:1: Connection refused" in err
    )


def test_an_executable_that_cannot_be_built(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Path:
        raise ExecutableError("base: the disk is full")

    whole = building.ensure_env
    monkeypatch.setattr(supervising, "ensure_env", fails)
    assert main(wrote(folder, program())) == 2
    assert "nrl: base: the disk is full" in capfd.readouterr().err
    monkeypatch.setattr(supervising, "ensure_env", whole)
    monkeypatch.setattr(supervising, "_PAUSES", (0.0, 0.1))

    def drive(place: Place) -> None:
        monkeypatch.setattr(supervising, "_provided", fails)
        os.kill(the(place)["pid"], signal.SIGKILL)
        until(lambda: the(place)["restarts"] == 1 and the(place)["state"] == "ready")

    assert played(wrote(folder, program()), drive) == 143


def test_a_gym_that_is_stopped_while_an_executable_is_built(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    going_on, whole = threading.Event(), building.ensure_env

    def slow(*args: Any, say: Callable[[str], None]) -> Path:
        say("base is built: 3 of 9 packages")
        going_on.wait(60)
        return whole(*args, say=say)

    monkeypatch.setattr(supervising, "ensure_env", slow)

    def drive(place: Place) -> None:
        until(lambda: the(place)["state"] == "building")
        until(lambda: the(place, "other")["note"] == "its executable system is built")

    try:
        assert played(wrote(folder, program() + program("other")), drive, ready=False) == 143
    finally:
        going_on.set()
    assert "base is built: 3 of 9 packages" in capfd.readouterr().err


def test_help_and_mistakes(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["gym", "run", "--help"]) == 0
    assert main(["gym", "status", "-h"]) == 0
    assert "usage: nrl gym run CONFIG.yaml" in capfd.readouterr().out
    assert main(["gym", "run"]) == 2
    assert "nrl: no configuration is given; name one: CONFIG.yaml" in capfd.readouterr().err
    assert main(["gym", "status", "json=yes"]) == 2
    assert "json=yes: write json=true or json=false" in capfd.readouterr().err
    assert main(["gym", "status"]) == 2
    assert "no gym of yours runs here" in capfd.readouterr().err
