import math
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import pad

import nrl
from nrl import data, tiny
from nrl.algos import advantages, check_mismatch, grpo_loss, mismatch_metrics
from nrl.backends import Sampler, Sampling, Trainer, TrainState, adamw, fsdp, hf, publish
from nrl.batch import Batch
from nrl.batch.metrics import Metrics, finalize, merge
from nrl.envs import number, single_turn
from nrl.errors import BatchError, ConfigError, RolloutMismatch
from tests.properties.strategies import Layout, batches, hidden_rows, layouts, outputs, taken

MISMATCH = ("mismatch/kl", "mismatch/ess", "mismatch/max_abs", "mismatch/chi2", "mismatch/max_ratio")
MASK = torch.tensor([[False, True, True, False], [False, False, True, True]])
RATIO = torch.tensor([[9.0, 1.0, 2.0, 9.0], [9.0, 9.0, 0.5, 4.0]])


def measured(logprobs: Tensor, rollout: Tensor, mask: Tensor, **columns: Tensor) -> dict[str, float]:
    batch = Batch({"loss_mask": mask, "rollout_logprobs": rollout} | columns, batch_size=mask.shape[:-1])
    return finalize(mismatch_metrics(TensorDict({"logprobs": logprobs}, batch_size=mask.shape[:-1]), batch))


def slow(logprobs: Tensor, rollout: Tensor, mask: Tensor) -> dict[str, float]:
    """One token at a time, in Python's numbers."""
    pairs = [
        (float(a), float(b))
        for a, b, counts in zip(logprobs.flatten(), rollout.flatten(), mask.flatten(), strict=True)
        if counts
    ]
    if not pairs:
        return dict(zip(MISMATCH, (math.nan, math.nan, -math.inf, math.nan, -math.inf), strict=True))
    ratios = [math.exp(a - b) for a, b in pairs]
    kl = sum(r - 1 - (a - b) for r, (a, b) in zip(ratios, pairs, strict=True)) / len(pairs)
    ess = sum(ratios) ** 2 / (len(pairs) * sum(r * r for r in ratios))
    chi2 = sum(r * r for r in ratios) / len(pairs) - 1
    return dict(zip(MISMATCH, (kl, ess, max(abs(a - b) for a, b in pairs), chi2, max(ratios)), strict=True))


# the numbers


def test_by_hand() -> None:
    rollout = torch.full((2, 4), -3.0)
    found = measured(rollout + RATIO.log(), rollout, MASK)
    # ratios 1, 2, 1/2 and 4 have logarithms 0, log 2, -log 2 and 2 log 2
    assert found["mismatch/kl"] == pytest.approx(((1 + 2 + 0.5 + 4) - 4 - 2 * math.log(2)) / 4)
    assert found["mismatch/ess"] == pytest.approx(7.5**2 / (4 * (1 + 4 + 0.25 + 16)))
    assert found["mismatch/max_abs"] == pytest.approx(2 * math.log(2))
    assert found["mismatch/chi2"] == pytest.approx((1 + 4 + 0.25 + 16) / 4 - 1)
    assert found["mismatch/max_ratio"] == pytest.approx(4)


def test_the_same_policy() -> None:
    x = -torch.rand(2, 4)
    assert measured(x, x, MASK) == dict(zip(MISMATCH, (0.0, 1.0, 0.0, 0.0, 1.0), strict=True))


def test_rounding_of_float32_is_not_lost_in_itself() -> None:
    """Log-ratios of 1e-6: the KL is 5e-13, far below what float32 leaves of exp(x) - 1 - x."""
    rollout = torch.full((2, 4), -0.125)
    theta = rollout + 2.0**-20
    assert measured(theta, rollout, MASK)["mismatch/kl"] == pytest.approx(2.0**-41, rel=1e-5)


