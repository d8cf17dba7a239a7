"""A gym as its clients see it: from a configuration to the addresses of its servers, which its head knows."""

import ipaddress
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import attrs

from nrl.errors import ConfigError, EnvError
from nrl.gym.config.run_registry import Place, places
from nrl.gym.config.servers import head_of, token_of

__all__ = ["Replicas", "ask", "find", "resolve"]

_PATIENCE = 10.0  # seconds for the head to answer


@attrs.frozen
class Replicas:
    """A server of a gym, for a client.

    Args:
        kind: environment, program, model or endpoint.
        urls: of its replicas that have been started, ready or not.
        token: as `nrl.remote` takes it; empty: the gym has none for this one. None: it is for other clients; that of a
            model is its ``api_key``, which is for servers alone.
    """

    kind: str
    urls: tuple[str, ...]
    token: str | None = attrs.field(default=None, repr=False)


def resolve(args: Sequence[str]) -> dict[str, Replicas]:
    """The servers of a running gym, by name.

    Args:
        args: those with which ``nrl gym run`` was started: ``CONFIG.yaml`` and, where they are about the head or the
            token, ``key=value``.

    Raises:
        ConfigError: the configuration is wrong, or no gym of it runs.
        EnvError: its head refuses, or does not answer as a head does.

    >>> resolve(["/nowhere/gym.yaml"])
    Traceback (most recent call last):
    nrl.errors.ConfigError: /nowhere/gym.yaml: cannot be read: No such file or directory; give an existing file, or ...
    """
    place = find(args)
    found = {}
    for server in ask(place)["servers"]:
        urls = tuple(_reached(each["url"], place.url) for each in server["replicas"] if each["url"])
        token = "" if server["kind"] in ("environment", "endpoint") else None  # no other's, such as NRL_GYM_TOKEN
        if server["kind"] == "environment" and server["auth"] == "token":
            token = place.token
        elif server["kind"] == "endpoint":
            token = token_of(args, server["name"]) or ""
        found[server["name"]] = Replicas(server["kind"], urls, token)
    return found


def find(args: Sequence[str]) -> Place:
    """The gym of a configuration, running or not; of none, the only one that runs.

    One that runs here is known by its files, wherever its head is, unless an argument says where that is.

    Raises:
        ConfigError: the configuration is wrong; or there is none, and no gym runs here, or several do; or several of
            the configuration do.
    """
    running = places()
    if not args:
        if len(running) == 1:
            return running[0]
        many = f"{len(running)} gyms run here; name the configuration of one:{_shown(running)}"
        raise ConfigError(many if running else "no gym of yours runs here; start one: nrl gym run CONFIG.yaml")
    gym = head_of(args)
    head = gym.head_server
    wanted = f"http://{_bracketed(gym.host(head))}:{head.port}"
    files = set(map(str, gym.files))
    there = [place for place in running if place.url == wanted]
    if not head.port or not any(arg.lstrip("+").startswith("head_server") for arg in args):
        of_files = [place for place in running if files <= set(place.files)]
        there = [place for place in of_files if place in there] or of_files or there
    if len(there) > 1:
        raise ConfigError(
            f"{len(there)} gyms of {' '.join(sorted(files))} run here; say which one, with head_server.port=PORT:"
            f"{_shown(there)}"
        )
    if there:
        return attrs.evolve(there[0], url=_reached(there[0].url, f"http://127.0.0.1:{head.port}"))
    if not head.port:
        raise ConfigError(f"no gym of {' '.join(sorted(files))} runs here; start it: nrl gym run {' '.join(args)}")
    return Place(_reached(wanted, f"http://127.0.0.1:{head.port}"), gym.token, 0, tuple(sorted(files)))


def _shown(running: Sequence[Place]) -> str:
    return "".join(f"\n    {' '.join(each.files)} at {each.url}" for each in running)


def ask(place: Place) -> Any:
    """What the head of a gym says about its servers.

    Raises:
        ConfigError: nothing answers there.
        EnvError: it refuses, or is no head.
    """
    import httpx2

    headers = {} if place.token is None else {"Authorization": f"Bearer {place.token}"}
    try:
        reply = httpx2.get(f"{place.url}/servers", headers=headers, timeout=_PATIENCE, trust_env=False)
    except httpx2.HTTPError as error:
        start = f"start it: nrl gym run {' '.join(place.files)}"
        raise ConfigError(f"no gym answers at {place.url} ({_why(error)}); {start}") from None
    if reply.status_code == 401:
        raise EnvError(
            f"the gym at {place.url} asks for its token; give it as token: '${{gym_token}}' in the configuration, or "
            "ask as the user who started the gym, on its machine"
        )
    try:
        found = reply.json()
        found["servers"]
    except (ValueError, LookupError, TypeError):
        raise EnvError(
            f"{place.url} answers {reply.status_code}, and not as the head of a gym does; is head_server.port right?"
        ) from None
    return found


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _reached(url: str, head: str) -> str:
    """The address of a server that listens everywhere is that at which its head was reached."""
    parts = urlsplit(url)
    try:
        everywhere = ipaddress.ip_address(parts.hostname or "").is_unspecified
    except ValueError:
        everywhere = False
    if not everywhere:
        return url
    port = "" if parts.port is None else f":{parts.port}"
    return urlunsplit(parts._replace(netloc=f"{_bracketed(urlsplit(head).hostname or '')}{port}"))
