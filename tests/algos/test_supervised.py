"""Weighted supervised fine-tuning, against numbers worked out by hand, a slow loop, and the plain one."""

import math

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from nrl.algos import MeanLoss, on_policy_ratio, policy_loss, reinforce, sft_loss, weighted_sft_loss
from nrl.batch import Batch, assign
from nrl.batch.metrics import Mean
from nrl.errors import BatchError, MissingColumn

MASK = torch.tensor([[0, 1, 1], [0, 1, 0], [0, 0, 0]]).bool()
LOGPROBS = torch.tensor([[0.0, -1.0, -2.0], [0.0, -4.0, 0.0], [0.0, -9.0, -9.0]])


def rows(*weights: float, dtype: torch.dtype = torch.float32) -> Batch:
    return Batch({"loss_mask": MASK, "weights": torch.tensor(weights, dtype=dtype)}, batch_size=[3])


def call(loss: MeanLoss, logprobs: Tensor, batch: Batch) -> Mean:
    mean, metrics = loss(TensorDict({"logprobs": logprobs}, batch_size=batch.batch_size), batch)
    assert metrics == {}
    return mean


@pytest.mark.parametrize(
    ("weights", "total", "weight"),
    [
        ((1.0, 1.0, 1.0), 7.0, 3.0),
        ((2.0, 0.5, 8.0), 2 * 3 + 0.5 * 4, 2 * 2 + 0.5),
        ((0.0, 1.0, math.nan), 4.0, 1.0),
        ((0.0, 0.0, 5.0), 0.0, 0.0),
    ],
)
def test_by_hand(weights: tuple[float, ...], total: float, weight: float) -> None:
    mean = call(weighted_sft_loss, LOGPROBS, rows(*weights))
    assert (mean.total.item(), mean.weight.item()) == (total, weight)


def test_by_a_slow_loop() -> None:
    g = torch.Generator().manual_seed(0)
    logprobs = -torch.rand(3, 3, generator=g, dtype=torch.float64)
    batch = rows(*torch.rand(3, generator=g).tolist(), dtype=torch.float64)
    total = weight = 0.0
    for i in range(3):
        for t in range(3):
            if MASK[i, t]:
                total -= batch["weights"][i].item() * logprobs[i, t].item()
                weight += batch["weights"][i].item()
    mean = call(weighted_sft_loss, logprobs, batch)
    assert [part.item() for part in mean] == pytest.approx([total, weight])


def test_weights_of_one_are_none() -> None:
    assert call(weighted_sft_loss, LOGPROBS, rows(1.0, 1.0, 1.0)) == call(sft_loss, LOGPROBS, rows(1.0, 1.0, 1.0))


def test_weights_are_relative_and_change_the_gradient() -> None:
    def gradient(*weights: float) -> Tensor:
        logprobs = LOGPROBS.clone().requires_grad_()
        mean = call(weighted_sft_loss, logprobs, rows(*weights))
        return torch.autograd.grad(mean.total / mean.weight, logprobs)[0]

    torch.testing.assert_close(gradient(1.0, 2.0, 1.0), gradient(3.0, 6.0, 3.0))
    assert not torch.allclose(gradient(1.0, 2.0, 1.0), gradient(1.0, 1.0, 1.0))
    assert not gradient(0.0, 1.0, 1.0)[0].any()


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_what_is_masked_is_not_seen(garbage: float) -> None:
    logprobs = torch.where(MASK, LOGPROBS, garbage).requires_grad_()
    mean = call(weighted_sft_loss, logprobs, rows(2.0, 0.0, garbage))
    assert (mean.total.item(), mean.weight.item()) == (6.0, 4.0)
    grad = torch.autograd.grad(mean.total, logprobs)[0]
    assert grad.tolist() == [[0.0, -2.0, -2.0], [0.0] * 3, [0.0] * 3]


def test_rows_that_do_not_count() -> None:
    invalid = assign(rows(2.0, 1.0, 1.0), valid=torch.tensor([False, True, True]))
    assert [part.item() for part in call(weighted_sft_loss, LOGPROBS, invalid)] == [4.0, 1.0]
    assert [part.item() for part in call(weighted_sft_loss, LOGPROBS[:0], rows(1.0, 1.0, 1.0)[:0])] == [0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extremes_and_dtypes(dtype: torch.dtype) -> None:
    logprobs = torch.full((3, 3), -1e4, dtype=dtype, requires_grad=True)
    batch = rows(1e4, 1e-4, 1.0)
    batch["weights"].requires_grad_()
    mean = call(weighted_sft_loss, logprobs, batch)
    assert mean.total.dtype == mean.weight.dtype == dtype
    assert bool(mean.total.isfinite())
    assert not mean.weight.requires_grad
    assert torch.autograd.grad(mean.total, batch["weights"], allow_unused=True, retain_graph=True)[0] is None
    assert bool(torch.autograd.grad(mean.total, logprobs)[0].isfinite().all())


def test_rows_of_pairs_have_weights_too() -> None:
    batch = Batch({"loss_mask": MASK[None, :2], "weights": torch.tensor([[2.0, 1.0]])}, batch_size=[1, 2])
    assert [part.item() for part in call(weighted_sft_loss, LOGPROBS[None, :2], batch)] == [10.0, 5.0]


@pytest.mark.parametrize("column", ["loss_mask", "weights"])
def test_a_missing_column_is_named(column: str) -> None:
    with pytest.raises(MissingColumn, match=rf"weighted_sft_loss reads the column '{column}'"):
        call(weighted_sft_loss, LOGPROBS, rows(1.0, 1.0, 1.0).exclude(column))


def test_outputs_of_another_width() -> None:
    with pytest.raises(BatchError, match=r"masked: x has shape \[3, 2\]"):
        call(weighted_sft_loss, LOGPROBS[:, :2], rows(1.0, 1.0, 1.0))


def test_over_plain_tokens_it_is_reinforce() -> None:
    batch = rows(2.0, 0.5, 1.0)
    batch["advantages"] = batch["weights"][:, None].expand(3, 3)
    out = TensorDict({"logprobs": LOGPROBS}, batch_size=[3])
    mean, _ = policy_loss(reinforce, ratio=on_policy_ratio)(out, batch)
    assert mean.total == call(weighted_sft_loss, LOGPROBS, batch).total
    assert mean.weight.item() == 3
