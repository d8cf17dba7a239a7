"""Losses of reward models, on rewards that are leaf tensors."""

import math

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from nrl.algos import MeanLoss, bradley_terry_loss, reward_model_loss
from nrl.batch import Batch, assign
from nrl.batch.metrics import Mean, finalize
from nrl.errors import BatchError, MissingColumn

MASK = torch.tensor([[[1, 1], [1, 0]], [[1, 0], [1, 1]], [[1, 1], [0, 0]]]).bool()
PAIRS = Batch({"loss_mask": MASK}, batch_size=[3, 2])  # the third pair has a row without a token: it does not count
REWARDS = torch.tensor([[2.0, 1.0], [-1.0, 2.0], [math.nan, 7.0]])


def call(loss: MeanLoss, rewards: Tensor, batch: Batch) -> tuple[Mean, dict[str, float]]:
    mean, metrics = loss(TensorDict({"rewards": rewards}, batch_size=batch.batch_size), batch)
    assert not any(value.requires_grad for metric in metrics.values() for value in metric)
    return mean, finalize(metrics)


def gradient(loss: MeanLoss, rewards: Tensor, batch: Batch) -> Tensor:
    leaf = rewards.clone().requires_grad_()
    return torch.autograd.grad(call(loss, leaf, batch)[0].total, leaf)[0]


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def with_margin(batch: Batch, *chosen: float) -> Batch:
    return assign(batch, margin=torch.tensor([[m, 99.0] for m in chosen]))  # that of the rejected row is not read


def test_by_hand() -> None:
    mean, metrics = call(reward_model_loss, REWARDS, PAIRS)
    assert mean.total.item() == pytest.approx(softplus(-1) + softplus(3), rel=1e-6)
    assert mean.weight.item() == 2
    assert metrics == pytest.approx({"accuracy": 0.5, "margin": -1.0, "chosen_score": 0.5, "rejected_score": 1.5})


def test_a_margin_is_a_constant() -> None:
    margin = torch.ones(3, 2, requires_grad=True)
    mean, _ = call(reward_model_loss, REWARDS, Batch({"loss_mask": MASK, "margin": margin}, batch_size=[3, 2]))
    assert not mean.total.requires_grad


def test_centering_by_hand() -> None:
    mean, metrics = call(bradley_terry_loss(0.1), REWARDS, PAIRS)
    assert mean.total.item() == pytest.approx(softplus(-1) + softplus(3) + 0.1 * (9 + 1), rel=1e-6)
    assert mean.weight.item() == 2
    assert metrics == call(reward_model_loss, REWARDS, PAIRS)[1]


def test_a_margin_by_hand() -> None:
    batch = with_margin(PAIRS, 1.0, 0.5, math.nan)
    mean, metrics = call(reward_model_loss, REWARDS, batch)
    assert mean.total.item() == pytest.approx(softplus(0) + softplus(3.5), rel=1e-6)
    assert metrics == call(reward_model_loss, REWARDS, PAIRS)[1]  # before the margin that is asked for
    zero = with_margin(PAIRS, 0.0, 0.0, 0.0)
    assert torch.equal(
        call(reward_model_loss, REWARDS, zero)[0].total, call(reward_model_loss, REWARDS, PAIRS)[0].total
    )


@pytest.mark.parametrize("centering", [0.0, 0.3])
def test_by_a_slow_loop(centering: float) -> None:
    g = torch.Generator().manual_seed(0)
    rewards = torch.randn(5, 2, generator=g, dtype=torch.float64)
    margins = torch.rand(5, generator=g, dtype=torch.float64).tolist()
    batch = with_margin(Batch({"loss_mask": torch.ones(5, 2, 3, dtype=torch.bool)}, batch_size=[5, 2]), *margins)
    expected = 0.0
    for (w, l), m in zip(rewards.tolist(), batch["margin"][:, 0].tolist(), strict=True):
        expected += -math.log(1 / (1 + math.exp(-(w - l - m)))) + centering * (w + l) ** 2
    assert call(bradley_terry_loss(centering), rewards, batch)[0].total.item() == pytest.approx(expected)


