"""`nrl gym run` with environments: served as they are, in processes that are killed, and wrong in several ways."""

import asyncio
import json
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

import nrl
from nrl.cli.cli import main
from nrl.envs import Trace
from nrl.gym.cli import replicas
from nrl.gym.cli.replicas import Interpreter, Replica
from nrl.gym.config.resolving import ask, resolve
from nrl.gym.config.run_registry import Place
from nrl.gym.config.servers import gym
from tests.gym.cli.test_gym_run import cmdlines, folder, played, the, until, wrote

__all__ = ["folder"]

OWN = """
import os, sys
from nrl.envs import number

def make(*, api_key, bonus=0.0):
    print("the key is", api_key, file=sys.stderr, flush=True)

    def verify(task, trace):
        if trace.text == "die":
            os.kill(os.getpid(), 9)
        return number(task, trace).reward + bonus

    return verify
"""


def get(url: str, token: str | None = None) -> httpx2.Response:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return httpx2.get(url, headers=headers, trust_env=False)


def test_environments_are_served_until_the_gym_is_stopped(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "own.py").write_text(OWN)
    secret = "a-key-that-nobody-may-see"
    (folder / "env.yaml").write_text(f"judge_key: {secret}")
    servers = (
        "  exact: {environment: exact, replicas: 2}\n"
        "  own: {environment: 'own.py:make', options: {bonus: 0.5, api_key: '${judge_key}'}, auth: none}\n"
    )
    texts = list[str]()

    def drive(place: Place) -> None:
        found = resolve(["gym.yaml"])
        assert {name: (each.kind, len(each.urls)) for name, each in found.items()} == {
            "exact": ("environment", 2),
            "own": ("environment", 1),
        }
        assert (found["exact"].token, found["own"].token) == (place.token, "")
        for url in found["exact"].urls:
            assert get(f"{url}/info").status_code == 401
            assert get(f"{url}/info", place.token).status_code == 200
            assert get(f"{url}/health").status_code == 200
        assert get(f"{found['own'].urls[0]}/info").status_code == 200
        assert main(["gym", "status"]) == 0
        before = {number: the(place, "exact", number) for number in (0, 1)}
        os.kill(before[0]["pid"], signal.SIGKILL)
        after: dict[str, Any] = until(
            lambda: (one := the(place, "exact"))["restarts"] == 1 and one["state"] == "ready" and one
        )
        assert after["url"] == before[0]["url"]
        assert the(place, "exact", 1)["pid"] == before[1]["pid"]
        main(["gym", "status", "json=true"])
        texts.extend([json.dumps(ask(place)), *cmdlines().values()])

    assert played(wrote(folder, servers), drive) == 143
    out, err = capfd.readouterr()
    assert out.count("│ verifier") == 3
    assert "own | the key is ***" in err
    assert not any(secret in text for text in (out, err, *texts))


def test_a_gym_is_played_and_tried_by_its_file_wherever_its_head_is(folder: Path) -> None:
    """And one of its environments by its address."""
    seen = dict[str, Any]()

    def drive(place: Place) -> None:
        made = nrl.environments("gym.yaml")
        seen["names"], seen["prompt"] = made.names, made.tasks(0).take(1)[0]["prompt"]
        url = resolve(["gym.yaml"])["number"].urls[0]
        assert place.token is not None
        os.environ["NRL_GYM_TOKEN"] = place.token
        try:
            for target in ("gym.yaml", "gym.yaml:number", url):
                seen[target] = main(["gym", "test", target, "limit=3", "slow=60"])
        finally:
            del os.environ["NRL_GYM_TOKEN"]
        seen["url"] = seen.pop(url)

    # The file says nothing of the head, which is at 11000 by default
    args = [*wrote(folder, "  number: {environment: number}", ""), "head_server.port=0"]
    assert played(args, drive) == 143
    assert seen == {"names": ("number",), "prompt": "17+12=", "gym.yaml": 0, "gym.yaml:number": 0, "url": 0}


