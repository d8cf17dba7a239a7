"""The front of all HTTP servers: which hosts and sites may ask, and the headers that are read."""

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from typing import Any

import msgspec

__all__ = [
    "Application",
    "Headers",
    "Receive",
    "Send",
    "allowed_hosts",
    "error_body",
    "guarded",
    "is_loopback",
]

_SHORT = 2**15  # bytes of a body that a connection may read and forget

type Receive = Callable[[], Awaitable[dict[str, Any]]]
type Send = Callable[[dict[str, Any]], Awaitable[None]]
type Application = Callable[[Any, Receive, Send], Coroutine[Any, Any, None]]


class Headers:
    """The headers of a request that servers read.

    Args:
        headers: of an ASGI scope, with names in lower case.

    >>> Headers([(b"host", b"localhost:8000"), (b"authorization", b"Bearer a secret")]).bearer
    b'a secret'
    """

    def __init__(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self.bearer, self.timeout, length = b"", None, b""
        self.cookie, self.hosts, self.origin, self.encoding = b"", list[str](), "", b""
        self.chunked = False
        for name, value in headers:
            if name == b"authorization":
                scheme, _, key = value.partition(b" ")
                self.bearer = key.strip() if scheme.lower() == b"bearer" else b""
            elif name == b"host":
                self.hosts.append(value.decode("latin-1").strip().lower())
            elif name == b"content-length":
                length = value
            elif name == b"transfer-encoding":
                self.chunked = True
            elif name == b"nrl-timeout":
                self.timeout = value
            elif name == b"origin":
                self.origin = value.decode("latin-1").strip().lower()
            elif name == b"content-encoding":
                self.encoding = value.strip().lower()
            elif name == b"cookie":
                self.cookie = value
        self.length = int(length) if length.isdigit() else 0

    @property
    def has_body(self) -> bool:
        """Whether a body follows."""
        return self.chunked or self.length > 0

    @property
    def is_long(self) -> bool:
        """Whether the body is longer than what a connection reads for nothing."""
        return self.chunked or self.length > _SHORT


def is_loopback(host: str) -> bool:
    """Whether a name or an address is one that no other machine can reach.

    >>> is_loopback("127.0.0.2"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host.lower() == "localhost"


def allowed_hosts(host: str, hosts: Iterable[str] = (), *, secured: bool) -> frozenset[str] | None:
    """Return the names by which a server may be asked for; None: any.

    A page of another site can let its own name lead to a server on the reader's machine (DNS rebinding), and its
    browser then sends that name. A page does not know a token, so a secured server that other machines reach takes any.

    Args:
        host: where the server listens.
        hosts: further names, such as that of a proxy.
        secured: whether requests have to bear a token.

    >>> sorted(allowed_hosts("127.0.0.1", ["gym.example.org"], secured=False))
    ['127.0.0.1', 'gym.example.org', 'localhost']
    """
    further = {name.lower().rstrip(".") for name in hosts}
    if secured and not further and not is_loopback(host):
        return None
    own = () if is_loopback(host) else (socket.gethostname().lower(),)
    return frozenset({host.lower(), "localhost", *own, *further})


def guarded(application: Application, hosts: Collection[str] | None) -> Application:
    """Return an application that is asked only by the hosts and sites that may ask.

    Args:
        application: of ASGI.
        hosts: as `allowed_hosts` gives them.
    """

    async def serve(scope: Any, receive: Receive, send: Send) -> None:
        started = False

        async def sent(message: dict[str, Any]) -> None:
            nonlocal started
            started = True
            await send(message)

        headers = scope["nrl.headers"] = Headers(scope["headers"])
        reason = _stranger(headers, hosts)
        if reason:
            await _send_error(send, 403, "forbidden", reason, close=headers.is_long)
            return
        try:
            await application(scope, receive, sent)
        except asyncio.CancelledError:  # by a server that stops, and has waited long enough
            if not started:
                await _send_error(send, 503, "stopping", "the server is stopping; ask another one", close=True)

    return serve


def _stranger(headers: Headers, hosts: Collection[str] | None) -> str:
    """Say why a request may not ask; empty: it may."""
    if len(headers.hosts) > 1:
        return "the request has several Host headers; send one"
    host = headers.hosts[0] if headers.hosts else ""
    if host and hosts is not None and not _is_known(host, hosts):
        return (
            f"this server is not known as {host:.80}; ask by its address, or name that host in the option hosts of "
            "the server"
        )
    if headers.origin:
        site = headers.origin.partition("://")[2]
        if not site or (site != host and _name(site) not in _by_name(hosts)):
            return (
                f"a page of {headers.origin:.80} may not ask this server; if it should, name its host in the option "
                "hosts of the server"
            )
    return ""


def _name(host: str) -> str:
    """The name in a Host header, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")


def _by_name(hosts: Collection[str] | None) -> Collection[str]:
    """Names of other sites, whose pages may ask: none of those that every machine has."""
    return [name for name in hosts or () if not is_loopback(name)]


def _is_known(host: str, hosts: Collection[str]) -> bool:
    name = _name(host)
    if name in hosts:
        return True
    try:  # no other site has an address in place of its name
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def error_body(status: int, code: str, message: str, param: str | None = None) -> bytes:
    """The body of an error, which clients of gyms and those of OpenAI's APIs can both read."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    text = message.encode("utf-8", "backslashreplace").decode()
    error = {"code": code, "kind": "EnvError", "message": text, "type": kind, "param": param}
    return msgspec.json.encode({"error": error})


async def _send_error(send: Send, status: int, code: str, message: str, *, close: bool) -> None:
    body = error_body(status, code, message)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers += [(b"connection", b"close")] if close else []
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
