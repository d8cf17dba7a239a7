"""Environments of verifiers 0.1, unmodified: the same rewards through nrl as by verifiers itself."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import nrl
from nrl import data, tiny
from nrl.algos import advantages, grpo_loss
from nrl.backends import fsdp, hf
from nrl.envs import Environment, Score
from nrl.envs.limits import limited
from nrl.errors import EnvError
from nrl.gym.adapters.prime import verifiers
from nrl.gym.adapters.prime.environments import _program, _score, _Spec
from nrl.runtime.threads import run_in_loop
from tests.gym.endpoint.driving import Says, turn

pytestmark = pytest.mark.timeout(600)  # a package has to be installed
HERE = Path(__file__).parent
PACKAGE = "verifiers==0.1.14"
TASK = {"prompt": [{"role": "user", "content": "2+2="}], "answer": "4", "example_id": 0}
THEIRS = """
import asyncio, json, sys
import verifiers as vf

kind, url, task = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])

async def main():
    client = vf.ClientConfig(api_base_url=url, api_key_var="NOBODY_HAS_THIS")
    env = vf.load_environment("verifiers_0_1", kind=kind)
    found = await env.generate(inputs=[task], client=client, model="it", sampling_args={})
    print(json.dumps([found["outputs"][0]["reward"], found["outputs"][0]["metrics"]]))

asyncio.run(main())
"""


class Model:
    """A server of Chat Completions that says one text after the other, by a stream where it is asked for one."""

    def __init__(self, texts: Sequence[Any]) -> None:
        self.texts = list(texts)
        model = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                text = model.texts.pop(0)
                said: dict[str, Any] = {"role": "assistant", "content": text}
                if isinstance(text, tuple):  # a call of a tool
                    made = {"name": text[0], "arguments": json.dumps(text[1])}
                    said |= {
                        "content": "",
                        "tool_calls": [{"index": 0, "id": "c", "type": "function", "function": made}],
                    }
                part = "delta" if body.get("stream") else "message"
                kind = "chat.completion.chunk" if body.get("stream") else "chat.completion"
                end = "tool_calls" if isinstance(text, tuple) else "stop"
                usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
                choice = {"index": 0, part: said, "finish_reason": end}
                answer = {"id": "1", "object": kind, "created": 0, "model": "it", "choices": [choice], "usage": usage}
                text = json.dumps(answer)
                sent = (f"data: {text}\n\ndata: [DONE]\n\n" if body.get("stream") else text).encode()
                self.send_response(200)
                self.send_header("content-type", "text/event-stream" if body.get("stream") else "application/json")
                self.send_header("content-length", str(len(sent)))
                self.end_headers()
                self.wfile.write(sent)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def written(said: Any) -> str:
    return turn("qwen3", "", said) if isinstance(said, tuple) else turn("qwen3", said)


def played(env: Environment, said: Sequence[Any], task: Any = TASK, **how: Any) -> Any:
    return nrl.rollout(Says("qwen3", [written(each) for each in said], **how), env, [task])


def components(batch: Any) -> dict[str, float]:
    found = {str(key).removeprefix("reward/"): batch[key] for key in batch.keys() if str(key).startswith("reward/")}
    return {key: float(each[0]) for key, each in found.items()}


def python_with(folder: Path, *packages: str) -> str:
    uv, python = [sys.executable, "-m", "uv"], folder / "bin" / "python"
    subprocess.run([*uv, "venv", "-q", "--python", sys.executable, str(folder)], check=True)
    subprocess.run([*uv, "pip", "install", "-q", "-p", str(python), *packages], check=True)
    return str(python)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return python_with(tmp_path_factory.mktemp("verifiers") / "env", PACKAGE)


@pytest.fixture
def made(python: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes an environment of a kind; its process has ended after the test."""
    monkeypatch.chdir(HERE)  # where its module is found
    specs = list[_Spec]()

    def make(kind: str, count: int = 3, **how: Any) -> Environment:
        arguments = {"kind": kind, "count": count}
        specs.append(_Spec("verifiers_0_1", json.dumps(arguments, sort_keys=True), (PACKAGE,), python))
        return verifiers("verifiers_0_1", arguments=arguments, python=python, **how)

    yield make
    for spec in specs:
        killed(spec)


def killed(spec: _Spec) -> None:
    async def kill() -> None:
        process = _program(spec)._process
        assert process is not None
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()

    if _program(spec)._process is not None:
        run_in_loop(kill()).result()


