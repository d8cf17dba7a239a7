"""Tensors of which only shape and dtype are known, for a loss whose outputs are too large for the driver.

The weight of a loss is a function of the batch alone. So the driver can call a loss on outputs without numbers: what it
computes from the batch has numbers, and what it computes from such an output has none and takes neither memory nor
time.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

__all__ = ["ShapeTensor"]


class ShapeTensor(Tensor):
    """A float32 tensor on the CPU that has no numbers; what is computed with it has none either.

    Args:
        shape: that it has.

    Raises:
        NotImplementedError: where its numbers are looked at, by ``item()`` or an ``if``.

    >>> logits, mask = ShapeTensor((2, 5, 7)), torch.ones(2, 5, dtype=torch.bool)
    >>> torch.where(mask, logits.logsumexp(-1), 0).sum().shape, logits[mask].shape
    (torch.Size([]), torch.Size([10, 7]))
    """

    _meta: Tensor

    @staticmethod
    def __new__(cls, shape: tuple[int, ...]) -> "ShapeTensor":
        """Make one."""
        return _wrapped(torch.empty(shape, device="meta"))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute the shapes alone, with torch's own functions for meta tensors."""
        if func is torch.ops.aten.index.Tensor:  # how many entries a mask selects depends on its numbers
            args = args[0], [part for index in args[1] for part in _indices(index)]
        args, kwargs = tree_map(_without_numbers, (args, kwargs or {}))
        return tree_map(lambda x: _wrapped(x) if isinstance(x, Tensor) else x, func(*args, **kwargs))


def _wrapped(meta: Tensor) -> ShapeTensor:
    made: ShapeTensor = Tensor._make_wrapper_subclass(
        ShapeTensor, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=torch.device("cpu")
    )
    made._meta = meta
    return made


def _indices(index: Tensor | None) -> tuple[Tensor | None, ...]:
    if index is not None and not isinstance(index, ShapeTensor) and index.dtype == torch.bool:
        return index.nonzero(as_tuple=True)
    return (index,)


def _without_numbers(x: Any) -> Any:
    if isinstance(x, torch.device):
        return torch.device("meta")
    if isinstance(x, ShapeTensor):
        return x._meta
    return x.to("meta") if isinstance(x, Tensor) else x
