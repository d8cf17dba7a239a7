"""The Megatron engine in every layout against the torch engine in one process: the same numbers.

The functions whose first argument is a mesh run in every process of a pool.
"""

import json
import logging
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import nrl
from nrl import algos
from nrl.algos import Loss, sft_loss, value_loss
from nrl.backends import Group, Model, Optimizer, Schedule, adamw, megatron, muon, sgd
from nrl.backends.fsdp.torch_engine import TorchEngine
from nrl.backends.models import loading
from nrl.backends.training.loss.loss_terms import global_weights
from nrl.backends.training.weight_stream import iter_full_weights
from nrl.backends.types import top_k
from nrl.batch import Batch, deal
from nrl.batch.metrics import finalize
from nrl.errors import (
    BatchError,
    CheckpointError,
    ConfigError,
    ModelError,
    NoGradient,
    NotFinite,
    PlacementError,
    WeightError,
)
from nrl.runtime import Layout
from tests.backends.fsdp.test_sharding import (
    Raises,
    detached,
    everywhere,
    missing,
    not_finite,
    value_error,
    weight_by_output,
)
from tests.backends.fsdp.test_torch_engine import batch_of
from tests.backends.processes import Processes
from tests.metrics import assert_same_steps
from tests.weights import assert_close, assert_equal

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(600)]

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
MODEL = Model(CONFIG)
OPTIMIZER = adamw(lr=1e-2, eps=1e-3, weight_decay=0.1)  # at eps=1e-8 rounding of tiny gradients reaches the parameters
LENGTHS = [9, 1, 17, 5, 0, 5, 2, 12]
LOSSES: dict[str, Loss] = {
    "sft": sft_loss,
    "grpo": algos.grpo_loss,
    "dpo": algos.dpo_loss(0.1),
    "two terms, everywhere": algos.add((1.0, algos.grpo_loss), (0.1, everywhere)),
    "value": value_loss(0.2),
    "reward": algos.reward_model_loss,
    "distillation": algos.distillation_loss(),
}
ROUTED, SPARSE = "grpo with routes", "grpo with routes of every second layer"
HEADS: dict[str, Literal["lm", "value", "reward"]] = {"value": "value", "reward": "reward"}
NEEDS = frozenset({"logprobs", "entropy", top_k(3)})


def rows(name: str) -> Batch:
    """Rows that the loss can be called on; four of them begin alike."""
    g = torch.Generator().manual_seed(1)
    batch = batch_of(LENGTHS, values=torch.zeros(8, 17), returns=torch.randn(8, 17, generator=g))
    ids = batch["input_ids"].clone()
    ids[[2, 3, 5, 7], :4] = ids[2, :4]
    batch = nrl.assign(batch, input_ids=ids)
    if name == "distillation":
        likely = torch.randn(8, 17, 23, generator=g).log_softmax(-1).topk(3)
        batch = nrl.assign(batch, teacher_ids=likely.indices, teacher_topk_logprobs=likely.values)
    if name in (ROUTED, SPARSE):
        # Two experts of four in each of four layers; rows that begin alike have other routes there, but for two. Nobody
        # sampled the end of the first row
        routes = torch.rand(8, 17, 4, 4, generator=g).argsort(-1)[..., :2].to(torch.int16)
        routes[[2, 3], :4] = routes[2, :4]
        mask = batch["loss_mask"].clone()
        routes[0, 6:], mask[0, 7:] = -1, False
        batch = nrl.assign(batch, routes=routes if name == ROUTED else routes[:, :, :2].clone(), loss_mask=mask)
    return batch.view(4, 2).lock_() if name in ("dpo", "reward") else batch


def engine(
    mesh: DeviceMesh,
    layout: Layout,
    model: Model,
    packing: Any = None,
    optimizer: Optimizer = OPTIMIZER,
    **options: Any,
) -> Any:
    from nrl.backends.megatron.megatron_engine import MegatronEngine
    from nrl.backends.megatron.options import options as sorted_options

    logging.disable(logging.WARNING)  # Megatron tells that its GPTModel will be replaced
    warnings.simplefilter("ignore")  # of Megatron and of what it calls
    packing = packing or (nrl.Sequences if layout.cp > 1 else nrl.Rectangles)
    return MegatronEngine(model, optimizer, packing, sorted_options(options), torch.device("cpu"), layout, mesh)


