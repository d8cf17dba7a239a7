"""`verifiers_server`: an environment server of verifiers 0.4, which leads episodes of its own, as an environment."""

import asyncio
import contextlib
import functools
import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from nrl.envs.seeds import shuffled
from nrl.envs.types import Environment, Score, Task
from nrl.errors import EnvError
from nrl.gym.endpoint.agent_env import Endpoint, driven
from nrl.gym.http.json_codec import sendable
from nrl.runtime.threads import run_in_loop

__all__ = ["verifiers_server"]

_CONNECTING = 10.0  # seconds
_CANCELLING = 10.0
_BEAT = 5_000  # milliseconds between the heartbeats of a connection, and six of them until it counts as lost
_SOCKETS = 65_536
_NO_KEY = "NRL_NO_API_KEY"  # the address names the episode; a variable that the server has may hold a key of others
_TRACE: Mapping[str, Any] = {"ok": False, "rewards": {}, "metrics": {}, "errors": []}


def verifiers_server(
    address: str,
    *,
    tasks: str | None = None,
    sampling: Mapping[str, Any] | None = None,
    host: str = "127.0.0.1",
    timeout: float = 600.0,
) -> Environment:
    """The environment that a running environment server of verifiers 0.4 is.

    The server leads the episode: it runs its harness, whose requests come to this endpoint, and scores the traces. The
    reward is the weighted sum of its rewards, over all traces of the episode. Each reward and each metric is a
    component, ``reward/<name>``, with the score that it has before its weight; of several agents, ``<agent>/<name>``.

    An episode or a trace of which the server says that it is not ``ok`` makes the row invalid, as does a connection
    that breaks. When an episode ends early, the server is told to cancel it.

    Args:
        address: of the server, such as ``"tcp://127.0.0.1:5000"``.
        tasks: a file with the taskset's ``TaskData`` (JSON Lines), which the environment brings along; None: they come
            from elsewhere. A server has no request that lists them.
        sampling: verifiers' own ``SamplingConfig``. The rollout alone says how tokens are drawn, so that only matters
            to harnesses that read it.
        host: where the endpoint listens; the server has to reach it.
        timeout: seconds of the server between two requests, until the first, and from the last to its score.

    Returns:
        An environment, ``async``. A task is the dump of a ``TaskData``.

    Raises:
        EnvError: the file of tasks cannot be read; or, when called, there is no pyzmq, or the server does not answer.

    Source: verifiers 0.4.0, ``verifiers/v1/serve``.

    >>> verifiers_server("tcp://127.0.0.1:5000").tasks is None
    True
    """
    made = driven(functools.partial(_start, address, dict(sampling or {})), host=host, timeout=timeout)
    if tasks is None:
        return made
    rows = _rows(tasks)
    return made._replace(tasks=shuffled(lambda: rows))


async def _start(address: str, sampling: Mapping[str, Any], task: Task, endpoint: Endpoint) -> Score:
    client = {"type": "eval", "base_url": endpoint.base_url, "api_key_var": _NO_KEY}
    asked = {
        "task_data": sendable(dict(task), "the task"),
        "client": client,
        "model": endpoint.model,
        "sampling": sampling,
    }
    reply, traces = await asyncio.wrap_future(run_in_loop(_run(address, asked)))
    return _score(reply, traces)


async def _run(address: str, asked: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, dict[str, Any]]]:
    """The reply to a request to run an episode, and its traces, by id, as far as a score needs them.

    Each episode has a connection of its own, so what breaks is the episodes of that server, at once.
    """
    zmq = _zmq()
    socket = _context().socket(zmq.DEALER)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _BEAT)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 6 * _BEAT)
    events = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
    name, linger, traces = uuid.uuid4().hex, 0, dict[str, dict[str, Any]]()
    try:
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            raise EnvError(f"verifiers_server: {address} is no address: {error}; give tcp://HOST:PORT") from None
        if not await events.poll(_CONNECTING * 1000):
            raise EnvError(f"verifiers_server: {address} does not answer; is the server there?")
        await events.recv_multipart()  # the handshake
        await socket.send_multipart([name.encode(), b"run", msgspec.msgpack.encode(asked)])
        linger = 1000
        lost = asyncio.ensure_future(events.recv_multipart())
        try:
            while True:
                _, kind, data = await _coming(socket, lost, address)
                said = _read(data, address)
                if kind == b"reply":
                    return said, traces
                _apply(said, traces)
        finally:
            lost.cancel()
    except asyncio.CancelledError:
        await _cancel(socket, name)
        raise
    finally:
        socket.disable_monitor()
        events.close(0)
        socket.close(linger)


