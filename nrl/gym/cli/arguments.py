"""Arguments of tools, as a model that has learned nothing may write them: from the JSON schema of their parameters."""

import math
from collections.abc import Mapping
from random import Random
from typing import Any

__all__ = ["arguments"]

_DEEP = 4  # schemas within schemas, which may hold themselves
_SENSIBLE = ("print(6 * 7)", "6 * 7", "42", "a", "2024-01-01")
_HOSTILE = (
    "",
    "\x00\ufffd\u202e",
    "9" * 1000,
    "(" * 5000,
    "../../../../etc/passwd",
    "' OR 1=1; --",
    "import os\nos._exit(0)",
    "raise SystemExit",
    "1/0",
)


def arguments(schema: Mapping[str, Any], random: Random, *, seen: str = "", hostile: bool = False) -> dict[str, Any]:
    """Arguments that fit the parameters of a tool: all that are required, and some of the others.

    Args:
        schema: of the parameters, an object.
        random: chooses.
        seen: the observation, of which sensible texts take words.
        hostile: values that fit and that nobody would want, in place of sensible ones.

    >>> schema = {"properties": {"code": {"type": "string"}, "times": {"type": "integer", "minimum": 3, "maximum": 3}}}
    >>> arguments({**schema, "required": ["code", "times"]}, Random(0))
    {'code': 'a', 'times': 3}
    """
    made = _object(schema, schema, random, seen, hostile, 0)
    return made if isinstance(made, dict) else {}


def _object(
    part: Mapping[str, Any], root: Mapping[str, Any], random: Random, seen: str, hostile: bool, deep: int
) -> dict[str, Any]:
    required = part.get("required", ())
    return {
        name: _value(each, root, random, seen, hostile, deep + 1)
        for name, each in part.get("properties", {}).items()
        if name in required or (deep < _DEEP and random.random() < 0.5)
    }


def _value(part: Any, root: Mapping[str, Any], random: Random, seen: str, hostile: bool, deep: int) -> Any:
    if not isinstance(part, Mapping) or deep > 4 * _DEEP:
        return None
    if "$ref" in part:
        name = str(part["$ref"]).rpartition("/")[2]
        return _value(root.get("$defs", {}).get(name), root, random, seen, hostile, deep + 1)
    if "const" in part:
        return part["const"]
    if "enum" in part:
        return random.choice(list(part["enum"]))
    for several in ("anyOf", "oneOf", "allOf"):
        if several in part:
            return _value(random.choice(list(part[several])), root, random, seen, hostile, deep + 1)
    kind = part.get("type", "string")
    match random.choice(kind) if isinstance(kind, list) else kind:
        case "integer":
            return int(_number(part, random, hostile, (-1, 2**31, 2**63, -(2**63))))
        case "number":
            return _number(part, random, hostile, (-0.0, 1e308, 5e-324, -1e308))
        case "boolean":
            return random.random() < 0.5
        case "array":
            count = max(part.get("minItems", 0), 0 if hostile or deep > _DEEP else random.randint(1, 2))
            count = min(count, part.get("maxItems", count))
            return [_value(part.get("items", {}), root, random, seen, hostile, deep + 1) for _ in range(count)]
        case "object":
            return _object(part, root, random, seen, hostile, deep)
        case "null":
            return None
        case _:
            text = random.choice(_HOSTILE if hostile else (*_SENSIBLE, *seen.split()[:20]))
            return text.ljust(part.get("minLength", 0), "a")[: part.get("maxLength")]


def _number(part: Mapping[str, Any], random: Random, hostile: bool, extremes: tuple[float, ...]) -> float:
    """One within its bounds."""

    def fits(value: float) -> bool:
        least, most = part.get("minimum", -math.inf), part.get("maximum", math.inf)
        above, below = part.get("exclusiveMinimum", -math.inf), part.get("exclusiveMaximum", math.inf)
        return bool(least <= value <= most and above < value < below)

    low = part.get("minimum", part.get("exclusiveMinimum"))
    high = part.get("maximum", part.get("exclusiveMaximum"))
    start = int(low if low is not None else min(0, high - 10) if high is not None else 0)
    small = [each for each in (*range(start, start + 12), low, high) if each is not None and fits(each)]
    some = [each for each in extremes if fits(each)] if hostile else []
    if not some + small:  # between 0 and 1, both left out
        return float(low + high) / 2 if low is not None and high is not None else 0.0
    value: float = random.choice(some or small)
    return value
