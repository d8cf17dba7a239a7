"""Bounds of two steps that people take, so that a change which adds memory, a wait, a copy or a product shows.

Bytes and counts are what is true today. Who makes them smaller lowers the bounds here.
"""

from collections import Counter
from typing import Any

import pytest

from nrl.ops.plan.simulate import Step, simulate_step

pytestmark = pytest.mark.timeout(600)

QWEN3: dict[str, Any] = {"head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 40_960}
DENSE_8B = QWEN3 | {
    "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 12_288, "tie_word_embeddings": False,
}  # fmt: skip
MOE_30B_A3B = QWEN3 | {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "tie_word_embeddings": False,
}  # fmt: skip
TWO_LAYERS = {"num_hidden_layers": 2}
GIB = 2**30
ALLOWANCE = 6 * GIB
"""What a plan leaves out; see `nrl.ops.plan.plan_command`."""


def on_an_a100(model: dict[str, Any]) -> Step:
    """Rows that share a prompt of 1,024 tokens."""
    return Step(model, dp=8, rows=2, width=8192, shared=1024, checkpointing=True, capability=(8, 0))


def on_h100s(model: dict[str, Any]) -> Step:
    return Step(model, dp=8, rows=2, width=8192, checkpointing=True)


def by_file(stage: dict[str, Any]) -> Counter[tuple[str, str]]:
    found = Counter[tuple[str, str]]()
    for kind, line, count in stage["waits"]:
        found[kind, line.split(":")[0].rpartition("/")[2]] += count
    return found


OF_A_STEP = Counter({
    ("copy to the device", "h2d.py"): 1,
    ("copy to the host, blocking", "step_sums.py"): 1,
    ("copy to the host, blocking", "torch_engine.py"): 1,
})  # fmt: skip
OF_EXPERTS = Counter({("copy to the host, blocking", "expert_load_hooks.py"): 1})


def check(found: dict[str, Any], peaks: dict[str, int], waits: Counter[tuple[str, str]]) -> None:
    stages = found["stages"]
    over = {name: stages[name]["peak"] for name, most in peaks.items() if stages[name]["peak"] > most}
    assert not over, f"a peak has grown, in bytes; allowed are {peaks}"
    assert not by_file(stages["train"]) - waits, "a wait or copy has been added"
    assert found["float32_products"] == {}, "a product of float32 matrices has been added"
    assert set(found["attention"]) == {"varlen"}
    again = {name.split(":")[0] for name in found["recomputed"]}
    assert again <= {"layers", "attention", "backends/training/outputs/head_chunks.py"}, "more is computed again"
    # And 64 frequencies of positions, twice; and of each weight and moment that is saved whether it is finite
    held = found["parameters"] + found["moments"] + 512 + 256
    for name in ("save", "rest", "wake"):
        assert stages[name]["peak"] <= held, f"{name} holds a second copy on the device"
        assert not [each for each in stages[name]["waits"] if "blocking" in each[0]], f"a copy of {name} waits"


def test_two_layers_of_8b_with_a_shared_prompt_on_an_a100() -> None:
    found = simulate_step(on_an_a100(DENSE_8B | TWO_LAYERS))
    peaks = {"train": 11_847_195_000, "forward": 8_331_000_000, "publish": 6_537_000_000}
    check(found, peaks, OF_A_STEP)
    assert found["flops"]["bfloat16"] <= 115.41e12  # of which a sixth is the head's, which is computed again
    assert found["attention"] == {"varlen": 4}  # one a layer, and one where it is computed again


@pytest.mark.slow
def test_two_layers_of_30b_with_experts() -> None:
    found = simulate_step(on_h100s(MOE_30B_A3B | TWO_LAYERS))
    peaks = {"train": 13_652_000_000, "forward": 8_969_000_000, "publish": 4_941_000_000}
    check(found, peaks, OF_A_STEP + OF_EXPERTS)


@pytest.mark.slow
def test_a_layer_adds_its_weights_its_moments_and_the_states_that_it_begins_with() -> None:
    """And nothing else: so bounds of few layers say what many take."""
    three, four = (simulate_step(on_an_a100(DENSE_8B | {"num_hidden_layers": layers})) for layers in (3, 4))
    weights, moments = (four[name] - three[name] for name in ("parameters", "moments"))
    assert weights == 192_946_432 * 4 // 8  # of a layer, in float32, on eight devices
    tokens = 8192 + 8192 - 37 - 1024 - 2  # the prompt is there once, and the last of each row predicts nothing
    states = tokens * 4096 * 2
    assert four["stages"]["train"]["peak"] - three["stages"]["train"]["peak"] == weights + moments + states


@pytest.mark.slow
def test_all_of_8b_with_a_shared_prompt_on_an_a100() -> None:
    found = simulate_step(on_an_a100(DENSE_8B))
    peaks = {"train": 26_340_685_000, "forward": 18_171_000_000, "publish": 19_956_000_000}
    check(found, peaks, OF_A_STEP)


@pytest.mark.slow
def test_all_of_8b_takes_at_most_30_gib() -> None:
    found = simulate_step(on_h100s(DENSE_8B))
    assert found["peak"] <= 26_925_000_000 < 30 * GIB
    assert not by_file(found["stages"]["train"]) - OF_A_STEP
    assert found["float32_products"] == {}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_of_30b_with_experts_fits_on_eight_gpus() -> None:
    found = simulate_step(on_h100s(MOE_30B_A3B))
    most = max(stage["peak"] for stage in found["stages"].values())
    assert most + ALLOWANCE <= 79 * GIB
    assert not by_file(found["stages"]["train"]) - OF_A_STEP - OF_EXPERTS
