"""Router replay: what a sampler recorded is what a trainer computes with, whatever its own router would choose.

The functions whose first argument is a mesh run in every process of a pool, and with None in this one.
"""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import silu

import nrl
from nrl import tiny
from nrl.algos import advantages, grpo_loss, sft_loss
from nrl.backends import Model, Sampling, adamw, fsdp, hf
from nrl.backends.fsdp.torch_engine import TorchEngine
from nrl.backends.hf.hf_engine import HfEngine
from nrl.backends.models import loading, weight_layout
from nrl.backends.models.moe_routers import Routers, routers
from nrl.backends.models.shards import full_shard as whole_piece
from nrl.backends.sampling.pool import EnginePool
from nrl.backends.training.layout.microbatch_plan import plan
from nrl.backends.training.loss.loss_terms import global_weights
from nrl.batch import Batch, assign, lengths
from nrl.batch.metrics import finalize
from nrl.batch.packed_rows import Packing
from nrl.batch.prefixes import microbatches_by_prefix
from nrl.envs import Environment, Step, Task, single_turn
from nrl.errors import BatchError, ModelError, WeightMismatch
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
    routes = batch["routes"]
    assert routes.dtype == torch.int16
    assert routes.shape == (*batch["input_ids"].shape, 2, 2)
    module: Any = loading.build(model).eval()
    found: list[Tensor] = []
    for router in routers(module).values():
        router.register_forward_hook(lambda router, args, output: found.append(output[2]))
    for row, size in enumerate(lengths(batch).tolist()):
        found.clear()
        with torch.no_grad():
            module(batch["input_ids"][row, : size - 1][None])
        assert torch.equal(routes[row, : size - 1].long(), torch.stack(found, 1))
        assert (routes[row, size - 1 :] == -1).all()
    plain = nrl.rollout(
        hf.sampler(local.reserve(1), model, Sampling(max_new_tokens=9)), single_turn(reward), tasks(3), n=2
    )
    assert "routes" not in plain.keys()
    assert torch.equal(plain["input_ids"], batch["input_ids"])
    assert torch.equal(plain["rollout_logprobs"], batch["rollout_logprobs"])


def two_turns(task: Task) -> tuple[Any, str]:
    return 0, task["prompt"]


def more(turns: int, turn: Any) -> Step:
    return Step(turns + 1, reward=float(len(turn) % 2), done=turns == 1, observation="Once more: ")


@pytest.mark.parametrize("kind", list(KINDS))
def test_an_episode_of_several_turns(local: Cluster, tmp_path: Path, kind: str) -> None:
    mine, other = (nearly_tied(KINDS[kind], tmp_path, seed) for seed in (0, 1))
    sampler = hf.sampler(local.reserve(1), other, Sampling(temperature=1.3, max_new_tokens=7), routes=True)
    batch = nrl.rollout(sampler, Environment(two_turns, more), tasks(3), n=2)
    routes, mask = batch["routes"], batch["loss_mask"]
    there = (routes != -1).all(-1).all(-1)
    expected = torch.arange(routes.shape[1]) < lengths(batch)[:, None] - 1
    assert torch.equal(there, expected)  # also the last token of the first turn, which the second turn read
    trainer = fsdp.trainer(local.reserve(1), mine, adamw(lr=1e-3))
    params = trainer.init().params
    replayed, live = (trainer.logprobs(params, each).result() for each in (batch, batch.exclude("routes").lock_()))
    assert float((replayed - batch["rollout_logprobs"])[mask].abs().max()) < 1e-4
    assert float((live - batch["rollout_logprobs"])[mask].abs().max()) > 1e-2


