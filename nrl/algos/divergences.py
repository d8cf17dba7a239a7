"""Estimators of the divergence from a reference at each sampled token, and penalties made of them.

As *values*, k1 and k3 are unbiased for the reverse KL(π_θ ‖ π_ref) under samples of π_θ. A *loss* differentiates them,
and the gradient of an estimator need not estimate the gradient: each function says which gradient it has.
Source: J. Schulman, Approximating KL divergence, http://joschu.net/blog/kl-approx.html; on the gradients,
https://arxiv.org/abs/2506.09477.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from nrl.algos._arguments import not_negative, positive
from nrl.algos.masking import masked, masked_column
from nrl.algos.ratios import Ratio, bounded, token_ratio
from nrl.arguments import checked
from nrl.batch import Batch

__all__ = [
    "Controller",
    "Divergence",
    "Penalty",
    "adaptive_kl",
    "binary_kl",
    "binary_tv",
    "importance_weighted",
    "k1",
    "k2",
    "k3",
    "kl",
    "log1mexp",
]

type Divergence = Callable[[Tensor, Tensor], Tensor]
"""``(logprobs, ref_logprobs) -> per-token divergence``, all ``[*B, T]``."""

type Penalty = Callable[[Tensor, TensorDict], Tensor]
"""``(logprobs, batch) -> per-token cost``, ``[*B, T]``; it reads the columns that it needs."""


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The log-ratio itself: unbiased, of high variance.

        log π_θ - log π_ref

    Gradient in a loss: none on average, because E[∇ log π_θ] = 0. As a penalty it is noise; subtract it from the
    rewards instead, or use `k2`.

    Args:
        logprobs: ``[*B, T]``, nats.
        ref_logprobs: ``[*B, T]``, nats.

    Source: J. Schulman, http://joschu.net/blog/kl-approx.html, k1.

    >>> k1(torch.tensor([-1.0]), torch.tensor([-3.0])).tolist()
    [2.0]
    """
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Half the squared log-ratio: biased, never negative.

        1/2 (log π_θ - log π_ref)²

    Gradient in a loss: that of the reverse KL(π_θ ‖ π_ref), exactly on average.

    Args:
        logprobs: ``[*B, T]``, nats.
        ref_logprobs: ``[*B, T]``, nats.

    Source: J. Schulman, http://joschu.net/blog/kl-approx.html, k2.

    >>> k2(torch.tensor([-1.0]), torch.tensor([-3.0])).tolist()
    [2.0]
    """
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The k3 estimator: unbiased, of low variance, never negative.

        exp(x) - 1 - x,   x = log π_ref - log π_θ

    Gradient in a loss: that of the *forward* KL(π_ref ‖ π_θ) on average, although the value estimates the reverse one.
    x is `bounded`: where the reference is more than e^20 times as likely, the gradient is 0.

    Args:
        logprobs: ``[*B, T]``, nats.
        ref_logprobs: ``[*B, T]``, nats.

    Source: J. Schulman, http://joschu.net/blog/kl-approx.html, k3; GRPO, https://arxiv.org/abs/2402.03300, eq. 4.

    >>> [round(x, 4) for x in k3(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -1.0])).tolist()]
    [0.0, 0.7183]
    """
    x = bounded(ref_logprobs - logprobs)
    return torch.expm1(x) - x


def log1mexp(x: Tensor) -> Tensor:
    """The logarithm of the remaining probability, log(1 - exp(x)), without cancellation at either end.

    Args:
        x: any shape, nats, at most 0; those above -1e-7 count as that, so that the result and its gradient are finite.

    Source: M. Mächler, Accurately computing log(1 - exp(-|a|)) (2012).

    >>> [round(x, 4) for x in log1mexp(torch.tensor([0.5, 0.999]).log()).tolist()]
    [-0.6931, -6.9078]
    """
    x = x.clamp(max=-1e-7)
    near = x > -math.log(2)
    # Each branch is computed where it is the exact one only, or its gradient would be NaN elsewhere
    return torch.where(
        near,
        torch.log(-torch.expm1(torch.where(near, x, -1.0))),
        torch.log1p(-torch.exp(torch.where(near, -1.0, x))),
    )


