"""Environment servers of verifiers 0.4: its own, unmodified, and one of a few lines that breaks the rules."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

import nrl
from benchmarks._nemo_gym import free_port
from nrl.envs import Score
from nrl.envs.limits import limited
from nrl.errors import EnvError
from nrl.gym.adapters.prime import verifiers_server
from nrl.gym.adapters.prime.prime_servers import _score
from tests.gym.adapters.test_verifiers_classes import Model, components, played, python_with, trained, written
from tests.gym.endpoint.driving import Says

pytestmark = pytest.mark.timeout(600)
HERE = Path(__file__).parent
TASK = {"idx": 0, "prompt": "2+2=", "answer": "4"}
CALL = ("calculator_add", {"a": 2, "b": 2})
THEIRS = """
import asyncio, json, sys
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.serve import EnvClient
from verifiers.v1.types import SamplingConfig

async def main():
    server = EnvClient(sys.argv[1])
    model = EvalClientConfig(base_url=sys.argv[2], api_key_var="NOBODY_HAS_THIS")
    found = await server.run(model, "it", SamplingConfig(), json.loads(sys.argv[3]))
    (trace,) = found.traces
    print(json.dumps([trace.reward, {**trace.metrics, **{key: each.score for key, each in trace.rewards.items()}}]))

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return python_with(tmp_path_factory.mktemp("verifiers") / "env", "verifiers==0.4.0")


def serving(python: str, workers: int = 1) -> "tuple[str, subprocess.Popen[bytes]]":
    port = free_port()
    places = [str(Path(python).parent), str(Path(sys.executable).parent), os.environ["PATH"]]  # with `uv`
    env = {**os.environ, "PATH": os.pathsep.join(places), "PYTHONPATH": str(HERE)}
    asked = [python, "-m", "verifiers_0_4", str(port), str(workers)]
    return f"tcp://127.0.0.1:{port}", subprocess.Popen(asked, env=env, start_new_session=True)


def ended(process: "subprocess.Popen[bytes]") -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="module", params=[1, 2])  # a server, and a broker before workers
def server(python: str, request: pytest.FixtureRequest) -> Iterator[str]:
    address, process = serving(python, request.param)
    asked_until_it_answers(address)
    yield address
    ended(process)


def asked_until_it_answers(address: str) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)  # and asks once: a broker ends when it cannot deliver an answer
        socket.send_multipart([b"1", b"health", msgspec.msgpack.encode({})])
        assert socket.poll(120_000), "the server does not answer"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("said", "reward"),
    [(["4"], 1 + 0.5 / 2), (["It is 5"], 0.5 / 8), ([CALL, "4"], 1 + 0.5 / 2), ([""], 0.5)],
)
def test_rewards_are_those_of_verifiers(python: str, server: str, said: list[Any], reward: float) -> None:
    model = Model(said)
    asked = [python, "-c", THEIRS, server, model.url, json.dumps(TASK)]
    ran = subprocess.run(asked, check=True, capture_output=True, text=True, timeout=120)
    model.close()
    there, numbers = json.loads(ran.stdout.splitlines()[-1])
    batch = played(verifiers_server(server), said, TASK)
    assert batch["valid"].tolist() == [True]
    assert batch["rewards"].tolist() == [there] == [reward]
    assert components(batch) == pytest.approx(numbers)
    assert numbers.keys() == {"right", "short", "letters"}
    assert batch["turns"].max().item() == len(said) - 1
    assert batch["sampled"].tolist() == batch["loss_mask"].sum(1).tolist()


@pytest.mark.slow
def test_an_episode_that_fails_there_has_no_reward(server: str) -> None:
    why = "verifiers_server: the episode has failed: TaskError: task Add scoring: RuntimeError: oh"
    with pytest.warns(UserWarning, match=why):
        assert played(verifiers_server(server), ["raise"], TASK)["valid"].tolist() == [False]
    with pytest.warns(UserWarning, match="(?s)verifiers_server: the server says ValidationError: .*answer"):
        assert played(verifiers_server(server), ["4"], {"prompt": "2+2="})["valid"].tolist() == [False]
    cut = played(limited(verifiers_server(server), turns=1), [CALL], TASK)
    assert cut["env/limits/turns"].tolist() == [1.0]
    assert played(verifiers_server(server), ["4"], TASK)["rewards"].tolist() == [1.25]


