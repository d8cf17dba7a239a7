"""An HTTP client in a thread beside the program: many requests at once, each with a deadline."""

import asyncio
import functools
import ipaddress
import os
import random
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import attrs

from nrl.errors import ArgumentError, ClusterError, DeadlineExceeded, GenerationError

__all__ = ["Answer", "CompletionServer", "connect", "excerpt", "is_private"]

_LATER = frozenset({429, 500, 502, 503, 504})  # worth another attempt; other refusals would only repeat
_ATTEMPTS = 6
_WAIT = 0.5  # seconds before the second attempt; twice as long before each next one
_CONNECT = 10.0  # seconds
_KEY = "give the server's key as api_key=..., or, if it is https or on this machine, in OPENAI_API_KEY"
_MOVED = "give the address that it redirects to; neither prompts nor the key are sent on to where a server says"
_ADVICE = {
    **dict.fromkeys((301, 302, 303, 307, 308), _MOVED),
    401: _KEY,
    403: _KEY,
    404: "look whether the address and the name of the model are right",
}


class Answer(NamedTuple):
    """A server's answer.

    Args:
        content: the parsed JSON.
        times: how often it was asked.
    """

    content: Any
    times: int


@attrs.define(eq=False)
class CompletionServer:
    """A server, and the limits for requests to it. Its ``repr`` has no secrets.

    Args:
        caller: the name of the caller in errors.
        url: the address before paths. A user and a password in it are sent, and kept out of all messages.
        key: sent as the bearer token; None: no token.
        timeout: seconds for each answer, all attempts together.
        in_flight: how many requests may be under way at once.
        failed: how many requests in a row have failed in all attempts.

    >>> CompletionServer("test", "http://localhost:8000/v1", key="secret", timeout=5.0, in_flight=2)
    CompletionServer(caller='test', url='http://localhost:8000/v1', timeout=5.0, in_flight=2, failed=0)
    """

    caller: str
    url: str
    key: str | None = attrs.field(repr=False)
    timeout: float
    in_flight: int
    failed: int = 0
    _login: tuple[str, str] | None = attrs.field(init=False, repr=False, default=None)
    _room: asyncio.Semaphore = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        scheme, rest = self.url.split("://", 1)
        host, slash, path = rest.partition("/")
        login, separator, host = host.rpartition("@")
        if separator:
            user, _, password = login.partition(":")
            self._login = unquote(user), unquote(password)
        self.url = f"{scheme}://{host}{slash}{path}"
        self._room = asyncio.Semaphore(self.in_flight)

    async def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        """Get a path, or post a body to it as JSON; `nrl.runtime.threads.run_in_loop` runs this.

        It tries again, a few times and ever later, where a connection fails or the server is busy or fails.

        Raises:
            GenerationError: the server refuses, or its answer is no JSON.
            ClusterError: it cannot be reached, stays busy, or fails each time.
            DeadlineExceeded: it does not answer in time.
        """
        async with self._room:
            try:
                answer = await self._send(self.url + path, body)
            except ClusterError:
                self.failed += 1
                raise
            self.failed = 0
            return answer

    async def _send(self, url: str, body: Mapping[str, Any] | None) -> Answer:
        import httpx2

        options: dict[str, Any] = {
            "headers": {"Authorization": f"Bearer {self.key}"} if self.key else {},
            "auth": self._login,
            "trust_env": not _is_here(url),  # a proxy is not for addresses of this machine
            "follow_redirects": False,
            "verify": _load_certificates() if url.startswith("https:") else False,
            "timeout": httpx2.Timeout(None, connect=_CONNECT),  # the deadline bounds all the rest
        }
        last, pause = "it has said nothing", 0.0
        try:
            # A client for each request: one with many connections searches all of them whenever one is done
            async with asyncio.timeout(self.timeout), httpx2.AsyncClient(**options) as client:
                for attempt in range(_ATTEMPTS):
                    await asyncio.sleep(pause)
                    # The random factor spreads the retries of many clients.
                    pause = _WAIT * 2**attempt * random.uniform(0.75, 1.25)
                    try:
                        response = await client.request("GET" if body is None else "POST", url, json=body)
                    except httpx2.TransportError as error:
                        last = f"{type(error).__name__}: {error}".rstrip(": ")
                        continue
                    if response.status_code == 200:
                        return Answer(self._parse(url, response), attempt + 1)
                    last = f"status {response.status_code}: {excerpt(response.text)}"
                    if response.status_code not in _LATER:
                        advice = _ADVICE.get(response.status_code, "see the server's own log")
                        raise GenerationError(f"{self.caller}: {url} refuses with {last}; {advice}")
                    pause = max(pause, _seconds(response.headers.get("retry-after")))
        except TimeoutError:
            raise DeadlineExceeded(
                f"{self.caller}: {url} did not answer within {self.timeout:g} s ({last}); see whether the server is "
                "alive, ask for fewer tokens, or give a longer timeout="
            ) from None
        raise ClusterError(
            f"{self.caller}: {url} could not be reached, or could not answer, {_ATTEMPTS} times ({last}); see whether "
            "the server is alive and the address is right"
        )

    def _parse(self, url: str, response: Any) -> Any:
        try:
            return response.json()
        except (ValueError, RecursionError):
            raise GenerationError(
                f"{self.caller}: {url} answers with something that is no JSON: {excerpt(response.text)}; look whether "
                "the address is that of an OpenAI-compatible server"
            ) from None


