"""GRPO on Ray against a gym with a server here and one on another host: the rewards of the same run in one process."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples import grpo
from nrl.backends import Sampling
from nrl.gym.config.resolving import ask
from nrl.gym.config.run_registry import places
from nrl.runtime import Cluster
from tests.gym.cli.test_gym_run import until
from tests.hosts import SECOND, hosts
from tests.jsonlines import lines

pytestmark = [pytest.mark.ray]

FAR = f"""
default_host: {SECOND}
token: ${{gym_token}}
servers:
  exact: {{environment: exact, port: 8000}}
"""
NEAR = f"""
head_server: {{port: 0}}
servers:
  number: {{environment: number}}
  exact: {{url: "http://{SECOND}:8000", token: "${{gym_token}}"}}
"""


def trained(out: Path, **options: Any) -> list[dict[str, Any]]:
    small = {"steps": 4, "prompts": 8, "group_size": 4, "evaluate_every": 4, "evaluate_prompts": 32}
    small |= {"warmup": 30, "warmup_rows": 64}
    grpo.main(grpo.Config(out=str(out), sampling=Sampling(max_new_tokens=4), **small, **options))  # type: ignore[arg-type]
    return lines(out / "metrics.jsonl")


def rewards(of: list[dict[str, Any]]) -> list[dict[str, float]]:
    """What metrics say of them, by step."""
    return [{key: value for key, value in line.items() if "reward" in key} for line in of]


def test_rewards_of_servers_on_two_hosts_are_those_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_ray: Cluster
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NRL_GYM_DIR", str(tmp_path / "gyms"))
    monkeypatch.setenv("GYM_TOKEN", "a-token-that-both-know")
    (tmp_path / "far.yaml").write_text(FAR)
    (tmp_path / "near.yaml").write_text(NEAR)
    command = [sys.executable, "-m", "nrl", "gym", "run"]
    with hosts(1, 0, here=True) as (_, other):
        elsewhere = os.environ | {"NRL_GYM_DIR": str(tmp_path / "gyms of the other host")}
        far = subprocess.Popen([*other.enter, *command, "far.yaml"], env=elsewhere, stdout=subprocess.DEVNULL)
        near = subprocess.Popen([*command, "near.yaml"], stdout=subprocess.DEVNULL)
        try:
            here = trained(tmp_path / "here", env={"number": 1, "exact": 1})
            until(lambda: (known := places()) and ask(known[0])["ready"])
            there = trained(tmp_path / "there", env="near.yaml", cluster="ray")
        finally:
            for each in (near, far):
                each.terminate()
                each.wait()
    assert rewards(there) == rewards(here)
    assert {"reward", "number/reward", "exact/reward", "eval/reward"} <= set(rewards(here)[-1])
    for source in ("number", "exact"):
        assert sum(line[f"{source}/reward"] for line in here) > 0
