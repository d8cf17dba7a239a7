"""Environments of nrl as resources servers of NeMo Gym, which its agents lead, unmodified."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import nrl
from benchmarks._nemo_gym import free_port
from nrl.envs import Environment, Step, Trace, exact
from nrl.envs.nemo_rows import nemo_gym_row
from nrl.envs.nemo_servers import nemo_gym_agent
from nrl.envs.nemo_serving import nemo_gym_protocol
from nrl.envs.tools import NewState, State, tool, tool_use
from tests.envs.endpoint.test_driven import Says, turn

PROCESS = Path(__file__).with_name("nemo_gym_process.py")
AGENTS = {"counter": "simple_agent", "letters": "simple_agent", "guess": "gymnasium_agent"}


def put(item: str, basket: State[tuple[str, ...]]) -> NewState:
    """Put an item into the basket."""
    return NewState((*basket, item), result=f"{len(basket) + 1} items")


def filled(task: Any, trace: Trace) -> dict[str, float]:
    """Half of it for the answer, the rest for each call and for what the tools have said."""
    said = [message["content"] for seen in trace.observations for message in seen]
    calls = [call.arguments["item"] for each in trace.turns for call in each.calls]
    right = float(task["answer"] in trace.text)
    return {"right": right / 2, "called": len(calls) / 8, "told": float("2 items" in said) / 16}


basket = tool_use([tool(put)], filled, state=lambda task: ())


def _guess_reset(task: Any) -> Any:
    return (task["number"], 3), [{"role": "user", "content": "Guess a number."}]


def _guess_step(state: Any, said: Any) -> Step:
    number, left = state
    if int(said) == number or left == 1:
        return Step(state, reward=float(int(said) == number))
    hint = "less" if number < int(said) else "more"
    return Step((number, left - 1), reward=-0.125, done=False, observation=[{"role": "user", "content": hint}])


guess = Environment(_guess_reset, _guess_step, None, lambda task, trace: {"turns": len(trace.turns) / 64})
ENVS: dict[str, Any] = {"counter": basket, "letters": exact, "guess": guess}


class Served(NamedTuple):
    urls: dict[str, str]
    agents: dict[str, str]
    model: int


@pytest.fixture(scope="module")
def served(python: Path) -> Iterator[Served]:
    """Environments of this process, and agents of NeMo Gym, which are told where they are."""
    model = free_port()
    servers = {name: nrl.serve(env, protocol=nemo_gym_protocol) for name, env in ENVS.items()}
    agents = {name: free_port() for name in ENVS}
    spec: list[Any] = [["responses_api_models", "policy", "policy", model, None]]
    for name, server in servers.items():
        spec.append(["resources_servers", name, name, int(server.url.rpartition(":")[2]), None])
        refs = {
            "resources_server": {"type": "resources_servers", "name": name},
            "model_server": {"type": "responses_api_models", "name": "policy"},
        }
        spec.append(["responses_api_agents", AGENTS[name], f"{name}_agent", agents[name], refs])
    process = subprocess.Popen(
        [str(python), str(PROCESS), json.dumps(spec)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert any(line.strip() == "ready" for line in process.stdout)
    yield Served(
        {name: each.url for name, each in servers.items()},
        {name: f"http://127.0.0.1:{port}" for name, port in agents.items()},
        model,
    )
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    for each in servers.values():
        each.stop()


def reward(env: Any, task: dict[str, Any], texts: list[str]) -> float:
    policy = Says("qwen3", texts, context_length=10**6)
    batch = nrl.rollout(policy, env, [task])
    assert batch["valid"].all()
    assert not policy.texts
    return float(batch["rewards"][0])


SHOP = {"prompt": "Buy tea and milk.", "answer": "done"}
TEA, MILK = ("put", {"item": "tea"}), ("put", {"item": "milk"})
PLAYS: list[tuple[str, dict[str, Any], list[str], float]] = [
    ("counter", SHOP, [turn("qwen3", "I do not know.")], 0.0),
    ("counter", SHOP, [turn("qwen3", "", TEA), turn("qwen3", "", MILK), turn("qwen3", "done")], 0.8125),
    ("counter", SHOP, [turn("qwen3", "", TEA, MILK), turn("qwen3", "done")], 0.8125),
    ("counter", SHOP, [turn("qwen3", "", TEA), turn("qwen3", "no")], 0.125),
    ("letters", {"prompt": "2+2=", "answer": "4"}, [turn("qwen3", "4")], 1.0),
    ("letters", {"prompt": "2+2=", "answer": "4"}, [turn("qwen3", "5")], 0.0),
    ("guess", {"number": 7}, [turn("qwen3", each) for each in ("9", "7")], -0.125 + 1 + 2 / 64),
    ("guess", {"number": 7}, [turn("qwen3", each) for each in ("1", "2", "3")], -0.25 + 3 / 64),
]


@pytest.mark.parametrize(("name", "task", "texts", "wanted"), PLAYS)
def test_its_agents_are_given_the_rewards_of_a_rollout(
    served: Served, name: str, task: dict[str, Any], texts: list[str], wanted: float
) -> None:
    theirs = nemo_gym_agent(served.agents[name], port=served.model)
    row = nemo_gym_row(task, ENVS[name])
    assert reward(theirs, row, texts) == wanted
    if name != "letters":
        assert reward(ENVS[name], task, texts) == wanted
