"""Corrections for tokens of another program: ``(log_ratio, mask) -> weight``, all ``[*B, T]``, without gradient.

An inference engine and a trainer with the same parameters do not compute the same probabilities. `policy_loss` gives a
correction the log-ratio old/rollout, or theta/rollout where the batch has no ``old_logprobs``, and multiplies each
token's loss by the weight. Tokens of weight 0 stay in the denominator. Bounds are ratios themselves, not distances
from 1.

Under top-k or top-p the sampler's distribution is not the trainer's but renormalised over what was kept: the mean ratio
is the kept mass rather than 1.
"""

import math
from collections.abc import Callable

from torch import Tensor

from nrl.algos._reductions import row_means
from nrl.algos.masking import masked
from nrl.algos.ratios import bounded
from nrl.arguments import checked
from nrl.errors import ArgumentError

__all__ = ["Correction", "icepop", "importance_mask", "sequence_mask", "sequence_truncate", "times", "truncate"]

type Correction = Callable[[Tensor, Tensor], Tensor]
"""``(log_ratio, mask) -> weight``, all ``[*B, T]``; `policy_loss` detaches it."""


def _ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    return bounded(masked(log_ratio.detach(), mask)).exp()


def _check_largest(reader: str, c: float) -> None:
    if not c > 0:
        raise ArgumentError(f"{reader}: c is {c}; it is the largest weight, so it must be greater than 0")


def _check_range(reader: str, low: float, high: float) -> None:
    if not 0 <= low < high <= math.inf:
        raise ArgumentError(f"{reader}: low is {low} and high is {high}; they are ratios, so 0 <= low < high must hold")


@checked("truncate", finite=False)
def truncate(c: float) -> Correction:
    """Truncated importance sampling (TIS).

        min(r, c),   r = exp(log_ratio)

    This bounds the upper end alone; implementations that also clamp small ratios are another method.

    Args:
        c: the largest weight, greater than 0; often 2.

    Returns:
        ``(log_ratio, mask) -> weight``, 0 outside the mask.

    Raises:
        ValueError: ``c`` is not positive.

    Source: F. Yao et al., Your efficient RL framework secretly brings you off-policy RL training (2025),
    https://fengyao.notion.site/off-policy-rl.

    >>> import torch
    >>> ratio = torch.tensor([[0.5, 1.0, 8.0]])
    >>> truncate(2.0)(ratio.log(), torch.ones(1, 3, dtype=torch.bool)).tolist()
    [[0.5, 1.0, 2.0]]
    """
    _check_largest("truncate", c)

    def truncate(log_ratio: Tensor, mask: Tensor) -> Tensor:
        return masked(_ratio(log_ratio, mask).clamp(max=c), mask)

    return truncate


@checked("icepop", finite=False)
def icepop(low: float, high: float) -> Correction:
    """Leave out tokens on which sampler and trainer disagree too much, on either side.

        r  where low <= r <= high,  0 elsewhere,   r = exp(log_ratio)

    Args:
        low: the smallest ratio that counts, at least 0; often 0.5.
        high: the largest, greater than ``low``; often 5. May be ``math.inf``.

    Returns:
        ``(log_ratio, mask) -> weight``, 0 outside the mask.

    Raises:
        ValueError: the bounds are negative or in the wrong order.

    Sources: Ring-1T, https://arxiv.org/abs/2510.18855; INTELLECT-3, https://arxiv.org/abs/2512.16144.

    >>> import torch
    >>> ratio = torch.tensor([[0.25, 1.0, 8.0]])
    >>> icepop(0.5, 5.0)(ratio.log(), torch.ones(1, 3, dtype=torch.bool)).tolist()
    [[0.0, 1.0, 0.0]]
    """
    _check_range("icepop", low, high)

    def icepop(log_ratio: Tensor, mask: Tensor) -> Tensor:
        ratio = _ratio(log_ratio, mask)
        return masked(ratio, mask & (low <= ratio) & (ratio <= high))

    return icepop


