"""Servers of NeMo Gym as environments: its resources servers, and agents that lead episodes of their own.

What they are sent is what its own agents send, so a server that NeMo Gym has started serves nrl as it is.
"""

import functools
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from nrl.envs.types import Environment, Step, Task, Turn
from nrl.errors import EnvError
from nrl.gym.adapters.mcp import result_text
from nrl.gym.adapters.nemo.metrics import TASK
from nrl.gym.adapters.nemo.nemo_client import Mcp, asked_by_mcp, json_of, mcp_of, posted
from nrl.gym.adapters.nemo.processes import NemoServer, NemoServers, nemo_gym_servers
from nrl.gym.adapters.nemo.rows import ROW, asked_of, drawn
from nrl.gym.endpoint import responses
from nrl.gym.endpoint.agent_env import Endpoint, driven
from nrl.gym.endpoint.chat_request import Asked, as_request, call_id
from nrl.gym.endpoint.endpoint_app import SESSION

__all__ = ["nemo_gym", "nemo_gym_agent"]


class _Episode(NamedTuple):
    """An episode at a resources server; a value, so that a step may be repeated.

    Args:
        row: the task.
        cookies: that the server gave; they name its session.
        items: what the model and the tools have said, as items of Responses.
        turns: that were taken.
        reward: of these.
        mcp: tools that are not among those of the row; None: there are none.
    """

    row: Mapping[str, Any]
    cookies: Mapping[str, str]
    items: tuple[Mapping[str, Any], ...] = ()
    turns: int = 0
    reward: float = 0.0
    mcp: Mcp | None = None

    @property
    def asked(self) -> Asked:
        """What the model is asked."""
        found = asked_of(self.row)
        found.tools.extend(map(dict, self.mcp.tools if self.mcp else ()))
        return found


def nemo_gym(
    url: str | None = None,
    *,
    server: str | None = None,
    options: Mapping[str, Any] | None = None,
    requirements: Sequence[str] = (),
    tasks: str | None = None,
    turns: int | None = None,
    answers: str | None = None,
    timeout: float = 60.0,
) -> Environment:
    """The environment that a resources server of NeMo Gym is, which runs already or is started here.

    A task is a row of NeMo Gym's data: ``responses_create_params`` is what the model is asked, and the whole row goes
    to the server. Calls of tools are made there, and their texts go back to the model as they are; tools that the
    server offers over MCP are offered to the model, too. After the last turn the server verifies, and what it says in
    numbers is reported as ``env/...``. A server of the kind ``gymnasium`` is asked for each observation, and gives each
    turn a reward.

    What a server answers with a status other than 200 makes the row invalid; a tool's is told to the model, as NeMo
    Gym's ``simple_agent`` does.

    Args:
        url: of the server, such as ``"http://127.0.0.1:8001"``.
        server: one of the package nemo-gym in place of a ``url``, such as ``"mcqa"``; it is started by
            `nrl.gym.adapters.nemo.processes.nemo_gym_servers`, and ends with this program.
        options: of its configuration, by name.
        requirements: more packages that it needs.
        tasks: a file with rows, which the environment brings along. None: they come from elsewhere, or are the example
            rows of the package.
        turns: of the model, at most, until the server verifies; None: as many as it takes (``gymnasium``: 10).
        answers: a file to which what the server answers to ``/verify`` is added, without what was said, for
            `nrl.gym.adapters.nemo.metrics.nemo_gym_metrics`.
        timeout: seconds for an answer.

    Returns:
        An environment, ``async``. `nrl.envs.limited`, ``pooled`` and the like hold for it.

    Raises:
        EnvError: the file of tasks cannot be read, the server does not start, or there are a ``url`` and a ``server``.

    Source: NeMo Gym 0.4.0, ``responses_api_agents/simple_agent/app.py`` and ``gymnasium_agent/app.py``.

    >>> nemo_gym("http://127.0.0.1:8001").verifier is None
    True
    """
    if (url is None) == (server is None) or (server is None and (options or requirements)):
        raise EnvError("nemo_gym: give either the url of a server that runs, or the name of a server and its options")
    if server is not None:
        running = _started(server, json.dumps(options or {}), tuple(requirements))
        url, tasks = running.urls[server], tasks or str(running.folders[server] / "data" / "example.jsonl")
    assert url is not None
    return _resources(url.rstrip("/"), tasks, turns, answers, timeout)


