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
from nrl.runtime.ray.codec.ragged_codec import BatchLayout, UnpaddedBatch, decode_batch
from nrl.runtime.ray.codec.shared_memory import current_shared

__all__ = ["count_writes", "make_row_serializer", "reduce_value"]

_OUT_OF_BAND = 4096  # bytes; a tensor of this size or more travels beside the pickle


def reduce_value(value: Any) -> Any:
    """Reduce a tensor or a batch for pickle, with large data as a buffer; NotImplemented: any other value.

    >>> make, (data, *_) = reduce_value(torch.zeros(4096))
    >>> type(data)
    <class 'pickle.PickleBuffer'>
    >>> reduce_value(torch.float32)
    NotImplemented
    """
    if type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_quantized:
        return _reduce_tensor(value)
    if is_ragged(value):
        return _rebuild_ragged, tuple(part.detach() for part in parts_of(value))
    if type(value) is TensorDict:
        if value.is_locked and (unpadded := UnpaddedBatch.from_batch(value)) is not None:
            return _rebuild_batch, (unpadded.layout, pickle.PickleBuffer(unpadded.encode_rows()))
        return _rebuild_tensordict, (dict(value.items()), tuple(value.batch_size), value.is_locked)
    return NotImplemented


def make_row_serializer(batch: TensorDict) -> Callable[[Sequence[int] | None], list[Any]] | None:
    """Make a function that serializes rows of a batch (None: all) without padding; None: the batch has no padding.

    The rows arrive as a locked batch.
    """
    unpadded = UnpaddedBatch.from_batch(batch)
    if unpadded is None:
        return None
    head = pickle.dumps(_UnpaddedHead(unpadded.layout), protocol=5, buffer_callback=lambda _: None)
    return lambda index: [head, np.frombuffer(unpadded.encode_rows(index), dtype=np.uint8)]


def count_writes(batch: TensorDict) -> tuple[int, ...]:
    """Return how often each tensor of a batch has been written to, as torch counts it.

    >>> batch = TensorDict({"x": torch.zeros(2)}, [2])
    >>> before = count_writes(batch)
    >>> _ = batch["x"].add_(1)
    >>> count_writes(batch) == before
    False
    """
    leaves = [x for x in batch.values(include_nested=True, leaves_only=True) if isinstance(x, Tensor)]
    tensors = map(memory_of, leaves)
    return tuple(x._version for x in tensors if not x.is_inference())


def _rebuild_tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...], parameter: bool, grad: bool) -> Tensor:
    if 0 in shape:
        tensor = torch.empty(shape, dtype=dtype)
    elif isinstance(data, bytes) or (shared := current_shared()) is None:
        tensor = torch.frombuffer(bytearray(data), dtype=dtype).view(shape)
    else:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            tensor = torch.frombuffer(data, dtype=dtype).view(shape)
        shared.tensors.append(tensor)
    if parameter:
        return nn.Parameter(tensor, requires_grad=grad)
    return tensor.requires_grad_() if grad else tensor


def _reduce_tensor(tensor: Tensor) -> Any:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    flat = flat_bytes(plain).numpy()
    data = pickle.PickleBuffer(flat) if flat.nbytes >= _OUT_OF_BAND else flat.tobytes()
    parameter = isinstance(tensor, nn.Parameter)
    return _rebuild_tensor, (
        data,
        tensor.dtype,
        tuple(tensor.shape),
        parameter,
        tensor.requires_grad and tensor.is_leaf,
    )


def _rebuild_ragged(values: Tensor, offsets: Tensor) -> Tensor:
    return of_values(values, offsets)


@attrs.frozen
class _UnpaddedHead:
    """The head of a pickled batch with this layout; its rows are the buffer beside the pickle."""

    layout: BatchLayout

    def __reduce__(self) -> Any:
        return _rebuild_batch, (self.layout, pickle.PickleBuffer(b""))


def _rebuild_batch(layout: BatchLayout, data: Any) -> TensorDict:
    shared = current_shared()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        batch = decode_batch(layout, bytearray(data) if shared is None else data)
    if shared is not None:
        leaves: Any = batch.values(include_nested=True, leaves_only=True)
        shared.tensors.extend(map(memory_of, leaves))
    return batch


def _rebuild_tensordict(items: dict[str, Any], batch_size: Sequence[int], locked: bool) -> TensorDict:
    batch = TensorDict(items, batch_size=batch_size)
    return batch.lock_() if locked else batch
