"""Servers of the package nemo-gym, in a process and a Python environment of their own, without Ray or a head server."""

import atexit
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType
from typing import Any, Self

import attrs

from nrl.errors import EnvError
from nrl.runtime.venvs.installer import find_uv

__all__ = ["NEMO_GYM", "NemoServer", "NemoServers", "nemo_gym_servers"]

NEMO_GYM = "nemo-gym==0.4.0"
"""The requirement that they are installed by. Its pandas is older than the lock's, so no `nrl.Executable` has it."""

_SHOWN = 4000  # bytes of what a process wrote last
_READY = "nrl: ready "

# What is run there. Sockets first, since the servers are told of each other before they exist
_PROGRAM = f"""
import asyncio, importlib, json, os, socket, sys, threading
from pathlib import Path

import uvicorn
from nemo_gym import server_utils
from nemo_gym.config_types import BaseServerConfig
from omegaconf import OmegaConf

asked, world, sockets, places = json.loads(sys.stdin.readline()), dict(), dict(), dict()
for name, each in asked.items():
    host, port = "127.0.0.1", each["port"]
    if each["port"] is None:
        sockets[name] = socket.create_server((host, 0))
        port = sockets[name].getsockname()[1]
    world[name] = dict([(each["kind"], dict([(each["app"], dict(host=host, port=port, entrypoint="app.py"))]))])
    places[name] = dict(url=f"http://{{host}}:{{port}}")

def served(name, kind, app, options, port):
    path = app if "." in app else f"{{kind}}.{{app}}.app"
    folder = Path(importlib.util.find_spec(path).origin).parent
    places[name]["folder"] = str(folder)
    sys.path.append(str(folder))  # some import modules that lie beside them
    module = importlib.import_module(path)
    made = [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == path
            and issubclass(each, server_utils.SimpleServer)][-1]
    where = next(iter(world[name][kind].values()))
    config = made.model_fields["config"].annotation.model_validate(dict(name=name, domain="other", **where, **options))
    head = BaseServerConfig(host="127.0.0.1", port=1)
    client = server_utils.ServerClient(head_server_config=head, global_config_dict=OmegaConf.create(world))
    server = made(config=config, server_client=client)
    application = server.setup_webserver()
    server.setup_liveness(application)
    server.setup_exception_middleware(application)
    return uvicorn.Server(uvicorn.Config(application, log_level="warning"))

async def main():
    server_utils.set_global_aiohttp_client(server_utils.GlobalAIOHTTPAsyncClientConfig())
    made = dict((name, served(name, **asked[name])) for name in sockets)
    serving = asyncio.gather(*(each.serve(sockets=[sockets[name]]) for name, each in made.items()))
    while not all(each.started for each in made.values()):
        if any(each.should_exit for each in made.values()) or serving.done():
            os._exit(1)  # one of them cannot begin, and has said why
        await asyncio.sleep(0.05)
    print("{_READY}" + json.dumps(places), flush=True)
    await serving

def watch():
    sys.stdin.read()  # which ends with the program that has started this one
    os._exit(0)

threading.Thread(target=watch, daemon=True).start()
asyncio.run(main())
"""
_NEEDS = """
import importlib.util, json, sys
from pathlib import Path
for kind, app in json.loads(sys.argv[1]):
    found = importlib.util.find_spec(kind)
    for path in (Path(each) / app / "requirements.txt" for each in (found.submodule_search_locations if found else ())):
        print(path.read_text() if path.exists() else "")
"""


@attrs.frozen
class NemoServer:
    """A server of NeMo Gym.

    Args:
        app: its name in the package, such as ``"mcqa"``; or a module with a class of your own, such as
            ``"mine.app"``, which lies on ``PYTHONPATH``.
        options: of its configuration, by name.
        kind: ``"resources_servers"``, ``"responses_api_agents"`` or ``"responses_api_models"``.
        port: where it runs, if it runs already; then it is not started.
    """

    app: str
    options: Mapping[str, Any] = attrs.field(factory=dict)
    kind: str = "resources_servers"
    port: int | None = None


class NemoServers:
    """Servers that run; what `nemo_gym_servers` returns. A context, which ends them.

    Args:
        urls: of each, by name.
        folders: in which each lies, with its ``data``.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", places: Mapping[str, Mapping[str, str]]) -> None:
        self._process = process
        self.urls = {name: each["url"] for name, each in places.items()}
        self.folders = {name: Path(each["folder"]) for name, each in places.items() if "folder" in each}
        atexit.register(self.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End them; once."""
        atexit.unregister(self.stop)
        _end(self._process)


