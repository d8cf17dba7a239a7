"""LoRA: against full fine-tuning, against peft, and against itself in other layouts."""

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import nrl
from examples import sft
from nrl import algos, config, tiny
from nrl.algos import Loss, sft_loss
from nrl.backends import Model, Params, Trainer, adamw, fsdp, hf, megatron
from nrl.backends.fsdp.torch_state import TorchState
from nrl.backends.models import loading, lora, named_weights
from nrl.backends.training.loss.loss_terms import global_weights
from nrl.backends.training.states import OwningTrainer
from nrl.backends.vllm import vllm_adapter
from nrl.batch import Batch
from nrl.batch.metrics import finalize
from nrl.errors import ModelError
from nrl.runtime import Slots
from tests.backends.fsdp.test_sharding import engine, everything, mine
from tests.backends.fsdp.test_torch_engine import CONFIGS, MIXED, QWEN3, batch_of
from tests.backends.processes import Processes
from tests.weights import assert_close, assert_equal, weights

LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
MODEL = Model(QWEN3, lora=LORA)
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    processes = Processes(2)
    yield processes
    processes.close()


ADAMW = adamw(lr=1e-2, eps=1e-3, weight_decay=0.01)
ENGINES: dict[str, Callable[..., Trainer]] = {"fsdp": fsdp.trainer, "megatron": megatron.trainer}

type TrainerOf = Callable[..., Trainer]


@pytest.fixture(params=["fsdp", pytest.param("megatron", marks=pytest.mark.megatron)])
def trainer_of(request: pytest.FixtureRequest, recwarn: pytest.WarningsRecorder) -> TrainerOf:
    """Makes a trainer of a place and a model."""

    def make(place: Slots, model: Model = MODEL, **options: Any) -> Trainer:
        return ENGINES[request.param](place, model, ADAMW, **({"max_tokens": 64} | options))

    return make


def adapter_in(folder: Path, module: Any, *, kind: Any = peft.PeftModel, **fields: Any) -> Any:
    """A peft model over ``module`` with random weights in A and B, which peft has written."""
    made: Any = peft.get_peft_model(module, peft.LoraConfig(**(LORA | {"task_type": "CAUSAL_LM"} | fields)))
    torch.manual_seed(5)
    for name, parameter in made.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.2)
    made.eval().save_pretrained(str(folder))
    return made


def logprobs(by: Trainer | OwningTrainer, params: Params, batch: Batch | None = None) -> Tensor:
    found: Tensor = by.logprobs(params, batch_of(MIXED) if batch is None else batch).result()
    return found


# -- what it learns ---------------------------------------------------------------------------------------------------


def test_at_full_rank_the_first_step_has_the_direction_of_full_fine_tuning(slots: Slots, tmp_path: Path) -> None:
    """With A orthogonal and B = 0 the step of B A is that of W times A'A = 1, where steps are along the gradient."""
    module = loading.build(Model(QWEN3))
    sizes = {name: part.in_features for name, part in module.named_modules() if name.endswith(LAYERS)}
    fields: dict[str, Any] = {"rank_pattern": sizes, "alpha_pattern": sizes, "r": 1, "lora_alpha": 1}
    made: Any = peft.get_peft_model(module, peft.LoraConfig(**LORA | fields))
    for name, parameter in made.named_parameters():
        if "lora_A" in name:
            assert parameter.shape[0] == parameter.shape[1]
            nn.init.orthogonal_(parameter)
    made.save_pretrained(str(tmp_path))
    plain = adamw(lr=1e3, eps=1e6, clip=1e9)  # eps is so large that the step is the gradient's
    batch, moved = batch_of(MIXED), []
    for model in (Model(QWEN3), Model(QWEN3, lora=str(tmp_path))):
        trainer = fsdp.trainer(slots[:1], model, plain)
        before = weights(trainer.load())
        state, _ = trainer.train_step(sft_loss)(trainer.init(), batch)
        moved.append({name: x - before[name] for name, x in state.params.tensors()})
    full, adapted = moved
    names = [f"{name}.weight" for name in sizes]
    a, b = (torch.cat([x[name].flatten() for name in names]) for x in moved)
    assert float(torch.cosine_similarity(a, b, dim=0)) > 0.9999
    torch.testing.assert_close(a, b, rtol=1e-2, atol=float(a.abs().max()) * 1e-2)
    assert all(not adapted[name].any() for name in full.keys() - set(names))