def test_invalid_rows_and_masked_tokens_are_not_seen() -> None:
    rollout = torch.full((2, 4), -3.0)
    theta = rollout + RATIO.log()
    expected = measured(theta[:1], rollout[:1], MASK[:1])
    assert measured(theta, rollout, MASK, valid=torch.tensor([True, False])) == expected
    for rubbish in (math.nan, math.inf, -math.inf, 1e30):
        spoiled = [torch.where(MASK, x, rubbish) for x in (theta, rollout)]
        assert measured(spoiled[0], spoiled[1], MASK) == measured(theta, rollout, MASK)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_what_is_not_finite_shows(bad: float, side: int) -> None:
    sides = [torch.full((2, 4), -1.0), torch.full((2, 4), -1.0)]
    sides[side][1, 2] = bad
    found = measured(sides[0], sides[1], MASK)
    assert not math.isfinite(found["mismatch/kl"])
    assert not math.isfinite(found["mismatch/max_abs"])
    clean = measured(-torch.ones(2, 4), -torch.ones(2, 4), MASK)
    assert clean["mismatch/kl"] == 0
    with pytest.raises(RolloutMismatch, match="A log-probability is NaN or infinite, or so far from the other"):
        check_mismatch(found, bound=1e6)


def test_a_part_that_is_not_finite_shows_in_the_whole() -> None:
    parts = []
    for theta in (-1.0, math.nan, -1.0):
        batch = Batch({"loss_mask": MASK, "rollout_logprobs": -torch.ones(2, 4)}, batch_size=[2])
        parts.append(mismatch_metrics(TensorDict({"logprobs": torch.full((2, 4), theta)}, batch_size=[2]), batch))
    found = finalize(merge(merge(parts[0], parts[1]), parts[2]))
    assert all(math.isnan(found[key]) for key in MISMATCH)


def test_far_apart_is_still_a_number() -> None:
    found = measured(torch.full((2, 4), -500.0), torch.zeros(2, 4), MASK)
    assert found["mismatch/kl"] == pytest.approx(499)
    assert found["mismatch/max_abs"] == 500
    found = measured(torch.zeros(2, 4), torch.full((2, 4), -300.0), MASK)
    assert found["mismatch/kl"] == pytest.approx(math.exp(300))
    assert found["mismatch/ess"] == pytest.approx(1)


def test_nothing_to_measure() -> None:
    found = measured(-torch.ones(2, 4), -torch.ones(2, 4), torch.zeros(2, 4, dtype=torch.bool))
    assert math.isnan(found["mismatch/kl"])
    assert math.isnan(found["mismatch/ess"])
    assert found["mismatch/max_abs"] == -math.inf
    check_mismatch(found, bound=0.1)


@pytest.mark.parametrize("missing", ["rollout_logprobs", "loss_mask"])
def test_a_batch_without_what_is_compared(missing: str) -> None:
    batch = Batch({"loss_mask": MASK, "rollout_logprobs": -torch.ones(2, 4)}, batch_size=[2])
    assert mismatch_metrics(TensorDict({"logprobs": torch.zeros(2, 4)}, batch_size=[2]), batch.exclude(missing)) == {}


