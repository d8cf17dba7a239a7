"""Estimators of the divergence from a reference, at each sampled token, and the penalty made of one.

As *values*, k1 and k3 are unbiased for the reverse KL(π_θ ‖ π_ref) under samples of π_θ. As terms of a *loss* they are
differentiated, and the gradient of an estimator need not estimate the gradient: each function says which it has.
Source: J. Schulman, Approximating KL divergence, http://joschu.net/blog/kl-approx.html; on the gradients,
https://arxiv.org/abs/2506.09477.
"""

import math
from collections.abc import Callable

import torch
from tensordict import TensorDict
from torch import Tensor

from nrl.algos.masking import masked, masked_column
from nrl.algos.ratios import bounded
from nrl.batch import Batch

__all__ = ["Divergence", "Penalty", "k1", "k2", "k3", "kl"]

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
    x is `bounded`: where the reference is more than e^20 times as likely there is no gradient.

    Args:
        logprobs: ``[*B, T]``, nats.
        ref_logprobs: ``[*B, T]``, nats.

    Source: J. Schulman, http://joschu.net/blog/kl-approx.html, k3; GRPO, https://arxiv.org/abs/2402.03300, eq. 4.

    >>> [round(x, 4) for x in k3(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -1.0])).tolist()]
    [0.0, 0.7183]
    """
    x = bounded(ref_logprobs - logprobs)
    return torch.expm1(x) - x


def kl(estimator: Divergence, coef: float) -> Penalty:
    """A penalty for leaving the reference, ``coef`` times a divergence, as an argument of `policy_loss`.

    Args:
        estimator: `k1`, `k2`, `k3`, or any ``(logprobs, ref_logprobs) -> per-token``.
        coef: what it is multiplied by, at least 0.

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
    if not 0 <= coef < math.inf:
        raise ValueError(f"kl: coef is {coef}; it must be finite and at least 0")

    def kl(logprobs: Tensor, batch: Batch) -> Tensor:
        ref = masked_column(batch, "ref_logprobs", reader="kl")
        return coef * estimator(masked(logprobs, batch["loss_mask"]), ref)

    return kl
