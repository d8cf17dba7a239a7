"""Serializing values for other processes: pickled, with tensors beside the pickle.

A serialized value is a list: a pickle, and a buffer for each large tensor. Ray puts buffers into shared memory, which
every process of a node reads without a copy. That memory is mapped writable, so a write into it would change the
tensors of others and raise nothing. `deserialized` tells which tensors lie there, and `Shared.check` finds a write by
torch's version counters. Batches travel without their padding: see `nrl.runtime.ray.unpadded`.
"""

import io
import os
import pickle
import sys
import sysconfig
import threading
import types
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import cloudpickle
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from nrl.batch.ragged import is_ragged, memory_of, of_values, parts_of
from nrl.batch.raw import flat_bytes
from nrl.errors import MutatedBatch, ShippingError
from nrl.runtime.ray.unpadded import BatchLayout, Unpadded, padded

__all__ = ["Serialized", "Shared", "deserialized", "rows_serializer", "serialized", "size", "written"]

type Serialized = list[Any]
"""A pickle, and the buffers beside it."""

_BESIDE = 4096  # bytes; a tensor of this size or more travels beside the pickle


def serialized(value: Any, who: str) -> Serialized:
    """A value as bytes and buffers.

    Functions and classes of the user's own modules and packages travel by value, so no other process needs to be able
    to import them; those of installed packages by name. Tensors of other devices arrive on the CPU.

    Args:
        value: to be sent.
        who: how errors name the call.

    Raises:
        ShippingError: something in it cannot be sent; the message names the object and the reason.

    >>> value, _ = deserialized(serialized({"x": torch.arange(3)}, "example"))
    >>> value["x"].tolist()
    [0, 1, 2]
    """
    _send_by_value()
    file = io.BytesIO()
    buffers: list[Any] = []
    try:
        _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
    except Exception as error:  # objects raise all kinds when they are pickled
        raise ShippingError(f"{who}: {_culprit(value, error)}") from error
    arrays = [np.frombuffer(buffer.raw(), dtype=np.uint8) for buffer in buffers]
    return [file.getvalue(), *arrays]


def rows_serializer(batch: TensorDict) -> Callable[[Sequence[int] | None], Serialized] | None:
    """A function that serializes some rows of a batch (None: all) without padding; None: the batch has no padding.

    The rows arrive as a locked batch.
    """
    found = Unpadded.of(batch)
    if found is None:
        return None
    head = pickle.dumps(_UnpaddedHead(found.layout), protocol=5, buffer_callback=lambda _: None)
    return lambda index: [head, np.frombuffer(found.rows(index), dtype=np.uint8)]


def size(parts: Serialized) -> int:
    """The size of a serialized value in bytes."""
    return sum(len(part) for part in parts)


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


@attrs.frozen
class Shared:
    """Tensors in memory that other processes read."""

    tensors: list[Tensor]

    def check(self, who: str) -> None:
        """Raise if a function has written into one of them.

        Raises:
            MutatedBatch: it has.
        """
        if any(tensor._version for tensor in self.tensors):
            raise MutatedBatch(
                f"{who} wrote into its arguments, which lie in memory that other processes read; batches are values: "
                "use an out-of-place operation, or clone the column first"
            )


def deserialized(parts: Serialized | bytes, *, copy: bool = False) -> tuple[Any, Shared]:
    """The inverse of `serialized`.

    Args:
        parts: of a value; bytes alone are a pickle without buffers.
        copy: take the tensors out of the buffers.

    Returns:
        The value, and those of its tensors that lie in the buffers.

    >>> value, shared = deserialized(serialized(torch.zeros(4096), "example"))
    >>> len(shared.tensors)
    1
    """
    held = Shared([])
    before, _OPENING.now = getattr(_OPENING, "now", None), None if copy else held
    data, *buffers = [parts] if isinstance(parts, bytes) else parts
    try:
        return pickle.loads(data, buffers=buffers), held
    finally:
        _OPENING.now = before


_OPENING = threading.local()


def _tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...], parameter: bool, grad: bool) -> Tensor:
    if 0 in shape:
        tensor = torch.empty(shape, dtype=dtype)
    elif isinstance(data, bytes) or getattr(_OPENING, "now", None) is None:
        tensor = torch.frombuffer(bytearray(data), dtype=dtype).view(shape)
    else:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            tensor = torch.frombuffer(data, dtype=dtype).view(shape)
        _OPENING.now.tensors.append(tensor)
    if parameter:
        return nn.Parameter(tensor, requires_grad=grad)
    return tensor.requires_grad_() if grad else tensor


def _reduced(tensor: Tensor) -> Any:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    flat = flat_bytes(plain).numpy()
    data = pickle.PickleBuffer(flat) if flat.nbytes >= _BESIDE else flat.tobytes()
    parameter = isinstance(tensor, nn.Parameter)
    return _tensor, (data, tensor.dtype, tuple(tensor.shape), parameter, tensor.requires_grad and tensor.is_leaf)


