"""The torch backend against transformers' own forward, torch's own AdamW, and itself."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.weak import WeakTensorKeyDictionary

import nrl
from nrl import algos, tiny
from nrl.algos import needs, sft_loss, token_mean
from nrl.backends import Model, Optimizer, Schedule, Trainer, adamw, fsdp, learning_rate, publish
from nrl.backends.fsdp import torch_engine
from nrl.backends.fsdp.outputs import compute
from nrl.backends.fsdp.torch_engine import TorchEngine
from nrl.backends.models import loading, named_weights
from nrl.backends.models.shards import fill, full_shards
from nrl.backends.training.loss.loss_terms import global_weights
from nrl.batch import Batch, lengths
from nrl.batch.metrics import Mean, Metrics, Sum, finalize
from nrl.batch.packed_rows import Packing
from nrl.errors import BatchError, ModelError
from nrl.runtime import Slots
from nrl.runtime.mesh.offload import FROZEN
from tests.backends.bigram import Recorder
from tests.weights import assert_equal, bucket_of, weights

SIZES: dict[str, Any] = {
    "vocab_size": 23,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": None,
}
QWEN3 = SIZES | {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3 tied": QWEN3,
    "qwen3 untied": QWEN3 | {"tie_word_embeddings": False},
    "qwen2 tied": SIZES | {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2 untied": SIZES | {"model_type": "qwen2", "tie_word_embeddings": False},
    "llama tied": SIZES
    | {"model_type": "llama", "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "llama untied": SIZES | {"model_type": "llama", "tie_word_embeddings": False},
    "mistral, sliding window": SIZES | {"model_type": "mistral", "sliding_window": 4},
    "qwen2, sliding window in the second layer": SIZES
    | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "phi, a head with a bias": SIZES | {"model_type": "phi", "num_key_value_heads": 4, "partial_rotary_factor": 0.5},
}
OTHERS: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "vocab_size": 23, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "opt": SIZES | {"model_type": "opt", "ffn_dim": 24, "word_embed_proj_dim": 16, "init_std": 0.3},
    "bloom": {"model_type": "bloom", "vocab_size": 23, "hidden_size": 16, "n_layer": 2, "n_head": 4},
    "xglm": {
        "model_type": "xglm",
        "vocab_size": 23,
        "d_model": 16,
        "ffn_dim": 24,
        "num_layers": 2,
        "attention_heads": 4,
        "max_position_embeddings": 64,
    },
    "gemma3": SIZES
    | {
        "model_type": "gemma3_text",
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "mixtral": SIZES | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "stablelm": SIZES | {"model_type": "stablelm"},
    "nemotron": SIZES | {"model_type": "nemotron"},
    "llama4": SIZES
    | {
        "model_type": "llama4_text",
        "head_dim": 4,
        "num_local_experts": 2,
        "attention_chunk_size": 4,
        "intermediate_size_mlp": 24,
        "no_rope_layers": [1, 0],
    },
    "llama, dynamic positions": SIZES
    | {
        "model_type": "llama",
        "max_position_embeddings": 8,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    },
    "phi3, long and short positions": SIZES
    | {
        "model_type": "phi3",
        "original_max_position_embeddings": 8,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.0],
            "long_factor": [4.0, 9.0],
            "original_max_position_embeddings": 8,
        },
    },
}
"""Architectures that need not work, but may not be wrong."""
GEMMA2 = SIZES | {"model_type": "gemma2", "head_dim": 8, "query_pre_attn_scalar": 8, "tie_word_embeddings": True}
QUIET = adamw(lr=1e-2, eps=1e-3)


def randomised(config: Mapping[str, Any], seed: int = 0) -> Any:
    """A stock model whose norms and biases are not those of a fresh one, which hide mistakes."""
    module: Any = loading.build(Model(config, seed=seed))
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return module.eval()


@pytest.fixture(scope="module", params=list(CONFIGS))
def stock(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    """A model as transformers has it, with sdpa, and the folder that it was saved to."""
    module = randomised(CONFIGS[request.param])
    folder = tmp_path_factory.mktemp("model")
    module.save_pretrained(folder)
    assert module.config._attn_implementation == "sdpa"
    return module, str(folder)


def make(
    slots: Slots, model: Model | None = None, optimizer: Optimizer = QUIET, dp: int = 1, **options: Any
) -> Trainer:
    return fsdp.trainer(slots[:dp], model or Model(QWEN3), optimizer, **options)


def batch_of(sizes: list[int], seed: int = 0, width: int | None = None, **columns: Tensor) -> Batch:
    """Rows of these lengths, with every column that the losses here read; a token in three is a prompt's."""
    g, n, width = torch.Generator().manual_seed(seed), len(sizes), width or max([1, *sizes])
    mask = torch.arange(width) < torch.tensor(sizes)[:, None]
    made = {
        "input_ids": torch.randint(1, SIZES["vocab_size"], (n, width), generator=g) * mask,
        "attention_mask": mask,
        "loss_mask": mask & (torch.arange(width) > 0) & (torch.rand(n, width, generator=g) > 0.3),
        "advantages": torch.randn(n, width, generator=g),
        "old_logprobs": -torch.rand(n, width, generator=g) * 4,
        "ref_logprobs": -torch.rand(n, width, generator=g) * 4,
        "rollout_logprobs": -torch.rand(n, width, generator=g) * 4,
    }
    return nrl.assign(Batch({}, batch_size=[n]), **made | columns)


