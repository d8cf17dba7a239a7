"""Logits, hidden states and functions of logits against plain transformers in float64, tensor by tensor."""

import pickle
import random
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

import nrl
from nrl.algos import LogitsOutput, Loss, add, from_logits, needed, needs, seq_mean, sft_loss, token_mean
from nrl.backends import Model, Optimizer, adamw, fsdp
from nrl.backends.models import lora
from nrl.backends.models.named_weights import named_tensors, weights
from nrl.backends.training.layout import microbatch_plan
from nrl.backends.training.loss.loss_checks import check_loss_is_additive
from nrl.backends.training.loss.loss_terms import global_weights
from nrl.backends.training.outputs import head_chunks
from nrl.backends.training.outputs.head_functions import linear_logits, map_logits
from nrl.batch import Batch, lengths
from nrl.batch.metrics import Mean, Metrics, finalize
from nrl.errors import BatchError, MissingColumn, MissingOutput, ModelError, WeightError
from nrl.runtime import Slots
from tests.backends.fsdp.test_torch_engine import CONFIGS, QWEN3, batch_of
from tests.weights import assert_close

SPEC = adamw(lr=0.5, eps=1.0, weight_decay=0.0, clip=1e9)
"""With so large an eps, what a step changes shows each gradient and not just its sign."""
PHI = CONFIGS["phi, a head with a bias"] | {"tie_word_embeddings": True}
LENGTHS = [9, 1, 17, 5, 0, 5, 2, 12]


def log_normalizer(logits: Tensor) -> Tensor:
    return logits.logsumexp(-1)


def smoothed(logits: Tensor, input_ids: Tensor, advantages: Tensor, weights: Tensor) -> Tensor:
    """Label smoothing, weighted by a column per token and by one per row."""
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(-1, input_ids[:, None])[:, 0]
    return -(1 + advantages) * weights * (0.9 * chosen + 0.1 * logprobs.mean(-1))


def largest(logits: Tensor) -> Tensor:
    return logits.topk(3, -1).values.softmax(-1)


LOG_Z, SMOOTHED = from_logits(log_normalizer), from_logits(smoothed, "input_ids", "advantages", "weights")
LARGEST = from_logits(largest, k=3)


@needs("logits", "hidden_states", SMOOTHED, LARGEST, "entropy")
def loss_of_all(out: TensorDict, batch: Batch) -> tuple[dict[str, Mean], Metrics]:
    """Terms of every kind of output; the second one reads them outside of the mask, too."""
    mask = batch["loss_mask"]
    smooth = -out["logits"].log_softmax(-1).mean(-1) + out["entropy"]
    states = (out["hidden_states"] * out["hidden_states"].roll(1, -1)).sum(-1)
    three = (out[LARGEST] * torch.tensor([1.0, -2.0, 0.5])).sum(-1)
    predicted = batch["attention_mask"] & (torch.arange(mask.shape[-1]) > 0)
    return {
        "smooth": token_mean(smooth - out["logprobs"], mask),
        "everywhere": token_mean(states + out["logits"].square().mean(-1), predicted),
        "functions": seq_mean(out[SMOOTHED] + three, mask),
    }, {}