def test_tokens_that_the_sampler_never_read(local: Cluster) -> None:
    """Observations at the end of the context have no routes, and nobody trains on them; nor on an episode that failed.

    Their log-probabilities are 0. A step does not compute them.
    """

    def step(turns: int, turn: Any) -> Step:
        if turns == 7:
            raise RuntimeError("it fails")
        return Step(turns, done=False, observation="and so on and on and on")

    env = Environment(lambda task: (task["turns"], task["prompt"]), step)
    model = of_experts(max_position_embeddings=24)
    sampler = hf.sampler(local.reserve(1), model, Sampling(max_new_tokens=4, temperature=0.9), routes=True)
    given = [{"prompt": "1+1=", "turns": turns} for turns in (0, 7)]
    with pytest.warns(UserWarning, match="2 of 4 episodes failed"):
        batch = nrl.rollout(sampler, env, given, n=2)
    assert batch["valid"].tolist() == [True, True, False, False]
    trainer = fsdp.trainer(local.reserve(1), model, adamw(lr=1e-3))
    state = trainer.init()
    found = trainer.logprobs(state.params, batch).result()
    torch.testing.assert_close(found[:2][batch["loss_mask"][:2]], batch["rollout_logprobs"][:2][batch["loss_mask"][:2]])
    unread = (batch["routes"] == -1).all(-1).all(-1).roll(1, 1)
    unread[:, 0] = False
    assert bool((unread & batch["attention_mask"]).any())
    assert (found[unread] == 0).all()
    assert (found[:, 1:][~unread[:, 1:]] != 0).all()
    batch = assign(batch, advantages=torch.ones_like(found), old_logprobs=found)
    state, _ = trainer.train_step(grpo_loss)(state, batch)
    assert state.step == 1
    with pytest.raises(BatchError, match="never had this token as an input"):
        trainer.logprobs(state.params, batch.exclude("loss_mask").lock_()).result()


def test_a_step_of_grpo_trains_on_the_samplers_distribution(local: Cluster, tmp_path: Path) -> None:
    mine, other = (nearly_tied(KINDS["qwen3_moe"], tmp_path, seed) for seed in (0, 1))
    sampler = hf.sampler(local.reserve(1), other, Sampling(temperature=0.8, max_new_tokens=10), routes=True)
    batch = advantages(nrl.rollout(sampler, single_turn(reward), tasks(4), n=4))
    trainer = fsdp.trainer(local.reserve(1), mine, adamw(lr=1e-3), max_tokens=64)
    step = trainer.train_step(grpo_loss)
    found = []
    for each in (batch, batch.exclude("routes").lock_()):
        state = trainer.init()
        old = trainer.logprobs(state.params, each)
        state, metrics = step(state, each, old_logprobs=old)
        found.append(finalize(metrics.result()))
    replayed, live = found
    assert replayed["mismatch/max_abs"] < 1e-4
    assert live["mismatch/max_abs"] > 1e-2
    assert replayed["grad_norm"] > 0
    nrl.publish(state.params, sampler)
    assert nrl.rollout(sampler, single_turn(reward), tasks(1))["routes"].shape[2:] == (2, 2)


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
    settings: dict[str, Any] = {"packing": nrl.Rectangles, "checkpointing": False, "compile": False} | options
    made = TorchEngine(SMALL, PLAIN, device=torch.device("cpu"), mesh=mesh, **settings)
    state = made.init()
    before = whole(made, state.module)
    rows = nrl.shard(batch, 1 if mesh is None else mesh["dp"].size())[
        0 if mesh is None else mesh["dp"].get_local_rank()
    ]
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
    return {
        piece.name: piece.tensor for piece in weight_layout.split_for_files(found, weight_layout.find_parts(module))
    }


def _experts(mlp: Any, routes: list[list[int]], hidden: Tensor) -> Tensor:
    rows = []
    for x, route in zip(hidden[0], routes, strict=True):
        probabilities = (mlp.gate.weight @ x).softmax(0)
        shares = probabilities[route] / probabilities[route].sum()
        parts = []
        for share, expert in zip(shares, route, strict=True):
            gate, up = (mlp.experts.gate_up_proj[expert] @ x).chunk(2)
            parts.append(share * (mlp.experts.down_proj[expert] @ (silu(gate) * up)))
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler imports what it calls deprecated, and knows no grouped products
def test_compiled_layers_replay_too(sample: Batch) -> None:
    made = [
        TorchEngine(SMALL, PLAIN, nrl.Rectangles, False, compiled, torch.device("cpu")) for compiled in (False, True)
    ]
    plain, compiled = ((engine, engine.load(None)) for engine in made)
    for batch in (sample, sample.exclude("routes").lock_(), routed(batch_of(SHORT), seed=3)):
        (expected,), (found,) = (
            engine.forward(params, [batch], frozenset({"logprobs"})) for engine, params in (plain, compiled)
        )
        torch.testing.assert_close(found["logprobs"], expected["logprobs"], rtol=1e-5, atol=1e-5)


def test_an_adapter_and_a_frozen_copy_replay(local: Cluster) -> None:
    model = attrs.evolve(SMALL, lora={"r": 2, "target_modules": ["q_proj", "o_proj"]})
    batch = routed(batch_of(SHORT))
    plain, adapted = (fsdp.trainer(local.reserve(1), each, PLAIN) for each in (SMALL, model))
    expected = plain.logprobs(plain.init().params, batch).result()
    state = adapted.init()
    before = adapted.logprobs(state.params, batch).result()
    torch.testing.assert_close(before, expected, rtol=1e-5, atol=1e-5)
    frozen = adapted.freeze(state.params)
    adapted.train_step(sft_loss)(state, batch)
    assert torch.equal(adapted.logprobs(frozen, batch).result(), before)