@pytest.mark.slow
def test_a_server_that_is_killed_in_an_episode(python: str) -> None:
    address, process = serving(python)
    asked_until_it_answers(address)

    class Kills(Says):
        def generate(self, prompts: Any, **how: Any) -> Any:
            ended(process)
            return super().generate(prompts, **how)

    began = time.monotonic()
    with pytest.warns(UserWarning, match="verifiers_server: the connection to tcp://.* has broken in an episode"):
        batch = nrl.rollout(Kills("qwen3", [written("4")]), verifiers_server(address), [TASK])
    assert batch["valid"].tolist() == [False]
    assert time.monotonic() - began < 60


@pytest.mark.slow
def test_a_model_is_trained_behind_it(server: str, tmp_path: Path) -> None:
    rows = [{"idx": at, "prompt": f"{at}+{at}=", "answer": str(2 * at)} for at in range(4)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    trained(verifiers_server(server, tasks=str(tmp_path / "tasks.jsonl")), "0+0=1+1=2+2=3+3=")


type Answers = Callable[[dict[str, Any]], list[tuple[bytes, bytes]]]


@pytest.fixture
def router() -> Iterator[tuple[str, list[Answers], list[tuple[bytes, Any]]]]:
    """A server that answers as a test says, and what it was asked, by method; a client that is gone is its end."""
    context, asked, told, stop = zmq.Context(), list[tuple[bytes, Any]](), list[Answers](), threading.Event()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    port = socket.bind_to_random_port("tcp://127.0.0.1")

    def serve() -> None:
        while not stop.is_set():
            if socket.poll(50):
                client, name, method, data = socket.recv_multipart()
                asked.append((method, msgspec.msgpack.decode(data)))
                for kind, said in told[0](asked[-1][1]) if method == b"run" else ():
                    socket.send_multipart([client, name, kind, said])
                if method == b"cancel":
                    time.sleep(0.3)
                    socket.send_multipart([client, name, b"reply", msgspec.msgpack.encode({"cancelled": False})])
                    asked.append((b"answered", None))

    thread = threading.Thread(target=serve)
    thread.start()
    yield f"tcp://127.0.0.1:{port}", told, asked
    stop.set()
    thread.join()
    socket.close(0)
    context.term()


def asks_the_model(body: dict[str, Any]) -> None:
    import urllib.request

    said = json.dumps({"messages": [{"role": "user", "content": body["task_data"]["prompt"]}]}).encode()
    with urllib.request.urlopen(body["client"]["base_url"] + "/chat/completions", said) as answer:
        answer.read()


def frames(*deltas: Any, **reply: Any) -> list[tuple[bytes, bytes]]:
    return [*((b"delta", msgspec.msgpack.encode(each)) for each in deltas), (b"reply", msgspec.msgpack.encode(reply))]


def trace(name: str, agent: str, score: float, **more: Any) -> dict[str, Any]:
    found = {"agent": {"name": agent}, "rewards": {"won": {"score": score, "weight": 2.0}, "late": None}, "ok": True}
    return {"trace": name, "open": {"id": name}, "set": {**found, "metrics": {"moves": 3.0, "none": None}, **more}}


def test_an_episode_of_two_agents(router: Any) -> None:
    address, told, asked = router

    def answers(body: dict[str, Any]) -> list[tuple[bytes, bytes]]:
        asks_the_model(body)
        gone = [trace("c", "solver", 9.0), {"trace": "c", "discard": True}]
        ended = [{"id": "a"}, {"id": "b"}]
        return frames(
            trace("a", "solver", 1.0), *gone, trace("b", "judge", 0.25), success=True, head={"ok": True}, traces=ended
        )

    told.append(answers)
    batch = played(verifiers_server(address, sampling={"temperature": 0.5}), ["4"], TASK)
    assert batch["rewards"].tolist() == [2 * 1.0 + 2 * 0.25]
    names = {"solver/won": 1.0, "solver/moves": 3.0, "judge/won": 0.25, "judge/moves": 3.0}
    assert components(batch) == names
    ((method, body),) = asked
    assert (method, body["model"], body["sampling"]) == (b"run", "policy", {"temperature": 0.5})
    assert body["task_data"].items() >= TASK.items()
    assert body["client"] == {"type": "eval", "base_url": body["client"]["base_url"], "api_key_var": "NRL_NO_API_KEY"}


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ([(b"reply", b"\xc1")], "tcp://.* says what is no msgpack object"),
        (frames(success=False, error="ValueError: no"), "the server says ValueError: no"),
        (frames(success=True, head={"ok": True}, traces=[]), "the episode has failed: it says not why"),
        (frames(success=True, head={"ok": True}, traces=[{"id": "a"}]), "the episode has failed: it says not why"),
    ],
)
def test_what_a_server_says_is_wrong_is_told(router: Any, found: list[tuple[bytes, bytes]], why: str) -> None:
    address, told, _ = router

    def answers(body: dict[str, Any]) -> list[tuple[bytes, bytes]]:
        asks_the_model(body)
        return found

    told.append(answers)
    with pytest.warns(UserWarning, match=f"verifiers_server: {why}"):
        assert played(verifiers_server(address), ["4"], TASK)["valid"].tolist() == [False]