def test_limits_reach_the_servers(folder: Path) -> None:
    seen = dict[str, httpx2.Response]()

    def drive(place: Place) -> None:
        found = resolve(["gym.yaml"])
        seen["info"] = get(f"{found['one'].urls[0]}/info", place.token)
        for name in ("one", "two"):
            url, headers = found[name].urls[0], {"Authorization": f"Bearer {place.token}"}
            seen[name] = httpx2.post(f"{url}/verify", content=b"x" * 1001, headers=headers, trust_env=False)
        row = {"responses_create_params": {"input": "1+1="}}
        seen["nemo"] = httpx2.post(f"{found['nemo'].urls[0]}/seed_session", json=row, trust_env=False)
        seen["default"] = get(f"{found['two'].urls[0]}/info", place.token)

    servers = "  one: {environment: exact, lease: 7, most: 3, largest: 1000}\n  two: {environment: exact}\n"
    servers += "  nemo: {environment: exact, protocol: nemo_gym, auth: none}"
    assert played(wrote(folder, servers), drive) == 143
    assert (seen["info"].json()["lease"], seen["one"].status_code) == (7.0, 413)
    assert (seen["default"].json()["lease"], seen["two"].status_code) == (60.0, 400)
    assert (seen["nemo"].status_code, list(seen["nemo"].cookies)) == (200, ["nrl_gym_session"])
    one = gym(["gym.yaml"]).servers["one"]
    sent = replicas._order(Replica("one", 0, one), one, Interpreter("python", {}), None, None, 1.0)
    assert json.loads(sent["line"])["most"] == 3


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ("{environment: exat}", "did you mean 'exact'?"),
        ("{environment: exact, options: {strict: true}}", "'strict'"),
        ("{environment: 'gone.py:env'}", "there is no file gone.py"),
    ],
)
def test_a_mistake_in_an_environment_is_explained(
    folder: Path, server: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(wrote(folder, f"  one: {server}")) == 2
    told = capfd.readouterr().err.partition("nrl: servers.one: one ended with status 2 before it was ready")[2]
    assert message in told


def test_a_port_that_was_taken_meanwhile_is_given_up(folder: Path) -> None:
    """A server on any port comes back at its own, or at another one where somebody else has that by then."""

    def drive(place: Place) -> None:
        before = the(place, "one")
        port = int(before["url"].rpartition(":")[2])
        with socket.socket() as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            while taken.getsockname()[1] != port:  # unless it is back already
                one = the(place, "one")
                with suppress(OSError):  # it is dead, and nobody has noticed; it has the port
                    if one["state"] == "ready":
                        os.kill(one["pid"], signal.SIGKILL)
                    taken.bind(("127.0.0.1", port))
            taken.listen()
            after: dict[str, Any] = until(lambda: (one := the(place, "one"))["state"] == "ready" and one)
            assert after["url"] != before["url"]

    assert played(wrote(folder, "  one: {environment: exact}"), drive) == 143


def test_workers_are_processes_that_may_die_alone(folder: Path) -> None:
    """Of a gym without tokens one server asks for one; its calls are made in processes of their own."""
    (folder / "own.py").write_text(OWN)
    server = "  own: {environment: 'own.py:make', options: {api_key: ''}, workers: 1, auth: token}\n"
    servers = f"{server}  exact: {{environment: exact}}\n"

    def drive(place: Place) -> None:
        assert httpx2.get(f"{place.url}/servers", trust_env=False).status_code == 200
        found = resolve(["gym.yaml"])
        assert found["exact"].token == ""
        assert found["own"].token
        url, pid = found["own"].urls[0], the(place, "own")["pid"]
        assert get(f"{url}/info").status_code == 401
        verify: Any = nrl.remote(url, token=found["own"].token)
        with pytest.raises(nrl.errors.EnvError, match="its process ended by signal 9"):
            asyncio.run(verify({"answer": "4"}, Trace("2+2=", ["die"])))
        assert asyncio.run(verify({"answer": "4"}, Trace("2+2=", ["4"]))) == 1.0
        assert the(place, "own")["pid"] == pid

    assert played(wrote(folder, servers, "head_server: {port: 0}\nauth: none"), drive) == 143


WHERE = """
import sys

def where(task, trace):
    raise ValueError(f"{sys.executable} {sys.prefix}")
"""


def test_a_server_in_an_executable_of_its_own(folder: Path) -> None:
    (folder / "where.py").write_text(WHERE)
    servers = (
        "  there: {environment: 'where.py:where', executable: base, workers: 1}\n"
        "  here: {environment: 'where.py:where'}\n"
    )

    def drive(place: Place) -> None:
        prefixes = {}
        for name, found in resolve(["gym.yaml"]).items():
            verify: Any = nrl.remote(found.urls, token=found.token)
            with pytest.raises(ValueError, match=r"/python") as caught:
                asyncio.run(verify({}, Trace("", ["x"])))
            prefixes[name] = Path(str(caught.value).split()[1]).name
        assert prefixes["here"] == Path(sys.prefix).name
        assert prefixes["there"].startswith("base-")
        shown = {each["name"]: each["executable"] for each in ask(place)["servers"]}
        assert shown == {"there": "base", "here": "system"}

    assert played(wrote(folder, servers), drive) == 143
