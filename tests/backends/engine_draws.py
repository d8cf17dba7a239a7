"""Random steps of the examples, and what each engine makes of them: the loss, and the gradient of every weight.

A draw runs an example on a random small model and records its training steps. The rows are then changed so that they
hold every token of the vocabulary, and the weights so that none of them is 0.
"""

import importlib
import logging
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import attrs
import cloudpickle
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

import nrl
from nrl import tiny
from nrl.algos import Loss, needed, sft_loss
from nrl.backends import Model, adamw
from nrl.backends.fsdp.torch_engine import TorchEngine
from nrl.backends.models import loading
from nrl.backends.training.loss.batch_checks import with_shares
from nrl.backends.training.loss.loss_terms import global_weights
from nrl.backends.training.trainer import Trainer
from nrl.backends.training.weight_stream import iter_full_weights
from nrl.batch import Batch, deal, lengths
from nrl.batch.metrics import finalize
from nrl.batch.packed_rows import Packing
from nrl.runtime import Layout
from tests.reference import plain_transformers

__all__ = [
    "MUTANTS",
    "Result",
    "Setting",
    "Step",
    "check_equal",
    "expected",
    "recorded",
    "run",
    "settings",
    "tied_step",
]

SCALE = 1e8
"""With this learning rate and this eps, AdamW's first step subtracts the gradient, to one part in 1e8."""
OPTIMIZER = adamw(lr=SCALE, eps=SCALE, clip=1e30)

EXAMPLES: dict[str, dict[str, Any]] = {
    "sft": {"rows": 24},
    "dpo": {"pairs": 12},
    "kto": {"rows": 12},
    "reward_model": {"pairs": 12},
    "grpo": {"prompts": 6, "group_size": 4},
    "custom_loss": {"warmup": 0},
    "ppo": {"prompts": 24, "updates": 1},
    "distill": {"prompts": 24, "top_k": 3},
    "guess": {"prompts": 4, "group_size": 4, "chat": False},
}
"""What each example is run with, beside the model and a single step."""

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 5},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


class Step(NamedTuple):
    """A training step of an example: the model in float64, the loss (by cloudpickle), and the rows."""

    model: Model
    loss: bytes
    batch: Batch


class Result(NamedTuple):
    """The loss of a step, and its gradient for each weight by its name in files."""

    loss: float
    gradients: dict[str, Tensor]


class Setting(NamedTuple):
    """An engine and how it is laid out.

    Args:
        engine: of `nrl.backends.TRAINERS`.
        layout: of the processes.
        packing: of rows.
        rows: how many a micro-batch has.
        options: of Megatron's; None: none.
    """

    engine: Literal["fsdp", "megatron"]
    layout: Layout = Layout()
    packing: Packing | None = nrl.Rectangles
    rows: int = 5
    options: dict[str, Any] | None = None


# --- draws


def config_of(rng: random.Random, tokenizer: Any) -> dict[str, Any]:
    """A config of a random family and shape, whose pad is no token, an unused one, or one that rows are full of."""
    family = rng.choice(list(FAMILIES))
    groups = rng.choice([1, 2, 4])
    vocabulary = len(tokenizer) + rng.randrange(9)
    pads = [None, tokenizer.pad_token_id, tokenizer.eos_token_id, rng.randrange(vocabulary), vocabulary - 1]
    return FAMILIES[family] | {
        "model_type": family,
        "vocab_size": vocabulary,
        "hidden_size": rng.choice([16, 24]),
        "intermediate_size": rng.choice([16, 24]),
        "num_hidden_layers": rng.choice([2, 4]),
        "num_attention_heads": groups * rng.choice([1, 2]),
        "num_key_value_heads": groups,
        "head_dim": 4,
        "max_position_embeddings": 512,
        "tie_word_embeddings": rng.random() < 0.5,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": rng.choice([tokenizer.eos_token_id, rng.randrange(vocabulary)]),
        "pad_token_id": rng.choice(pads),
    }


