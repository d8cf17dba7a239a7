"""Asking servers over HTTP until there is an answer, in a thread that all clients of a process share."""

import asyncio
import builtins
import contextlib
import io
import os
import random
import socket
import threading
from ast import literal_eval
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any

import aiohttp
import attrs
import msgspec
import uvloop

import nrl.errors
from nrl.envs.gym import records
from nrl.envs.gym.listening import many_files
from nrl.errors import EnvError

__all__ = ["Asked", "Places"]

_SOONEST, _LATEST = 0.05, 2.0  # seconds between two attempts
_CONNECT = 5.0  # seconds that a connection may take
_MORE = 30.0  # seconds beyond the time limit of a call in which its answer has to come
_BUSY = (429, 503)
_ENDS = ("SystemExit", "KeyboardInterrupt", "GeneratorExit", "CancelledError", "StopIteration", "StopAsyncIteration")
"""What would end something here, and is only told of."""
_PROXY = (502, 504)  # a proxy's, where the server behind it is gone

_decode = msgspec.json.Decoder(records.Error).decode
_loops: dict[int, asyncio.AbstractEventLoop] = {}
_lock = threading.Lock()


def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of all clients of this process, in a thread of its own: user code never blocks it."""
    with _lock:
        if os.getpid() not in _loops:
            _loops.clear()  # of the process that has forked
            loop = _loops[os.getpid()] = uvloop.new_event_loop()
            threading.Thread(target=loop.run_forever, name="remote", daemon=True).start()
        return _loops[os.getpid()]


class Asked(Exception):
    """A server has refused; as a `records.Failure`."""

    def __init__(self, url: str, status: int, body: bytes) -> None:
        try:
            self.failure = _decode(body).error
        except msgspec.DecodeError:
            said = body[:200].decode(errors="replace")
            self.failure = records.Failure("invalid", "EnvError", f"{url} answered with the status {status}: {said!r}")
        super().__init__(url, status, body)
        self.url, self.status = url, status

    def raised(self) -> Exception:
        """The exception that the user's code raised there, if Python or nrl has such a one."""
        kind, message = self.failure.kind, self.failure.message
        made = getattr(builtins, kind, None) or getattr(nrl.errors, kind, None)
        if self.failure.code != "failed":
            message = f"{self.url}: {message}"
        if kind in _ENDS:
            return RuntimeError(f"{kind}: {message}")
        if not (isinstance(made, type) and issubclass(made, Exception)):
            return EnvError(f"{kind}: {message}")
        with contextlib.suppress(TypeError, ValueError, SyntaxError):
            return made(literal_eval(message) if made is KeyError else message)
        return EnvError(f"{kind}: {message}")


@attrs.define
class _Place:
    """A server, as far as it is known."""

    url: str
    under_way: int = 0
    failures: int = 0  # since it last answered
    until: float = 0.0  # before which others are asked
    sessions: set[str] = attrs.field(factory=set)


