"""One replica of a server: what is known of it, and its life, from its start to its end."""

import asyncio
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import aiohttp
import attrs

from nrl.gym.config.servers import Endpoint, EnvironmentServer, ModelServer, Program, Server
from nrl.gym.http.client import unreached
from nrl.log import duration
from nrl.log.redaction import kept_secrets, redact
from nrl.runtime.node import reaper

__all__ = ["Interpreter", "Replica", "environment_of", "fate", "live", "probe", "seconds", "watch"]

type _State = Literal["building", "starting", "ready", "silent", "restarting", "stopping", "stopped"]

_LINES = 20  # of what a server wrote, which an error shows
_LONGEST = 4096  # characters of such a line
_FIRST_LOOKS, _LOOKS, _LOOKS_ELSEWHERE = 0.05, 1.0, 5.0  # seconds between questions whether it is ready
_MISSED = 3  # answers that fail to come before a server counts as silent
_PATIENCE = 5.0  # seconds for one answer


@attrs.frozen
class Interpreter:
    """How the processes of an executable start."""

    python: str
    env: dict[str, str] = attrs.field(repr=False)


@attrs.define(eq=False)
class Replica:
    """A replica of a server, and what is known of it now.

    ``since`` are seconds since 1970 in its state; ``note`` says why it is not ready; ``heard`` is when it last answered
    anything, on the monotonic clock, and ``hung`` says that it was ended since it did not for too long.
    """

    name: str
    number: int
    server: Server
    host: str = ""
    port: int = 0
    url: str = ""
    state: _State = "starting"
    note: str = ""
    since: float = attrs.field(factory=time.time)
    restarts: int = 0
    pid: int | None = None
    serves: str | None = None
    was_ready: bool = False
    mistake: str = ""
    heard: float = 0.0
    hung: str = ""
    ending: bool = False
    process: "asyncio.subprocess.Process | None" = None
    tail: deque[str] = attrs.field(factory=lambda: deque(maxlen=_LINES))
    changed: Callable[["Replica"], None] = lambda _: None

    @property
    def label(self) -> str:
        """How lines name it."""
        return f"{self.name}/{self.number}" if getattr(self.server, "replicas", 1) > 1 else self.name

    def become(self, state: _State, note: str = "") -> None:
        """Change its state."""
        self.note = note
        if state != self.state:
            self.state, self.since = state, time.time()
            self.was_ready = self.was_ready or state == "ready"
            self.changed(self)

    def tell(self, word: str) -> None:
        """Tell its keeper to ``stop`` or to ``kill``, now or as soon as there is one."""
        self.ending = True
        self.send(word)

    def send(self, word: str) -> None:
        """Send its keeper a word, if there is one."""
        if self.process is not None and self.process.stdin is not None:
            with suppress(OSError, RuntimeError):  # it has ended
                self.process.stdin.write(f"{word}\n".encode())

    def shown(self) -> dict[str, Any]:
        """What the head says of it."""
        known = ("url", "state", "note", "since", "restarts", "pid")
        return {"number": self.number, **{name: redact(x) if isinstance(x := getattr(self, name), str) else x
                                          for name in known}}  # fmt: skip


def seconds(past: float) -> str:
    """A time as lines of a gym say it.

    >>> seconds(1.83), seconds(75)
    ('1.8 s', '1:15')
    """
    return f"{past:.1f} s" if past < 60 else duration(past)


def fate(status: int) -> str:
    """How a process ended."""
    return f"was ended by signal {status - 128}" if status > 128 else f"ended with status {status}"