def torch_engine(model: Model, optimizer: Optimizer = OPTIMIZER) -> TorchEngine:
    return TorchEngine(model, optimizer, nrl.Rectangles, False, False, torch.device("cpu"))


def parts(batch: Batch, layout: Layout, rank: int) -> list[Batch]:
    """The micro-batches of a process: of two rows, or a pair; in the first of several shards of a row, to have more."""
    shard, pairs = layout.coordinates(rank)["dp"], len(batch.batch_size) > 1
    mine, n = batch[deal(batch, layout.dp)[shard]], 1 if pairs or (layout.dp > 1 and shard == 0) else 2
    return [mine[i : i + n] for i in range(0, len(mine), n)]


type Steps = tuple[list[dict[str, float]], dict[str, Tensor], list[dict[str, Tensor]]]


def steps(made: Any, name: str, each: Sequence[Batch], group: Any = None, state: Any = None) -> Steps:
    """Three steps: metrics, weights, and outputs after them."""
    loss, found = LOSSES[name.partition(" with")[0]], []
    weights = global_weights(loss, rows(name), always=made.provides & {"logprobs"})
    state = state or made.init()
    for _ in range(3):
        state, metrics = made.train(state, loss, each, weights)
        found.append(finalize(metrics))
    tensors = {key: x.clone() for key, x in iter_full_weights(made.pieces(made.params(state)), "test", group)}
    outs = made.forward(made.params(state), each, made.provides & {"values", "rewards"} or NEEDS)
    return found, tensors, [dict(out) for out in outs]


def in_process(mesh: DeviceMesh, layout: Layout, model: Model, name: str, packing: Any, options: dict[str, Any]) -> Any:
    made = engine(mesh, layout, model, packing, **options)
    return steps(made, name, parts(rows(name), layout, mesh.get_rank()), made._groups.peers.group)


@cache
def expected(source: str, head: Any, name: str, dtype: Any = "float32") -> Steps:
    return steps(torch_engine(Model(json.loads(source), head=head, dtype=dtype)), name, parts(rows(name), Layout(), 0))


def same(processes: Processes, layout: Layout, name: str, packing: Any = None, **changed: Any) -> None:
    """Metrics, weights and outputs of every process are those of the torch engine in one."""
    options, dtype = changed.pop("options", {}), changed.pop("dtype", "float32")
    head = HEADS.get(name, "lm")
    source = CONFIG | changed
    metrics, weights, outs = expected(json.dumps(source), head, name, dtype)
    model = Model(source, head=head, dtype=dtype)
    each: list[Steps] = processes(in_process, layout, model, name, packing, options)
    for rank, (found, tensors, there) in enumerate(each):
        assert_same_steps(found, metrics, 1e-5)
        for step, alone in zip(found, metrics, strict=True):  # processes that compute the same tokens count them once
            needed = alone["tokens/computed"] + alone["tokens/saved"]
            assert step["tokens/computed"] + step["tokens/saved"] == needed <= step["tokens"]
            assert step["tokens/computed"] == alone["tokens/computed"] or layout.dp > 1 or packing or layout.cp > 1
        assert_close(tensors, weights, 1e-5)
        if layout.dp == 1 and layout.coordinates(rank)["pp"] == layout.pp - 1:
            for one, other in zip(outs, there, strict=True):
                assert_close(
                    {key: x for key, x in other.items() if key != "top_k_ids"},
                    {key: x for key, x in one.items() if key != "top_k_ids"},
                    1e-5,
                )
        assert layout.coordinates(rank)["pp"] == layout.pp - 1 or there == []


ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 2.0,
    "original_max_position_embeddings": 8,
}
TWO: dict[str, dict[str, Any]] = {
    "tp=2, with sequence parallelism": {"layout": Layout(tp=2)},
    "tp=2, without": {"layout": Layout(tp=2), "options": {"sequence_parallel": False}},
    "tp=2, a vocabulary that does not divide, tied": {"layout": Layout(tp=2), "tie_word_embeddings": True},
    "pp=2": {"layout": Layout(pp=2)},
    "pp=2, tied": {"layout": Layout(pp=2), "tie_word_embeddings": True},
    "pp=2, vp=2": {"layout": Layout(pp=2, vp=2)},
    "cp=2": {"layout": Layout(cp=2)},
    "dp=2, distributed optimizer": {"layout": Layout(dp=2)},
    "dp=2, a whole one in each": {"layout": Layout(dp=2, shard=1)},
    "llama": {"layout": Layout(tp=2), "model_type": "llama"},
    "qwen2, biases, sequences": {"layout": Layout(tp=2), "model_type": "qwen2", "packing": nrl.Sequences},
    "mistral, sliding window": {"layout": Layout(cp=2), "model_type": "mistral", "sliding_window": 4},
    "rotations of Llama 3": {"layout": Layout(tp=2), "model_type": "llama", "rope_parameters": ROPE},
    "layers computed again": {
        "layout": Layout(pp=2),
        "options": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    },
    "parts of layers computed again": {
        "layout": Layout(tp=2),
        "options": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
    },
    "weights gathered while it computes": {"layout": Layout(dp=2), "options": {"overlap_param_gather": True}},
}


