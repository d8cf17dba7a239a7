"""NeMo Gym's own servers and agents, unmodified: the same rewards through nrl as through its own agents."""

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import nrl
from benchmarks._nemo_gym import free_port
from nrl import data, tiny
from nrl.algos import advantages, grpo_loss
from nrl.backends import fsdp, hf
from nrl.envs import Environment
from nrl.envs.nemo_servers import nemo_gym, nemo_gym_agent, nemo_gym_rows
from nrl.errors import EnvError
from tests.envs.endpoint.test_driven import Says, turn

PROCESS = Path(__file__).with_name("nemo_gym_process.py")
SERVERS = [
    *("arc_agi", "calendar", "example_multi_step", "example_session_state_mgmt", "example_single_tool_call"),
    *("format_verification", "gpqa_diamond", "graphwalks", "mcqa", "reasoning_gym", "ruler", "structured_outputs"),
    *("swe_pivot", "workplace_assistant", "blackjack"),
]
QUICK = ("example_session_state_mgmt", "blackjack")


class Nemo(NamedTuple):
    """NeMo Gym's servers that run.

    Args:
        urls: of resources servers and of agents, by name.
        rows: the folder of the resources servers, with example rows.
        model: the port at which its agents ask a model.
    """

    urls: dict[str, str]
    rows: Path
    model: int


