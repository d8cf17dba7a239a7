import math

import pytest
import torch

from nrl.algos import Aggregate, seq_mean, seq_sum, token_mean
from nrl.reduce import Mean, finalize, merge

X = torch.tensor([[1.0, 2.0, 3.0], [8.0, 40.0, 50.0], [60.0, 70.0, 80.0]])
MASK = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
ALL = [token_mean, seq_mean, seq_sum(4)]


@pytest.mark.parametrize(
    ("aggregate", "total", "weight"),
    [(token_mean, 1 + 2 + 3 + 8, 4), (seq_mean, 6 / 3 + 8 / 1, 2), (seq_sum(4), 6 / 4 + 8 / 4, 2)],
)
def test_by_hand(aggregate: Aggregate, total: float, weight: float) -> None:
    found = aggregate(X, MASK)
    assert (found.total.item(), found.weight.item()) == (total, weight)


@pytest.mark.parametrize("aggregate", ALL)
def test_any_leading_dimensions(aggregate: Aggregate) -> None:
    flat = aggregate(X, MASK)
    for shape in ((3, 1, 3), (1, 3, 3)):
        folded = aggregate(X.view(shape), MASK.view(shape))
        assert (folded.total, folded.weight) == (flat.total, flat.weight)


@pytest.mark.parametrize("aggregate", ALL)
def test_rows_add_up(aggregate: Aggregate) -> None:
    parts = [aggregate(x[None], mask[None]) for x, mask in zip(X, MASK, strict=True)]
    added = merge(merge({"x": parts[0]}, {"x": parts[1]}), {"x": parts[2]})
    assert finalize(added) == pytest.approx(finalize({"x": aggregate(X, MASK)}))


@pytest.mark.parametrize("aggregate", ALL)
@pytest.mark.parametrize("garbage", [math.nan, math.inf])
def test_what_is_masked_is_not_seen(aggregate: Aggregate, garbage: float) -> None:
    x = torch.where(MASK, X, garbage).requires_grad_()
    found = aggregate(x, MASK)
    assert found.total == aggregate(X, MASK).total
    found.total.backward()
    assert x.grad is not None
    assert bool((x.grad[~MASK] == 0).all())
    assert bool((x.grad[MASK] > 0).all())


@pytest.mark.parametrize("aggregate", ALL)
@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (2, 3)])
def test_nothing_is_zero_of_zero(aggregate: Aggregate, shape: tuple[int, int]) -> None:
    found = aggregate(torch.ones(shape), torch.zeros(shape, dtype=torch.bool))
    assert (found.total.item(), found.weight.item()) == (0, 0)


@pytest.mark.parametrize("aggregate", ALL)
def test_dtypes(aggregate: Aggregate) -> None:
    assert {part.dtype for part in aggregate(X.double(), MASK)} == {torch.float64}
    assert {part.dtype for part in aggregate(X.bfloat16(), MASK)} == {torch.float32}


def test_half_precision_counts_exactly() -> None:
    ones = torch.ones(1, 1001, dtype=torch.bfloat16)
    found = token_mean(ones, torch.ones(1, 1001, dtype=torch.bool))
    assert (found.total.item(), found.weight.item()) == (1001, 1001)


def test_norm_changes_the_total_and_not_the_weight() -> None:
    assert seq_sum(1)(X, MASK) == Mean(torch.tensor(14.0), torch.tensor(2.0))
    assert seq_sum(2)(X, MASK) == Mean(torch.tensor(7.0), torch.tensor(2.0))


@pytest.mark.parametrize("norm", [0, -1, math.inf, math.nan])
def test_norm_is_positive(norm: float) -> None:
    with pytest.raises(ValueError, match="seq_sum: norm is"):
        seq_sum(norm)
