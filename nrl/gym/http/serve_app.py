"""`serve`: a verifier or an environment behind HTTP, in a thread of this process."""

import atexit
import socket
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import EllipsisType, TracebackType
from typing import Any, Self

import attrs
import uvloop

from nrl.arguments import checked
from nrl.envs.types import Env, Verifier, is_env
from nrl.errors import ArgumentError, EnvError
from nrl.gym.config.defaults import LARGEST, LEASE, MOST
from nrl.gym.http.application import application
from nrl.gym.http.front import Application, allowed_hosts, is_loopback
from nrl.gym.http.server_socket import Listener, listening
from nrl.gym.http.service import Service

__all__ = ["Server", "Settings", "address", "answering", "check_reach", "serve"]


_EXIT = 60.0  # seconds for which the end of a program waits for episodes to be closed


class Server:
    """A server that runs; what `serve` returns. It stops when it is left as a context, or by `stop`.

    Args:
        url: of the server.
        token: that it asks for; None: it asks for none.
    """

    def __init__(self, url: str, token: str | None, stop: Any) -> None:
        self.url, self.token, self._stop = url, token, stop

    def __repr__(self) -> str:
        return f"Server({self.url})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Answer what is under way, for ten seconds at most, close all episodes, and end; once."""
        self._stop()


def serve(
    f: Env | Verifier,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    auth: str = "token",
    timeout: float | EllipsisType | None = ...,
    lease: float = LEASE,
    most: int = MOST,
    largest: int = LARGEST,
    name: str | None = None,
    protocol: Callable[..., Application] = application,
    hosts: Sequence[str] = (),
) -> Server:
    """Serve a verifier or an environment over HTTP; `nrl.remote` makes the same one again of its address.

    A call is made as in a rollout: plain functions run in threads, with their time limit. ``serve(pooled(f))`` makes
    the calls in processes, where an overrun can be killed. The server ends with this program,
    which waits until all episodes are closed, for a minute at most.

    Every call is made once: what is repeated, because its answer was lost, is answered from memory. An episode that
    nobody asks for during its lease is closed. Where there is too much to do, the server says after how long to ask
    again. TLS is the work of a proxy.

    Args:
        f: a verifier, or an environment; plain or ``async``.
        host: the address to listen at; by default no other machine can reach it.
        port: 0: any that is free.
        token: that requests have to bear. Without one, ``host`` has to be a loopback address.
        auth: ``"none"`` serves other machines without a token, with a warning; for networks that one trusts.
        timeout: seconds of a call; None: no limit. Left out, the attribute ``timeout`` of ``f``, or a minute.
        lease: seconds for which an episode is kept that nobody asks for. A client asks for its own all the time.
        most: calls under way, and open episodes; what comes beyond is told to come again.
        largest: bytes of a request.
        name: of what is served; left out, its own.
        protocol: what it answers to which path; `nrl.gym.adapters.nemo.server.nemo_gym_protocol`, for NeMo Gym's
            agents.
        hosts: further names by which clients may ask, such as that of a proxy. A server on a loopback address, and one
            without a token, is else known by addresses, as ``localhost``, and by the name of its machine.

    Returns:
        A server with a ``url``, a ``token`` and a ``stop``, which is a context, too.

    Raises:
        EnvError: ``f`` is neither a verifier nor an environment.
        ValueError: other machines could reach it, and there is no token; or a number is not positive.
        OSError: the port is taken.

    >>> import asyncio, nrl
    >>> from nrl.envs import Trace, exact
    >>> with serve(exact) as server:
    ...     verify = nrl.remote(server)
    ...     asyncio.run(verify({"answer": "4"}, Trace("2+2=", ["4"])))
    1.0
    """
    if not (is_env(f) or callable(f)):
        raise EnvError(
            f"serve: {f!r:.200} is neither a verifier nor an environment; give a function, or an Environment"
        )
    for option, number in (("lease", lease), ("most", most), ("largest", largest), ("timeout", timeout)):
        if isinstance(number, int | float) and not number > 0:
            raise ArgumentError(f"serve: {option} is {number}; it must be positive")
    check_reach("serve", host, token, auth)
    on = listening(host, port, "serve")
    url = address(host, on.getsockname()[1])
    if token is None and not is_loopback(host):
        warnings.warn(f"serve: {url} takes calls from every machine that reaches it", stacklevel=2)
    settings = Settings(token, timeout, lease, most, largest, protocol=protocol, host=host, hosts=tuple(hosts))
    thread = _Thread(f, name or _name(f), on, settings)
    return Server(url, token, thread.stop)


def check_reach(who: str, host: str, token: str | None, auth: str) -> None:
    """See that what other machines can reach asks for a token, or is not meant to.

    Raises:
        ValueError: it does not, and nothing says that this is meant.
    """
    if auth not in ("token", "none"):
        raise ArgumentError(f"{who}: auth is {auth!r}; give 'token', or 'none' for a network that you trust")
    if token is None and auth != "none" and not is_loopback(host):
        raise ArgumentError(
            f"{who}: every machine that reaches {host} could use this server; give a token, or auth='none' for a "
            "network that you trust"
        )


def address(host: str, port: int) -> str:
    """The URL of a server.

    >>> address("::1", 8000)
    'http://[::1]:8000'
    """
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _name(f: Any) -> str:
    return str(getattr(f, "__name__", type(f).__name__))


@checked("gym serve")
@attrs.frozen
class Settings:
    """How a server behaves; `serve` says what each means."""

    token: str | None = None
    timeout: float | EllipsisType | None = ...
    lease: float = LEASE
    most: int = MOST
    largest: int = LARGEST
    grace: float = 10.0
    protocol: Callable[..., Application] = application
    host: str = "127.0.0.1"
    hosts: Sequence[str] = ()


async def answering(f: Any, name: str, on: socket.socket, settings: Settings, ready: Callable[[Listener], Any]) -> None:
    """Serve on a socket until the listener, which ``ready`` is given, is stopped; then end all episodes."""
    with on:
        service = Service(f, name, lease=settings.lease, most=settings.most, timeout=settings.timeout)
        app = settings.protocol(service, token=settings.token, largest=settings.largest)
        hosts = allowed_hosts(settings.host, settings.hosts, secured=settings.token is not None)
        listener = Listener(app, settings.grace, hosts, service.refuse)
        try:
            await listener.answer(on, lambda: ready(listener))
        finally:
            await service.stop()


class _Thread:
    """A server in a thread of this process."""

    def __init__(self, f: Any, name: str, on: socket.socket, settings: Settings) -> None:
        self._listener: Future[Listener] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(f, name, on, settings), name=f"serve({name})", daemon=True
        )
        self._thread.start()
        self._listener.result()
        atexit.register(self.stop, _EXIT)  # daemon threads just vanish

    def _run(self, f: Any, name: str, on: socket.socket, settings: Settings) -> None:
        try:
            uvloop.run(answering(f, name, on, settings, self._listener.set_result))
        except BaseException as error:
            if self._listener.done():
                raise
            self._listener.set_exception(error)

    def stop(self, most: float | None = None) -> None:
        """Stop, and wait until all has ended; for so many seconds at most."""
        self._listener.result().stop()
        self._thread.join(most)
        atexit.unregister(self.stop)
