"""The head server of a gym: which servers there are, where, and how they are."""

import asyncio
import json
import socket
from collections.abc import Callable, Collection
from typing import Any, Literal

from msgspec import Struct

from nrl.gym.http.application import FINE, Health, routed
from nrl.gym.http.front import Application
from nrl.gym.http.idempotency import Refused
from nrl.gym.http.openapi import Route
from nrl.gym.http.server_socket import Listener

__all__ = ["ReplicaShown", "ServerShown", "Servers", "application", "serving"]

_GRACE = 1.0  # seconds for answers that are under way at the end


class ReplicaShown(Struct):
    """A process, or an address elsewhere. ``since`` is a time in seconds since 1970."""

    number: int
    url: str | None
    state: str
    note: str
    since: float
    restarts: int
    pid: int | None


class ServerShown(Struct):
    """A server of the configuration. ``serves`` says of an ``environment`` that is ready which one it is."""

    name: str
    kind: str
    serves: Literal["environment", "verifier"] | None
    executable: str | None
    auth: Literal["none", "token"] | None
    state: str
    replicas: list[ReplicaShown]


class Servers(Struct):
    """All servers, and whether all are ready."""

    ready: bool
    servers: list[ServerShown]


def application(
    servers: Callable[[], list[dict[str, Any]]], is_ready: Callable[[], bool], token: str | None
) -> Application:
    """An ASGI application: ``/servers`` (which asks for the token), ``/ready``, ``/health`` and ``/openapi.json``.

    Args:
        servers: what there is to say of each, as `ServerShown`.
        is_ready: whether all are.
        token: which ``Authorization: Bearer`` has to show; None: none.
    """

    async def shown(_: Any) -> bytes:
        return json.dumps({"ready": is_ready(), "servers": servers()}).encode()

    async def ready(_: Any) -> bytes:
        if not is_ready():
            raise Refused(503, "unready", "some servers are not ready; /servers says which")
        return FINE

    async def health(_: Any) -> bytes:
        return FINE

    routes = {
        "/servers": Route("GET", "Say which servers there are, and how they are.", shown, None, Servers),
        "/ready": Route("GET", "Be ready: all servers are.", ready, None, Health, open=True),
        "/health": Route("GET", "Be there.", health, None, Health, open=True),
    }
    return routed("head", routes, token=token, largest=0, tells=True)  # no path takes a body


async def serving(
    app: Application, listening: socket.socket, stopped: asyncio.Event, hosts: Collection[str] | None = None
) -> None:
    """Serve an application until the event is set.

    Args:
        app: for ASGI.
        listening: a bound socket.
        stopped: ends it.
        hosts: names by which it may be asked; None: any.
    """
    listener = Listener(app, _GRACE, hosts)

    async def end() -> None:
        await stopped.wait()
        listener.stop()

    ending = asyncio.create_task(end())
    try:
        await listener.answer(listening, lambda: None)
    finally:
        ending.cancel()
