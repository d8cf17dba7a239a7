"""The server of an environment as an ASGI application: routes, the token, limits, and numbers for Prometheus."""

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from msgspec.json import Decoder
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from nrl.envs.gym import records
from nrl.envs.gym.once import Refused
from nrl.envs.gym.openapi import Route, openapi
from nrl.envs.gym.service import Service

__all__ = ["Application", "Receive", "Send", "application"]

_SLOWEST = 30.0  # seconds in which a request has to have arrived
_HELD = 16  # requests of the largest size that may be in memory at a time

type Receive = Callable[[], Awaitable[dict[str, Any]]]
type Send = Callable[[dict[str, Any]], Awaitable[None]]
type Application = Callable[[Any, Receive, Send], Awaitable[None]]


def application(service: Service, *, token: str | None, largest: int) -> Application:
    """An ASGI application.

    Args:
        service: what it serves.
        token: that a request has to bear; None: none.
        largest: bytes that a request may have.
    """
    numbers = _Numbers(service)
    known = _routes(service, numbers)
    described = msgspec.json.encode(openapi(service.name, known, secured=token is not None))
    known["/openapi.json"] = Route("GET", "Describe all paths.", _saying(described))
    decoders = {path: Decoder(route.asked) for path, route in known.items() if route.asked is not None}
    bearer = None if token is None else f"Bearer {token}".encode()
    bodies = _Bodies(largest)

    async def answered(route: Route | None, scope: Any, receive: Receive) -> bytes:
        path, method = scope["path"], scope["method"]
        declared, timeout, given = b"0", None, b""
        for name, value in scope["headers"]:
            if name == b"authorization":
                given = value
            elif name == b"content-length":
                declared = value
            elif name == b"nrl-timeout":
                timeout = _seconds(value)
        if bearer is not None and not (route and route.open) and not hmac.compare_digest(given, bearer):
            raise Refused(401, "unauthorized", "the token is missing or wrong; send 'Authorization: Bearer TOKEN'")
        if route is None:
            raise Refused(404, "unknown", f"there is no {path:.80}; there are {', '.join(known)}")
        if method != route.method:
            raise Refused(405, "invalid", f"{path} takes {route.method}, and not {method:.20}")
        if route.asked is None:
            return await route.answer(None)
        held = 0
        try:
            body, held = await bodies.read(receive, declared)
            try:
                asked = records.read(body, decoders[path])
            except ValueError as error:
                raise Refused(400, "invalid", f"{path}: {error}") from None
            del body
            return await _within(timeout, route.answer(asked), path)
        finally:
            bodies.held -= held

    async def serve(scope: Any, receive: Receive, send: Send) -> None:
        began, status, more = time.perf_counter(), 200, list[tuple[bytes, bytes]]()
        route = known.get(scope["path"])
        try:
            body = await answered(route, scope, receive)
        except (Refused, asyncio.CancelledError) as error:
            # Who cancels is a server that stops, and has waited long enough
            why = error if isinstance(error, Refused) else _stopping(service)
            status, body, more = why.status, why.body, _headers(why)
        numbers.note(scope["path"] if route else "", status, time.perf_counter() - began)
        kind = b"application/json" if status != 200 or route is None else route.kind
        headers = [(b"content-type", kind), (b"content-length", b"%d" % len(body)), *more]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return serve


def _routes(service: Service, numbers: "_Numbers") -> dict[str, Route]:
    async def ready() -> bytes:
        if service.stopping:
            raise _stopping(service)
        return b"{}"

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
        "/verify": Route("POST", "Judge an answer.", service.verify, records.Verify, records.Said),
        "/group": Route("POST", "Are answers judged together?", service.group, records.Grouping, records.Grouped),
        "/task": Route("POST", "Give a task.", service.task, records.At, records.TaskFound),
        "/extract": Route("POST", "Read an answer.", service.extract, records.Extracting, records.Extracted),
        "/info": Route("GET", "Say what is served.", info, None, records.Info),
        "/health": Route("GET", "Be there.", _saying(b"{}"), open=True),
        "/ready": Route("GET", "Be ready for episodes.", lambda _: ready(), open=True),
        "/metrics": Route("GET", "Numbers.", measured, kind=CONTENT_TYPE_LATEST.encode()),
    }


def _stopping(service: Service) -> Refused:
    return Refused(503, "stopping", f"{service.name} is stopping; ask another server", after=1.0)


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


def _seconds(value: bytes) -> float:
    try:
        return min(max(float(value), 0.0), 1e9)
    except ValueError:
        raise Refused(400, "invalid", f"nrl-timeout is {value!r:.40}; give seconds") from None


def _headers(error: Refused) -> list[tuple[bytes, bytes]]:
    if error.status == 401:
        return [(b"www-authenticate", b"Bearer")]
    again = [] if error.after is None else [(b"retry-after", b"%.2f" % error.after)]
    return [*again, (b"connection", b"close")] if error.unread else again


class _Bodies:
    """Requests in memory."""

    def __init__(self, largest: int) -> None:
        self.largest, self.held = largest, 0

    async def read(self, receive: Receive, declared: bytes) -> tuple[bytes, int]:
        """A request, and how much of it is held until its answer."""
        self._check(int(declared) if declared.isdigit() else 0)
        parts, size = list[bytes](), 0
        try:
            async with asyncio.timeout(_SLOWEST):
                while True:
                    message = await receive()
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
                    408, "late", f"the request had not arrived within {_SLOWEST:g} s; send it faster", unread=True
                ) from None
            raise

    def _check(self, size: int, of_these: int = 0) -> None:
        if size > self.largest:
            raise Refused(413, "too_large", f"the request has more than {self.largest} bytes; send less", unread=True)
        if self.held - of_these + size > _HELD * self.largest:
            found = f"requests of {self.held} bytes are under way"
            raise Refused(429, "busy", f"{found}; ask again", after=1.0, unread=True)


class _Numbers:
    """What Prometheus is told."""

    def __init__(self, service: Service) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter("nrl_gym_requests", "Requests.", ["path", "status"], registry=self._registry)
        self._seconds = Histogram("nrl_gym_seconds", "Seconds of a request.", ["path"], registry=self._registry)
        self._known: dict[tuple[str, int], tuple[Any, Any]] = {}
        for name, what, value in (
            ("sessions", "Open episodes.", lambda: service.sessions),
            ("under_way", "Calls of the environment.", lambda: service.under_way),
            ("evicted", "Episodes that nobody asked for any more.", lambda: service.evicted),
            ("replayed", "Calls that were answered from memory.", lambda: service.replayed),
        ):
            Gauge(f"nrl_gym_{name}", what, registry=self._registry).set_function(value)

    def note(self, path: str, status: int, seconds: float) -> None:
        """A request is over."""
        found = self._known.get((path, status))
        if found is None:
            found = self._requests.labels(path, str(status)), self._seconds.labels(path)
            self._known[path, status] = found
        found[0].inc()
        found[1].observe(seconds)

    def shown(self) -> bytes:
        """All numbers."""
        return generate_latest(self._registry)
