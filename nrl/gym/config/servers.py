"""The servers of a gym, as its configuration describes them."""

import ipaddress
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Literal

import attrs

from nrl.config._yaml import Problems
from nrl.config.layers import ConfigLayer, explain
from nrl.config.structure import structure
from nrl.errors import ConfigError
from nrl.gym.config.defaults import LARGEST, LEASE, MOST
from nrl.gym.config.settings import settings
from nrl.log.redaction import redact
from nrl.runtime.venvs.registry import Executable, executable

__all__ = [
    "Endpoint",
    "EnvironmentServer",
    "Gym",
    "Head",
    "ModelServer",
    "Program",
    "Server",
    "executable_of",
    "gym",
    "head_of",
    "is_loopback",
    "token_of",
]

_LOOPBACK = "127.0.0.1"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0"), is_loopback("node-7")
    (True, True, False, False)
    """
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _is_port(_: Any, attribute: Any, value: int) -> None:
    if not 0 <= value < 1 << 16:
        raise ValueError("give a port from 1 to 65535, or 0 for one that is free")


def _is_positive(_: Any, attribute: Any, value: Any) -> None:
    if value is not None and not value > 0:
        raise ValueError("give a positive number")


def _is_url(_: Any, attribute: Any, value: Any) -> None:
    urls = [value] if isinstance(value, str) else value
    if not urls or not all(re.match(r"https?://[^/\s]+", url) for url in urls):
        raise ValueError("give an address that begins with http:// or https://")


@attrs.frozen
class Head:
    """The server that knows where the others are."""

    host: str | None = None  # default: default_host
    port: int = attrs.field(default=11000, validator=_is_port)
    hosts: list[str] = attrs.field(factory=list)  # further names by which clients may ask


@attrs.frozen(kw_only=True)
class _Process:
    """What processes of this machine have in common."""

    replicas: int = attrs.field(default=1, validator=_is_positive)
    host: str | None = None  # default: default_host
    port: int = attrs.field(default=0, validator=_is_port)  # of the first replica, then the next ones; 0: any
    executable: str | dict[str, Any] = "system"  # the Python environment, by name, or the fields of a new one
    env: dict[str, str] = attrs.field(factory=dict, repr=False)  # environment variables
    silence: float | None = attrs.field(default=60.0, validator=_is_positive)  # seconds; then it is started again


@attrs.frozen(kw_only=True)
class EnvironmentServer(_Process):
    """A verifier or an environment, served by nrl."""

    kind: ClassVar[str] = "environment"
    environment: str  # its name, as env= takes it
    options: dict[str, Any] = attrs.field(factory=dict, repr=False)
    workers: int | None = attrs.field(default=None, validator=_is_positive)  # processes that make its calls
    auth: Literal["token", "none"] | None = None  # default: that of the gym
    protocol: Literal["nrl", "nemo_gym"] = "nrl"  # nemo_gym: for its agents, which send no token
    lease: float = attrs.field(default=LEASE, validator=_is_positive)  # seconds that a session may be silent
    most: int = attrs.field(default=MOST, validator=_is_positive)  # calls under way, and sessions, of each replica
    largest: int = attrs.field(default=LARGEST, validator=_is_positive)  # bytes of a request
    hosts: list[str] = attrs.field(factory=list)  # further names by which clients may ask, such as that of a proxy


@attrs.frozen(kw_only=True)
class Program(_Process):
    """Any other program that serves HTTP, such as an agent, or vLLM."""

    kind: ClassVar[str] = "program"
    command: list[str]  # {host} and {port} stand for its own; its first word is looked for in the executable first
    ready: str = "/health"  # what answers 200 when it is ready


@attrs.frozen(kw_only=True)
class ModelServer:
    """A model elsewhere, behind the API of OpenAI."""

    kind: ClassVar[str] = "model"
    model: str = attrs.field(validator=_is_url)  # with /v1
    api_key: str | None = attrs.field(default=None, repr=False)
    name: str | None = None  # of the model, which has to be among those that it serves


@attrs.frozen(kw_only=True)
class Endpoint:
    """A served environment elsewhere."""

    kind: ClassVar[str] = "endpoint"
    url: str | list[str] = attrs.field(validator=_is_url)  # of each replica
    token: str | None = attrs.field(default=None, repr=False)

    @property
    def replicas(self) -> int:
        """How many there are."""
        return len(self.urls)

    @property
    def urls(self) -> list[str]:
        """The address of each."""
        return [self.url] if isinstance(self.url, str) else self.url


type Server = EnvironmentServer | Program | ModelServer | Endpoint
"""One of the four."""

_KINDS: dict[str, type[Any]] = {
    "environment": EnvironmentServer,
    "model": ModelServer,
    "command": Program,
    "url": Endpoint,
}


@attrs.frozen
class Gym:
    """Servers, and what they have in common."""

    servers: dict[str, Any] = attrs.field(factory=dict, repr=False)  # by name
    default_host: str = _LOOPBACK  # where servers listen
    head_server: Head = Head()
    token: str | None = attrs.field(default=None, repr=False)  # what clients have to show; default: a new one
    auth: Literal["token", "none"] = "token"  # none: whoever reaches a server may use it
    ray_head_node_address: str | None = None  # of the Ray cluster that has the workers; default: RAY_ADDRESS, or here
    deadline: float = attrs.field(default=1800.0, validator=_is_positive)  # seconds until all have to be ready
    grace: float = attrs.field(default=10.0, validator=_is_positive)  # seconds to finish what is under way, at the end
    files: tuple[Path, ...] = ()  # absolute
    warnings: tuple[str, ...] = ()  # lines to show

    def host(self, server: "_Process | Head") -> str:
        """Where a server listens."""
        return server.host or self.default_host

    def is_open(self, server: EnvironmentServer) -> bool:
        """Whether a server asks for no token."""
        return (server.auth or self.auth) == "none"

    def folder(self) -> Path:
        """Where its processes run: beside the first file, so that what a file names may lie beside it."""
        return self.files[0].parent


_KEYS = tuple(field.name for field in attrs.fields(Gym) if field.name not in ("files", "warnings"))


def head_of(args: Sequence[str]) -> Gym:
    """The gym of some files and arguments without its servers: where its head is, and the token, if one is given.

    So a client needs none of the secrets that servers do.

    Raises:
        ConfigError: as `gym` does.
    """
    given = settings(args, _KEYS)
    values = given.resolved(("default_host", "head_server", "token", "auth"))
    made, problems = _structured(Gym, values, (), given.layers)
    if problems:
        raise ConfigError(redact("\n  ".join([given.files[0].name, *problems])))
    found: Gym = attrs.evolve(made, files=given.files)
    return found


def token_of(args: Sequence[str], name: str) -> str | None:
    """The token of a served environment elsewhere, whatever the other servers need; None: it has none.

    Raises:
        ConfigError: a reference in it leads nowhere.
    """
    given = settings(args, _KEYS)
    servers = given.values.get("servers")
    server = servers.get(name) if isinstance(servers, Mapping) else None
    key, found = f"servers.{name}.token", server.get("token") if isinstance(server, Mapping) else None
    found = given._replace(values={**given.values, key: found}).resolved([key])[key]
    return None if found is None else str(found)


def gym(args: Sequence[str]) -> Gym:
    """The gym of some files and arguments.

    Args:
        args: as for `nrl.gym.config.settings.settings`.

    Raises:
        ConfigError: names every problem at once. No message holds a secret.
    """
    given = settings(args, _KEYS)
    try:
        values = given.resolved(_KEYS)
        problems, servers = list[str](), dict[str, Server]()
        listed = values.pop("servers", None)
        if not isinstance(listed, Mapping) or not listed:
            raise ConfigError("servers: there are none; give at least one, as in servers: {math: {environment: math}}")
        top, wrong = _structured(Gym, values, (), given.layers)
        problems += wrong
        for name, value in listed.items():
            server, wrong = _server(str(name), value, given.layers, [each for each in listed if each != name])
            problems += wrong
            if server is not None:
                servers[str(name)] = server
        if not problems and top is not None:
            problems += _conflicts(attrs.evolve(top, servers=servers))
    except ConfigError as error:
        raise ConfigError(redact(str(error))) from None
    if problems or top is None:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError(redact("\n  ".join([f"{' '.join(each.name for each in given.files)}: {count}", *problems])))
    made: Gym = attrs.evolve(top, servers=servers, files=given.files)
    return attrs.evolve(made, warnings=tuple(_warnings(made)))


def _server(name: str, value: Any, layers: Sequence[ConfigLayer], others: Sequence[Any]) -> tuple[Any, list[str]]:
    where = f"servers.{name}"
    if not _NAME.fullmatch(name):
        return None, [f"{where}: a name has letters, digits and . _ -, and begins with one of the first two"]
    if not isinstance(value, Mapping):
        return None, [f"{where}: expected a mapping, as in {{environment: math}}"]
    kinds = [key for key in _KINDS if key in value]
    if len(kinds) != 1:
        near = [meant for key in value for meant in get_close_matches(str(key), _KINDS, 1)]
        near += [f"servers.{meant}" for meant in get_close_matches(name, map(str, others), 1)]
        hint = f"; did you mean {near[0]}?" if near and not kinds else ""
        has = " and ".join(kinds) or "none of them"
        return None, [f"{where}: a server has one of {', '.join(_KINDS)}; this one has {has}{hint}"]
    cls = _KINDS[kinds[0]]
    known = {field.alias for field in attrs.fields(cls)}
    wrong = [
        f"{where}.{key}: no such key; an option of the environment is {where}.options.{key}"
        for key in value
        if key not in known and cls is EnvironmentServer and not get_close_matches(str(key), known, 1)
    ]
    fitting = {key: item for key, item in value.items() if not any(f".{key}: no such" in each for each in wrong)}
    made, more = _structured(cls, fitting, ("servers", name), layers)
    return made, [*wrong, *more]


def _structured(
    cls: type, value: Mapping[str, Any], above: tuple[str, ...], layers: Sequence[ConfigLayer]
) -> tuple[Any, list[str]]:
    """An instance and no problems, or problems, which show no value that holds a secret."""
    try:
        return structure(value, cls), []
    except Problems as error:
        return None, [
            explain(cls, (*above, *path), _hidden(value, path, text), layers) for path, text in error.problems
        ]


def _hidden(value: Any, path: tuple[Any, ...], text: str) -> str:
    for key in path:
        value = value[key] if isinstance(value, Mapping) and key in value else None
    before, found, _ = text.partition(", found ")
    return f"{before}, found a secret" if found and isinstance(value, str) and redact(value) != value else text


def _processes(made: Gym) -> Iterator[tuple[str, Any]]:
    for name, server in made.servers.items():
        if isinstance(server, _Process):
            yield name, server


def _conflicts(made: Gym) -> list[str]:
    """What is wrong between keys."""
    found, ports = list[str](), dict[int, str]()
    if made.head_server.port:
        ports[made.head_server.port] = "head_server"
    hosts: list[tuple[str, str, bool]] = [("head_server", made.host(made.head_server), made.auth == "none")]
    for name, server in _processes(made):
        for port in range(server.port, server.port + server.replicas) if server.port else ():
            if port in ports:
                found.append(f"servers.{name}.port: {port} is that of {ports[port]}, too; give another one, or 0")
            ports.setdefault(port, f"servers.{name}")
        if isinstance(server, EnvironmentServer):
            hosts.append((f"servers.{name}", made.host(server), made.is_open(server)))
            if server.protocol == "nemo_gym" and not made.is_open(server):
                found.append(
                    f"servers.{name}.protocol: NeMo Gym's agents send no token, so it has to be open; give "
                    f"servers.{name}.auth: none"
                )
        try:
            executable_of(server)
        except Exception as error:  # of the class, or that there is none of this name
            found.append(f"servers.{name}.executable: {error}")
        for word in server.command if isinstance(server, Program) else ():
            if redact(word) != word:
                found.append(
                    f"servers.{name}.command: it holds a secret, which every user of the machine could read in its "
                    f"command line; give it in servers.{name}.env, and let the program read that variable"
                )
    for where, host, settled in hosts:
        if not (is_loopback(host) or settled or made.token is not None):
            found.append(
                f"{where}: others reach {host}, so clients have to show a token that they know; give token: "
                "'${gym_token}' (GYM_TOKEN in the environment), or auth: none in a network that you trust"
            )
    return found


def executable_of(server: Any) -> Executable:
    """The Python environment of a server's processes.

    Raises:
        PlacementError: no executable has this name.
        TypeError: the fields are not those of one.
    """
    given = server.executable
    return Executable(**given) if isinstance(given, Mapping) else executable(given)


def _warnings(made: Gym) -> list[str]:
    environments = [(f"servers.{name}", s) for name, s in _processes(made) if isinstance(s, EnvironmentServer)]
    idle = made.ray_head_node_address is not None and all(s.workers is None for _, s in environments)
    wide = [(where, made.host(s)) for where, s in environments if made.is_open(s)]
    wide += [("head_server", made.host(made.head_server))] if made.auth == "none" else []
    nothing = "ray_head_node_address: no server has workers, so nothing runs on that cluster; give servers.NAME.workers"
    return [nothing] * idle + [
        f"{where} listens on {host} with auth: none: whoever reaches it may use it"
        for where, host in wide
        if not is_loopback(host)
    ]