def test_a_constant_is_free_without_centering_alone() -> None:
    batch, rewards = PAIRS[:2], REWARDS[:2]
    torch.testing.assert_close(
        call(reward_model_loss, rewards + 3, batch)[0].total, call(reward_model_loss, rewards, batch)[0].total
    )
    plain, centered = (gradient(loss, rewards, batch) for loss in (reward_model_loss, bradley_terry_loss(0.1)))
    torch.testing.assert_close(plain.sum(-1), torch.zeros(2))
    torch.testing.assert_close(centered - plain, 2 * 0.1 * rewards.sum(-1, keepdim=True).expand(2, 2))
    zeros = torch.zeros(2, 2)
    assert call(bradley_terry_loss(0.1), zeros, batch)[0].total.item() == pytest.approx(2 * math.log(2))


def test_pairs_that_do_not_count_get_no_gradient() -> None:
    for batch in (PAIRS, with_margin(PAIRS, 1.0, 1.0, math.inf)):
        grad = gradient(bradley_terry_loss(0.1), REWARDS, batch)
        assert grad[:2].isfinite().all()
        assert grad[:2].all()
        assert not grad[2].any()
    invalid = assign(PAIRS, valid=torch.zeros(3, 2, dtype=torch.bool))
    for nothing, rewards in ((invalid, REWARDS), (PAIRS[:0], REWARDS[:0])):
        mean, metrics = call(bradley_terry_loss(0.1), rewards, nothing)
        assert (mean.total.item(), mean.weight.item()) == (0, 0)
        assert all(map(math.isnan, metrics.values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extremes_are_finite(dtype: torch.dtype) -> None:
    for a in (-1e4, 0.0, 1e4):
        for b in (-1e4, 0.0, 1e4):
            rewards = torch.tensor([[a, b]], dtype=dtype)
            mean, metrics = call(bradley_terry_loss(0.1), rewards, PAIRS[:1])
            assert mean.total.dtype == mean.weight.dtype == dtype
            assert bool(mean.total.isfinite())
            assert all(map(math.isfinite, metrics.values()))
            assert bool(gradient(bradley_terry_loss(0.1), rewards, PAIRS[:1]).isfinite().all())


def test_log_probabilities_are_not_needed_and_rewards_are() -> None:
    assert {loss.__dict__["needs"] for loss in (reward_model_loss, bradley_terry_loss(0.1))} == {frozenset({"rewards"})}
    assert (reward_model_loss.__name__, bradley_terry_loss(0.1).__name__) == ("reward_model_loss", "bradley_terry_loss")
    assert reward_model_loss.__doc__
    assert "Source:" in reward_model_loss.__doc__


@pytest.mark.parametrize("loss", [reward_model_loss, bradley_terry_loss(0.1)])
def test_errors(loss: MeanLoss) -> None:
    name = loss.__name__
    out = TensorDict({"rewards": torch.zeros(3, 2, 2)}, batch_size=[3, 2])
    with pytest.raises(BatchError, match=rf"^{name}: out\['rewards'\] has shape \[3, 2, 2\]; .* a row, \[3, 2\]"):
        loss(out, PAIRS)
    with pytest.raises(BatchError, match=rf"^{name}: loss_mask has shape \[6, 2\]; preferences are pairs"):
        call(loss, REWARDS.flatten(), PAIRS.reshape(6))
    with pytest.raises(MissingColumn, match=rf"{name} reads the column 'loss_mask'"):
        call(loss, REWARDS, PAIRS.exclude("loss_mask"))


@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_centering_is_not_negative(value: float) -> None:
    with pytest.raises(ValueError, match=rf"^bradley_terry_loss: centering is {value}; it must be finite"):
        bradley_terry_loss(value)