def recorded(seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Step]:
    """The steps that an example takes on a random model, with other rows and weights."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    tokenizer = tiny.tokenizer()
    name = rng.choice(list(EXAMPLES))
    config = config_of(rng, tokenizer)
    tiny.save(Model(config, tokenizer=tokenizer, seed=seed), folder / "model")
    taken: list[tuple[Trainer, Loss, Batch]] = []
    original = Trainer.train_step

    def train_step(trainer: Trainer, loss: Loss) -> Callable[..., Any]:
        step = original(trainer, loss)

        def recording(state: Any, batch: Batch, **columns: Any) -> Any:
            taken.append((trainer, loss, nrl.assign(batch, **columns) if columns else batch))
            return step(state, batch, **columns)

        return recording

    example = importlib.import_module(f"examples.{name}")
    fields = {"model": str(folder / "model"), "steps": 1, "seed": seed, "out": str(folder / "run")} | EXAMPLES[name]
    known = {field.name for field in attrs.fields(example.Config)}
    fields |= {"sampling": nrl.Sampling(max_new_tokens=6), "teacher": str(folder / "model"), "max_mismatch": 1e9}
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", train_step)
        example.main(example.Config(**{key: value for key, value in fields.items() if key in known}))
    assert taken, f"{name} has taken no step"
    for i, (trainer, loss, batch) in enumerate(taken):
        assert trainer.model is not None
        head = trainer.model.head
        trained = with_random_weights(config, head, folder / str(i), generator)
        trained = attrs.evolve(trained, train_pad_embedding=rng.random() < 0.25)
        changed = with_every_token(batch, config["vocab_size"], config["pad_token_id"], generator)
        module = loading.build(trained)
        yield Step(trained, cloudpickle.dumps(loss), with_random_columns(changed, module, head, loss, generator))


def with_random_weights(config: dict[str, Any], head: Any, folder: Path, generator: torch.Generator) -> Model:
    """A folder with a model in which no weight is 0, as transformers leaves some: those of a new head, of a pad."""
    model = Model(config, head=head, dtype="float64")
    module = loading.build(model)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.2)
    loading.save_model(module, folder)
    return Model(str(folder), head=head, dtype="float64")


def with_every_token(batch: Batch, vocabulary: int, pad: int | None, generator: torch.Generator) -> Batch:
    """Rows of the same lengths over other tokens: prompts stay alike where they were, and each token is there."""
    ids = torch.randperm(vocabulary, generator=generator)[batch["input_ids"]]
    real = torch.arange(ids.shape[-1]) < lengths(batch).unsqueeze(-1)
    places = real.flatten().nonzero()[:, 0]
    places = places[torch.randperm(len(places), generator=generator)]
    assert len(places) > vocabulary, f"{len(places)} places cannot hold {vocabulary} tokens"
    flat = ids.flatten()
    if pad is not None:
        flat[places[torch.rand(len(places), generator=generator) < 0.15]] = pad
    flat[places[:vocabulary]] = torch.arange(vocabulary)
    return nrl.assign(batch, input_ids=torch.where(real, flat.view(ids.shape), batch["input_ids"]))


def with_random_columns(
    batch: Batch, module: torch.nn.Module, head: str, loss: Loss, generator: torch.Generator
) -> Batch:
    """Advantages, returns and log-probabilities near the policy's own, whatever the example has computed."""

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(batch["input_ids"].shape, generator=generator)

    columns: dict[str, Tensor] = {}
    for name in ("advantages", "returns", "values"):
        if name in batch.keys():
            columns[name] = torch.where(batch["loss_mask"], noise(1.0), 0.0)
    if head == "lm":
        with torch.no_grad():
            own = plain_transformers.outputs(module, head, batch, needed(loss) | {"logprobs"})["logprobs"].float()
        for name in ("old_logprobs", "rollout_logprobs", "ref_logprobs", "teacher_logprobs"):
            if name in batch.keys():
                columns[name] = torch.where(own == 0, 0.0, own + noise(0.15))
    if "temperature" in batch.keys():
        columns["temperature"] = 0.5 + torch.rand(batch.batch_size, generator=generator)
    changed: Batch = with_shares(nrl.assign(batch, **columns)).lock_()
    return changed


