"""Serializing values for other processes: pickled, with tensors beside the pickle.

A serialized value is a list: a pickle, and a buffer for each large tensor. Ray puts buffers into shared memory, which
every process of a node reads without a copy. That memory is mapped writable, so a write into it would change the
tensors of others and raise nothing. `deserialized` tells which tensors lie there, and `Shared.check` finds a write by
torch's version counters. Batches travel without their padding: see `nrl.runtime.ray.codec.ragged_codec`. What tensors
need is in `nrl.runtime.ray.codec.tensors`, which a process imports with its first one: many have none, and need no
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
from nrl.runtime.ray.codec.shared_memory import Shared, noting

__all__ = ["Serialized", "deserialized", "holds_tensors", "serialized", "size"]

type Serialized = list[Any]
"""A pickle, and the buffers beside it."""

_HAVE_TENSORS = frozenset({"torch", "tensordict"})
_MODULE_OF_TENSORS = b"nrl.runtime.ray.codec.tensors"  # whose functions make them anew


def serialized(value: Any, who: str) -> Serialized:
    """A value as bytes and buffers.

    Functions and classes of the user's own modules and packages travel by value, so no other process needs to be able
    to import them; those of installed packages by name. Tensors of other devices arrive on the CPU.

    Args:
        value: to be sent.
        who: how errors name the call.

    Raises:
        ShippingError: something in it cannot be sent; the message names the object and the reason.

    >>> import torch
    >>> value, _ = deserialized(serialized({"x": torch.arange(3)}, "example"))
    >>> value["x"].tolist()
    [0, 1, 2]
    """
    _send_by_value()
    file = io.BytesIO()
    buffers: list[Any] = []
    try:
        _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
    except ExecutableError:  # of an environment that was to travel
        raise
    except Exception as error:  # objects raise all kinds when they are pickled
        raise ShippingError(f"{who}: {_culprit(value, error)}") from error
    return [file.getvalue(), *map(_array, buffers)]


def _array(buffer: pickle.PickleBuffer) -> Any:
    """The bytes of a buffer as an array, of which Ray makes no copy."""
    import numpy as np

    return np.frombuffer(buffer.raw(), dtype=np.uint8)


def size(parts: Serialized) -> int:
    """The size of a serialized value in bytes."""
    return sum(len(part) for part in parts)


def holds_tensors(data: bytes) -> bool:
    """Whether a pickle that `serialized` made holds tensors, so that opening it imports torch.

    >>> import torch
    >>> [holds_tensors(serialized(value, "example")[0]) for value in ([1, "torch"], [torch.zeros(2)])]
    [False, True]
    """
    return _MODULE_OF_TENSORS in data


def deserialized(parts: Serialized | bytes, *, copy: bool = False) -> tuple[Any, Shared]:
    """The inverse of `serialized`.

    Args:
        parts: of a value; bytes alone are a pickle without buffers.
        copy: take the tensors out of the buffers.

    Returns:
        The value, and those of its tensors that lie in the buffers.

    >>> import torch
    >>> value, shared = deserialized(serialized(torch.zeros(4096), "example"))
    >>> len(shared.tensors)
    1
    """
    held = Shared([])
    data, *buffers = [parts] if isinstance(parts, bytes) else parts
    with noting(None if copy else held):
        return pickle.loads(data, buffers=buffers), held


class _Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    """Functions and classes by value where they have to be, tensors as buffers."""

    def reducer_override(self, obj: Any) -> Any:
        if str(type(obj).__module__).partition(".")[0] in _HAVE_TENSORS:
            from nrl.runtime.ray.codec.tensors import reduced

            if (found := reduced(obj)) is not NotImplemented:
                return found
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
    path = Path(file).resolve()
    if str(path).startswith(_INSTALLED) or "site-packages" in str(path) or "dist-packages" in str(path):
        return False
    top = module.__name__.partition(".")[0]
    return not any(top in _put_into(folder) for folder in path.parents)


@functools.cache
def _put_into(folder: Path) -> frozenset[str]:
    """The modules that an installer put into a folder of the user's, such as by ``pip install --target``.

    What was installed editable has a record elsewhere: its files are the user's own.
    """
    put = [each for each in metadata.distributions(path=[str(folder)]) if each.read_text("RECORD")]
    return frozenset(file.parts[0].removesuffix(".py") for each in put for file in each.files or ())


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
