"""What every train engine keeps, whatever it is made of; docs/engines.md says the same in words.

A new engine is put into `ENGINES`. Everything here goes through a trainer on the local cluster.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import nrl
from nrl.algos import Loss, add, grpo_loss, sft_loss, token_mean
from nrl.backends import Model, Trainer, TrainState, adamw, fsdp, megatron
from nrl.backends.training.trainer import make_trainer
from nrl.batch import Batch
from nrl.batch.metrics import Mean, Metrics, finalize
from nrl.errors import ConsumedState, MissingOutput, WeightError
from nrl.runtime import Cluster, Slots
from tests.backends.bigram import VOCABULARY, Bigram
from tests.weights import assert_close, assert_equal, weights

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 64,
}
ADAPTED = Model(CONFIG, lora={"r": 2, "target_modules": "all-linear"})
QUIET = adamw(lr=1e-2, eps=1e-3)  # so that rounding in tiny gradients stays rounding
ENGINES: dict[str, Callable[[Slots, int], Trainer]] = {
    "bigram": lambda slots, tokens: make_trainer(slots.mesh(), Bigram, name="bigram", max_tokens=tokens),
    "fsdp": lambda slots, tokens: fsdp.trainer(slots, Model(CONFIG), QUIET, max_tokens=tokens),
    "megatron": lambda slots, tokens: megatron.trainer(slots, Model(CONFIG), QUIET, max_tokens=tokens),
    "fsdp, an adapter": lambda slots, tokens: fsdp.trainer(slots, ADAPTED, QUIET, max_tokens=tokens),
    "megatron, an adapter": lambda slots, tokens: megatron.trainer(slots, ADAPTED, QUIET, max_tokens=tokens),
}

type Make = Callable[..., Trainer]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with nrl.cluster("local") as entered:
        yield entered


@pytest.fixture(
    params=[pytest.param(name, marks=[pytest.mark.megatron] * name.startswith("megatron")) for name in ENGINES]
)
def make(request: pytest.FixtureRequest, cluster: Cluster, recwarn: pytest.WarningsRecorder) -> Make:
    """Makes a trainer: of so many shards, and so many tokens at most in a micro-batch."""
    made: dict[tuple[int, int], Trainer] = {}

    def of(dp: int = 1, max_tokens: int = 1000) -> Trainer:
        if (dp, max_tokens) not in made:
            made[dp, max_tokens] = ENGINES[request.param](cluster.reserve(dp), max_tokens)
        return made[dp, max_tokens]

    return of


def batch_of(n: int = 6, width: int = 7, pad: int = 0) -> Batch:
    """Rows of several lengths, two of which begin alike, and one that trains on nothing."""
    g = torch.Generator().manual_seed(0)
    mask = torch.arange(width) < torch.tensor([7, 4, 2, 6, 1, 5] * n)[:n, None]
    ids = torch.randint(0, VOCABULARY, (n, width), generator=g)
    ids[3, :3] = ids[0, :3]
    columns = {
        "input_ids": ids * mask,
        "attention_mask": mask,
        "loss_mask": mask & (torch.arange(width) > 1),
        "advantages": torch.randn(n, width, generator=g),
        "old_logprobs": -torch.rand(n, width, generator=g) * 3,
    }
    wide = {name: torch.nn.functional.pad(x, (0, pad)) for name, x in columns.items()}
    return nrl.assign(Batch({}, batch_size=[n]), **wide)


BOTH = add((1.0, grpo_loss), (0.5, sft_loss))


type Stepped = tuple[TrainState, dict[str, float]]


def stepped(trainer: Trainer, batch: Batch, loss: Loss = BOTH, state: TrainState | None = None) -> Stepped:
    state, metrics = trainer.train_step(loss)(state or trainer.init(), batch)
    return state, finalize(metrics.result())


def same(found: Stepped, expected: Stepped) -> None:
    assert_close(weights(found[0]), weights(expected[0]), 1e-5)
    left = {"parts", "lr"}
    assert {k: v for k, v in found[1].items() if k not in left} == pytest.approx(
        {k: v for k, v in expected[1].items() if k not in left}, rel=1e-5, abs=1e-6
    )


# the laws


@pytest.mark.parametrize("tokens", [7, 14])
def test_a_step_is_the_same_in_any_number_of_micro_batches(make: Make, tokens: int) -> None:
    same(stepped(make(max_tokens=tokens), batch_of()), stepped(make(), batch_of()))


@pytest.mark.parametrize("dp", [2, 3, 9])
def test_a_step_is_the_same_in_any_number_of_shards(make: Make, dp: int) -> None:
    same(stepped(make(dp=dp), batch_of()), stepped(make(), batch_of()))


def test_a_step_is_the_same_in_any_order_of_rows_and_with_any_padding(make: Make) -> None:
    expected = stepped(make(), batch_of())
    same(stepped(make(), batch_of()[torch.tensor([3, 5, 0, 2, 4, 1])]), expected)
    same(stepped(make(), batch_of(pad=3)), expected)


def test_outputs_are_of_the_tokens_that_have_one_before_them(make: Make) -> None:
    trainer, batch = make(), batch_of()
    found = trainer.logprobs(trainer.load(), batch).result()
    predicted = batch["attention_mask"].clone()
    predicted[:, 0] = False
    assert found.shape == predicted.shape
    assert (found[predicted] < 0).all()
    assert (found[~predicted] == 0).all()
    small, wide = make(max_tokens=7), make(dp=3)
    torch.testing.assert_close(small.logprobs(small.load(), batch).result(), found, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(wide.logprobs(wide.load(), batch).result(), found, rtol=1e-5, atol=1e-6)


def test_what_a_step_trains_on_is_what_a_forward_says(make: Make) -> None:
    """The first loss of supervised training is the mean of the log-probabilities."""
    trainer, batch = make(), batch_of()
    said = trainer.logprobs(trainer.load(), batch).result()
    _, metrics = stepped(trainer, batch, sft_loss)
    mask = batch["loss_mask"]
    assert metrics["loss"] == pytest.approx(-float(said[mask].sum()) / int(mask.sum()), rel=1e-5)
    assert metrics["tokens"] == int(batch["attention_mask"].sum())


def test_steps_lower_the_loss(make: Make) -> None:
    state, first = stepped(make(), batch_of(), sft_loss)
    for _ in range(8):
        state, last = stepped(make(), batch_of(), sft_loss, state)
    assert last["loss"] < first["loss"]


# states and params


def test_a_state_is_used_once(make: Make) -> None:
    trainer = make()
    state = trainer.init()
    params = state.params
    new, _ = stepped(trainer, batch_of(), state=state)
    with pytest.raises(ConsumedState):
        stepped(trainer, batch_of(), state=state)
    with pytest.raises(ConsumedState):
        trainer.logprobs(params, batch_of())
    assert new.step == 1


def test_frozen_params_stay_as_they_were(make: Make) -> None:
    trainer = make()
    state = trainer.init()
    frozen, before = trainer.freeze(state.params), weights(state)
    state, _ = stepped(trainer, batch_of(), state=state)
    assert_equal(weights(frozen), before)
    assert any(not torch.equal(x, before[name]) for name, x in weights(state).items())


def test_every_weight_comes_once_and_goes_into_a_fresh_state(make: Make) -> None:
    trainer = make()
    state, _ = stepped(trainer, batch_of())
    other = trainer.init(state.params)
    assert_equal(weights(other), weights(state))
    assert other.step == 0
    names = [piece.name for future in state.params.buckets() for piece in future.result()]
    assert sorted(names) == sorted(set(names))


def test_a_saved_state_goes_on_as_if_nothing_had_been(make: Make, tmp_path: Path) -> None:
    trainer = make()
    state, _ = stepped(trainer, batch_of())
    trainer.save(state, tmp_path)
    expected = stepped(trainer, batch_of(), state=state)
    restored = trainer.restore(tmp_path)
    assert restored.step == 1
    found = stepped(trainer, batch_of(), state=restored)
    assert_equal(weights(found[0]), weights(expected[0]))
    assert found[1] == expected[1]


def test_saved_params_are_frozen_ones(make: Make, tmp_path: Path) -> None:
    trainer = make()
    state, _ = stepped(trainer, batch_of())
    trainer.save(state.params, tmp_path / "params")
    trainer.export(state.params, tmp_path / "exported")
    for params in (trainer.restore(tmp_path / "params"), trainer.load(str(tmp_path / "exported"))):
        assert_equal(weights(params), weights(state))


# errors


def raises(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
    if out["logprobs"].any():
        raise ValueError("not on these numbers")
    return sft_loss(out, batch)


def weight_by_output(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
    return token_mean(-out["logprobs"], batch["loss_mask"] & (out["logprobs"] > -2)), {}


@pytest.mark.parametrize(("loss", "kind"), [(raises, ValueError), (weight_by_output, WeightError)])
def test_after_an_error_the_next_step_is_as_if_there_had_been_none(
    make: Make, loss: Loss, kind: type[Exception], tmp_path: Path
) -> None:
    trainer = make(max_tokens=14)
    state, _ = stepped(trainer, batch_of())
    trainer.save(state, tmp_path)
    expected = stepped(trainer, batch_of(), state=trainer.restore(tmp_path))
    with pytest.raises(kind):
        stepped(trainer, batch_of(), loss, trainer.restore(tmp_path))
    found = stepped(trainer, batch_of(), state=trainer.restore(tmp_path))
    assert_equal(weights(found[0]), weights(expected[0]))


def test_what_it_does_not_compute_is_said_before_a_step(make: Make) -> None:
    with pytest.raises(MissingOutput, match="values"):
        make().train_step(nrl.algos.value_loss())