def test_another_shape_is_an_error() -> None:
    batch = Batch({"loss_mask": MASK, "rollout_logprobs": -torch.ones(2, 4)}, batch_size=[2])
    with pytest.raises(BatchError, match=r"shape \[2, 3\]"):
        mismatch_metrics({"logprobs": torch.zeros(2, 3)}, batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_in_float64_and_have_no_gradient(dtype: torch.dtype) -> None:
    leaf = torch.zeros(2, 4, dtype=dtype, requires_grad=True)
    batch = Batch({"loss_mask": MASK, "rollout_logprobs": -torch.ones(2, 4)}, batch_size=[2])
    found = mismatch_metrics({"logprobs": leaf}, batch)
    assert all(x.dtype == torch.float64 and not x.requires_grad and x.shape == () for y in found.values() for x in y)


# what they estimate


def expected_over_tokens(theta: Tensor, rollout: Tensor) -> tuple[float, float]:
    """The expectation of the KL estimate and of the ratio, each token as often as the sampler draws it."""
    times = 1 / 64  # all probabilities are multiples of this
    counts = (rollout / times).round().long()
    tokens = torch.repeat_interleave(torch.arange(len(rollout)), counts)
    mask = torch.ones(1, len(tokens), dtype=torch.bool)
    x = theta.log()[tokens][None].double(), rollout.log()[tokens][None].double()
    return measured(x[0], x[1], mask)["mismatch/kl"], float((x[0] - x[1]).exp().mean())


def test_the_mean_over_what_is_sampled_is_the_kl_of_the_sampler_to_the_trainer() -> None:
    rollout = torch.tensor([32, 16, 12, 4]) / 64
    theta = torch.tensor([0.01, 0.33, 0.33, 0.33])
    kl, ratio = expected_over_tokens(theta, rollout)
    assert ratio == pytest.approx(1)
    assert kl == pytest.approx(float((rollout * (rollout / theta).log()).sum()))
    assert kl != pytest.approx(float((theta * (theta / rollout).log()).sum()), rel=0.1)  # the other direction


def test_under_top_k_the_mean_ratio_is_the_kept_mass() -> None:
    theta = torch.tensor([0.4, 0.2, 0.15, 0.25])
    rollout = torch.tensor([40, 0, 0, 24]) / 64  # of 0.4 and 0.25, renormalised, to a 64th
    theta = torch.where(rollout > 0, rollout * 0.65, theta)
    kl, ratio = expected_over_tokens(theta, rollout)
    assert ratio == pytest.approx(0.65)
    assert kl == pytest.approx(0.65 - 1 - math.log(0.65))  # and not the KL, which is -log 0.65


# the same in every layout


@settings(max_examples=100)
@given(data=st.data())
def test_any_layout_gives_the_numbers_of_a_slow_loop(data: st.DataObject) -> None:
    batch = data.draw(batches(pairs=data.draw(st.booleans())))
    layout: Layout = data.draw(layouts(len(batch)))
    logprobs = outputs(batch)["logprobs"]
    merged: Metrics = {}
    for rows in layout.parts:
        part = nrl.pad(taken(batch, rows), batch["input_ids"].shape[-1] + layout.padding)
        shown = pad(logprobs[rows], (0, layout.padding))
        if layout.masked:
            extra = nrl.pad(hidden_rows(batch, layout.masked), part["input_ids"].shape[-1])
            part = nrl.concatenate([part, extra])
            shown = torch.cat([shown, shown.new_full((layout.masked, *shown.shape[1:]), -7.0)])
        merged = merge(merged, mismatch_metrics({"logprobs": shown}, part))
    expected = slow(logprobs, batch["rollout_logprobs"], batch["loss_mask"])
    assert finalize(merged) == pytest.approx(expected, rel=1e-9, abs=1e-12, nan_ok=True)


def test_a_mean_of_parts_would_not_be_the_effective_sample_size() -> None:
    """The property above has teeth: rows that disagree each in its own way are alike by themselves."""
    rollout = torch.full((2, 4), -3.0)
    theta = rollout + torch.tensor([[0.0], [2.0]])
    alone = [measured(theta[i : i + 1], rollout[i : i + 1], MASK[i : i + 1])["mismatch/ess"] for i in range(2)]
    assert alone == pytest.approx([1, 1])
    assert measured(theta, rollout, MASK)["mismatch/ess"] < 0.7


# the bound


def numbers(kl: float, largest: float, ess: float = 0.5, **others: float) -> dict[str, float]:
    return {"step": 3.0, "mismatch/kl": kl, "mismatch/ess": ess, "mismatch/max_abs": largest} | others


def test_an_invalid_row_of_a_pair_is_not_seen() -> None:
    rollout = torch.full((2, 2, 1), -3.0)
    ratio = torch.tensor([[[1.0], [8.0]], [[2.0], [4.0]]])
    valid = torch.tensor([[True, False], [True, True]])
    found = measured(rollout + ratio.log(), rollout, torch.ones(2, 2, 1, dtype=torch.bool), valid=valid)
    assert found["mismatch/max_ratio"] == pytest.approx(4)


@pytest.mark.parametrize(("lag", "said"), [({"lag": 1.5}, r"\. Otherwise likely: "), ({}, r"\. Likely: ")])
def test_newer_weights_are_the_first_explanation(lag: dict[str, float], said: str) -> None:
    with pytest.raises(RolloutMismatch, match=said):
        check_mismatch(numbers(0.3, 2.5, **lag), bound=0.1)


def test_the_bound_itself_passes() -> None:
    check_mismatch(numbers(0.1, 1.0), bound=0.1)
    check_mismatch(numbers(1e300, 1e3), bound=math.inf)
    with pytest.raises(RolloutMismatch):
        check_mismatch(numbers(0.1 + 1e-9, 1.0), bound=0.1)
    with pytest.raises(RolloutMismatch):
        check_mismatch(numbers(math.nan, math.nan), bound=math.inf)


def test_a_skipped_step_passes_and_one_without_numbers_does_not() -> None:
    check_mismatch({"skipped": 1.0, "lag": 2.0}, bound=0.1)
    with pytest.raises(ValueError, match=r"no 'mismatch/kl' among the numbers.*'rollout_logprobs'"):
        check_mismatch({"skipped": 0.0, "loss": 2.0}, bound=0.1)


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan])
def test_a_bound_is_positive(bound: float) -> None:
    with pytest.raises(ConfigError, match=r"the bound is .*greater than 0"):
        check_mismatch(numbers(0.0, 0.0), bound=bound)


