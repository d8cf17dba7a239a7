"""Closed forms of Megatron's trainer against measured steps: activations by stage, and bytes of collectives."""

import json
import os
import subprocess
import sys
from typing import Any

import attrs
import pytest

from nrl.backends.training.outputs.head_chunks import CHUNK_BYTES
from nrl.ops.plan.analytic_megatron import estimate_stages
from nrl.ops.plan.simulate import Step
from nrl.runtime import Layout
from tests.backends.megatron import faked
from tests.backends.megatron.measured import measure
from tests.backends.processes import Processes

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(600)]

MODEL: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 128, "num_hidden_layers": 4, "head_dim": 16, "num_attention_heads": 8,
    "num_key_value_heads": 4, "intermediate_size": 512, "vocab_size": 512, "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}  # fmt: skip
STEP = Step(MODEL, rows=4, width=512, max_tokens=512, memory=80 * CHUNK_BYTES)  # chunks as on a CPU


def _sum(found: dict[str, float], *names: str) -> float:
    return sum(size for name, size in found.items() if name in names)


@pytest.mark.parametrize(
    ("layout", "change", "sent"),
    [
        (Layout(tp=2), {}, {"tensor": ("_allgather_base_", "_reduce_scatter_base_")}),
        (Layout(tp=2), {"checkpointing": True}, {"tensor": ("_allgather_base_", "_reduce_scatter_base_")}),
        (Layout(pp=2), {}, {"pipeline": ("send", "recv_")}),
        (Layout(pp=2, vp=2), {}, {"pipeline": ("send", "recv_")}),
        (Layout(cp=2), {}, {
            "context": ("_allgather_base_", "_reduce_scatter_base_"), "all_reduce": ("allreduce_coalesced_",),
        }),
        (Layout(dp=2), {}, {
            "reduce_scatter": ("reduce_scatter_tensor_coalesced_",),
            "all_gather": ("allgather_into_tensor_coalesced_",),
        }),
    ],
    ids=["tp", "tp, computed again", "pp", "vp", "cp", "dp"],
)  # fmt: skip
def test_a_measured_step(two: Processes, layout: Layout, change: dict[str, Any], sent: dict[str, Any]) -> None:
    """Activations within a tenth, at every stage. Collectives within a hundredth: rows are filled up to a multiple.

    Layers that are computed again lie in cycles, until Python happens to look for them; so their bound is a lower one.
    """
    step = attrs.evolve(STEP, dp=layout.dp, **change)
    stages = estimate_stages(step, layout)
    for measured in two(measure, step, layout):
        found = stages[measured["stage"]]
        activations = found["activations"] + found["at_peak"]["log-probabilities"]
        if step.checkpointing:
            assert 0.5 * measured["activations"] < activations < measured["activations"]
        else:
            assert activations == pytest.approx(measured["activations"], rel=0.1)
        assert found["collectives"].keys() == sent.keys()
        for name, size in found["collectives"].items():
            assert size == pytest.approx(_sum(measured["collectives"], *sent[name]), rel=0.01)


@pytest.mark.slow
def test_megatron_lets_itself_be_driven_on_fake_tensors() -> None:
    """As one of two processes along tp: what it sends and multiplies is what closed forms say."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.backends.megatron.faked", json.dumps({"tp": 2})]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    driven = json.loads(done.stdout.splitlines()[-1])
    found = estimate_stages(faked.STEP, Layout(tp=2))[0]
    sent = _sum(driven["collectives"], "_allgather_base_", "_reduce_scatter_base_")
    assert found["collectives"]["tensor"] == pytest.approx(sent, rel=0.01)
    for name in ("bfloat16", "attention"):
        assert found["flops"][name] == pytest.approx(driven["flops"][name], rel=0.02)
