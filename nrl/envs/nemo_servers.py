"""Servers of NeMo Gym as environments: its resources servers, and agents that lead episodes of their own.

What they are sent is what its own agents send, so a server that NeMo Gym has started serves nrl as it is.
"""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec

from nrl.envs.connections import connections
from nrl.envs.contract import Environment, Step, Task, Turn
from nrl.envs.endpoint import responses
from nrl.envs.endpoint.application import SESSION
from nrl.envs.endpoint.asked import Asked, Unusable, as_request, call_id
from nrl.envs.endpoint.driven import Endpoint, driven
from nrl.envs.seeds import shuffled
from nrl.errors import EnvError
from nrl.log import error_text
from nrl.runtime.threads import beside

__all__ = ["nemo_gym", "nemo_gym_agent", "nemo_gym_rows"]

_ROW = "responses_create_params"  # the field of a row that says what the model is asked


class _Episode(NamedTuple):
    """An episode at a resources server; a value, so that a step may be repeated.

    Args:
        row: the task.
        cookies: that the server gave; they name its session.
        items: what the model and the tools have said, as items of Responses.
        turns: that were taken.
    """

    row: Mapping[str, Any]
    cookies: Mapping[str, str]
    items: tuple[Mapping[str, Any], ...] = ()
    turns: int = 0


def nemo_gym(url: str, *, tasks: str | None = None, turns: int | None = None, timeout: float = 60.0) -> Environment:
    """The environment that a resources server of NeMo Gym is.

    A task is a row of NeMo Gym's data: ``responses_create_params`` is what the model is asked, and the whole row goes
    to the server. Calls of tools are made there, and their texts go back to the model as they are. After the last turn
    the server verifies. A server of the kind ``gymnasium`` is asked for each observation, and gives each turn a reward.

    What a server answers with a status other than 200 makes the row invalid; a tool's is told to the model, as NeMo
    Gym's ``simple_agent`` does.

    Args:
        url: of the server, such as ``"http://127.0.0.1:8001"``.
        tasks: a file with rows, which the environment brings along; None: they come from elsewhere.
        turns: of the model, at most, until the server verifies; None: as many as it takes (``gymnasium``: 10).
        timeout: seconds for an answer.

    Returns:
        An environment, ``async``. `nrl.envs.limited`, ``pooled`` and the like hold for it.

    Raises:
        EnvError: the file of tasks cannot be read.

    Source: NeMo Gym 0.4.0, ``responses_api_agents/simple_agent/app.py`` and ``gymnasium_agent/app.py``.

    >>> nemo_gym("http://127.0.0.1:8001").verifier is None
    True
    """
    server = url.rstrip("/")

    async def reset(task: Task) -> Any:
        row = dict(task)
        asked = _asked(row)
        if await _is_gymnasium(server):
            found, cookies = await _json(server, "/reset", row, {}, timeout)
            if seen := found.get("observation"):
                asked.messages.append({"role": "user", "content": str(seen)})
        else:
            _, cookies = await _json(server, "/seed_session", row, {}, timeout)
        return _Episode(row, cookies), as_request(asked, [])

    async def step(state: _Episode, turn: Turn) -> Step:
        said = responses.answer(_asked(state.row), [turn], state.turns, str(state.turns))
        state = state._replace(items=(*state.items, *said["output"]), turns=state.turns + 1)
        if await _is_gymnasium(server):
            return await played(state, turn, said)
        if turn.calls and turn.stop_reason == "stop":
            state, told = await called(state, turn)
            if turns is None or state.turns < turns:
                return Step(state, done=False, observation=told)
        found, _ = await _json(
            server, "/verify", {**state.row, "response": {**said, "output": state.items}}, state.cookies, timeout
        )
        return Step(state, _reward(found, server))

    async def called(state: _Episode, turn: Turn) -> tuple[_Episode, list[dict[str, Any]]]:
        """Make the calls of a turn, one after the other, and tell their results."""
        told = list[dict[str, Any]]()
        for at, call in enumerate(turn.calls):
            _, text, cookies = await _post(server, f"/{call.name}", call.arguments, state.cookies, timeout)
            item = {"type": "function_call_output", "call_id": call_id(state.turns - 1, at), "output": text}
            state = state._replace(cookies=cookies, items=(*state.items, item))
            told.append({"role": "tool", "name": call.name, "content": text})
        return state, told

    async def played(state: _Episode, turn: Turn, said: Mapping[str, Any]) -> Step:
        """A turn of a game."""
        found, cookies = await _json(server, "/step", {**state.row, "response": said}, state.cookies, timeout)
        state, reward = state._replace(cookies=cookies), _reward(found, server)
        info = found.get("info") or {}
        if found.get("terminated") or found.get("truncated") or state.turns >= (turns or 10):
            return Step(state, reward)
        outputs = {each["call_id"]: str(each["output"]) for each in info.get("tool_outputs", ())}
        told = [
            {"role": "tool", "name": call.name, "content": outputs.get(call_id(state.turns - 1, at), "")}
            for at, call in enumerate(turn.calls)
        ]
        if seen := found.get("observation"):
            told.append({"role": "user", "content": str(seen)})
        if not told:
            raise EnvError(f"nemo_gym: {server}/step goes on, and gives neither an observation nor a tool's output")
        return Step(state, reward, done=False, observation=told)

    return Environment(reset, step, None, None, None, None if tasks is None else _drawn(tasks))


