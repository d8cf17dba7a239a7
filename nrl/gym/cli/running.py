"""``nrl gym run``: a gym of servers, from its start to its end."""

import asyncio
import os
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TextIO

from nrl.gym.cli.head_server import application, serving
from nrl.gym.cli.replicas import seconds
from nrl.gym.cli.supervising import Supervisor, listen
from nrl.gym.config.run_registry import Place, told
from nrl.gym.config.servers import EnvironmentServer, Gym, gym
from nrl.gym.http.front import allowed_hosts
from nrl.log.escapes import printable
from nrl.log.redaction import keep_secret, redact

__all__ = ["USAGE", "run"]

USAGE = """usage: nrl gym run CONFIG.yaml [CONFIG.yaml ...] [key=value ...]

Start the servers of a gym, wait until all are ready, start again those that die, and stop all at Ctrl-C or SIGTERM
(twice: at once).

  servers.NAME                  one of:
    environment: NAME             one that ships, FILE.py:NAME or MODULE:NAME; options: a mapping; lease: seconds
                                  that a session may be silent (60); most: calls and sessions of a replica (20000);
                                  largest: bytes of a request (2^26); auth: none, if it asks for no token;
                                  hosts: further names by which clients may ask;
                                  protocol: nemo_gym, for NeMo Gym's agents;
                                  workers: processes that make its calls, on the Ray cluster if there is one
    command: [WORD, ...]          any program that serves HTTP; {host} and {port} are put in; ready: its path (/health)
      both take                     replicas: 1, host, port: 0 (any), executable: system, env: a mapping; silence: 60,
                                    seconds without an answer after which it is killed and started again
    model: URL                    a model elsewhere; api_key, name
    url: URL                      a served environment elsewhere, or a list of its replicas; token
  default_host: 127.0.0.1       where servers listen
  head_server: {host, port}     which knows where the others are; port: 11000
  token                         what clients have to show; default: a new one, which programs of this user find
  auth: token                   none: whoever reaches a server may use it
  ray_head_node_address         of a Ray cluster, for workers; default: RAY_ADDRESS, else they are on this machine
  deadline: 1800                seconds until all have to be ready
  grace: 10                     seconds to finish what is under way, at the end

Later files and arguments win. ${key} stands for the value of another key, or the environment variable KEY; env.yaml
beside a configuration, or here, holds secrets. +key=value adds, ++key=value adds or overrides, ~key removes."""


def run(args: Sequence[str]) -> int:
    """Run a gym until it is asked to stop.

    Args:
        args: as for `nrl.gym.config.servers.gym`.

    Returns:
        The exit status: 130 after Ctrl-C, 143 after SIGTERM.

    Raises:
        ConfigError: the configuration, or what a server is told, is wrong.
        EnvError: a server ended before it was ready.
        DeadlineExceeded: one was not ready in time.
    """
    made = gym(args)
    return asyncio.run(_run(made))


async def _run(made: Gym) -> int:
    began = time.monotonic()
    for warning in made.warnings:
        _say(f"warning: {warning}")
    environments = [each for each in made.servers.values() if isinstance(each, EnvironmentServer)]
    asked = made.auth == "token" or not all(map(made.is_open, environments))
    token = (made.token or secrets.token_urlsafe(32)) if asked else None
    of_head = token if made.auth == "token" else None
    keep_secret([token] if token else [])
    host = made.host(made.head_server)
    with listen("head_server", host, made.head_server.port) as listening:
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{listening.getsockname()[1]}"
        supervisor, ended = Supervisor(made, token, url, _say, _show), asyncio.Event()
        status = _heed(supervisor)
        place = Place(url, token, os.getpid(), tuple(map(str, made.files)))
        with told(place):
            hosts = allowed_hosts(host, made.head_server.hosts, secured=of_head is not None)
            app = application(supervisor.shown, supervisor.is_ready, of_head)
            head = asyncio.create_task(serving(app, listening, ended, hosts))
            try:
                await supervisor.start()
                if supervisor.ready.is_set():
                    count = len(supervisor.replicas)
                    _say(
                        f"ready after {seconds(time.monotonic() - began)}: {len(made.servers)} servers, {count} "
                        f"replicas; the head is {url}; `nrl gym status` shows them, Ctrl-C stops them"
                    )
                await supervisor.stopping.wait()
            finally:
                await supervisor.stop()
                ended.set()
                await head
    _say("all have stopped")
    return status[0]


def _heed(supervisor: Supervisor) -> list[int]:
    """Stop at the first signal, and at once at the second; the list gets the exit status."""
    status = [0]

    def asked(number: int) -> None:
        if status[0]:
            _say("ending all servers at once")
            supervisor.kill()
            return
        status[0] = 128 + number
        name = signal.Signals(number).name
        _say(f"{name}: stopping, within {supervisor.gym.grace:g} s (grace); once more ends all at once")
        supervisor.stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, asked, number)
    return status


def _say(text: str) -> None:
    _write(sys.stdout, f"gym: {redact(text)}")


def _show(label: str, line: str) -> None:
    _write(sys.stderr, f"{label} | {line}")


def _write(stream: TextIO, text: str) -> None:
    """A line, whatever its characters; nothing where nobody reads any more."""
    encoding = stream.encoding or "utf-8"
    text = printable(text)
    with suppress(BrokenPipeError):
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)