def settings(seed: int, model: Model) -> tuple[Setting, Setting]:
    """A random setting of each engine that the model can be laid out in, over one, two or four processes."""
    rng, config = random.Random(seed), loading.load_config(model)[0]
    experts: int = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 1
    groups, layers = config.num_key_value_heads, config.num_hidden_layers
    axes = [1, 2, 4]
    layouts = [
        Layout(dp=dp, tp=tp, cp=cp, pp=pp, vp=vp, ep=ep)
        for dp in axes for tp in axes for cp in axes for pp in axes for vp in (1, 2) for ep in axes
        if dp * tp * cp * pp in (2, 4)
        and groups % tp == 0 and layers % (pp * vp) == 0 and (vp == 1 or pp > 1)
        and experts % ep == 0 and (dp * cp * tp) % ep == 0
    ]  # fmt: skip
    layout = rng.choice(layouts)
    packing = nrl.Sequences if layout.cp > 1 else rng.choice([nrl.Rectangles, nrl.Sequences])
    again = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    # Routers that are computed again in the backward would round to float32 there, where no mode of torch reaches
    options = None if experts > 1 else rng.choice([None, again, {"sequence_parallel": False}])
    megatron = Setting("megatron", layout, packing, rng.choice([1, 3, 7]), options)
    own = rng.choice([nrl.Rectangles, nrl.Sequences, None])
    return megatron, Setting("fsdp", Layout(rng.choice([1, 2, 4])), own, rng.choice([1, 3, 7]))


# --- results

_ROUNDS = {Tensor.float, Tensor.to, Tensor.softmax, torch.softmax, torch.nn.functional.softmax}


