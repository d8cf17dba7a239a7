"""Losses of critics, by hand and by a slow loop; what they leave out; how much of the returns is foreseen."""

import math

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from nrl.algos import explained_variance, seq_mean, seq_sum, value_loss
from nrl.batch import Batch
from nrl.batch.metrics import finalize
from nrl.errors import MissingColumn

MASK = torch.tensor([[False, True, True, False], [False, True, False, True]])


def example(seed: int = 0) -> tuple[Tensor, Batch]:
    generator = torch.Generator().manual_seed(seed)
    values, old, returns = (torch.randn(2, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    return values, Batch({"loss_mask": MASK, "returns": returns, "values": old}, batch_size=[2])


def call(values: Tensor, batch: Batch, clip: float | None = None) -> tuple[Tensor, Tensor, dict[str, float]]:
    (total, weight), metrics = value_loss(clip)(TensorDict({"values": values}, batch_size=[2]), batch)
    return total, weight, finalize(metrics)


@pytest.mark.parametrize("clip", [None, 0.1, 0.7, 1e6])
def test_a_slow_loop(clip: float | None) -> None:
    values, batch = example()
    values.requires_grad_()
    expected, stuck = 0.0, 0
    gradient = torch.zeros_like(values)
    for row, t in torch.nonzero(MASK).tolist():
        v, old, target = (float(x[row, t]) for x in (values.detach(), batch["values"], batch["returns"]))
        plain, slope = 0.5 * (v - target) ** 2, v - target
        if clip is not None:
            near = min(max(v, old - clip), old + clip)
            other = 0.5 * (near - target) ** 2
            if other > plain and abs(v - old) > clip:
                plain, slope, stuck = other, 0.0, stuck + 1
        expected += plain
        gradient[row, t] = slope
    total, weight, metrics = call(values, batch, clip)
    torch.testing.assert_close(total, torch.tensor(expected, dtype=torch.float64))
    assert float(weight) == 4
    (found,) = torch.autograd.grad(total, [values])
    torch.testing.assert_close(found, gradient)
    assert metrics["value"] == pytest.approx(float(values.detach()[MASK].mean()))
    assert metrics.get("value_clip_fraction") == (None if clip is None else stuck / 4)
    if clip == 0.1:
        assert stuck > 0


def test_an_error_on_the_other_side_is_not_clipped_away() -> None:
    """The value is far from where it was, and on the wrong side: the larger error counts, with its gradient."""
    values = torch.tensor([[0.0, 2.0]], requires_grad=True)
    batch = Batch({"loss_mask": torch.tensor([[False, True]]), "returns": torch.zeros(1, 2)}, [1])
    batch["values"] = torch.tensor([[0.0, 0.5]])
    (total, _), _ = value_loss(0.25)(TensorDict({"values": values}, batch_size=[1]), batch)
    assert total.item() == 2.0
    assert torch.autograd.grad(total, [values])[0].tolist() == [[0.0, 2.0]]


def test_how_it_is_added_up() -> None:
    values, batch = example()
    out = TensorDict({"values": values}, batch_size=[2])
    each = 0.5 * (values - batch["returns"]).square() * MASK
    total, weight = value_loss(aggregate=seq_mean)(out, batch)[0]
    torch.testing.assert_close((total, float(weight)), ((each.sum(1) / 2).sum(), 2.0))
    torch.testing.assert_close(value_loss(aggregate=seq_sum(8))(out, batch)[0].total, each.sum() / 8)


def test_what_is_not_trained_on_is_not_seen() -> None:
    values, batch = example()
    total = call(values, batch, 0.5)[0]
    nan = torch.full_like(values, math.nan)
    for name in ("returns", "values"):
        batch[name] = torch.where(MASK, batch[name], nan)
    values = torch.where(MASK, values, nan).requires_grad_()
    again = call(values, batch, 0.5)[0]
    assert again == total
    assert bool(torch.autograd.grad(again, [values])[0].isfinite().all())


def test_errors() -> None:
    for clip in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=r"value_loss: clip is .*; it must be positive and finite"):
            value_loss(clip)
    values, batch = example()
    for name in ("returns", "values"):
        with pytest.raises(MissingColumn, match=rf"value_loss.*'{name}'"):
            call(values, batch.exclude(name), 0.5)
    call(values, batch.exclude("values"))  # which are not read without clipping


def test_explained_variance() -> None:
    values, batch = example(1)
    returns, old = batch["returns"][MASK].tolist(), batch["values"][MASK].tolist()
    rest = [r - v for r, v in zip(returns, old, strict=True)]

    def variance(x: list[float]) -> float:
        return sum((each - sum(x) / 4) ** 2 for each in x) / 4

    assert explained_variance(batch).total.item() == pytest.approx(1 - variance(rest) / variance(returns))
    for foreseen, expected in ((batch["returns"], 1.0), (torch.full_like(values, 7.0), 0.0), (-batch["returns"], -3.0)):
        found = explained_variance(Batch({**batch, "values": foreseen}, [2]))
        assert found.total.item() == pytest.approx(expected)
        assert found.weight.item() == 1
    assert explained_variance(Batch({**batch, "returns": torch.ones_like(values)}, [2])).weight.item() == 0
    assert explained_variance(Batch({**batch, "loss_mask": torch.zeros_like(MASK)}, [2])).weight.item() == 0
    with pytest.raises(MissingColumn, match=r"explained_variance.*'returns'"):
        explained_variance(batch.exclude("returns"))
