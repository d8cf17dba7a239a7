"""LoRA in the Megatron engine, in every layout, against the torch engine in one process: the same numbers."""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nrl import tiny
from nrl.algos import grpo_loss
from nrl.backends import Model
from nrl.backends.models import loading, lora
from nrl.backends.models.named_weights import named_tensors
from nrl.backends.models.shards import full_shard as whole_piece
from nrl.backends.training.loss.loss_terms import global_weights
from nrl.backends.training.weight_stream import iter_full_weights
from nrl.errors import ModelError
from nrl.runtime import Layout
from tests.backends.megatron.test_experts import QWEN
from tests.backends.megatron.test_megatron_engine import (
    CONFIG,
    HEADS,
    ROUTED,
    Steps,
    engine,
    followed,
    moved,
    parts,
    rows,
    steps,
    torch_engine,
)
from tests.backends.processes import Processes
from tests.metrics import assert_same_steps
from tests.weights import assert_close, assert_equal

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(600)]

# At a larger scale two cuts of a batch into micro-batches differ by 2e-5 in one process, too
LORA: dict[str, Any] = {
    "r": 3,
    "lora_alpha": 1,
    "target_modules": "all-linear",
    "init_lora_weights": False,  # B is random, too: or else the first gradient of A is 0
}
SOME: dict[str, Any] = {
    **LORA,
    "target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"],
    "rank_pattern": {"v_proj": 5},
    "alpha_pattern": {"up_proj": 7},
    "use_rslora": True,
}
ATTENTION: dict[str, Any] = LORA | {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}  # experts have none


def only(*layers: int) -> dict[str, Any]:
    return ATTENTION | {"layers_to_transform": list(layers)}


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    processes = Processes(2, "megatron.core.models.gpt", "nrl.backends.megatron.megatron_engine", "peft")
    yield processes
    processes.close()


def whole(made: Any, params: Any) -> dict[str, Tensor]:
    """The weights with the adapter added in, and the adapter."""
    group = made._groups.peers.group if hasattr(made, "_groups") else None
    some = [made.pieces(params), made.pieces(made.adapter(params))]
    return {name: x.clone() for each in some for name, x in iter_full_weights(each, "test", group)}


def in_process(
    mesh: DeviceMesh, layout: Layout, model: Model, name: str, options: dict[str, Any]
) -> tuple[Steps, dict[str, Tensor]]:
    made = engine(mesh, layout, model, **options)
    state = made.init()
    found = steps(made, name, parts(rows(name), layout, mesh.get_rank()), made._groups.peers.group, state)
    return found, whole(made, made.params(state))


@cache
def expected(source: tuple[tuple[str, Any], ...], given: str, name: str) -> tuple[Steps, dict[str, Tensor]]:
    made = torch_engine(Model(dict(source), head=HEADS.get(name, "lm"), lora=json.loads(given)))
    state = made.init()
    return steps(made, name, parts(rows(name), Layout(), 0), state=state), whole(made, made.params(state))


def same(processes: Processes, layout: Layout, name: str = "grpo", lora: Any = LORA, **changed: Any) -> None:
    options = changed.pop("options", {})
    source = CONFIG | changed
    model = Model(source, head=HEADS.get(name, "lm"), lora=lora)
    (metrics, _, outs), weights = expected(tuple(source.items()), json.dumps(lora), name)
    each = processes(in_process, layout, model, name, options)
    for rank, ((found, _, there), tensors) in enumerate(each):
        assert_same_steps(found, metrics, 1e-5)
        assert_close(tensors, weights, 1e-5)
        if layout.dp == 1 and layout.coordinates(rank)["pp"] == layout.pp - 1:
            for one, other in zip(outs, there, strict=True):
                assert_close(
                    {key: x for key, x in other.items() if key != "top_k_ids"},
                    {key: x for key, x in one.items() if key != "top_k_ids"},
                    1e-5,
                )


