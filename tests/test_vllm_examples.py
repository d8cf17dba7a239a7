"""The example with a real vLLM engine, in an environment of its own, between two meshes."""

import json
from pathlib import Path

import attrs
import pytest

from examples import grpo
from nrl.runtime import Cluster

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_grpo_learns_with_vllm(on_ray: Cluster, tmp_path: Path) -> None:
    cfg = attrs.evolve(grpo.Config(), out=str(tmp_path), cluster="ray", sampler="vllm-cpu", steps=50, held_out=None)
    grpo.main(cfg)
    found = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rewards = [each["reward"] for each in found]
    assert [each["lag"] for each in found] == [0] * 50
    assert sum(rewards[-10:]) / 10 > sum(rewards[:10]) / 10 + 0.15
    assert max(each["ratio_max"] for each in found) < 1.001  # the sampler's log-probabilities are the trainer's
