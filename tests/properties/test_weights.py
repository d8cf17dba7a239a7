"""What keeps a loss inside of the law: a weight that is not a sum over rows of the batch alone never trains a model.

Each loss here is refused, and then the same state takes a good step that is bit for bit the step of a state that never
saw the bad one.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

import nrl
from nrl.algos import Loss, needs, sft_loss, token_mean
from nrl.backends import Model, Trainer, adamw, fsdp
from nrl.backends.training.loss import loss_terms
from nrl.backends.training.loss.loss_checks import check_loss_is_additive
from nrl.backends.training.loss.loss_terms import LOGPROBS, global_weights
from nrl.batch import Batch
from nrl.batch.metrics import Mean, Metrics, finalize
from nrl.errors import LossError, MutatedBatch, NotFinite, WeightError
from nrl.runtime import Slots
from tests.properties.strategies import (
    LOSSES,
    METHODS,
    PAIR_LOSSES,
    PAIR_METHODS,
    REWARD_LOSSES,
    TINY,
    make_batch,
)
from tests.weights import assert_equal, weights

LARGE = 10_000


def make(slots: Slots, dp: int = 1, max_tokens: int = LARGE) -> Trainer:
    return fsdp.trainer(slots[:dp], Model(TINY, dtype="float64"), adamw(lr=0.1), max_tokens=max_tokens)


@pytest.fixture(scope="module")
def trainer(slots: Slots) -> Trainer:
    return make(slots)


@pytest.fixture(scope="module")
def batch() -> Batch:
    """Six rows of different lengths, all of them with trained tokens, and no padding beyond the longest."""
    batch = make_batch([9, 7, 8, 5, 9, 6], [False] * 6, [False] * 6, seed=0, pairs=False)
    assert batch["loss_mask"].any(-1).all()
    return batch


def refused(trainer: Trainer, loss: Loss, batch: Batch, error: type[Exception], match: str) -> None:
    """``loss`` raises, and the state that it was given is as good as new."""
    state = trainer.init()
    before = weights(state)
    with pytest.raises(error, match=match):
        trainer.train_step(loss)(state, batch)
    assert not state.handle.is_consumed
    assert_equal(weights(state), before)
    good = make_batch([6, 6, 6], [False] * 3, [False] * 3, seed=8, pairs=False)
    after, _ = trainer.train_step(sft_loss)(state, good)
    expected, _ = trainer.train_step(sft_loss)(trainer.init(), good)
    assert after.step == 1
    assert_equal(weights(after), weights(expected))


def mean_of_means(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
    total, weight = token_mean(-out["logprobs"], batch["loss_mask"])
    return Mean(total / weight, torch.ones(())), {}


def counts_likely_tokens(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
    likely = batch["loss_mask"] & (out["logprobs"].detach() > -0.5)
    return Mean((-out["logprobs"] * likely).sum(), likely.sum()), {}


def counts_tokens_that_no_probe_doubts(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
    likely = batch["loss_mask"] & (out["logprobs"].detach() > -3.0)
    return Mean((-out["logprobs"] * likely).sum(), likely.sum()), {}


def weighs_by_probability(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
    return Mean((-out["logprobs"] * batch["loss_mask"]).sum(), (out["logprobs"].exp() * batch["loss_mask"]).sum()), {}


def counts_padding(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
    """What ``(loss * mask).mean()`` amounts to."""
    loss = -out["logprobs"] * batch["loss_mask"]
    return Mean(loss.sum(), torch.tensor(float(loss.numel()))), {}


LAYOUTS = pytest.mark.parametrize(("dp", "max_tokens"), [(1, LARGE), (1, 9), (3, LARGE), (2, 18)])


@LAYOUTS
def test_a_mean_of_means(slots: Slots, batch: Batch, dp: int, max_tokens: int) -> None:
    match = r"mean_of_means: the weight of term 'loss' is 1 on the whole batch, but .*token_mean, seq_mean or seq_sum"
    refused(make(slots, dp, max_tokens), mean_of_means, batch, WeightError, match)


@LAYOUTS
@pytest.mark.parametrize("loss", [counts_likely_tokens, weighs_by_probability, counts_tokens_that_no_probe_doubts])
def test_a_weight_that_looks_at_the_output(slots: Slots, batch: Batch, dp: int, max_tokens: int, loss: Loss) -> None:
    refused(make(slots, dp, max_tokens), loss, batch, WeightError, "the weight of term 'loss' is")


@LAYOUTS
def test_a_weight_that_counts_padding(slots: Slots, batch: Batch, dp: int, max_tokens: int) -> None:
    refused(
        make(slots, dp, max_tokens), counts_padding, batch, WeightError, "counts_padding: the weight of term 'loss'"
    )


type OfTokens = Callable[[Tensor, Tensor], Tensor]

STATISTICS: dict[str, OfTokens] = {
    "squares about the mean": lambda x, mask: (x - x.mean()) ** 2,
    "squares about the trained mean": lambda x, mask: (x - x[mask].mean()) ** 2,
    "over the deviation": lambda x, mask: x / x[mask].std(),
    "over a detached deviation": lambda x, mask: x / x[mask].std().detach(),
    "over the maximum": lambda x, mask: x / x.abs().max(),
    "over a detached maximum": lambda x, mask: x / x.abs().max().detach(),
    "below the best": lambda x, mask: (x - x[mask].max()).exp(),
    "softmax over rows": lambda x, mask: x.softmax(0),
    "where likelier than the mean": lambda x, mask: torch.where(x > x[mask].mean(), x, 0.0),
    "in the gradient alone": lambda x, mask: (x - x.detach()) * x[mask].mean().detach(),
    "a hundredth": lambda x, mask: -x + 0.01 * (x - x[mask].mean()) ** 2,
}
"""What is made of tokens, of which each has a share in what is made of the others."""


def over_all(of: OfTokens, output: str = "logprobs") -> Loss:
    @needs(output)
    def my_loss(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
        mask = batch["loss_mask"] if output != "rewards" else batch["loss_mask"].any(-1)
        return token_mean(of(out[output], mask), mask), {}

    return my_loss


@pytest.mark.parametrize("of", STATISTICS.values(), ids=STATISTICS.keys())
def test_statistics_of_outputs(trainer: Trainer, batch: Batch, of: OfTokens) -> None:
    """Their weight is right, and their gradient depended on how many tokens a micro-batch has."""
    match = r"my_loss: the (total of term 'loss'|gradient for logprobs of a row) is .* read them from a column"
    refused(trainer, over_all(of), batch, WeightError, match)


@pytest.mark.parametrize("of", STATISTICS.values(), ids=STATISTICS.keys())
@pytest.mark.parametrize(("rows", "tokens"), [(4, 2000), (400, 20)])
def test_statistics_of_many_outputs(of: OfTokens, rows: int, tokens: int) -> None:
    """The more numbers, the less one statistic differs from another; still they are seen."""
    sizes = torch.randint(4, tokens, (rows,), generator=torch.Generator().manual_seed(1)).tolist()
    batch, loss = make_batch(sizes, [False] * rows, [False] * rows, seed=1, pairs=False), over_all(of)
    with pytest.raises(WeightError, match="my_loss: the"):
        check_loss_is_additive(loss, batch, global_weights(loss, batch), LOGPROBS)


@pytest.mark.parametrize("output", ["entropy", "values", "rewards", "logprobs_at(teacher_ids)"])
def test_statistics_of_other_outputs(batch: Batch, output: str) -> None:
    ids = torch.zeros(*batch["input_ids"].shape, 2, dtype=torch.int64)
    batch = nrl.assign(batch, teacher_ids=ids)

    def of(x: Tensor, mask: Tensor) -> Tensor:
        x = x if x.shape == mask.shape else x.sum(-1)
        return (x - x[mask].mean()) ** 2

    def alone(x: Tensor, mask: Tensor) -> Tensor:
        return (x if x.shape == mask.shape else x.sum(-1)) ** 2

    for fn, raises in ((of, True), (alone, False)):
        loss = over_all(fn, output)
        weights = global_weights(loss, batch, always=())
        with pytest.raises(WeightError, match="my_loss: the") if raises else contextlib.nullcontext():
            assert check_loss_is_additive(loss, batch, weights, ())


def test_a_mean_over_padding_of_each_row(trainer: Trainer, batch: Batch) -> None:
    """A sum over rows, with the right weight; but what it makes of a row depends on how wide its batch is."""

    def my_loss(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
        mask = batch["loss_mask"]
        return Mean((-out["logprobs"] * mask).mean(-1).sum(), mask.any(-1).sum()), {}

    match = r"my_loss: the gradient for logprobs of a row is (\S+) as it is, but (\S+) with more padding. What a loss"
    refused(trainer, my_loss, batch, WeightError, match)


def test_what_stands_at_tokens_that_are_not_trained_is_no_statistic(batch: Batch) -> None:
    """The law is about rows and padding: a loss may read any token of a row."""

    def my_loss(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
        x, mask = out["logprobs"], batch["attention_mask"]
        return token_mean((x - (x * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)) ** 2, mask), {}

    assert check_loss_is_additive(my_loss, batch, global_weights(my_loss, batch), LOGPROBS)


@pytest.mark.parametrize(("rows", "tokens"), [(2, 5000), (200, 50)])
@pytest.mark.parametrize("name", [*LOSSES, *METHODS, *PAIR_LOSSES, *PAIR_METHODS, *REWARD_LOSSES])
def test_no_method_is_refused_for_rounding(name: str, rows: int, tokens: int) -> None:
    """In float32, as models compute, where sums over long rows are rounded."""
    pairs = name in PAIR_LOSSES | PAIR_METHODS | REWARD_LOSSES
    loss, n = (LOSSES | METHODS | PAIR_LOSSES | PAIR_METHODS | REWARD_LOSSES)[name], rows * (2 if pairs else 1)
    sizes = torch.randint(4, tokens, (n,), generator=torch.Generator().manual_seed(2)).tolist()
    batch = make_batch(sizes, [False] * n, [False] * n, seed=2, pairs=pairs)
    batch = nrl.assign(batch, **{key: x.float() for key, x in batch.items() if x.is_floating_point()})
    always = frozenset({"rewards"}) if name in REWARD_LOSSES else LOGPROBS
    assert check_loss_is_additive(loss, batch, global_weights(loss, batch, always=always), always)


def test_the_check_leaves_torchs_own_generator_alone(batch: Batch) -> None:
    before = torch.get_rng_state()
    check_loss_is_additive(sft_loss, batch, global_weights(sft_loss, batch), LOGPROBS)
    assert torch.equal(torch.get_rng_state(), before)


def test_one_bad_term_of_several_is_named(trainer: Trainer, batch: Batch) -> None:
    loss = nrl.algos.add((1.0, sft_loss), (0.1, mean_of_means))
    refused(trainer, loss, batch, WeightError, "the weight of term 'mean_of_means' is 1")


def test_a_mean_of_means_is_caught_after_a_batch_of_one_row(trainer: Trainer, batch: Batch) -> None:
    """On one row it is no different from the mean; the next batch may have more."""
    step = trainer.train_step(mean_of_means)
    state, _ = step(trainer.init(), batch[:1].lock_())
    with pytest.raises(WeightError, match="mean_of_means"):
        step(state, batch)


def test_a_mean_of_means_is_caught_after_a_batch_with_one_row_that_counts(trainer: Trainer, batch: Batch) -> None:
    def mean_where_there_is_one(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
        total, weight = token_mean(-out["logprobs"], batch["loss_mask"])
        return Mean(total / weight.clamp(min=1), (weight > 0).float()), {}

    step = trainer.train_step(mean_where_there_is_one)
    only = torch.arange(6) == 2
    state, _ = step(trainer.init(), nrl.assign(batch, loss_mask=batch["loss_mask"] & only[:, None]))
    with pytest.raises(WeightError, match="mean_where_there_is_one"):
        step(state, batch)


@pytest.mark.parametrize("max_tokens", [LARGE, 9])
def test_terms_that_come_and_go_with_the_output(slots: Slots, batch: Batch, max_tokens: int) -> None:
    def loss(out: TensorDict, batch: Batch) -> tuple[dict[str, Mean], Metrics]:
        mean = token_mean(-out["logprobs"], batch["loss_mask"])
        return {"all": mean} | ({"rare": mean} if bool((out["logprobs"] < -2).any()) else {}), {}

    refused(make(slots, 1, max_tokens), loss, batch, LossError, "rare")


def test_a_metric_that_is_no_reduced_number(trainer: Trainer, batch: Batch) -> None:
    def my_loss(out: TensorDict, batch: Batch) -> Any:
        return token_mean(-out["logprobs"], batch["loss_mask"]), {"my_metric": 3.0}

    refused(trainer, my_loss, batch, TypeError, "my_loss.*my_metric|my_metric.*Mean")


def test_advantages_that_are_not_finite(trainer: Trainer, batch: Batch) -> None:
    advantages = batch["advantages"].clone()
    advantages[4][batch["loss_mask"][4]] = float("inf")
    spoiled = nrl.assign(batch, advantages=advantages)
    refused(trainer, nrl.algos.grpo_loss, spoiled, NotFinite, r"'advantages' is NaN or infinite.*rows \[4\]")
    failed = nrl.assign(spoiled, valid=torch.arange(6) != 4)  # what the message says to do helps
    _, metrics = trainer.train_step(nrl.algos.grpo_loss)(trainer.init(), failed)
    assert finalize(metrics.result())["skipped"] == 0


def test_a_temperature_that_is_not_finite(trainer: Trainer, batch: Batch) -> None:
    temperature = torch.where(torch.arange(6) == 1, float("nan"), 1.0)
    refused(trainer, sft_loss, nrl.assign(batch, temperature=temperature), NotFinite, "train_step")


@pytest.mark.parametrize("spoil", [lambda x: x / 0, lambda x: (x - x.detach()).sqrt(), lambda x: x * float("nan")])
def test_a_loss_whose_gradient_is_not_finite(trainer: Trainer, batch: Batch, spoil: Callable[[Tensor], Tensor]) -> None:
    def my_loss(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
        return token_mean(spoil(out["logprobs"]), batch["loss_mask"]), {}

    refused(
        trainer, my_loss, batch, NotFinite, r"train_step\(my_loss\): the (norm of the gradient|loss) is -?(nan|inf)"
    )


@pytest.mark.parametrize("max_tokens", [LARGE, 9])
def test_an_exception_in_the_middle_of_a_step(slots: Slots, batch: Batch, max_tokens: int) -> None:
    seen: set[tuple[int, ...]] = set()
    sizes = []

    def my_loss(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
        if out["logprobs"].dtype == torch.float64:  # the model's own: those of the law's check are float32
            sizes.append(len(batch))
            seen.update(tuple(row[row > 0].tolist()) for row in batch["input_ids"])
            if len(seen) == 6:  # the last micro-batch: the others have left their gradients already
                raise RuntimeError("a bug of mine")
        return sft_loss(out, batch)

    refused(make(slots, 1, max_tokens), my_loss, batch, RuntimeError, "a bug of mine")
    assert set(sizes) == {6 if max_tokens == LARGE else 1}


def test_debug_catches_a_loss_that_writes_into_its_batch(
    trainer: Trainer, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def my_loss(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
        if out["logprobs"].requires_grad:
            batch["advantages"][:] = 0
        return sft_loss(out, batch)

    monkeypatch.setenv("NRL_DEBUG", "1")
    refused(trainer, my_loss, batch, MutatedBatch, "my_loss wrote into its batch: advantages")


@pytest.mark.parametrize("name", [*LOSSES, *PAIR_LOSSES])
def test_weights_from_blocks_of_rows_are_those_of_the_whole_batch_to_the_bit(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = name in PAIR_LOSSES
    loss, lengths = (PAIR_LOSSES if pairs else LOSSES)[name], [9, 0, 3, 3, 8, 1, 2, 5]
    batch = make_batch(lengths, [False, True] * 4, [False] * 7 + [True], seed=0, pairs=pairs)
    whole = global_weights(loss, batch)
    monkeypatch.setattr(loss_terms, "_PLACES", 8)
    assert global_weights(loss, batch) == whole
