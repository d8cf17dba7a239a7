"""Links: the loss on a difference of two scores, ``margin [P] -> loss [P]``, element by element.

All are finite, and have finite gradients, at any finite margin (the square up to 1e19 in float32).
"""

import math
from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import logsigmoid

from nrl.algos._arguments import not_negative, positive, smoothing_below_half
from nrl.arguments import checked
from nrl.errors import ArgumentError

__all__ = ["Link", "hinge", "log_sigmoid", "robust_log_sigmoid", "squared"]

type Link = Callable[[Tensor], Tensor]
"""``margin [P] -> loss [P]``, element by element."""


@checked("log_sigmoid", finite=False)
def log_sigmoid(margin: float = 0.0, smoothing: float = 0.0) -> Link:
    """The negative log-likelihood of a preference under the model of Bradley and Terry, with a margin to reach.

        -(1 - ε) log σ(m - γ) - ε log σ(γ - m)

    Args:
        margin: γ >= 0, subtracted from the difference.
        smoothing: ε in [0, 0.5), the probability that a label is wrong. The loss is least where
            σ(m - γ) = 1 - ε, so the difference is not driven to infinity.

    Returns:
        A link; log 2 at m = γ.

    Raises:
        ValueError: ``margin`` is negative or not finite, or ``smoothing`` is not in [0, 0.5).

    Source: DPO, https://arxiv.org/abs/2305.18290, eq. 7; ε: E. Mitchell, A note on DPO with noisy preferences and
    relationship to IPO (2023), https://ericmitchell.ai/cdpo.pdf, eq. 3; γ: SimPO, https://arxiv.org/abs/2405.14734,
    eq. 6.

    >>> import torch
    >>> [round(x, 4) for x in log_sigmoid(margin=1.0)(torch.tensor([1.0, 3.0])).tolist()]
    [0.6931, 0.1269]
    """
    not_negative("log_sigmoid", "margin", margin)
    smoothing_below_half("log_sigmoid", smoothing)

    def log_sigmoid(difference: Tensor) -> Tensor:
        beyond = difference - margin
        return -(1 - smoothing) * logsigmoid(beyond) - smoothing * logsigmoid(-beyond)

    return log_sigmoid


@checked("robust_log_sigmoid", finite=False)
def robust_log_sigmoid(smoothing: float) -> Link:
    """A negative log-likelihood for labels flipped at random: on average it is that of the right labels.

        [-(1 - ε) log σ(m) + ε log σ(-m)] / (1 - 2 ε)

    It has no lower bound: each nat of a large difference gains ε / (1 - 2 ε).

    Args:
        smoothing: ε in [0, 0.5), how probable it is that a label is wrong.

    Returns:
        A link; log 2 at m = 0.

    Raises:
        ValueError: ``smoothing`` is not in [0, 0.5).

    Source: https://arxiv.org/abs/2403.00409, section 3.1.

    >>> import torch
    >>> [round(x, 4) for x in robust_log_sigmoid(0.1)(torch.tensor([0.0, 2.0])).tolist()]
    [0.6931, -0.1231]
    """
    smoothing_below_half("robust_log_sigmoid", smoothing)

    def robust_log_sigmoid(difference: Tensor) -> Tensor:
        right, wrong = logsigmoid(difference), logsigmoid(-difference)
        return (smoothing * wrong - (1 - smoothing) * right) / (1 - 2 * smoothing)

    return robust_log_sigmoid


@checked("squared", finite=False)
def squared(target: float) -> Link:
    """The squared distance of a difference from its target.

        (m - target)²

    Args:
        target: finite.

    Returns:
        A link.

    Raises:
        ValueError: ``target`` is not finite.

    Source: IPO, https://arxiv.org/abs/2310.12036, eq. 17.

    >>> import torch
    >>> squared(2.0)(torch.tensor([0.0, 2.0, 5.0])).tolist()
    [4.0, 0.0, 9.0]
    """
    if not math.isfinite(target):
        raise ArgumentError(f"squared: target is {target}; it must be finite")

    def squared(difference: Tensor) -> Tensor:
        return (difference - target).square()

    return squared


@checked("hinge", finite=False)
def hinge(margin: float = 1.0) -> Link:
    """The shortfall of a difference from a margin; beyond the margin, loss and gradient are 0.

        max(0, δ - m)

    Args:
        margin: δ > 0.

    Returns:
        A link.

    Raises:
        ValueError: ``margin`` is not positive and finite.

    Source: SLiC-HF, https://arxiv.org/abs/2305.10425, section 2.

    >>> import torch
    >>> hinge()(torch.tensor([-1.0, 0.0, 3.0])).tolist()
    [2.0, 1.0, 0.0]
    """
    positive("hinge", "margin", margin)

    def hinge(difference: Tensor) -> Tensor:
        return (margin - difference).relu()

    return hinge
