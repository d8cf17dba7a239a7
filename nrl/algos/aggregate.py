"""Aggregates: per-token numbers to one `Mean`, ``(x, mask) -> Mean``.

Each adds up over rows and has a weight that depends on the mask alone, so the value is the same however a batch is
split. Masked tokens have no effect; a row without a token adds 0 to the total and 0 to the weight.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from nrl.algos.masking import masked
from nrl.reduce import Mean

__all__ = ["Aggregate", "seq_mean", "seq_sum", "token_mean"]

type Aggregate = Callable[[Tensor, Tensor], Mean]
"""``(x [*B, T], mask [*B, T]) -> Mean``: per-token numbers to one."""


def _sums(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and number of each row's tokens, in at least float32: half precision cannot count past 256."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return masked(x, mask).sum(-1, dtype=dtype), mask.sum(-1, dtype=dtype)


def token_mean(x: Tensor, mask: Tensor) -> Mean:
    """The mean over tokens: every token counts the same, so a long row counts more than a short one.

        Σ_i Σ_t x_{i,t} / Σ_i |y_i|

    Args:
        x: ``[*B, T]`` float.
        mask: ``[*B, T]`` bool.

    Returns:
        total: the sum over the mask's tokens; weight: how many there are.

    Source: DAPO, https://arxiv.org/abs/2503.14476, eq. 12.

    >>> mask = torch.tensor([[True, True, True], [True, False, False]])
    >>> [part.item() for part in token_mean(torch.tensor([[1.0, 2.0, 3.0], [8.0, 9.0, 9.0]]), mask)]
    [14.0, 4.0]
    """
    sums, counts = _sums(x, mask)
    return Mean(sums.sum(), counts.sum())


def seq_mean(x: Tensor, mask: Tensor) -> Mean:
    """The mean over rows of each row's mean: every row counts the same.

        1/B Σ_i 1/|y_i| Σ_t x_{i,t}

    Args:
        x: ``[*B, T]`` float.
        mask: ``[*B, T]`` bool.

    Returns:
        total: the sum of the rows' means; weight: the rows that have a token.

    Source: GRPO, https://arxiv.org/abs/2402.03300, eq. 3.

    >>> mask = torch.tensor([[True, True, True], [True, False, False]])
    >>> [part.item() for part in seq_mean(torch.tensor([[1.0, 2.0, 3.0], [8.0, 9.0, 9.0]]), mask)]
    [10.0, 2.0]
    """
    sums, counts = _sums(x, mask)
    return Mean((sums / counts.clamp(min=1)).sum(), (counts > 0).sum(dtype=sums.dtype))


def seq_sum(norm: float) -> Aggregate:
    """The mean over rows of each row's sum over a constant: a token counts the same in rows of any length.

        1/B Σ_i 1/L Σ_t x_{i,t}

    Args:
        norm: L > 0, in tokens; usually the longest completion that is allowed.

    Returns:
        An aggregate. total: the sum of the rows' sums over L; weight: the rows that have a token.

    Raises:
        ValueError: ``norm`` is not positive and finite.

    Source: Dr. GRPO, https://arxiv.org/abs/2503.20783, section 3.2.

    >>> mask = torch.tensor([[True, True, True], [True, False, False]])
    >>> [part.item() for part in seq_sum(norm=2)(torch.tensor([[1.0, 2.0, 3.0], [8.0, 9.0, 9.0]]), mask)]
    [7.0, 2.0]
    """
    if not 0 < norm < math.inf:
        raise ValueError(f"seq_sum: norm is {norm}; it must be positive and finite, such as the longest completion")

    def seq_sum(x: Tensor, mask: Tensor) -> Mean:
        sums, counts = _sums(x, mask)
        return Mean(sums.sum() / norm, (counts > 0).sum(dtype=sums.dtype))

    return seq_sum