@checked("importance_mask", finite=False)
def importance_mask(c: float) -> Correction:
    """Masked importance sampling (MIS): leave out tokens whose ratio is too large, which `truncate` would bound.

        r  where r <= c,  0 elsewhere,   r = exp(log_ratio)

    The same as ``icepop(0, c)``.

    Args:
        c: the largest ratio that counts, greater than 0; often 2.

    Returns:
        ``(log_ratio, mask) -> weight``, 0 outside the mask.

    Raises:
        ValueError: ``c`` is not positive.

    Source: J. Liu, Y. Li et al., When speed kills stability (2025), https://richardli.xyz/rl-collapse.

    >>> import torch
    >>> ratio = torch.tensor([[0.25, 1.0, 8.0]])
    >>> importance_mask(2.0)(ratio.log(), torch.ones(1, 3, dtype=torch.bool)).tolist()
    [[0.25, 1.0, 0.0]]
    """
    if not c > 0:
        raise ArgumentError(f"importance_mask: c is {c}; it is the largest ratio that counts, so it must be positive")

    def importance_mask(log_ratio: Tensor, mask: Tensor) -> Tensor:
        ratio = _ratio(log_ratio, mask)
        return masked(ratio, mask & (ratio <= c))

    return importance_mask


@checked("sequence_truncate", finite=False)
def sequence_truncate(c: float) -> Correction:
    """Truncated importance sampling of whole rows (sequence TIS): the product over a row's tokens, at all of them.

        min(Π_t r_t, c),   r = exp(log_ratio)

    Some libraries give the same name to the geometric mean.

    Args:
        c: the largest weight, greater than 0; often 2.

    Returns:
        ``(log_ratio, mask) -> weight``, 0 outside the mask.

    Raises:
        ValueError: ``c`` is not positive.

    Source: J. Liu, Y. Li et al., When speed kills stability (2025), https://richardli.xyz/rl-collapse.

    >>> import torch
    >>> ratio = torch.tensor([[0.5, 0.5], [3.0, 2.0]])
    >>> sequence_truncate(2.0)(ratio.log(), torch.ones(2, 2, dtype=torch.bool)).tolist()
    [[0.25, 0.25], [2.0, 2.0]]
    """
    _check_largest("sequence_truncate", c)

    def sequence_truncate(log_ratio: Tensor, mask: Tensor) -> Tensor:
        sums = masked(log_ratio.detach(), mask).sum(-1, keepdim=True)
        return masked(bounded(sums).exp().clamp(max=c).expand(mask.shape), mask)

    return sequence_truncate


@checked("sequence_mask", finite=False)
def sequence_mask(low: float, high: float) -> Correction:
    """Leave out rows on which sampler and trainer disagree too much on the average of tokens.

        1  where low <= (Π_t r_t)^(1/|y|) <= high,  0 elsewhere,   r = exp(log_ratio)

    This only rejects: the rows that it keeps have weight 1. Use `times` to weigh them as well.

    Args:
        low: the smallest geometric mean that counts, at least 0; often 0.999.
        high: the largest, greater than ``low``; often 1.002. May be ``math.inf``.

    Returns:
        ``(log_ratio, mask) -> weight``, 0 outside the mask.

    Raises:
        ValueError: the bounds are negative or in the wrong order.

    Source: J. Liu, Y. Li et al., When speed kills stability (2025), https://richardli.xyz/rl-collapse, geometric
    sequence masking.

    >>> import torch
    >>> ratio = torch.tensor([[0.5, 2.0], [2.0, 2.0]])
    >>> sequence_mask(0.9, 1.1)(ratio.log(), torch.ones(2, 2, dtype=torch.bool)).tolist()
    [[1.0, 1.0], [0.0, 0.0]]
    """
    _check_range("sequence_mask", low, high)

    def sequence_mask(log_ratio: Tensor, mask: Tensor) -> Tensor:
        tokens = masked(log_ratio.detach(), mask)
        means = bounded(row_means(tokens, mask)).exp()
        is_kept = (low <= means) & (means <= high)
        return (mask & is_kept).to(tokens.dtype)

    return sequence_mask


def times(*corrections: Correction) -> Correction:
    """The product of several corrections, such as a weight and a rejection.

    Args:
        corrections: each ``(log_ratio, mask) -> weight``.

    >>> import torch
    >>> both = times(truncate(2.0), sequence_mask(0.5, 2.0))
    >>> both(torch.tensor([[4.0, 0.5], [4.0, 4.0]]).log(), torch.ones(2, 2, dtype=torch.bool)).tolist()
    [[2.0, 0.5], [0.0, 0.0]]
    """

    def times(log_ratio: Tensor, mask: Tensor) -> Tensor:
        weight = mask.to(log_ratio.dtype)
        for correction in corrections:
            weight = weight * correction(log_ratio, mask)
        return weight

    return times
