import math

import pytest
import torch
from torch import Tensor

from nrl.algos import (
    Divergence,
    adaptive_kl,
    binary_kl,
    binary_tv,
    importance_weighted,
    k1,
    k2,
    k3,
    kl,
    log1mexp,
    on_policy_ratio,
    token_ratio,
)
from nrl.batch import Batch
from nrl.errors import MissingColumn

LOGITS = torch.tensor([0.3, -1.2, 0.8, 0.1], dtype=torch.float64)
REF = torch.tensor([-0.5, 0.4, 0.2, 1.0], dtype=torch.float64).log_softmax(0)


@pytest.mark.parametrize(
    ("divergence", "expected"), [(k1, [2.0, -1.0]), (k2, [2.0, 0.5]), (k3, [math.exp(-2) - 1 + 2, math.e - 1 - 1])]
)
def test_by_hand(divergence: Divergence, expected: list[float]) -> None:
    found = divergence(torch.tensor([-1.0, -3.0]), torch.tensor([-3.0, -2.0]))
    assert found.tolist() == pytest.approx(expected, rel=1e-6)


def expected_gradient(divergence: Divergence) -> Tensor:
    """E over samples of theta of the gradient of the estimator, by enumeration."""
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    probs = logprobs.detach().exp()
    return torch.autograd.grad((probs * divergence(logprobs, REF)).sum(), logits)[0]


def gradient_of(divergence: Divergence) -> Tensor:
    """The gradient of a divergence that is written out."""
    logits = LOGITS.clone().requires_grad_()
    return torch.autograd.grad(divergence(logits.log_softmax(0), REF), logits)[0]


def reverse_kl(logprobs: Tensor, ref: Tensor) -> Tensor:
    return (logprobs.exp() * (logprobs - ref)).sum()


def forward_kl(logprobs: Tensor, ref: Tensor) -> Tensor:
    return (ref.exp() * (ref - logprobs)).sum()


def test_k1_has_no_gradient_on_average() -> None:
    torch.testing.assert_close(expected_gradient(k1), torch.zeros_like(LOGITS))


def test_k2_has_the_gradient_of_the_reverse_kl() -> None:
    torch.testing.assert_close(expected_gradient(k2), gradient_of(reverse_kl))


def test_k3_has_the_gradient_of_the_forward_kl() -> None:
    torch.testing.assert_close(expected_gradient(k3), gradient_of(forward_kl))
    assert not torch.allclose(gradient_of(forward_kl), gradient_of(reverse_kl), atol=1e-2)


@pytest.mark.parametrize("divergence", [k1, k3])
def test_k1_and_k3_are_unbiased_values_of_the_reverse_kl(divergence: Divergence) -> None:
    logprobs = LOGITS.log_softmax(0)
    torch.testing.assert_close((logprobs.exp() * divergence(logprobs, REF)).sum(), reverse_kl(logprobs, REF))


@pytest.mark.parametrize("divergence", [k1, k2, k3])
@pytest.mark.parametrize("size", [1e4, -1e4])
def test_extreme_ratios_are_finite(divergence: Divergence, size: float) -> None:
    logprobs = torch.tensor([size], requires_grad=True)
    found = divergence(logprobs, torch.zeros(1))
    found.sum().backward()
    assert logprobs.grad is not None
    assert bool(found.isfinite() & logprobs.grad.isfinite())


def test_k3_still_pulls_back_what_became_far_too_likely() -> None:
    logprobs = torch.tensor([0.0], requires_grad=True)
    k3(logprobs, torch.tensor([-1e4])).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == 1


MASK = torch.tensor([[False, True, True]])
NEW, OLD = torch.tensor([[0.0, -1.0, -3.0]]), torch.tensor([[0.0, -3.0, -2.0]])


def test_kl_is_a_coefficient_times_a_divergence_on_the_mask() -> None:
    batch = Batch({"loss_mask": MASK, "ref_logprobs": OLD}, batch_size=[1])
    for divergence in (k1, k2, k3):
        torch.testing.assert_close(kl(divergence, 0.1)(NEW, batch), 0.1 * divergence(NEW, OLD) * MASK)
    assert not kl(k2, 0.0)(NEW, batch).any()


@pytest.mark.parametrize("divergence", [k1, k2, k3])
def test_kl_does_not_see_what_is_masked(divergence: Divergence) -> None:
    batch = Batch({"loss_mask": MASK, "ref_logprobs": torch.where(MASK, OLD, math.nan)}, batch_size=[1])
    logprobs = torch.where(MASK, NEW, math.inf).requires_grad_()
    found = kl(divergence, 1.0)(logprobs, batch)
    assert found[0, 0] == 0
    found.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad[0, 0] == 0


def test_the_reference_gets_no_gradient() -> None:
    batch = Batch({"loss_mask": MASK, "ref_logprobs": OLD.clone().requires_grad_()}, batch_size=[1])
    assert not kl(k3, 1.0)(NEW, batch).requires_grad


@pytest.mark.parametrize("coef", [-0.1, math.inf, math.nan])
def test_the_coefficient_is_not_negative(coef: float) -> None:
    with pytest.raises(ValueError, match="kl: coef is"):
        kl(k3, coef)


def test_a_missing_reference_is_named() -> None:
    with pytest.raises(MissingColumn, match="kl reads the column 'ref_logprobs'"):
        kl(k3, 0.1)(NEW, Batch({"loss_mask": MASK}, batch_size=[1]))


