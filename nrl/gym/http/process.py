"""A process that serves one environment: ``python -m nrl.gym.http.process``.

It reads one line of JSON from its standard input, a `Served`, and writes ``{"url": ..., "serves": ...}`` to what was
its standard output when it is ready. What user code prints goes to its standard error. When its standard input ends,
which it does with the program that has started it, and at SIGTERM, it answers what is under way, closes all episodes,
and ends.
"""

import asyncio
import functools
import os
import signal
import sys
from typing import Any, Literal

import msgspec
import uvloop

from nrl.envs.builtin import ENVIRONMENTS, OWN_TASKS
from nrl.envs.pool.pool import pooled
from nrl.envs.registry import named
from nrl.envs.types import is_env
from nrl.errors import NrlError
from nrl.gym.adapters.nemo.server import nemo_gym_protocol
from nrl.gym.config.defaults import LARGEST, LEASE, MOST
from nrl.gym.http.application import application
from nrl.gym.http.serve_app import Settings, address, answering, check_reach
from nrl.gym.http.server_socket import Listener, listening
from nrl.log.redaction import keep_secret

__all__ = ["Served", "main"]


class Served(msgspec.Struct, forbid_unknown_fields=True):
    """What is served, and how; `nrl.serve` says what each means.

    Args:
        environment: a name, as ``env=`` of a configuration has it.
        options: of the environment, by name.
        name: as clients are told; empty: that of the environment.
        workers: processes that make the calls (`nrl.pooled`); None: threads do.
        cluster: the address of the Ray cluster that has them; None: that of ``RAY_ADDRESS``, else they are here.
        grace: seconds that calls under way have when it stops.
        protocol: ``"nemo_gym"`` is `nrl.gym.adapters.nemo.server.nemo_gym_protocol`.
        secrets: texts that stand in no answer: what user code raises may have them.
    """

    environment: str
    options: dict[str, Any] = {}
    name: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    token: str | None = None
    auth: str = "token"
    workers: int | None = None
    cluster: str | None = None
    lease: float = LEASE
    most: int = MOST
    largest: int = LARGEST
    grace: float = 10.0
    protocol: Literal["nrl", "nemo_gym"] = "nrl"
    secrets: list[str] = []
    hosts: list[str] = []


def main() -> int:
    """Serve until the end of the standard input; the exit status."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what user code prints
    try:
        asked = msgspec.json.decode(sys.stdin.buffer.readline(), type=Served)
        keep_secret(asked.secrets)
        check_reach("gym", asked.host, asked.token, asked.auth)
        found: Any = named(asked.environment, asked.options, ENVIRONMENTS, at="environment")
        if getattr(found, "tasks", None) is None and asked.environment in OWN_TASKS:
            found = _with_tasks(found, OWN_TASKS[asked.environment])
        if asked.workers is not None:
            found = pooled(found, workers=asked.workers, cluster=_joined(asked.cluster))
        on = listening(asked.host, asked.port, "gym")
    except (NrlError, OSError, ValueError, msgspec.MsgspecError) as error:
        print(f"gym: {error}", file=sys.stderr)  # noqa: T201
        return 2
    url = address(asked.host, on.getsockname()[1])
    protocol = nemo_gym_protocol if asked.protocol == "nemo_gym" else application
    limits = (asked.lease, asked.most, asked.largest, asked.grace)
    settings = Settings(asked.token, ..., *limits, protocol, asked.host, asked.hosts)

    def ready(listener: Listener) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, listener.stop)
        loop.add_reader(0, functools.partial(_read, loop, listener))
        told = {"url": url, "serves": "environment" if is_env(found) else "verifier"}
        print(msgspec.json.encode(told).decode(), file=answers, flush=True)

    uvloop.run(answering(found, asked.name or asked.environment, on, settings, ready))
    return 0


def _read(loop: asyncio.AbstractEventLoop, listener: Listener) -> None:
    """Stop at the end of the standard input."""
    if not os.read(0, 2**16):
        loop.remove_reader(0)
        listener.stop()


def _joined(cluster: str | None) -> str | None:
    """The address of the Ray cluster, which this process joins now, so that a mistake is found before it is ready."""
    address = cluster or os.environ.get("RAY_ADDRESS")
    if address:
        from nrl.runtime.ray.remote_object import join

        join(address)
    return address or None


def _with_tasks(found: Any, tasks: Any) -> Any:
    """The same with the tasks that come with it."""
    if is_env(found) and hasattr(found, "_replace"):
        return found._replace(tasks=tasks)
    made = functools.update_wrapper(functools.partial(found), found)
    made.tasks = tasks  # type: ignore[attr-defined]
    return made


if __name__ == "__main__":
    sys.exit(main())