EXPERTS: dict[str, Any] = QWEN | {"lora": ATTENTION}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
TWO: dict[str, dict[str, Any]] = {
    "tp=2, with sequence parallelism": {"layout": Layout(tp=2)},
    "tp=2, without": {"layout": Layout(tp=2), "options": {"sequence_parallel": False}},
    "tp=2, some projections": {"layout": Layout(tp=2), "lora": SOME},
    "tp=2, without, some projections": {
        "layout": Layout(tp=2),
        "lora": SOME,
        "options": {"sequence_parallel": False},
    },
    "tp=2, tied, biases": {"layout": Layout(tp=2), "model_type": "qwen2", "tie_word_embeddings": True},
    "pp=2": {"layout": Layout(pp=2)},
    "pp=2, tied": {"layout": Layout(pp=2), "tie_word_embeddings": True},
    "pp=2, vp=2": {"layout": Layout(pp=2, vp=2)},
    "pp=2, a stage without an adapter": {"layout": Layout(pp=2), "lora": only(2)},
    "pp=2, none in the last stage": {"layout": Layout(pp=2), "lora": only(0)},
    "pp=2, layers computed again": {
        "layout": Layout(pp=2),
        "options": RECOMPUTED,
        "lora": only(1, 3),
    },
    "cp=2": {"layout": Layout(cp=2)},
    "dp=2, distributed optimizer": {"layout": Layout(dp=2)},
    "dp=2, a whole one in each": {"layout": Layout(dp=2, shard=1)},
    "ep=2": {"layout": Layout(dp=2, ep=2), **EXPERTS},
    "tp=2, ep=2": {"layout": Layout(tp=2, ep=2), **EXPERTS},
    "routes, tp=2, ep=2": {"layout": Layout(tp=2, ep=2), "name": ROUTED, **EXPERTS},
    "pp=2, experts in some layers": {"layout": Layout(pp=2), "decoder_sparse_step": 2, **EXPERTS},
    "value head, tp=2": {"layout": Layout(tp=2), "name": "value"},
    "reward head, pp=2": {"layout": Layout(pp=2), "name": "reward"},
}


@pytest.mark.parametrize("kind", TWO)
def test_two_processes_have_the_numbers_of_one(two: Processes, kind: str) -> None:
    same(two, **TWO[kind])


def trained_by(made: Any, layout: Layout, rank: int, n: int = 3) -> Any:
    """A state after some steps."""
    state, weights = made.init(), global_weights(grpo_loss, rows("grpo"))
    for _ in range(n):
        state, _ = made.train(state, grpo_loss, parts(rows("grpo"), layout, rank), weights)
    return state


def kept(mesh: DeviceMesh, layout: Layout, model: Model) -> tuple[list[bool], int, int]:
    """Whether each tensor that is trained, and no other, has changed; numbers with gradients; numbers with moments."""
    made = engine(mesh, layout, model)

    def every(stages: Any) -> dict[str, Tensor]:
        return {name: x.detach().clone() for stage in stages for name, x in stage.named_parameters()}

    before = every(made.init().stages)
    state = trained_by(made, layout, mesh.get_rank())
    after = every(state.stages)
    changed = [torch.equal(x, after[name]) != (".adapter." in name) for name, x in before.items()]
    gradients = sum(x.main_grad.numel() for x in with_gradients(state.stages))
    moments = [x for each in state.optimizer.chained_optimizers for x in each.optimizer.state.values()]
    return changed, gradients, sum(x["exp_avg"].numel() for x in moments)


def with_gradients(stages: Any) -> list[Any]:
    return [x for stage in stages for x in stage.parameters() if hasattr(x, "main_grad")]


def test_only_the_adapter_has_gradients_and_moments(two: Processes) -> None:
    model = Model(CONFIG, lora=LORA)
    numbers = sum(x.numel() for x in lora.build(model).parameters() if x.requires_grad)
    for changed, gradients, moments in two(kept, Layout(dp=2), model):
        assert all(changed)
        assert gradients == numbers
        assert moments < numbers * 0.6  # the other half is the other process's


# weights


