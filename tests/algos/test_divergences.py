import math

import pytest
import torch
from torch import Tensor

from nrl.algos import Divergence, k1, k2, k3, kl
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