@pytest.mark.parametrize(
    ("kind", "said", "reward"),
    [
        ("once", ["It is 4"], 1 + 0.5 / 2),
        pytest.param("once", ["It is 5"], 0.5 / 2, marks=pytest.mark.slow),
        pytest.param("twice", ["3", "4"], 1 + 0.5 / 4, marks=pytest.mark.slow),
        pytest.param("tool", [("add", {"a": 2, "b": 2}), "4"], 1 + 0.5 / 4, marks=pytest.mark.slow),
        pytest.param("tool", [("gone", {}), "5"], 0.5 / 4, marks=pytest.mark.slow),
    ],
)
def test_rewards_are_those_of_verifiers(python: str, made: Any, kind: str, said: list[Any], reward: float) -> None:
    model = Model(said)
    asked = [python, "-c", THEIRS, kind, model.url, json.dumps(TASK)]
    ran = subprocess.run(asked, cwd=HERE, check=True, capture_output=True, text=True)
    model.close()
    there, metrics = json.loads(ran.stdout.splitlines()[-1])
    batch = played(made(kind), said)
    assert batch["rewards"].tolist() == [there] == [reward]
    assert components(batch) == pytest.approx({key: each for key, each in metrics.items() if each is not None})
    assert {"right", "short", "num_turns"} <= components(batch).keys()
    assert batch["sampled"].tolist() == batch["loss_mask"].sum(1).tolist()


@pytest.mark.parametrize(
    ("kind", "said", "why"),
    [
        ("twice", ["break"], r"verifiers: the rollout ended with an error: InfraError\('the sandbox is gone'\)"),
        ("once", ["raise"], "verifiers: Error calling reward function right: oh"),
        ("group", ["4"], "refuses play: .*its rubric scores whole groups of rollouts"),
        ("none", ["4"], "refuses load: .*there is no such kind"),
    ],
)
def test_a_rollout_that_fails_has_no_reward(made: Any, kind: str, said: list[str], why: str) -> None:
    with pytest.warns(UserWarning, match=why):
        batch = played(made(kind), said)
    assert batch["valid"].tolist() == [False]


@pytest.mark.slow
def test_an_empty_answer_is_the_models_doing(made: Any) -> None:
    batch = played(made("once"), [""])
    assert batch["valid"].tolist() == [True]
    assert batch["status"].tolist() == [nrl.envs.STATUSES.index("parse_fail")]
    assert batch["rewards"].tolist() == [0.5]  # of `short`, as its rubric says


@pytest.mark.slow
def test_a_prompt_that_does_not_fit_ends_the_rollout(made: Any) -> None:
    long = Says("qwen3", [written("3 " * 40)], context_length=100)
    batch = nrl.rollout(long, made("twice"), [TASK])
    assert batch["valid"].tolist() == [True]
    assert components(batch)["num_turns"] == 1.0


@pytest.mark.slow
def test_tasks_are_the_rows_of_its_datasets(made: Any) -> None:
    every = made("once", 600)
    found = [every.tasks(0, index) for index in range(600)]
    assert sorted(int(each["answer"]) for each in found) == list(range(0, 1200, 2))
    assert found[0]["prompt"][0] == {"role": "system", "content": "Add."}
    assert [task["answer"] for task in found] != [made("once", 600).tasks(1, at)["answer"] for at in range(600)]
    assert {made("once", split="eval").tasks(0, at)["answer"] for at in range(9)} == {"2"}
    with pytest.raises(EnvError, match="the environment's dataset has no rows|refuses"):
        made("once", 0).tasks(0, 0)


@pytest.mark.slow
def test_a_process_that_is_killed_loses_its_episodes_alone(python: str, made: Any) -> None:
    env = made("twice")
    spec = _Spec("verifiers_0_1", json.dumps({"count": 3, "kind": "twice"}), (PACKAGE,), python)

    class Kills(Says):
        def generate(self, prompts: Any, **how: Any) -> Any:
            killed(spec)
            return super().generate(prompts, **how)

    with pytest.warns(UserWarning, match="verifiers: the process of verifiers_0_1 has ended with -9"):
        batch = nrl.rollout(Kills("qwen3", [written("3")]), env, [TASK])
    assert batch["valid"].tolist() == [False]
    assert played(env, ["3", "4"])["rewards"].tolist() == [1.125]


@pytest.mark.slow
def test_episodes_are_shared_among_processes(python: str, made: Any) -> None:
    env, arguments = made("twice", workers=2), json.dumps({"count": 3, "kind": "twice"})
    batch = nrl.rollout(Says("qwen3", [written("4")] * 16), env, [TASK], n=8)
    assert batch["rewards"].tolist() == [1.125] * 8
    second = _Spec("verifiers_0_1", arguments, (PACKAGE,), python, 1)
    assert next(_program(second)._ids) > 3  # it was asked to load, and for some of the episodes
    killed(second)
    with pytest.raises(ValueError, match="verifiers: workers is 0; give a positive number of processes"):
        made("twice", workers=0)