@pytest.mark.parametrize("kind", TWO)
def test_two_processes_have_the_numbers_of_one(two: Processes, kind: str) -> None:
    same(two, **{"name": "grpo"} | TWO[kind])


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2), Layout(cp=2), Layout(dp=2)], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_has_the_numbers_of_one_process(two: Processes, layout: Layout, name: str) -> None:
    same(two, layout, name)


@pytest.mark.parametrize(
    "layout", [Layout(tp=2, pp=2), Layout(pp=2, dp=2), Layout(dp=2, cp=2), Layout(dp=4, shard=2)], ids=str
)
def test_four_processes_have_the_numbers_of_one(four: Processes, layout: Layout) -> None:
    same(four, layout, "grpo")


# steps that differ


def cut(batch: Batch, layout: Layout, rank: int, n: int) -> list[Batch]:
    """The rows of a process, ``n`` in each micro-batch."""
    mine = batch[deal(batch, layout.dp)[layout.coordinates(rank)["dp"]]]
    return [mine[i : i + n] for i in range(0, len(mine), n)]


def with_micro_batches_of(
    mesh: DeviceMesh | None, layout: Layout, sizes: Sequence[int], optimizer: Optimizer
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """A step for each size, by each process of a mesh; None: by the torch engine in one."""
    made: Any = torch_engine(MODEL, optimizer) if mesh is None else engine(mesh, layout, MODEL, optimizer=optimizer)
    rank, group = (0, None) if mesh is None else (mesh.get_rank(), made._groups.peers.group)
    batch = nrl.assign(rows("grpo"), temperature=torch.linspace(0.5, 1.5, 8))
    weights = global_weights(algos.grpo_loss, batch, always={"logprobs"})
    state, found = made.init(), []
    for n in sizes:
        state, metrics = made.train(state, algos.grpo_loss, cut(batch, layout, rank, n), weights)
        found.append(finalize(metrics))
    return found, {key: x.clone() for key, x in iter_full_weights(made.pieces(made.params(state)), "test", group)}


VARYING = [Layout(dp=2), Layout(dp=2, shard=1), Layout(cp=2), Layout(pp=2, vp=2)]


@pytest.mark.parametrize("layout", VARYING, ids=str)
@pytest.mark.parametrize("sizes", [(8, 3, 1), (1, 4, 8)], ids=str)
def test_steps_of_other_numbers_of_micro_batches(two: Processes, layout: Layout, sizes: tuple[int, ...]) -> None:
    """With temperatures, a schedule and clipping."""
    varying = adamw(lr=1e-2, eps=1e-3, clip=0.1, schedule=Schedule("linear", warmup=1, steps=5))
    metrics, weights = with_micro_batches_of(None, Layout(), (2, 2, 2), varying)
    assert len({step["lr"] for step in metrics}) == 3
    assert all(step["grad_norm"] > 0.1 for step in metrics)
    for found, tensors in two(with_micro_batches_of, layout, sizes, varying):
        assert_same_steps(found, metrics, 1e-5)
        assert_close(tensors, weights, 1e-5)


@pytest.mark.parametrize("layout", [Layout(dp=2, pp=2), Layout(pp=2, vp=2, dp=2)], ids=str)
def test_steps_of_other_numbers_of_micro_batches_in_pipelines(four: Processes, layout: Layout) -> None:
    metrics, weights = with_micro_batches_of(None, Layout(), (2, 2, 2), OPTIMIZER)
    for found, tensors in four(with_micro_batches_of, layout, (8, 1, 3), OPTIMIZER):
        assert_same_steps(found, metrics, 1e-5)
        assert_close(tensors, weights, 1e-5)


# weights


def loaded(mesh: DeviceMesh, layout: Layout, folder: str, to: str) -> dict[str, Tensor]:
    made = engine(mesh, layout, Model(folder))
    params = made.load(None)
    made.export(params, Path(to))
    return dict(iter_full_weights(made.pieces(params), "test", made._groups.peers.group))


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2, vp=2), Layout(dp=2)], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_weights_are_those_of_the_files_to_the_last_bit(
    two: Processes, layout: Layout, tied: bool, tmp_path: Path
) -> None:
    from nrl import tiny

    module = loading.build(Model(CONFIG | {"tie_word_embeddings": tied, "vocab_size": 90}))
    loading.save_model(module, tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    weights = dict(loading.build(Model(str(tmp_path / "model"))).named_parameters())
    for found in two(loaded, layout, str(tmp_path / "model"), str(tmp_path / "exported")):
        assert_equal(found, weights)
    assert_equal(dict(loading.build(Model(str(tmp_path / "exported"))).named_parameters()), weights)


def frozen(mesh: DeviceMesh, layout: Layout) -> tuple[bool, bool]:
    made = engine(mesh, layout, Model(CONFIG))
    state = made.init()
    copy = made.freeze(made.params(state))
    before = [x.clone() for stage in copy for x in stage.parameters()]
    weights = global_weights(sft_loss, rows("sft"))
    state, _ = made.train(state, sft_loss, parts(rows("sft"), layout, mesh.get_rank()), weights)
    after = [x for stage in copy for x in stage.parameters()]
    trained = [x for stage in made.params(state) for x in stage.parameters()]
    return (
        all(torch.equal(a, b) for a, b in zip(before, after, strict=True)),
        any(not torch.equal(a, b) for a, b in zip(before, trained, strict=True)),
    )


def test_a_frozen_copy_stays_as_it_is(two: Processes) -> None:
    assert two(frozen, Layout(tp=2)) == [(True, True)] * 2


# checkpoints


def saved(mesh: DeviceMesh, layout: Layout, folder: str, model: Model = MODEL) -> tuple[Any, Steps]:
    made = engine(mesh, layout, model)
    return saved_by(made, Path(folder), parts(rows("grpo"), layout, mesh.get_rank()), made._groups.peers.group)


def saved_by(made: Any, folder: Path, each: Sequence[Batch] | None = None, group: Any = None) -> tuple[Any, Steps]:
    """Three steps, saved; and three more."""
    each = parts(rows("grpo"), Layout(), 0) if each is None else each
    weights = global_weights(algos.grpo_loss, rows("grpo"))
    state = made.init()
    for _ in range(3):
        state, _ = made.train(state, algos.grpo_loss, each, weights)
    record = made.save(state, made.params(state)).write(folder).record
    return record, steps(made, "grpo", each, group, state)


def resumed(mesh: DeviceMesh, layout: Layout, folder: str, record: Mapping[str, Any], model: Model = MODEL) -> Steps:
    made = engine(mesh, layout, model)
    state = made.restore(Path(folder), record)
    assert state.step == 3
    return steps(made, "grpo", parts(rows("grpo"), layout, mesh.get_rank()), made._groups.peers.group, state)


def followed(found: Steps, by: Steps) -> None:
    assert_same_steps(found[0], by[0], 1e-5)
    assert_close(found[1], by[1], 1e-5)


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2), Layout(dp=2), Layout(dp=2, shard=1)], ids=str)
def test_a_checkpoint_goes_on_in_another_layout_and_in_the_other_engine(
    two: Processes, layout: Layout, tmp_path: Path
) -> None:
    record, then = two(saved, layout, str(tmp_path))[0]
    other = torch_engine(Model(CONFIG))
    state = other.restore(tmp_path, record)
    followed(steps(other, "grpo", parts(rows("grpo"), Layout(), 0), state=state), then)
    for again in (Layout(tp=2), Layout(dp=2)):
        followed(two(resumed, again, str(tmp_path), record)[0], then)


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2, vp=2), Layout(dp=2)], ids=str)
def test_a_checkpoint_of_the_torch_engine_goes_on_here(two: Processes, layout: Layout, tmp_path: Path) -> None:
    record, then = saved_by(torch_engine(MODEL), tmp_path)
    for found in two(resumed, layout, str(tmp_path), record):
        followed(found, then)


