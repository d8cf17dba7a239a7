import math

import pytest
import torch
from torch import Tensor

from nrl.algos import (
    Ratio,
    bounded,
    geometric_ratio,
    on_policy_ratio,
    product_ratio,
    rollout_ratio,
    sequence_ratio,
    token_ratio,
)
from nrl.batch import Batch
from nrl.errors import MissingColumn

MASK = torch.tensor([[False, True, True, True], [False, True, False, True], [False, False, False, False]])
OLD = torch.tensor([[0.0, -1.0, -2.0, -3.0], [0.0, -1.0, -7.0, -2.0], [0.0, 0.0, 0.0, 0.0]])
NEW = torch.tensor([[0.0, -2.0, -2.0, -2.5], [0.0, -1.5, -9.0, -0.5], [0.0, -1.0, -1.0, -1.0]])


SIGNS = torch.tensor([[1.0] * 4, [-1.0] * 4, [0.0] * 4])
ALL = [token_ratio, on_policy_ratio, sequence_ratio, rollout_ratio, product_ratio(token_ratio), geometric_ratio(0.4)]


def batch(old: Tensor = OLD) -> Batch:
    columns = {"loss_mask": MASK, "old_logprobs": old, "rollout_logprobs": old - 1.0, "advantages": SIGNS.to(old.dtype)}
    return Batch(columns, batch_size=[3])


def test_token_ratio_by_hand() -> None:
    assert token_ratio(NEW, batch()).tolist() == [[0, -1, 0, 0.5], [0, -0.5, 0, 1.5], [0, 0, 0, 0]]


def test_on_policy_ratio_is_zero_with_the_gradient_of_logprobs() -> None:
    logprobs = NEW.clone().requires_grad_()
    found = on_policy_ratio(logprobs, Batch({"loss_mask": MASK}, batch_size=[3]))
    assert not found.any()
    found.exp().sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == MASK.float().tolist()


def test_sequence_ratio_by_hand() -> None:
    third = pytest.approx(-0.5 / 3)
    assert sequence_ratio(NEW, batch()).tolist() == [[0, third, third, third], [0, 0.5, 0, 0.5], [0, 0, 0, 0]]


@pytest.mark.parametrize("ratio", [sequence_ratio, product_ratio(token_ratio), geometric_ratio(9.0)])
def test_the_ratio_of_a_row_of_one_token_is_that_tokens(ratio: Ratio) -> None:
    mask = torch.tensor([[False, True, False]])
    columns = {"loss_mask": mask, "old_logprobs": torch.tensor([[5.0, -1.0, 5.0]]), "advantages": mask.float()}
    found = ratio(torch.tensor([[0.0, -3.0, 0.0]]), Batch(columns, batch_size=[1]))
    assert found.tolist() == [[0, -2, 0]]


def test_rollout_ratio_by_hand() -> None:
    assert rollout_ratio(NEW, batch()).tolist() == [[0, 0, 1, 1.5], [0, 0.5, 0, 2.5], [0, 0, 0, 0]]


def test_product_ratio_by_hand() -> None:
    assert product_ratio(token_ratio)(NEW, batch()).tolist() == [[0, -0.5, -0.5, -0.5], [0, 1, 0, 1], [0, 0, 0, 0]]
    assert product_ratio(rollout_ratio)(NEW, batch()).tolist() == [[0, 2.5, 2.5, 2.5], [0, 3, 0, 3], [0, 0, 0, 0]]


def test_geometric_ratio_by_hand() -> None:
    """The first row is encouraged, so what is gained is bounded; the second discouraged, so what is lost."""
    first, second = pytest.approx((-1 + 0 + 0.3) / 3), pytest.approx((-0.2 + 1.5) / 2)
    found = geometric_ratio(0.2, 0.3)(NEW, batch()).tolist()
    assert found == [[0, first, first, first], [0, second, 0, second], [0, 0, 0, 0]]
    assert geometric_ratio(0.4)(NEW, batch()).tolist() == geometric_ratio(0.4, 0.4)(NEW, batch()).tolist()


def test_a_product_of_many_tokens_is_bounded() -> None:
    found = product_ratio(token_ratio)(OLD + 15.0, batch())
    assert found.tolist() == [[0, 20, 20, 20], [0, 20, 0, 20], [0, 0, 0, 0]]


