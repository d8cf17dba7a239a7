"""A socket, and a server that answers on it, with bounds on what a client may hold: time and memory."""

import asyncio
import contextlib
import os
import resource
import socket
from asyncio import TimerHandle, Transport
from collections.abc import Callable, Collection, Iterator
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from nrl.gym.http.front import Application, error_body, guarded
from nrl.runtime.ports import first_free

__all__ = ["SLOWEST", "Listener", "listening", "many_files"]

SLOWEST = 30.0
"""Seconds in which a request has to have arrived, and some of an answer, or why there is none, to be read."""
_HEADERS = 2**16  # bytes that they may have
_WAITING = 64  # requests of a connection that may wait for the one before
_DROPPED = 2**27  # bytes that are read for nothing, of a client that goes on sending though it was refused
_BACKLOG = 16_384  # connections that may wait to be taken
_CONNECTIONS = 20_000  # at a time, where the limit of open files allows as many


def listening(host: str, port: int, who: str) -> socket.socket:
    """A socket that listens: as soon as it is there, a client that comes waits instead of being refused.

    Args:
        host: a name or an address.
        port: 0: any that is free, of ``NRL_PORTS`` if that is set.
        who: asks, for the message.

    Raises:
        OSError: the port is taken, or there is no such host here.

    >>> with listening("127.0.0.1", 0, "me") as made:
    ...     made.getsockname()[0]
    '127.0.0.1'
    """
    try:
        return first_free(lambda free: _bound(host, free)) if port == 0 else _bound(host, port)
    except OSError as error:
        raise OSError(
            error.errno, f"{who}: cannot listen at {host}:{port}: {os.strerror(error.errno or 0)}; give another port"
        ) from None