def test_only_the_adapter_is_trained(slots: Slots) -> None:
    made = engine(None, MODEL)
    state = made.init()
    before = {name: x.clone() for name, x in named_weights.named_tensors(state.module)}
    batch = batch_of(MIXED)
    for _ in range(3):
        state, _ = made.train(state, sft_loss, [batch], global_weights(sft_loss, batch))
    after = dict(named_weights.named_tensors(state.module))
    changed = {name for name, x in before.items() if not torch.equal(x, after[name])}
    assert changed == {name for name in before if lora.is_trained(name)}
    assert len(changed) == 2 * len(LAYERS) * QWEN3["num_hidden_layers"]
    parameters = dict(state.module.named_parameters())
    moments = {id(parameter) for parameter, found in state.optimizer.state.items() if found}
    assert moments == {id(x) for name, x in parameters.items() if lora.is_trained(named_weights.weight_name(name))}
    assert sum(len(group["params"]) for group in state.optimizer.param_groups) == len(changed)


def test_a_new_adapter_changes_nothing(trainer_of: TrainerOf, slots: Slots) -> None:
    base, adapted = trainer_of(slots[:1], Model(QWEN3)), trainer_of(slots[:1])
    assert torch.equal(logprobs(base, base.load()), logprobs(adapted, adapted.init().params))
    assert_equal(weights(adapted.init()), weights(base.load()))


def test_a_seed_gives_the_same_adapter_everywhere() -> None:
    def a(seed: int, dtype: Any = "float32") -> dict[str, Tensor]:
        module = lora.build(Model(QWEN3, lora=LORA, seed=seed, dtype=dtype))
        return {piece.name: piece.tensor for piece in lora.adapter(module)}

    torch.manual_seed(1)
    first, state = a(3), torch.random.get_rng_state()
    torch.manual_seed(2)
    assert_equal(a(3), first)
    assert not torch.equal(next(iter(a(4).values())), next(iter(first.values())))
    torch.manual_seed(1)
    assert torch.equal(torch.random.get_rng_state(), state)  # nobody else's numbers are used up
    assert {name: x.dtype for name, x in a(3, "bfloat16").items()} == dict.fromkeys(first, torch.bfloat16)


@pytest.mark.parametrize(
    ("trainer_of", "name"),
    [
        ("fsdp", "qwen3 tied"),
        ("fsdp", "llama tied"),
        ("fsdp", "phi, a head with a bias"),
        pytest.param("megatron", "qwen3 tied", marks=pytest.mark.megatron),
        pytest.param("megatron", "qwen2 tied", marks=pytest.mark.megatron),
    ],
    indirect=["trainer_of"],
)
def test_it_computes_what_peft_does(trainer_of: TrainerOf, slots: Slots, name: str, tmp_path: Path) -> None:
    """Of an adapter that peft has written; merged weights are those that peft merges."""
    module = loading.build(Model(CONFIGS[name]))
    theirs = adapter_in(tmp_path / "adapter", module, use_rslora=True, lora_dropout=0.5)
    trainer = trainer_of(slots[:2], Model(CONFIGS[name], lora=str(tmp_path / "adapter")))
    params, batch = trainer.load(), batch_of(MIXED)
    found = logprobs(trainer, params, batch)
    for row, length in enumerate([*MIXED]):
        if length > 1:
            ids = batch["input_ids"][row : row + 1, :length]
            with torch.no_grad():
                own = theirs(input_ids=ids).logits[0].log_softmax(-1)[:-1].gather(-1, ids[0, 1:, None])[:, 0]
            torch.testing.assert_close(found[row, 1:length], own, atol=1e-5, rtol=0)
    base = trainer_of(slots[:1], Model(CONFIGS[name]))
    assert not torch.allclose(logprobs(base, base.load()), found, atol=1e-2)
    assert_close(weights(params), dict(named_weights.named_tensors(theirs.merge_and_unload())), 1e-6)


# -- layouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trainer_of", ["fsdp"], indirect=True)
@pytest.mark.parametrize("dp", [1, 3])
@pytest.mark.parametrize(
    "options", [{"packing": None}, {"packing": nrl.Sequences}, {"max_tokens": 20}, {"checkpointing": True}, {}]
)
def test_layout_cannot_be_seen(trainer_of: TrainerOf, slots: Slots, dp: int, options: dict[str, Any]) -> None:
    model, batch = attrs.evolve(MODEL, dtype="float64"), batch_of(MIXED)
    found = []
    for trainer in (trainer_of(slots[:1], model, max_tokens=1000), trainer_of(slots[:dp], model, **options)):
        state, step = trainer.init(), trainer.train_step(algos.grpo_loss)
        for _ in range(3):
            state, _ = step(state, batch)
        found.append(weights(state))
    assert_close(found[1], found[0], 1e-9)


