"""The server of an environment as an ASGI application: routes, the token, limits, and numbers for Prometheus."""

import asyncio
import hmac
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Literal

import msgspec
from msgspec.json import Decoder
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from xxhash import xxh3_64_intdigest

from nrl.envs.gym import listening, records
from nrl.envs.gym.numbers import Numbers
from nrl.envs.gym.once import Refused
from nrl.envs.gym.openapi import Route, openapi
from nrl.envs.gym.service import Service

__all__ = ["FINE", "Application", "Bodies", "Health", "Receive", "Send", "application", "routed", "routes"]

_SHORT = 2**15  # bytes of a body that a connection may read and forget
_HELD = 16  # requests of the largest size that may be in memory at a time

FINE = b'{"status":"ok"}'
"""A `Health`."""

type Receive = Callable[[], Awaitable[dict[str, Any]]]
type Send = Callable[[dict[str, Any]], Awaitable[None]]
type Application = Callable[[Any, Receive, Send], Awaitable[None]]


class Health(msgspec.Struct):
    """A server is there; of ``/ready``: it is ready."""

    status: Literal["ok"]


def application(service: Service, *, token: str | None, largest: int) -> Application:
    """An ASGI application.

    Args:
        service: what it serves.
        token: that a request has to bear; None: none.
        largest: bytes that a request may have.
    """
    numbers = Numbers(service)
    return routed(service.name, routes(service, numbers), token=token, largest=largest, note=numbers.note)


def routed(
    name: str,
    routes: Mapping[str, Route],
    *,
    token: str | None,
    largest: int,
    tells: bool = False,
    note: Callable[[str, int, float], Any] = lambda path, status, seconds: None,
) -> Application:
    """An ASGI application of routes, and of ``/openapi.json``, which describes them.

    Args:
        name: of what is served.
        routes: by path.
        token: that a request has to bear, but for routes that are open; None: none.
        largest: bytes that a request may have.
        tells: whether it says without the token, too, which paths and methods there are.
        note: is told the path (empty: there is none), the status and the seconds of each request.
    """
    described = msgspec.json.encode(openapi(name, routes, secured=token is not None))
    known = {**routes, "/openapi.json": Route("GET", "Describe all paths.", _saying(described), open=tells)}
    decoders = {path: Decoder(route.asked) for path, route in known.items() if route.asked is not None}
    bearer = None if token is None else token.encode()
    bodies = Bodies(largest)

    async def answered(route: Route | None, scope: Any, asked: "_Headers", receive: Receive) -> bytes:
        path, method = scope["path"], scope["method"]
        may = bearer is None or (route is not None and route.open) or hmac.compare_digest(asked.bearer, bearer)
        if not (may or tells):
            raise _unauthorized()
        if route is None:
            raise Refused(404, "unknown", f"there is no {path:.80}; there are {', '.join(known)}")
        if method != route.method and (method, route.method) != ("HEAD", "GET"):
            raise Refused(405, "invalid", f"{path} takes {route.method}, and not {method:.20}")
        if not may:
            raise _unauthorized()
        if route.asked is None:
            if asked.has_body:
                raise Refused(400, "invalid", f"{path} takes no body; send none", unread=True)
            return await route.answer(None)
        timeout, held = _seconds(asked.timeout), 0
        try:
            body, held = await bodies.read(receive, asked.length)
            try:
                record = records.read(body, decoders[path])
            except ValueError as error:
                raise Refused(400, "invalid", f"{path}: {error}") from None
            # Of what was sent: to write the record again would take as long as all else
            digest = (xxh3_64_intdigest(body),) if route.digested else ()
            del body
            return await _within(timeout, route.answer(record, *digest), path)
        except RecursionError:  # it could be read, and no more
            raise Refused(400, "invalid", f"{path}: it is nested too deeply") from None
        finally:
            bodies.held -= held

    async def serve(scope: Any, receive: Receive, send: Send) -> None:
        began, status, more = time.perf_counter(), 200, list[tuple[bytes, bytes]]()
        route, asked = known.get(scope["path"]), _Headers(scope["headers"])
        try:
            body = await answered(route, scope, asked, receive)
        except (Refused, asyncio.CancelledError) as error:
            # Who cancels is a server that stops, and has waited long enough
            why = error if isinstance(error, Refused) else _stopping(name)
            why.unread = why.unread or (asked.is_long and why.status in (401, 404, 405))
            status, body, more = why.status, why.body, _headers(why, route)
        note(scope["path"] if route else "", status, time.perf_counter() - began)
        kind = b"application/json" if status != 200 or route is None else route.kind
        headers = [(b"content-type", kind), (b"content-length", b"%d" % len(body)), *more]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return serve


