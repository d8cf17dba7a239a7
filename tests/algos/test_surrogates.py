import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nrl.algos import Surrogate, binary_kl, cispo, clip, dppo, reinforce, sapo, vespo

ALL = [
    clip(0.2),
    clip(0.2, 0.28),
    clip(0.2, dual=3.0),
    clip(math.inf),
    cispo(4.0),
    cispo(4.0, low=0.5),
    cispo(math.inf),
    reinforce,
    sapo(),
    dppo(0.2),
    dppo(0.05, divergence=binary_kl, cap=5.0),
    vespo(),
    vespo((0.0, 1.0), (1.0, 0.0)),
]


def value_and_gradients(
    surrogate: Surrogate, ratio: float, advantage: float, logprob: float = -1.0
) -> tuple[float, float, float]:
    """The loss of one token, and its derivatives by the log-ratio and by the log-probability."""
    log_ratio = torch.tensor([ratio], dtype=torch.float64).log().requires_grad_()
    logprobs = torch.tensor([logprob], dtype=torch.float64, requires_grad=True)
    loss = surrogate(log_ratio, logprobs, torch.tensor([advantage], dtype=torch.float64))
    grads = torch.autograd.grad(loss.sum(), (log_ratio, logprobs), allow_unused=True)
    return loss.item(), *(0.0 if grad is None else grad.item() for grad in grads)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("surrogate", "ratio", "advantage", "loss", "gradient"),
    [
        (clip(0.2), 1.0, 2.0, -2.0, -2.0),
        (clip(0.2), 1.1, 2.0, -2.2, -2.2),
        (clip(0.2), 1.5, 2.0, -2.4, 0.0),  # too likely already
        (clip(0.2), 0.5, 2.0, -1.0, -1.0),  # too unlikely: pulled back
        (clip(0.2), 1.5, -2.0, 3.0, 3.0),  # too likely: pulled back
        (clip(0.2), 0.5, -2.0, 1.6, 0.0),  # too unlikely already
        (clip(0.2, 0.3), 1.5, 2.0, -2.6, 0.0),  # the upper bound has its own distance
        (clip(0.2, 0.3), 0.5, -2.0, 1.6, 0.0),
        (clip(0.2, dual=3.0), 5.0, -2.0, 6.0, 0.0),  # c |A|
        (clip(0.2, dual=3.0), 2.0, -2.0, 4.0, 4.0),  # below c
        (clip(0.2, dual=3.0), 5.0, 2.0, -2.4, 0.0),  # positive advantages are as without it
        (clip(0.2, dual=3.0), 5.0, 0.5, -0.6, 0.0),  # small ones too
        (clip(0.2, dual=1.5), 2.0, -2.0, 3.0, 0.0),
        (clip(0.0), 1.5, 2.0, -2.0, 0.0),
    ],
)
def test_clip_by_hand(surrogate: Surrogate, ratio: float, advantage: float, loss: float, gradient: float) -> None:
    assert value_and_gradients(surrogate, ratio, advantage) == pytest.approx((loss, gradient, 0.0))


@pytest.mark.parametrize("ratio", [0.01, 0.5, 1.0, 3.0, 100.0])
@pytest.mark.parametrize("advantage", [-2.0, 0.0, 3.0])
def test_clip_at_infinity_is_importance_sampling(ratio: float, advantage: float) -> None:
    expected = -ratio * advantage
    assert value_and_gradients(clip(math.inf), ratio, advantage) == pytest.approx((expected, expected, 0))


@pytest.mark.parametrize(
    ("surrogate", "ratio", "weight"),
    [(cispo(4.0), 2.0, 2.0), (cispo(4.0), 8.0, 5.0), (cispo(4.0), 0.1, 0.1), (cispo(4.0, low=0.5), 0.1, 0.5)],
)
def test_cispo_by_hand(surrogate: Surrogate, ratio: float, weight: float) -> None:
    found = value_and_gradients(surrogate, ratio, advantage=3.0, logprob=-2.0)
    assert found == pytest.approx((6 * weight, 0.0, -3 * weight))


def test_reinforce_by_hand() -> None:
    assert value_and_gradients(reinforce, ratio=7.0, advantage=3.0, logprob=-2.0) == (6.0, 0.0, -3.0)


