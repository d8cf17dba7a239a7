"""From plain data to the form that ``torch.load(weights_only=True)`` reads, and back: no stored value is code.

Plain data is None, numbers, texts, bytes, tensors, batches, NumPy arrays and scalars, and dicts, lists, tuples, named
tuples and attrs instances of these. It comes back equal, of the same types. Of a class only the names of its fields are
stored: an example, ``like``, gives the class.
"""

from collections.abc import Iterable
from typing import Any

import attrs
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from nrl.arguments import with_article
from nrl.batch.ragged import is_ragged, of_values, parts_of
from nrl.errors import CheckpointError

__all__ = ["decode", "encode"]

_AS_IT_IS = (type(None), bool, int, float, str)  # exactly: subclasses such as an IntEnum are pickled as code
_KINDS = "numbers, texts, bytes, tensors, batches, and dicts, lists, tuples, named tuples and attrs instances of these"


def encode(value: Any, name: str, *, classes: bool = True) -> Any:
    """Encode plain data for ``torch.save``.

    Args:
        value: plain data.
        name: how errors name it.
        classes: whether it may contain named tuples and attrs instances, which need an example to be decoded.

    Raises:
        CheckpointError: the value contains other types.

    >>> encode({"mean": 0.5}, "running")
    {'keys': ['mean'], 'values': [0.5]}
    """
    if type(value) is int and value.bit_length() > 63:  # torch's unpickler does not know long ones, nor empty bytes
        return {"int": hex(value)}
    if type(value) in _AS_IT_IS:
        return value
    if type(value) is bytes:
        return {"bytes": value.hex()}
    if is_ragged(value):
        return {"ragged": [encode(part, name) for part in parts_of(value)]}
    if isinstance(value, Tensor):  # a view would bring the whole of its storage along
        return value if value.untyped_storage().nbytes() <= value.nbytes else value.clone()
    if isinstance(value, np.ndarray | np.generic):
        try:
            return {"ndarray": torch.from_numpy(np.array(value)), "scalar": isinstance(value, np.generic)}
        except TypeError:
            raise _make_error(name, f"a NumPy {value.dtype}", "give numbers, or a list of texts") from None
    if isinstance(value, TensorDict):
        columns = {key: encode(column, f"{name}.{key}", classes=False) for key, column in value.items()}
        return {"batch": columns, "batch_size": list(value.batch_size), "locked": value.is_locked}
    if (fields := _fields(value)) is not None:
        if not classes:
            raise _make_error(
                name, with_article(type(value).__name__), "in the state of a stream give a dict in its place"
            )
        held = {field: encode(getattr(value, field), f"{name}.{field}") for field in fields}
        return {"class": type(value).__name__, "fields": held}
    if type(value) is dict:
        keys = [encode(key, f"{name}, key {key!r}", classes=False) for key in value]
        return {"keys": keys, "values": [encode(x, f"{name}.{key}", classes=classes) for key, x in value.items()]}
    if type(value) in (list, tuple):
        return type(value)(encode(x, f"{name}[{i}]", classes=classes) for i, x in enumerate(value))
    raise _make_error(
        name, with_article(type(value).__name__), f"give {_KINDS}; train states, params and streams by their names"
    )


def decode(stored: Any, like: Any, name: str) -> Any:
    """Decode a value that `encode` has encoded.

    Args:
        stored: from ``torch.load``.
        like: an example of the value, which gives the classes of named tuples and attrs instances in it.
        name: how errors name it.

    Raises:
        CheckpointError: in the place of an instance, the example has none with the same fields.

    >>> decode(encode({"mean": 0.5}, "running"), {}, "running")
    {'mean': 0.5}
    """
    match stored:
        case {"int": text}:
            return int(text, 16)
        case {"bytes": text}:
            return bytes.fromhex(text)
        case {"ndarray": tensor, "scalar": scalar}:
            return tensor.numpy()[()] if scalar else tensor.numpy()
        case {"ragged": [values, offsets]}:
            return of_values(values, offsets)
        case {"batch": columns, "batch_size": size, "locked": locked}:
            batch = TensorDict({key: decode(x, None, name) for key, x in columns.items()}, batch_size=size)
            return batch.lock_() if locked else batch
        case {"class": title, "fields": held}:
            if _fields(like) != list(held):
                raise CheckpointError(
                    f"load: '{name}' was saved as a {title} with the fields {', '.join(held)}, and the program has a "
                    f"{type(like).__name__} with {', '.join(_fields(like) or ()) or 'no fields'} in its place; give "
                    f"restore any such {title}, for its class"
                )
            values = {field: decode(x, getattr(like, field), f"{name}.{field}") for field, x in held.items()}
            return _make_instance(type(like), values)
        case {"keys": keys, "values": items}:
            examples = like if isinstance(like, dict) else {}
            names = [decode(key, None, name) for key in keys]
            return {key: decode(x, examples.get(key), f"{name}.{key}") for key, x in zip(names, items, strict=True)}
        case list() | tuple():
            return type(stored)(decode(x, y, f"{name}[{i}]") for i, (x, y) in enumerate(_pair_examples(stored, like)))
    return stored


def _pair_examples(stored: list[Any] | tuple[Any, ...], like: Any) -> Iterable[tuple[Any, Any]]:
    """Pair stored items with the example's; if there are more, the example's last item serves for all of them."""
    examples = list(like) if isinstance(like, list | tuple) else []
    examples += (examples[-1:] or [None]) * (len(stored) - len(examples))
    return zip(stored, examples, strict=False)


def _fields(value: Any) -> list[str] | None:
    if attrs.has(type(value)):
        return [field.name for field in attrs.fields(type(value))]
    return list(value._fields) if isinstance(value, tuple) and hasattr(value, "_fields") else None


def _make_instance(kind: Any, values: dict[str, Any]) -> Any:
    """Make an instance without running converters and validators a second time."""
    if issubclass(kind, tuple):
        return kind._make(values.values())
    instance = object.__new__(kind)
    for field, value in values.items():
        object.__setattr__(instance, field, value)
    return instance


def _make_error(name: str, kind: str, instead: str) -> CheckpointError:
    return CheckpointError(f"save: '{name}' is {kind}, which a checkpoint cannot hold; {instead}")
