"""A server of a gym dies while rollouts are under way: others go on, its rows are masked, and it comes back."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import nrl
from nrl.envs import STATUSES, by_source
from nrl.gym.config.resolving import resolve
from nrl.gym.config.run_registry import Place
from tests.gym.cli.test_gym_run import folder, played, the, until, wrote
from tests.rollout.scripted import Scripted

__all__ = ["folder"]

HELD = """
import asyncio
from nrl.envs import Environment, Step

async def step(state, turn):
    number, name, told = state
    with open(told, "a") as begun:
        begun.write(f"{number}\\n")
    if name == "dies":
        await asyncio.sleep(1000)
    return Step(state, float(number))

env = Environment(lambda task: ((task["number"], task["name"], task["told"]), task["prompt"]), step)
"""
ROWS = 8  # every second one of the server that dies


@pytest.mark.parametrize("limit", [60.0, pytest.param(3.0, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:.*episodes failed:UserWarning")
def test_only_rows_of_a_server_that_dies_are_masked_and_it_comes_back(folder: Path, limit: float) -> None:
    """Twice. Rewards are numbers of tasks: one that was invented would be another."""
    (folder / "held.py").write_text(HELD)
    seconds = list[float]()

    def drive(place: Place) -> None:
        found = resolve(["gym.yaml"])
        env = by_source(*(nrl.remote(found[name].urls, token=found[name].token) for name in ("dies", "lives")))
        lives = the(place, "lives")
        for death in (1, 2):
            told = folder / f"begun{death}"
            killing = threading.Thread(target=kill, args=(place, told, death))
            killing.start()
            stream = nrl.rollouts(Scripted(["1"] * ROWS), env, nrl.data.tasks(task_of(told)), n=1, seed=0)
            batch = nrl.batched(stream, ROWS).take(1)[0]
            killing.join()
            assert [STATUSES[int(each)] for each in batch["status"]] == ["infra_error", "ok"] * (ROWS // 2)
            assert batch["valid"].tolist() == [False, True] * (ROWS // 2)
            assert batch["rewards"][1::2].tolist() == [1.0, 3.0, 5.0, 7.0]
            assert not batch["rewards"][::2].nan_to_num().any()
            assert the(place, "lives") == lives

    def kill(place: Place, told: Path, death: int) -> None:
        until(lambda: told.exists() and len(told.read_text().split()) == ROWS)
        pid = the(place, "dies")["pid"]
        os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        until(lambda: (one := the(place, "dies"))["restarts"] == death and one["state"] == "ready")
        seconds.append(time.monotonic() - began)

    servers = "".join(f"  {name}: {{environment: 'held.py:env'}}\n" for name in ("dies", "lives"))
    assert played(wrote(folder, servers), drive) == 143
    assert max(seconds) < limit, seconds


def task_of(told: Path) -> Any:
    """Tasks of the two servers, in turns."""

    def task(seed: int, index: int) -> dict[str, Any]:
        source = index % 2
        return {
            "prompt": f"{index}+1=", "number": index, "source": source, "name": ("dies", "lives")[source],
            "told": str(told),
        }  # fmt: skip

    return task
