"""Router replay: what a sampler recorded is what a trainer computes with, whatever its own router would choose.

The functions whose first argument is a mesh run in every process of a pool, and with None in this one.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

import nrl
from nrl import algos, tiny
from nrl.algos import grpo_loss, sft_loss
from nrl.backends import Model, Sampling, adamw, fsdp, hf
from nrl.backends.fsdp.torch_engine import TorchEngine
from nrl.backends.models import loading
from nrl.backends.models.routers import Routers, routers, sizes
from nrl.backends.training.terms import global_weights
from nrl.batch import Batch, assign, lengths
from nrl.batch.packed_rows import Packing
from nrl.envs import Env, Step, single_turn
from nrl.errors import BatchError, ModelError
from nrl.reduce import finalize
from nrl.runtime import Cluster
from tests.backends.processes import Processes
from tests.weights import assert_close

pytestmark = pytest.mark.timeout(600)

EXPERTS: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "num_experts_per_tok": 2,
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 8, "num_experts": 8, "moe_intermediate_size": 24},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 8, "sliding_window": None},
}
GROUPED: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "n_routed_experts": 8,
    "num_local_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
NOISE = 1e-6
"""The deviation of router weights whose logits are nearly tied. Another draw of them flips routes, and changes the
weights of experts by as little."""


def of_experts(kind: dict[str, Any] = KINDS["qwen3_moe"], **fields: Any) -> Model:
    made = tiny.model()
    return Model({**made.source, **EXPERTS, **kind, **fields}, tokenizer=made.tokenizer)  # type: ignore[dict-item]


def nearly_tied(kind: dict[str, Any], folder: Path, seed: int) -> Model:
    """A model in a folder whose routers are noise of this seed; all else is the same for every seed."""
    model = of_experts(kind)
    module = loading.build(model)
    generator = torch.Generator().manual_seed(seed)
    for router in routers(module).values():
        weight: Any = router.weight
        weight.data.copy_(NOISE * torch.randn(weight.shape, generator=generator))
    loading.save_model(module, folder / str(seed))
    return Model(str(folder / str(seed)), tokenizer=model.tokenizer)


def tasks(n: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{i}+{i * i}=", "answer": str(i + i * i)} for i in range(n)]


def reward(task: Any, trace: Any) -> float:
    return float(len(trace.text) % 3)


@pytest.mark.parametrize("packing", [nrl.Rectangles, nrl.Sequences, None])
@pytest.mark.parametrize("kind", [*KINDS.values(), GROUPED], ids=[*KINDS, "deepseek_v3"])
def test_replayed_logprobs_are_the_samplers_where_live_ones_are_not(
    local: Cluster, tmp_path: Path, kind: dict[str, Any], packing: Packing | None
) -> None:
    mine, other = (nearly_tied(kind, tmp_path, seed) for seed in (0, 1))
    sampling = Sampling(temperature=0.7, max_new_tokens=12)
    sampler = hf.sampler(local.reserve(1), other, sampling, routes=True)
    batch = nrl.rollout(sampler, single_turn(reward), tasks(4), n=3)
    trainer = fsdp.trainer(local.reserve(1), mine, adamw(lr=1e-3), packing=packing)
    params = trainer.init().params
    mask = batch["loss_mask"]
    expected = batch["rollout_logprobs"][mask]

    def apart(found: Tensor) -> float:
        return float((found[mask] - expected).abs().max())

    assert apart(trainer.logprobs(params, batch).result()) < 1e-4
    assert apart(trainer.logprobs(params, batch.exclude("routes").lock_()).result()) > 1e-2


def test_what_a_rollout_records(local: Cluster) -> None:
    """All but the last sampled token have routes, those that the model itself chooses; padding has none."""
    model = of_experts()
    sampler = hf.sampler(local.reserve(1), model, Sampling(max_new_tokens=9), routes=True)
    assert sampler.capabilities.routes == (2, 2)
    batch = nrl.rollout(sampler, single_turn(reward), tasks(3), n=2)
    routes, sizes = batch["routes"], lengths(batch)
    assert routes.dtype == torch.int16 and routes.shape == (*batch["input_ids"].shape, 2, 2)
    module: Any = loading.build(model).eval()
    for row, size in enumerate(sizes.tolist()):
        found: list[Tensor] = []
        hooks = [r.register_forward_hook(lambda m, a, out: found.append(out[2])) for r in routers(module).values()]
        with torch.no_grad():
            module(batch["input_ids"][row, : size - 1][None])
        for hook in hooks:
            hook.remove()
        assert torch.equal(routes[row, : size - 1].long(), torch.stack(found, 1))
        assert (routes[row, size - 1 :] == -1).all()
    plain = nrl.rollout(
        hf.sampler(local.reserve(1), model, Sampling(max_new_tokens=9)), single_turn(reward), tasks(3), n=2
    )
    assert "routes" not in plain.keys()
    assert torch.equal(plain["input_ids"], batch["input_ids"])
    assert torch.equal(plain["rollout_logprobs"], batch["rollout_logprobs"])