def binary_tv(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """The total variation between two policies over {this token, any other}.

        |π_θ(y_t) - π_other(y_t)|

    At most the total variation over the vocabulary.

    Args:
        logprobs: ``[*B, T]``, nats, at most 0.
        other_logprobs: ``[*B, T]``, nats, at most 0.

    Source: DPPO, https://arxiv.org/abs/2602.04879, eq. 13.

    >>> round(binary_tv(torch.tensor(0.5).log(), torch.tensor(0.2).log()).item(), 4)
    0.3
    """
    return (logprobs.exp() - other_logprobs.exp()).abs()


def binary_kl(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """The KL divergence of theta from another policy over {this token, any other}.

        μ log(μ/π) + (1 - μ) log((1 - μ)/(1 - π)),   π = π_θ(y_t), μ = π_other(y_t)

    At most KL(π_other ‖ π_θ) over the vocabulary.

    Args:
        logprobs: ``[*B, T]``, nats, at most 0.
        other_logprobs: ``[*B, T]``, nats, at most 0.

    Source: DPPO, https://arxiv.org/abs/2602.04879, eq. 14.

    >>> round(binary_kl(torch.tensor(0.5).log(), torch.tensor(0.2).log()).item(), 4)
    0.1927
    """
    mu = other_logprobs.exp()
    rest = (1 - mu) * (log1mexp(other_logprobs) - log1mexp(logprobs))
    return (mu * (other_logprobs - logprobs) + rest).clamp(min=0)


@checked("kl", finite=False)
def kl(estimator: Divergence, coef: float) -> Penalty:
    """A penalty on the divergence from the reference, ``coef`` times an estimator, for `policy_loss`.

    Args:
        estimator: `k1`, `k2`, `k3`, or any ``(logprobs, ref_logprobs) -> per-token``.
        coef: the factor, at least 0.

    Returns:
        ``(logprobs, batch) -> per-token penalty [*B, T]``, which reads ``ref_logprobs``.

    Raises:
        ValueError: ``coef`` is negative or not finite.
        MissingColumn: (when called) the batch lacks ``ref_logprobs`` or ``loss_mask``.

    >>> mask = torch.tensor([[False, True]])
    >>> batch = Batch({"loss_mask": mask, "ref_logprobs": torch.tensor([[0.0, -3.0]])}, batch_size=[1])
    >>> kl(k2, coef=0.5)(torch.tensor([[0.0, -1.0]]), batch).tolist()
    [[0.0, 1.0]]
    """
    not_negative("kl", "coef", coef)

    def kl(logprobs: Tensor, batch: Batch) -> Tensor:
        ref = masked_column(batch, "ref_logprobs", reader="kl")
        return coef * estimator(masked(logprobs, batch["loss_mask"]), ref)

    return kl


def importance_weighted(penalty: Penalty, ratio: Ratio = token_ratio) -> Penalty:
    """A penalty with importance weights, as if theta had sampled the tokens.

        r_t penalty_t,   r = exp(ratio)

    The gradient also flows through r. With `k1` or `k3` this gives the gradient of the reverse KL(π_θ ‖ π_ref), even
    for tokens of an older policy; neither estimator alone has that gradient.

    Args:
        penalty: ``kl(k3, coef)``, or any ``(logprobs, batch) -> per-token``.
        ratio: of theta to the policy that sampled: `token_ratio`, `rollout_ratio`, `on_policy_ratio`.

    Returns:
        ``(logprobs, batch) -> per-token penalty [*B, T]``, which reads the columns of both.

    Source: DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, eq. 7.

    >>> mask = torch.tensor([[True]])
    >>> old, ref = torch.tensor([[-2.0]]), torch.tensor([[-1.0]])
    >>> batch = Batch({"loss_mask": mask, "old_logprobs": old, "ref_logprobs": ref}, batch_size=[1])
    >>> penalty = importance_weighted(kl(k3, coef=1.0))
    >>> round(penalty(torch.tensor([[-1.0 + math.log(0.5)]]), batch).item(), 4)  # e/2 times 1 - log 2
    0.4171
    """

    def importance_weighted(logprobs: Tensor, batch: Batch) -> Tensor:
        return bounded(ratio(logprobs, batch)).exp() * penalty(logprobs, batch)

    return importance_weighted


class Controller(NamedTuple):
    """A coefficient that follows a measurement: two functions, whose state is the coefficient itself.

    Args:
        init: ``() -> coef``.
        update: ``(coef, kl, samples) -> coef``, the next one.

    >>> Controller(lambda: 0.1, lambda coef, kl, samples: coef).init()
    0.1
    """

    init: Callable[[], float]
    update: Callable[[float, float, int], float]


@checked("adaptive_kl", finite=False)
def adaptive_kl(init: float, target: float, horizon: float) -> Controller:
    """A coefficient of a KL penalty that grows while the KL is above its target, and shrinks while it is below.

        coef' = coef (1 + clamp(kl/target - 1, -0.2, 0.2) min(samples/horizon, 1))

    This reads the whole batch, so use it for a penalty in the rewards, on the driver. A KL that is NaN or infinite,
    such as that of a batch without a token, does not change the coefficient. The paper writes a constant for
    samples/horizon, which comes from its code.

    Args:
        init: the first coefficient, greater than 0; often 0.2.
        target: of the KL, in the unit in which ``update`` gets it: nats a row (6 in the paper) or nats a token.
        horizon: samples over which the coefficient changes by a fifth at most; often 10,000.

    Returns:
        ``(init, update)``, where ``update(coef, kl, samples)`` takes the KL measured over so many samples (rows).

    Raises:
        ValueError: an argument is not positive and finite.

    Source: Ziegler et al., https://arxiv.org/abs/1909.08593, section 2.2.

    >>> controller = adaptive_kl(init=0.2, target=6.0, horizon=10_000)
    >>> round(controller.update(controller.init(), 12.0, 512), 6)
    0.202048
    """
    for name, value in (("init", init), ("target", target), ("horizon", horizon)):
        positive("adaptive_kl", name, value)

    def update(coef: float, kl: float, samples: int) -> float:
        if not math.isfinite(kl):
            return coef
        return coef * (1 + min(max(kl / target - 1, -0.2), 0.2) * min(samples / horizon, 1))

    return Controller(lambda: init, update)