MIXED = [9, 1, 17, 5, 0, 5, 2, 12, 17]
"""Lengths of rows that make several blocks, with one that predicts nothing and one that is empty."""


def stock_logits(module: Any, batch: Batch, row: int) -> tuple[Tensor, Tensor]:
    """What transformers computes for one row alone: ``[n - 1, V]``, and the tokens that follow, ``[n - 1]``."""
    ids = batch["input_ids"][row, : int(lengths(batch)[row])]
    logits = module(input_ids=ids[None], use_cache=False).logits[0, :-1]
    temperature = float(batch["temperature"][row]) if "temperature" in batch.keys() else 1.0
    return logits / (temperature or 1.0), ids[1:]


def stock_logprobs(module: Any, batch: Batch) -> Tensor:
    """``[B, T]``, one row at a time, with gradients."""
    rows = []
    for row, size in enumerate(lengths(batch).tolist()):
        found = torch.zeros(0)
        if size > 1:
            logits, targets = stock_logits(module, batch, row)
            found = logits.float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
        rows.append(torch.nn.functional.pad(found, (1, batch["input_ids"].shape[-1] - 1 - len(found))))
    return torch.stack(rows)


def logprobs(trainer: Trainer, batch: Batch) -> Tensor:
    return trainer.logprobs(trainer.init().params, batch).result()


