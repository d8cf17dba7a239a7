"""Requests to servers of NeMo Gym, from any event loop; and the tools that they offer over MCP."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import aiohttp
import msgspec

from nrl.errors import EnvError
from nrl.gym.endpoint.chat_request import chat_tools
from nrl.gym.http.connections import connections
from nrl.log import error_text
from nrl.runtime.threads import run_in_loop

__all__ = ["Mcp", "asked_by_mcp", "json_of", "mcp_of", "posted"]


class Mcp(NamedTuple):
    """The tools that a server offers over MCP, in an episode."""

    path: str
    headers: Mapping[str, str]
    tools: tuple[Mapping[str, Any], ...]  # in the form of Chat Completions


async def json_of(
    server: str, path: str, body: Any, cookies: Mapping[str, str], timeout: float
) -> tuple[dict[str, Any], Mapping[str, str]]:
    """An answer that is an object, and the cookies from then on."""
    status, text, cookies = await posted(server, path, body, cookies, timeout)
    return _object(server + path, status, text), cookies


def _object(url: str, status: int, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text) if status == 200 else None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise EnvError(f"nemo_gym: {url} answers with {status}: {text[:500]}")
    return found


async def posted(
    server: str, path: str, body: Any, cookies: Mapping[str, str], timeout: float, headers: Mapping[str, str] = {}
) -> tuple[int, str, Mapping[str, str]]:
    """The status, the text and the cookies of an answer, from any event loop; without a body, of a GET."""
    coming = run_in_loop(_sent(server + path, body, cookies, timeout, headers))
    try:
        return await asyncio.wrap_future(coming)
    except (aiohttp.ClientError, OSError) as error:
        raise EnvError(f"nemo_gym: {server}{path} does not answer: {error_text(error)}") from None


async def _sent(
    url: str, body: Any, cookies: Mapping[str, str], timeout: float, headers: Mapping[str, str] = {}
) -> tuple[int, str, Mapping[str, str]]:
    session = connections()
    how: Any = {"cookies": dict(cookies), "timeout": aiohttp.ClientTimeout(timeout)}
    if body is None:
        asking = session.get(url, **how)
    else:
        how["headers"] = {"content-type": "application/json", **headers}
        asking = session.post(url, data=msgspec.json.encode(body), **how)
    async with asking as answer:
        text = (await answer.read()).decode(errors="replace")
        return answer.status, text, {**cookies, **{name: each.value for name, each in answer.cookies.items()}}


async def mcp_of(server: str, told: Any, timeout: float) -> Mcp | None:
    """The tools that a server offers by the answer to `/seed_session`."""
    if not isinstance(told, Mapping):
        return None
    made = Mcp(f"/{str(told.get('url_path') or 'mcp').strip('/')}", dict(told.get("headers") or {}), ())
    found, cursor = list[Mapping[str, Any]](), None
    while True:
        listed = await asked_by_mcp(server, made, "tools/list", {} if cursor is None else {"cursor": cursor}, timeout)
        found += listed["tools"]
        cursor = listed.get("nextCursor")
        if cursor is None:
            tools = [{**each, "type": "function", "parameters": each.get("inputSchema")} for each in found]
            return made._replace(tools=tuple(chat_tools(tools)))


async def asked_by_mcp(
    server: str, of: Mcp, method: str, params: Mapping[str, Any], timeout: float
) -> Mapping[str, Any]:
    """The result of a request by MCP, revision 2025-06-18, to a server that keeps no sessions and answers with JSON."""
    body = {"jsonrpc": "2.0", "id": 0, "method": method, "params": params}
    headers = {**of.headers, "accept": "application/json, text/event-stream"}
    status, text, _ = await posted(server, of.path, body, {}, timeout, headers)
    said = _object(server + of.path, status, text)
    if "result" not in said:
        raise EnvError(f"nemo_gym: {server}{of.path} refuses {method}: {json.dumps(said.get('error'))[:500]}")
    result: Mapping[str, Any] = said["result"]
    return result