async def live(
    replica: Replica,
    interpreter: Interpreter,
    *,
    folder: Path,
    token: str | None,
    cluster: str | None,
    grace: float,
    show: Callable[[str, str], None],
) -> int:
    """Start the process of a replica, watch it, and return its status when it has ended.

    Args:
        replica: of an environment or a program; its state changes meanwhile.
        interpreter: of its executable.
        folder: where it runs.
        token: for an environment, what its clients have to show; None: nothing.
        cluster: the address of the Ray cluster that has the workers of an environment; None: what the process finds.
        grace: seconds that it has to end.
        show: gets its label and each line that it writes.
    """
    server = replica.server
    assert isinstance(server, EnvironmentServer | Program)
    replica.tail.clear()
    replica.pid, replica.hung = None, ""
    replica.become("starting", "it has not answered yet")
    order = {**_order(replica, server, interpreter, token, cluster, grace), "folder": str(folder), "grace": grace}
    order["open"] = order["line"] is not None
    replica.process = process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", str(reaper.__file__),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the supervisor alone
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    with suppress(OSError):
        process.stdin.write(json.dumps(order).encode() + b"\n")
        await process.stdin.drain()
    if replica.ending:  # meanwhile
        replica.tell("stop")

    def heard(line: str) -> None:
        told = _told(line) if replica.pid is None or not replica.url else {}
        if "pid" in told and replica.pid is None:
            replica.pid = told["pid"]
        elif "url" in told and isinstance(server, EnvironmentServer):
            replica.url, replica.serves = told["url"], told.get("serves")
            replica.port = urlsplit(replica.url).port or 0  # where clients look for it after a restart
        else:
            written(line)

    def written(line: str) -> None:
        line = redact(line)
        replica.tail.append(line)
        show(replica.label, line)

    if isinstance(server, EnvironmentServer):
        replica.url = ""
    reading = [asyncio.create_task(_read(process.stdout, heard)), asyncio.create_task(_read(process.stderr, written))]
    watching = asyncio.create_task(watch(replica, token))
    try:
        status = await process.wait()
        status = status if status >= 0 else 128 - status  # of the keeper itself
        await asyncio.wait(reading, timeout=1.0)  # the last lines; somebody else may hold the other end
        return status
    finally:
        for task in (watching, *reading):
            task.cancel()
        await asyncio.gather(watching, *reading, return_exceptions=True)
        replica.process = None


def _order(
    replica: Replica,
    server: EnvironmentServer | Program,
    interpreter: Interpreter,
    token: str | None,
    cluster: str | None,
    grace: float,
) -> dict[str, Any]:
    env = {**interpreter.env, **server.env}
    if isinstance(server, Program):
        replica.url = f"http://{replica.host}:{replica.port}"
        put = {"{host}": replica.host, "{port}": str(replica.port)}
        return {"argv": [_put(word, put) for word in server.command], "env": env, "line": None}
    told = {
        "environment": server.environment, "options": server.options, "host": replica.host, "port": replica.port,
        "name": replica.name, "token": token, "grace": grace,
        "workers": server.workers, "cluster": cluster,
        "lease": server.lease, "most": server.most, "largest": server.largest, "protocol": server.protocol,
        "secrets": kept_secrets(), "hosts": server.hosts,
        "auth": "none" if token is None else "token",  # the supervisor has judged whether that may be
    }  # fmt: skip
    argv = [interpreter.python, "-m", "nrl.gym.http.process"]
    return {"argv": argv, "env": env, "line": json.dumps(told)}


def _put(word: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(name, value)
    return word


def _told(line: str) -> dict[str, Any]:
    with suppress(ValueError):
        found = json.loads(line)
        if isinstance(found, dict):
            return found
    return {}


async def _read(stream: asyncio.StreamReader, line: Callable[[str], None]) -> None:
    """Call a function with each line, and with the parts of one that is very long."""
    left = b""
    while data := await stream.read(1 << 16):
        *whole, left = (left + data).split(b"\n")
        if len(left) > _LONGEST:
            whole, left = [*whole, left], b""
        for each in whole:
            line(each.decode(errors="replace").rstrip("\r")[:_LONGEST])
    if left:
        line(left.decode(errors="replace"))


async def watch(replica: Replica, token: str | None) -> None:
    """Ask a replica again and again whether it is ready, and set its state, until it is told to end."""
    missed, here = 0, isinstance(replica.server, EnvironmentServer | Program)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(_PATIENCE)) as client:
        while True:
            note = await probe(client, replica, token)
            if replica.ending:  # it may answer until it has ended, and is stopping all the same
                return
            missed = missed + 1 if note else 0
            if not note:
                replica.become("ready")
            elif replica.state != "ready":
                replica.note = note
            elif missed >= _MISSED:
                replica.become("silent", note)
            if here and replica.state == "silent" and _hangs(replica):
                return
            if replica.state in ("ready", "silent"):
                await asyncio.sleep(_LOOKS if here else _LOOKS_ELSEWHERE)
            else:
                await asyncio.sleep(_FIRST_LOOKS if here else _LOOKS)


