"""Servers of the Model Context Protocol as tools: programs that speak it on their standard input and output."""

import asyncio
import functools
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nrl.envs.tools import Tool, ToolError
from nrl.errors import ArgumentError
from nrl.gym.adapters.rpc_programs import RpcProgram
from nrl.gym.endpoint.agent_process import provided
from nrl.runtime.threads import run_in_loop
from nrl.runtime.venvs.registry import Executable
from nrl.runtime.venvs.registry import executable as registered

__all__ = ["mcp_tools", "result_text"]

_VERSION = "2025-06-18"


def mcp_tools(
    *command: str, executable: str | Executable = "system", env: Mapping[str, str] | None = None, timeout: float = 60.0
) -> list[Tool]:
    """The tools of an MCP server, for `nrl.envs.tools.tool_use` and `call`.

    The server is a program that speaks MCP on its standard input and output. It is started here and now, once in each
    process that uses its tools, and ends with that process. All episodes share it. What it says is wrong with a call is
    told to the model; if it ends, or does not answer in time, the row is invalid, and the next call starts it again.

    Args:
        *command: the program and its arguments; ``python`` is the Python of the executable.
        executable: its Python environment, or the name of one.
        env: more environment variables.
        timeout: seconds for an answer.

    Returns:
        A tool for each that it lists, with the server's own schemas.

    Raises:
        ValueError: there is no command.
        EnvError: the server does not start, or does not speak MCP; the message has what it wrote last.
        PlacementError: no executable has this name.

    Source: Model Context Protocol, revision 2025-06-18, transport stdio.
    """
    if not command:
        raise ArgumentError("mcp_tools: there is no command; give a program and its arguments")
    spec = _Spec(command, registered(executable), tuple(sorted((env or {}).items())), timeout)
    found, cursor = list[Mapping[str, Any]](), None
    while True:
        listed = _now(_server(spec).ask("tools/list", {} if cursor is None else {"cursor": cursor}, timeout))
        found += listed["tools"]
        cursor = listed.get("nextCursor")
        if cursor is None:
            return [_tool(spec, each) for each in found]


def result_text(said: Mapping[str, Any]) -> str:
    """The result of a call, as the model reads it: texts as they are, all else as JSON.

    >>> result_text({"content": [{"type": "text", "text": "4"}, {"type": "image", "data": ""}]})
    '4\\n{"type": "image", "data": ""}'
    """
    return "\n".join(part["text"] if part.get("type") == "text" else json.dumps(part) for part in said["content"])


class _Spec(NamedTuple):
    """What is started."""

    command: tuple[str, ...]
    executable: Executable
    env: tuple[tuple[str, str], ...]
    timeout: float

    @property
    def shown(self) -> str:
        return " ".join(self.command)


class _Left:
    """The default of a parameter that the server knows."""

    def __repr__(self) -> str:
        return "..."


class _Call:
    """The function of a tool, which is called in the server; in another process, in a server of that process."""

    def __init__(self, spec: _Spec, name: str, parameters: Sequence[str], required: Sequence[str]) -> None:
        self._spec, self.__name__ = spec, name
        kind, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
        ordered = sorted(parameters, key=lambda each: each not in required)  # as a signature has to be
        self.__signature__ = inspect.Signature(
            [inspect.Parameter(each, kind, default=empty if each in required else _Left()) for each in ordered]
        )

    async def __call__(self, **arguments: Any) -> str:
        asked = {"name": self.__name__, "arguments": arguments}
        coming = run_in_loop(_server(self._spec).ask("tools/call", asked, self._spec.timeout))
        said = await asyncio.wrap_future(coming)
        text = result_text(said)
        if said.get("isError"):
            raise ToolError(text)
        return text


def _tool(spec: _Spec, listed: Mapping[str, Any]) -> Tool:
    from pydantic import TypeAdapter

    name, schema = listed["name"], dict(listed.get("inputSchema") or {"type": "object"})
    properties, required = schema.get("properties", {}), tuple(schema.get("required", ()))
    described = {"name": name, "description": listed.get("description") or name, "parameters": schema}
    anything: Mapping[str, TypeAdapter[Any]] = {each: TypeAdapter(Any) for each in properties}  # the server looks
    return Tool(
        name,
        _Call(spec, name, list(properties), required),
        {"type": "function", "function": described},
        anything,
        required,
    )


@functools.cache
def _server(spec: _Spec) -> RpcProgram:
    async def command() -> tuple[Sequence[str], Mapping[str, str]]:
        if spec.command[0] != "python":
            return spec.command, {**spec.executable.env, **dict(spec.env)}
        python, variables = await asyncio.to_thread(lambda: provided(spec.executable))
        return (python, *spec.command[1:]), {**variables, **dict(spec.env)}

    async def greet(server: RpcProgram) -> None:
        client = {"protocolVersion": _VERSION, "capabilities": {}, "clientInfo": {"name": "nrl", "version": "0"}}
        await server.asked("initialize", client, spec.timeout)
        server.send({"jsonrpc": "2.0", "method": "notifications/initialized"})

    async def made() -> RpcProgram:
        return RpcProgram(f"mcp_tools: {spec.shown}", command, greet)

    return run_in_loop(made()).result()


def _now(coming: Any) -> Any:
    return run_in_loop(coming).result()