@needs(LOG_Z, SMOOTHED, LARGEST)
def loss_of_functions(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
    three = (out[LARGEST] * torch.tensor([1.0, -2.0, 0.5])).sum(-1)
    return token_mean(out[LOG_Z].square() + out[SMOOTHED] + three, batch["loss_mask"]), {}


@pytest.fixture
def exact_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """RMS norms in the model's own dtype, because rounding to float32 would hide small differences."""

    def forward(self: Any, x: Tensor) -> Tensor:
        scaled: Tensor = x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
        result: Tensor = self.weight * scaled
        return result

    for kind in (modeling_llama.LlamaRMSNorm, modeling_qwen2.Qwen2RMSNorm, modeling_qwen3.Qwen3RMSNorm):
        monkeypatch.setattr(kind, "forward", forward)


def rows() -> Batch:
    """Rows of many lengths, of which four begin alike, with temperatures and columns of both kinds."""
    g = torch.Generator().manual_seed(1)
    batch = batch_of(LENGTHS, advantages=torch.randn(8, 17, generator=g))
    ids = batch["input_ids"].clone()
    ids[[2, 3, 5, 7], :4] = ids[2, :4]
    temperature = torch.tensor([1.0, 0.5, 2.0, 2.0, 1.0, 2.0, 0.0, 2.0])
    return nrl.assign(batch, input_ids=ids, temperature=temperature, weights=torch.rand(8, generator=g))


def reference(module: Any, batch: Batch, names: Collection[str]) -> dict[str, Tensor]:
    """The outputs that are needed, by transformers' own forward of one row at a time, with gradients."""
    ids, found = batch["input_ids"], dict[str, list[Tensor]](logits=[], hidden_states=[])
    for row, length in enumerate(lengths(batch).tolist()):
        logits, states = torch.zeros(ids.shape[1], module.config.vocab_size).double(), None
        states = torch.zeros(ids.shape[1], module.config.hidden_size).double()
        if length > 1:
            out = module(input_ids=ids[row : row + 1, :length], output_hidden_states=True)
            temperature = float(batch["temperature"][row]) or 1.0
            logits = logits.index_copy(0, torch.arange(1, length), out.logits[0, :-1] / temperature)
            states = states.index_copy(0, torch.arange(1, length), out.hidden_states[-1][0, :-1])
        found["logits"].append(logits)
        found["hidden_states"].append(states)
    outputs = {name: torch.stack(each) for name, each in found.items()}
    logprobs = outputs["logits"].log_softmax(-1)
    there = (batch["attention_mask"] & (torch.arange(ids.shape[1]) > 0)).double()
    outputs["logprobs"] = logprobs.gather(-1, ids[..., None])[..., 0] * there
    outputs["entropy"] = -(logprobs.exp() * logprobs).sum(-1) * there
    for output in names:
        if isinstance(output, LogitsOutput):
            columns = [batch[name] for name in output.columns]
            columns = [x if x.ndim > 1 else x[:, None].expand(ids.shape) for x in columns]
            flat = output.fn(outputs["logits"].flatten(0, 1), *(x.flatten(0, 1) for x in columns))
            outputs[str(output)] = flat.view(*ids.shape, *flat.shape[1:]) * there.view(
                *there.shape, *[1] * (flat.ndim - 1)
            )
    return outputs


def steps_of_transformers(model: Model, loss: Loss, spec: Optimizer, n: int) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and the trained weights of ``n`` steps by transformers and torch's own AdamW."""
    module: Any = lora.build(model, dtype=torch.float64).eval()
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=spec.lr, betas=spec.betas, eps=spec.eps, weight_decay=0.0)
    losses, batch = [], rows()
    for _ in range(n):
        outputs = reference(module, batch, needed(loss))
        terms, _ = loss(TensorDict(dict(outputs), batch_size=batch.batch_size), batch)
        each = [terms] if isinstance(terms, Mean) else list(terms.values())
        value = torch.stack([term.total / term.weight for term in each]).sum()
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    names = {name for name, x in weights(module).items() if x.requires_grad}
    return losses, {name: x for name, x in named_tensors(module) if name in names}


def check_steps(slots: Slots, config: Mapping[str, Any], loss: Loss, packing: Any, dp: int, max_tokens: int) -> None:
    adapter = {"r": 2, "lora_alpha": 8, "target_modules": "all-linear"} if config.get("lora") else None
    source = {key: value for key, value in config.items() if key != "lora"}
    model = Model(source, dtype="float64", lora=adapter)
    losses, expected = steps_of_transformers(model, loss, SPEC, 2)
    trainer = fsdp.trainer(slots[:dp], model, SPEC, packing=packing, max_tokens=max_tokens)
    state, step = trainer.init(), trainer.train_step(loss)
    for value in losses:
        state, metrics = step(state, rows())
        assert finalize(metrics.result())["loss"] == pytest.approx(value, rel=1e-9)
    params = state.params.adapter if adapter else state.params
    found = {name: x for name, x in params.tensors() if name in expected}
    assert_close(found, expected, 1e-9)


