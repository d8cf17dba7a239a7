"""Environments by the address of their server, or by the configuration of their gym; an entry point of nrl."""

import inspect
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any
from urllib.parse import urlsplit

from nrl.envs.types import Env, Verifier
from nrl.errors import ConfigError
from nrl.gym.config.resolving import resolve
from nrl.gym.http.remote_env import remote

__all__ = ["environments_at"]


def environments_at(name: str, address: str, options: Mapping[str, Any]) -> dict[str, Verifier | Env] | None:
    """Return the environments of an address by label: of one server, or of a gym that ``nrl gym run`` has started.

    Args:
        name: the entry of ``env=`` that has the address, for labels and messages.
        address: ``http://HOST:PORT``, several of them joined by commas, ``gym.yaml`` or ``gym.yaml:NAME``.
        options: those of `nrl.remote`.

    Returns:
        None: it is no such address.

    Raises:
        ConfigError: the gym has no such environment, or an option is wrong.

    >>> environments_at("math", "math", {}) is None
    True
    """
    if address.startswith(("http://", "https://")):
        urls = address.split(",")
        label = ",".join(urlsplit(url).netloc for url in urls) if name == address else name
        return {label: _connect(name, urls, options)}
    file, _, server = address.partition(":")
    if not file.endswith((".yaml", ".yml")):
        return None
    servers = {key: each for key, each in resolve([file]).items() if each.kind in ("environment", "endpoint")}
    if server and server not in servers:
        raise ConfigError(
            f"env={address}: the gym has no environment '{server}'; it has {', '.join(servers) or 'none'}"
        )
    chosen = {server: servers[server]} if server else servers
    if not chosen:
        raise ConfigError(f"env={address}: the gym has no environments; give it some under `servers`")
    return {
        name if server and name != address else key: _connect(name, each.urls, {"token": each.token, **options})
        for key, each in chosen.items()
    }


def _connect(name: str, servers: Sequence[str], options: Mapping[str, Any]) -> Verifier | Env:
    known = tuple(inspect.signature(remote).parameters)[1:]
    for option in options:
        if option not in known:
            near = get_close_matches(option, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"an address has {', '.join(known)} and weight"
            raise ConfigError(f"env.{name}: no option '{option}'; {hint}")
    try:
        return remote(servers, **options)  # type: ignore[no-any-return]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"env.{name}: {error}") from error
