"""Tools: functions that a model may call, how models write calls, and the calls themselves; as pure functions.

>>> import asyncio
>>> from nrl.envs.tools import call, parse, tool
>>> def add(a: int, b: int) -> int:
...     '''Add two numbers.'''
...     return a + b
>>> tools = [tool(add)]
>>> parsed = parse('<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>', "hermes")
>>> results, state = asyncio.run(call(tools, [*parsed.calls, *parsed.malformed]))
>>> results[0].message
{'role': 'tool', 'name': 'add', 'content': '5'}
"""

from nrl.envs.tools.formats import FORMATS, MalformedCall, ToolCall, tool_format
from nrl.envs.tools.parsing import Parsed, parse
from nrl.envs.tools.schemas import State, Tool, tool
from nrl.envs.tools.tool_calls import Called, NewState, ToolError, ToolResult, call, count_calls
from nrl.envs.tools.using import tool_use

__all__ = [
    "FORMATS",
    "Called",
    "MalformedCall",
    "NewState",
    "Parsed",
    "State",
    "Tool",
    "ToolCall",
    "ToolError",
    "ToolResult",
    "call",
    "count_calls",
    "parse",
    "tool",
    "tool_format",
    "tool_use",
]