async def _coming(socket: Any, lost: "asyncio.Future[Any]", address: str) -> list[bytes]:
    """The next message, while the connection is there."""
    coming: asyncio.Future[list[bytes]] = asyncio.ensure_future(socket.recv_multipart())
    try:
        await asyncio.wait([coming, lost], return_when=asyncio.FIRST_COMPLETED)
        if not coming.done():
            raise EnvError(f"verifiers_server: the connection to {address} has broken in an episode")
        return coming.result()
    finally:
        coming.cancel()  # or it would take a message of what comes after


async def _cancel(socket: Any, name: str) -> None:
    """Tell the server to cancel an episode, and wait for its answer.

    Where the episode has just ended, a server with several workers ends itself if nobody is there who takes the answer
    (verifiers 0.4.0, ``EnvServerPool.run``).
    """
    asked = uuid.uuid4().hex.encode()
    with contextlib.suppress(_zmq().ZMQError, TimeoutError):
        async with asyncio.timeout(_CANCELLING):
            await socket.send_multipart([asked, b"cancel", msgspec.msgpack.encode({"request_id": name})])
            while (await socket.recv_multipart())[0] != asked:
                pass


def _read(data: bytes, address: str) -> Mapping[str, Any]:
    try:
        return msgspec.msgpack.decode(data, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise EnvError(f"verifiers_server: {address} says what is no msgpack object: {error}") from None


def _apply(delta: Mapping[str, Any], traces: dict[str, dict[str, Any]]) -> None:
    """Put what has changed of a trace to what is known."""
    if delta.get("discard"):
        traces.pop(delta["trace"], None)
        return
    trace = traces.setdefault(delta["trace"], dict(_TRACE))
    trace.update(delta.get("set") or {})
    trace["errors"] = [*trace["errors"], *delta.get("errors", ())]


def _score(reply: Mapping[str, Any], traces: Mapping[str, Mapping[str, Any]]) -> Score:
    """The verdict on an episode.

    Raises:
        EnvError: it has failed.
    """
    if not reply.get("success"):
        raise EnvError(f"verifiers_server: the server says {reply.get('error')}")
    head = reply.get("head") or {}
    ended = [traces.get(each["id"], _TRACE) for each in reply.get("traces") or ()]
    failed = [each for each in (head, *ended) if not each.get("ok")]
    if failed or not ended:
        errors = [f"{each.get('type')}: {each.get('message')}" for one in failed for each in one.get("errors") or ()]
        raise EnvError(f"verifiers_server: the episode has failed: {'; '.join(errors)[:1000] or 'it says not why'}")
    reward, components = 0.0, dict[str, float]()
    for trace in ended:
        agent = f"{(trace.get('agent') or {}).get('name')}/" if len(ended) > 1 else ""
        scored = {key: each for key, each in trace["rewards"].items() if each is not None}
        reward += sum(each["score"] * each.get("weight", 1.0) for each in scored.values())
        numbers = {**trace["metrics"], **{key: each["score"] for key, each in scored.items()}}
        components |= {f"{agent}{key}": float(each) for key, each in numbers.items() if each is not None}
    return Score(reward, "ok", components)


def _rows(file: str) -> list[Task]:
    """The rows of a file of JSON Lines."""
    try:
        lines = Path(file).expanduser().read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise EnvError(f"verifiers_server: {file} cannot be read: {error.strerror}") from None
    rows = list[Task]()
    for at, line in enumerate(lines, 1):
        try:
            row = json.loads(line) if line.strip() else None
        except ValueError as error:
            raise EnvError(f"verifiers_server: {file}, line {at}: {error}") from None
        if row is not None and not isinstance(row, dict):
            raise EnvError(f"verifiers_server: {file}, line {at}: this is no object; give the dump of a TaskData")
        rows += [] if row is None else [row]
    if not rows:
        raise EnvError(f"verifiers_server: {file} has no rows")
    return rows


def _zmq() -> Any:
    try:
        import zmq.asyncio
    except ImportError:
        raise EnvError(
            "verifiers_server: this Python has no pyzmq, by which the server is asked; install nrl-torch[verifiers], "
            "or 'pyzmq>=26'"
        ) from None
    return zmq


@functools.cache
def _context() -> Any:
    """Of all connections, which are used on one event loop."""
    made = _zmq().asyncio.Context()
    made.set(_zmq().MAX_SOCKETS, _SOCKETS)
    return made