@pytest.mark.parametrize(
    ("surrogate", "ratio", "advantage", "loss", "gradient"),
    [
        (sapo(), 1.0, 2.0, -4.0, -2.0),  # 4 / 1 · 1/2 · 2, and the gradient of REINFORCE
        (sapo(), 1.0, -2.0, 4 / 1.05, 2.0),
        (sapo(2.0), 1.5, 1.0, -2 / (1 + math.exp(-1)), -4 * 1.5 * math.exp(-1) / (1 + math.exp(-1)) ** 2),
        (sapo(2.0, 4.0), 1.5, -1.0, 1 / (1 + math.exp(-2)), 4 * 1.5 * math.exp(-2) / (1 + math.exp(-2)) ** 2),
    ],
)
def test_sapo_by_hand(surrogate: Surrogate, ratio: float, advantage: float, loss: float, gradient: float) -> None:
    assert value_and_gradients(surrogate, ratio, advantage) == pytest.approx((loss, gradient, 0.0))


@pytest.mark.parametrize(
    ("surrogate", "ratio", "advantage", "weight"),
    [  # theta gives the token a half, so the other policy 1 / (2 ratio)
        (dppo(0.2), 2.0, 1.0, 0.0),  # 0.5 against 0.25, and further up
        (dppo(0.3), 2.0, 1.0, 2.0),
        (dppo(0.2), 2.0, -1.0, 2.0),  # comes back
        (dppo(0.2), 0.625, -1.0, 0.0),  # 0.5 against 0.8, and further down
        (dppo(0.2), 0.625, 1.0, 0.625),
        (dppo(0.4, 0.1), 2.0, 1.0, 0.0),  # the bound on what is encouraged is its own
        (dppo(0.4, 0.1), 0.625, -1.0, 0.625),
        (dppo(0.3, cap=1.5), 2.0, 1.0, 1.5),
        (dppo(0.3, cap=0.5), 2.0, 1.0, 0.5),
        (dppo(0.2, divergence=binary_kl), 2.0, 1.0, 2.0),  # a quarter against a half is 0.131 nats
        (dppo(0.13, divergence=binary_kl), 2.0, 1.0, 0.0),
        (dppo(0.25), 2.0, 1.0, 2.0),  # at the bound
        (dppo(0.2), 1.0, 0.0, 1.0),
    ],
)
def test_dppo_by_hand(surrogate: Surrogate, ratio: float, advantage: float, weight: float) -> None:
    found = value_and_gradients(surrogate, ratio, advantage, logprob=math.log(0.5))
    assert found == pytest.approx((-weight * advantage * math.log(0.5), 0.0, -weight * advantage))


@pytest.mark.parametrize(
    ("surrogate", "ratio", "advantage", "weight"),
    [
        (vespo(), 1.0, 1.0, 1.0),
        (vespo(), 2.0, 1.0, 4 * math.exp(-3)),
        (vespo(), 2.0, -1.0, 8 * math.exp(-2)),
        (vespo(), 0.5, 1.0, 0.25 * math.exp(1.5)),
        (vespo(), 2.0, 0.5, 4 * math.exp(-3)),  # a small advantage is a good one
        (vespo((0.0, 1.0)), 0.0, 1.0, math.e),  # 0 to the power of 0 is 1
        (vespo((1.0, 0.0), (0.0, 0.0)), 3.0, 1.0, 3.0),
        (vespo((1.0, 0.0), (0.0, 0.0)), 3.0, -1.0, 1.0),
    ],
)
def test_vespo_by_hand(surrogate: Surrogate, ratio: float, advantage: float, weight: float) -> None:
    found = value_and_gradients(surrogate, ratio, advantage, logprob=-2.0)
    assert found == pytest.approx((2 * weight * advantage, 0.0, -weight * advantage))


def test_clip_and_reinforce_have_one_gradient_on_policy() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantages = torch.tensor([2.0, -3.0])
    for surrogate in (clip(0.2), cispo(4.0), reinforce, sapo(), dppo(0.2), vespo()):
        loss = surrogate(logprobs - logprobs.detach(), logprobs, advantages).sum()
        assert torch.autograd.grad(loss, logprobs)[0].tolist() == pytest.approx([-2, 3])


@pytest.mark.parametrize("surrogate", ALL)
@pytest.mark.parametrize("log_ratio", [1e4, -1e4, 88.0, 21.0])
@pytest.mark.parametrize("advantage", [1e3, -1e3, 0.0])
def test_extreme_ratios_are_finite(surrogate: Surrogate, log_ratio: float, advantage: float) -> None:
    lr = torch.tensor([log_ratio], requires_grad=True)
    logprobs = torch.tensor([-1e4], requires_grad=True)
    loss = surrogate(lr, logprobs, torch.tensor([advantage]))
    assert bool(loss.isfinite().all())
    for grad in torch.autograd.grad(loss.sum(), (lr, logprobs), allow_unused=True):
        assert grad is None or bool(grad.isfinite().all())


