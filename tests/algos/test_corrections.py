import math

import pytest
import torch

from nrl.algos import Correction, icepop, importance_mask, sequence_mask, sequence_truncate, times, truncate

RATIO = torch.tensor([[0.25, 0.5, 1.0, 4.0, 8.0, 64.0]])
MASK = torch.tensor([[True, True, True, True, True, False]])
ALL = [
    truncate(2.0),
    icepop(0.5, 5.0),
    truncate(math.inf),
    icepop(0.0, math.inf),
    importance_mask(2.0),
    sequence_truncate(2.0),
    sequence_truncate(math.inf),
    sequence_mask(0.9, 1.1),
    sequence_mask(0.0, math.inf),
    times(truncate(2.0), sequence_mask(0.0, 5.0)),
]


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (truncate(2.0), [0.25, 0.5, 1.0, 2.0, 2.0, 0.0]),
        (truncate(6.0), [0.25, 0.5, 1.0, 4.0, 6.0, 0.0]),
        (icepop(0.4, 5.0), [0.0, 0.5, 1.0, 4.0, 0.0, 0.0]),
        (icepop(0.6, 9.0), [0.0, 0.0, 1.0, 4.0, 8.0, 0.0]),
        (importance_mask(0.7), [0.25, 0.5, 0.0, 0.0, 0.0, 0.0]),
        (importance_mask(4.5), [0.25, 0.5, 1.0, 4.0, 0.0, 0.0]),
        (sequence_truncate(9.0), [4.0, 4.0, 4.0, 4.0, 4.0, 0.0]),  # the product of the five is 4
        (sequence_truncate(0.5), [0.5, 0.5, 0.5, 0.5, 0.5, 0.0]),
        (sequence_truncate(3.0), [3.0, 3.0, 3.0, 3.0, 3.0, 0.0]),
        (sequence_mask(1.3, 1.4), [1.0, 1.0, 1.0, 1.0, 1.0, 0.0]),  # 4 to the power of a fifth is 1.32
        (sequence_mask(1.0, 1.3), [0.0] * 6),
        (sequence_mask(1.4, 2.0), [0.0] * 6),
        (times(truncate(2.0), sequence_mask(1.3, 1.4)), [0.25, 0.5, 1.0, 2.0, 2.0, 0.0]),
        (times(truncate(2.0), sequence_mask(1.4, 2.0)), [0.0] * 6),
        (times(), [1.0, 1.0, 1.0, 1.0, 1.0, 0.0]),
    ],
)
def test_by_hand(correction: Correction, expected: list[float]) -> None:
    assert correction(RATIO.log(), MASK)[0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    "correction",
    [*ALL, truncate(1.0), icepop(1.0, 1.5), icepop(0.5, 1.0), sequence_mask(1.0, 1.5), sequence_mask(0.5, 1.0)],
)
def test_equal_policies_have_weight_one(correction: Correction) -> None:
    assert correction(torch.zeros(1, 6), MASK).tolist() == MASK.float().tolist()


@pytest.mark.parametrize("correction", ALL)
def test_rows_of_pairs_are_rows(correction: Correction) -> None:
    ratio = torch.tensor([[0.5, 2.0, 8.0], [4.0, 0.9, 1.0], [1.0, 1.1, 3.0], [0.25, 0.5, 1.0]])
    mask = torch.tensor([[True, True, True], [True, True, False], [False, True, True], [True, False, False]])
    pairs = correction(ratio.log().view(2, 2, 3), mask.view(2, 2, 3))
    assert pairs.view(4, 3).tolist() == correction(ratio.log(), mask).tolist()


def test_a_row_of_one_token_has_that_tokens_ratio_as_its_mean() -> None:
    found = sequence_mask(3.9, 4.1)(torch.tensor([[0.0, math.log(4.0)]]), torch.tensor([[False, True]]))
    assert found.tolist() == [[0.0, 1.0]]


def test_the_product_of_a_row_is_finite() -> None:
    found = sequence_truncate(math.inf)(torch.full((1, 6), 1e4), MASK)
    assert bool(found.isfinite().all())


def test_a_product_of_no_corrections_is_a_weight() -> None:
    assert times()(RATIO.log(), MASK).dtype == torch.float32


@pytest.mark.parametrize("correction", ALL)
def test_weights_have_no_gradient(correction: Correction) -> None:
    assert not correction(RATIO.log().requires_grad_(), MASK).requires_grad


@pytest.mark.parametrize("correction", ALL)
def test_extreme_and_masked_ratios_are_finite(correction: Correction) -> None:
    log_ratio = torch.tensor([[1e4, -1e4, 0.0, math.nan, math.inf]])
    found = correction(log_ratio, torch.tensor([[True, True, True, False, False]]))
    assert bool(found.isfinite().all())
    assert not found[0, 3:].any()


@pytest.mark.parametrize("correction", ALL)
def test_shapes_and_dtypes(correction: Correction) -> None:
    for shape in ((0, 3), (4, 2, 3)):
        found = correction(torch.zeros(shape, dtype=torch.float64), torch.ones(shape, dtype=torch.bool))
        assert (found.shape, found.dtype) == (shape, torch.float64)


@pytest.mark.parametrize("c", [0.0, -1.0, math.nan])
def test_the_largest_weight_is_positive(c: float) -> None:
    for make in (truncate, sequence_truncate, importance_mask):
        with pytest.raises(ValueError, match=f"{make.__name__}: c is"):
            make(c)


@pytest.mark.parametrize(("low", "high"), [(-0.1, 1.0), (2.0, 1.0), (1.0, 1.0), (math.nan, 1.0)])
def test_bounds_are_ratios_in_order(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="icepop: low is"):
        icepop(low, high)
    with pytest.raises(ValueError, match="sequence_mask: low is"):
        sequence_mask(low, high)
