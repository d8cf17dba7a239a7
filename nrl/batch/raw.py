"""The bytes of a tensor."""

import torch
from torch import Tensor

__all__ = ["flat_bytes"]


def flat_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor in the order of its entries; they share its memory if it is contiguous.

    Args:
        tensor: of any shape and dtype, on any device, without gradients.

    Returns:
        ``[n]`` uint8.

    >>> flat_bytes(torch.ones(1, 3)[:, 1]).tolist()
    [0, 0, 128, 63]
    """
    plain = tensor.contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)  # A single entry is contiguous for every stride.
