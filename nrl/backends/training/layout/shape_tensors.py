"""Tensors of which only shape and dtype are known, for a loss whose outputs are too large for the driver.

The weight of a loss is a function of the batch alone. So the driver can call a loss on outputs without numbers: what it
computes from the batch has numbers, and what it computes from such an output has none and takes neither memory nor
time.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

__all__ = ["NoNumbers", "ShapeTensor", "needs_numbers"]

_OUTSIDE = ("ShapeTensor.__format__", "tensor subclasses", "data is not allocated", "python storage")
"""Parts of what torch and Python say where numbers are looked at outside of `ShapeTensor.__torch_dispatch__`."""


class NoNumbers(NotImplementedError):
    """An operation on a `ShapeTensor` needs its numbers. Nothing else raises it."""


def needs_numbers(error: Exception) -> bool:
    """Return whether an error says that the numbers of a `ShapeTensor` were looked at, by ``numpy()`` for example.

    >>> try:
    ...     f"{ShapeTensor(()):.3f}"
    ... except TypeError as error:
    ...     needs_numbers(error), needs_numbers(TypeError("a mistake of the loss"))
    (True, False)
    """
    outside = isinstance(error, RuntimeError | TypeError) and any(part in str(error) for part in _OUTSIDE)
    return outside or isinstance(error, NoNumbers)


class ShapeTensor(Tensor):
    """A float32 tensor on the CPU without numbers; results computed with it have no numbers either.

    Args:
        shape: of the tensor.

    Raises:
        NoNumbers: where its numbers are looked at, by ``item()`` or an ``if``, or where torch knows no shape without
            them, as of the entries that such a tensor selects; but see `needs_numbers` for what is no operation.

    >>> logits, mask = ShapeTensor((2, 5, 7)), torch.ones(2, 5, dtype=torch.bool)
    >>> torch.where(mask, logits.logsumexp(-1), 0).sum().shape, logits[mask].shape
    (torch.Size([]), torch.Size([10, 7]))
    """

    _meta: Tensor

    @staticmethod
    def __new__(cls, shape: tuple[int, ...]) -> "ShapeTensor":
        """Make one."""
        return _wrap(torch.empty(shape, device="meta"))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute the shapes alone, with torch's own functions for meta tensors."""
        if func is torch.ops.aten.index.Tensor:  # how many entries a mask selects depends on its numbers
            args = args[0], [part for index in args[1] for part in _indices(index)]
        args, kwargs = tree_map(_without_numbers, (args, kwargs or {}))
        try:
            computed = func(*args, **kwargs)
        except RuntimeError as error:  # also of shapes that do not fit, which is the loss's own
            if isinstance(error, NotImplementedError) or "meta" in str(error).lower():
                raise NoNumbers(str(error)) from error
            raise
        return tree_map(lambda x: _wrap(x) if isinstance(x, Tensor) else x, computed)


def _wrap(meta: Tensor) -> ShapeTensor:
    wrapper: ShapeTensor = Tensor._make_wrapper_subclass(
        ShapeTensor, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=torch.device("cpu")
    )
    wrapper._meta = meta
    return wrapper


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