def test_an_episode_that_ends_early_is_cancelled_there(router: Any) -> None:
    """And takes the answer, without which a broker of verifiers ends."""
    address, told, asked = router

    def answers(body: dict[str, Any]) -> list[tuple[bytes, bytes]]:
        asks_the_model(body)
        return []  # and goes on for ever

    told.append(answers)
    with pytest.warns(UserWarning, match="TimeoutError"):
        batch = played(verifiers_server(address, timeout=1.0), ["4"], TASK)
    assert batch["valid"].tolist() == [False]
    for _ in range(100):
        if len(asked) == 3:
            break
        time.sleep(0.05)
    assert [method for method, _ in asked] == [b"run", b"cancel", b"answered"]


def failed(**more: Any) -> dict[str, Any]:
    return {"ok": False, "errors": [{"type": "TaskError", "message": "oh"}], **more}


def test_what_has_failed_has_no_score() -> None:
    one = {"a": {"ok": True, "rewards": {"won": {"score": 3, "weight": 0.5}}, "metrics": {}}}
    reply = {"success": True, "head": {"ok": True}, "traces": [{"id": "a"}]}
    assert _score(reply, one) == Score(1.5, "ok", {"won": 3.0})
    for head, traces in (({"ok": True}, {"a": failed()}), (failed(), one)):
        with pytest.raises(EnvError, match="the episode has failed: TaskError: oh"):
            _score({**reply, "head": head}, traces)


def test_a_server_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nrl.gym.adapters.prime.prime_servers._CONNECTING", 1.0)
    with pytest.warns(UserWarning, match="verifiers_server: tcp://127.0.0.1:.* does not answer; is the server there"):
        played(verifiers_server(f"tcp://127.0.0.1:{free_port()}"), [], TASK)
    with pytest.warns(UserWarning, match="verifiers_server: localhost is no address: .*; give tcp://HOST:PORT"):
        played(verifiers_server("localhost"), [], TASK)


def test_a_python_without_pyzmq_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    monkeypatch.setitem(sys.modules, "zmq.asyncio", None)
    with pytest.warns(
        UserWarning, match="verifiers_server: this Python has no pyzmq, .* install nrl-torch.verifiers., or 'pyzmq>=26'"
    ):
        played(verifiers_server("tcp://127.0.0.1:1"), [], TASK)


@pytest.mark.parametrize(
    ("text", "why"),
    [("", "has no rows"), ("{", "line 1: Expecting property name"), ("{}\n[]", "line 2: this is no object")],
)
def test_a_file_of_tasks_that_cannot_be_read_is_named(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "tasks.jsonl").write_text(text)
    with pytest.raises(EnvError, match=f"verifiers_server: .*{why}"):
        verifiers_server("tcp://127.0.0.1:1", tasks=str(tmp_path / "tasks.jsonl"))
    with pytest.raises(EnvError, match="verifiers_server: nowhere.jsonl cannot be read: No such file or directory"):
        verifiers_server("tcp://127.0.0.1:1", tasks="nowhere.jsonl")


def test_the_name_of_the_resolver(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text(json.dumps(TASK) + "\n\n")
    made = nrl.environments({"verifiers_server": {"address": "tcp://gpu:5000", "tasks": str(tmp_path / "tasks.jsonl")}})
    assert made.tasks(0).take(2) == [TASK, TASK]
