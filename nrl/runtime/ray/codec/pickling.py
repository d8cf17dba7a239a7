"""Serializing values for other processes: pickled, with tensors beside the pickle.

A serialized value is a list: a pickle, and a buffer for each large tensor. Ray puts buffers into shared memory, which
every process of a node reads without a copy. That memory is mapped writable, so a write into it would silently change
the tensors of others. `deserialize` returns the tensors in it, and `SharedTensors.check` finds a write by torch's
version counters. Batches travel without their padding: see `nrl.runtime.ray.codec.ragged_codec`. The code for tensors
is in `nrl.runtime.ray.codec.tensors`, which a process imports with its first tensor: a process without tensors needs no
torch.
"""

import functools
import io
import os
import pickle
import sys
import sysconfig
import types
from importlib import metadata
from pathlib import Path
from typing import Any

import cloudpickle

from nrl.errors import ExecutableError, ShippingError
from nrl.runtime.ray.codec.shared_memory import SharedTensors, track_shared

__all__ = ["Serialized", "deserialize", "holds_tensors", "num_bytes", "serialize"]

type Serialized = list[Any]
"""A pickle, and the buffers beside it."""

_HAVE_TENSORS = frozenset({"torch", "tensordict"})
_MODULE_OF_TENSORS = (
    b"nrl.runtime.ray.codec.tensors"  # Its functions rebuild tensors, so its name stands in their pickles.
)


def serialize(value: Any, caller: str) -> Serialized:
    """Serialize a value as bytes and buffers.

    Functions and classes of the user's own modules and packages travel by value, so no other process needs to be able
    to import them; those of installed packages by name. Tensors of other devices arrive on the CPU.

    Args:
        value: to be sent.
        caller: how errors name the call.

    Raises:
        ShippingError: something in it cannot be sent; the message names the object and the reason.

    >>> import torch
    >>> value, _ = deserialize(serialize({"x": torch.arange(3)}, "example"))
    >>> value["x"].tolist()
    [0, 1, 2]
    """
    _send_by_value()
    file = io.BytesIO()
    buffers: list[Any] = []
    try:
        _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
    except ExecutableError:  # An environment cannot be sent.
        raise
    except Exception as error:  # objects raise all kinds when they are pickled
        raise ShippingError(f"{caller}: {_describe_culprit(value, error)}") from error
    return [file.getvalue(), *map(_as_array, buffers)]


def _as_array(buffer: pickle.PickleBuffer) -> Any:
    """Return the bytes of a buffer as an array, of which Ray makes no copy."""
    import numpy as np

    return np.frombuffer(buffer.raw(), dtype=np.uint8)


def num_bytes(parts: Serialized) -> int:
    """Return the size of a serialized value in bytes."""
    return sum(len(part) for part in parts)


def holds_tensors(data: bytes) -> bool:
    """Return whether a pickle made by `serialize` holds tensors, so that opening it imports torch.

    >>> import torch
    >>> [holds_tensors(serialize(value, "example")[0]) for value in ([1, "torch"], [torch.zeros(2)])]
    [False, True]
    """
    return _MODULE_OF_TENSORS in data


def deserialize(parts: Serialized | bytes, *, copy: bool = False) -> tuple[Any, SharedTensors]:
    """Deserialize a value; the inverse of `serialize`.

    Args:
        parts: of a value; bytes alone are a pickle without buffers.
        copy: take the tensors out of the buffers.

    Returns:
        The value, and its tensors in the buffers.

    >>> import torch
    >>> value, shared = deserialize(serialize(torch.zeros(4096), "example"))
    >>> len(shared.tensors)
    1
    """
    shared = SharedTensors([])
    data, *buffers = [parts] if isinstance(parts, bytes) else parts
    with track_shared(None if copy else shared):
        return pickle.loads(data, buffers=buffers), shared