def nemo_gym_agent(
    url: str, *, host: str = "127.0.0.1", port: int, tasks: str | None = None, timeout: float = 600.0
) -> Environment:
    """The environment whose episodes an agent server of NeMo Gym leads (``/run``), unmodified.

    Its model server has to have this endpoint as its address: start NeMo Gym with
    ``policy_base_url=http://HOST:PORT/v1``. The agent asks its resources server itself, and says the reward.

    Args:
        url: of the agent server.
        host: where the endpoint listens.
        port: there.
        tasks: a file with rows, which the environment brings along; None: they come from elsewhere.
        timeout: seconds of an episode.

    Source: NeMo Gym 0.4.0, ``nemo_gym/base_responses_api_agent.py``.
    """
    server = url.rstrip("/")

    async def start(task: Task, endpoint: Endpoint) -> float:
        asked = dict(task[_ROW])
        metadata = {**(asked.get("metadata") or {}), SESSION: endpoint.api_key}
        row = {**task, _ROW: {**asked, "metadata": metadata}}
        found, _ = await _json(server, "/run", row, {}, timeout)
        return _reward(found, server)

    made = driven(start, host=host, port=port, timeout=timeout)
    return made._replace(tasks=None if tasks is None else _drawn(tasks))


def nemo_gym_rows(file: str | Path) -> list[dict[str, Any]]:
    """The rows of a file of NeMo Gym's data (JSON Lines).

    Raises:
        EnvError: there is no such file, or a line is no row.

    >>> nemo_gym_rows("nowhere.jsonl")
    Traceback (most recent call last):
    nrl.errors.EnvError: nemo_gym: nowhere.jsonl cannot be read: No such file or directory
    """
    try:
        lines = Path(file).expanduser().read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise EnvError(f"nemo_gym: {file} cannot be read: {error.strerror}") from None
    rows = list[dict[str, Any]]()
    for at, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            _asked(row)
        except (ValueError, EnvError) as error:
            raise EnvError(f"nemo_gym: {file}, line {at}: {error}") from None
        rows.append(row)
    if not rows:
        raise EnvError(f"nemo_gym: {file} has no rows")
    return rows


def _drawn(file: str) -> Any:
    """Tasks of a file, which is read here and now."""
    rows = nemo_gym_rows(file)
    return shuffled(lambda: rows)


def _asked(row: Mapping[str, Any]) -> Asked:
    """What a row asks the model."""
    params = row.get(_ROW) if isinstance(row, Mapping) else None
    if not isinstance(params, Mapping):
        raise EnvError(f"nemo_gym: the task has no '{_ROW}'; give rows of NeMo Gym's data")
    if not params.get("input"):  # as where a game says all
        told = params.get("instructions")
        return Asked([{"role": "system", "content": told}] if told else [])
    try:
        return responses.read(params)
    except Unusable as error:
        raise EnvError(f"nemo_gym: {_ROW}: {error}") from None


def _reward(found: Mapping[str, Any], server: str) -> float:
    try:
        return float(found["reward"])
    except (KeyError, TypeError, ValueError):
        raise EnvError(f"nemo_gym: {server} gives no reward; it says {json.dumps(found)[:300]}") from None


_GYMNASIUM: dict[str, bool] = {}


async def _is_gymnasium(server: str) -> bool:
    """Whether a server has `/reset` and `/step` in place of `/seed_session` and `/verify`."""
    if server not in _GYMNASIUM:
        status, text, _ = await _post(server, "/openapi.json", None, {}, 60.0)
        paths = json.loads(text)["paths"] if status == 200 else {}
        _GYMNASIUM[server] = "/reset" in paths and "/seed_session" not in paths
    return _GYMNASIUM[server]


async def _json(
    server: str, path: str, body: Any, cookies: Mapping[str, str], timeout: float
) -> tuple[dict[str, Any], Mapping[str, str]]:
    """An answer that is an object, and the cookies from then on."""
    status, text, cookies = await _post(server, path, body, cookies, timeout)
    try:
        found = json.loads(text) if status == 200 else None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise EnvError(f"nemo_gym: {server}{path} answers with {status}: {text[:500]}")
    return found, cookies


async def _post(
    server: str, path: str, body: Any, cookies: Mapping[str, str], timeout: float
) -> tuple[int, str, Mapping[str, str]]:
    """The status, the text and the cookies of an answer, from any event loop; without a body, of a GET."""
    coming = beside(_sent(server + path, body, cookies, timeout))
    try:
        return await asyncio.wrap_future(coming)
    except (aiohttp.ClientError, OSError) as error:
        raise EnvError(f"nemo_gym: {server}{path} does not answer: {error_text(error)}") from None


async def _sent(url: str, body: Any, cookies: Mapping[str, str], timeout: float) -> tuple[int, str, Mapping[str, str]]:
    session = connections()
    how: Any = {"cookies": dict(cookies), "timeout": aiohttp.ClientTimeout(timeout)}
    if body is None:
        asking = session.get(url, **how)
    else:
        how["headers"] = {"content-type": "application/json"}
        asking = session.post(url, data=msgspec.json.encode(body), **how)
    async with asking as answer:
        text = (await answer.read()).decode(errors="replace")
        return answer.status, text, {**cookies, **{name: each.value for name, each in answer.cookies.items()}}
