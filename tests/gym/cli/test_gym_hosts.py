"""A gym on one host, and who plays it on another, over a cable that is slow and loses packets."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.hosts import FIRST, Host, hosts

EPISODES, TURNS = 200, 4
PLAYED = """
import asyncio, json, os, random, sys
import nrl
from nrl.envs import Environment, Step, Trace, Turn

acts = os.open(os.environ["ACTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def drawn(kind, *of):
    os.write(acts, (json.dumps([kind, *of]) + "\\n").encode())
    return random.Random(repr(of)).random()

async def reset(task):
    drawn("reset", task["seed"])
    return (task["seed"], 0), f"{task['seed']}?"

async def step(state, turn):
    seed, taken = state
    return Step((seed, taken + 1), drawn("step", seed, taken, turn.text), taken + 1 == TURNS, f"{taken}!" * 500)

async def close(state):
    drawn("close", *state)

async def verify(task, trace):
    return drawn("verify", task["seed"], trace.text)

env = Environment(reset, step, close, verify)

async def episode(env, seed):
    task, rewards = {"seed": seed}, []
    state, said = await env.reset(task)
    for _ in range(TURNS):
        taken = await env.step(state, Turn(f"{said[:9]} {seed}" * 50))
        state, said = taken.state, taken.observation
        rewards.append(taken.reward)
    rewards.append(await env.verifier(task, Trace("", [str(rewards)])))
    await env.close(state)
    return rewards

async def all_episodes(env):
    return await asyncio.gather(*(episode(env, seed) for seed in range(EPISODES)))

if __name__ == "__main__":
    print(json.dumps(asyncio.run(all_episodes(nrl.remote(sys.argv[1]) if sys.argv[1:] else env))))
"""


def played(folder: Path, acts: str, *words: str, enter: tuple[str, ...] = ()) -> list[list[float]]:
    env = os.environ | {"ACTS": str(folder / acts), "NRL_GYM_TOKEN": "a-token-that-both-know"}
    command = [*enter, sys.executable, str(folder / "played.py"), *words]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    found: list[list[float]] = json.loads(done.stdout)
    return found


def resent(host: Host) -> int:
    """Segments that a host has sent again, since it never heard of their arrival."""
    told = subprocess.run([*host.enter, "cat", "/proc/net/snmp"], stdout=subprocess.PIPE, text=True, check=True).stdout
    names, values = (line.split() for line in told.splitlines() if line.startswith("Tcp:"))
    return int(values[names.index("RetransSegs")])


def test_rewards_over_a_slow_and_lossy_cable_are_those_of_here_and_nothing_acts_twice(tmp_path: Path) -> None:
    (tmp_path / "played.py").write_text(f"EPISODES, TURNS = {EPISODES}, {TURNS}\n{PLAYED}")
    servers = "servers:\n  played: {environment: 'played.py:env', port: 8000}\n"
    (tmp_path / "gym.yaml").write_text(f"default_host: {FIRST}\ntoken: ${{gym_token}}\n{servers}")
    env = {"ACTS": str(tmp_path / "far"), "GYM_TOKEN": "a-token-that-both-know", "NRL_GYM_DIR": str(tmp_path / "gyms")}
    with hosts(50, 1) as (one, other):
        command = [*one.enter, sys.executable, "-m", "nrl", "gym", "run", "gym.yaml"]
        with subprocess.Popen(command, cwd=tmp_path, env=os.environ | env, stdout=subprocess.DEVNULL) as run:
            try:
                here = played(tmp_path, "here")
                there = played(tmp_path, "-", f"http://{FIRST}:8000", enter=other.enter)
                assert resent(one) > 0
                assert resent(other) > 0
            finally:
                run.terminate()
    assert there == here
    assert acted(tmp_path / "far") == acted(tmp_path / "here")
    assert set(acted(tmp_path / "far").values()) == {1}
    assert len(acted(tmp_path / "far")) == EPISODES * (TURNS + 3)


def acted(file: Path) -> Counter[Any]:
    """How often each call was made."""
    return Counter(file.read_text().splitlines())