HEADS: dict[str, Loss] = {
    "lm": algos.grpo_loss,
    "value": algos.value_loss(0.2),
    "reward": algos.bradley_terry_loss(0.01),
}


def rows_of(head: str) -> Batch:
    batch = batch_of([*MIXED, 3])
    noise = torch.randn(*batch["input_ids"].shape, 2, generator=torch.Generator().manual_seed(1))
    batch = nrl.assign(batch, returns=noise[..., 0], values=noise[..., 1])
    return batch.reshape(-1, 2).lock_() if head == "reward" else batch


def steps(
    mesh: DeviceMesh | None, model: Model, n: int = 3, **options: Any
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    made, loss, batch = engine(mesh, model, **options), HEADS[model.head], rows_of(model.head)
    state, numbers = made.init(), []
    for _ in range(n):
        state, metrics = made.train(state, loss, mine(mesh, batch), global_weights(loss, batch))
        numbers.append(finalize(metrics))
    return numbers, everything(made, state) | _raw(state)


def _raw(state: TorchState) -> dict[str, Tensor]:
    """The adapter itself, whole."""
    whole = {name: getattr(x, "full_tensor", x.clone)() for name, x in named_weights.named_tensors(state.module)}
    return {f"raw {name}": x for name, x in whole.items() if lora.is_trained(name)}


@pytest.mark.parametrize("head", list(HEADS))
@pytest.mark.parametrize("options", [{}, {"packing": None, "checkpointing": True}])
def test_two_processes_are_as_one(two: Processes, head: Any, options: dict[str, Any]) -> None:
    """With adapters of fewer rows than there are processes."""
    model = attrs.evolve(MODEL, dtype="float64", head=head, lora=LORA | {"r": 1})
    numbers, weights = steps(None, model, **options)
    for others, parts in two(steps, model, **options):
        for a, b in zip(others, numbers, strict=True):
            assert a == pytest.approx(b, rel=1e-9, abs=1e-9)
        assert_close(parts, weights, 1e-9)
    assert any("lora_B" in name and bool(x.any()) for name, x in weights.items())


def test_in_bfloat16_the_adapter_stays_in_float32(two: Processes) -> None:
    model = attrs.evolve(MODEL, dtype="bfloat16")
    _, weights = steps(None, model, 2)
    for _, parts in two(steps, model, 2):
        assert {x.dtype for x in parts.values()} == {torch.float32}
        for name in (name for name in weights if "lora_B" in name and name.startswith("raw")):
            assert torch.cosine_similarity(parts[name].flatten(), weights[name].flatten(), dim=0) > 0.95


# -- heads ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", ["value", "reward"])
def test_other_heads_are_trained_with_the_adapter(head: Any) -> None:
    made, batch = engine(None, attrs.evolve(MODEL, head=head)), rows_of(head)
    state = made.init()
    assert {name for name, x in state.module.named_parameters() if x.requires_grad and "lora_" not in name} == {
        name for name, _ in state.module.named_parameters() if name.startswith("score.")
    }
    before = {name: x.clone() for name, x in named_weights.named_tensors(state.module)}
    for _ in range(2):  # in the first the head says 0, so that no gradient reaches the body
        state, _ = made.train(state, HEADS[head], [batch], global_weights(HEADS[head], batch))
    after = dict(named_weights.named_tensors(state.module))
    assert all(torch.equal(x, after[name]) != lora.is_trained(name) for name, x in before.items())


# -- where the weights go ---------------------------------------------------------------------------------------------


def trained(trainer: Trainer, n: int = 3) -> Any:
    state, step = trainer.init(), trainer.train_step(sft_loss)
    for seed in range(n):
        state, _ = step(state, tiny.sums(8, seed).take(1)[0])
    return state


def heard(sampler: Any, trainer: Trainer, params: Params) -> tuple[Tensor, Tensor]:
    """What a sampler says of what it samples, and what the trainer says of that."""
    prompts = [[20, 21, 22], [30], [20, 21, 40, 41]]
    answers = sampler.generate(prompts, sampling=nrl.Sampling(max_new_tokens=6)).result()
    rows = [torch.tensor([*prompt, *x.token_ids.tolist()]) for prompt, x in zip(prompts, answers, strict=True)]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
    batch = Batch({"input_ids": ids, "attention_mask": mask}, batch_size=[len(rows)]).lock_()
    theirs = logprobs(trainer, params, batch)
    parts = [theirs[i, len(prompt) : len(row)] for i, (prompt, row) in enumerate(zip(prompts, rows, strict=True))]
    return torch.cat([x.logprobs for x in answers]), torch.cat(parts)


def test_a_sampler_without_an_adapter_gets_merged_weights(trainer_of: TrainerOf, slots: Slots) -> None:
    trainer = trainer_of(slots[:2], tiny.model(lora=LORA))
    sampler = hf.sampler(slots[2:3], tiny.model())
    state = trained(trainer)
    before = heard(sampler, trainer, state.params)
    assert nrl.publish(state.params, sampler) == 1
    found, expected = heard(sampler, trainer, state.params)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert not torch.allclose(*before, atol=1e-2)


def test_a_sampler_with_the_adapter_gets_that_alone(trainer_of: TrainerOf, slots: Slots, tmp_path: Path) -> None:
    model = tiny.model(lora=LORA)
    adapter_in(tmp_path, loading.build(model))
    for each in (model, attrs.evolve(model, lora=str(tmp_path))):
        trainer, sampler = trainer_of(slots[:2], each), hf.sampler(slots[2:3], each)
        torch.testing.assert_close(*heard(sampler, trainer, trainer.load()), atol=1e-5, rtol=0)  # as it was made
        state = trained(trainer)
        before = heard(sampler, trainer, state.params)
        sent = [name for name, _ in state.params.adapter.tensors()]
        assert len(sent) == 2 * len(LAYERS) * 2
        assert all(".lora_" in name for name in sent)
        assert nrl.publish(state.params, sampler) == 1
        torch.testing.assert_close(*heard(sampler, trainer, state.params), atol=1e-5, rtol=0)
        assert not torch.allclose(*before, atol=1e-2)
        frozen = trainer.freeze(state.params)
        nrl.publish(trainer.load(), sampler)
        torch.testing.assert_close(*heard(sampler, trainer, trainer.load()), atol=1e-5, rtol=0)
        assert nrl.publish(frozen, sampler) == 1  # the number that they have
        torch.testing.assert_close(*heard(sampler, trainer, frozen), atol=1e-5, rtol=0)


def test_an_adapter_goes_to_a_sampler_with_the_same_base_and_adapter_only(
    trainer_of: TrainerOf, slots: Slots, tmp_path: Path
) -> None:
    model = tiny.model(lora=LORA)
    trainer, sampler = trainer_of(slots[:1], model), hf.sampler(slots[2:3], model)
    others = [tiny.model(), tiny.model(lora=LORA | {"lora_alpha": 9}), tiny.model(seed=1, lora=LORA)]
    for other in others:
        with pytest.raises(ModelError, match=r"publish: the sampler has the adapter .*; give both sides the same"):
            nrl.publish(trainer_of(slots[:1], other).load(), sampler)
    tiny.save(tiny.model(seed=3), tmp_path)
    elsewhere = trainer_of(slots[:1], tiny.model(seed=3)).load()
    for params in (trainer.load(str(tmp_path)), trainer.init(elsewhere).params):
        with pytest.raises(ModelError, match=r"these params are not an adapter on the weights that their Model names"):
            nrl.publish(params, sampler)
        merged = hf.sampler(slots[2:3], tiny.model())
        nrl.publish(params, merged)
        torch.testing.assert_close(*heard(merged, trainer, params), atol=1e-5, rtol=0)


# -- in and out -------------------------------------------------------------------------------------------------------


def test_states_from_the_params_of_others(trainer_of: TrainerOf, slots: Slots, tmp_path: Path) -> None:
    """Of the same adapter: a copy. Of other weights: these, and an adapter that changes nothing, whatever there was."""
    adapter_in(tmp_path, loading.build(MODEL))
    model = attrs.evolve(MODEL, lora=str(tmp_path))
    trainer, batch = trainer_of(slots[:2], model), batch_of(MIXED)
    state, _ = trainer.train_step(sft_loss)(trainer.init(), batch)
    expected = logprobs(trainer, state.params)
    for by in (trainer, trainer_of(slots[:1], model)):
        copied = by.init(state.params)
        torch.testing.assert_close(logprobs(by, copied.params), expected, atol=1e-6, rtol=0)
        assert copied.params.adapter_of == model.adapter
    full = trainer_of(slots[:1], Model(QWEN3, seed=4))
    for params in (full.load(), state.params):
        for by in (full, trainer_of(slots[:1], attrs.evolve(model, seed=4)), trainer_of(slots[:1], MODEL)):
            found = by.init(params)
            assert found.params.adapter_of is None
            torch.testing.assert_close(logprobs(by, found.params), logprobs(params.trainer, params), atol=1e-5, rtol=0)
            found, _ = by.train_step(sft_loss)(found, batch)
            assert not torch.allclose(logprobs(by, found.params), expected, atol=1e-3)


def test_a_critic_begins_with_the_adapter_of_the_policy(trainer_of: TrainerOf, slots: Slots) -> None:
    actor, critic = trainer_of(slots[:1]), trainer_of(slots[:1], attrs.evolve(MODEL, head="value"))
    state, _ = actor.train_step(sft_loss)(actor.init(), batch_of(MIXED))
    values = critic.init(state.params)
    expected = weights(state)
    found = weights(values)
    assert_equal({name: found[name] for name in expected}, expected)
    assert not found["score.weight"].any()
    values, _ = critic.train_step(HEADS["value"])(values, rows_of("value"))
    again = weights(critic.init(values.params))
    assert_equal(again, weights(values))
    assert again["score.weight"].any()


def test_references(trainer_of: TrainerOf, slots: Slots, tmp_path: Path) -> None:
    adapter_in(tmp_path / "adapter", loading.build(MODEL))
    loading.save_model(loading.build(Model(QWEN3, seed=7)), tmp_path / "other")
    base = trainer_of(slots[:1], Model(QWEN3))
    fresh, adapted = (trainer_of(slots[:1], Model(QWEN3, lora=x)) for x in (LORA, str(tmp_path / "adapter")))
    assert torch.equal(logprobs(fresh, fresh.load()), logprobs(base, base.load()))
    assert torch.equal(logprobs(adapted, adapted.load()), logprobs(adapted, adapted.init().params))
    assert not torch.allclose(logprobs(adapted, adapted.load()), logprobs(base, base.load()), atol=1e-2)
    other = base.load(str(tmp_path / "other"))
    assert torch.equal(logprobs(adapted, adapted.load(str(tmp_path / "other"))), logprobs(base, other))
    state = fresh.init()
    frozen, before = fresh.freeze(state.params), logprobs(fresh, state.params)
    state, _ = fresh.train_step(sft_loss)(state, batch_of(MIXED))
    assert torch.equal(logprobs(fresh, frozen), before)
    assert not torch.allclose(logprobs(fresh, state.params), before, atol=1e-3)


@pytest.mark.parametrize("head", list(HEADS))
def test_what_is_saved_goes_on_exactly(trainer_of: TrainerOf, slots: Slots, head: Any, tmp_path: Path) -> None:
    """The adapter, a head and their moments, without the base."""
    model, batch = attrs.evolve(MODEL, head=head), rows_of(head)
    trainer = trainer_of(slots[:2], model)
    step = trainer.train_step(HEADS[head])
    state, _ = step(trainer.init(), batch)
    state, _ = step(state, batch)
    trainer.save(state, tmp_path / "state")
    trainer.save(trainer.freeze(state.params), tmp_path / "params")
    expected = weights(state)
    after, _ = step(state, batch)
    for again in (trainer, trainer_of(slots[:2], model)):
        restored, params = again.restore(tmp_path / "state"), again.restore(tmp_path / "params")
        assert restored.params.adapter_of == params.adapter_of == model.adapter
        assert_equal(weights(restored), expected)
        assert_equal(weights(params), expected)
        gone_on, _ = again.train_step(HEADS[head])(restored, batch)
        assert gone_on.step == 3
        assert_equal(weights(gone_on), weights(after))
    names = {name for file in tmp_path.glob("*/*.safetensors") for name in load_file(file)}
    assert all(".lora_" in name or ".score." in name for name in names)


def test_a_base_that_is_not_the_models_own_is_saved_with_the_adapter(
    trainer_of: TrainerOf, slots: Slots, tmp_path: Path
) -> None:
    loading.save_model(loading.build(Model(QWEN3, seed=7)), tmp_path / "other")
    trainer, full = trainer_of(slots[:1]), trainer_of(slots[:1], Model(QWEN3, seed=4))
    state, _ = trainer.train_step(sft_loss)(trainer.init(full.load()), batch_of(MIXED))
    teacher = trainer.load(str(tmp_path / "other"))
    values: list[Any] = [state, trainer.freeze(state.params), teacher]
    for number, value in enumerate(values):
        trainer.save(value, tmp_path / str(number))
        restored = trainer.restore(tmp_path / str(number))
        a, b = (x if isinstance(x, Params) else x.params for x in (value, restored))
        assert b.adapter_of is None
        assert_equal(weights(b), weights(a))


def test_an_adapter_is_not_restored_on_another_base(trainer_of: TrainerOf, slots: Slots, tmp_path: Path) -> None:
    trainer = trainer_of(slots[:1])
    trainer.save(trainer.init(), tmp_path)
    saved = r"restore: an adapter was saved without its base, and here is another: the sum or scale of "
    with pytest.raises(ModelError, match=rf"{saved}'model.embed_tokens.weight' was .*, and is .*; give the Model that"):
        trainer_of(slots[:1], Model(QWEN3, lora=LORA, seed=4)).restore(tmp_path)
    with pytest.raises(ModelError, match=rf"{saved}'scaling of model.layers.0.self_attn.q_proj' was 2, and is 4"):
        trainer_of(slots[:1], Model(QWEN3, lora=LORA | {"lora_alpha": 16})).restore(tmp_path)
    with pytest.raises(ModelError, match=r"restore: the model has no weight 'model.layers.0.\S*lora_\S*weight'"):
        trainer_of(slots[:1], Model(QWEN3)).restore(tmp_path)
    plain = trainer_of(slots[:1], Model(QWEN3))
    plain.save(plain.init(), tmp_path / "plain")
    with pytest.raises(ModelError, match=r"restore: 28 weights did not arrive: .*lora_A.weight"):
        trainer.restore(tmp_path / "plain")


def test_a_base_is_summed_up_once() -> None:
    module, read = lora.build(tiny.model(lora=LORA)), list[Tensor]()

    def whole(tensor: Tensor) -> Tensor:
        read.append(tensor)
        return tensor

    first = lora.signature(module, whole)
    count = len(read)
    assert count > 10
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data.add_(1.0)
    with torch.no_grad():
        next(x for x in module.parameters() if x.requires_grad).add_(1.0)
    assert lora.signature(module, whole) == first
    assert len(read) == count
    with torch.no_grad():
        module.get_parameter("model.norm.weight").add_(1.0)  # another base
    assert lora.signature(module, whole) == first | {"model.norm.weight": first["model.norm.weight"] + 128}
    assert len(read) == 2 * count
    other = copy.deepcopy(module)
    assert lora.signature(other, whole)["model.norm.weight"] == first["model.norm.weight"] + 128
    assert len(read) == 3 * count


def saved(mesh: DeviceMesh | None, folder: Path, model: Model) -> dict[str, Tensor]:
    made = engine(mesh, model)
    state = made.init()
    batch = batch_of(MIXED)
    for _ in range(2):
        state, _ = made.train(state, sft_loss, mine(mesh, batch), global_weights(sft_loss, batch))
    for name in ("state", "merged", "adapter"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    record = made.save(state, made.adapter(state.module)).write(folder / "state").record
    (folder / "record.json").write_text(json.dumps(record))
    made.export(made.freeze(state.module), folder / "merged")
    made.export(made.adapter(made.freeze(state.module)), folder / "adapter")
    return everything(made, state) | _raw(state)


def restored(mesh: DeviceMesh | None, folder: Path, model: Model) -> dict[str, Tensor]:
    made = engine(mesh, model)
    state = made.restore(folder, json.loads((folder.parent / "record.json").read_text()))
    return everything(made, state) | _raw(state)


def test_files_of_two_processes_are_those_of_one(two: Processes, tmp_path: Path) -> None:
    model = attrs.evolve(MODEL, lora=LORA | {"r": 1})
    expected = saved(None, tmp_path / "one", model)
    found, _ = two(saved, tmp_path / "two", model)
    assert_close(found, expected, 1e-5)
    for reader in (lambda *args: [restored(None, *args)], lambda *args: two(restored, *args)):
        for each in reader(tmp_path / "one" / "state", model):
            assert_equal(each, expected)
        for each in reader(tmp_path / "two" / "state", model):
            assert_equal(each, found)
    for kind in ("merged", "adapter"):
        one, other = (tmp_path / x / kind for x in ("one", "two"))
        assert {x.name for x in one.iterdir()} == {x.name for x in other.iterdir()}
        for file in one.glob("*.safetensors"):
            assert_close(load_file(other / file.name), load_file(file), 1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merged_weights_are_exported(trainer_of: TrainerOf, slots: Slots, dtype: Any, tmp_path: Path) -> None:
    trainer = trainer_of(slots[:1], tiny.model(lora=LORA, dtype=dtype))
    state = trained(trainer)
    trainer.export(state.params, tmp_path)
    assert not list(tmp_path.glob("adapter*"))
    found = dict(named_weights.named_tensors(loading.build(Model(str(tmp_path), dtype=dtype))))
    assert_equal(found, {name: x.to(getattr(torch, dtype)) for name, x in state.params.tensors()})
    assert all(parameter.requires_grad is not False for parameter in loading.build(Model(str(tmp_path))).parameters())
    if dtype == "float32":
        plain = trainer_of(slots[:1], Model(str(tmp_path)))
        batch = tiny.sums(8).take(1)[0]
        torch.testing.assert_close(
            logprobs(plain, plain.load(), batch), logprobs(trainer, state.params, batch), atol=1e-5, rtol=0
        )


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        ("lm", transformers.AutoModelForCausalLM),
        ("value", transformers.AutoModelForTokenClassification),
        ("reward", transformers.AutoModelForSequenceClassification),
    ],
)
def test_an_exported_adapter_is_read_by_peft_and_by_nrl(
    trainer_of: TrainerOf, slots: Slots, head: Any, kind: Any, tmp_path: Path
) -> None:
    loading.save_model(loading.build(Model(QWEN3)), tmp_path / "base")
    model = Model(str(tmp_path / "base"), head=head, lora=LORA)
    trainer, batch = trainer_of(slots[:1], model), rows_of(head)
    state, _ = trainer.train_step(HEADS[head])(trainer.init(), batch)
    state, _ = trainer.train_step(HEADS[head])(state, batch)
    trainer.export(state.params.adapter, tmp_path / "adapter")
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    again = trainer_of(slots[:1], attrs.evolve(model, lora=str(tmp_path / "adapter")))
    name = {"lm": "logprobs", "value": "values", "reward": "rewards"}[head]
    a, b = (by.forward(x, batch, [name])[name].result() for by, x in ((trainer, state.params), (again, again.load())))
    torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
    labels = {} if head == "lm" else {"num_labels": 1}
    base = kind.from_pretrained(tmp_path / "base", **labels)
    theirs: Any = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    assert_close(dict(named_weights.named_tensors(theirs.merge_and_unload())), weights(state), 1e-6)


def test_what_is_no_adapter_is_not_exported_as_one(trainer_of: TrainerOf, slots: Slots, tmp_path: Path) -> None:
    plain, trainer = trainer_of(slots[:1], Model(QWEN3)), trainer_of(slots[:1])
    for by, params in ((plain, plain.load()), (trainer, trainer.init(plain.load()).params)):
        with pytest.raises(ModelError, match=r"params.adapter: these params are not an adapter on the weights that"):
            by.export(params.adapter, tmp_path)


def test_an_example_with_an_adapter_goes_on_where_it_was(tmp_path: Path) -> None:
    common = ["lora.r=4", "lora.target_modules=[q_proj, v_proj]", "eval_data=null", "rows=4", "checkpoints.every=1"]

    def run(steps: int, name: str) -> dict[str, Tensor]:
        sft.main(config.load(sft.Config, [*common, f"steps={steps}", f"out={tmp_path / name}"]))
        return load_file(tmp_path / name / "model" / "model.safetensors")

    expected = run(3, "whole")
    run(2, "broken off")
    assert_equal(run(3, "broken off"), expected)


# -- errors -----------------------------------------------------------------------------------------------------------


def refused(text: str, given: Any, **fields: Any) -> None:
    with pytest.raises(ModelError, match=text):
        lora.build(Model(fields.pop("source", QWEN3), lora=given, **fields))


def test_what_is_not_plain_lora_is_refused_by_name() -> None:
    plain = r"and nrl trains plain LoRA without dropout; leave it out"
    refused(r"Model\(lora=...\): peft.LoraConfig has no argument 'rank'; plain LoRA has .*", {"rank": 8})
    refused(r"peft.LoraConfig has no argument 'lora_alpa'; did you mean 'lora_alpha'\?", {"lora_alpa": 8})
    refused(rf"use_dora is True, {plain}", LORA | {"use_dora": True})
    refused(rf"bias is 'all', {plain}", LORA | {"bias": "all"})
    refused(rf"lora_bias is True, {plain}", LORA | {"lora_bias": True})
    refused(rf"lora_dropout is 0.1, {plain}", LORA | {"lora_dropout": 0.1})
    refused(rf"init_lora_weights is 'pissa', {plain}", LORA | {"init_lora_weights": "pissa"})
    refused(rf"trainable_token_indices is \[1\], {plain}", LORA | {"trainable_token_indices": [1]})
    refused(rf"target_parameters is \['x'\], {plain}", LORA | {"target_parameters": ["x"]})
    refused(rf"modules_to_save is \['embed_tokens'\], {plain}", LORA | {"modules_to_save": ["embed_tokens"]})
    refused(rf"inference_mode is True, {plain}", LORA | {"inference_mode": True})
    refused(r"it is a LOHA adapter; only LoRA can be used", {"peft_type": "LOHA"})
    lora.build(Model(QWEN3, lora=LORA | {"use_dora": False, "modules_to_save": ["score"], "task_type": "CAUSAL_LM"}))


def test_layers_that_cannot_have_an_adapter_are_refused() -> None:
    read = "an embedding or a head, whose weight nrl reads without calling the layer; leave it out"
    refused(rf"target_modules names 'lm_head', {read}", {"target_modules": ["q_proj", "lm_head"]})
    refused(rf"target_modules names 'model.embed_tokens', {read}", {"target_modules": ["embed_tokens"]})
    refused(rf"target_modules names 'score', {read}", {"target_modules": ["score"]}, head="reward")
    refused(
        r"target_modules names qproj, which the model does not have; its linear layers are named down_proj, gate_proj",
        {"target_modules": ["v_proj", "qproj"]},
    )
    refused(r"Model\(lora=...\): peft says: Target module .*Norm.* is not supported", {"target_modules": ["q_norm"]})
    refused(r"peft says: `r` should be a positive integer value but the value passed is 0", LORA | {"r": 0})
    refused(
        r"the base is quantized, so that merged weights would be rounded; give one that is not",
        LORA,
        source=QWEN3 | {"quantization_config": {"quant_method": "gptq"}},
    )
    with pytest.raises(ValueError, match=r"Model: lora is 8; give a folder in peft's format, or a mapping with arg"):
        Model(QWEN3, lora=8)  # type: ignore[arg-type]


def test_what_vllm_cannot_have() -> None:
    found = vllm_adapter.VllmAdapter(tiny.model(lora=LORA | {"rank_pattern": {"v_proj": 9}}))
    assert found.arguments == {"enable_lora": True, "max_loras": 1, "max_lora_rank": 16}
    own = lora.select_published(lora.build(tiny.model(lora=LORA | {"rank_pattern": {"v_proj": 9}})))
    assert found.shapes == {name: tuple(x.shape) for name, x in own.items()}
    with pytest.raises(ModelError, match=r"vllm.sampler: an adapter has rank 513, and vLLM has up to 512"):
        vllm_adapter.VllmAdapter(tiny.model(lora=LORA | {"r": 513}))
    with pytest.raises(
        ModelError, match=r"vllm.sampler: with init_lora_weights=False B is random, and vLLM is given no"
    ):
        vllm_adapter.VllmAdapter(tiny.model(lora=LORA | {"init_lora_weights": False}))


def test_folders_that_are_no_adapter(tmp_path: Path) -> None:
    give = r"give one that peft's save_pretrained or trainer.export\(params.adapter, ...\) wrote"
    refused(rf"Model\(lora='.*/none'\): there is no such folder; {give}", str(tmp_path / "none"))
    refused(rf"the folder has no adapter_config.json and no adapter_model.safetensors; {give}", str(tmp_path))
    adapter_in(tmp_path / "a", loading.build(Model(QWEN3)))
    refused(
        r"\): 'model.layers.0.mlp.down_proj.lora_A.weight' has shape \[4, 24\], and here it is \[4, 25\]",
        str(tmp_path / "a"),
        source=QWEN3 | {"intermediate_size": 25},
    )
    refused(
        r"target_modules names model.layers.1.mlp.down_proj, .*, which the model does not have",
        str(tmp_path / "a"),
        source=QWEN3 | {"num_hidden_layers": 1},
    )
    file = tmp_path / "a" / "adapter_model.safetensors"
    whole = load_file(file)
    one = next(iter(whole))
    save_file({name: x for name, x in whole.items() if name != one}, file)
    refused(rf"1 weights did not arrive: {one.removeprefix('base_model.model.')}; send all", str(tmp_path / "a"))
    save_file(whole | {"base_model.model.model.norm.lora_A.weight": torch.zeros(1)}, file)
    refused(r"the model has no weight 'model.norm.lora_A.weight'", str(tmp_path / "a"))
    save_file(whole, file)
    text = (tmp_path / "a" / "adapter_config.json").read_text()
    (tmp_path / "a" / "adapter_config.json").write_text(text.replace('"use_dora": false', '"use_dora": true'))
    refused(r"Model\(lora='.*'\): use_dora is True", str(tmp_path / "a"))
    (tmp_path / "a" / "adapter_config.json").write_text(text.replace('"use_dora": false', '"use_nora": false'))
    lora.build(Model(QWEN3, lora=str(tmp_path / "a")))  # of a later peft, and off
    (tmp_path / "a" / "adapter_config.json").write_text(text.replace('"use_dora": false', '"use_nora": true'))
    refused(r"peft.LoraConfig has no argument 'use_nora'", str(tmp_path / "a"))