@pytest.mark.parametrize("surrogate", ALL)
def test_shapes_and_dtypes(surrogate: Surrogate) -> None:
    for shape in ((2, 3), (4, 2, 3), (0, 3)):
        x = torch.zeros(shape, dtype=torch.float64)
        found = surrogate(x, x, x)
        assert (found.shape, found.dtype) == (shape, torch.float64)


def clipped(surrogate: Surrogate, ratio: list[float], advantages: list[float]) -> list[bool]:
    log_ratio = torch.tensor(ratio).log()
    theta = torch.full_like(log_ratio, 0.5).log()
    where: Tensor = surrogate.clipped(log_ratio, theta, torch.tensor(advantages))  # type: ignore[attr-defined]
    return where.tolist()


def test_where_it_clips() -> None:
    ratio, advantages = [1.5, 0.5, 1.5, 0.5, 1.0, 9.0, 9.0], [1.0, 1.0, -1.0, -1.0, 1.0, -1.0, 0.0]
    assert clipped(clip(0.2), ratio, advantages) == [True, False, False, True, False, False, False]
    assert clipped(clip(0.2, dual=4.0), ratio, advantages) == [True, False, False, True, False, True, False]
    assert clipped(cispo(4.0), ratio, advantages) == [False, False, False, False, False, True, False]
    assert clipped(dppo(0.1), [2.0, 0.6, 2.0, 0.6], [1.0, 1.0, -1.0, -1.0]) == [True, False, False, True]
    assert clipped(cispo(4.0, low=0.2), ratio, advantages) == [False, True, False, True, False, True, False]


def test_it_clips_above_one_and_high() -> None:
    assert clipped(cispo(4.0), [4.9, 5.5], [1.0, 1.0]) == [False, True]


def test_dppo_clips_by_the_sign_of_the_advantage() -> None:
    assert clipped(dppo(0.1), [2.0, 0.6, 0.6], [0.0, 0.0, 0.5]) == [False, False, False]


def test_a_ratio_on_the_bound_is_not_clipped() -> None:
    for surrogate in (clip(0.0), cispo(0.0, low=0.0)):
        assert clipped(surrogate, [1.0, 1.0], [1.0, -1.0]) == [False, False]


@pytest.mark.parametrize("ratio", [0.3, 0.9, 1.1, 2.5, 7.0])
@pytest.mark.parametrize("advantage", [-2.0, 2.0])
def test_clip_has_no_gradient_exactly_where_it_says_so(ratio: float, advantage: float) -> None:
    surrogate = clip(0.2, 0.28, dual=3.0)
    _, gradient, _ = value_and_gradients(surrogate, ratio, advantage)
    assert (gradient == 0) == clipped(surrogate, [ratio], [advantage])[0]


@pytest.mark.parametrize("value", [-0.1, math.nan])
def test_distances_are_not_negative(value: float) -> None:
    with pytest.raises(ValueError, match="clip: low is"):
        clip(value)
    with pytest.raises(ValueError, match="clip: high is"):
        clip(0.2, value)
    with pytest.raises(ValueError, match="cispo: high is"):
        cispo(value)
    with pytest.raises(ValueError, match="cispo: low is"):
        cispo(4.0, value)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: sapo(0.0), "sapo: positive is 0.0; it is a temperature"),
        (lambda: sapo(1.0, math.inf), "sapo: negative is inf"),
        (lambda: dppo(-1.0), "dppo: low is -1.0"),
        (lambda: dppo(0.2, math.nan), "dppo: high is nan"),
        (lambda: dppo(0.2, cap=0.0), "dppo: cap is 0.0; it is the largest ratio"),
        (lambda: vespo((-1.0, 0.0)), r"vespo: positive is \(-1.0, 0.0\); both are exponents"),
        (lambda: vespo(negative=(1.0, math.inf)), "vespo: negative is"),
    ],
)
def test_options_that_cannot_be(make: Callable[[], Surrogate], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


@pytest.mark.parametrize("dual", [1.0, 0.5, math.nan])
def test_dual_is_a_ratio_above_one(dual: float) -> None:
    with pytest.raises(ValueError, match=r"clip: dual is .* greater than 1"):
        clip(0.2, dual=dual)