def running(python: Path, names: Sequence[str], model: int) -> "tuple[Nemo, subprocess.Popen[str]]":
    ports = {name: free_port() for name in names}
    agents = {f"{name}_agent": free_port() for name in names}
    spec: list[Any] = [["resources_servers", name, name, port, {}] for name, port in ports.items()]
    for name, port in agents.items():
        of = name.removesuffix("_agent")
        refs = {
            "resources_server": {"type": "resources_servers", "name": of},
            "model_server": {"type": "responses_api_models", "name": "policy"},
        }
        kind = "gymnasium_agent" if of == "blackjack" else "simple_agent"
        spec.append(["responses_api_agents", kind, name, port, refs])
    spec.append(["responses_api_models", "policy", "policy", model, None])
    process = subprocess.Popen(
        [str(python), str(PROCESS), json.dumps(spec)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert any(line.strip() == "ready" for line in process.stdout)
    rows = next((python.parent.parent / "lib").glob("python3*/site-packages/resources_servers"))
    return Nemo({name: f"http://127.0.0.1:{port}" for name, port in (ports | agents).items()}, rows, model), process


@pytest.fixture(scope="module", params=[pytest.param("all", marks=pytest.mark.slow), "quick"])
def nemo(python: Path, request: pytest.FixtureRequest) -> Iterator[Nemo]:
    found, process = running(python, SERVERS if request.param == "all" else QUICK, free_port())
    yield found
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()  # type: ignore[union-attr]


def called(row: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """A call of the first tool that a row offers, with arguments of the right types."""
    some = {"integer": 1, "number": 1.0, "string": "Paris", "boolean": True, "array": [], "object": {}}
    for tool in row["responses_create_params"].get("tools") or ():
        known = tool["parameters"].get("properties", {})
        return [(tool["name"], {key: some.get(str(value.get("type")), "Paris") for key, value in known.items()})]
    return []


def scripts(name: str, row: dict[str, Any]) -> list[list[str]]:
    """What the model says in each turn: nothing useful, and what might be right."""
    answer = str(row.get("expected_answer") or row.get("answer") or (row.get("outputs") or ["A"])[0])
    if name == "blackjack":
        hit, stand = (turn("qwen3", f"<action>{each}</action>") for each in ("hit", "stand"))
        return [[*[hit] * hits, stand] for hits in range(4)]
    if name == "example_session_state_mgmt":
        counted = [turn("qwen3", "", ("increment_counter", {"count": each})) for each in (1, 2)]
        return [[turn("qwen3", "3")], [*counted, turn("qwen3", "", ("get_counter_value", {})), turn("qwen3", "6")]]
    calls = called(row)
    first = [turn("qwen3", "", *calls)] if calls else []
    said = f"{answer} \\boxed{{{answer}}} <answer>{answer}</answer>"
    return [[turn("qwen3", "I do not know.")], [*first, turn("qwen3", said)]]


def asked(row: dict[str, Any]) -> str:
    """What a row asks last."""
    given = row["responses_create_params"]["input"]
    return given if isinstance(given, str) else str(given[-1]["content"])


def stored(folder: Path) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Example rows with the turns of a model that was better than this one, where they lie beside them."""
    rows = {asked(row): row for row in nemo_gym_rows(folder / "data" / "example.jsonl")}
    for line in (folder / "data" / "example_rollouts.jsonl").read_text().splitlines():
        given = json.loads(line)
        texts, calls = list[str](), list[tuple[str, dict[str, Any]]]()
        for item in [*given["response"]["output"], {"type": "end"}]:
            if item["type"] == "function_call":
                calls.append((item["name"], json.loads(item["arguments"])))
                continue
            texts += [turn("qwen3", "", *calls)] if calls else []
            calls = []
            if item["type"] == "message" and item.get("role") == "assistant":
                texts.append(turn("qwen3", "".join(part["text"] for part in item["content"])))
        if texts and asked(given) in rows:
            yield rows[asked(given)], texts


def reward(env: Environment, row: dict[str, Any], texts: list[str]) -> float:
    policy = Says("qwen3", texts, context_length=10**6)
    batch = nrl.rollout(policy, env, [row])
    assert batch["valid"].all()
    return float(batch["rewards"][0])


def test_rewards_are_those_of_its_own_agents(nemo: Nemo) -> None:
    seen = dict[str, set[float]]()
    for name in nemo.urls.keys() & set(SERVERS):
        own = nemo_gym(nemo.urls[name])
        theirs = nemo_gym_agent(nemo.urls[f"{name}_agent"], port=nemo.model)
        tried = [] if name == "blackjack" else list(stored(nemo.rows / name))[:5]
        for row in nemo_gym_rows(nemo.rows / name / "data" / "example.jsonl")[:3]:
            tried += [(row, texts) for texts in scripts(name, row)]
        for row, texts in tried:
            here, there = reward(own, row, texts), reward(theirs, row, texts)
            assert here == there, (name, texts)
            seen.setdefault(name, set()).add(here)
    print({name: sorted(rewards) for name, rewards in seen.items()})
    several = [name for name, rewards in seen.items() if len(rewards) > 1]  # what is right, and what is wrong
    assert "example_session_state_mgmt" in several
    assert len(several) >= (11 if len(seen) == len(SERVERS) else 1)


@pytest.mark.slow
@pytest.mark.parametrize("of", QUICK)
def test_its_agents_train_a_model(python: Path, of: str) -> None:
    """Twenty steps, of which every sampled token is accounted for; the agents are NeMo Gym's own."""
    found, process = running(python, [of], free_port())
    try:
        rows = str(found.rows / of / "data" / "example.jsonl")
        env = nemo_gym_agent(found.urls[f"{of}_agent"], port=found.model, tasks=rows)
        with nrl.cluster("local") as cluster:
            model = tiny.model(tokenizer=tiny.bpe([tiny.CHATML, Path(rows).read_text()]))
            slots = cluster.reserve(1)
            trainer = fsdp.trainer(slots, model, nrl.adamw(lr=1e-3))
            sampler = hf.sampler(slots, model, nrl.Sampling(max_new_tokens=8))
            assert env.tasks is not None
            stream = nrl.batched(nrl.rollouts(sampler, env, data.tasks(env.tasks), n=4), 2)
            state, step = trainer.init(), trainer.train_step(grpo_loss)
            for _ in range(20):
                (batch,) = stream.take(1)
                batch = nrl.assign(advantages(batch), old_logprobs=batch["rollout_logprobs"])
                assert batch["valid"].all()
                assert batch["sampled"].sum() == batch["loss_mask"].sum()
                state, _ = step(state, batch)
                nrl.publish(state.params, sampler)
            assert state.step == 20
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]


class Broken(NamedTuple):
    """What a server says that is none of NeMo Gym's."""

    status: int
    body: str


@pytest.fixture
def broken() -> Iterator[Any]:
    """A server that answers each path as it is told."""
    answers = dict[str, Broken]()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answers.get(self.path, Broken(200, '{"paths": {}}'))
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(found.status)
            self.send_header("content-length", str(len(found.body)))
            self.end_headers()
            self.wfile.write(found.body.encode())

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", answers
    server.shutdown()
    server.server_close()


ROW = {"responses_create_params": {"input": "Hi"}}


@pytest.mark.parametrize(
    ("path", "answer", "row", "why"),
    [
        ("/seed_session", Broken(500, "oh"), ROW, "/seed_session answers with 500: oh"),
        ("/seed_session", Broken(200, "[]"), ROW, r"/seed_session answers with 200: \[\]"),
        ("/verify", Broken(200, '{"reward": null}'), ROW, 'gives no reward; it says {"reward": null}'),
        ("/none", Broken(200, "{}"), {"prompt": "Hi"}, "the task has no 'responses_create_params'"),
        ("/none", Broken(200, "{}"), {"responses_create_params": {"input": 3}}, "input: there is none"),
    ],
)
def test_what_a_server_or_a_row_lacks_is_named(broken: Any, path: str, answer: Broken, row: Any, why: str) -> None:
    url, answers = broken
    answers |= {"/seed_session": Broken(200, "{}"), "/verify": Broken(200, '{"reward": 1}'), path: answer}
    with pytest.warns(UserWarning, match=why):
        batch = nrl.rollout(Says("qwen3", [turn("qwen3", "Hi")]), nemo_gym(url), [row])
    assert batch["valid"].tolist() == [False]


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.warns(UserWarning, match="/openapi.json does not answer: .*"):
        batch = nrl.rollout(Says("qwen3", []), nemo_gym(f"http://127.0.0.1:{free_port()}"), [ROW])
    assert batch["valid"].tolist() == [False]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has no rows"),
        ("{", "line 1: Expecting property name"),
        ('{"responses_create_params": {"input": "Hi"}}\n{}', "line 2: nemo_gym: the task has no"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(EnvError, match=why):
        nemo_gym("http://127.0.0.1:1", tasks=str(tmp_path / "rows.jsonl"))


def test_tasks_come_in_another_order_each_epoch(tmp_path: Path) -> None:
    rows = [{"responses_create_params": {"input": str(at)}} for at in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tasks: Any = nemo_gym("http://127.0.0.1:1", tasks=str(tmp_path / "rows.jsonl")).tasks
    first, second = ([asked(dict(tasks(7, at))) for at in range(begin, begin + 8)] for begin in (0, 8))
    assert sorted(first) == sorted(second) == [str(at) for at in range(8)]
    assert first != second
    assert first == [asked(dict(tasks(7, at))) for at in range(8)]