def test_a_checkpoint_of_copies_of_which_two_share_an_optimizer_goes_on(four: Processes, tmp_path: Path) -> None:
    record, then = four(saved, Layout(dp=4, shard=2), str(tmp_path))[0]
    other = torch_engine(MODEL)
    followed(steps(other, "grpo", parts(rows("grpo"), Layout(), 0), state=other.restore(tmp_path, record)), then)
    followed(four(resumed, Layout(dp=4, shard=2), str(tmp_path), record)[0], then)


def in_bfloat16(mesh: DeviceMesh, layout: Layout, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    """Weights before three steps of a tiny rate and after them, and the first loss."""
    made = engine(mesh, layout, Model(CONFIG, dtype="bfloat16"), optimizer=adamw(lr=1e-6, eps=1e-3))
    group, state = made._groups.peers.group, made.init()
    before = {name: x.clone() for name, x in iter_full_weights(made.pieces(made.params(state)), "test", group)}
    losses = list[float]()
    for _ in range(3):
        each = parts(rows("sft"), layout, mesh.get_rank())
        state, metrics = made.train(state, sft_loss, each, global_weights(sft_loss, rows("sft")))
        losses.append(finalize(metrics)["loss"])
    after = dict(iter_full_weights(made.pieces(made.params(state)), "test", group))
    made.save(state, made.params(state)).write(Path(folder))
    return before, after, losses[0]


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(dp=2)], ids=str)
def test_under_bfloat16_the_optimizer_has_float32(two: Processes, layout: Layout, tmp_path: Path) -> None:
    """Steps that are too small for bfloat16 add up."""
    metrics, *_ = expected(json.dumps(CONFIG), "lm", "sft")
    for before, after, loss in two(in_bfloat16, layout, str(tmp_path)):
        assert {x.dtype for x in before.values()} == {torch.bfloat16}
        assert loss == pytest.approx(metrics[0]["loss"], rel=1e-2)
        assert moved(before, after) < 0.1
    record = {"step": 3, "lora": False, "base": None}
    stored = torch_engine(Model(CONFIG)).restore(tmp_path, record).module
    assert moved(before, dict(stored.named_parameters())) > 0.9