def loaded(mesh: DeviceMesh, layout: Layout, model: Model) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Of a state, and of a frozen copy of frozen weights."""
    made = engine(mesh, layout, model)
    return whole(made, made.params(made.init())), whole(made, made.freeze(made.load(None)))


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2, vp=2), Layout(dp=2)], ids=str)
@pytest.mark.parametrize("source", ["config", "folder"])
def test_weights_are_those_of_the_torch_engine_to_the_last_bit(
    two: Processes, layout: Layout, source: str, tmp_path: Path
) -> None:
    """A new adapter, and one of a folder on a base whose files are read one weight at a time; merged, and alone."""
    model = Model(CONFIG, lora=SOME)
    if source == "folder":
        loading.save_model(loading.build(model), tmp_path / "base")
        made = torch_engine(attrs.evolve(model, seed=3))
        (tmp_path / "adapter").mkdir()
        made.export(made.adapter(made.load(None)), tmp_path / "adapter")
        model = Model(str(tmp_path / "base"), lora=str(tmp_path / "adapter"))
        assert lora.build_lazy(model) is not None
    other = torch_engine(model)
    weights = whole(other, other.load(None))
    for each in two(loaded, layout, model):
        for found in each:
            assert_equal(found, weights)


def exported(mesh: DeviceMesh, layout: Layout, model: Model, folder: Path) -> dict[str, Tensor]:
    made = engine(mesh, layout, model)
    params = made.params(trained_by(made, layout, mesh.get_rank(), 1))
    for name, some in (("merged", params), ("adapter", made.adapter(params))):
        (folder / name).mkdir(exist_ok=True)
        made.export(some, folder / name)
    return whole(made, params)


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2)], ids=str)
def test_a_model_and_an_adapter_that_it_writes_are_read_by_peft_and_by_both_engines(
    two: Processes, layout: Layout, tmp_path: Path
) -> None:
    import peft
    import transformers

    base = Model(CONFIG | {"vocab_size": 90})
    loading.save_model(loading.build(base), tmp_path / "base")
    tiny.tokenizer().save_pretrained(tmp_path / "base")
    model = Model(str(tmp_path / "base"), lora=SOME)
    weights = two(exported, layout, model, tmp_path)[0]
    merged = {name: x for name, x in weights.items() if ".lora_" not in name}
    assert_equal(dict(named_tensors(loading.build(Model(str(tmp_path / "merged"))))), merged)
    assert_equal(
        {f"base_model.model.{name}": x for name, x in weights.items() if ".lora_" in name},
        load_file(tmp_path / "adapter" / "adapter_model.safetensors"),
    )
    whole_base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs: Any = peft.PeftModel.from_pretrained(whole_base, str(tmp_path / "adapter"))
    assert_close(dict(named_tensors(theirs.merge_and_unload())), merged, 1e-6)
    again = attrs.evolve(model, lora=str(tmp_path / "adapter"))
    for _, found in two(loaded, Layout(tp=2), again):
        assert_equal(found, weights)
    other = torch_engine(again)
    assert_equal(whole(other, other.load(None)), weights)


def received(mesh: DeviceMesh, layout: Layout, model: Model, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state that these weights have come into."""
    made = engine(mesh, layout, model)
    state = made.init()
    receiving = made.receive(state)
    receiving.add([whole_piece(name, x) for name, x in weights.items()])
    receiving.end()
    return whole(made, made.params(state))


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2)], ids=str)
def test_a_state_takes_an_adapter_or_all_weights(two: Processes, layout: Layout) -> None:
    model = Model(CONFIG, lora=SOME)
    other = torch_engine(Model(CONFIG, lora=SOME, seed=5))
    made = torch_engine(model)
    every, own = whole(other, other.load(None)), made.load(None)
    adapter = {name: x for name, x in every.items() if ".lora_" in name}
    made_receiving = made.receive(state := made.init())
    made_receiving.add([whole_piece(name, x) for name, x in adapter.items()])
    made_receiving.end()
    for found in two(received, layout, model, adapter):
        assert_equal(found, whole(made, state.module))
    merged = {name: x for name, x in every.items() if name not in adapter}
    for found in two(received, layout, model, merged):
        assert_equal({name: x for name, x in found.items() if ".lora_" not in name}, merged)
        assert all(not x.any() for name, x in found.items() if ".lora_B." in name)
        assert_equal(
            {name: x for name, x in found.items() if ".lora_A." in name},
            {name: x for name, x in whole(made, own).items() if ".lora_A." in name},
        )


