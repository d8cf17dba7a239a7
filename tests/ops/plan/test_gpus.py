"""The roofline by hand."""

from typing import Any

import pytest

from nrl.ops.plan.gpus import GPUS, Gpu, estimate

TINY: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 512, "max_position_embeddings": 4096,
}  # fmt: skip


def test_a_roofline_by_hand() -> None:
    gpu = Gpu(memory=1, flops=100, float32=10, bandwidth=20, link=5, network=0.5, host=1, capability=(9, 0))
    counted = {
        "flops": {"bfloat16": 200.0, "attention": 100.0, "float32": 20.0},
        "model": 105.0, "parameters": 40, "moments": 80, "gradients": 40, "collectives": {"gather": 4, "scatter": 6},
    }  # fmt: skip
    # 250/100, with half of attention, + 20/10 + (2*120 + 40)/20 + 10/5
    assert estimate(counted, gpu, tokens=41) == pytest.approx(
        {"seconds": 20.5, "tokens_per_second": 2.0, "hfu": 2.5 / 20.5, "mfu": 1.05 / 20.5}
    )
    counted["collectives"] = {"gather": 4, "scatter": 2, "all_reduce": 2}
    assert estimate(counted, gpu, tokens=42)["seconds"] == 20.5  # which goes twice
    # among two machines: 10 bytes at 8*0.5; half of a pipeline's time is a bubble, so products take twice as long
    assert estimate(counted | {"bubble": 0.5}, gpu, tokens=42, devices=16)["seconds"] == pytest.approx(9 + 14 + 2.5)


def test_rings_have_as_many_adapters_as_ranks_in_a_machine() -> None:
    gpu = Gpu(memory=1, flops=1, float32=1, bandwidth=1, link=100, network=5, host=1, capability=(9, 0))
    none = {"flops": {}, "model": 0.0, "parameters": 0, "moments": 0, "gradients": 0}
    for ring, way in {
        (8, 1): 100, (8, 4): 100,  # in a machine
        (64, 1): 40, (64, 2): 20, (64, 4): 10, (64, 8): 5, (64, 32): 5,
        (12, 1): 20, (9, 1): 5,  # of which four are in the second machine, and one
        (3, 1): 5,  # 6, 7, 8 are in two
    }.items():  # fmt: skip
        counted = none | {"collectives": {"sum": 200}, "rings": {"sum": ring}}
        assert estimate(counted, gpu, tokens=1)["seconds"] == 200 / way, ring
        if ring[1] == 1:  # as of the torch trainer
            assert estimate(none | {"collectives": {"sum": 200}}, gpu, 1, ring[0])["seconds"] == 200 / way


def test_a_pipeline_is_as_slow_as_its_slowest_stage() -> None:
    gpu = Gpu(memory=1, flops=10, float32=1, bandwidth=1, link=1, network=1, host=1, capability=(9, 0))
    one = {
        "flops": {"bfloat16": 10.0}, "model": 5.0, "collectives": {}, "parameters": 0, "moments": 0, "gradients": 0,
    }  # fmt: skip
    slow = one | {"flops": {"bfloat16": 30.0}, "model": 25.0}
    found = estimate(one | {"pipeline": [(3, one), (1, slow)]}, gpu, tokens=6)
    assert found == {"seconds": 3.0, "tokens_per_second": 2.0, "hfu": 6 / 12, "mfu": 4 / 12}  # of all of them


def test_memory_is_what_programs_can_have() -> None:
    """A little less than cards have by NVML, in MiB."""
    for name, card in {"a100": 81_920, "h100": 81_559, "h200": 143_771, "b200": 183_359}.items():
        assert 0.985 < GPUS[name].memory / (card * 2**20) < 1
