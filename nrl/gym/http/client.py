"""Asking servers over HTTP until there is an answer, in a thread that all clients of a process share."""

import asyncio
import builtins
import contextlib
import io
import math
import os
import random
import socket
import threading
from ast import literal_eval
from collections import defaultdict
from collections.abc import Coroutine, Iterable, Mapping
from concurrent.futures import Future
from typing import Any
from weakref import WeakSet

import aiohttp
import attrs
import msgspec
import uvloop

import nrl.errors
from nrl.errors import EnvError, ForeignState
from nrl.gym.http import protocol
from nrl.gym.http.server_socket import many_files

__all__ = ["Asked", "Places", "unreached"]

_SOONEST, _LATEST = 0.05, 2.0  # seconds between two attempts
_CONNECT = 5.0  # seconds that a connection may take
_MAKING = 256  # connections to a server that are made at a time; of thousands at once most would be late
_LOOKS = 5.0  # seconds between two questions whether a server lives, while calls without a limit wait for it
_MORE = 30.0  # seconds beyond the time limit of a call in which its answer has to come
_BUSIEST = 10  # times the patience: the longest that a call is told to come again before it fails
_LONGEST = 30.0  # seconds that a server may ask for before it is asked again
_BUSY = 429  # it is there, and says when to come again
_GONE = (502, 503, 504)  # a proxy's, where the server behind it is gone; 503 is also that of a server that stops
_ENDS = ("SystemExit", "KeyboardInterrupt", "GeneratorExit", "CancelledError", "StopIteration", "StopAsyncIteration")
"""What would end something here, and is only told of."""
_NOT_SENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)  # so the server has not acted

_decode = msgspec.json.Decoder(protocol.Error).decode
_lock = threading.Lock()
_loops: list[asyncio.AbstractEventLoop] = []
_alive: "WeakSet[Places]" = WeakSet()
_left: list[Any] = []  # what the process has that forked into this one: closed here it would be closed there, too


def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of all clients of this process, in a thread of its own: user code never blocks it."""
    with _lock:
        if not _loops:
            _loops.append(uvloop.new_event_loop())
            threading.Thread(target=_loops[0].run_forever, name="remote", daemon=True).start()
        return _loops[0]


def _forked() -> None:
    """Begin anew in a process that was forked, with connections of its own."""
    global _lock
    _lock = threading.Lock()  # which a thread may have held that is not here
    _left.extend(_loops)
    _loops.clear()
    for places in _alive:
        _left.append(dict(vars(places)))
        places.begin()


os.register_at_fork(after_in_child=_forked)


class Asked(Exception):
    """A server has refused; as a `records.Failure`."""

    def __init__(self, url: str, status: int, body: bytes) -> None:
        try:
            self.failure = _decode(body).error
        except msgspec.DecodeError:
            said = body[:200].decode(errors="replace")
            self.failure = protocol.Failure("invalid", "EnvError", f"{url} answered with the status {status}: {said!r}")
        super().__init__(url, status, body)
        self.url, self.status = url, status

    def raised(self) -> Exception:
        """The exception that the user's code raised there, if Python or nrl has such a one."""
        kind, message = self.failure.kind, self.failure.message
        made = getattr(builtins, kind, None) or getattr(nrl.errors, kind, None)
        if self.failure.code == "unauthorized":
            message = f"{message}, which is token= here, or the environment variable NRL_GYM_TOKEN"
        if self.failure.code != "failed":
            message = f"{self.url}: {message}"
        if kind in _ENDS:
            return RuntimeError(f"{kind}: {message}")
        if not (isinstance(made, type) and issubclass(made, Exception)):
            return EnvError(f"{kind}: {message}")
        with contextlib.suppress(TypeError, ValueError, SyntaxError):
            return made(literal_eval(message) if made is KeyError else message)
        return EnvError(f"{kind}: {message}")


class _Silent(Exception):
    """A server answers nothing any more, though its connections are open."""


@attrs.define
class _Place:
    """A server, as far as it is known."""

    url: str
    under_way: int = 0
    failures: int = 0  # since it last answered
    until: float = 0.0  # before which others are asked
    sessions: set[str] = attrs.field(factory=set)
    heard: float = 0.0  # when it last answered anything
    looking: "asyncio.Task[None] | None" = None  # whether it lives
    looked: float = -math.inf  # when that began


