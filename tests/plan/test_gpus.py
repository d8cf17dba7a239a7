"""Closed forms against models that are built, and the roofline by hand."""

from typing import Any

import pytest

from nrl.backends import Model
from nrl.backends.models import lora
from nrl.plan.gpus import Gpu, closed_flops, closed_parameters, estimate

TINY: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 512, "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_those_of_the_model(tied: bool) -> None:
    config = TINY | {"tie_word_embeddings": tied}
    built = lora.skeleton(Model(config))
    assert closed_parameters(config) == sum(parameter.numel() for parameter in built.parameters())


def test_flops_by_hand() -> None:
    config = TINY | {"tie_word_embeddings": True}
    # a layer's matrices: 2*64*16*(4+2) + 3*64*128 = 12,288 + 24,576; a head's: 512*64 = 32,768
    assert closed_flops(config, tokens=10, outputs=4) == 6 * (2 * 36_864 * 10 + 32_768 * 4)


def test_a_roofline_by_hand() -> None:
    gpu = Gpu(memory=1, flops=100, float32=10, bandwidth=20, link=5, capability=(9, 0))
    counted = {
        "flops": {"bfloat16": 200.0, "attention": 100.0, "float32": 20.0},
        "parameters": 40, "moments": 80, "gradients": 40, "collectives": {"gather": 4, "scatter": 6},
    }  # fmt: skip
    # 300/100 + 20/10 + (2*120 + 40)/20 + 10/5
    assert estimate(counted, gpu, tokens=42) == pytest.approx(
        {"seconds": 21.0, "tokens_per_second": 2.0, "mfu": 3 / 21}
    )