def routes(service: Service, numbers: Numbers) -> dict[str, Route]:
    """What is answered at which path."""

    async def ready() -> bytes:
        if service.stopping:
            raise _stopping(service.name)
        return FINE

    async def renew(asked: records.Renewal) -> bytes:
        return service.renew(asked)

    async def measured(_: Any) -> bytes:
        return numbers.shown()

    info = _saying(msgspec.json.encode(service.info()))
    return {
        "/reset": Route("POST", "Begin an episode.", service.reset, records.Reset, records.Begun),
        "/step": Route("POST", "Take a turn.", service.step, records.Step, records.Stepped),
        "/close": Route("POST", "End an episode.", service.close, records.Closing, records.Closed),
        "/renew": Route("POST", "Keep episodes for another lease.", renew, records.Renewal, records.Renewed),
        "/verify": Route("POST", "Judge an answer.", service.verify, records.Verify, records.Said, digested=True),
        "/group": Route("POST", "Are answers judged together?", service.group, records.Grouping, records.Grouped),
        "/task": Route("POST", "Give a task.", service.task, records.At, records.TaskFound),
        "/extract": Route("POST", "Read an answer.", service.extract, records.Extracting, records.Extracted),
        "/info": Route("GET", "Say what is served.", info, None, records.Info),
        "/health": Route("GET", "Be there.", _saying(FINE), None, Health, open=True),
        "/ready": Route("GET", "Be ready for episodes.", lambda _: ready(), None, Health, open=True),
        "/metrics": Route("GET", "Numbers.", measured, kind=CONTENT_TYPE_LATEST.encode()),
    }


def _unauthorized() -> Refused:
    return Refused(401, "unauthorized", "the token is missing or wrong; send 'Authorization: Bearer TOKEN'")


def _stopping(name: str) -> Refused:
    return Refused(503, "stopping", f"{name} is stopping; ask another server", after=1.0)


def _saying(body: bytes) -> Callable[[Any], Awaitable[bytes]]:
    async def said(_: Any) -> bytes:
        return body

    return said


async def _within(seconds: float | None, answer: Awaitable[bytes], path: str) -> bytes:
    """An answer within the time that its client has for it."""
    if seconds is None:
        return await answer
    try:
        async with asyncio.timeout(seconds):
            return await answer
    except TimeoutError:
        late = f"{path} was not over within the {seconds:g} s of its client"
        raise Refused(408, "late", late, "TimeoutError") from None


def _seconds(value: bytes | None) -> float | None:
    if value is None:
        return None
    try:
        if not math.isnan(seconds := float(value)):
            return min(max(seconds, 0.0), 1e9)
    except ValueError:
        pass
    raise Refused(400, "invalid", f"nrl-timeout is {value!r:.40}; give seconds")


def _headers(error: Refused, route: Route | None) -> list[tuple[bytes, bytes]]:
    found = [(b"connection", b"close")] if error.unread else []
    if error.status == 401:
        found.append((b"www-authenticate", b"Bearer"))
    if error.status == 405 and route is not None:
        found.append((b"allow", b"GET, HEAD" if route.method == "GET" else route.method.encode()))
    return found if error.after is None else [*found, (b"retry-after", b"%d" % math.ceil(error.after))]


class _Headers:
    """What is read in the headers of a request."""

    def __init__(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self.bearer, self.timeout, length = b"", None, b""
        self._chunked = False
        for name, value in headers:
            if name == b"authorization":
                scheme, _, shown = value.partition(b" ")
                self.bearer = shown.strip() if scheme.lower() == b"bearer" else b""
            elif name == b"content-length":
                length = value
            elif name == b"transfer-encoding":
                self._chunked = True
            elif name == b"nrl-timeout":
                self.timeout = value
        self.length = int(length) if length.isdigit() else 0

    @property
    def has_body(self) -> bool:
        return self._chunked or self.length > 0

    @property
    def is_long(self) -> bool:
        """Whether its body is more than what a connection reads for nothing."""
        return self._chunked or self.length > _SHORT


class Bodies:
    """Requests in memory."""

    def __init__(self, largest: int) -> None:
        self.largest, self.held = largest, 0

    async def read(self, receive: Receive, declared: int) -> tuple[bytes, int]:
        """A request, and how much of it is held until its answer."""
        self._check(declared)
        parts, size = list[bytes](), 0
        try:
            async with asyncio.timeout(listening.SLOWEST):
                while True:
                    message = await receive()
                    if message.get("type") == "http.disconnect":
                        raise Refused(400, "invalid", "the client left before its request had arrived", unread=True)
                    part = message.get("body", b"")
                    size += len(part)
                    self.held += len(part)
                    self._check(size, of_these=size)
                    parts.append(part)
                    if not message.get("more_body", False):
                        return (part if len(parts) == 1 else b"".join(parts)), size
        except BaseException as error:
            self.held -= size
            if isinstance(error, TimeoutError):
                raise Refused(
                    408,
                    "late",
                    f"the request had not arrived within {listening.SLOWEST:g} s; send it faster",
                    unread=True,
                ) from None
            raise

    def _check(self, size: int, of_these: int = 0) -> None:
        if size > self.largest:
            raise Refused(413, "too_large", f"the request has more than {self.largest} bytes; send less", unread=True)
        others = self.held - of_these
        if others + size > _HELD * self.largest:
            found = f"requests of {others} bytes are under way"
            raise Refused(429, "busy", f"{found}; ask again", after=1.0, unread=True)
