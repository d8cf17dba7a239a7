"""The server of an environment as an ASGI application: routes, the token, limits, and numbers for Prometheus."""

import asyncio
import hmac
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

import msgspec
from msgspec.json import Decoder
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from xxhash import xxh3_64_intdigest

from nrl.gym.http import protocol, server_socket
from nrl.gym.http.front import Application, Headers, Receive, Send
from nrl.gym.http.idempotency import Refused
from nrl.gym.http.json_limits import check_json
from nrl.gym.http.openapi import Route, openapi
from nrl.gym.http.prometheus import Numbers
from nrl.gym.http.service import Service

__all__ = ["ARRIVING", "CONTAINERS", "FINE", "Bodies", "Health", "application", "routed", "routes"]

ARRIVING = 2**25
"""Bytes of all requests that may arrive at a time, unless one alone may be larger."""
_HELD = 16  # requests of the largest size that may be in memory at a time
_STALLED = 1.0  # seconds without a byte, after which a request that others wait for is given up

CONTAINERS = 2**18
"""Arrays and objects that a request may have; each takes up to a hundred bytes."""

FINE = b'{"status":"ok"}'
"""A `Health`."""


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

    async def answered(route: Route | None, scope: Any, asked: Headers, receive: Receive) -> bytes:
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
            body, held = await bodies.read(receive, asked)
            try:
                check_json(body, containers=CONTAINERS)
                record = protocol.read(body, decoders[path])
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
        route, asked = known.get(scope["path"]), scope.get("nrl.headers") or Headers(scope["headers"])
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

    async def renew(asked: protocol.Renewal) -> bytes:
        return service.renew(asked)

    async def measured(_: Any) -> bytes:
        return numbers.shown()

    info = _saying(msgspec.json.encode(service.info()))
    return {
        "/reset": Route("POST", "Begin an episode.", service.reset, protocol.Reset, protocol.Begun),
        "/step": Route("POST", "Take a turn.", service.step, protocol.Step, protocol.Stepped),
        "/close": Route("POST", "End an episode.", service.close, protocol.Closing, protocol.Closed),
        "/renew": Route("POST", "Keep episodes for another lease.", renew, protocol.Renewal, protocol.Renewed),
        "/verify": Route("POST", "Judge an answer.", service.verify, protocol.Verify, protocol.Said, digested=True),
        "/group": Route("POST", "Are answers judged together?", service.group, protocol.Grouping, protocol.Grouped),
        "/task": Route("POST", "Give a task.", service.task, protocol.At, protocol.TaskFound),
        "/check": Route("POST", "Check a task.", service.check, protocol.Checking, protocol.Checked),
        "/extract": Route("POST", "Read an answer.", service.extract, protocol.Extracting, protocol.Extracted),
        "/info": Route("GET", "Say what is served.", info, None, protocol.Info),
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


class Bodies:
    """Requests in memory, within bounds of size and time. It lives on one event loop.

    Requests of other encodings than JSON's own are refused, since a few bytes of them may be gigabytes.

    Args:
        largest: bytes of one.
        arriving: bytes of all that arrive at a time; ``largest``, if that is more. Others wait for their turn without
            being read, and one that stalls while others wait is given up.
        under_way: bytes of all that may be in memory at a time; None: 16 times ``largest``.
    """

    def __init__(self, largest: int, arriving: int = ARRIVING, under_way: int | None = None) -> None:
        self.largest, self.held, self._arriving, self._most = largest, 0, max(arriving, largest), under_way
        self._reserved = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._clocks: dict[asyncio.Timeout, float] = {}  # of what arrives, and when something of it came last
        self._stalled: set[asyncio.Timeout] = set()  # those of the clocks that were given up for others
        self._looking: asyncio.TimerHandle | None = None

    async def read(self, receive: Receive, headers: Headers) -> tuple[bytearray, int]:
        """Read a request; it, and how much of it is held until its answer.

        Raises:
            Refused: it is too large, arrives too slowly, or there is no room for it.
        """
        if headers.encoding not in (b"", b"identity"):
            found = headers.encoding.decode("latin-1")
            raise Refused(415, "invalid", f"the content-encoding is {found!r:.40}; send the JSON as it is", unread=True)
        self._check(headers.length)
        # What a connection reads for nothing needs no turn
        size = (headers.length or self.largest) if headers.is_long else 0
        await self._turn(size)
        loop, body, clock = asyncio.get_running_loop(), bytearray(), asyncio.timeout(server_socket.SLOWEST)
        try:
            async with clock:
                while True:
                    if size:
                        self._clocks[clock] = loop.time()
                    message = await receive()
                    if message.get("type") == "http.disconnect":
                        raise Refused(400, "invalid", "the client left before its request had arrived", unread=True)
                    part = message.get("body", b"")
                    self.held += len(part)
                    body += part
                    self._check(len(body), of_these=len(body))
                    if not message.get("more_body", False):
                        return body, len(body)
        except BaseException as error:
            self.held -= len(body)
            if isinstance(error, TimeoutError):
                late = f"the request had not arrived within {server_socket.SLOWEST:g} s; send it faster"
                if clock in self._stalled:  # not by the time: an event loop's clock may lag behind its timers
                    late = f"nothing of the request came for {_STALLED:g} s, and others wait; send it faster"
                raise Refused(408, "late", late, unread=True) from None
            raise
        finally:
            self._clocks.pop(clock, None)
            self._stalled.discard(clock)
            self._give_back(size)

    def _check(self, size: int, of_these: int = 0) -> None:
        if size > self.largest:
            raise Refused(413, "too_large", f"the request has more than {self.largest} bytes; send less", unread=True)
        others = self.held - of_these
        if others + size > (_HELD * self.largest if self._most is None else self._most):
            raise _busy(others)

    async def _turn(self, size: int) -> None:
        """Wait until so many bytes may arrive, in the order of requests."""
        if not size or (self._reserved + size <= self._arriving and not self._waiting):
            self._reserved += size
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        if self._looking is None:
            self._give_up_stalled()
        try:
            async with asyncio.timeout(server_socket.SLOWEST):
                await turn
        except BaseException as error:
            if not turn.cancelled():  # it came in the same moment
                self._give_back(size)
            self._waiting = deque(waiting for waiting in self._waiting if waiting[1] is not turn)
            if isinstance(error, TimeoutError):
                raise _busy(self._reserved) from None
            raise

    def _give_back(self, size: int) -> None:
        self._reserved -= size
        while self._waiting:
            size, turn = self._waiting[0]
            if self._reserved + size > self._arriving:
                break
            self._waiting.popleft()
            if not turn.done():
                self._reserved += size
                turn.set_result(None)

    def _give_up_stalled(self) -> None:
        """Give up requests of which nothing comes, for as long as others wait."""
        loop = asyncio.get_running_loop()
        for clock, last in self._clocks.items():
            if last + _STALLED < loop.time() and not clock.expired():
                self._stalled.add(clock)
                clock.reschedule(loop.time())
        self._looking = loop.call_later(_STALLED / 4, self._give_up_stalled) if self._waiting else None


def _busy(size: int) -> Refused:
    return Refused(429, "busy", f"requests of {size} bytes are under way; ask again", after=1.0, unread=True)