def test_the_error_has_the_numbers_and_says_what_to_do() -> None:
    with pytest.raises(RolloutMismatch) as caught:
        check_mismatch(numbers(0.3, 2.5, 0.75, lag=1.5), bound=0.1)
    error = caught.value
    assert (error.kl, error.ess, error.max_abs, error.lag, error.bound) == (0.3, 0.75, 2.5, 1.5, 0.1)
    text = str(error)
    assert text.startswith(
        "check_mismatch: trainer and sampler disagree: mismatch/kl is 0.3 nats a token, and the bound is 0.1 "
        "(mismatch/ess 0.75, mismatch/max_abs 2.5 nats, lag 1.5). "
    )
    assert "compare batch['rollout_logprobs'] with trainer.logprobs(state.params, batch)" in text
    assert "truncate, icepop" in text


@pytest.mark.parametrize(
    ("lag", "said"),
    [
        (
            {"lag": 2.0},
            "The weights that are trained are newer than those that sampled, by a lag of 2, ",
        ),
        ({"lag": 0.5}, "by a lag of 0.5, "),
        ({"lag": 0.0}, "The lag is 0: no publish lies between. Where the batch is trained on in several updates"),
        ({}, "The rows have no 'version'"),
    ],
)
def test_what_is_said_of_time(lag: dict[str, float], said: str) -> None:
    with pytest.raises(RolloutMismatch) as caught:
        check_mismatch(numbers(0.3, 2.5, **lag), bound=0.1)
    assert said in str(caught.value)


SAID = {
    "alike": "No token disagrees by much more than the others",
    "little": "Many tokens disagree by a little",
    "much": "Many tokens disagree by much",
    "few": "Few tokens disagree by much",
    "not finite": "A log-probability is NaN or infinite",
}


def said_of(theta: Tensor, rollout: Tensor) -> str:
    with pytest.raises(RolloutMismatch) as caught:
        check_mismatch(measured(theta, rollout, torch.ones(theta.shape, dtype=torch.bool)), bound=1e-9)
    (found,) = [name for name, text in SAID.items() if text in str(caught.value)]
    return found


def changed(logits: Tensor, noise: float, seed: int) -> Tensor:
    return logits + noise * torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed))


def nucleus(logits: Tensor, mass: float) -> Tensor:
    ordered, places = logits.softmax(-1).sort(-1, descending=True)
    gone = ordered.cumsum(-1) - ordered >= mass
    return logits.masked_fill(torch.zeros_like(gone).scatter(-1, places, gone), -math.inf)