def drawn(seed: int) -> tuple[dict[str, Any], Any, int, int]:
    """A config, a packing, a number of shards, and a bound of the tokens of a micro-batch."""
    draw = random.Random(seed)
    names = [name for name in CONFIGS if "sliding" not in name]
    config = CONFIGS[draw.choice(names)] | {"vocab_size": draw.choice([23, 24, 37, 64])}
    config |= {"lora": draw.random() < 0.3}
    return config, draw.choice([nrl.Rectangles, nrl.Sequences, None]), draw.choice([1, 2]), draw.choice([17, 40, 200])


@pytest.mark.slow
@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("loss", [loss_of_all, loss_of_functions], ids=["all", "functions"])
def test_drawn_steps_are_those_of_transformers(
    slots: Slots, seed: int, loss: Loss, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_chunks, "CHUNK_BYTES", 2**10)
    check_steps(slots, drawn(seed)[0], loss, *drawn(seed)[1:])


@pytest.mark.parametrize("loss", [loss_of_all, loss_of_functions], ids=["all", "functions"])
def test_steps_are_those_of_transformers(slots: Slots, loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tied, in several micro-batches and shards, and in several chunks of tokens."""
    monkeypatch.setattr(head_chunks, "CHUNK_BYTES", 2**10)
    check_steps(slots, PHI, loss, nrl.Rectangles, 2, 40)


@pytest.mark.slow
@pytest.mark.usefixtures("exact_norms")
def test_steps_of_an_adapter_are_those_of_transformers(slots: Slots) -> None:
    check_steps(slots, CONFIGS["llama untied"] | {"lora": True}, loss_of_all, nrl.Sequences, 1, 200)


@pytest.mark.parametrize("dp", [1, 9])
def test_a_forward_gives_them(slots: Slots, dp: int) -> None:
    """With a shard that has no row, and a token at a position that nothing predicts."""
    model, batch = Model(QWEN3, dtype="float64"), rows()
    trainer = fsdp.trainer(slots[:dp], model, SPEC, max_tokens=20)
    needed_here = {"logits", "hidden_states", "logprobs", LOG_Z, LARGEST, SMOOTHED}
    found = trainer.forward(trainer.load(), batch, needed_here)
    with torch.no_grad():
        outputs = reference(lora.build(model, dtype=torch.float64).eval(), batch, needed_here)
    assert set(found) == needed_here
    for name, future in found.items():
        torch.testing.assert_close(future.result().double(), outputs[name], rtol=1e-9, atol=1e-9)
        assert not future.result()[:, 0].any()


def test_hidden_states_are_what_the_head_reads(slots: Slots) -> None:
    """Position t is the state that predicts token t, of a language model as of a critic."""
    batch = nrl.assign(batch_of([5, 3]), temperature=torch.tensor([2.0, 1.0]))
    trainer = fsdp.trainer(slots[:1], Model(CONFIGS["llama untied"]), SPEC)
    out = {name: x.result() for name, x in trainer.forward(trainer.load(), batch, {"logits", "hidden_states"}).items()}
    weight = dict(trainer.load().tensors())["lm_head.weight"]
    mask = batch["attention_mask"].clone()
    mask[:, 0] = False
    scale = batch["temperature"][:, None, None]
    torch.testing.assert_close((out["hidden_states"] @ weight.T / scale)[mask], out["logits"][mask])
    critic = fsdp.trainer(slots[:1], Model(CONFIGS["llama untied"], head="value"), SPEC)
    states = critic.forward(critic.load(), batch, {"hidden_states"})
    assert list(states) == ["hidden_states"]
    torch.testing.assert_close(states["hidden_states"].result(), out["hidden_states"])

    @needs("hidden_states", "values")
    def both(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
        return token_mean(out["hidden_states"].square().sum(-1) + out["values"], batch["loss_mask"]), {}

    state, _ = critic.train_step(both)(critic.init(), batch)
    assert state.step == 1


# functions of logits


def given(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(7, 4, generator=g), torch.randn(11, 4, generator=g)
    return hidden.to(dtype), weight.to(dtype), torch.linspace(-1, 1, 11).to(dtype), torch.rand(7, generator=g) + 0.5


@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_a_function_of_chunks_has_the_gradients_of_the_matrix(chunk: int | None) -> None:
    hidden, weight, bias, temperature = given()
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    plain = (hidden @ weight.T + bias) / temperature[:, None]
    whole = linear_logits(hidden, weight, bias=bias, temperature=temperature)
    torch.testing.assert_close(whole, plain)
    slope = torch.linspace(-1, 2, 21, dtype=torch.float64).view(7, 3)
    found = map_logits(LARGEST, hidden, weight, bias=bias, temperature=temperature, chunk=chunk)
    torch.testing.assert_close(found, largest(plain))
    expected = torch.autograd.grad(largest(plain), leaves, slope)
    for other in (largest(whole), found):
        torch.testing.assert_close(torch.autograd.grad(other, leaves, slope, retain_graph=True), expected)


def test_bfloat16_logits_are_added_up_in_float32() -> None:
    hidden, weight, _, _ = given(torch.bfloat16)
    expected = hidden.float() @ weight.float().T
    torch.testing.assert_close(linear_logits(hidden, weight), expected)
    torch.testing.assert_close(map_logits(LOG_Z, hidden, weight, chunk=2), expected.logsumexp(-1))


def test_a_function_without_a_gradient_is_a_number() -> None:
    hidden, weight, *_ = given()
    best = from_logits(lambda logits: logits.argmax(-1), name="best")
    found = map_logits(best, hidden.requires_grad_(), weight, chunk=2)
    assert found.equal((hidden @ weight.T).argmax(-1).double())
    found.sum().backward()
    assert hidden.grad is not None
    assert not hidden.grad.any()


@pytest.mark.parametrize(
    ("fn", "k", "text"),
    [
        (lambda logits: logits, None, r"from_logits\(mine\): the function returned a tensor \[3, 11\] for logits \[3"),
        (lambda logits: logits.sum(), None, r"returned a tensor \[\] for logits \[3, 11\]; it must return \[3\], a nu"),
        (
            lambda logits: logits[:, :2],
            3,
            r"returned a tensor \[3, 2\] .*it must return \[3, 3\], k=3 numbers for each",
        ),
        (lambda logits: 1.0, None, r"from_logits\(mine\): the function returned a float"),
        (lambda logits: logits.exp_().sum(-1), None, r"from_logits\(mine\): the function changes its logits in place"),
    ],
)
def test_what_a_function_may_not_do(fn: Any, k: int | None, text: str) -> None:
    hidden, weight, *_ = given()
    with pytest.raises(TypeError, match=text):
        map_logits(from_logits(fn, k=k, name="mine"), hidden, weight, chunk=3)


def test_arguments_of_from_logits() -> None:
    with pytest.raises(TypeError, match=r"from_logits: fn is 'logits'; give a function"):
        from_logits("logits")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"from_logits: 3 is not the name of a column"):
        from_logits(largest, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"from_logits: k is 0; it must be at least 1"):
        from_logits(largest, k=0)


def test_two_functions_have_two_names() -> None:
    one, other = (needs(from_logits(lambda logits: logits.amax(-1)))(lambda out, batch: ...) for _ in range(2))
    with pytest.raises(ValueError, match=r"needs: 'from_logits\(<lambda>\)' stands for two different functions"):
        needed(one, other)
    assert needed(needs(LOG_Z)(lambda: None), needs(from_logits(log_normalizer))(lambda: None)) == {LOG_Z}


# the driver


def test_a_need_that_nobody_computes_is_answered_with_those_that_are(slots: Slots) -> None:
    trainer = fsdp.trainer(slots[:1], Model(QWEN3), SPEC)
    for need, text in [
        (
            "logit",
            r"no model computes logit; there are .*from_logits, hidden_states, logits,.* rewards \(head='reward'\)",
        ),
        ("from_logits(mine)", r"'from_logits\(mine\)' is a name without its function; give what nrl.algos.from_logits"),
    ]:
        with pytest.raises(MissingOutput, match=text):
            trainer.train_step(needs(need)(sft_like))
        del sft_like.__dict__["needs"]
    with pytest.raises(MissingColumn) as missing:
        trainer.train_step(loss_of_functions)(trainer.init(), batch_of([3, 4]))
    assert missing.value.column == "weights"


def sft_like(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
    return sft_loss(out, batch)


def test_logits_that_have_no_room(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward is refused for all of its rows, a step for one micro-batch, and functions of logits never."""
    batch = rows()
    trainer = fsdp.trainer(slots[:1], Model(QWEN3), SPEC, max_tokens=40)
    monkeypatch.setattr(microbatch_plan, "LOGITS_BYTES", 40 * 23 * 4)
    with pytest.raises(BatchError, match=r"forward: logits: 136 tokens by 23 words take .* give it fewer rows at a ti"):
        trainer.forward(trainer.load(), batch, {"logits"})
    state, _ = trainer.train_step(loss_of_all)(trainer.init(), batch)
    monkeypatch.setattr(microbatch_plan, "LOGITS_BYTES", 16 * 23 * 4)
    with pytest.raises(BatchError, match=r"logits of a micro-batch: .* smaller max_tokens=, or .*from_logits\(fn\)"):
        trainer.train_step(loss_of_all)(state, batch)
    trainer.train_step(loss_of_functions)(trainer.init(), batch)


def test_params_of_another_vocabulary_are_refused(slots: Slots, tmp_path: Path) -> None:
    lora.build(Model(QWEN3 | {"vocab_size": 24})).save_pretrained(tmp_path)  # type: ignore[operator]
    trainer = fsdp.trainer(slots[:1], Model(QWEN3), SPEC)
    with pytest.raises(ModelError, match=r"forward: logits of these params have 24 numbers a token, .* own model 23;"):
        trainer.forward(trainer.load(str(tmp_path)), batch_of([3, 4]), {"logits"})


def test_a_loss_is_measured_by_them(slots: Slots) -> None:
    trainer, batch = fsdp.trainer(slots[:2], Model(QWEN3), SPEC), rows()
    params = trainer.load()
    _, metrics = trainer.train_step(loss_of_functions)(trainer.init(), batch)
    found = finalize(nrl.evaluate(loss_of_functions, trainer, params, batch))
    assert found["eval/loss"] == pytest.approx(finalize(metrics.result())["loss"], rel=1e-5)


@needs("logits")
def looks_at_numbers(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
    x = out["logits"].logsumexp(-1)
    return token_mean(x if (x > 0).any() else -x, batch["loss_mask"]), {}


@needs("logits")
def selects(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
    mask = batch["loss_mask"]
    losses = torch.nn.functional.cross_entropy(out["logits"][mask], batch["input_ids"][mask], reduction="none")
    weights = batch["weights"][:, None].expand(mask.shape)[mask]
    return Mean((weights * losses).sum(), weights.sum().to(out["logits"])), {}


def test_the_weight_of_a_large_vocabulary_is_learnt_without_its_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a petabyte of them, unless the loss looks at their numbers."""
    batch = rows()
    batch = batch[torch.arange(8).repeat(1000)]
    widths = {"logits": 2**31, "hidden_states": 2**31}
    mask, expected = batch["loss_mask"], float((batch["weights"][:, None] * batch["loss_mask"]).sum())
    assert global_weights(selects, batch, widths=widths) == {"loss": pytest.approx(expected)}
    assert global_weights(loss_of_all, batch, widths=widths)["smooth"] == mask.sum()
    for numbers in (23 * 20, 2**24):
        monkeypatch.setattr("nrl.backends.training.loss.loss_terms._NUMBERS", numbers)
        assert global_weights(looks_at_numbers, rows(), widths={"logits": 23}) == {"loss": 33.0}


LOOKS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "numpy": lambda x: x.detach().numpy(),
    "tolist": lambda x: x.tolist(),
    "in an array": lambda x: np.asarray(x),
    "printed": lambda x: f"{x.sum():.3f} {x}",
    "a mask": lambda x: x[x > 0],
    "in a tensor": lambda x: torch.tensor([x.sum(), x.mean()]),
    "unique": lambda x: x.unique(),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS.keys())
def test_a_loss_that_looks_at_numbers_is_called_again_with_some(look: Callable[[Tensor], Any]) -> None:
    @needs("logits")
    def looks(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
        look(out["logits"])
        return token_mean(out["logits"].logsumexp(-1), batch["loss_mask"]), {}

    assert global_weights(looks, rows(), widths={"logits": 23}) == {"loss": 33.0}


MISTAKES: dict[str, Callable[[Tensor, Batch], Any]] = {
    "shapes": lambda x, batch: x + torch.zeros(3),
    "shapes of a column": lambda x, batch: batch["loss_mask"] + torch.zeros(999),
    "a column": lambda x, batch: batch["advantage"],
    "a name": lambda x, batch: x.nothing,  # type: ignore[attr-defined]
    "a type": lambda x, batch: x + "1",  # type: ignore[operator]
    "an array": lambda x, batch: np.ones(23) * x,
    "a division": lambda x, batch: 1 / 0,
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_loss_with_a_mistake_is_called_once(mistake: Callable[[Tensor, Batch], Any]) -> None:
    calls = []

    @needs("logits")
    def wrong(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
        calls.append(batch)
        mistake(out["logits"], batch)
        return token_mean(out["logits"].logsumexp(-1), batch["loss_mask"]), {}

    with pytest.raises((RuntimeError, MissingColumn, AttributeError, TypeError, ZeroDivisionError)):
        global_weights(wrong, rows(), widths={"logits": 23})
    assert len(calls) == 1


@needs("logits")
def mixes_rows(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
    x = out["logits"].logsumexp(-1)
    return token_mean(x - x.mean(), batch["loss_mask"]), {}


@needs("hidden_states")
def counts_states(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
    return token_mean(out["hidden_states"].sum(-1), batch["loss_mask"] & (out["hidden_states"][..., 0].abs() < 0.5)), {}


def ranked(logits: Tensor) -> Tensor:
    return logits.amax(-1) - logits.amax(-1).mean()


@needs(from_logits(ranked))
def mixes_tokens(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
    return token_mean(out["from_logits(ranked)"], batch["loss_mask"]), {}


def test_a_function_of_logits_treats_each_token_alone(slots: Slots) -> None:
    trainer = fsdp.trainer(slots[:1], Model(QWEN3), SPEC)
    with pytest.raises(
        WeightError, match=r"mixes_tokens: from_logits\(ranked\) is .* for a token alone, but .* among 4"
    ):
        trainer.train_step(mixes_tokens)(trainer.init(), rows())


def test_an_output_with_a_function_travels() -> None:
    found = pickle.loads(pickle.dumps(LARGEST))
    assert found == LARGEST == "from_logits(largest)"
    assert found.is_same(LARGEST)


@pytest.mark.parametrize("numbers", [2**24, 23 * 40])
def test_the_law_of_rows_holds_for_them(numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a few short rows alone are tried."""
    widths, always, batch = {"logits": 23, "hidden_states": 16}, {"logprobs"}, rows()
    monkeypatch.setattr("nrl.backends.training.loss.loss_checks._NUMBERS", numbers)
    monkeypatch.setattr("nrl.backends.training.loss.loss_terms._NUMBERS", numbers)
    for loss in (loss_of_all, loss_of_functions, add((1.0, sft_loss), (0.5, loss_of_functions))):
        weights = global_weights(loss, batch, always=always, widths=widths)
        assert check_loss_is_additive(loss, batch, weights, always, widths)
    assert global_weights(loss_of_functions, batch) == {"loss": float(batch["loss_mask"].sum())}
    for loss, text in [(mixes_rows, "must not depend on other rows|A total must be a sum"), (counts_states, "weight")]:
        weights = global_weights(loss, batch, always=always, widths=widths)
        with pytest.raises(WeightError, match=text):
            check_loss_is_additive(loss, batch, weights, always, widths)