def test_an_episode_that_a_limit_ends_is_cancelled(made: Any) -> None:
    env = made("twice")
    cut = played(limited(env, turns=1), ["3"])
    assert cut["valid"].tolist() == [True]
    assert cut["env/limits/turns"].tolist() == [1.0]
    assert played(env, ["3", "4"])["rewards"].tolist() == [1.125]


def test_a_python_that_is_not_there_is_named() -> None:
    with pytest.warns(UserWarning, match="verifiers: the process of nobody: No such file or directory"):
        played(verifiers("nobody", python="/nowhere/python"), ["4"])


def test_verdicts() -> None:
    found = {"reward": 2, "metrics": {"right": 1.0}, "error": None, "why": None, "raised": []}
    assert _score(found) == Score(2.0, "ok", {"right": 1.0})
    empty = {**found, "error": "EmptyModelResponseError"}
    assert _score(empty) == Score(2.0, "parse_fail", {"right": 1.0})
    with pytest.raises(EnvError, match="verifiers: of nothing"):
        _score({**empty, "raised": ["of nothing"]})
    with pytest.raises(EnvError, match="verifiers: a; b"):
        _score({**found, "raised": ["a", "b"]})
    with pytest.raises(EnvError, match="verifiers: the rollout ended with an error: SandboxError"):
        _score({**found, "error": "SandboxError", "why": "SandboxError()"})


def test_the_name_of_the_resolver() -> None:
    made = nrl.environments({"verifiers": {"name": "gsm8k", "split": "eval"}})
    assert made.names == ("verifiers",)
    assert isinstance(made.env, Environment)
    assert made.env.tasks is not None


@pytest.mark.slow
def test_uv_installs_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)
    assert played(verifiers("verifiers_0_1"), ["It is 4"])["rewards"].tolist() == [1.25]
    with pytest.warns(UserWarning, match="has ended with 1; its last words: .*No solution found"):
        played(verifiers("verifiers_0_1", requirements=["verifiers==0.1.14", "regex==2026.11.15"]), ["4"])


HERE_TOO = """
import sys
sys.path += [sys.argv[1], sys.argv[2]]
import verifiers_0_1
from nrl.gym.adapters.prime import verifiers
from tests.envs.others.test_verifiers_classes import played
env = verifiers(verifiers_0_1.load_environment("twice"))
print(played(env, ["3", "4"], {**env.tasks(0, 0), "answer": "4"})["rewards"].tolist())
"""


@pytest.mark.slow
def test_an_environment_in_this_process(python: str) -> None:
    site = str(next(Path(python).parents[1].glob("lib/python3*/site-packages")))
    ran = subprocess.run(
        [sys.executable, "-c", HERE_TOO, site, str(HERE)],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert ran.stdout.splitlines()[-1:] == ["[1.125]"], ran.stderr


def trained(env: Environment, words: str, steps: int = 5) -> None:
    """Steps of which every sampled token is accounted for."""
    with nrl.cluster("local") as cluster:
        model = tiny.model(tokenizer=tiny.bpe([tiny.CHATML, words]))
        slots = cluster.reserve(1)
        trainer = fsdp.trainer(slots, model, nrl.adamw(lr=1e-3))
        sampler = hf.sampler(slots, model, nrl.Sampling(max_new_tokens=8))
        assert env.tasks is not None
        stream = nrl.batched(nrl.rollouts(sampler, env, data.tasks(env.tasks), n=4), 2)
        state, step = trainer.init(), trainer.train_step(grpo_loss)
        for _ in range(steps):
            (batch,) = stream.take(1)
            batch = nrl.assign(advantages(batch), old_logprobs=batch["rollout_logprobs"])
            assert batch["valid"].all()
            assert batch["sampled"].sum() == batch["loss_mask"].sum()
            state, _ = step(state, batch)
            nrl.publish(state.params, sampler)
        assert state.step == steps


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["once", "twice", "tool"])
def test_a_model_is_trained_behind_it(made: Any, kind: str) -> None:
    trained(made(kind), "Add. 0+0=1+1=2+2= Are you sure?")


ENDS = """
import sys
from nrl.gym.adapters.prime import environments
env = environments.verifiers("verifiers_0_1", python=sys.argv[1])
assert len({env.tasks(0, at)["answer"] for at in range(3)}) == 3
spec = environments._Spec("verifiers_0_1", "{}", ("verifiers==0.1.14",), sys.argv[1])
print(environments._program(spec)._process.pid)
"""


@pytest.mark.slow
def test_a_process_ends_with_this_one(python: str) -> None:
    """Nothing is left behind: its group is killed."""
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    root, env = Path(__file__).parents[3], {**os.environ, "PYTHONPATH": path}
    ran = subprocess.run([sys.executable, "-c", ENDS, python], cwd=root, env=env, stdout=subprocess.PIPE, check=True)
    status = Path(f"/proc/{int(ran.stdout)}/status")
    assert not status.exists() or "zombie" in status.read_text()
