"""Servers of the Model Context Protocol as tools."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import nrl
from nrl.envs.tools import Tool, ToolCall, call, tool_use
from nrl.errors import EnvError
from nrl.gym.adapters.mcp import mcp_tools
from tests.gym.endpoint.driving import Says, turn
from tests.processes import alive, settled

SERVER = """
import json, os, sys, time
LISTED = [
    {"name": "weather", "description": "Weather of a city.", "inputSchema": {
        "type": "object", "required": ["city"],
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}},
    {"name": "pid", "inputSchema": {"type": "object"}},
]
print("no message", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    how, params = asked["method"], asked["params"]
    if how == "initialize":
        found = {"protocolVersion": params["protocolVersion"], "capabilities": {}, "serverInfo": {"name": "w"}}
    elif how == "tools/list":
        at = int(params.get("cursor", 0))
        found = {"tools": LISTED[at : at + 1]} | ({"nextCursor": "1"} if at == 0 else {})
    else:
        given = params["arguments"]
        if given.get("city") == "nowhere":
            found = {"content": [{"type": "text", "text": "no such city"}], "isError": True}
        elif given.get("city") == "end":
            sys.exit("I give up")
        elif given.get("city") == "slow":
            time.sleep(60)
        else:
            text = f"cold in {given['city']} for {given.get('days', 1)}" if "city" in given else str(os.getpid())
            found = {"content": [{"type": "text", "text": text}]}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": found}), flush=True)
"""


@pytest.fixture
def server(tmp_path: Path) -> str:
    path = tmp_path / "server.py"
    path.write_text(SERVER)
    return str(path)


def results(tools: list[Tool], *calls: ToolCall) -> list[Any]:
    return [(each.status, each.text) for each in asyncio.run(call(tools, calls)).results]


def test_tools_are_listed_and_called(server: str) -> None:
    tools = mcp_tools("python", server)
    assert [each.name for each in tools] == ["weather", "pid"]
    shown = tools[0].schema["function"]
    assert shown["description"] == "Weather of a city."
    assert shown["parameters"]["properties"]["days"] == {"type": "integer"}
    calls = [ToolCall("weather", {"city": "Paris", "days": 2}), ToolCall("weather", {"city": "nowhere"})]
    assert results(tools, *calls, ToolCall("weather", {"days": 2})) == [
        ("ok", "cold in Paris for 2"),
        ("error", "no such city"),
        ("invalid", "weather was not called: city is missing; write weather(city, days=...)"),
    ]


def test_all_episodes_share_it_and_another_process_has_its_own(server: str) -> None:
    tools = mcp_tools("python", server)
    (_, here), (_, again) = results(tools, ToolCall("pid", {})) + results(tools, ToolCall("pid", {}))
    assert here == again
    env = tool_use(tools, lambda task, trace: float("cold in Oslo" in str(trace.observations)))
    for where in (env, nrl.pooled(env, workers=1)):
        said = [turn("qwen3", "", ("weather", {"city": "Oslo"})), turn("qwen3", "It is cold .")]
        batch = nrl.rollout(Says("qwen3", said), where, [{"prompt": "Oslo ?"}])
        assert batch["rewards"].tolist() == [1.0]


def test_it_ends_with_the_program(server: str) -> None:
    code = (
        "import asyncio\nfrom nrl.gym.adapters.mcp import mcp_tools\nfrom nrl.envs.tools import ToolCall, call\n"
        f"tools = mcp_tools('python', {server!r})\n"
        "print(asyncio.run(call(tools, [ToolCall('pid', {})])).results[0].text)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not settled(lambda: alive(int(ended.stdout)), 10)


def test_a_server_that_ends_or_is_late_makes_the_row_invalid(server: str) -> None:
    tools = mcp_tools("python", server, timeout=3.0)
    began = time.monotonic()
    with pytest.raises(EnvError, match="has not answered tools/call within 3 s"):
        results(tools, ToolCall("weather", {"city": "slow"}))
    assert time.monotonic() - began < 20
    tools = mcp_tools("python", server, env={"OTHER": "1"})
    for _ in range(2):
        with pytest.raises(EnvError, match=r"server.py has ended with -?\d+; its last words: I give up"):
            results(tools, ToolCall("weather", {"city": "end"}))


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (("/nowhere/server",), "mcp_tools: /nowhere/server: No such file or directory"),
        (("python", "-c", "import sys; sys.exit('broken')"), "has ended with -?[0-9]+; its last words: broken"),
    ],
)
def test_a_server_that_does_not_start_is_named(command: tuple[str, ...], why: str) -> None:
    with pytest.raises(EnvError, match=why):
        mcp_tools(*command)


def test_there_has_to_be_a_command() -> None:
    with pytest.raises(ValueError, match="there is no command"):
        mcp_tools()


@pytest.mark.slow
@pytest.mark.parametrize("version", ["mcp==1.30.0", "mcp==2.3.0"])
def test_servers_of_the_package(version: str, tmp_path: Path) -> None:
    uv, python = [sys.executable, "-m", "uv"], tmp_path / "venv" / "bin" / "python"
    subprocess.run([*uv, "venv", "-q", "--python", sys.executable, str(tmp_path / "venv")], check=True)
    subprocess.run([*uv, "pip", "install", "-q", "-p", str(python), version], check=True)
    (tmp_path / "server.py").write_text(
        "try:\n    from mcp.server.mcpserver import MCPServer as Server\n"
        "except ImportError:\n    from mcp.server.fastmcp import FastMCP as Server\n"
        "server = Server('weather')\n"
        "@server.tool()\ndef weather(city: str, days: int = 1) -> str:\n"
        "    'Weather.'\n    return f'cold in {city} for {days}'\n"
        "server.run()\n"
    )
    tools = mcp_tools(str(python), str(tmp_path / "server.py"), env={"PATH": os.environ["PATH"]})
    calls = [ToolCall("weather", {"city": "Paris", "days": 2}), ToolCall("weather", {"city": "Paris", "days": "x"})]
    (good, text), (bad, why) = results(tools, *calls)
    assert (good, text) == ("ok", "cold in Paris for 2")
    assert bad == "error"
    assert "days" in why
