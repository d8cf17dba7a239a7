"""Closed forms: parameters against models that are built, sums by hand, and all of it against drives."""

from typing import Any

import attrs
import pytest
import torch

from nrl.backends import Group, Model, adamw, muon, own, sgd
from nrl.backends.models import lora
from nrl.errors import ConfigError, ModelError
from nrl.ops.plan.analytic import count_flops, count_head_flops, count_parameters, estimate_step, row_stats, saved_bytes
from nrl.ops.plan.optimizer_cost import muon_flops, state_bytes
from nrl.ops.plan.shapes import read_shape
from nrl.ops.plan.simulate import Step, simulate_step
from tests.ops.plan.test_gpus import TINY

MIXTURE: dict[str, Any] = TINY | {
    "model_type": "qwen3_moe", "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": TINY,
    "qwen3_moe": MIXTURE,
    "a dense layer among experts": MIXTURE | {"mlp_only_layers": [1]},
    "mixtral": TINY | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "llama": TINY | {"model_type": "llama"},
    "llama with biases": TINY | {"model_type": "llama", "attention_bias": True},
    "llama with biases in MLPs": TINY | {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral": TINY | {"model_type": "mistral"},
    "qwen2": {name: value for name, value in TINY.items() if name != "head_dim"} | {"model_type": "qwen2"},
}
MEDIUM: dict[str, Any] = TINY | {
    "hidden_size": 1024, "num_attention_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 32_000,
    "num_hidden_layers": 4, "tie_word_embeddings": False,
}  # fmt: skip
STEP = Step(MEDIUM, dp=8, rows=2, width=4096)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_model(family: str, tied: bool) -> None:
    config = FAMILIES[family] | {"tie_word_embeddings": tied}
    built = lora.skeleton(Model(config))
    assert count_parameters(config) == sum(parameter.numel() for parameter in built.parameters())


def test_flops_by_hand() -> None:
    config = TINY | {"tie_word_embeddings": True}
    # a layer's matrices: 2*64*16*(4+2) + 3*64*128 = 12,288 + 24,576; a head's: 512*64 = 32,768
    assert count_flops(config, tokens=10, outputs=4) == 6 * (2 * 36_864 * 10 + 32_768 * 4)
    # two of eight experts: 12,288 + 2*3*64*32 = 12,288, and a router of 64*8 = 512
    assert count_flops(MIXTURE, tokens=10, outputs=0) == 6 * 2 * 25_088 * 10


def test_the_head_by_hand() -> None:
    model = read_shape(TINY)  # logits of one token are 512 numbers, 2 KiB; so 32,768 tokens are kept
    assert count_head_flops(model, [32_768, 10]) == 2 * 512 * 64 * 3 * 32_778
    assert count_head_flops(model, [32_769, 10]) == 2 * 512 * 64 * (4 * 32_769 + 3 * 10)
    assert count_head_flops(model, [32_769], tp=2) == 2 * 256 * 64 * 3 * 32_769  # half of the words of each


def test_what_a_layer_keeps_by_hand() -> None:
    model = read_shape(TINY)  # d = 64, HD = 64, hD = 32, f = 128
    assert saved_bytes(model, True, sparse=False) == 128
    # norms 1024, attention 4*96, norms of q and k 6*96, MLP 1024; sums of scores 16, norms' factors 8 + 24
    assert saved_bytes(model, False, sparse=False) == 1024 + 384 + 576 + 1024 + 16 + 8 + 24
    # input 128, attention's output 128 and sums 16; q, k, v 128 + 128; two projections out 128 + 128
    assert saved_bytes(model, "selective", sparse=False) == 128 + 144 + 256 + 256
    # without an MLP, two experts of 4*64 + 8*32 + 28, a router of 8*8
    assert saved_bytes(read_shape(MIXTURE), False, sparse=True) == 3056 - 1024 + 2 * 540 + 64


def test_rows_by_hand() -> None:
    step = Step(TINY, rows=3, width=100, max_tokens=200)  # rows of 99, 62 and 25 tokens that predict
    found = row_stats(step)
    assert (found.tokens, found.largest, found.microbatches) == (186, 161, 2)
    assert (found.outputs, found.scores) == (161, 161 * 99 + 25 * 25)
    assert row_stats(attrs.evolve(step, shared=11)).tokens == 186 - 11  # of the two rows of one micro-batch
    assert row_stats(attrs.evolve(step, rows=9)).tokens == 99 + 62 + 25 + 5 * 1 + 99  # the ninth is like the first


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("change", "tolerance"),
    [
        ({}, 0.02),
        pytest.param({"checkpointing": True}, 0.03, marks=pytest.mark.slow),
        pytest.param({"checkpointing": "selective"}, 0.03, marks=pytest.mark.slow),
        pytest.param({"dp": 1, "rows": 4, "max_tokens": 8192}, 0.03, marks=pytest.mark.slow),
        pytest.param({"offload": "cpu"}, 0.03, marks=pytest.mark.slow),
        pytest.param({"offload": "cpu", "rows": 4, "max_tokens": 8192}, 0.03, marks=pytest.mark.slow),
        pytest.param({"dp": 64, "rows": 8, "max_tokens": 8192, "checkpointing": True}, 0.03, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_they_are_what_a_drive_counts(change: dict[str, Any], tolerance: float) -> None:
    """Products, collectives and what is held are equal. Small tensors are left out of the peak."""
    step = attrs.evolve(STEP, **change)
    driven, found = simulate_step(step), estimate_step(step)
    assert found["flops"] == {name: pytest.approx(flops) for name, flops in driven["flops"].items()}
    assert found["model"] == pytest.approx(driven["model"])
    for name in ("parameters", "moments", "gradients", "count"):
        assert found[name] == pytest.approx(driven[name], rel=1e-4)
    assert found["microbatches"] == driven["microbatches"]
    assert found["host"] == pytest.approx(driven["host"], rel=1e-4)
    for way, size in found["copied"].items():
        assert size == pytest.approx(driven["copied"][way], rel=0.02)  # and the micro-batches
    for name, size in found["collectives"].items():
        assert size == pytest.approx(driven["collectives"][name], rel=1e-3)
    assert found["peak"] == pytest.approx(driven["peak"], rel=tolerance)


@pytest.mark.timeout(300)
def test_muon_is_driven_as_it_is() -> None:
    """Momentum of matrices, AdamW's moments of all else, Newton-Schulz in float32, and rows that go to owners."""
    step = Step(TINY | {"tie_word_embeddings": True}, dp=2, rows=2, width=256, optimizer=muon(lr=1e-3))
    driven, found = simulate_step(step), estimate_step(step)
    assert found["moments"] == pytest.approx(driven["moments"], rel=1e-3)
    assert found["moments"] == (8 * 106_880 / 2) - 4 * read_shape(TINY).matrices / 2
    assert found["flops"] == driven["flops"]
    assert found["model"] == pytest.approx(driven["model"])  # without Newton-Schulz
    assert found["collectives"]["alltoall_base_"] == pytest.approx(driven["collectives"]["alltoall_base_"], rel=0.1)
    assert found["peak"] == pytest.approx(driven["peak"], rel=0.02)


def test_newton_schulz_by_hand() -> None:
    model = read_shape(TINY)  # of two layers: q and o of 64 x 64, k and v of 32 x 64, an MLP of three 128 x 64
    each = [(64, 64)] * 2 + [(32, 64)] * 2 + [(64, 128)] * 3
    assert muon_flops(model, muon(lr=1.0)) == {"float32": 2 * 5 * sum(4 * m * m * n + 2 * m**3 for m, n in each)}
    assert set(muon_flops(model, muon(lr=1.0, precision="bfloat16"))) == {"bfloat16"}
    assert muon_flops(model, adamw(lr=1.0)) == {}
    experts = [(64, 64)] * 2 + [(32, 64)] * 2 + [(32, 64)] * 24 + [(8, 64)]
    assert sum(m * n for m, n in experts) * 2 == read_shape(MIXTURE).matrices
    found = muon_flops(read_shape(MIXTURE), muon(lr=1.0))["float32"]
    assert found == 2 * 5 * sum(4 * m * m * n + 2 * m**3 for m, n in experts)


def test_what_an_optimizer_keeps_by_hand() -> None:
    model = read_shape(TINY)
    count = model.parameters
    for optimizer, size in (
        (adamw(lr=1.0), 8 * count), (adamw(lr=1.0, moments="bfloat16"), 4 * count), (sgd(lr=1.0), 0),
        (sgd(lr=1.0, momentum=0.9), 4 * count), (muon(lr=1.0), 8 * count - 4 * model.matrices),
    ):  # fmt: skip
        assert state_bytes(model, optimizer) == size
    with pytest.raises(ConfigError, match="found an optimizer muon with groups that keep Muon away"):
        state_bytes(model, muon(lr=1.0, groups=[Group("*.gate.weight", muon=False)]))
    with pytest.raises(ConfigError, match=r"found an optimizer of one's own, .*give moments=, its bytes"):
        state_bytes(model, own(torch.optim.Adagrad, lr=1.0))
    assert estimate_step(attrs.evolve(STEP, moments=6.0))["moments"] == 6 * read_shape(MEDIUM).parameters / 8
    with pytest.raises(ConfigError, match=r"moments=6.0; a drive has one that nrl makes"):
        simulate_step(attrs.evolve(STEP, moments=6.0))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
def test_a_mixture_needs_what_a_drive_counts(checkpointing: Any) -> None:
    config = MEDIUM | {
        "model_type": "qwen3_moe", "moe_intermediate_size": 768, "num_experts": 32, "num_experts_per_tok": 8,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
    }  # fmt: skip
    step = attrs.evolve(STEP, model=config, checkpointing=checkpointing)
    driven, found = simulate_step(step), estimate_step(step)
    assert found["peak"] == pytest.approx(driven["peak"], rel=0.05)
    assert found["flops"] == {name: pytest.approx(flops) for name, flops in driven["flops"].items()}


def test_what_closed_forms_do_not_know() -> None:
    with pytest.raises(ModelError, match="found a model of type 'gemma3'; closed forms know llama, .*driven=true"):
        read_shape({"model_type": "gemma3"})
    with pytest.raises(ModelError, match="this llama model has no num_hidden_layers, vocab_size"):
        read_shape({"model_type": "llama", "hidden_size": 4, "num_attention_heads": 2, "intermediate_size": 8})
    with pytest.raises(ConfigError, match="found dtype=float32; drive it"):
        estimate_step(attrs.evolve(STEP, dtype="float32"))
    with pytest.raises(ConfigError, match="rows of width=4096 do not fit in max_tokens=4095; raise it"):
        estimate_step(attrs.evolve(STEP, max_tokens=4095))
