"""Router replay: what a sampler recorded is what a trainer computes with, whatever its own router would choose.

The functions whose first argument is a mesh run in every process of a pool, and with None in this one.
"""

from collections.abc import Iterator
from functools import partial
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
from nrl.backends.models import loading, splitting
from nrl.backends.models.pieces import whole as whole_piece
from nrl.backends.models.routers import Routers, routers, sizes
from nrl.backends.training.terms import global_weights
from nrl.batch import Batch, assign, lengths
from nrl.batch.packed_rows import Packing
from nrl.batch.prefixes import microbatches_by_prefix
from nrl.envs import Env, Step, single_turn
from nrl.errors import BatchError, ModelError
from nrl.reduce import finalize
from nrl.runtime import Cluster
from tests.backends.fsdp.test_sharding import whole
from tests.backends.fsdp.test_torch_engine import batch_of
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


# gradients


PLAIN = adamw(lr=1.0, eps=1.0, clip=float("inf"))
"""Its first step changes a weight by -g / (|g| + 1), from which the gradient g can be told."""
SMALL = of_experts(norm_topk_prob=True, vocab_size=23)
SHORT = [9, 1, 7, 5, 0, 5, 2, 8, 7]


def routed(batch: Batch, seed: int = 7, layers: int = 2, experts: int = 8) -> Batch:
    """With two different experts a token, at random; none for the last token of a row and for padding."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(*batch["input_ids"].shape, layers, experts, generator=generator)
    routes = draws.argsort(-1)[..., :2].to(torch.int16)
    column = torch.arange(routes.shape[1])
    routes[column >= lengths(batch)[:, None] - 1] = -1
    return assign(batch, routes=routes)


def gradients(mesh: DeviceMesh | None, batch: Batch, max_tokens: int = 40, **options: Any) -> dict[str, Tensor]:
    settings = {"packing": nrl.Rectangles, "checkpointing": False, "compile": False} | options
    made = TorchEngine(SMALL, PLAIN, device=torch.device("cpu"), mesh=mesh, **settings)
    state = made.init()
    before = whole(made, state.module)
    rows = nrl.shard(batch, 1 if mesh is None else mesh["dp"].size())[0 if mesh is None else mesh["dp"].get_local_rank()]
    split = nrl.microbatches if settings["packing"] is None else microbatches_by_prefix
    state, _ = made.train(state, sft_loss, split(rows, max_tokens=max_tokens), global_weights(sft_loss, batch))
    moved = {name: x - before[name] for name, x in whole(made, state.module).items()}
    return {name: -x / (1 - x.abs()) for name, x in moved.items()}


def by_hand(batch: Batch) -> dict[str, Tensor]:
    """The same gradient, row by row, by a loop over tokens and their experts."""
    module: Any = loading.build(SMALL)
    total, weight = torch.zeros(()), batch["loss_mask"].sum()
    for row, size in enumerate(lengths(batch).tolist()):
        if size < 2:
            continue
        for layer, block in enumerate(module.model.layers):
            block.mlp.forward = partial(_experts, block.mlp, batch["routes"][row, : size - 1, layer].tolist())
        ids = batch["input_ids"][row, :size]
        logprobs = module(ids[None, :-1], use_cache=False).logits[0].log_softmax(-1)
        picked = logprobs[torch.arange(size - 1), ids[1:]]
        total = total - picked[batch["loss_mask"][row, 1:size]].sum() / weight
    total.backward()
    for block in module.model.layers:
        del block.mlp.forward
    found = [whole_piece(name, x.grad) for name, x in module.named_parameters()]
    return {piece.name: piece.tensor for piece in splitting.cut(found, splitting.parts(module))}


def _experts(mlp: Any, routes: list[list[int]], hidden: Tensor) -> Tensor:
    rows = []
    for x, route in zip(hidden[0], routes, strict=True):
        probabilities = (mlp.gate.weight @ x).softmax(0)
        shares = probabilities[route] / probabilities[route].sum()
        parts = []
        for share, expert in zip(shares, route, strict=True):
            gate, up = (mlp.experts.gate_up_proj[expert] @ x).chunk(2)
            parts.append(share * (mlp.experts.down_proj[expert] @ (F.silu(gate) * up)))
        rows.append(sum(parts[1:], parts[0]))
    return torch.stack(rows)[None]


@pytest.fixture(scope="module")
def sample() -> Batch:
    return routed(batch_of(SHORT))


@pytest.fixture(scope="module")
def expected(sample: Batch) -> dict[str, Tensor]:
    return by_hand(sample)


@pytest.mark.parametrize("max_tokens", [9, 1000])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("packing", [nrl.Rectangles, nrl.Sequences, None])
def test_the_gradient_is_that_of_a_slow_loop(
    sample: Batch, expected: dict[str, Tensor], packing: Packing | None, checkpointing: bool, max_tokens: int
) -> None:
    found = gradients(None, sample, max_tokens, packing=packing, checkpointing=checkpointing)
    assert_close(found, expected, 1e-4)
    if max_tokens == 9 and not checkpointing:  # the live router's is another
        live = gradients(None, sample.exclude("routes").lock_(), max_tokens, packing=packing)
        router = "model.layers.0.mlp.gate.weight"
        assert float((live[router] - expected[router]).abs().max()) > 0.1 * float(expected[router].abs().max())


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    processes = Processes(2)
    yield processes
    processes.close()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("packing", [nrl.Rectangles, nrl.Sequences, None])
def test_the_gradient_is_the_same_on_two_processes(
    sample: Batch, expected: dict[str, Tensor], two: Processes, packing: Packing | None, checkpointing: bool
) -> None:
    for found in two(gradients, sample, 9, packing=packing, checkpointing=checkpointing):
        assert_close(found, expected, 1e-4)


def test_a_process_that_idles_routes_as_it_likes(two: Processes) -> None:
    """One row: the other process has micro-batches without tokens, and so without routes."""
    batch = routed(batch_of([9]))
    for found in two(gradients, batch):
        assert_close(found, by_hand(batch), 1e-4)