def moved(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> float:
    """The fraction of numbers that differ."""
    differ = [x.float() != after[name].detach().float() for name, x in before.items()]
    return float(torch.cat([x.flatten() for x in differ]).float().mean())


# errors


def refused(
    mesh: DeviceMesh, layout: Layout, loss: Loss, change: Callable[[Batch], Batch] | None, model: Model = MODEL
) -> tuple[type, str, bool]:
    """The error of a step, and whether the next one is as if there had been none."""
    made = engine(mesh, layout, model)
    batch = rows("sft")
    state, weights = made.init(), global_weights(loss, batch)
    each = parts(change(batch) if change else batch, layout, mesh.get_rank())
    good = parts(batch, layout, mesh.get_rank()), global_weights(sft_loss, batch)
    try:
        made.train(state, loss, each, weights)
    except Exception as error:
        found = type(error), str(error)
    after = finalize(made.train(state, sft_loss, *good)[1])
    return *found, after == finalize(made.train(made.init(), sft_loss, *good)[1])


def unknown_token(batch: Batch) -> Batch:
    ids = batch["input_ids"].clone()
    ids[2, 3] = 99
    return nrl.assign(batch, input_ids=ids)


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2), Layout(dp=2)], ids=str)
@pytest.mark.parametrize(
    ("loss", "change", "kind", "text"),
    [
        (Raises(value_error), None, ValueError, "a row that I do not like"),
        (Raises(missing), None, KeyError, "my_loss"),
        (weight_by_output, None, WeightError, "added up over its parts"),
        (not_finite, None, NotFinite, "nothing was changed"),
        (detached, None, NoGradient, "the loss has no gradient"),
        (sft_loss, unknown_token, BatchError, "the token 99"),
    ],
)
def test_an_error_of_one_process_is_raised_in_all_and_leaves_the_state(
    two: Processes, layout: Layout, loss: Any, change: Any, kind: type[Exception], text: str
) -> None:
    for error, said, unchanged in two(refused, layout, loss, change):
        assert issubclass(error, kind), said
        assert re.search(text, said)
        assert unchanged


