"""Values that go between a program and the test that calls it, as lines of JSON.

The modules of this package run in a sandbox, where there is nothing else of nrl.
"""

import builtins
import json
import os
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["decode", "encode", "private", "say"]

_SCALARS = (bool, float, str)
_LARGEST = 1 << 10_000  # integers beyond are written in base 16, which takes linear time
_VIEWS: tuple[Any, ...] = (type({}.keys()), type({}.values()), type({}.items()))

_FACTORIES = (None, "int", "float", "str", "list", "dict", "set", "tuple")  # of a defaultdict

type _Refer = Callable[[Any], Any]


def encode(value: Any, refer: _Refer | None = None) -> Any:
    """What JSON has, for a value made of types of Python and its library; subclasses count as these.

    Args:
        value: numbers, texts, bytes, None, and containers of these; dates, fractions, decimals; arrays of numpy.
        refer: gives what stands for anything else. None: that is an error.

    Raises:
        TypeError: it is something else.

    >>> encode({(1, 2): [None]})
    ['dict', [['tuple', 1, 2], ['list', None]]]
    """
    if value is None or type(value) in _SCALARS:
        return value
    if type(value) is int:
        return value if -_LARGEST < value < _LARGEST else ["int", hex(value)]
    if refer is not None and _has_attributes(value):
        return refer(value)
    for kind in (str, int, float):
        if isinstance(value, kind):
            return encode(kind(value))
    if isinstance(value, bytes | bytearray):
        return [type(value).__name__, bytes(value).hex()]
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if type(value).__name__ in ("Counter", "OrderedDict", "defaultdict") and type(value).__module__ == "collections":
        factory = getattr(getattr(value, "default_factory", None), "__name__", None)
        name = type(value).__name__ if factory in _FACTORIES else "dict"
        return [f"collections.{name}", factory, encode(dict(value), refer)]
    if isinstance(value, dict):
        return ["dict", *([encode(key, refer), encode(item, refer)] for key, item in value.items())]
    for container in (list, tuple, set, frozenset):
        if isinstance(value, container):
            return [container.__name__, *(encode(item, refer) for item in value)]
    if isinstance(value, _VIEWS):
        return ["list", *(encode(item, refer) for item in value)]
    if isinstance(value, range):
        return ["range", *map(encode, (value.start, value.stop, value.step))]
    match f"{type(value).__module__}.{type(value).__name__}":
        case "datetime.date" | "datetime.time" | "datetime.datetime" as name:
            return [name, value.isoformat()]
        case "datetime.timedelta" as name:
            return [name, value.days, value.seconds, value.microseconds]
        case "fractions.Fraction" as name:
            return [name, encode(value.numerator), encode(value.denominator)]
        case "decimal.Decimal" | "uuid.UUID" as name:
            return [name, str(value)]
        case "collections.deque" as name:
            return [name, value.maxlen, *(encode(item, refer) for item in value)]
        case "numpy.ndarray" as name:
            return [name, str(value.dtype), encode(value.tolist())]
        case name if name.startswith("numpy.") and hasattr(value, "item"):
            return encode(value.item())
    if refer is not None:
        return refer(value)
    raise TypeError(f"{type(value).__name__} is no data")


def _has_attributes(value: Any) -> bool:
    """Whether a number, a text or a named tuple is of a class that the program or the test defines."""
    kind = type(value)
    if isinstance(value, tuple):
        return hasattr(kind, "_fields")
    is_own = kind.__module__ in ("program", "test") or "_nrl_class" in kind.__dict__
    return is_own and isinstance(value, int | float | str)


def decode(value: Any, resolve: Callable[[str, list[Any]], Any] | None = None) -> Any:
    """The value again.

    Args:
        value: of `encode`.
        resolve: gives what a reference stands for.

    >>> decode(encode({(1, 2): {3.5, b"x"}})) == {(1, 2): {3.5, b"x"}}
    True
    """
    if not isinstance(value, list):
        return value
    kind, *parts = value
    match kind:
        case "int":
            return int(parts[0], 16)
        case "bytes":
            return bytes.fromhex(parts[0])
        case "bytearray":
            return bytearray.fromhex(parts[0])
        case "complex":
            return complex(*parts)
        case "dict":
            return {decode(key, resolve): decode(item, resolve) for key, item in parts}
        case "list" | "tuple" | "set" | "frozenset" | "range":
            items = [decode(item, resolve) for item in parts]
            return range(*items) if kind == "range" else getattr(builtins, kind)(items)
        case "datetime.date" | "datetime.time" | "datetime.datetime" | "datetime.timedelta":
            import datetime as dt

            made = getattr(dt, kind.removeprefix("datetime."))
            return made(*parts) if kind == "datetime.timedelta" else made.fromisoformat(parts[0])
        case "fractions.Fraction":
            from fractions import Fraction

            return Fraction(*map(decode, parts))
        case "decimal.Decimal":
            from decimal import Decimal

            return Decimal(parts[0])
        case "uuid.UUID":
            from uuid import UUID

            return UUID(parts[0])
        case "collections.Counter" | "collections.OrderedDict" | "collections.defaultdict" | "collections.dict":
            import collections

            items = decode(parts[1], resolve)
            if kind == "collections.defaultdict":
                return collections.defaultdict(parts[0] and getattr(builtins, parts[0]), items)
            name = kind.removeprefix("collections.")
            return items if name == "dict" else getattr(collections, name)(items)
        case "collections.deque":
            from collections import deque

            return deque((decode(item, resolve) for item in parts[1:]), parts[0])
        case "numpy.ndarray":
            items = decode(parts[1])
            try:
                import numpy as np  # type: ignore[import-not-found,unused-ignore]
            except ImportError:
                return items
            return np.array(items, dtype=parts[0])
    if resolve is None:
        raise TypeError(f"{kind} is no data")
    return resolve(kind, parts)


def private() -> tuple[Any, int]:
    """What was standard input and output, out of the way of a program that reads and prints."""
    lines, out = os.fdopen(os.dup(0), "rb"), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    sys.set_int_max_str_digits(0)
    return lines, out


def say(out: int, what: str, *more: Any) -> None:
    """Write a line of JSON."""
    data = json.dumps([what, *more]).encode() + b"\n"
    while data:
        data = data[os.write(out, data) :]
