"""JSON of clients, within bounds of memory, depth and numbers."""

import json
import re
from typing import Any

import msgspec

__all__ = ["StrangeNumber", "check_json", "read_json"]

_TOKENS = re.compile(rb'"[^"]*+"?|[][{},]')
_MOST_TOKENS = 2**22  # texts, brackets and commas; looking at as many takes about a second


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

    >>> check_json(b'[[], [], {"a": "{{{{"}]', depth=2, containers=4)
    >>> check_json(b"[" * 1000, depth=128, containers=10_000)
    Traceback (most recent call last):
    ValueError: the JSON is nested more than 128 deep; send it flatter
    """
    opened = body.count(b"[") + body.count(b"{")
    if opened <= (containers if depth is None else min(depth, containers)) and (
        values is None or opened + body.count(b",") <= values
    ):
        return
    # Brackets within texts count for nothing. Escapes are left out first, so that a text ends at its next quote
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    level = inside = commas = 0
    for number, token in enumerate(_TOKENS.finditer(plain)):
        if number > _MOST_TOKENS:
            raise ValueError(f"the JSON has more than {_MOST_TOKENS} texts, brackets and commas; send fewer")
        match plain[token.start()]:
            case 0x5B | 0x7B:  # [ and {
                level += 1
                inside += 1
                if depth is not None and level > depth:
                    raise ValueError(f"the JSON is nested more than {depth} deep; send it flatter")
                if inside > containers:
                    raise ValueError(f"the JSON has more than {containers} arrays and objects; send fewer")
            case 0x5D | 0x7D:
                level -= 1
            case 0x2C:
                commas += 1
        if values is not None and commas + inside > values:
            raise ValueError(f"the JSON has more than {values} values; send fewer")


def read_json(body: bytes | bytearray) -> Any:
    """Decode JSON; a number that JSON does not have is named with its place.

    Raises:
        ValueError: it is no JSON.

    >>> read_json(b'{"temperature": NaN}')
    Traceback (most recent call last):
    nrl.envs.gym.json_limits.StrangeNumber: temperature is NaN; give a finite number of at most 64 bits
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