# shared beginnings


def one_prompt(same: int) -> Batch:
    """Rows of one prompt of 40 tokens, whose routes agree in the first ones."""
    ids = torch.randint(1, 23, (4, 48), generator=torch.Generator().manual_seed(0))
    ids[:, :40] = ids[0, :40]
    batch = nrl.assign(Batch({}, batch_size=[4]), input_ids=ids, loss_mask=torch.arange(48).expand(4, -1) >= 40)
    batch = routed(batch)
    routes = batch["routes"].clone()
    routes[:, :same] = routes[0, :same]
    return assign(batch, routes=routes)


@pytest.mark.parametrize("same", [0, 25, 40])
@pytest.mark.parametrize("packing", [nrl.Rectangles, nrl.Sequences])
def test_beginnings_are_shared_as_far_as_routes_agree(packing: Packing, same: int) -> None:
    batch = one_prompt(same)
    work = plan(batch, batch["loss_mask"], packing, words=23, routers=Routers(2, 2, 8))
    real = work.rows.real if isinstance(work.rows, nrl.Rectangles) else slice(None)
    assert work.inputs["input_ids"][0, real].shape == (4 * 47 - 3 * same,)
    assert plan(batch.exclude("routes").lock_(), batch["loss_mask"], packing, words=23).inputs["input_ids"].shape[
        1
    ] <= 4 * 47 - 3 * 40 + (4 if packing is nrl.Rectangles else 0)
    assert_close(gradients(None, batch, 1000, packing=packing), by_hand(batch), 1e-4)


# errors


def with_route(batch: Batch, row: int, position: int, route: list[list[int]]) -> Batch:
    routes = batch["routes"].clone()
    routes[row, position] = torch.tensor(route, dtype=torch.int16)
    return assign(batch, routes=routes)


@pytest.mark.parametrize("packing", [nrl.Rectangles, nrl.Sequences, None])
@pytest.mark.parametrize(
    ("route", "told"),
    [
        ([[0, 1], [-1, -1]], "-1 is no route: the sampler never had this token as an input"),
        ([[0, 1], [8, 2]], "each layer has the experts 0 to 7, of which a token gets different ones"),
        ([[3, 3], [1, 2]], "each layer has the experts 0 to 7, of which a token gets different ones"),
    ],
)
def test_a_token_without_a_route(sample: Batch, packing: Packing | None, route: list[list[int]], told: str) -> None:
    made = TorchEngine(SMALL, PLAIN, packing, False, False, torch.device("cpu"))
    bad = with_route(sample, 2, 3, route).exclude("loss_mask").lock_()
    token = int(sample["input_ids"][2, 3])
    with pytest.raises(BatchError) as raised:
        made.forward(made.load(None), [bad], frozenset({"logprobs"}))
    text = str(raised.value)
    assert text.startswith(
        f"forward: 'routes' of row 2 of a micro-batch at position 3 (token {token} of 7) is {route}, and "
    )
    assert told in text
    assert text.endswith("leave the column out, so that the live router chooses: batch.exclude('routes')")


def step_on(mesh: DeviceMesh | None, batch: Batch) -> str:
    try:
        gradients(mesh, batch)
    except BatchError as error:
        return str(error)
    return "nothing"


def test_a_missing_route_in_one_process_is_an_error_in_both(two: Processes, sample: Batch) -> None:
    for found in two(step_on, with_route(sample, 2, 0, [[-1, -1], [-1, -1]])):
        assert "is [[-1, -1], [-1, -1]], and -1 is no route" in found


@pytest.mark.parametrize(("layers", "experts"), [(3, 2), (2, 3)])
def test_routes_of_another_model(sample: Batch, layers: int, experts: int) -> None:
    made = TorchEngine(SMALL, PLAIN, nrl.Rectangles, False, False, torch.device("cpu"))
    other = assign(sample, routes=torch.zeros(*sample["input_ids"].shape, layers, experts, dtype=torch.int16))
    with pytest.raises(BatchError) as raised:
        made.forward(made.load(None), [other], frozenset({"logprobs"}))
    assert str(raised.value).startswith(
        f"forward: 'routes' has {layers} layers with {experts} experts a token, and the model has 2 layers with a "
        "router, each of which chooses 2 of 8; the sampler has to have the trainer's model, or leave the column out"
    )


