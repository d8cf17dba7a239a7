"""The head server of a gym: which servers there are, where, and how they are."""

import asyncio
import hmac
import json
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

__all__ = ["application", "serving"]

type _Scope = dict[str, Any]
type _Send = Callable[[dict[str, Any]], Awaitable[None]]

_REALM = (b"www-authenticate", b"Bearer")


def application(
    servers: Callable[[], list[dict[str, Any]]], is_ready: Callable[[], bool], token: str | None
) -> Callable[[_Scope, Any, _Send], Awaitable[None]]:
    """An ASGI application: ``/servers`` (which asks for the token), ``/ready`` and ``/health``.

    Args:
        servers: what there is to say of each.
        is_ready: whether all are.
        token: which ``Authorization: Bearer`` has to show; None: none.
    """

    async def answer(scope: _Scope, receive: Any, send: _Send) -> None:
        if scope["type"] != "http":
            return
        path, more = scope["path"], list[tuple[bytes, bytes]]()
        body: Any = {}
        if path not in ("/servers", "/ready", "/health"):
            status, body = 404, {"error": f"there is no {path}; there are /servers, /ready and /health"}
        elif scope["method"] not in ("GET", "HEAD"):
            status, body, more = 405, {"error": "only GET is answered"}, [(b"allow", b"GET, HEAD")]
        elif path == "/servers" and not _may(scope, token):
            status, body, more = 401, {"error": "show the token of the gym: Authorization: Bearer TOKEN"}, [_REALM]
        elif path == "/servers":
            status, body = 200, {"ready": is_ready(), "servers": servers()}
        else:
            status = 200 if path == "/health" or is_ready() else 503
            body = {"status": "ok" if status == 200 else "some servers are not ready; /servers says which"}
        data = json.dumps(body).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode()), *more]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": data if scope["method"] != "HEAD" else b""})

    return answer


def _may(scope: _Scope, token: str | None) -> bool:
    if token is None:
        return True
    shown = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    return hmac.compare_digest(shown, f"Bearer {token}".encode())


class _Server(uvicorn.Server):
    """One that leaves signals to the program that it is a part of."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serving(app: Any, listening: socket.socket, stopped: asyncio.Event) -> None:
    """Serve an application until the event is set.

    Args:
        app: for ASGI.
        listening: a bound socket.
        stopped: ends it.
    """
    server = _Server(
        uvicorn.Config(
            app, lifespan="off", ws="none", log_config=None, access_log=False, timeout_graceful_shutdown=1,
            server_header=False,
        )
    )  # fmt: skip
    task = asyncio.create_task(server.serve(sockets=[listening]))
    await asyncio.wait([task, asyncio.create_task(stopped.wait())], return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    await task
