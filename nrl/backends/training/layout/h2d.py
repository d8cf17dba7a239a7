"""Tensors on their way to a device: all of a micro-batch in one copy, for which the host does not wait."""

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

__all__ = ["copy_to_device", "pack_tensors", "unpack_tensors"]

_ALIGNED = 16  # bytes, as much as any dtype wants


def copy_to_device[T](tree: T, device: torch.device) -> T:
    """Copy the tensors of a tree to a device.

    All go in one copy, from pinned memory, which torch keeps for the next one. The host does not wait: on a GPU it
    plans a micro-batch while the last one computes.

    Args:
        tree: of tuples, dictionaries, named tuples and batches; only its tensors are copied.
        device: the target. On a CPU nothing is copied.

    >>> copy_to_device({"ids": torch.tensor([1, 2]), "rows": None}, torch.device("cpu"))
    {'ids': tensor([1, 2]), 'rows': None}
    """
    if device.type == "cpu":
        return tree
    buffer, tensors = pack_tensors(tree, pinned=device.type == "cuda")
    return unpack_tensors(tree, tensors, buffer.to(device, non_blocking=True))


def pack_tensors(tree: Any, pinned: bool) -> tuple[Tensor, list[Tensor]]:
    """Return the bytes of all dense tensors of a tree that are on the CPU, one after the other, and these tensors.

    Args:
        tree: as in `copy_to_device`.
        pinned: whether the memory is pinned.
    """
    tensors = [x for x in _leaves(tree)[0] if _travels(x)]
    buffer = torch.empty(sum(map(_room, tensors)), dtype=torch.uint8, pin_memory=pinned)
    for x, room in zip(tensors, buffer.split([_room(x) for x in tensors]), strict=True):
        room[: x.nbytes].view(x.dtype).view(x.shape).copy_(x)
    return buffer, tensors


def unpack_tensors[T](tree: T, tensors: list[Tensor], buffer: Tensor) -> T:
    """Return the tree with the tensors in a buffer.

    Args:
        tree: of which the buffer was made.
        tensors: those of `pack_tensors`.
        buffer: a copy of that of `pack_tensors`, anywhere.
    """
    places = buffer.split([_room(x) for x in tensors])
    copies = iter([p[: x.nbytes].view(x.dtype).view(x.shape) for x, p in zip(tensors, places, strict=True)])
    leaves, form = _leaves(tree)
    moved = [next(copies) if _travels(x) else x.to(buffer.device) if isinstance(x, Tensor) else x for x in leaves]
    result: T = tree_unflatten(moved, form)
    for before, after in zip(_batches(tree), _batches(result), strict=True):
        if before.is_locked:  # A loss may not write into a locked batch on any device.
            after.lock_()
    return result


def _leaves(tree: Any) -> tuple[list[Any], Any]:
    # A flattened torch.Size would come back as a tuple.
    return tree_flatten(tree, is_leaf=lambda x: isinstance(x, torch.Size))


def _batches(tree: Any) -> list[TensorDictBase]:
    leaves = tree_leaves(tree, is_leaf=lambda x: isinstance(x, TensorDictBase))
    return [x for x in leaves if isinstance(x, TensorDictBase)]


def _travels(x: Any) -> bool:
    return isinstance(x, Tensor) and not x.is_nested and x.device.type == "cpu"


def _room(x: Tensor) -> int:
    return -(-x.nbytes // _ALIGNED) * _ALIGNED
