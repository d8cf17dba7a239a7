"""Mixtures of experts on Megatron Core, spread over processes, against the torch engine in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import nrl
from nrl.algos import sft_loss
from nrl.backends import Model
from nrl.backends.models import loading
from nrl.batch import Batch
from nrl.errors import BatchError, ConfigError, ModelError
from nrl.runtime import Layout
from tests.backends.megatron.test_megatron_engine import (
    CONFIG,
    ROUTED,
    SPARSE,
    construction,
    followed,
    in_process,
    loaded,
    parts,
    refused,
    resumed,
    rows,
    same,
    saved,
    saved_by,
    steps,
    torch_engine,
)
from tests.backends.processes import Processes
from tests.weights import assert_equal

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(600)]

QWEN: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "norm_topk_prob": True,
}
MIXTRAL: dict[str, Any] = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
AGAIN = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
TWO: dict[str, dict[str, Any]] = {
    "ep=2": {"layout": Layout(dp=2, ep=2)},
    "experts in every process": {"layout": Layout(dp=2)},
    "probabilities of all experts": {"layout": Layout(dp=2, ep=2), "norm_topk_prob": False},
    "tp=2, whole experts": {"layout": Layout(tp=2)},
    "tp=2, ep=2": {"layout": Layout(tp=2, ep=2)},
    "pp=2, some layers dense": {"layout": Layout(pp=2), "decoder_sparse_step": 2},
    "ep=2, float64": {"layout": Layout(dp=2, ep=2), "dtype": "float64"},
    "tp=2, ep=2, float64": {"layout": Layout(tp=2, ep=2), "dtype": "float64"},
    "routes, ep=2": {"layout": Layout(dp=2, ep=2), "name": ROUTED},
    "routes, tp=2, ep=2": {"layout": Layout(tp=2, ep=2), "name": ROUTED},
    "routes, cp=2": {"layout": Layout(cp=2, ep=2), "name": ROUTED},
    "routes, some layers dense": {"layout": Layout(dp=2, ep=2), "name": SPARSE, "decoder_sparse_step": 2},
    "routes, interleaved": {"layout": Layout(pp=2, vp=2), "name": ROUTED},
    "routes, layers computed again": {"layout": Layout(pp=2), "name": ROUTED, "options": AGAIN},
    "mixtral": {"layout": Layout(dp=2, ep=2), **MIXTRAL},
}


@pytest.mark.parametrize("kind", TWO)
def test_experts_have_the_numbers_of_one_process(two: Processes, kind: str) -> None:
    same(two, **{"name": "grpo"} | QWEN | TWO[kind])


@pytest.mark.parametrize("name", ["sft", "dpo", "value"])
def test_every_loss_has_the_numbers_of_one_process(two: Processes, name: str) -> None:
    same(two, Layout(dp=2, ep=2), name, **QWEN)


def violation(model: Model, name: str) -> float:
    """Of balance, row by row and token by token: what is read at a token goes to the experts that it chooses."""
    module, batch = loading.build(model), rows(name)
    gates = [part for part in module.modules() if type(part).__name__ == "Qwen3MoeTopKRouter"]
    loads = torch.zeros(len(gates), 4)
    chosen: list[torch.Tensor] = []
    for gate in gates:
        gate.register_forward_hook(lambda _, __, out: chosen.append(out[2]))
    for row in range(len(batch)):
        n, chosen[:] = int(batch["attention_mask"][row].sum()), []
        if n:
            module(batch["input_ids"][row : row + 1, :n])
            for t in range(1, n):
                if batch["loss_mask"][row, t]:
                    for layer, each in enumerate(chosen):
                        loads[layer, each[t - 1]] += 1
    return float((loads.amax(1) / loads.mean(1) - 1).mean())


@pytest.mark.parametrize("kind", ["ep=2", "tp=2, ep=2", "pp=2, some layers dense", "again"])
def test_balance_is_of_the_tokens_that_are_read(two: Processes, kind: str) -> None:
    fields = QWEN | {"again": {"layout": Layout(dp=2, ep=2)}, **TWO}[kind]
    layout, model = fields.pop("layout"), Model(CONFIG | fields)
    each = two(in_process, layout, model, "sft", None, AGAIN if kind == "again" else {})
    for found, _, _ in each:
        assert found[0]["experts/max_violation"] == pytest.approx(violation(model, "sft"), abs=1e-6)


@pytest.mark.parametrize("layout", [Layout(dp=2, ep=2), Layout(tp=2, ep=2)], ids=str)
@pytest.mark.parametrize("source", [QWEN, MIXTRAL], ids=["qwen3_moe", "mixtral"])
def test_weights_of_experts_are_those_of_the_files_to_the_last_bit(
    two: Processes, layout: Layout, source: dict[str, Any], tmp_path: Path
) -> None:
    from nrl import tiny

    module = loading.build(Model(CONFIG | source | {"vocab_size": 90}))
    loading.save_model(module, tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    files = loading.files(Model(str(tmp_path / "model")))
    weights = dict(loading.build(Model(str(tmp_path / "model"))).named_parameters())
    for found in two(loaded, layout, str(tmp_path / "model"), str(tmp_path / "exported")):
        assert_equal(found, in_files(files))
    assert_equal(dict(loading.build(Model(str(tmp_path / "exported"))).named_parameters()), weights)


def in_files(folder: Path | None) -> dict[str, torch.Tensor]:
    assert folder is not None
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


@pytest.mark.parametrize(
    "layout",
    [Layout(dp=2, ep=2), Layout(tp=2, ep=2), pytest.param(Layout(dp=2, ep=2, shard=1), marks=pytest.mark.slow)],
    ids=str,
)
def test_a_checkpoint_of_experts_goes_on_in_another_layout_and_in_the_other_engine(
    two: Processes, layout: Layout, tmp_path: Path
) -> None:
    model = Model(CONFIG | QWEN)
    record, then = two(saved, layout, str(tmp_path), model)[0]
    other = torch_engine(model)
    state = other.restore(tmp_path, record)
    followed(steps(other, "grpo", parts(rows("grpo"), Layout(), 0), state=state), then)
    for again in (Layout(tp=2), Layout(dp=2, ep=2)):
        followed(two(resumed, again, str(tmp_path), record, model)[0], then)


def test_a_checkpoint_of_experts_of_the_torch_engine_goes_on_here(two: Processes, tmp_path: Path) -> None:
    made = torch_engine(Model(CONFIG | QWEN))
    record, then = saved_by(made, tmp_path)
    for layout in (Layout(dp=2, ep=2), Layout(pp=2)):
        for found in two(resumed, layout, str(tmp_path), record, made.model):
            followed(found, then)


@pytest.mark.parametrize(
    ("layout", "source", "options", "kind", "text"),
    [
        (Layout(dp=2, ep=2), {"num_experts": 3}, {}, ModelError, "ep = 2 does not divide num_experts=3"),
        (Layout(dp=2, ep=2), {"model_type": "qwen3"}, {}, ModelError, "ep = 2 does not divide num_experts=1"),
        (Layout(dp=2), MIXTRAL | {"router_jitter_noise": 0.1}, {}, ModelError, "has router_jitter_noise=0.1"),
        (Layout(tp=2), {}, {"sequence_parallel": False}, ConfigError, "experts along tp need sequence parallelism"),
        (Layout(dp=2), {}, {"moe_aux_loss_coeff": 0.01}, ConfigError, "the gradient of a row would depend on the rows"),
        (Layout(dp=2), {}, {"moe_router_topk": 1}, ConfigError, "'moe_router_topk' follows from the model"),
        (Layout(dp=2), {}, {"recompute_modules": ["moe"]}, ConfigError, "take checkpointing=True"),
    ],
)
def test_experts_that_would_be_computed_wrongly_are_refused(
    two: Processes, layout: Layout, source: dict[str, Any], options: dict[str, Any], kind: type[Exception], text: str
) -> None:
    for error, said in two(construction, layout, CONFIG | QWEN | source, options):
        assert error is kind, said
        assert text in said


def without_a_route(batch: Batch) -> Batch:
    routes = torch.tensor([0, 1], dtype=torch.int16).repeat(8, 17, 4, 1)
    routes[2, 3] = -1
    return nrl.assign(batch, routes=routes)


@pytest.mark.parametrize(
    ("layout", "fields", "text"),
    [
        (Layout(dp=2, ep=2), QWEN, "and -1 is no route"),
        (Layout(pp=2), QWEN, "and -1 is no route"),
        (Layout(pp=2), {}, "the batch has the column 'routes', and this trainer does not replay them"),
    ],
)
def test_a_route_that_is_missing_is_an_error_in_all_processes(
    two: Processes, layout: Layout, fields: dict[str, Any], text: str
) -> None:
    for error, said, unchanged in two(refused, layout, sft_loss, without_a_route, Model(CONFIG | fields)):
        assert issubclass(error, BatchError)
        assert text in said
        assert unchanged
