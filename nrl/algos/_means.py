"""The mean over the tokens of a row."""

from torch import Tensor

__all__ = ["row_means"]


def row_means(x: Tensor, mask: Tensor) -> Tensor:
    """Each row's mean over the mask's tokens: ``[*B, 1]``, 0 for a row without any.

    Args:
        x: ``[*B, T]``, 0 outside of the mask.
        mask: ``[*B, T]`` bool.

    >>> import torch
    >>> row_means(torch.tensor([[1.0, 0.0, 3.0]]), torch.tensor([[True, False, True]])).tolist()
    [[2.0]]
    """
    return x.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
