"""Values as JSON has them.

JSON has no tuples, bytes, infinities, keys that are no text, or texts with lone surrogates. Such a value is written as
an object with the key ``"$nrl"``, so that all arrives as it was: ``{"$nrl": "tuple", "value": [1, 2]}``. A client that
has none of these never meets one.
"""

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

from nrl.arguments import with_article
from nrl.errors import EnvError

__all__ = ["TAG", "sendable", "value_of"]

TAG = "$nrl"


def sendable(value: Any, who: str) -> Any:
    """A value as JSON has it, from which `value_of` makes the same one again.

    Arrays and tensors become lists, scalars of theirs numbers.

    Args:
        value: of None, bool, int, float, str, bytes and its kin, list, tuple, mappings, and what has a ``tolist``.
        who: has it, for the message.

    Raises:
        EnvError: it has something else.

    >>> sendable({"a": (1, float("inf"))}, "the task")
    {'a': {'$nrl': 'tuple', 'value': [1, {'$nrl': 'float', 'value': 'inf'}]}}
    """
    try:
        return _sendable(value)
    except _Unsendable as error:
        raise EnvError(
            f"{who} has {error.what} at {''.join(reversed(error.path)) or 'its root'}, which cannot be sent; give what "
            "JSON has (texts, numbers, lists, mappings), tuples, bytes or arrays"
        ) from None
    except RecursionError:
        raise EnvError(f"{who} is nested too deeply, or contains itself; give something flatter") from None


class _Unsendable(Exception):
    def __init__(self, what: str) -> None:
        self.what, self.path = what, list[str]()


def _sendable(value: Any) -> Any:
    kind = type(value)
    if kind is str:
        return value if value.isascii() else _text(value)
    if kind is int or kind is bool or value is None:
        return value
    if kind is float:
        return value if math.isfinite(value) else _tagged("float", repr(value))
    if kind is dict:
        return _mapping(value)
    if kind is list:
        return _list(value)
    if kind is tuple:
        return _tagged("tuple", _list(value))
    if isinstance(value, bytes | bytearray | memoryview):  # whose own `tolist` would make numbers of it
        return _tagged("bytes", base64.b64encode(value).decode())
    if isinstance(value, Mapping):
        return _mapping(dict(value))
    if isinstance(value, str):
        return _sendable(str.__str__(value))
    if hasattr(value, "tolist"):
        return _sendable(value.tolist())
    for base in (float, int):
        if isinstance(value, base):
            return _sendable(base(value))
    raise _Unsendable(with_article(kind.__name__))


def _tagged(kind: str, value: Any) -> dict[str, Any]:
    return {TAG: kind, "value": value}


def _text(value: str) -> Any:
    try:
        value.encode()
    except UnicodeEncodeError:
        return _tagged("text", base64.b64encode(value.encode("utf-8", "surrogatepass")).decode())
    return value


def _list(value: Sequence[Any]) -> list[Any]:
    found = list[Any]()
    try:
        for each in value:
            found.append(_sendable(each))  # its length says which one failed
    except _Unsendable as error:
        error.path.append(f"[{len(found)}]")
        raise
    return found


def _mapping(value: Mapping[Any, Any]) -> dict[str, Any]:
    found, odd = dict[str, Any](), TAG in value
    key: Any = None
    try:
        for key, each in value.items():
            odd = odd or type(key) is not str or not (key.isascii() or type(_text(key)) is str)
            found[key] = _sendable(each)
        return _tagged("map", [[_sendable(key), found[key]] for key in found]) if odd else found
    except _Unsendable as error:
        error.path.append(f"[{key!r:.80}]")
        raise


def value_of(given: Any) -> Any:
    """The value of which `sendable` made this.

    Raises:
        ValueError: an object with the key ``"$nrl"`` is none of those that there are.

    >>> value_of(sendable({"a": (1, float("inf"), b"x")}, "the task"))
    {'a': (1, inf, b'x')}
    """
    if isinstance(given, list):
        return [value_of(each) for each in given]
    if not isinstance(given, dict):
        return given
    if TAG not in given:
        return {key: value_of(each) for key, each in given.items()}
    try:
        return _MAKE[given[TAG]](given["value"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{given!r:.200} is no value; see nrl.gym.http.json_codec for what '{TAG}' may be") from error


def _pairs(value: Any) -> dict[Any, Any]:
    return {value_of(key): value_of(each) for key, each in value}


_MAKE: dict[str, Any] = {
    "tuple": lambda value: tuple(value_of(list(value))),
    "float": {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}.__getitem__,
    "bytes": lambda value: base64.b64decode(value, validate=True),
    "text": lambda value: base64.b64decode(value, validate=True).decode("utf-8", "surrogatepass"),
    "map": _pairs,
}