class _Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    """A pickler that sends the user's functions and classes by value, and tensors as buffers."""

    def reducer_override(self, obj: Any) -> Any:
        if str(type(obj).__module__).partition(".")[0] in _HAVE_TENSORS:
            from nrl.runtime.ray.codec.tensors import reduce_value

            if (reduction := reduce_value(obj)) is not NotImplemented:
                return reduction
        return super().reducer_override(obj)


_SEEN: set[str] = set()


def _send_by_value() -> None:
    """Let the user's own modules travel by value, since no environment has them installed."""
    if _SEEN.issuperset(sys.modules):
        return
    for name in sys.modules.keys() - _SEEN:
        _SEEN.add(name)
        module = sys.modules[name]
        if isinstance(module, types.ModuleType) and name != "__main__" and _is_users_own(module):
            cloudpickle.register_pickle_by_value(module)


_INSTALLED = tuple(
    f"{Path(sysconfig.get_path(name)).resolve()}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib")
)


def _is_users_own(module: types.ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    if not file or module.__name__.partition(".")[0] == "nrl" or not file.endswith(".py"):
        return False
    path = Path(file).resolve()
    if str(path).startswith(_INSTALLED) or "site-packages" in str(path) or "dist-packages" in str(path):
        return False
    top = module.__name__.partition(".")[0]
    return not any(top in _modules_installed_in(folder) for folder in path.parents)


@functools.cache
def _modules_installed_in(folder: Path) -> frozenset[str]:
    """Return the modules that an installer put into a user's folder, such as by ``pip install --target``.

    An editable installation has its record elsewhere: its files are the user's own.
    """
    distributions = [
        distribution for distribution in metadata.distributions(path=[str(folder)]) if distribution.read_text("RECORD")
    ]
    return frozenset(
        file.parts[0].removesuffix(".py") for distribution in distributions for file in distribution.files or ()
    )


def _describe_culprit(value: Any, error: Exception) -> str:
    """Describe the object that cannot be sent, the path to it, and the reason."""
    path, culprit, reason = _find_culprit(value, [], error, set())
    chain = " -> ".join(path).rstrip(",")
    kind = f"{type(culprit).__module__}.{type(culprit).__qualname__}"
    reached = f", which is reached through {chain}," if chain else ""
    return (
        f"an object of type {kind}{reached} cannot be sent to another process: {reason}. Create it inside of the "
        "function that runs there, or pass what it is made from"
    )


def _find_culprit(value: Any, path: list[str], error: Exception, seen: set[int]) -> tuple[list[str], Any, Exception]:
    """Find the innermost part of a value that cannot be pickled alone."""
    if len(path) < 8 and id(value) not in seen:
        seen.add(id(value))
        for name, part in _named_parts(value):
            try:
                _Pickler(io.BytesIO(), protocol=5, buffer_callback=lambda _: None).dump(part)
            except Exception as inner:
                return _find_culprit(part, [*path, name], inner, seen)
    return path, value, error


def _named_parts(value: Any) -> list[tuple[str, Any]]:
    match value:
        case types.FunctionType():
            names = value.__code__.co_freevars
            cells = [(name, cell) for name, cell in zip(names, value.__closure__ or (), strict=True)]
            captured = [(f"'{name}' of {value.__qualname__}", _cell_content(cell)) for name, cell in cells]
            used = {name: value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__}
            if value.__module__ in sys.modules and not _travels_by_value(value.__module__):
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
        case _ if _refuses_pickling(value):
            return []
        case _:
            return [(f".{key}", part) for key, part in getattr(value, "__dict__", {}).items()]


def _refuses_pickling(value: Any) -> bool:
    """Return whether an object's own class refuses to be pickled, whatever its attributes."""
    if isinstance(type(value).__reduce__, types.FunctionType):
        try:
            value.__reduce__()
        except Exception:
            return True
    return False


def _cell_content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _travels_by_value(module: str) -> bool:
    return module == "__main__" or _is_users_own(sys.modules[module])