class Places:
    """Servers of the same, each known by its address.

    Args:
        urls: of the servers.
        token: that each asks for; None: they ask for none.
        patience: seconds for which a server is asked that does not answer.
        connections: to all of them.
    """

    def __init__(self, urls: Sequence[str], token: str | None, patience: float, connections: int) -> None:
        self._places = {url: _Place(url) for url in urls}
        self._token, self._patience, self._connections = token, patience, connections
        self._session: aiohttp.ClientSession | None = None
        self._process, self._left = 0, self._session  # which is not closed here, nor complains of that
        self._renewing: asyncio.Task[None] | None = None
        self.info: records.Info | None = None
        """What they serve, once one has said it."""

    def ask(self, path: str, body: bytes | None, *, at: str | None = None) -> "Future[tuple[str, bytes]]":
        """`ask_here`, from any thread."""
        return self.run(self.ask_here(path, body, at))

    def run[T](self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run something in the thread of the clients."""
        return asyncio.run_coroutine_threadsafe(work, _loop())

    async def ask_here(self, path: str, body: bytes | None, at: str | None = None) -> tuple[str, bytes]:
        """Ask one of the servers, or a certain one, in the thread of the clients: who answered, and what.

        Raises:
            Asked: it refused.
            EnvError: none answered.
        """
        now = asyncio.get_running_loop().time
        limit = None if self.info is None or self.info.timeout is None else self.info.timeout + _MORE
        headers = {"content-type": "application/json"} | ({} if limit is None else {"nrl-timeout": f"{limit:g}"})
        place, since, pause = None if at is None else self._place(at), None, _SOONEST
        while True:
            here = place or self._choose()
            here.under_way += 1
            try:
                status, found, after = await self._once(here.url + path, body, headers, limit)
                if status == 200:
                    here.failures, here.until = 0, 0.0
                    return here.url, found
                if status not in (*_BUSY, *_PROXY):
                    raise Asked(here.url, status, found)
                why = f"its answer was {status}"
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                status, why = 0, f"{type(error).__name__}: {error}"
                if at is None:  # where it may have acted it is asked again, so that it acts once
                    place = None if isinstance(error, aiohttp.ClientConnectorError) else here
            finally:
                here.under_way -= 1
            if status in _BUSY:  # it is there, and says when to come again
                place, since, pause = place if at else None, None, max(after, _SOONEST)
            else:
                since = now() if since is None else since
                here.failures += 1
                here.until = now() + min(_LATEST, _SOONEST * 2**here.failures)
                if now() - since > self._patience:
                    raise EnvError(
                        f"remote: {here.url} has not answered {path} for {self._patience:g} s ({why}); see whether the "
                        "server runs, or give remote(patience=) more seconds"
                    )
            await asyncio.sleep(pause * (0.5 + random.random()))
            pause = min(_LATEST, 2 * pause)

    async def _once(
        self, url: str, body: bytes | None, headers: dict[str, str], limit: float | None
    ) -> tuple[int, bytes, float]:
        timeout = aiohttp.ClientTimeout(total=limit, sock_connect=_CONNECT)
        method = "GET" if body is None else "POST"
        data = io.BytesIO(body) if body is not None and len(body) > 2**16 else body  # which is sent part by part
        async with self._opened().request(method, url, data=data, headers=headers, timeout=timeout) as response:
            found = await response.read()
            try:
                after = float(response.headers.get("retry-after", "1"))
            except ValueError:  # a date, of a proxy
                after = 1.0
            return response.status, found, after

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None or self._process != os.getpid():  # else it is of the process that has forked
            self._process, self._left = os.getpid(), self._session
            bearer = {} if self._token is None else {"authorization": f"Bearer {self._token}"}
            most = min(self._connections, many_files() // 2)
            connector = aiohttp.TCPConnector(limit=most, keepalive_timeout=30.0, socket_factory=_alive)
            self._session = aiohttp.ClientSession(connector=connector, headers=bearer, auto_decompress=False)
        return self._session

    def _choose(self) -> _Place:
        """The server with the least to do, among those that answer."""
        now = asyncio.get_running_loop().time()
        return min(
            self._places.values(), key=lambda each: (max(each.until - now, 0.0), each.under_way, random.random())
        )

    def _place(self, url: str) -> _Place:
        return self._places.setdefault(url, _Place(url))  # of a state that another client has made

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
            for place in list(self._places.values()):
                if place.sessions:
                    with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                        asked = msgspec.json.encode(records.Renewal(list(place.sessions)))
                        await self._once(place.url + "/renew", asked, {}, _CONNECT)

    async def give_up(self, name: str) -> None:
        """End an episode, or a call, that nobody waits for any more, wherever it is; without asking twice."""
        for place in list(self._places.values()):
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                await self._once(place.url + "/close", msgspec.json.encode(records.Closing(name)), {}, _CONNECT)

    async def close(self) -> None:
        """Close all connections."""
        if self._renewing is not None:
            self._renewing.cancel()
        if self._session is not None:
            await self._session.close()


def _alive(address: Any) -> socket.socket:
    """A socket that notices within half a minute that the other host is gone."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 30_000)):
        if hasattr(socket, option):  # as on Linux
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return made