def _hangs(replica: Replica) -> bool:
    """Whether it has answered nothing for too long, and so is ended; who has started it sees its end."""
    limit = getattr(replica.server, "silence", None)
    if limit is None or time.monotonic() - replica.heard < limit:
        return False
    replica.hung = f"has not answered for {limit:g} s (silence), and was killed"
    replica.send("kill")
    return True


async def probe(client: aiohttp.ClientSession, replica: Replica, token: str | None) -> str:
    """Ask a replica once whether it is ready: empty, or why not."""
    server = replica.server
    if not replica.url:
        return "it has not answered yet"
    url, shown = f"{replica.url.rstrip('/')}/ready", token
    if isinstance(server, ModelServer):
        url, shown = f"{replica.url.rstrip('/')}/models", server.api_key
    elif isinstance(server, Program):
        url, shown = f"{replica.url}/{server.ready.lstrip('/')}", None
    headers = {} if shown is None else {"Authorization": f"Bearer {shown}"}
    # An endpoint's /ready asks for no token, and may be another server's
    urls = [url, f"{replica.url.rstrip('/')}/info"] if isinstance(server, Endpoint) else [url]
    for url in urls:
        try:
            async with client.get(url, headers=headers, allow_redirects=False) as reply:
                replica.heard = time.monotonic()
                status, text = reply.status, await reply.text(errors="replace") if reply.status == 200 else ""
        except (aiohttp.ClientError, TimeoutError) as error:
            return f"{url}: {redact(unreached(error))}"
        if mistake := _mistake(server, url, status, text):
            replica.mistake = mistake
            return mistake
        if status != 200:
            return f"{url} answers {status}"
    return ""


def _mistake(server: Server, url: str, status: int, text: str) -> str:
    """What no waiting mends, in an answer; empty: nothing."""
    if status in (401, 403):
        key = "api_key" if isinstance(server, ModelServer) else "token"
        return f"{url} refuses the {key} ({status}); give the right one"
    if status == 200 and isinstance(server, ModelServer) and server.name is not None:
        names = _models(text)
        if server.name not in names:
            return f"{url} serves {', '.join(names) or 'no model'}, and not {server.name}; mend its name"
    if status in (200, 404) and isinstance(server, Endpoint) and url.endswith("/info") and not _is_environment(text):
        return f"{url} is not that of a served environment; mend its url"
    return ""


def _is_environment(text: str) -> bool:
    """Whether this is what an environment's server says of itself; nothing is not."""
    try:
        return bool(json.loads(text)["protocol"])
    except (ValueError, LookupError, TypeError):
        return False


def _models(text: str) -> list[str]:
    try:
        return [str(each["id"]) for each in json.loads(text)["data"]]
    except (ValueError, LookupError, TypeError):
        return []


def environment_of(python: Path, env: Mapping[str, str], path: list[str] | None) -> dict[str, str]:
    """The environment variables of the processes of an interpreter, whose own programs are found first."""
    found = {**os.environ, **env, "PATH": os.pathsep.join([str(python.parent), os.environ.get("PATH", os.defpath)])}
    return found if path is None else {**found, "PYTHONPATH": os.pathsep.join(path)}
