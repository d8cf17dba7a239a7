"""NeMo Gym's own servers and agents, unmodified: the same rewards through nrl as through its own agents."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import nrl
from benchmarks._nemo_gym import free_port, installed
from nrl.envs import Environment
from nrl.envs.nemo_servers import nemo_gym, nemo_gym_agent, nemo_gym_rows
from tests.envs.endpoint.test_driven import Says, turn

PROCESS = Path(__file__).with_name("nemo_gym_process.py")
SERVERS = [
    *("arc_agi", "calendar", "example_multi_step", "example_session_state_mgmt", "example_single_tool_call"),
    *("format_verification", "gpqa_diamond", "graphwalks", "mcqa", "reasoning_gym", "ruler", "structured_outputs"),
    *("swe_pivot", "workplace_assistant", "blackjack"),
]
QUICK = ("example_session_state_mgmt", "blackjack")
MORE = ["reasoning-gym>=0.1.19", "openapi-schema-validator==0.6.3", "tomli-w==1.2.0", "xmltodict==1.0.2"]


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


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = installed(tmp_path_factory.mktemp("nemo") / "env")
    subprocess.run([sys.executable, "-m", "uv", "pip", "install", "-q", "-p", str(found), *MORE], check=True)
    return found


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
        return [[turn("qwen3", "<action>stand</action>")], [turn("qwen3", "<action>hit</action>")] * 9]
    if name == "example_session_state_mgmt":
        counted = [turn("qwen3", "", ("increment_counter", {"count": each})) for each in (1, 2)]
        return [[turn("qwen3", "3")], [*counted, turn("qwen3", "", ("get_counter_value", {})), turn("qwen3", "6")]]
    calls = called(row)
    first = [turn("qwen3", "", *calls)] if calls else []
    said = f"{answer} \\boxed{{{answer}}} <answer>{answer}</answer>"
    return [[turn("qwen3", "I do not know.")], [*first, turn("qwen3", said)]]


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
        for row in nemo_gym_rows(nemo.rows / name / "data" / "example.jsonl")[:3]:
            for texts in scripts(name, row):
                here, there = reward(own, row, texts), reward(theirs, row, texts)
                assert here == there, (name, texts)
                seen.setdefault(name, set()).add(here)
    print({name: sorted(rewards) for name, rewards in seen.items()})
    assert len(seen["example_session_state_mgmt"]) == 2  # right, and wrong
