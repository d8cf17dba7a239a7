"""Masking per-token tensors, so that nothing outside the mask has an effect.

Positions outside the mask may hold anything, NaN included. It is not enough to zero a *result* there, because the
gradient of the arithmetic before it would still be NaN times zero. So these functions zero inputs before the
arithmetic.
"""

import torch
from tensordict import TensorDict
from torch import Tensor

from nrl.batch import require
from nrl.errors import BatchError

__all__ = ["masked", "masked_column"]


def masked(x: Tensor, mask: Tensor) -> Tensor:
    """``x`` where ``mask`` is true and 0 elsewhere, in value and gradient, whatever ``x`` holds there.

    Args:
        x: ``[*B, T]``, any dtype.
        mask: bool, of the same shape.

    Raises:
        BatchError: the shapes differ (nothing is broadcast), or ``mask`` is not bool.

    >>> masked(torch.tensor([1.0, float("nan")]), torch.tensor([True, False])).tolist()
    [1.0, 0.0]
    """
    if x.shape != mask.shape:
        raise BatchError(
            f"masked: x has shape {list(x.shape)} and the mask {list(mask.shape)}; they must be the same, one number a "
            "token (for a number a row, x.unsqueeze(-1).expand_as(mask))"
        )
    if mask.dtype != torch.bool:
        raise BatchError(f"masked: the mask has dtype {mask.dtype}; it must be bool (convert it with .bool())")
    return torch.where(mask, x, 0)


def masked_column(batch: TensorDict, column: str, reader: str) -> Tensor:
    """A per-token column as a constant, 0 where ``loss_mask`` is false; every part of a loss reads the batch by it.

    Args:
        batch: has ``loss_mask`` and ``column``, both ``[*B, T]``.
        column: the name of the column.
        reader: who reads it, as a user would name it; for the error.

    Raises:
        MissingColumn: the batch lacks a column.

    >>> mask = torch.tensor([[False, True]])
    >>> batch = TensorDict({"loss_mask": mask, "values": torch.tensor([[7.0, 5.0]])}, batch_size=[1])
    >>> masked_column(batch, "values", reader="my_loss").tolist()
    [[0.0, 5.0]]
    """
    require(batch, column, "loss_mask", reader=reader)
    return masked(batch[column].detach(), batch["loss_mask"])
