"""Pickling tensors, and batches of them: the part of `nrl.runtime.ray.codec.pickling` that needs torch."""

import pickle
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from nrl.batch.ragged import is_ragged, memory_of, of_values, parts_of
from nrl.batch.raw import flat_bytes
from nrl.runtime.ray.codec.ragged_codec import BatchLayout, Unpadded, padded
from nrl.runtime.ray.codec.shared_memory import opening

__all__ = ["reduced", "rows_serializer", "written"]

_BESIDE = 4096  # bytes; a tensor of this size or more travels beside the pickle


def reduced(value: Any) -> Any:
    """How a tensor or a batch is pickled, with its data as a buffer, if it is large; NotImplemented: as anything else.

    >>> make, (data, *_) = reduced(torch.zeros(4096))
    >>> type(data)
    <class 'pickle.PickleBuffer'>
    >>> reduced(torch.float32)
    NotImplemented
    """
    if type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_quantized:
        return _reduced(value)
    if is_ragged(value):
        return _ragged, tuple(part.detach() for part in parts_of(value))
    if type(value) is TensorDict:
        if value.is_locked and (found := Unpadded.of(value)) is not None:
            return _batch, (found.layout, pickle.PickleBuffer(found.rows()))
        return _tensordict, (dict(value.items()), tuple(value.batch_size), value.is_locked)
    return NotImplemented


def rows_serializer(batch: TensorDict) -> Callable[[Sequence[int] | None], list[Any]] | None:
    """A function that serializes some rows of a batch (None: all) without padding; None: the batch has no padding.

    The rows arrive as a locked batch.
    """
    found = Unpadded.of(batch)
    if found is None:
        return None
    head = pickle.dumps(_UnpaddedHead(found.layout), protocol=5, buffer_callback=lambda _: None)
    return lambda index: [head, np.frombuffer(found.rows(index), dtype=np.uint8)]


def written(batch: TensorDict) -> tuple[int, ...]:
    """How often each tensor of a batch has been written to, as torch counts it.

    >>> batch = TensorDict({"x": torch.zeros(2)}, [2])
    >>> before = written(batch)
    >>> _ = batch["x"].add_(1)
    >>> written(batch) == before
    False
    """
    leaves = [x for x in batch.values(include_nested=True, leaves_only=True) if isinstance(x, Tensor)]
    tensors = map(memory_of, leaves)
    return tuple(x._version for x in tensors if not x.is_inference())


def _tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...], parameter: bool, grad: bool) -> Tensor:
    if 0 in shape:
        tensor = torch.empty(shape, dtype=dtype)
    elif isinstance(data, bytes) or (held := opening()) is None:
        tensor = torch.frombuffer(bytearray(data), dtype=dtype).view(shape)
    else:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            tensor = torch.frombuffer(data, dtype=dtype).view(shape)
        held.tensors.append(tensor)
    if parameter:
        return nn.Parameter(tensor, requires_grad=grad)
    return tensor.requires_grad_() if grad else tensor


def _reduced(tensor: Tensor) -> Any:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    flat = flat_bytes(plain).numpy()
    data = pickle.PickleBuffer(flat) if flat.nbytes >= _BESIDE else flat.tobytes()
    parameter = isinstance(tensor, nn.Parameter)
    return _tensor, (data, tensor.dtype, tuple(tensor.shape), parameter, tensor.requires_grad and tensor.is_leaf)


def _ragged(values: Tensor, offsets: Tensor) -> Tensor:
    return of_values(values, offsets)


@attrs.frozen
class _UnpaddedHead:
    """Pickles as a batch of this layout; the rows themselves are the buffer beside the pickle."""

    layout: BatchLayout

    def __reduce__(self) -> Any:
        return _batch, (self.layout, pickle.PickleBuffer(b""))


def _batch(layout: BatchLayout, data: Any) -> TensorDict:
    held = opening()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        made = padded(layout, bytearray(data) if held is None else data)
    if held is not None:
        leaves: Any = made.values(include_nested=True, leaves_only=True)
        held.tensors.extend(map(memory_of, leaves))
    return made


def _tensordict(items: dict[str, Any], batch_size: Sequence[int], locked: bool) -> TensorDict:
    made = TensorDict(items, batch_size=batch_size)
    return made.lock_() if locked else made
