"""Environments of OpenEnv: a server that is asked over a WebSocket, one for each episode."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NamedTuple

import aiohttp

from nrl.envs.types import Environment, Step, Task, Turn
from nrl.errors import EnvError
from nrl.gym.http.connections import connections
from nrl.log import error_text
from nrl.runtime.threads import run_in_loop

__all__ = ["openenv"]

_UNREAD = ("VALIDATION_ERROR", "INVALID_JSON")  # what the model can do something about


class _Episode(NamedTuple):
    """An episode: its connection, the fields that an action has, and whether its prompt is plain text."""

    socket: aiohttp.ClientWebSocketResponse
    fields: tuple[str, ...]
    plain: bool


def openenv(
    url: str,
    *,
    act: Callable[[Turn, tuple[str, ...]], Mapping[str, Any]] | None = None,
    show: Callable[[Mapping[str, Any]], str] | None = None,
    timeout: float = 60.0,
) -> Environment:
    """The environment that a server of OpenEnv is.

    A task may have a ``"prompt"``, text or messages, behind which the first observation stands, and ``"reset"``, what
    the server's ``reset`` is given besides the seed. An action that the server cannot read is answered with why, and
    the episode goes on; other errors make the row invalid.

    Args:
        url: of the server, such as ``"http://127.0.0.1:8000"``.
        act: from a turn and the names of an action's fields to the action; None: the turn is a JSON object, or, where
            there is one field, its value.
        show: from an observation to the text that the model sees; None: its only field, if that is text; else JSON.
        timeout: seconds for an answer.

    Returns:
        An environment, ``async``.

    Source: OpenEnv 0.10, ``openenv/core/env_server/http_server.py``.

    >>> openenv("http://127.0.0.1:8000").verifier is None
    True
    """
    server, acting, showing = url.rstrip("/"), act or _action, show or _text

    async def reset(task: Task) -> Any:
        prompt = task.get("prompt", "")
        episode, seen = await _there(_begin(server, task, timeout), server)
        said = showing(seen["observation"])
        if isinstance(prompt, str):
            return episode, f"{prompt}\n{said}\n" if prompt else f"{said}\n"
        return episode, [*prompt, {"role": "user", "content": said}]

    async def step(state: _Episode, turn: Turn) -> Step:
        try:
            action = acting(turn, state.fields)
        except ValueError as error:
            return _goes_on(state, str(error))
        kind, said = await _there(_exchanged(state.socket, {"type": "step", "data": action}, timeout), server)
        if kind == "error":
            return _goes_on(state, f"{said.get('message')}: {json.dumps(said.get('errors'))}")
        reward = float(said.get("reward") or 0.0)
        if said.get("done"):
            return Step(state, reward)
        return _goes_on(state, showing(said["observation"]), reward)

    def _goes_on(state: _Episode, said: str, reward: float = 0.0) -> Step:
        told: Any = f"\n{said}\n" if state.plain else [{"role": "user", "content": said}]
        return Step(state, reward, done=False, observation=told)

    async def close(state: _Episode) -> None:
        await _there(state.socket.close(), server)

    return Environment(reset, step, close, None, None)


def _action(turn: Turn, fields: tuple[str, ...]) -> Mapping[str, Any]:
    """The action of a turn.

    Raises:
        ValueError: there is none; the message is for the model.
    """
    text = turn.text.strip()
    try:
        found = json.loads(text)
    except ValueError:
        found = text
    if isinstance(found, dict):
        return found
    if len(fields) == 1:
        return {fields[0]: found}
    raise ValueError(f"this is no action; write a JSON object with {', '.join(fields)}")


def _text(observation: Mapping[str, Any]) -> str:
    """What a model sees of an observation."""
    known = {key: value for key, value in observation.items() if key != "metadata" and value is not None}
    alone = next(iter(known.values())) if len(known) == 1 else None
    return alone if isinstance(alone, str) else json.dumps(known, ensure_ascii=False)


async def _begin(server: str, task: Task, timeout: float) -> tuple[_Episode, Mapping[str, Any]]:
    """Connect, and reset."""
    limit = aiohttp.ClientWSTimeout(ws_close=5.0)
    socket = await connections().ws_connect(f"{server}/ws", max_msg_size=0, timeout=limit)
    try:
        data = {"seed": task.get("seed"), **task.get("reset", {})}
        kind, seen = await _exchanged(socket, {"type": "reset", "data": data}, timeout)
        if kind == "error":
            raise EnvError(f"openenv: {server} refuses the reset: {json.dumps(seen)[:500]}")
        plain = isinstance(task.get("prompt", ""), str)
        return _Episode(socket, await _fields(server, timeout), plain), seen
    except BaseException:
        await socket.close()
        raise


_FIELDS: dict[str, tuple[str, ...]] = {}


async def _fields(server: str, timeout: float) -> tuple[str, ...]:
    """The names of an action's fields."""
    if server not in _FIELDS:
        async with connections().get(f"{server}/schema", timeout=aiohttp.ClientTimeout(timeout)) as answer:
            found = await answer.json() if answer.status == 200 else {}
        known = found.get("action", {}).get("properties", {})
        _FIELDS[server] = tuple(name for name in known if name != "metadata")
    return _FIELDS[server]


async def _exchanged(
    socket: aiohttp.ClientWebSocketResponse, asked: Mapping[str, Any], timeout: float
) -> tuple[str, Mapping[str, Any]]:
    """What comes back: of an observation, or of an error that the model can do something about."""
    await socket.send_json(asked)
    said = await socket.receive(timeout)
    if said.type != aiohttp.WSMsgType.TEXT:
        raise EnvError(f"openenv: the server has closed the connection ({said.extra or said.type.name})")
    found = json.loads(said.data)
    kind, data = found.get("type"), found.get("data", {})
    if kind == "error" and data.get("code") not in _UNREAD:
        raise EnvError(f"openenv: the server says {data.get('code')}: {str(data.get('message'))[:500]}")
    return str(kind), data


async def _there[T](coming: Coroutine[Any, Any, T], server: str) -> T:
    """Run on the loop of the connections."""
    try:
        return await asyncio.wrap_future(run_in_loop(coming))
    except (aiohttp.ClientError, OSError) as error:
        if isinstance(error, TimeoutError):
            raise
        raise EnvError(f"openenv: {server} does not answer: {error_text(error)}") from None