def _bound(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with contextlib.ExitStack() as unless:
        made = unless.enter_context(socket.socket(family, kind, protocol))
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(_BACKLOG)
        unless.pop_all()
    return made


def many_files() -> int:
    """Let this process have as many open files, and so connections, as it may; how many these are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class _Lingering:
    """A transport that reads on for a while at its end, and drops what comes, where its client is still sending.

    Closed at once, it would be reset, and the client might never read why it was refused.
    """

    def __init__(self, own: Transport, loop: asyncio.AbstractEventLoop, unread: Callable[[], bool]) -> None:
        self._own, self._loop, self._unread = own, loop, unread
        self.ending: TimerHandle | None = None
        self._dropped = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def write(self, data: bytes) -> None:
        if self.ending is None:  # the answer to an earlier request may come after a later one was refused
            self._own.write(data)

    def is_closing(self) -> bool:
        return self.ending is not None or self._own.is_closing()

    def close(self) -> None:
        if self.is_closing():
            return
        if not self._unread():
            self._own.close()
            return
        self.ending = self._loop.call_later(SLOWEST, self._own.abort)
        self._own.write_eof()
        self._own.resume_reading()

    def drop(self, size: int) -> None:
        """Count what has come and is not looked at; more than enough of it ends the connection."""
        self._dropped += size
        if self._dropped > _DROPPED:
            self._own.abort()

    def end(self) -> None:
        """Read nothing more."""
        if self.ending is not None:
            self.ending.cancel()
            self._own.close()


class _Bounded(HttpToolsProtocol):
    """A connection with bounds on what a client may hold, which uvicorn does not look at.

    It is closed where headers come too slowly or are too long, trailers and those of the next request included; where
    too many requests wait for the one before; and where nothing of an answer is read any more.
    """

    _read = 0  # bytes since the last request or piece of a body
    _of_body = False  # whether what has just arrived had a piece of a body
    _late: TimerHandle | None = None
    _unread: TimerHandle | None = None
    _refused = _stopping = False
    _why = ""
    _lingering: _Lingering
    _answered: RequestResponseCycle | None = None  # the request that is answered now

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        self._lingering = _Lingering(transport, self.loop, self._sending)
        super().connection_made(cast(Transport, self._lingering))
        self._late = self.loop.call_later(SLOWEST, self._end)
        most = cast(_Config, self.config).connections
        if len(self.connections) > most:
            self._refuse(b"503 Service Unavailable", f"there are {most} connections already; close some, or come again")

    def connection_lost(self, exc: Exception | None) -> None:
        self._in_time()
        self._is_read()
        self._lingering.end()
        if self._answered is not None and not self._answered.response_complete:
            # The base class tells only the newest of several pipelined requests that their client has left
            self._answered.disconnected = True
            self._answered.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def _sending(self) -> bool:
        """Whether its client may be sending more."""
        return not self._stopping and (self._refused or (self.cycle is not None and self.cycle.more_body))

    def shutdown(self) -> None:
        self._stopping = True
        self._lingering.end()
        super().shutdown()

    def data_received(self, data: bytes) -> None:
        if self._lingering.ending is not None:
            self._lingering.drop(len(data))
            return
        before, self._of_body = self.cycle, False
        super().data_received(data)
        if self.cycle is not before:
            self._in_time()
            return
        under_way = before is not None and not before.response_complete
        if under_way and self._of_body:
            self._read = 0
            return
        self._read += len(data)
        if self._late is None and not under_way:
            self._late = self.loop.call_later(SLOWEST, self._end)
        if self._read > _HEADERS and not self.transport.is_closing():
            why = f"the headers have more than {_HEADERS} bytes; send fewer"
            self._refuse(b"431 Request Header Fields Too Large", why)

    def on_body(self, body: bytes) -> None:
        self._of_body = True
        super().on_body(body)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if len(self.pipeline) > _WAITING:
            self._why = f"more than {_WAITING} requests wait for their answers; read those first"
            raise ValueError(self._why)  # so that the parser stops; `send_400_response` is what comes of it

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():
            self._refuse(b"400 Bad Request", self._why or "this is not HTTP")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        self._is_read()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        self._end()

    def _refuse(self, status: bytes, why: str) -> None:
        self._refused = True
        said = error_body(int(status[:3]), "busy" if status.startswith(b"503") else "invalid", why)
        self.transport.write(
            b"HTTP/1.1 %b\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (status, len(said), said)
        )
        self._end()

    def _end(self) -> None:
        """Close, also if what was written is never read."""
        self.transport.close()
        self.loop.call_later(SLOWEST, self.transport.abort)

    def _watch(self) -> None:
        def look() -> None:
            if self.transport.get_write_buffer_size() < left:
                self._watch()
            else:
                self.transport.abort()

        left = self.transport.get_write_buffer_size()
        self._unread = self.loop.call_later(SLOWEST, look)

    def _is_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _in_time(self) -> None:
        self._read = 0
        if self._late is not None:
            self._late.cancel()
            self._late = None


class _Config(uvicorn.Config):
    """The configuration of a listener; ``connections`` may be there at a time."""

    connections = _CONNECTIONS


class Listener(uvicorn.Server):
    """Answers on a socket until `stop`.

    Args:
        application: of ASGI.
        grace: seconds that it has for what is under way when it stops.
        hosts: names by which it may be asked, as `nrl.gym.http.front.allowed_hosts` gives them; None: any.
        ending: called when it is to stop.
    """

    def __init__(
        self,
        application: Application,
        grace: float,
        hosts: Collection[str] | None,
        ending: Callable[[], Any] = lambda: None,
    ) -> None:
        self._ending = ending
        config = _Config(
            guarded(application, hosts),
            http=_Bounded,
            ws="none",
            lifespan="off",
            interface="asgi3",
            access_log=False,
            log_level="error",
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=max(1, round(grace)),
            backlog=_BACKLOG,
        )
        files = many_files()  # of which some are left for what user code opens
        config.connections = min(_CONNECTIONS, files - max(32, files // 4))
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the program."""
        yield

    async def answer(self, on: socket.socket, ready: Callable[[], Any]) -> None:
        """Answer on a socket, until it is stopped."""
        serving = asyncio.ensure_future(self.serve(sockets=[on]))
        while not (self.started or serving.done()):
            await asyncio.sleep(0)
        if self.started:
            ready()
        await serving

    def stop(self) -> None:
        """Take no more connections, and end when what is under way is over; from any thread."""
        self._ending()
        self.should_exit = True