CHANGES: dict[str, tuple[Any, str]] = {
    "top-p": (lambda logits: nucleus(logits, 0.9), "alike"),
    "rounding": (lambda logits: logits.bfloat16(), "little"),
    "a few updates": (lambda logits: changed(logits, 0.2, 1), "little"),
    "other weights": (lambda logits: changed(logits, 3.0, 2), "much"),
    "temperature": (lambda logits: logits / 2.0, "much"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_said_of_size_is_what_was_done(name: str) -> None:
    """Tokens of a sampler that is changed in a known way, of which the check sees the three numbers alone."""
    change, expected = CHANGES[name]
    logits = changed(torch.zeros(4000, 50), 3.0, 0)
    sampler = change(logits).float().log_softmax(-1)
    drawn = torch.multinomial(sampler.exp(), 1, generator=torch.Generator().manual_seed(5))
    theta, rollout = (x.gather(-1, drawn).view(40, 100) for x in (logits.log_softmax(-1), sampler))
    assert said_of(theta, rollout) == expected


def test_tokens_without_a_log_probability_are_few_that_disagree_by_much() -> None:
    rollout = changed(torch.full((40, 100), -9.0), 1.0, 0)
    theta = changed(rollout, 0.01, 1)
    rollout[0, :5] = 0.0
    assert said_of(theta, rollout) == "few"


# a real trainer and a real sampler


class Pair:
    """The tiny model, trained and sampled from."""

    def __init__(self, trainer: Trainer, sampler: Sampler) -> None:
        self.step, self.sampler = trainer.train_step(grpo_loss), sampler
        self.state: TrainState = trainer.init()
        publish(self.state.params, sampler)

    def rows(self, **sampling: float) -> Batch:
        tasks = data.tasks("arithmetic", seed=1).take(8)
        sampled = Sampling(max_new_tokens=4, **sampling)  # type: ignore[arg-type]
        batch = nrl.rollout(self.sampler, single_turn(number), tasks * 4, sampling=sampled)
        # rewards that differ, so that a step changes something
        batch = nrl.assign(batch, rewards=torch.arange(32.0) % 3, group_ids=torch.arange(32) % 8)
        return nrl.assign(advantages(batch), old_logprobs=batch["rollout_logprobs"])

    def trained(self, batch: Batch) -> dict[str, float]:
        self.state, metrics = self.step(self.state, batch)
        return finalize(metrics.result())


@pytest.fixture
def pair() -> Iterator[Pair]:
    with nrl.cluster("local") as cluster:
        slots = cluster.reserve(2)
        yield Pair(
            fsdp.trainer(slots[:1], tiny.model(), adamw(lr=3e-3), max_tokens=128), hf.sampler(slots[1:], tiny.model())
        )


def test_a_step_on_what_was_just_sampled_is_within_rounding(pair: Pair) -> None:
    for temperature in (1.0, 0.6):
        found = pair.trained(pair.rows(temperature=temperature))
        assert 0 < found["mismatch/max_abs"] < 1e-4
        check_mismatch(found, bound=1e-9)
        publish(pair.state.params, pair.sampler)


def test_weights_that_were_not_published(pair: Pair) -> None:
    for _ in range(5):
        pair.trained(pair.rows())
    with pytest.raises(RolloutMismatch, match=r"lag 0.*the sampler holds other weights \(a publish that was left out"):
        check_mismatch(pair.trained(pair.rows()), bound=0.1)
    publish(pair.state.params, pair.sampler)
    check_mismatch(pair.trained(pair.rows()), bound=1e-9)


def test_rows_that_are_older_than_the_weights(pair: Pair) -> None:
    early = [pair.rows() for _ in range(4)]
    for batch in early:
        found = pair.trained(batch)
        publish(pair.state.params, pair.sampler)
    with pytest.raises(RolloutMismatch, match="by a lag of 3, so this.*Otherwise likely: ") as caught:
        check_mismatch(found, bound=1e-3)
    assert caught.value.lag == 3


def test_a_temperature_that_is_not_what_was_sampled_with(pair: Pair) -> None:
    batch = pair.rows(temperature=0.5)
    wrong = nrl.assign(batch, temperature=torch.ones(32))
    with pytest.raises(RolloutMismatch, match="a column 'temperature' that is not what was sampled with"):
        check_mismatch(pair.trained(wrong), bound=1e-3)


def test_the_second_update_of_a_batch_has_the_first_in_it(pair: Pair) -> None:
    batch = pair.rows()
    parts = nrl.minibatches(batch, 2, seed=0)
    first, second = (pair.trained(part) for part in parts)
    assert first["mismatch/kl"] < 1e-9
    assert second["mismatch/kl"] > 1e-4
    assert (first["lag"], second["lag"]) == (0, 0)