# -- weighted by the ratio --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("divergence", [k1, k3])
@pytest.mark.parametrize("older", [False, True])
def test_weighted_by_the_ratio_it_has_the_gradient_of_the_reverse_kl(divergence: Divergence, older: bool) -> None:
    """By enumeration: every token of a vocabulary is a row of one token, as often as the policy that samples draws it.

    That policy may be an older one than theta.
    """
    old = (LOGITS + (torch.tensor([0.5, -0.4, 0.0, 0.2]) if older else 0.0)).log_softmax(0)
    columns = {
        "loss_mask": torch.ones(4, 1, dtype=torch.bool),
        "old_logprobs": old[:, None],
        "ref_logprobs": REF[:, None],
    }
    logits = LOGITS.clone().requires_grad_()
    penalty = importance_weighted(kl(divergence, 1.0))(logits.log_softmax(0)[:, None], Batch(columns, batch_size=[4]))
    (found,) = torch.autograd.grad((old.exp() * penalty[:, 0]).sum(), logits)
    torch.testing.assert_close(found, gradient_of(reverse_kl))
    plain = kl(divergence, 1.0)(logits.log_softmax(0)[:, None], Batch(columns, batch_size=[4]))
    (other,) = torch.autograd.grad((old.exp() * plain[:, 0]).sum(), logits)
    assert not torch.allclose(other, found, atol=1e-2)


def test_the_ratio_of_a_weighted_penalty_is_an_option() -> None:
    batch = Batch({"loss_mask": MASK, "ref_logprobs": OLD, "old_logprobs": NEW + 1.0}, batch_size=[1])
    found = [importance_weighted(kl(k2, 1.0), ratio)(NEW, batch) for ratio in (token_ratio, on_policy_ratio)]
    torch.testing.assert_close(found[0], found[1] * math.exp(-1))


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_a_weighted_penalty_is_finite(size: float) -> None:
    logprobs = torch.full((1, 3), size, requires_grad=True)
    batch = Batch({"loss_mask": MASK, "ref_logprobs": OLD, "old_logprobs": OLD}, batch_size=[1])
    found = importance_weighted(kl(k3, 1.0))(logprobs, batch)
    found.sum().backward()
    assert logprobs.grad is not None
    assert bool(found.isfinite().all() & logprobs.grad.isfinite().all())


def test_a_weighted_penalty_is_finite_whatever_the_ratio_is() -> None:
    batch = Batch({"loss_mask": MASK, "ref_logprobs": OLD}, batch_size=[1])
    found = importance_weighted(kl(k2, 1.0), ratio=lambda logprobs, batch: logprobs + 1e4)(NEW, batch)
    assert bool(found.isfinite().all())


# -- of one token and any other ---------------------------------------------------------------------------------------


def test_binary_divergences_by_hand() -> None:
    theta, other = torch.tensor([0.5, 0.5, 0.9]).log(), torch.tensor([0.25, 0.5, 0.1]).log()
    assert binary_tv(theta, other).tolist() == pytest.approx([0.25, 0.0, 0.8], abs=1e-6)
    quarter = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    tenth = 0.1 * math.log(1 / 9) + 0.9 * math.log(9)
    assert binary_kl(theta, other).tolist() == pytest.approx([quarter, 0.0, tenth], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("divergence", [binary_tv, binary_kl])
def test_binary_divergences_are_finite_at_the_ends(divergence: Divergence) -> None:
    ends = torch.tensor([0.0, -1e-9, -1.0, -1e4])
    theta = ends.repeat(4).requires_grad_()
    found = divergence(theta, ends.repeat_interleave(4))
    found.sum().backward()
    assert theta.grad is not None
    assert bool((found >= 0).all() & found.isfinite().all() & theta.grad.isfinite().all())


def test_log1mexp_is_exact_at_both_ends() -> None:
    x = torch.tensor([-1e-6, -0.1, -math.log(2), -5.0, -40.0], dtype=torch.float64)
    expected = [math.log(-math.expm1(value)) for value in x[:4].tolist()] + [-math.exp(-40)]
    assert log1mexp(x).tolist() == pytest.approx(expected, rel=1e-12)


# -- a coefficient that follows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kl_", "samples", "expected"),
    [
        (6.0, 100, 0.2),
        (6.6, 100, 0.2 * (1 + 0.1 * 0.01)),
        (5.4, 100, 0.2 * (1 - 0.1 * 0.01)),
        (60.0, 100, 0.2 * (1 + 0.2 * 0.01)),  # a fifth is the most
        (0.0, 5000, 0.2 * (1 - 0.2 * 0.5)),
        (-3.0, 100, 0.2 * (1 - 0.2 * 0.01)),  # an estimate may be negative
        (0.0, 10**6, 0.2 * 0.8),  # more samples than the horizon has
        (math.nan, 100, 0.2),
        (math.inf, 100, 0.2),
    ],
)
def test_adaptive_kl_by_hand(kl_: float, samples: int, expected: float) -> None:
    init, update = adaptive_kl(init=0.2, target=6.0, horizon=10_000)
    assert init() == 0.2
    assert update(init(), kl_, samples) == pytest.approx(expected)


def test_adaptive_kl_brings_the_kl_to_its_target() -> None:
    """Of a policy whose KL is 3 over the coefficient."""
    init, update = adaptive_kl(init=0.1, target=6.0, horizon=10_000)
    coef = init()
    for _ in range(500):
        coef = update(coef, 3 / coef, 512)
    assert 3 / coef == pytest.approx(6.0, rel=1e-3)


@pytest.mark.parametrize("name", ["init", "target", "horizon"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_a_controllers_arguments_are_positive(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"adaptive_kl: {name} is {value}; it must be positive and finite"):
        adaptive_kl(**{"init": 0.2, "target": 6.0, "horizon": 1e4, name: value})