class _Float64(TorchFunctionMode):
    """Keeps in float64 what transformers and Megatron round to float32 in norms and routers.

    Without it engines that are right differ by up to 1e-4 of a gradient, and a small mistake would hide there.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func in _ROUNDS and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if x is torch.float32 else x for x in args)
            options = {key: torch.float64 if x is torch.float32 else x for key, x in options.items()}
        return func(*args, **options)


def expected(step: Step) -> Result:
    """By plain transformers."""
    module = loading.build(step.model)
    with _Float64():
        return Result(*plain_transformers.gradients(module, step.model.head, cloudpickle.loads(step.loss), step.batch))


def check_equal(found: Result, reference: Result, about: str) -> None:
    """Check the loss and every gradient, tensor by tensor, and token by token in embeddings and heads."""
    assert found.loss == pytest.approx(reference.loss, rel=1e-5, abs=1e-6), about  # engines report it in float32
    assert found.gradients.keys() == reference.gradients.keys(), about
    largest = max(float(x.abs().max()) for x in reference.gradients.values())
    assert largest > 0, f"{about}: the step teaches nothing"
    for name, wanted in reference.gradients.items():
        scale = float(wanted.abs().max())
        error = float((found.gradients[name] - wanted).abs().max())
        assert error <= 1e-7 * scale + 1e-9 * largest, f"{about}: {name} differs by {error:.1e} of {scale:.1e}"


def run(mesh: DeviceMesh | None, setting: Setting, step: Step, mutant: str | None = None) -> Result:
    """By an engine: the loss of a step, and the difference that it makes to each weight."""
    warnings.simplefilter("ignore")  # of Megatron and of what it calls
    logging.disable(logging.WARNING)
    loss, layout = cloudpickle.loads(step.loss), setting.layout
    engine = _engine(mesh, setting, step.model)
    rank = 0 if mesh is None else mesh.get_rank()
    group = None if mesh is None else torch.distributed.group.WORLD
    weights = global_weights(loss, step.batch, always=engine.provides & {"logprobs"})
    mine = step.batch[deal(step.batch, layout.dp)[layout.coordinates(rank)["dp"]]]
    parts = [mine[i : i + setting.rows] for i in range(0, len(mine), setting.rows)]
    state = engine.init()
    if mutant is not None:
        MUTANTS[mutant](setting.engine, state)
    before = _weights(engine, state, group)
    with _Float64():
        state, metrics = engine.train(state, loss, parts, weights)
    after = _weights(engine, state, group)
    return Result(finalize(metrics)["loss"], {name: before[name] - after[name] for name in before})


def _engine(mesh: DeviceMesh | None, setting: Setting, model: Model) -> Any:
    if setting.engine == "fsdp":
        return TorchEngine(model, OPTIMIZER, setting.packing, False, False, torch.device("cpu"), mesh)
    from nrl.backends.megatron.megatron_engine import MegatronEngine
    from nrl.backends.megatron.options import options

    assert setting.packing is not None
    chosen = options(setting.options or {})
    return MegatronEngine(model, OPTIMIZER, setting.packing, chosen, torch.device("cpu"), setting.layout, mesh)


def _weights(engine: Any, state: Any, group: Any) -> dict[str, Tensor]:
    pieces = engine.pieces(engine.params(state))
    return {name: x.clone() for name, x in iter_full_weights(pieces, "test", group)}


# --- mutants: what a wrong engine would do to the row of the pad token


def _mask_another_row(engine: str, state: Any) -> None:
    """The lookup of one more token has no gradient."""
    for module in _modules(engine, state):
        embedding = _embedding(engine, module)
        if embedding is not None:
            _zero_row(embedding.weight, _OTHER - getattr(embedding, "vocab_start_index", 0))


def _mask_no_row(engine: str, state: Any) -> None:
    """The lookup of every token has a gradient."""
    for module in _modules(engine, state):
        (module.get_input_embeddings() if engine == "fsdp" else module).padding_idx = None


def _zero_tied_row(engine: str, state: Any) -> None:
    """The row of the pad token has no gradient at all, not even from a head that is tied to it."""
    for module in _modules(engine, state):
        if engine == "fsdp":
            _zero_row(module.lm_head.weight, _PAD)
        else:
            shared = module.shared_embedding_or_output_weight()
            _zero_row(shared, _PAD - module.pg_collection.tp.rank() * len(shared))


def _zero_row(weight: Tensor, row: int) -> None:
    """Give a row no gradient; this process may not have it."""
    kept = (torch.arange(len(weight)) != row)[:, None]
    weight.register_hook(lambda gradient: gradient * kept)


def _modules(engine: str, state: Any) -> list[Any]:
    return [state.module] if engine == "fsdp" else state.stages


def _embedding(engine: str, module: Any) -> Any:
    if engine == "fsdp":
        return module.get_input_embeddings()
    return module.embedding.word_embeddings if module.pre_process else None


_PAD, _OTHER = 3, 4

MUTANTS: dict[str, Callable[[str, Any], None]] = {
    "a masked row too many": _mask_another_row,
    "a masked row too few": _mask_no_row,
    "a tied head zeroed": _zero_tied_row,
}


def tied_step(folder: Path) -> Step:
    """A supervised step of a model with tied embeddings, whose rows hold the pad token."""
    generator = torch.Generator().manual_seed(0)
    config = {
        "model_type": "qwen3", "vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
        "tie_word_embeddings": True, "pad_token_id": _PAD,
    }  # fmt: skip
    rows = torch.randint(24, (8, 12), generator=generator)
    real = torch.ones_like(rows, dtype=torch.bool)
    batch = Batch({"input_ids": rows, "attention_mask": real, "loss_mask": real}, batch_size=[8])
    model = with_random_weights(config, "lm", folder, generator)
    return Step(model, cloudpickle.dumps(sft_loss), with_every_token(batch, 24, _PAD, generator).lock_())