def test_a_model_without_routers(local: Cluster, sample: Batch) -> None:
    trainer = fsdp.trainer(local.reserve(1), tiny.model(), adamw(lr=1e-3))
    with pytest.raises(ModelError, match=r"Qwen3ForCausalLM: it has no routers that transformers records"):
        trainer.logprobs(trainer.init().params, sample).result()
    with pytest.raises(ModelError, match=r"for a model without experts leave routes= out, and the column with"):
        hf.sampler(local.reserve(1), tiny.model(), routes=True)


def test_a_trainer_that_replays_nothing(sample: Batch) -> None:
    with pytest.raises(BatchError, match="has the column 'routes', and this trainer does not replay them; leave the"):
        plan(sample, sample["loss_mask"], nrl.Rectangles, words=23)


class Noisy(HfEngine):
    """Computes otherwise than the trainer: it adds noise to router weights."""

    def end(self, version: int) -> None:
        super().end(version)
        generator = torch.Generator().manual_seed(5)
        for router in routers(self.module).values():
            weight: Any = router.weight
            weight.add_(NOISE * torch.randn(weight.shape, generator=generator))


def test_publish_compares_log_probabilities_with_the_same_routes(local: Cluster, tmp_path: Path) -> None:
    model = nearly_tied(KINDS["qwen3_moe"], tmp_path, 0)
    trainer = fsdp.trainer(local.reserve(1), model, adamw(lr=1e-3))
    params = trainer.init().params
    for routes in (True, False):
        make = partial(Noisy, model, routes=routes)
        sampler = EnginePool("noisy", [local.reserve(1).mesh()], make, model, Sampling(), tolerance=1e-4)
        with nullcontext() if routes else pytest.raises(WeightMismatch):
            nrl.publish(params, sampler)


@pytest.mark.ray
@pytest.mark.slow
def test_routes_travel_through_ray(on_ray: Cluster, tmp_path: Path) -> None:
    """From a sampler through the program to a trainer of two processes: with the numbers of the local cluster."""
    mine, other = (nearly_tied(KINDS["qwen3_moe"], tmp_path, seed) for seed in (0, 1))
    found = []
    with nrl.cluster("local") as here:
        for slots in (here.reserve(3), on_ray.reserve(3)):
            sampler = hf.sampler(slots[2:], other, Sampling(temperature=0.8, max_new_tokens=10), routes=True)
            batch = advantages(nrl.rollout(sampler, single_turn(reward), tasks(4), n=4))
            trainer = fsdp.trainer(slots[:2], mine, adamw(lr=1e-3), max_tokens=64)
            state = trainer.init()
            logprobs = trainer.logprobs(state.params, batch).result()
            state, metrics = trainer.train_step(grpo_loss)(state, batch, old_logprobs=logprobs)
            found.append((batch, logprobs, finalize(metrics.result())))
    (batch, expected, numbers), (others, logprobs, also) = found
    assert torch.equal(others["routes"], batch["routes"])
    torch.testing.assert_close(logprobs, expected, rtol=1e-4, atol=1e-4)
    assert also["mismatch/max_abs"] < 1e-4
    assert also["grad_norm"] == pytest.approx(numbers["grad_norm"], rel=1e-3)


def in_bfloat16(mesh: DeviceMesh | None, batch: Batch) -> Tensor:
    model = attrs.evolve(SMALL, dtype="bfloat16")
    made = TorchEngine(model, PLAIN, nrl.Sequences, True, False, torch.device("cpu"), mesh)
    (found,) = made.forward(made.init().module, [batch], frozenset({"logprobs"}))
    logprobs: Tensor = found["logprobs"]
    return logprobs


def test_what_rounds_coarsely_takes_the_same_experts(two: Processes, sample: Batch) -> None:
    """In bfloat16, alone and sharded: the states of tokens are rounded, and their experts are not others."""
    made = TorchEngine(SMALL, PLAIN, nrl.Sequences, False, False, torch.device("cpu"))
    (expected,) = made.forward(made.load(None), [sample], frozenset({"logprobs"}))
    for found in (in_bfloat16(None, sample), *two(in_bfloat16, sample)):
        assert float((found - expected["logprobs"]).abs().max()) < 0.3
    live = in_bfloat16(None, sample.exclude("routes").lock_())
    assert float((live - expected["logprobs"]).abs().max()) > 1