# checkpoints


def saved_by(made: Any, layout: Layout, rank: int, folder: Path, alone: bool) -> tuple[Any, Steps]:
    """Three steps, saved; and three more."""
    state = trained_by(made, layout, rank)
    params = made.params(state)
    record = made.save(state, made.adapter(params) if alone else params).write(folder).record
    group = made._groups.peers.group if hasattr(made, "_groups") else None
    return record, steps(made, "grpo", parts(rows("grpo"), layout, rank), group, state)


def saved(mesh: DeviceMesh, layout: Layout, folder: Path, model: Model, alone: bool) -> tuple[Any, Steps]:
    return saved_by(engine(mesh, layout, model), layout, mesh.get_rank(), folder, alone)


def resumed(mesh: DeviceMesh, layout: Layout, folder: Path, record: Mapping[str, Any], model: Model) -> Steps:
    made = engine(mesh, layout, model)
    state = made.restore(folder, record)
    assert state.step == 3
    return steps(made, "grpo", parts(rows("grpo"), layout, mesh.get_rank()), made._groups.peers.group, state)


KINDS: dict[str, dict[str, Any]] = {"dense": {"lora": SOME}, "experts": {"source": QWEN, "lora": ATTENTION}}


@pytest.mark.parametrize(
    ("layout", "kind", "alone"),
    [
        (Layout(tp=2), "dense", True),
        (Layout(pp=2), "dense", True),
        (Layout(dp=2), "dense", False),
        (Layout(tp=2, ep=2), "experts", True),
    ],
    ids=str,
)
def test_a_checkpoint_goes_on_in_another_layout_and_in_the_other_engine(
    two: Processes, layout: Layout, kind: str, alone: bool, tmp_path: Path
) -> None:
    """The adapter alone, or with its base; and what the torch engine saves goes on here."""
    model = Model(CONFIG | KINDS[kind].get("source", {}), lora=KINDS[kind]["lora"])
    here, there = tmp_path / "megatron", tmp_path / "torch"
    here.mkdir()
    there.mkdir()
    record, then = two(saved, layout, here, model, alone)[0]
    own, other = saved_by(torch_engine(model), Layout(), 0, there, alone)
    assert record.keys() == own.keys()
    assert record["base"] == (own["base"] and pytest.approx(own["base"], rel=1e-9))
    assert names(here) == names(there)
    assert all(".lora_" in name for name in names(here)) == alone
    made = torch_engine(model)
    followed(steps(made, "grpo", parts(rows("grpo"), Layout(), 0), state=made.restore(here, record)), then)
    again = Layout(dp=2) if layout.tp > 1 else Layout(tp=2)
    followed(two(resumed, again, here, record, model)[0], then)
    followed(two(resumed, layout, there, own, model)[0], other)


def names(folder: Path) -> set[str]:
    return {name.partition("#")[0] for file in folder.glob("*.safetensors") for name in load_file(file)}


def params_saved(mesh: DeviceMesh, layout: Layout, folder: Path, model: Model) -> list[dict[str, Tensor]]:
    """Frozen params: an adapter alone, all weights, and those of a model without an adapter; then as they come back."""
    made, found = engine(mesh, layout, model), []
    plain = engine(mesh, layout, attrs.evolve(model, lora=None))
    params = made.freeze(made.params(trained_by(made, layout, mesh.get_rank(), 1)))
    for number, (by, some) in enumerate([(made, made.adapter(params)), (made, params), (plain, plain.load(None))]):
        where = folder / str(number)
        where.mkdir(exist_ok=True)
        record = by.save_params(some).write(where).record
        made._groups.peers.gather(None)  # all have written
        back = made.restore_params(where, record)
        held = params if number < 2 else some
        assert not any(x.requires_grad for stage in back for x in stage.parameters())
        found += [whole(made, held), whole(made, back)]
    return found


