"""JSON schemas of tools."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from nrl.data.checks import kind
from nrl.data.messages.tool_calls import decode_json
from nrl.errors import DataError

__all__ = ["canonical_tools", "function_of"]

_PARAMETERS = ("input_schema", "inputSchema")
"""How Anthropic and MCP call the parameters of a tool."""


def canonical_tools(tools: Any, where: str, *, filled: bool = False) -> list[dict[str, Any]]:
    """Return tools as a list of JSON schemas of functions in OpenAI's form; empty: there are none.

    Args:
        tools: a list of schemas, or its JSON text. A schema may be JSON text, too, and may stand without the
            ``"function"`` around it.
        where: how errors name them.
        filled: as in `canonical_messages`. Then nulls in schemas are left out.

    Raises:
        DataError: they are no such list.

    >>> canonical_tools('[{"name": "add", "parameters": {"type": "object"}}]', "the tools")
    [{'type': 'function', 'function': {'name': 'add', 'parameters': {'type': 'object'}}}]
    """
    if tools is None or (isinstance(tools, str) and not tools.strip()):
        return []
    given = tools
    if isinstance(tools, str):
        with suppress(ValueError, RecursionError):
            tools, filled = json.loads(tools), False
    tools = [] if tools is None else tools
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise DataError(f"{where} is {kind(given)}; give a list of JSON schemas of functions, or its JSON text")
    return [_tool(tool, where, filled) for tool in tools]


def _tool(given: Any, where: str, filled: bool) -> dict[str, Any]:
    decoded: Any = given
    if isinstance(given, str):
        with suppress(ValueError, RecursionError):
            decoded, filled = json.loads(given), False
    if not isinstance(decoded, Mapping):
        raise DataError(f"{where} is a list of {kind(given)}; give a list of JSON schemas of functions")
    tool: dict[str, Any] = dict(_without_nulls(decoded) if filled else decoded)
    if not isinstance(tool.get("function"), Mapping) and isinstance(tool.get("name"), str):
        own = {key: value for key, value in tool.items() if key != "type" or value != "function"}
        tool = {"type": "function", "function": own}
    function = dict(function_of(tool))
    for name in _PARAMETERS:
        if name in function and function.get("parameters") is None:
            function["parameters"] = function.pop(name)
    if isinstance(function.get("parameters"), str):
        function["parameters"] = decode_json(
            function["parameters"], f"{where}: 'parameters' of '{function.get('name')}'"
        )
    return {**tool, "function": function} if isinstance(tool.get("function"), Mapping) else function


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the function of a tool, which may stand alone."""
    found = tool.get("function")
    return found if isinstance(found, Mapping) else tool


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