def close(a: Tensor, b: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


# log-probabilities


@pytest.mark.parametrize("packing", [nrl.Rectangles, nrl.Sequences, None])
def test_logprobs_are_those_of_each_row_alone(slots: Slots, stock: tuple[Any, str], packing: Packing | None) -> None:
    module, folder = stock
    batch = batch_of(MIXED, temperature=torch.tensor([1.0, 1.0, 0.5, 0.0, 1.0, 2.0, 0.7, 1.3, 1.0]))
    with torch.no_grad():
        expected = stock_logprobs(module, batch)
    assert expected.min() < -3  # it is not all alike
    choices: list[dict[str, Any]] = [{}, {"max_tokens": 20}, {"dp": 3}]
    for options in choices:
        found = logprobs(make(slots, Model(folder), packing=packing, **options), batch)
        assert found.dtype == torch.float32
        close(found, expected)
    assert not expected[~batch["attention_mask"]].any()
    assert not expected[:, 0].any()


@pytest.mark.parametrize("packing", [nrl.Rectangles, nrl.Sequences, None])
def test_a_neighbour_changes_nothing(slots: Slots, stock: tuple[Any, str], packing: Packing | None) -> None:
    _, folder = stock
    trainer = make(slots, Model(folder), packing=packing)
    params, batch = trainer.init().params, batch_of(MIXED)
    expected = trainer.logprobs(params, batch).result()
    for row in (0, 2, 5):
        ids = batch["input_ids"].clone()
        ids[row] = (ids[row] + 7) % SIZES["vocab_size"]
        found = trainer.logprobs(params, nrl.assign(batch, input_ids=ids)).result()
        others = torch.arange(len(MIXED)) != row
        close(found[others], expected[others], atol=1e-6)
        assert not torch.allclose(found[row], expected[row], atol=1e-2)


@pytest.mark.parametrize("packing", [nrl.Rectangles, nrl.Sequences, None])
def test_what_stands_in_the_padding_changes_nothing(slots: Slots, packing: Packing | None) -> None:
    trainer, batch = make(slots, packing=packing), batch_of(MIXED)
    params = trainer.init().params
    ids = torch.where(batch["attention_mask"], batch["input_ids"], 5)
    found = trainer.logprobs(params, nrl.assign(batch, input_ids=ids)).result()
    close(found, trainer.logprobs(params, batch).result(), atol=1e-6)


def test_a_batch_without_an_attention_mask_is_full(slots: Slots) -> None:
    trainer, batch = make(slots), batch_of([6, 6, 6])
    bare = Batch({"input_ids": batch["input_ids"]}, batch_size=[3]).lock_()
    close(logprobs(trainer, bare), logprobs(trainer, batch))


def test_pairs(slots: Slots) -> None:
    flat = batch_of([5, 9, 3, 0, 7, 7])
    pairs = Batch({name: flat[name].unflatten(0, (3, 2)) for name in flat.keys()}, batch_size=[3, 2]).lock_()
    choices: list[dict[str, Any]] = [{}, {"max_tokens": 18, "dp": 2}, {"packing": nrl.Sequences}, {"packing": None}]
    for options in choices:
        trainer = make(slots, **options)
        close(logprobs(trainer, pairs), logprobs(trainer, flat).unflatten(0, (3, 2)))


@pytest.mark.parametrize("packing", [nrl.Rectangles, nrl.Sequences, None])
@pytest.mark.parametrize("sizes", [[0, 0], [1], [1, 0, 1], []])
def test_rows_that_predict_nothing(slots: Slots, packing: Packing | None, sizes: list[int]) -> None:
    trainer, batch = make(slots, dp=2, packing=packing), batch_of(sizes, width=4)
    assert torch.equal(logprobs(trainer, batch), torch.zeros(len(sizes), 4))
    state, metrics = trainer.train_step(sft_loss)(trainer.init(), batch)
    assert finalize(metrics.result())["skipped"] == 1
    assert state.step == 0


@pytest.mark.parametrize("packing", [nrl.Rectangles, nrl.Sequences, None])
def test_a_trained_token_that_nothing_predicts_has_no_gradient(slots: Slots, packing: Packing | None) -> None:
    """The first token of a row: its log-probability is 0, whatever the weights are. A batch of such is a mistake."""
    batch, longer = batch_of([1, 1], width=3), batch_of([1, 1, 3], width=3)
    trainer = make(slots, packing=packing)
    state = trainer.init()
    before, step = weights(state), trainer.train_step(sft_loss)
    with pytest.raises(BatchError, match=r"train_step\(sft_loss\): no output of the model is read"):
        step(state, nrl.assign(batch, loss_mask=batch["attention_mask"]))
    assert_equal(weights(state), before)
    state, metrics = step(state, nrl.assign(longer, loss_mask=longer["attention_mask"]))
    assert finalize(metrics.result())["grad_norm"] > 0


def test_more_shards_than_rows(slots: Slots) -> None:
    batch = batch_of([5, 3])
    close(logprobs(make(slots, dp=9), batch), logprobs(make(slots), batch))
    results = []
    for dp in (1, 9):
        trainer = make(slots, dp=dp)
        results.append(trainer.train_step(sft_loss)(trainer.init(), batch)[0])
    for name, x in weights(results[0]).items():
        close(weights(results[1])[name], x, atol=1e-6)


@pytest.mark.parametrize("packing", [nrl.Rectangles, nrl.Sequences, None])
def test_a_token_outside_of_the_vocabulary(slots: Slots, packing: Packing | None) -> None:
    trainer, batch = make(slots, packing=packing), batch_of([5, 3])
    ids = batch["input_ids"].clone()
    ids[1, 1] = SIZES["vocab_size"]
    with pytest.raises(BatchError, match="forward: input_ids has the token 23, and the model knows those from 0 to 22"):
        trainer.logprobs(trainer.init().params, nrl.assign(batch, input_ids=ids))


# other outputs


@needs("entropy")
def entropy_loss(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
    return token_mean(-out["entropy"], batch["loss_mask"]), {}


def test_entropy(slots: Slots, stock: tuple[Any, str]) -> None:
    """Its value, and through AdamW's first step its gradient too."""
    module, folder = stock
    batch = batch_of(MIXED, temperature=torch.linspace(0.5, 1.5, len(MIXED)))
    total = torch.zeros(())
    module.zero_grad()
    for row, size in enumerate(MIXED):
        if size > 1:
            logp = stock_logits(module, batch, row)[0].log_softmax(-1)
            entropy = -(logp.exp() * logp).sum(-1)
            total = total - entropy[batch["loss_mask"][row, 1:size]].sum()
    total = total / batch["loss_mask"].sum()
    total.backward()
    show = adamw(lr=1e6, eps=1e6, betas=(0.0, 0.0), clip=math.inf)
    trainer = make(slots, Model(folder, dtype="float64"), show, max_tokens=34)
    state = trainer.init()
    before = weights(state)
    state, metrics = trainer.train_step(entropy_loss)(state, batch)
    assert finalize(metrics.result())["loss"] == pytest.approx(float(total.detach()), abs=1e-5)
    gradients = dict(module.named_parameters())
    for name, x in weights(state).items():
        close((before[name] - x).float(), gradients[name].grad, atol=1e-5)
    module.zero_grad()


# models that cannot be packed


def test_a_model_whose_attention_is_capped_is_refused(slots: Slots) -> None:
    trainer = make(slots, Model(GEMMA2 | {"final_logit_softcapping": None}))
    with pytest.raises(ModelError, match=r"Gemma2.*packing=None"):
        trainer.init()
    with pytest.raises(ModelError, match=r"Gemma2.*packing=None"):
        trainer.load()


@pytest.mark.parametrize("packing", [nrl.Rectangles, nrl.Sequences, None])
@pytest.mark.parametrize("scale", [0.02, 1.0])
def test_a_model_whose_logits_are_capped_is_refused(slots: Slots, packing: Packing | None, scale: float) -> None:
    """Its head alone does not give its log-probabilities, however small those of a fresh model are."""
    config = GEMMA2 | {"attn_logit_softcapping": None, "final_logit_softcapping": 2.0, "initializer_range": scale}
    with pytest.raises(ModelError, match=r"Gemma2ForCausalLM"):
        make(slots, Model(config), packing=packing).init()


@pytest.mark.parametrize("packing", [nrl.Rectangles, nrl.Sequences, None])
def test_a_model_whose_logits_are_scaled_is_refused(slots: Slots, packing: Packing | None) -> None:
    config = SIZES | {"model_type": "granite", "logits_scaling": 4.0}
    with pytest.raises(ModelError, match="GraniteForCausalLM"):
        make(slots, Model(config), packing=packing).init()


def test_a_model_that_looks_across_rows_is_refused(slots: Slots) -> None:
    """A convolution over time, for one, sees the end of the row before."""
    config = SIZES | {"model_type": "lfm2", "full_attn_idxs": [1], "block_auto_adjust_ff_dim": False, "conv_L_cache": 3}
    with pytest.raises(ModelError, match="Lfm2ForCausalLM.*across rows"):
        make(slots, Model(config)).init()


def test_a_model_that_looks_across_rows_works_when_padded(slots: Slots) -> None:
    config = SIZES | {"model_type": "lfm2", "full_attn_idxs": [1], "block_auto_adjust_ff_dim": False, "conv_L_cache": 3}
    batch = batch_of(MIXED)
    with torch.no_grad():
        expected = stock_logprobs(loading.build(Model(config)).eval(), batch)
    close(logprobs(make(slots, Model(config), packing=None), batch), expected)


@pytest.mark.parametrize("packing", [nrl.Rectangles, nrl.Sequences, None])
@pytest.mark.parametrize("name", list(OTHERS))
def test_any_other_model_is_right_or_refused(slots: Slots, name: str, packing: Packing | None, tmp_path: Path) -> None:
    """Positions that depend on the longest row of a batch, for one, let a row see its neighbours."""
    module, batch = randomised(OTHERS[name]), batch_of(MIXED)
    with torch.no_grad():
        expected = stock_logprobs(module, batch)
    module.save_pretrained(tmp_path)
    try:
        found = logprobs(make(slots, Model(str(tmp_path)), packing=packing), batch)
    except ModelError:
        return
    close(found, expected)


# precision, memory, speed


def test_bfloat16_computes_in_bfloat16_and_keeps_float32(slots: Slots, tmp_path: Path) -> None:
    batch = batch_of(MIXED)
    low, full = make(slots, Model(QWEN3, dtype="bfloat16")), make(slots)
    state = low.init()
    assert {x.dtype for x in weights(state).values()} == {torch.float32}
    assert_equal(weights(state), weights(full.init()))
    found, expected = logprobs(low, batch), logprobs(full, batch)
    assert found.dtype == torch.float32
    close(found, expected, atol=0.15)
    assert (found - expected).abs().max() > 1e-4  # it really does
    state, metrics = low.train_step(sft_loss)(state, batch)
    _, exact = full.train_step(sft_loss)(full.init(), batch)
    assert {x.dtype for x in weights(state).values()} == {torch.float32}
    assert finalize(metrics.result())["loss"] == pytest.approx(finalize(exact.result())["loss"], rel=0.02)
    low.save(state, tmp_path)
    assert_equal(weights(low.restore(tmp_path)), weights(state))


def test_bfloat16_accumulates_small_steps(slots: Slots) -> None:
    """Steps of 1e-5 would vanish in bfloat16 weights, which have three digits."""
    trainer = make(slots, Model(QWEN3, dtype="bfloat16"), adamw(lr=1e-5))
    state = trainer.init()
    before = weights(state)
    for _ in range(2):
        state, _ = trainer.train_step(sft_loss)(state, batch_of([5, 9]))
    moved = (weights(state)["model.layers.0.mlp.up_proj.weight"] - before["model.layers.0.mlp.up_proj.weight"]).abs()
    assert 5e-6 < moved.max() < 3e-5


CHECKPOINTING: tuple[Any, ...] = (False, "selective", True)


@pytest.mark.parametrize("packing", [nrl.Rectangles, nrl.Sequences, None])
def test_checkpointing_gives_the_same_step(slots: Slots, packing: Packing | None) -> None:
    batch = batch_of(MIXED)
    found = []
    for checkpointing in CHECKPOINTING:
        trainer = make(slots, checkpointing=checkpointing, packing=packing, max_tokens=40)
        state, metrics = trainer.train_step(algos.grpo_loss)(trainer.init(), batch)
        found.append((weights(state), finalize(metrics.result())))
    for other in found[1:]:
        for name, x in found[0][0].items():
            close(other[0][name], x, atol=1e-6)
        assert other[1] == pytest.approx(found[0][1], rel=1e-5)


class Peak(TorchDispatchMode):
    """The most bytes that tensors have held at once, of those that are made within it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held: dict[int, tuple[StorageWeakRef, int]] = {}
        self.bytes = self.most = 0  # `most`: with those that are no longer held

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for storage in (x.untyped_storage() for x in tree_leaves(found) if isinstance(x, Tensor)):
            self.most -= self.held.get(storage._cdata, (None, 0))[1]
            self.held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            self.most += storage.nbytes()
        if self.most > self.bytes:  # only then has anybody to know which of them are still held
            self.held = {key: (ref, size) for key, (ref, size) in self.held.items() if not ref.expired()}
            self.most = sum(size for _, size in self.held.values())
            self.bytes = max(self.bytes, self.most)
        return found


@pytest.mark.parametrize("packing", [nrl.Rectangles, nrl.Sequences, None])
def test_checkpointing_holds_fewer_bytes(slots: Slots, packing: Packing | None) -> None:
    """Of eight layers one is held at a time, and what goes into each; with "selective", what was narrow, too."""
    peaks, products = [], []
    for checkpointing in CHECKPOINTING:
        trainer = make(slots, Model(QWEN3 | {"num_hidden_layers": 8}), checkpointing=checkpointing, packing=packing)
        state = trainer.init()
        with Peak() as peak:
            state, metrics = trainer.train_step(algos.grpo_loss)(state, batch_of([40] * 8))
            metrics.result()
        peaks.append(peak.bytes)
        with FlopCounterMode(display=False) as flops:
            trainer.train_step(algos.grpo_loss)(state, batch_of([40] * 8))[1].result()
        products.append(flops.get_total_flops())
    none, selective, full = peaks
    assert full < none / 2
    assert full < selective < 0.8 * none
    none, selective, full = products
    assert none < selective < full


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler has some about torch itself
@pytest.mark.parametrize("packing", [nrl.Rectangles, nrl.Sequences, None])
def test_compiled_layers_compute_the_same(slots: Slots, packing: Packing | None) -> None:
    plain, compiled = make(slots, packing=packing), make(slots, packing=packing, compile=True)
    state, other = plain.init(), compiled.init()
    for seed in range(2):
        for sizes in (MIXED, [4, 11, 3]):
            batch = batch_of(sizes, seed=seed)
            expected = plain.logprobs(state.params, batch).result()
            close(compiled.logprobs(other.params, batch).result(), expected)
        state, _ = plain.train_step(algos.grpo_loss)(state, batch)
        other, _ = compiled.train_step(algos.grpo_loss)(other, batch)
    for name, x in weights(state).items():
        close(weights(other)[name], x, atol=1e-4)
    frozen = compiled.freeze(other.params)
    close(compiled.logprobs(frozen, batch).result(), plain.logprobs(state.params, batch).result(), atol=1e-3)


# the step


def test_three_steps_of_a_plain_torch_loop(slots: Slots, stock: tuple[Any, str]) -> None:
    """transformers' model, torch's AdamW, clipping, a schedule, weight decay and GRPO written out by hand."""
    _, folder = stock
    schedule = Schedule("linear", warmup=1, steps=4)
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}
    import transformers

    module: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    groups = [
        {"params": [p for p in module.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in module.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], **options | {"foreach": False})
    trainer = make(slots, Model(folder), adamw(clip=0.05, schedule=schedule, **options), dp=2, max_tokens=30)
    state = trainer.init()
    step = trainer.train_step(algos.grpo_loss)
    for number, rate in enumerate([0.5e-2, 1e-2, 2 / 3 * 1e-2]):
        batch = batch_of(MIXED, seed=number)
        mask, advantages = batch["loss_mask"], batch["advantages"]
        ratio = (stock_logprobs(module, batch) - batch["old_logprobs"]).exp()
        per_token = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        rows = [per_token[row][mask[row]].mean() for row in range(len(MIXED)) if mask[row].any()]
        loss = torch.stack(rows).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.05)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()

        state, metrics = step(state, batch)
        numbers = finalize(metrics.result())
        assert numbers["loss"] == pytest.approx(float(loss.detach()), rel=1e-5, abs=1e-6)
        assert numbers["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
        assert numbers["grad_norm"] > 0.05  # it is clipped
        assert numbers["lr"] == pytest.approx(rate)
        assert numbers["tokens"] == sum(MIXED)
        assert numbers["ratio"] == pytest.approx(float(ratio.detach()[mask].mean()), rel=1e-5)
    expected = dict(module.named_parameters())
    for name, x in weights(state).items():
        close(x, expected[name].detach(), atol=1e-6)
    assert state.step == 3


def test_clip_really_clips(slots: Slots) -> None:
    """With plain gradient descent, which AdamW is with a huge epsilon, the step is as long as the clipped gradient."""
    batch = batch_of(MIXED)
    moved = {}
    for clip in (math.inf, 100.0, 0.01):
        trainer = make(
            slots, Model(QWEN3, dtype="float64"), adamw(lr=1e6, eps=1e6, betas=(0.0, 0.0), clip=clip), max_tokens=20
        )
        state = trainer.init()
        before = weights(state)
        state, metrics = trainer.train_step(sft_loss)(state, batch)
        change = {name: x - before[name] for name, x in weights(state).items()}
        moved[clip] = torch.stack([x.norm() for x in change.values()]).norm().item(), change
        assert finalize(metrics.result())["grad_norm"] == pytest.approx(moved[math.inf][0], rel=1e-4)  # before clipping
    assert 0.1 < moved[math.inf][0] < 100
    assert moved[100.0][0] == pytest.approx(moved[math.inf][0])
    assert moved[0.01][0] == pytest.approx(0.01, rel=1e-3)
    for name, x in moved[0.01][1].items():
        scaled = moved[math.inf][1][name] * 0.01 / moved[math.inf][0]
        torch.testing.assert_close(x, scaled, rtol=1e-3, atol=1e-9)


def test_weight_decay_shrinks_matrices_only(slots: Slots, tmp_path: Path) -> None:
    """Against the same step without it: ``lr * weight_decay * w`` less, and nothing off norms and biases."""
    randomised(CONFIGS["qwen2 untied"]).save_pretrained(tmp_path)
    results = []
    for decay in (0.0, 0.5):
        trainer = make(slots, Model(str(tmp_path)), adamw(lr=1e-2, eps=1e-3, weight_decay=decay))
        state = trainer.init()
        before = weights(state)
        state, _ = trainer.train_step(sft_loss)(state, batch_of(MIXED))
        results.append(weights(state))
    vectors = [name for name, x in before.items() if x.ndim == 1]
    assert any("norm" in name for name in vectors)
    assert any("bias" in name for name in vectors)
    for name, x in before.items():
        close(results[0][name] - results[1][name], 1e-2 * 0.5 * x * (name not in vectors), atol=1e-6)


@pytest.mark.parametrize("schedule", [Schedule("cosine", warmup=2, steps=5, floor=0.1), Schedule(warmup=1)])
def test_the_learning_rate_follows_its_schedule(slots: Slots, tmp_path: Path, schedule: Schedule) -> None:
    optimizer = adamw(lr=0.01, schedule=schedule)
    trainer = make(slots, optimizer=optimizer)
    step, state = trainer.train_step(sft_loss), trainer.init()
    seen = []
    for number in range(4):
        if number == 2:  # the place in the schedule survives a checkpoint
            trainer.save(state, tmp_path)
            state = trainer.restore(tmp_path)
        hidden = nrl.assign(batch_of([4]), loss_mask=torch.zeros(1, 4, dtype=torch.bool))
        state, _ = step(state, hidden)  # a step that is skipped does not count
        state, metrics = step(state, batch_of([5, 9]))
        seen.append(finalize(metrics.result())["lr"])
    assert seen == pytest.approx([learning_rate(optimizer, number) for number in range(4)])


def test_a_learning_rate_of_zero_changes_nothing(slots: Slots) -> None:
    trainer = make(slots, optimizer=adamw(lr=0.0, weight_decay=0.1))
    state = trainer.init()
    before = weights(state)
    state, _ = trainer.train_step(sft_loss)(state, batch_of(MIXED))
    assert_equal(weights(state), before)


@pytest.mark.parametrize("name", ["qwen3 tied", "qwen3 untied"])
def test_tied_weights_stay_tied(slots: Slots, name: str) -> None:
    trainer = make(slots, Model(CONFIGS[name]))
    state, _ = trainer.train_step(sft_loss)(trainer.init(), batch_of(MIXED))
    assert ("lm_head.weight" in weights(state)) == (name == "qwen3 untied")


def test_training_learns(slots: Slots) -> None:
    trainer, batch = make(slots, optimizer=adamw(lr=2e-2)), batch_of([9, 12, 7])
    step, state = trainer.train_step(sft_loss), trainer.init()
    losses = []
    for _ in range(30):
        state, metrics = step(state, batch)
        losses.append(finalize(metrics.result())["loss"])
    assert losses[-1] < 0.3 * losses[0]
    assert state.step == 30


def test_dropout_is_off_while_training(slots: Slots) -> None:
    """A policy has ratio 1 to itself."""
    trainer = make(slots, Model(QWEN3 | {"attention_dropout": 0.5}))
    state, batch = trainer.init(), batch_of(MIXED)
    batch = nrl.assign(batch, old_logprobs=trainer.logprobs(state.params, batch))
    _, metrics = trainer.train_step(algos.grpo_loss)(state, batch)
    numbers = finalize(metrics.result())
    assert numbers["ratio"] == pytest.approx(1.0, abs=1e-5)
    assert numbers["ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert numbers["clip_fraction"] == 0


def test_a_step_does_not_depend_on_what_was_computed_in_between(slots: Slots) -> None:
    trainer, batch = make(slots), batch_of(MIXED)
    step = trainer.train_step(sft_loss)
    a, b = trainer.init(), trainer.init()
    a, _ = step(a, batch)
    trainer.logprobs(b.params, batch_of([4, 4], seed=9)).result()
    trainer.freeze(b.params)
    torch.manual_seed(77)
    b, _ = step(b, batch)
    assert_equal(weights(a), weights(b))


# params


def test_init_copies_params(slots: Slots) -> None:
    trainer, batch = make(slots), batch_of(MIXED)
    step = trainer.train_step(sft_loss)
    state, _ = step(trainer.init(), batch)
    expected = weights(state)
    copy = trainer.init(state.params)
    assert (copy.step, copy.version) == (0, 0)
    assert_equal(weights(copy), expected)
    other = make(slots, optimizer=adamw(lr=0.5))
    also = other.init(state.params)  # of another trainer for the same model
    step(copy, batch)
    other.train_step(sft_loss)(also, batch)
    assert_equal(weights(state), expected)


def test_init_from_the_params_of_another_model(slots: Slots) -> None:
    params = make(slots).load()
    with pytest.raises(ModelError, match=r"trainer\.init: .* has shape"):
        make(slots, Model(QWEN3 | {"hidden_size": 32})).init(params)
    with pytest.raises(ModelError, match=r"trainer\.init: .*weights did not arrive"):
        make(slots, Model(QWEN3 | {"num_hidden_layers": 3})).init(params)


def test_a_frozen_copy_stays(slots: Slots) -> None:
    trainer, batch = make(slots), batch_of(MIXED)
    state = trainer.init()
    expected = trainer.logprobs(state.params, batch).result()
    frozen = trainer.freeze(state.params)
    for _ in range(2):
        state, _ = trainer.train_step(sft_loss)(state, batch)
    assert torch.equal(trainer.logprobs(frozen, batch).result(), expected)
    assert not torch.allclose(trainer.logprobs(state.params, batch).result(), expected, atol=1e-3)
    assert torch.equal(trainer.logprobs(trainer.freeze(frozen), batch).result(), expected)
    assert torch.equal(trainer.logprobs(trainer.load(), batch).result(), expected)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_an_exported_folder_is_the_same_model(slots: Slots, name: str, tmp_path: Path) -> None:
    import transformers

    trainer, batch = make(slots, Model(CONFIGS[name])), batch_of(MIXED)
    state, _ = trainer.train_step(sft_loss)(trainer.init(), batch)
    expected = trainer.logprobs(state.params, batch).result()
    trainer.export(state.params, tmp_path / "export")
    loaded = trainer.load(str(tmp_path / "export"))
    assert torch.equal(trainer.logprobs(loaded, batch).result(), expected)
    assert_equal(weights(loaded), weights(state))
    module = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    with torch.no_grad():
        close(stock_logprobs(module.eval(), batch), expected)
    assert "nrl" not in (tmp_path / "export" / "config.json").read_text()
    state, _ = trainer.train_step(sft_loss)(state, batch)  # what was exported is still trained on
    assert state.step == 2


def test_a_model_in_bfloat16_is_exported_in_bfloat16_with_its_tokenizer(slots: Slots, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    trainer = make(slots, tiny.model(dtype="bfloat16", hidden_size=16, num_hidden_layers=1))
    state = trainer.init()
    trainer.export(state.params, tmp_path)
    assert {x.dtype for x in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert {x.dtype for x in weights(state).values()} == {torch.float32}  # and the state is not
    model = Model(str(tmp_path))
    assert loading.load_tokenizer(model).encode("12+3") == tiny.tokenizer().encode("12+3")
    assert loading.build(model).config.hidden_size == 16  # type: ignore[union-attr]


def test_a_reference_leaves_the_device_while_a_model_trains(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    """And comes back for the next one who asks; here the device is a note in a list."""
    story: list[tuple[str, Any]] = []
    before = set(FROZEN)
    policy, teacher = make(slots), make(slots, Model(QWEN3, seed=1))
    state = policy.init()
    frozen = [policy.freeze(state.params), policy.load(), teacher.load()]
    made = [module for module in FROZEN if module not in before]
    assert len(made) == 3
    for name in ("offload_value", "onload_value"):
        monkeypatch.setattr(torch_engine, name, lambda module, name=name: story.append((name, module)))
    batch = batch_of([5, 6])
    state, _ = policy.train_step(sft_loss)(state, batch)
    assert {module for name, module in story if name == "offload_value"} >= set(made)
    story.clear()
    for params in frozen:
        params.trainer.logprobs(params, batch).result()
    assert [name for name, _ in story] == ["onload_value"] * 3
    assert {module for _, module in story} == set(made)
    policy.freeze(frozen[1])
    assert story[-1][0] == "onload_value"


def test_a_step_after_restoring_is_bitwise_the_next_one(slots: Slots, tmp_path: Path) -> None:
    trainer = make(slots, optimizer=adamw(lr=1e-2, schedule=Schedule("cosine", warmup=2, steps=9)), max_tokens=20)
    step, state = trainer.train_step(algos.grpo_loss), trainer.init()
    for seed in range(2):
        state, _ = step(state, batch_of(MIXED, seed=seed))
    publish(state.params, Recorder())
    trainer.save(state, tmp_path)
    saved = weights(state)
    fresh = make(slots, optimizer=adamw(lr=1e-2, schedule=Schedule("cosine", warmup=2, steps=9)), max_tokens=20)
    again = fresh.restore(tmp_path)
    assert (again.step, again.version) == (2, 1)
    assert_equal(weights(again), saved)
    other = fresh.train_step(algos.grpo_loss)
    for seed in (2, 3):
        state, a = step(state, batch_of(MIXED, seed=seed))
        again, b = other(again, batch_of(MIXED, seed=seed))
        assert finalize(a.result()) == finalize(b.result())
        assert_equal(weights(state), weights(again))
    assert_equal(weights(trainer.restore(tmp_path)), saved)  # the folder is as it was


# state and publishing


def test_what_is_published_is_what_the_state_holds(slots: Slots) -> None:
    trainer, sampler = make(slots), Recorder()
    state = trainer.init()
    assert publish(state.params, sampler) == 1
    assert_equal(sampler.weights, weights(state))
    state, _ = trainer.train_step(sft_loss)(state, batch_of(MIXED))
    assert publish(state.params, sampler) == 2
    assert_equal(sampler.weights, weights(state))
    module: Any = loading.build(Model(QWEN3, seed=5))
    fill(full_shards(named_weights.weights(module)), bucket_of(sampler.weights), caller="receive")
    with torch.no_grad():
        close(stock_logprobs(module.eval(), batch_of(MIXED)), trainer.logprobs(state.params, batch_of(MIXED)).result())


def test_the_mismatch_is_that_of_the_weights_that_the_step_starts_from(slots: Slots) -> None:
    """By a forward of its own, which the step does not make."""
    trainer = make(slots, dp=2, max_tokens=40)
    batch = batch_of(MIXED, temperature=torch.linspace(0.7, 1.2, len(MIXED)))
    state = trainer.init()
    mask = batch["loss_mask"]
    x = (logprobs(trainer, batch) - batch["rollout_logprobs"])[mask].double()
    ratio = x.exp()
    expected = {
        "mismatch/kl": float((ratio - 1 - x).mean()),
        "mismatch/ess": float(ratio.sum() ** 2 / (len(x) * ratio.square().sum())),
        "mismatch/max_abs": float(x.abs().max()),
        "mismatch/chi2": float(ratio.square().mean() - 1),
        "mismatch/max_ratio": float(ratio.max()),
    }
    for loss in (sft_loss, algos.add((1.0, algos.grpo_loss), (0.1, entropy_loss))):
        metrics = trainer.train_step(loss)(trainer.init(state.params), batch)[1].result()
        found = {key: value for key, value in finalize(metrics).items() if key.startswith("mismatch/")}
        assert found == pytest.approx(expected, rel=1e-4)


def test_the_mismatch_takes_no_forward_of_its_own(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    forwards = []

    def counted(*args: Any) -> Any:
        forwards.append(args)
        return compute(*args)

    monkeypatch.setattr("nrl.backends.fsdp.torch_engine.compute", counted)
    whole = batch_of([9, 5, 7])
    for batch in (whole, whole.exclude("rollout_logprobs").lock_()):
        trainer = make(slots, max_tokens=9)
        _, metrics = trainer.train_step(algos.grpo_loss)(trainer.init(), batch)
        assert ("mismatch/kl" in metrics.result()) == ("rollout_logprobs" in batch.keys())
        assert len(forwards) == 3
        forwards.clear()


# where it runs


def test_a_mesh_that_is_made_already(slots: Slots) -> None:
    trainer = fsdp.trainer(slots[:3].mesh(dp=3), Model(QWEN3), QUIET)
    close(logprobs(trainer, batch_of(MIXED)), logprobs(make(slots), batch_of(MIXED)))


def test_making_a_trainer_is_cheap_and_its_errors_come_with_init(slots: Slots) -> None:
    trainer = make(slots, Model("/nowhere/at/all"))
    with pytest.raises(ModelError, match=r"/nowhere/at/all.*no such folder"):
        trainer.init()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:fsdp.trainer. the model is in float64")  # that it is slow is known
def test_a_gpu_computes_what_the_cpu_does(slots: Slots) -> None:
    batch, found = batch_of(MIXED, temperature=torch.full((len(MIXED),), 0.7)), {}
    for device in ("cpu", "cuda"):
        trainer = make(slots, Model(QWEN3, dtype="float64"), dp=2, max_tokens=40, device=device)
        state = trainer.init()
        before = trainer.logprobs(state.params, batch).result()
        state, metrics = trainer.train_step(algos.add((1.0, algos.grpo_loss), (0.1, entropy_loss)))(state, batch)
        after = trainer.logprobs(trainer.freeze(state.params), batch).result()
        found[device] = before, after, finalize(metrics.result())
    for a, b in zip(found["cpu"][:2], found["cuda"][:2], strict=True):
        assert b.device.type == "cpu"
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert found["cuda"][2] == pytest.approx(found["cpu"][2], rel=1e-6, abs=1e-9)


# nothing waits for the device in the loop over micro-batches


class Reads(TorchDispatchMode):
    """Counts reads of numbers that come from the model's weights, which on a device would wait for it."""

    forbidden = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique")

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.computed = WeakTensorKeyDictionary(dict.fromkeys(module.parameters()))
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        tainted = any(x in self.computed for x in given)
        found = func(*args, **(kwargs or {}))
        if tainted:
            self.count += func.overloadpacket.__name__ in self.forbidden
            self.computed.update(dict.fromkeys(x for x in tree_leaves(found) if isinstance(x, Tensor)))
        return found


def test_transformers_does_not_look_for_rows_among_the_positions(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    """To make a mask of them it would wait for the device, in each micro-batch."""
    from transformers import masking_utils

    looked, trainer = list[object](), make(slots)
    state = trainer.init()
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", looked.append)
    trainer.train_step(algos.grpo_loss)(state, batch_of(MIXED))
    assert looked == []


def test_more_micro_batches_read_no_more_numbers(slots: Slots) -> None:
    """The first step of a loss that is computed for trained tokens only, and one of a loss that needs all of them."""

    @needs("entropy")
    def curious(out: TensorDict, batch: Batch) -> tuple[dict[str, Mean], Metrics]:
        mean = token_mean(-out["logprobs"], batch["loss_mask"])
        return {"a": mean, "b": token_mean(-out["entropy"], batch["loss_mask"])}, {"all": Sum(out["logprobs"].sum())}

    batch = batch_of([8] * 8)
    for loss in (algos.grpo_loss, curious):
        counts = []
        for max_tokens in (64, 8):
            engine = TorchEngine(Model(QWEN3), QUIET, nrl.Rectangles, False, False, torch.device("cpu"))
            state = engine.init()
            parts = nrl.microbatches(batch, max_tokens=max_tokens)
            with Reads(state.module) as reads:
                engine.train(state, loss, parts, global_weights(loss, batch))
            counts.append(reads.count)
            assert len(parts) == 64 // max_tokens
        assert 0 < counts[0] < 20
        assert counts[1] == counts[0]


def test_common_first_tokens_give_the_logprobs_of_each_row_alone(
    slots: Slots, stock: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every architecture, sliding windows among them: two prompts of 9 and 6 tokens with five answers each."""
    monkeypatch.setattr("nrl.batch.packed_rows._BLOCK_COST", 0)
    module, folder = stock
    batch = batch_of([14, 9, 17, 12, 11, 10, 7, 17, 8, 6])
    ids = batch["input_ids"].clone()
    ids[:5, :9], ids[5:, :6] = ids[0, :9], ids[5, :6]
    batch = nrl.assign(batch, input_ids=ids * batch["attention_mask"])
    with torch.no_grad():
        expected = stock_logprobs(module, batch)
    choices: list[dict[str, Any]] = [{}, {"max_tokens": 40}, {"checkpointing": True}, {"packing": nrl.Sequences}]
    for options in choices:
        trainer = make(slots, Model(folder), **options)
        close(logprobs(trainer, batch), expected)
        after = []
        for other in (trainer, make(slots, Model(folder), packing=None)):
            state, _ = other.train_step(algos.grpo_loss)(other.init(), batch)
            after.append(weights(state))
        for name, x in after[0].items():
            close(x, after[1][name], atol=1e-5)
