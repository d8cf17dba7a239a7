"""Servers of the Model Context Protocol as tools: programs that speak it on their standard input and output."""

import asyncio
import atexit
import functools
import inspect
import itertools
import json
import os
import signal
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, cast

from nrl.envs.endpoint.programs import provided
from nrl.envs.tools import Tool, ToolError
from nrl.errors import EnvError
from nrl.runtime.executables.registry import Executable
from nrl.runtime.executables.registry import executable as registered
from nrl.runtime.threads import beside

__all__ = ["mcp_tools", "result_text"]

_VERSION = "2025-06-18"
_LINES = 20  # of what a server wrote last, for an error
_LONGEST = 2**26  # bytes of a message


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
        raise ValueError("mcp_tools: there is no command; give a program and its arguments")
    spec = _Spec(command, registered(executable), tuple(sorted((env or {}).items())), timeout)
    found, cursor = list[Mapping[str, Any]](), None
    while True:
        listed = _now(_server(spec).ask("tools/list", {} if cursor is None else {"cursor": cursor}))
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
        coming = beside(_server(self._spec).ask("tools/call", asked))
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


class _Server:
    """A server that runs. Used on the loop of these servers alone, but for `ask`, which makes a coroutine for it."""

    def __init__(self, spec: _Spec) -> None:
        self._spec, self._ids = spec, itertools.count()
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._last = deque[str](maxlen=_LINES)
        self._starting = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._reading: list[asyncio.Future[None]] = []

    async def ask(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """The result of a request; it starts the server, if it does not run.

        Raises:
            EnvError: there is none.
        """
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                await self._start()
        return await self._asked(method, params)

    async def _start(self) -> None:
        spec = self._spec
        python, variables = "", cast(Mapping[str, str], spec.executable.env)
        if spec.command[0] == "python":
            python, variables = await asyncio.to_thread(lambda: provided(spec.executable))
        try:
            self._process = await asyncio.create_subprocess_exec(
                *((python, *spec.command[1:]) if python else spec.command),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={**os.environ, **variables, **dict(spec.env)},
                limit=_LONGEST,
                start_new_session=True,
            )
        except OSError as error:
            raise EnvError(f"mcp_tools: {spec.shown}: {error.strerror}") from None
        atexit.register(self._kill)
        self._reading = [asyncio.ensure_future(self._read()), asyncio.ensure_future(self._note())]
        client = {"protocolVersion": _VERSION, "capabilities": {}, "clientInfo": {"name": "nrl", "version": "0"}}
        try:
            await self._asked("initialize", client)
        except BaseException:
            self._kill()
            raise
        self._send({"jsonrpc": "2.0", "method": "notifications/initialized"})

    async def _asked(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        number = next(self._ids)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            self._send({"jsonrpc": "2.0", "id": number, "method": method, "params": params})
            said = await asyncio.wait_for(answer, self._spec.timeout)
        except TimeoutError:
            late = f"has not answered {method} within {self._spec.timeout:g} s"
            raise EnvError(f"mcp_tools: {self._spec.shown} {late}{self._words()}") from None
        finally:
            del self._answers[number]
        if "result" not in said:
            raise EnvError(f"mcp_tools: {self._spec.shown} refuses {method}: {json.dumps(said.get('error'))[:500]}")
        found: dict[str, Any] = said["result"]
        return found

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        if self._process.returncode is not None:
            raise EnvError(self._gone())
        self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _read(self) -> None:
        """Give answers to who waits, until the server ends."""
        assert self._process is not None
        assert self._process.stdout is not None
        with suppress(ValueError):  # a line that is too long
            async for line in self._process.stdout:
                with suppress(ValueError, AttributeError):  # what is no message is a line that it prints
                    said = json.loads(line)
                    answer = self._answers.get(said.get("id"))
                    if answer is not None and not answer.done():
                        answer.set_result(said)
        self._kill()
        await self._process.wait()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EnvError(self._gone()))

    async def _note(self) -> None:
        assert self._process is not None
        assert self._process.stderr is not None
        with suppress(ValueError):
            async for line in self._process.stderr:
                self._last.append(line.decode(errors="replace").rstrip())

    def _gone(self) -> str:
        assert self._process is not None
        return f"mcp_tools: {self._spec.shown} has ended with {self._process.returncode}{self._words()}"

    def _words(self) -> str:
        return f"; its last words: {' / '.join(self._last)}" if self._last else ""

    def _kill(self) -> None:
        assert self._process is not None
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


@functools.cache
def _server(spec: _Spec) -> _Server:
    async def made() -> _Server:
        return _Server(spec)

    return beside(made()).result()


def _now(coming: Any) -> Any:
    return beside(coming).result()