def _resources(server: str, tasks: str | None, turns: int | None, answers: str | None, timeout: float) -> Environment:
    async def reset(task: Task) -> Any:
        state = _Episode(dict(task), {})
        asked, seen = state.asked, None
        if await _is_gymnasium(server):
            found, cookies = await json_of(server, "/reset", state.row, {}, timeout)
            if seen := found.get("observation"):
                asked.messages.append({"role": "user", "content": str(seen)})
        else:
            found, cookies = await json_of(server, "/seed_session", state.row, {}, timeout)
            state = state._replace(mcp=await mcp_of(server, found.get("mcp"), timeout))
            asked = state.asked
        return state._replace(cookies=cookies), as_request(asked, [])

    async def step(state: _Episode, turn: Turn) -> Step:
        if not turn.token_ids and turn.stop_reason == "refused":
            raise EnvError(f"nemo_gym: what a row asks cannot be said to the model: {turn.text}")
        if not turn.token_ids and turn.stop_reason == "length" and not state.turns:
            raise EnvError(f"nemo_gym: what a row asks has {turn.prompt_tokens} tokens, and fills the context")
        said = responses.answer(state.asked, [turn], state.turns, str(state.turns))
        state = state._replace(items=(*state.items, *said["output"]), turns=state.turns + 1)
        if await _is_gymnasium(server):
            return await played(state, turn, said)
        if turn.calls and turn.stop_reason == "stop":
            state, told = await called(state, turn)
            if turns is None or state.turns < turns:
                return Step(state, done=False, observation=told)
        found, _ = await json_of(
            server, "/verify", {**state.row, "response": {**said, "output": state.items}}, state.cookies, timeout
        )
        note(state, found)
        numbers = {key: each for key, each in found.items() if key not in state.row and key != "reward"}
        return Step(state, _reward(found, server), info=_numbers(numbers))

    def note(state: _Episode, found: Mapping[str, Any]) -> None:
        """Add an answer to the file of these, in one write, since episodes do it at the same time."""
        if answers is not None:
            task = {key: each for key, each in state.row.items() if key != "seed"}  # which is nrl's, and no number
            row = {**found, TASK: task.get(TASK, zlib.crc32(msgspec.json.encode(task)))}
            usage = (found.get("response") or {}).get("usage")
            kept = {key: row[key] for key in row if key not in (ROW, "response", "seed")}
            with Path(answers).expanduser().open("ab", buffering=0) as file:
                file.write(msgspec.json.encode(kept | ({"response": {"usage": usage}} if usage else {})) + b"\n")

    async def called(state: _Episode, turn: Turn) -> tuple[_Episode, list[dict[str, Any]]]:
        """Make the calls of a turn, one after the other, and tell their results."""
        told = list[dict[str, Any]]()
        for at, call in enumerate(turn.calls):
            if state.mcp and any(call.name == each["function"]["name"] for each in state.mcp.tools):
                asked = {"name": call.name, "arguments": call.arguments}
                text = result_text(await asked_by_mcp(server, state.mcp, "tools/call", asked, timeout))
            else:
                _, text, cookies = await posted(server, f"/{call.name}", call.arguments, state.cookies, timeout)
                state = state._replace(cookies=cookies)
            item = {"type": "function_call_output", "call_id": call_id(state.turns - 1, at), "output": text}
            state = state._replace(items=(*state.items, item))
            told.append({"role": "tool", "name": call.name, "content": text})
        return state, told

    async def played(state: _Episode, turn: Turn, said: Mapping[str, Any]) -> Step:
        """A turn of a game."""
        found, cookies = await json_of(server, "/step", {**state.row, "response": said}, state.cookies, timeout)
        reward, info = _reward(found, server), found.get("info") or {}
        state = state._replace(cookies=cookies, reward=state.reward + reward)
        if found.get("terminated") or found.get("truncated") or state.turns >= (turns or 10):
            note(state, {**state.row, "reward": state.reward})
            return Step(state, reward, info=_numbers(info))
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

    return Environment(reset, step, None, None, None, None if tasks is None else drawn(tasks))


def nemo_gym_agent(
    url: str | Mapping[str, str],
    *,
    host: str = "127.0.0.1",
    port: int,
    tasks: str | None = None,
    timeout: float = 600.0,
) -> Environment:
    """The environment whose episodes an agent server of NeMo Gym leads (``/run``), unmodified.

    Its model server has to have this endpoint as its address: start NeMo Gym with
    ``policy_base_url=http://HOST:PORT/v1``. The agent asks its resources server itself, and says the reward.

    Args:
        url: of the agent server; or those of several by their names, of which a row's ``agent_ref`` names one, as where
            the rows of several environments lie in one file.
        host: where the endpoint listens.
        port: there.
        tasks: a file with rows, which the environment brings along; None: they come from elsewhere.
        timeout: seconds of an episode.

    Source: NeMo Gym 0.4.0, ``nemo_gym/base_responses_api_agent.py``.
    """

    async def start(task: Task, endpoint: Endpoint) -> float:
        asked, server = dict(task[ROW]), _agent_of(task, url).rstrip("/")
        metadata = {**(asked.get("metadata") or {}), SESSION: endpoint.api_key}
        row = {**task, ROW: {**asked, "metadata": metadata}}
        found, _ = await json_of(server, "/run", row, {}, timeout)
        return _reward(found, server)

    made = driven(start, host=host, port=port, timeout=timeout)
    return made._replace(tasks=None if tasks is None else drawn(tasks))


def _agent_of(task: Task, url: str | Mapping[str, str]) -> str:
    if isinstance(url, str):
        return url
    name = str((task.get("agent_ref") or {}).get("name"))
    if name not in url:
        raise EnvError(
            f"nemo_gym_agent: the row's agent_ref names {name!r}, and url has {', '.join(map(repr, url))}; give the "
            "address of each agent by its name"
        )
    return url[name]


def _reward(found: Mapping[str, Any], server: str) -> float:
    try:
        return float(found["reward"])
    except (KeyError, TypeError, ValueError):
        raise EnvError(f"nemo_gym: {server} gives no reward; it says {json.dumps(found)[:300]}") from None


def _numbers(found: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in found.items() if isinstance(value, bool | int | float)}


@functools.cache
def _started(server: str, options: str, requirements: tuple[str, ...]) -> NemoServers:
    return nemo_gym_servers({server: NemoServer(server, json.loads(options))}, requirements=requirements)


_GYMNASIUM: dict[str, bool] = {}


async def _is_gymnasium(server: str) -> bool:
    """Whether a server has `/reset` and `/step` in place of `/seed_session` and `/verify`."""
    if server not in _GYMNASIUM:
        status, text, _ = await posted(server, "/openapi.json", None, {}, 60.0)
        if status >= 500:  # it may say more the next time
            raise EnvError(f"nemo_gym: {server}/openapi.json answers {status}: {text[:200]}")
        paths = json.loads(text)["paths"] if status == 200 else {}
        _GYMNASIUM[server] = "/reset" in paths and "/seed_session" not in paths
    return _GYMNASIUM[server]