def construction(mesh: DeviceMesh, layout: Layout, source: dict[str, Any], options: dict[str, Any]) -> tuple[type, str]:
    try:
        engine(mesh, layout, Model(source), **options).init()
    except Exception as error:
        return type(error), str(error)
    raise AssertionError("it was made")


@pytest.mark.parametrize(
    ("source", "kind", "text"),
    [
        ({"model_type": "gpt2"}, ModelError, "of type 'gpt2'; it knows llama, mistral, mixtral, qwen2"),
        ({"hidden_act": "gelu"}, ModelError, "hidden_act='gelu'"),
        ({"model_type": "llama", "mlp_bias": True}, ModelError, "mlp_bias=True"),
        ({"model_type": "llama", "attention_bias": True}, ModelError, "attention_bias=True"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}}, ModelError, "rope_type='yarn'"),
        ({"num_key_value_heads": 1}, ModelError, "tp = 2 does not divide num_key_value_heads=1"),
    ],
)
def test_a_model_that_would_be_computed_wrongly_is_refused(
    two: Processes, source: dict[str, Any], kind: type[Exception], text: str
) -> None:
    for error, said in two(construction, Layout(tp=2), CONFIG | source, {}):
        assert error is kind, said
        assert text in said


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"recompute_granularty": "full"}, "no option 'recompute_granularty'; did you mean 'recompute_granularity'?"),
        ({"xyzxyz": 1}, "Megatron Core has no option 'xyzxyz'"),
        ({"softmax_scale": 2.0}, "the option 'softmax_scale' follows from the model"),
        ({"batch_p2p_comm": True}, "the option 'batch_p2p_comm' follows from layout="),
        ({"fp8": "e4m3"}, "the option 'fp8' would change nothing here"),
        ({"clip_grad": 2.0}, r"the option 'clip_grad' follows from adamw(...); leave it out"),
    ],
)
def test_options_are_megatrons_own(two: Processes, options: dict[str, Any], text: str) -> None:
    for error, said in two(construction, Layout(tp=2), CONFIG, options):
        assert error is ConfigError
        assert text in said


@pytest.mark.parametrize("optimizer", [sgd(0.1), muon(0.1), adamw(0.1, groups=[Group("*norm*", factor=0.1)])])
def test_other_optimizers_are_refused(optimizer: Optimizer) -> None:
    message = f"found the optimizer '{optimizer.kind}' with {len(optimizer.groups)} groups; on Megatron there is"
    with nrl.cluster("local") as cluster, pytest.raises(ConfigError, match=message):
        megatron.trainer(cluster.reserve(1), MODEL, optimizer)


def not_restored(mesh: DeviceMesh, folder: Path) -> str:
    record = {"optimizer": "muon", "step": 1, "lora": False, "base": None}
    with pytest.raises(CheckpointError) as caught:
        engine(mesh, Layout(dp=2), MODEL).restore(folder, record)
    return str(caught.value)


def test_the_state_of_another_optimizer_is_not_restored(two: Processes, tmp_path: Path) -> None:
    for said in two(not_restored, tmp_path):
        assert "the checkpoint is of the optimizer 'muon', and here it is 'adamw'" in said


def test_layers_have_to_divide_into_stages(two: Processes) -> None:
    for error, said in two(construction, Layout(pp=2), CONFIG | {"num_hidden_layers": 3}, {}):
        assert error is ModelError
        assert "pp x vp = 2 does not divide num_hidden_layers=3" in said


def test_a_layout_has_to_have_as_many_slots_as_there_are_processes(two: Processes) -> None:
    for error, said in two(construction, Layout(tp=4), CONFIG, {}):
        assert error is PlacementError
        assert "takes 4 processes; found 2" in said