def nemo_gym_servers(
    servers: Mapping[str, NemoServer],
    *,
    python: str | Path | None = None,
    requirements: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    timeout: float = 600.0,
) -> NemoServers:
    """Start servers of nemo-gym, all in one process, and wait until they answer.

    uv makes the Python environment, of `NEMO_GYM` and of what each server's ``requirements.txt`` asks for, and keeps it
    in its cache. The servers listen on this machine alone, at ports that are free, and end with this program.

    Args:
        servers: by the name with which ``options`` refer to them.
        python: an interpreter that has nemo-gym, in place of that environment.
        requirements: more packages, or others than nemo-gym 0.4.0.
        env: more environment variables.
        timeout: seconds until they have to answer.

    Raises:
        EnvError: they do not; the message has what they wrote last.
        ExecutableError: there is no uv.

    Source: NeMo Gym 0.4.0, ``nemo_gym/server_utils.py``, ``SimpleServer.run_webserver``, which needs Ray and a head.

    >>> nemo_gym_servers({"mcqa": NemoServer("mcqa")}, python="nowhere")
    Traceback (most recent call last):
    nrl.errors.EnvError: nemo_gym_servers: nowhere: No such file or directory
    """
    wanted = {name: attrs.asdict(each) for name, each in servers.items()}
    hidden = ("VIRTUAL_ENV", "PYTHONHOME", "UV_PROJECT_ENVIRONMENT")
    variables = {key: value for key, value in os.environ.items() if key not in hidden}
    variables |= {"PYTHONPATH": "", **(env or {})}
    until = time.monotonic() + timeout
    if python is None:
        asked = [(each.kind, each.app) for each in servers.values() if each.port is None]
        base = [NEMO_GYM, *requirements]
        told = _ran(_command(base, _NEEDS, asked), variables, until)
        more = [line.strip() for line in told.splitlines() if line.strip() and not line.lstrip().startswith(("-", "#"))]
        command = _command([*base, *dict.fromkeys(more)], _PROGRAM)
    else:
        command = [str(python), "-c", _PROGRAM]
    with TemporaryFile() as said:
        process = _begun(command, variables, said)
        assert process.stdin is not None
        try:
            with suppress(BrokenPipeError):  # options may be secrets, which arguments would show to everybody here
                process.stdin.write(json.dumps(wanted).encode() + b"\n")
                process.stdin.flush()
            while time.monotonic() < until and process.poll() is None:
                for line in _words(said, 0).splitlines():
                    if line.startswith(_READY):
                        return NemoServers(process, json.loads(line.removeprefix(_READY)))
                time.sleep(0.1)
            how = f"ended with {process.returncode}" if process.poll() is not None else f"not ready in {timeout:g} s"
            raise EnvError(f"nemo_gym_servers: {', '.join(servers)}: {how}; the last words: {_words(said)}")
        except BaseException:
            _end(process)
            raise


def _command(requirements: Sequence[str], program: str, *asked: Any) -> list[str]:
    """What runs a program in an environment that uv makes, and keeps."""
    each = [word for line in requirements for word in ("--with", line)]
    run = ["run", "--quiet", "--no-project", "--no-config", "--isolated", "--python", sys.executable]
    return [*find_uv(), *run, *each, "python", "-c", program, *map(json.dumps, asked)]


def _begun(command: Sequence[str], variables: Mapping[str, str], said: Any) -> "subprocess.Popen[bytes]":
    try:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=said, stderr=said, env=variables, start_new_session=True
        )
    except OSError as error:
        raise EnvError(f"nemo_gym_servers: {command[0]}: {error.strerror}") from None


def _ran(command: Sequence[str], variables: Mapping[str, str], until: float) -> str:
    """What a program prints."""
    with TemporaryFile() as said:
        process = _begun(command, variables, said)
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise EnvError(f"nemo_gym_servers: {NEMO_GYM} was not installed in time: {_words(said)}") from None
        finally:
            _end(process)
        if process.returncode:
            raise EnvError(f"nemo_gym_servers: {NEMO_GYM} cannot be installed: {_words(said)}")
        return _words(said, 0)


def _words(said: Any, most: int = _SHOWN) -> str:
    """What was written, or the end of it."""
    size = os.fstat(said.fileno()).st_size
    first = max(0, size - most) if most else 0
    return os.pread(said.fileno(), size - first, first).decode(errors="replace").strip()  # the process writes on


def _end(process: "subprocess.Popen[bytes]") -> None:
    assert process.stdin is not None
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdin.close()
