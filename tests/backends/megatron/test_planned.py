"""Closed forms of Megatron's trainer against its engine on CPUs: what processes hold after a step."""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from nrl.algos import sft_loss
from nrl.backends import Model
from nrl.backends.training.loss.loss_terms import global_weights
from nrl.ops.plan.analytic_megatron import count_stage_parameters, estimate_megatron
from nrl.ops.plan.shapes import read_shape
from nrl.ops.plan.simulate import Step
from nrl.runtime import Layout
from tests.backends.megatron.test_megatron_engine import CONFIG, cut, engine, rows
from tests.backends.processes import Processes

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(600)]

MODEL: dict[str, Any] = CONFIG | {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "vocab_size": 64}
MIXED = MODEL | {
    "model_type": "qwen3_moe", "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip


def bytes_of(tensors: Any) -> int:
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())


def held(mesh: DeviceMesh, layout: Layout, config: dict[str, Any]) -> tuple[int, int, int, int]:
    """The stage of a process, and its bytes of parameters, sums of gradients, and the optimizer's."""
    made = engine(mesh, layout, Model(config, dtype="bfloat16"))
    batch = rows("sft")
    weights = global_weights(sft_loss, batch, always={"logprobs"})
    state, _ = made.train(made.init(), sft_loss, cut(batch, layout, mesh.get_rank(), 3), weights)
    parameters = [x for copy in state.copies for x in copy.parameters()]
    buffers = [each for copy in state.copies for each in (*copy.buffers, *copy.expert_parallel_buffers)]
    gradients = sum(each.grad_data.numel() * each.grad_data.element_size() for each in buffers)
    chain = getattr(state.optimizer, "chained_optimizers", [state.optimizer])
    inner = [each.optimizer for each in chain if each.optimizer is not None]
    moments = [x for each in inner for y in each.state.values() for x in y.values() if isinstance(x, torch.Tensor)]
    masters = [x for each in inner for group in each.param_groups for x in group["params"] if x.dtype == torch.float32]
    stage = layout.coordinates(mesh.get_rank())["pp"]
    return stage, sum(x.numel() * 2 for x in parameters), gradients, bytes_of([*moments, *masters])


@pytest.mark.parametrize(
    ("layout", "config"),
    [
        (Layout(dp=2), MODEL),
        (Layout(tp=2), MODEL),
        (Layout(pp=2), MODEL),
        (Layout(pp=2), MODEL | {"tie_word_embeddings": True}),
        (Layout(dp=2, ep=2), MIXED),
    ],
    ids=["dp", "tp", "pp", "pp, tied", "ep"],
)
def test_what_a_process_holds(two: Processes, layout: Layout, config: dict[str, Any]) -> None:
    """Buffers are padded to a multiple of what processes share, hence 10 %; parameters are equal."""
    step = Step(config, dp=layout.dp, rows=2, width=16)
    for stage, parameters, gradients, optimizer in two(held, layout, config):
        found = estimate_megatron(step, layout)
        count = sum(count_stage_parameters(read_shape(config), layout, stage))
        assert parameters == 2 * count
        assert gradients == pytest.approx(4 * count, rel=0.1)
        if stage == found["stage"]:
            assert found["parameters"] == parameters
            assert optimizer == pytest.approx(found["moments"], rel=0.1)
