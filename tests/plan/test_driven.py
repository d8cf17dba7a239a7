"""The engine on fake CUDA tensors: what a small step needs, whose numbers fail when a change adds to them."""

from collections import Counter
from typing import Any

import attrs
import pytest

from nrl.errors import ConfigError
from nrl.plan import fake_cuda
from nrl.plan.driven import Step, drive
from nrl.plan.gpus import closed_flops, closed_parameters
from tests.plan.test_gpus import TINY

pytestmark = pytest.mark.timeout(300)
SMALL = TINY | {"tie_word_embeddings": True}
STEP = Step(SMALL, dp=2, rows=2, width=256)


@pytest.fixture(scope="module")
def counted() -> dict[str, Any]:
    return drive(STEP)


def test_what_a_process_holds(counted: dict[str, Any]) -> None:
    count = closed_parameters(SMALL)
    assert counted["count"] == count
    assert counted["parameters"] == counted["gradients"] == 4 * count / 2  # float32, of two processes
    steps = counted["moments"] - 2 * counted["parameters"]
    assert 0 < steps < 1024  # each parameter counts its steps, in a float32


def test_products_are_those_of_the_closed_form(counted: dict[str, Any]) -> None:
    tokens = outputs = 255 + 218  # a row's last token predicts nothing
    flops = counted["flops"]
    assert flops["bfloat16"] + flops["float32"] == closed_flops(SMALL, tokens, outputs)
    # 2 layers, 4 heads of size 16: 2 products forward and 5 backward, of each token with as many as the longest row has
    assert flops["attention"] == 2 * 7 * 2 * 4 * tokens * 255 * 16
    assert counted["attention"] == {"varlen": 2}  # one call a layer, whatever the rows


def test_only_the_head_is_float32(counted: dict[str, Any]) -> None:
    """Three products, of 473 tokens; a product in float32 in any other place is a mistake."""
    assert {line.split(":")[0] for line in counted["float32_products"]} == {"backends/training/fused_logprobs.py"}
    assert counted["flops"]["float32"] == 6 * 512 * 64 * 473


def test_waits_and_copies(counted: dict[str, Any]) -> None:
    """Of one micro-batch and one optimizer step. Who adds one here makes each step on a GPU slower."""
    found = Counter[tuple[str, str]]()
    for kind, line, count in counted["waits"]:
        found[kind, line.split(":")[0].rpartition("/")[2]] += count
    assert found == {
        ("copy to the device, blocking", "outputs.py"): 4,
        ("copy to the device, blocking", "packed_attention.py"): 1,
        ("copy to the device, blocking", "heads.py"): 1,
        ("copy to the device, blocking", "torch_engine.py"): 1,
        ("copy to the device", "torch_engine.py"): 7,
        ("copy to the host", "step_sums.py"): 2,
        ("aten._local_scalar_dense.default", "step_sums.py"): 1,
    }


def test_the_peak(counted: dict[str, Any]) -> None:
    assert counted["peak"] <= 7_416_000
    assert "fused_logprobs.py" in counted["peak_at"]
    assert counted["activations"] == counted["peak"] - counted["parameters"] - counted["moments"]


def test_what_collectives_carry(counted: dict[str, Any]) -> None:
    layers, rest = 2 * (36_864 + 2 * 64 + 2 * 16), 512 * 64 + 64
    sent = counted["collectives"]
    # Layers are gathered twice in bfloat16, the rest once in float32; gradients are reduced in float32
    assert sent["_allgather_base_"] == 2 * 2 * layers + 4 * rest
    assert sent["_reduce_scatter_base_"] == 4 * (layers + rest)


def test_a_torch_that_was_not_tested() -> None:
    assert fake_cuda.check_torch("2.13.1") == 4
    with pytest.raises(ConfigError, match=r"found torch 2.12.0, .* tested with 2.13 alone; use closed forms"):
        fake_cuda.check_torch("2.12.0")
    with pytest.raises(ConfigError, match="found torch 2.130.0"):
        fake_cuda.check_torch("2.130.0")


def test_a_step_that_fails_says_why() -> None:
    with pytest.raises(ConfigError, match="failed on fake tensors(.|\n)*max_tokens"):
        drive(attrs.evolve(STEP, max_tokens=8))


def test_checkpointing_computes_layers_again(counted: dict[str, Any]) -> None:
    found, some = (drive(attrs.evolve(STEP, checkpointing=each)) for each in (True, "selective"))
    # A forward more, without each layer's last product, of which backward needs nothing
    assert found["flops"]["bfloat16"] == counted["flops"]["bfloat16"] * 8 / 6 - 2 * (2 * 64 * 128) * 473
    assert found["attention"] == {"varlen": 4}
    assert found["peak"] < some["peak"] < counted["peak"]
    # Of each layer the two products into the MLP are computed again
    assert some["flops"]["bfloat16"] == counted["flops"]["bfloat16"] + 2 * 2 * (2 * 64 * 128) * 473
    assert some["attention"] == {"varlen": 2}
