"""JSON of clients, within bounds of memory, depth and numbers."""

import json
import re
from typing import Any

import msgspec

__all__ = ["StrangeNumber", "check_json", "read_json"]

_BRACKET = re.compile(rb"[][{}]")


def check_json(
    body: bytes | bytearray, *, containers: int, depth: int | None = None, values: int | None = None
) -> None:
    """Refuse JSON that would fill the memory or the stack when it is read: two bytes may become a hundred.

    Args:
        body: JSON, perhaps.
        containers: how many arrays and objects there may be.
        depth: how deeply they may be nested; None: as deeply as the reader can.
        values: how many commas, arrays and objects there may be; None: any number.

    Raises:
        ValueError: there is too much.

    >>> check_json(b'[[], [], {"a": "{{{{"}]', containers=4, depth=2)
    >>> check_json(b"[" * 1000, containers=10_000, depth=128)
    Traceback (most recent call last):
    ValueError: the JSON is nested more than 128 deep; send it flatter
    """
    opened = body.count(b"[") + body.count(b"{")
    if opened <= (containers if depth is None else min(depth, containers)) and (
        values is None or opened + body.count(b",") <= values
    ):
        return
    # What stands within texts counts for nothing. Escapes go first, so that a text ends at its next quote
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    most = 2 * (containers if values is None else values)  # keys and values
    if plain.count(b'"') // 2 > most:
        raise ValueError(f"the JSON has more than {most} texts; send fewer")
    plain = b"".join(plain.split(b'"')[::2])
    opened = plain.count(b"[") + plain.count(b"{")
    if opened > containers:
        raise ValueError(f"the JSON has more than {containers} arrays and objects; send fewer")
    if values is not None and opened + plain.count(b",") > values:
        raise ValueError(f"the JSON has more than {values} values; send fewer")
    if depth is None or opened <= depth:
        return
    level = 0
    for bracket in _BRACKET.finditer(plain):
        level += 1 if bracket[0] in b"[{" else -1
        if level > depth:
            raise ValueError(f"the JSON is nested more than {depth} deep; send it flatter")


def read_json(body: bytes | bytearray) -> Any:
    """Decode JSON; a number that JSON does not have is named with its place.

    Raises:
        ValueError: it is no JSON.

    >>> read_json(b'{"temperature": NaN}')
    Traceback (most recent call last):
    nrl.gym.http.json_limits.StrangeNumber: temperature is NaN; give a finite number of at most 64 bits
    """
    try:
        return msgspec.json.decode(body)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply; send it flatter") from None
    except ValueError as error:
        reason = str(error)
    try:
        found = json.loads(body, parse_constant=_Strange, parse_float=_finite, parse_int=_short)
    except (ValueError, RecursionError):
        raise ValueError(f"the request is no JSON: {reason}") from None
    _refuse_strange(found, "")
    raise ValueError(f"the request is no JSON: {reason}")


class StrangeNumber(ValueError):
    """A number that JSON does not have, or that is not finite.

    Args:
        where: the path of the field.
        text: as it is written.
    """

    def __init__(self, where: str, text: str) -> None:
        super().__init__(f"{where or 'the request'} is {text:.40}; give a finite number of at most 64 bits")
        self.where = where


class _Strange(str):
    """The text of such a number."""


def _finite(text: str) -> Any:
    number = float(text)
    return number if abs(number) < float("inf") else _Strange(text)


def _short(text: str) -> Any:
    return int(text) if len(text) < 40 else _Strange(text)


def _refuse_strange(value: Any, where: str) -> None:
    if isinstance(value, _Strange):
        raise StrangeNumber(where, value)
    if isinstance(value, dict):
        for key, part in value.items():
            _refuse_strange(part, f"{where}.{key:.80}" if where else f"{key:.80}")
    elif isinstance(value, list):
        for index, part in enumerate(value):
            _refuse_strange(part, f"{where}[{index}]")