def test_saved_params_come_back(two: Processes, tmp_path: Path) -> None:
    for found in two(params_saved, Layout(tp=2), tmp_path, Model(CONFIG, lora=SOME)):
        for one, other in zip(found[::2], found[1::2], strict=True):
            assert_equal(one, other)


def in_bfloat16(mesh: DeviceMesh, layout: Layout, model: Model, folder: Path) -> tuple[dict[str, Tensor], Any]:
    made = engine(mesh, layout, model)
    before = whole(made, made.load(None))
    state = trained_by(made, layout, mesh.get_rank(), 2)
    return before, made.save(state, made.adapter(made.params(state))).write(folder).record


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(dp=2)], ids=str)
def test_under_bfloat16_the_optimizer_has_the_adapter_in_float32(
    two: Processes, layout: Layout, tmp_path: Path
) -> None:
    """A is drawn as in the torch engine, and rounded; a base whose files are in bfloat16 is the same to both."""
    loading.save_model(loading.build(Model(CONFIG), dtype=torch.bfloat16), tmp_path / "base")
    model = Model(str(tmp_path / "base"), dtype="bfloat16", lora=SOME)
    (tmp_path / "saved").mkdir()
    before, record = two(in_bfloat16, layout, model, tmp_path / "saved")[0]
    assert {x.dtype for x in before.values()} == {torch.bfloat16}
    other = torch_engine(model)
    drawn = whole(other, other.load(None))
    assert_equal(
        {name: x for name, x in before.items() if ".lora_" in name},
        {name: x.bfloat16() for name, x in drawn.items() if ".lora_" in name},
    )
    restored = whole(other, other.restore(tmp_path / "saved", record).module)
    adapter = {name: x for name, x in restored.items() if ".lora_" in name}
    assert moved({name: x.bfloat16() for name, x in adapter.items()}, adapter) > 0.9  # it is not rounded


# errors


def refused(mesh: DeviceMesh, model: Model, folder: Path | None = None, record: Any = None) -> tuple[type, str]:
    made = engine(mesh, Layout(tp=2), model)
    try:
        made.init() if folder is None else made.restore(folder, record)
    except Exception as error:
        return type(error), str(error)
    raise AssertionError("it was made")


def test_what_does_not_fit_is_refused_in_all_processes(two: Processes, tmp_path: Path) -> None:
    model = Model(CONFIG, lora=SOME)
    alone, plain = tmp_path / "alone", tmp_path / "plain"
    alone.mkdir()
    plain.mkdir()
    record, _ = two(saved, Layout(tp=2), alone, model, True)[0]
    without, _ = two(saved, Layout(tp=2), plain, Model(CONFIG), False)[0]
    again = "restore: an adapter was saved without its base, and here is another: the sum or scale of"
    cases: list[tuple[Any, ...]] = [
        (f"{again} 'model.embed_tokens.weight' was", attrs.evolve(model, seed=4), alone, record),
        (f"{again} 'scaling of model.layers.0.mlp.up_proj' was", Model(CONFIG, lora=SOME | {"alpha_pattern": {}})),
        ("restore: the model has no weight 'model.layers.0.", Model(CONFIG), alone, record),
        ("restore: 32 weights did not arrive: model.layers.0.", model, plain, without),
        ("use_dora is True, and nrl trains plain LoRA without dropout", Model(CONFIG, lora=LORA | {"use_dora": True})),
        ("): there is no such folder; give one that peft's", Model(CONFIG, lora=str(tmp_path / "none"))),
        ("target_modules names 'model.layers.0.mlp.experts'", Model(CONFIG | QWEN, lora=LORA)),
    ]
    cases[1] = (*cases[1], alone, record)
    for text, *given in cases:
        for kind, said in two(refused, *given):
            assert kind is ModelError, said
            assert text in said