class Places:
    """Servers of the same, each known by its address.

    Args:
        tokens: by the address of each server, what it asks for; None: nothing. No token is shown to another one.
        patience: seconds for which a server is asked that does not answer.
        connections: to all of them.
    """

    def __init__(self, tokens: Mapping[str, str | None], patience: float, connections: int) -> None:
        self._urls, self._patience = tuple(tokens), patience
        self._bearers = {url: {} if token is None else {"authorization": f"Bearer {token}"} for url, token in
                         tokens.items()}  # fmt: skip
        self._most = min(connections, many_files() // 2)
        self.info: protocol.Info | None = None
        """What they serve, once one has said it."""
        self.trouble = ""
        """Why the last request was not answered."""
        self.begin()
        _alive.add(self)

    def begin(self) -> None:
        """Have no connections, and no episodes."""
        self._places = {url: _Place(url) for url in self._urls}
        self._session: aiohttp.ClientSession | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._room = asyncio.Semaphore(self._most)

    def ask(self, path: str, body: bytes | None, **how: Any) -> "Future[tuple[str, bytes]]":
        """`ask_here`, from any thread."""
        return self.run(self.ask_here(path, body, **how))

    def run[T](self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run something in the thread of the clients."""
        return asyncio.run_coroutine_threadsafe(work, _loop())

    async def ask_here(
        self,
        path: str,
        body: bytes | None,
        *,
        at: str | None = None,
        tried: set[str] | None = None,
        patience: float | None = None,
    ) -> tuple[str, bytes]:
        """Ask one of the servers, in the thread of the clients: who answered, and what.

        Args:
            path: of what is asked.
            body: what is asked; None: nothing.
            at: the server that is asked; None: the one with the least to do.
            tried: receives the addresses of the servers that may have acted, from before each is asked.
            patience: in place of that of all calls.

        Raises:
            Asked: it refused.
            EnvError: none answered.
        """
        now = asyncio.get_running_loop().time
        patience = self._patience if patience is None else patience
        limit = None if self.info is None or self.info.timeout is None else self.info.timeout + _MORE
        tried = set() if tried is None else tried
        place, since, pause = None if at is None else self._place(at), None, _SOONEST
        began = math.inf  # the first attempt, once a connection is free for it
        while True:
            here, after = place or self._choose(), 0.0
            here.under_way += 1
            tried.add(here.url)
            try:
                async with self._room:
                    began = min(began, now())
                    left = None if limit is None else max(began + _BUSIEST * patience + limit - now(), _SOONEST)
                    asking = self._once(here.url, path, body, _headers(left), limit, left)
                    status, found, after = await (asking if limit else self._while_it_lives(here, asking, patience))
                if status != _BUSY and status not in _GONE:
                    here.failures, here.until = 0, 0.0
                    if status != 200:
                        raise Asked(here.url, status, found)
                    return here.url, found
                self.trouble, place = f"its answer was {status}", place if at else None
                if status == _BUSY:
                    tried.discard(here.url)
            except _NOT_SENT as error:
                status, self.trouble, place = 0, unreached(error), place if at else None
                tried.discard(here.url)
            except _Silent:
                status, self.trouble, place, since = 0, "/health, neither", here, -math.inf  # long enough
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                # It may have acted, and is asked again, so that it acts once
                status, self.trouble, place = 0, f"{type(error).__name__}: {error}", here
            finally:
                here.under_way -= 1
            if status == _BUSY:
                since, pause, here.until = None, _SOONEST, now() + after
                if now() - began > _BUSIEST * patience:
                    raise EnvError(
                        f"remote: {here.url} has been too busy for {path} for {now() - began:.1f} s; give it "
                        "more replicas or a larger most=, or give remote(patience=) more seconds, of which it waits "
                        f"{_BUSIEST} times as many"
                    )
            else:
                since = now() if since is None else since
                here.failures += 1
                here.until = now() + min(_LATEST, _SOONEST * 2 ** min(here.failures, 9))
                if now() - since > patience:
                    raise EnvError(
                        f"remote: {here.url} has not answered {path} for {patience:g} s ({self.trouble}); see whether "
                        "the server runs, or give remote(patience=) more seconds"
                    )
            elsewhere = place is None and any(self._places[url].until <= now() for url in self._urls)
            await asyncio.sleep((pause if elsewhere else max(pause, after)) * (1 + random.random() / 2))
            pause = min(_LATEST, 2 * pause)

    async def _once(
        self, at: str, path: str, body: bytes | None, headers: dict[str, str], *limits: float | None
    ) -> tuple[int, bytes, float]:
        headers = headers | self._bearers[at]
        total = min((each for each in limits if each is not None), default=None)
        timeout = aiohttp.ClientTimeout(total=total, sock_connect=_CONNECT)
        method = "GET" if body is None else "POST"
        data = io.BytesIO(body) if body is not None and len(body) > 2**16 else body  # which is sent part by part
        request = self._opened().request(
            method, at + path, data=data, headers=headers, timeout=timeout, allow_redirects=False
        )
        async with request as response:
            found = await response.read()
            return response.status, found, _after(response)

    async def _while_it_lives[T](self, here: _Place, asking: Coroutine[Any, Any, T], patience: float) -> T:
        """An answer that may take any time, as long as its server answers something.

        Raises:
            _Silent: it has not for the time of the patience.
        """
        now, asked = asyncio.get_running_loop().time, asyncio.ensure_future(asking)
        began, every = now(), min(_LOOKS, patience)
        try:
            while not (await asyncio.wait([asked], timeout=every))[0]:
                if here.looking is None or (here.looking.done() and now() - here.looked > every / 2):
                    here.looked, here.looking = now(), asyncio.ensure_future(self._look(here))  # for all that wait
                await asyncio.wait([asked, here.looking], return_when=asyncio.FIRST_COMPLETED)
                if not asked.done() and now() - max(here.heard, began) > patience:
                    raise _Silent
            return asked.result()
        finally:
            asked.cancel()

    async def _look(self, here: _Place) -> None:
        """Ask a server whether it lives; also where all connections are in use."""
        now = asyncio.get_running_loop().time
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            status, _, _ = await self._once(here.url, "/health", None, {}, _CONNECT)
            if status not in _GONE:
                here.heard, here.failures, here.until = now(), 0, 0.0
                return
        here.failures, here.until = here.failures + 1, now() + _LATEST  # others are asked meanwhile

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = _Connector(limit=0, keepalive_timeout=30.0, socket_factory=_lasting)
            self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        return self._session

    def _choose(self) -> _Place:
        """The server with the least to do, among those that answer."""
        now = asyncio.get_running_loop().time()
        found = min(
            (self._places[url] for url in self._urls),
            key=lambda each: (max(each.until - now, 0.0), each.under_way, random.random()),
        )
        if found.failures:
            found.until = now + _CONNECT  # one call sees whether it is back, while others go elsewhere
        return found

    def _place(self, url: str) -> _Place:
        if url not in self._places:  # of a state that another client has made
            raise ForeignState(
                f"remote: the episode is one of {url}, and this client has {', '.join(self._urls)}; go on with the "
                "environment that began it"
            )
        return self._places[url]

    # --- Open episodes, which are asked for as long as this process lives

    def hold(self, url: str, session: str) -> None:
        """Renew the lease of an episode from now on; in the thread of the clients."""
        self._place(url).sessions.add(session)
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.ensure_future(self._renew())

    def release(self, url: str, session: str) -> None:
        """Do not renew it any more."""
        self._place(url).sessions.discard(session)

    async def _renew(self) -> None:
        while any(place.sessions for place in self._places.values()):
            await asyncio.sleep((self.info.lease if self.info else 60.0) / 4)
            held = [(place.url, list(place.sessions)) for place in self._places.values() if place.sessions]
            await asyncio.gather(*(self._tell(url, "/renew", protocol.Renewal(names)) for url, names in held))

    async def give_up(self, name: str, tried: Iterable[str]) -> None:
        """End an episode, or a call, that nobody waits for any more, where it may be."""
        for url in tried:
            self.release(url, name)
        await asyncio.gather(*(self._tell(url, "/close", protocol.Closing(name)) for url in tried))

    async def _tell(self, url: str, path: str, what: Any) -> None:
        """Ask once, also where all connections are in use, whatever comes of it."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            await self._once(url, path, msgspec.json.encode(what), {}, _CONNECT)

    def close(self) -> None:
        """Close all connections; from any thread."""
        if self._session is not None:
            self.run(self._close(self._session))

    async def _close(self, session: aiohttp.ClientSession) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
        await session.close()


class _Connector(aiohttp.TCPConnector):
    """Makes few connections to a server at a time: the seconds that one may take begin when its turn has come."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self._turns: defaultdict[Any, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(_MAKING))

    async def connect(self, req: Any, *args: Any, **how: Any) -> Any:
        """A connection that is free, or another one."""
        async with self._turns[req.connection_key]:
            return await super().connect(req, *args, **how)


def unreached(error: Exception) -> str:
    """Why no answer has come.

    >>> unreached(TimeoutError())
    'TimeoutError'
    """
    if not isinstance(error, aiohttp.ClientConnectorError):
        return str(error) or type(error).__name__
    why = error.os_error
    if isinstance(why, ConnectionError) and why.errno:  # whose text names the address once more
        return f"cannot connect to {error.host}:{error.port}: {os.strerror(why.errno)}"
    return f"cannot connect to {error.host}:{error.port}: {why.strerror or why}"


def _headers(left: float | None) -> dict[str, str]:
    """What a request bears: the seconds that are left to whoever asks, so that no server works for nobody."""
    return {"content-type": "application/json"} | ({} if left is None else {"nrl-timeout": f"{left:.3f}"})


def _after(response: aiohttp.ClientResponse) -> float:
    """The seconds after which a server wants to be asked again."""
    try:
        return min(max(0.0, float(response.headers.get("retry-after", "0"))), _LONGEST)
    except ValueError:  # a date, of a proxy
        return 1.0


def _lasting(address: Any) -> socket.socket:
    """A socket that notices within half a minute that the other host is gone."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 30_000)):
        if hasattr(socket, option):  # as on Linux
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return made