def connect(caller: str, url: str, api_key: str | None, timeout: float, in_flight: int) -> CompletionServer:
    """Return a server by its address, with or without ``/v1``.

    Args:
        caller: the name of the caller in errors.
        url: the address.
        api_key: sent as the bearer token, wherever the server is; None: the environment variable ``OPENAI_API_KEY``, if
            it is set and nobody can listen on the way.
        timeout: see `CompletionServer`.
        in_flight: see `CompletionServer`.

    Raises:
        ValueError: an argument that cannot be used.
    """
    if not url.startswith(("http://", "https://")):
        shown = url.rpartition("@")[2]  # before it a password may stand
        raise ArgumentError(f"{caller}: the url is {shown!r}; give one such as 'http://localhost:8000/v1'")
    if not timeout > 0 or in_flight < 1:
        raise ArgumentError(f"{caller}: timeout is {timeout} and in_flight {in_flight}; both have to be positive")
    key = _read_key(caller, url) if api_key is None else api_key
    return CompletionServer(caller, url.rstrip("/").removesuffix("/v1") + "/v1", key, timeout, in_flight)


def _read_key(caller: str, url: str) -> str | None:
    """Return the key in the environment, unless somebody could listen on the way to the server."""
    key = os.environ.get("OPENAI_API_KEY") or None
    if key is None or is_private(url):
        return key
    warnings.warn(
        f"{caller}: OPENAI_API_KEY is not sent to {urlsplit(url).hostname}, as http carries it in clear; if the server "
        "is to have it, give an https address, or api_key=...",
        UserWarning,
        stacklevel=4,
    )
    return None


def is_private(url: str) -> bool:
    """Return whether the way to an address is private, by TLS or because it is this machine's own.

    >>> is_private("https://example.org/v1"), is_private("http://127.0.0.1:8000"), is_private("http://gpu7:8000")
    (True, True, False)
    """
    return url.startswith("https://") or _is_here(url)


def _is_here(url: str) -> bool:
    name = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def excerpt(text: object, limit: int = 300) -> str:
    """Return the beginning of a server's answer, on one line.

    >>> excerpt("all  is\\nwell"), excerpt("x" * 9, 4)
    ('all is well', 'xxxx ...')
    """
    line = " ".join(str(text).split())
    return line if len(line) <= limit else f"{line[:limit]} ..."


def _seconds(header: str | None) -> float:
    """Return the seconds in ``Retry-After``; 0 for a date or no header."""
    return float(header) if header and header.isdecimal() else 0.0


@functools.cache
def _load_certificates() -> Any:
    """Load the trusted certificates, once, since that takes a while."""
    import httpx2

    return httpx2.create_ssl_context()
