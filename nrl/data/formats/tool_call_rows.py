"""Formats of calls of tools."""

import re
from collections.abc import Mapping
from typing import Any

from nrl.data.checks import fields, kind
from nrl.data.formats.base import texts_of
from nrl.data.messages import canonical_tools, decode_json
from nrl.envs.types import Task
from nrl.errors import DataError

__all__ = ["xlam"]

_TYPES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "list": "array",
    "tuple": "array",
    "set": "array",
    "dict": "object",
}
"""Types of JSON schemas by their names in Python."""


def xlam(row: Task) -> Task:
    """Of xLAM's function calls: the answers are the calls of one message.

    Parameters without a schema around them, whose types have names of Python, become a JSON schema. A parameter is
    required unless its type says ``optional`` or it has a default.

    Args:
        row: with ``query``, ``answers``, a list of calls, and ``tools``; the lists may be JSON text.

    Returns:
        Its other fields, ``prompt``, ``tools`` and ``response``, a list of one message.

    Raises:
        DataError: a field is missing or of another type.

    Source: Liu et al., 2024 (2406.18518); `Salesforce/xlam-function-calling-60k` on the hub.

    >>> call, tool = {"name": "add", "arguments": {"a": 2}}, {"name": "add", "parameters": {"a": {"type": "int"}}}
    >>> xlam({"query": "1+1=", "answers": [call], "tools": [tool]})["tools"][0]["function"]["parameters"]
    {'type': 'object', 'properties': {'a': {'type': 'integer'}}, 'required': ['a']}
    """
    (query,) = texts_of("xlam", row, "query")
    lists = dict[str, list[Any]]()
    for name in ("answers", "tools"):
        value = row.get(name)
        value = decode_json(value, f"xlam: '{name}'") if isinstance(value, str) else value
        if not isinstance(value, list | tuple):
            found = f"'{name}' is {kind(value)}; give a list" if name in row else f"the row has no '{name}'"
            raise DataError(f"xlam: {found}, or its JSON text; it has {fields(row)}")
        lists[name] = list(value)
    calls = [{"type": "function", "function": call} for call in lists["answers"]]
    tools = [_with_schema(tool) for tool in canonical_tools(lists["tools"], "xlam: 'tools'")]
    others = {name: value for name, value in row.items() if name not in ("query", "answers", "tools")}
    response = [{"role": "assistant", "content": "", "tool_calls": calls}]
    return {**others, "prompt": query, "tools": tools, "response": response}


def _with_schema(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    parameters = function.get("parameters")
    is_bare = isinstance(parameters, Mapping) and all(isinstance(value, Mapping) for value in parameters.values())
    if not is_bare:
        return tool
    properties, required = dict[str, Any](), list[str]()
    for name, parameter in parameters.items():
        words = str(parameter.get("type", ""))
        is_optional = bool(re.search(r"\boptional\b", words, re.IGNORECASE)) or "default" in parameter
        properties[name] = {**parameter, **_schema_of(re.sub(r",?\s*optional\b", "", words, flags=re.IGNORECASE))}
        required += [] if is_optional else [name]
    schema = {"type": "object", "properties": properties, "required": required}
    return {**tool, "function": {**function, "parameters": schema}}


def _schema_of(words: str) -> dict[str, Any]:
    """Return the JSON schema of a type of Python, such as ``List[int]``; a type that is unknown stays a text."""
    name, bracket, inner = words.strip().partition("[")
    known = _TYPES.get(name.lower())
    if known == "array" and bracket:
        return {"type": known, "items": _schema_of(inner.removesuffix("]"))}
    return {"type": known or words.strip()} if words.strip() else {}