@attrs.frozen
class _UnpaddedHead:
    """Pickles as a batch of this layout; the rows themselves are the buffer beside the pickle."""

    layout: BatchLayout

    def __reduce__(self) -> Any:
        return _batch, (self.layout, pickle.PickleBuffer(b""))


def _batch(layout: BatchLayout, data: Any) -> TensorDict:
    now = getattr(_OPENING, "now", None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        made = padded(layout, bytearray(data) if now is None else data)
    if now is not None:
        leaves: Any = made.values(include_nested=True, leaves_only=True)
        now.tensors.extend(map(memory_of, leaves))
    return made


def _tensordict(items: dict[str, Any], batch_size: Sequence[int], locked: bool) -> TensorDict:
    made = TensorDict(items, batch_size=batch_size)
    return made.lock_() if locked else made


class _Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    """Functions and classes by value where they have to be, tensors as buffers."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) in (Tensor, nn.Parameter) and obj.layout is torch.strided and not obj.is_quantized:
            return _reduced(obj)
        if is_ragged(obj):
            return of_values, tuple(part.detach() for part in parts_of(obj))
        if type(obj) is TensorDict:
            if obj.is_locked and (found := Unpadded.of(obj)) is not None:
                return _batch, (found.layout, pickle.PickleBuffer(found.rows()))
            return _tensordict, (dict(obj.items()), tuple(obj.batch_size), obj.is_locked)
        return super().reducer_override(obj)


_SEEN: set[str] = set()


def _send_by_value() -> None:
    """Let the user's own modules travel by value, since no environment has them installed."""
    if _SEEN.issuperset(sys.modules):
        return
    for name in sys.modules.keys() - _SEEN:
        _SEEN.add(name)
        module = sys.modules[name]
        if isinstance(module, types.ModuleType) and name != "__main__" and _own(module):
            cloudpickle.register_pickle_by_value(module)


_INSTALLED = tuple(
    f"{Path(sysconfig.get_path(name)).resolve()}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib")
)


def _own(module: types.ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    if not file or module.__name__.partition(".")[0] == "nrl" or not file.endswith(".py"):
        return False
    path = str(Path(file).resolve())
    return not path.startswith(_INSTALLED) and "site-packages" not in path and "dist-packages" not in path


def _culprit(value: Any, error: Exception) -> str:
    """Which object cannot be sent, how it is reached, and why."""
    path, found, why = _search(value, [], error, set())
    where = " -> ".join(path).rstrip(",")
    kind = f"{type(found).__module__}.{type(found).__qualname__}"
    reached = f", which is reached through {where}," if where else ""
    return (
        f"an object of type {kind}{reached} cannot be sent to another process: {why}. Create it inside of the function "
        "that runs there, or pass what it is made from"
    )


def _search(value: Any, path: list[str], error: Exception, seen: set[int]) -> tuple[list[str], Any, Exception]:
    """The innermost part of a value that cannot be pickled alone."""
    if len(path) < 8 and id(value) not in seen:
        seen.add(id(value))
        for name, part in _parts(value):
            try:
                _Pickler(io.BytesIO(), protocol=5, buffer_callback=lambda _: None).dump(part)
            except Exception as inner:
                return _search(part, [*path, name], inner, seen)
    return path, value, error


def _parts(value: Any) -> list[tuple[str, Any]]:
    match value:
        case types.FunctionType():
            names = value.__code__.co_freevars
            cells = [(name, cell) for name, cell in zip(names, value.__closure__ or (), strict=True)]
            captured = [(f"'{name}' of {value.__qualname__}", _content(cell)) for name, cell in cells]
            used = {name: value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__}
            if value.__module__ in sys.modules and not _travels(value.__module__):
                used = {}
            return captured + [(f"'{name}', a global of {value.__qualname__},", part) for name, part in used.items()]
        case types.MethodType():
            return [(f"self of {value.__qualname__}", value.__self__)]
        case dict():
            return [(f"[{key!r}]", part) for key, part in value.items()]
        case list() | tuple() | set() | frozenset():
            return [(f"[{index}]", part) for index, part in enumerate(value)]
        case _ if hasattr(value, "func") and hasattr(value, "args") and hasattr(value, "keywords"):  # a partial
            return [("its function", value.func), ("its arguments", value.args), ("its arguments", value.keywords)]
        case _ if _refuses(value):
            return []
        case _:
            return [(f".{key}", part) for key, part in getattr(value, "__dict__", {}).items()]


def _refuses(value: Any) -> bool:
    """Whether an object's own class says that it cannot be sent, whatever it is made of."""
    if isinstance(type(value).__reduce__, types.FunctionType):
        try:
            value.__reduce__()
        except Exception:
            return True
    return False


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _travels(module: str) -> bool:
    return module == "__main__" or _own(sys.modules[module])
