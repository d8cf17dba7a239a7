"""Reductions of per-token numbers that several losses share: the mean of each row, and the largest of all."""

import math

import torch
from torch import Tensor

from nrl.reduce import Max

__all__ = ["row_means", "token_max"]


def row_means(x: Tensor, mask: Tensor) -> Tensor:
    """Each row's mean over the mask's tokens: ``[*B, 1]``, 0 for a row without any.

    Args:
        x: ``[*B, T]``, 0 outside the mask.
        mask: ``[*B, T]`` bool.

    >>> row_means(torch.tensor([[1.0, 0.0, 3.0]]), torch.tensor([[True, False, True]])).tolist()
    [[2.0]]
    """
    return x.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def token_max(x: Tensor, mask: Tensor) -> Max:
    """The largest number of the mask's tokens, for metrics; minus infinity if there are none.

    >>> token_max(torch.tensor([[1.0, 9.0]]), torch.tensor([[True, False]])).value.item()
    1.0
    """
    none = x.new_full((1,), -math.inf)
    return Max(torch.cat([none, torch.where(mask, x, -math.inf).flatten()]).max())