def test_the_geometric_ratio_clips_at_one_where_a_bound_is_zero() -> None:
    first = pytest.approx(-1 / 3)
    assert geometric_ratio(0.0)(NEW, batch())[0].tolist() == [0, first, first, first]


@pytest.mark.parametrize(("bounds", "said"), [((-0.1,), "low is -0.1"), ((0.1, math.nan), "high is nan")])
def test_bounds_of_the_geometric_ratio_are_distances(bounds: tuple[float, ...], said: str) -> None:
    with pytest.raises(ValueError, match=f"geometric_ratio: {said}; it is a distance in nats"):
        geometric_ratio(*bounds)


def test_sequence_ratio_by_a_slow_loop() -> None:
    new, old = torch.randn(3, 4).double(), torch.randn(3, 4).double()
    expected = torch.zeros(3, 4).double()
    for i in range(3):
        tokens = [t for t in range(4) if MASK[i, t]]
        for t in tokens:
            expected[i, t] = sum(new[i, s] - old[i, s] for s in tokens) / len(tokens)
    torch.testing.assert_close(sequence_ratio(new, batch(old)), expected)


def test_sequence_ratio_sends_a_gradient_to_every_token_of_the_row() -> None:
    logprobs = NEW.clone().requires_grad_()
    sequence_ratio(logprobs, batch())[0, 1].backward()
    assert logprobs.grad is not None
    assert logprobs.grad[0].tolist() == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3])
    assert not logprobs.grad[1:].any()


@pytest.mark.parametrize("ratio", ALL)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_what_is_masked_is_not_seen(ratio: Ratio, garbage: float) -> None:
    logprobs = torch.where(MASK, NEW, garbage).requires_grad_()
    found = ratio(logprobs, batch(torch.where(MASK, OLD, garbage)))
    assert found.tolist() == ratio(NEW, batch()).tolist()
    found.exp().sum().backward()
    assert logprobs.grad is not None
    assert bool(logprobs.grad.isfinite().all())
    assert not logprobs.grad[~MASK].any()


@pytest.mark.parametrize("ratio", ALL)
@pytest.mark.parametrize("size", [1e4, -1e4])
def test_extreme_ratios_are_finite(ratio: Ratio, size: float) -> None:
    logprobs = (NEW + size).requires_grad_()
    found = ratio(logprobs, batch()).exp()
    found.sum().backward()
    assert bool(found.isfinite().all())
    assert logprobs.grad is not None
    assert bool(logprobs.grad.isfinite().all())


def test_old_logprobs_get_no_gradient() -> None:
    old = OLD.clone().requires_grad_()
    assert not token_ratio(NEW, batch(old)).requires_grad
    assert not sequence_ratio(NEW, batch(old)).requires_grad


@pytest.mark.parametrize("ratio", ALL)
def test_double_precision_and_empty_batches(ratio: Ratio) -> None:
    assert ratio(NEW.double(), batch(OLD.double())).dtype == torch.float64
    assert ratio(NEW[:0], batch()[:0]).shape == (0, 4)


def test_pairs() -> None:
    pairs = batch()[:2].reshape(1, 2)
    for ratio in ALL:
        assert ratio(NEW[:2].view(1, 2, 4), pairs).view(2, 4).tolist() == ratio(NEW, batch())[:2].tolist()


def test_bounded_leaves_small_ratios_alone() -> None:
    assert bounded(torch.tensor([30.0, 20.0, 19.0, -50.0])).tolist() == [20, 20, 19, -50]


@pytest.mark.parametrize(
    ("ratio", "column"),
    [
        (token_ratio, "old_logprobs"),
        (sequence_ratio, "old_logprobs"),
        (rollout_ratio, "rollout_logprobs"),
        (geometric_ratio(0.4), "advantages"),
        (rollout_ratio, "loss_mask"),
        (token_ratio, "loss_mask"),
        (sequence_ratio, "loss_mask"),
        (on_policy_ratio, "loss_mask"),
    ],
)
def test_a_missing_column_is_named(ratio: Ratio, column: str) -> None:
    name = getattr(ratio, "__name__", "")
    with pytest.raises(MissingColumn, match=f"{name} reads the column '{column}'"):
        ratio(NEW, batch().exclude(column))
