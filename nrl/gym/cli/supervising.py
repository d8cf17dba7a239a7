"""The replicas of a gym together: started, watched, started again, and stopped."""

import asyncio
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from nrl.errors import ConfigError, DeadlineExceeded, EnvError, NrlError
from nrl.gym.cli.replicas import Interpreter, Replica, environment_of, fate, live, seconds, watch
from nrl.gym.config.servers import Endpoint, EnvironmentServer, Gym, Program, executable_of
from nrl.log.redaction import redact
from nrl.runtime.ports import first_free
from nrl.runtime.threads import DaemonThreadPool
from nrl.runtime.venvs.building import ensure_env
from nrl.runtime.venvs.environments import list_sources
from nrl.runtime.venvs.recipes import make_recipe
from nrl.runtime.venvs.registry import Executable

__all__ = ["Supervisor", "free_port", "listen"]

_PAUSES = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)  # seconds before a start, after so many deaths in a row
_HEALTHY = 2.0  # seconds of being ready after which a death is the first again: no crash loop gets so far
_EVERY = 10.0  # seconds between lines on what is still awaited
_MISTAKE = 2  # the status of a program whose settings are wrong, as nrl's are


def listen(where: str, host: str, port: int) -> socket.socket:
    """A socket that is bound to an address.

    Raises:
        ConfigError: the port is taken, or the host is not of this machine.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        if port == 0:
            return first_free(lambda free: socket.create_server((host, free), family=family))
        return socket.create_server((host, port), family=family)
    except OSError as error:
        if port and isinstance(error, OSError) and "in use" in str(error.strerror):
            raise ConfigError(
                f"{where}.port: {port} on {host} is taken by another program; `nrl gym status` shows the gyms that "
                f"run here; end that program, or give {where}.port=0 for one that is free"
            ) from None
        raise ConfigError(f"{where}.host: cannot listen on {host}:{port}: {error.strerror or error}") from None


def free_port(where: str, host: str) -> int:
    """A port that is free now."""
    with listen(where, host, 0) as found:
        return int(found.getsockname()[1])


class Supervisor:
    """The replicas of a gym.

    Args:
        gym: what is to run.
        token: of its servers; None: they ask for none.
        head: the address of its head, for programs.
        say: gets a line on what happens.
        show: gets the label of a replica and a line that it has written.
    """

    def __init__(
        self, gym: Gym, token: str | None, head: str, say: Callable[[str], None], show: Callable[[str, str], None]
    ) -> None:
        self.gym, self.ready, self.stopping = gym, asyncio.Event(), asyncio.Event()
        self._token, self._head, self._say, self._show = token, head, say, show
        self._began = time.monotonic()
        self._interpreters: dict[str, asyncio.Future[tuple[Path, list[str] | None]]] = {}
        self._lives: list[asyncio.Task[None]] = []
        self._threads = DaemonThreadPool(4, "executables")
        self.replicas = [replica for name in gym.servers for replica in self._replicas(name)]

    def _replicas(self, name: str) -> list[Replica]:
        server = self.gym.servers[name]
        if not isinstance(server, EnvironmentServer | Program):
            urls = server.urls if isinstance(server, Endpoint) else [server.model]
            return [Replica(name, n, server, url=url, changed=self._changed) for n, url in enumerate(urls)]
        host, found = self.gym.host(server), list[Replica]()
        for number in range(server.replicas):
            port = server.port + number if server.port else 0
            if port:
                listen(f"servers.{name}", host, port).close()
            found.append(Replica(name, number, server, host, port, changed=self._changed))
        return found

    def _changed(self, replica: Replica) -> None:
        ready = [each for each in self.replicas if each.state == "ready"]
        if replica.state == "ready":
            count = f"{len(ready)} of {len(self.replicas)}"
            again = ", again" if self.ready.is_set() else f" after {seconds(time.monotonic() - self._began)} ({count})"
            self._say(f"{replica.label} is ready at {redact(replica.url)}{again}")
        elif replica.state == "silent":
            self._say(f"{replica.label} does not answer any more: {redact(replica.note)}")

    def is_ready(self) -> bool:
        """Whether all are."""
        return all(each.state == "ready" for each in self.replicas)

    def shown(self) -> list[dict[str, Any]]:
        """What there is to say of each server."""
        found = []
        for name, server in self.gym.servers.items():
            of_it = [each for each in self.replicas if each.name == name]
            runs = isinstance(server, EnvironmentServer | Program)
            found.append({
                "name": name,
                "kind": server.kind,
                "serves": next((each.serves for each in of_it if each.serves), None),
                "executable": executable_of(server).name if runs else None,
                "auth": self._auth(server),
                "state": next((each.state for each in of_it if each.state != "ready"), "ready"),
                "replicas": [each.shown() for each in of_it],
            })  # fmt: skip
        return found

    def _auth(self, server: Any) -> str | None:
        return ("none" if self.gym.is_open(server) else "token") if isinstance(server, EnvironmentServer) else None

    async def start(self) -> None:
        """Start all, and wait until they are ready.

        Raises:
            ConfigError: a mistake in what one of them is, or is told.
            EnvError: one ended before it was ready; the message has its last lines.
            DeadlineExceeded: it takes too long.
        """
        self._lives = [asyncio.create_task(self._life(each)) for each in self.replicas]
        waiting, said = asyncio.create_task(self.stopping.wait()), self._began
        try:
            while not (self.is_ready() or self.stopping.is_set()):
                await asyncio.wait([waiting, *self._lives], timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
                for life in self._lives:
                    if life.done() and not self.stopping.is_set():
                        life.result()
                now = time.monotonic()
                if now - self._began > self.gym.deadline:
                    raise DeadlineExceeded(f"gym: {self._awaited()}; give a longer deadline={self.gym.deadline:g}")
                if now - said >= _EVERY:
                    self._say(self._awaited())
                    said = now
        finally:
            waiting.cancel()
        if not self.stopping.is_set():
            self.ready.set()

    def _awaited(self) -> str:
        late = [each for each in self.replicas if each.state != "ready"]
        shown = "; ".join(f"{each.label} ({each.state}: {redact(each.note)})" for each in late)
        return f"waiting since {seconds(time.monotonic() - self._began)} for {shown}"

    async def stop(self) -> None:
        """Stop all, and wait until they have ended."""
        self.stopping.set()
        for replica in self.replicas:
            if replica.process is not None:
                replica.become("stopping")
            replica.tell("stop")
        for replica, life in zip(self.replicas, self._lives, strict=False):
            if replica.state == "building":  # which nobody waits for
                life.cancel()
        await asyncio.gather(*self._lives, return_exceptions=True)

    def kill(self) -> None:
        """End all at once."""
        for replica in self.replicas:
            replica.tell("kill")

    async def _life(self, replica: Replica) -> None:
        """Start a replica again and again, until all are to stop."""
        if not isinstance(replica.server, EnvironmentServer | Program):
            await self._elsewhere(replica)
            return
        deaths = 0
        while not self.stopping.is_set():
            ready_before, replica.was_ready = replica.was_ready, False
            try:
                status = await self._once(replica)
            except (NrlError, OSError) as error:  # its executable cannot be built, or no process be started
                if not (ready_before or self.ready.is_set()):
                    raise
                status, why = 1, f"cannot be started: {error}"
            else:
                why = replica.hung or fate(status)
            lived, came_up = time.time() - replica.since, replica.was_ready
            replica.was_ready = ready_before or came_up
            if self.stopping.is_set():
                replica.become("stopped")
                return
            if not replica.was_ready and not self.ready.is_set():
                raise self._failed(replica, status)
            if isinstance(replica.server, EnvironmentServer) and not replica.server.port:
                replica.port = 0 if not came_up else replica.port  # somebody else may have it by now
            deaths = 1 if came_up and lived > _HEALTHY else deaths + 1
            pause = _PAUSES[min(deaths, len(_PAUSES)) - 1]
            replica.restarts += 1
            replica.become("restarting", why)
            when = f"in {pause:g} s" if pause else "now"
            tail = "".join(f"\n    {line}" for line in list(replica.tail)[-5:])
            self._say(f"{replica.label} {redact(why)}; it starts again {when} (restart {replica.restarts}){tail}")
            with suppress(TimeoutError):
                await asyncio.wait_for(self.stopping.wait(), pause or 0.001)

    async def _once(self, replica: Replica) -> int:
        server = replica.server
        interpreter = await self._interpreter(replica)
        is_open = isinstance(server, EnvironmentServer) and self.gym.is_open(server)
        token, gym = None if is_open else self._token, self.gym
        return await live(
            replica,
            interpreter,
            folder=gym.folder(),
            token=token,
            cluster=gym.ray_head_node_address,
            grace=gym.grace,
            show=self._show,
        )

    async def _elsewhere(self, replica: Replica) -> None:
        token = getattr(replica.server, "token", None)
        watching = asyncio.create_task(watch(replica, token))
        try:
            while not self.stopping.is_set():
                if replica.mistake and not self.ready.is_set():
                    raise ConfigError(f"servers.{replica.name}: {redact(replica.mistake)}")
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.stopping.wait(), 0.1)
        finally:
            watching.cancel()

    async def _interpreter(self, replica: Replica) -> Interpreter:
        """What starts the replica's process; its executable is built once for all of the same name."""
        server, made = replica.server, executable_of(replica.server)
        if made.name not in self._interpreters:
            self._interpreters[made.name] = asyncio.get_running_loop().run_in_executor(self._threads, _provided, made)
        if not self._interpreters[made.name].done():
            replica.become("building", f"its executable {made.name} is built")
        try:
            python, path = await asyncio.shield(self._interpreters[made.name])
        except Exception:
            del self._interpreters[made.name]  # the next start tries again
            raise
        if isinstance(server, EnvironmentServer):
            return Interpreter(
                str(python), environment_of(python, made.env, path or [each for each in sys.path if each])
            )
        replica.port = replica.port or free_port(f"servers.{replica.name}", replica.host)
        token = {} if self._token is None else {"NRL_GYM_TOKEN": self._token}
        env = {**environment_of(python, made.env, path), "NRL_GYM_URL": self._head, **token}
        return Interpreter(str(python), env)

    def _failed(self, replica: Replica, status: int) -> NrlError:
        """The error for a replica that ended before it was ready."""
        lines = "".join(f"\n    {line}" for line in replica.tail)
        told = f" Its last lines:{lines}" if lines else " It has written nothing."
        todo = f"mend servers.{replica.name}, and run the gym again"
        kind = ConfigError if status == _MISTAKE else EnvError
        return kind(f"servers.{replica.name}: {replica.label} {fate(status)} before it was ready; {todo}.{told}")


def _provided(made: Executable) -> tuple[Path, list[str] | None]:
    """The interpreter of an executable, which is built where it is not there, and the folders of its sources."""
    wanted = make_recipe(made)
    python = ensure_env(wanted, say=lambda text: print(redact(text), file=sys.stderr, flush=True))
    return python, list_sources(wanted, python) or None
