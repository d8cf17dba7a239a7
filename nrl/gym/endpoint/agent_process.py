"""Agents that are programs: a process an episode, in a Python environment of its own."""

import asyncio
import functools
import json
import os
import shutil
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from nrl.envs.types import Task, Verdict
from nrl.errors import ArgumentError, EnvError
from nrl.gym.endpoint.agent_env import Endpoint
from nrl.gym.http.json_codec import sendable
from nrl.runtime.node import reaper
from nrl.runtime.venvs.building import ensure_env
from nrl.runtime.venvs.environments import list_sources
from nrl.runtime.venvs.recipes import make_recipe
from nrl.runtime.venvs.registry import Executable
from nrl.runtime.venvs.registry import executable as registered

__all__ = ["program", "provided"]

_SHOWN = 4000  # bytes of what a program wrote last, which are read


def program(
    *command: str, executable: str | Executable = "system", env: Mapping[str, str] | None = None
) -> Callable[[Task, Endpoint], Coroutine[Any, Any, Verdict | None]]:
    """An agent for `nrl.driven` that is a program, started once an episode.

    It finds the model by the environment variables ``OPENAI_BASE_URL``, ``OPENAI_API_KEY`` and ``OPENAI_MODEL``, and
    reads the task as JSON on its standard input. The last line that it prints is its verdict, as JSON: a number, an
    object of components, or ``null`` for none, as where it prints nothing. If it exits with a status other than 0, its
    row is invalid. When its episode ends, or this process does, however that is, it is killed with all that it has
    started; on other systems than Linux, with its own process.

    Args:
        *command: the program and its arguments; ``python`` is the Python of the executable.
        executable: its Python environment, or the name of one; it is built here and now, if it is not there.
        env: more environment variables.

    Raises:
        ValueError: there is no command, or no such program here.
        PlacementError: no executable has this name.
        ExecutableError: it cannot be built.

    >>> import nrl
    >>> env = nrl.driven(
    ...     program("python", "agent.py", executable=nrl.Executable("agents", requirements=["smolagents"]))
    ... )
    """
    if not command:
        raise ArgumentError("program: there is no command; give a program and its arguments")
    made = registered(executable)
    own = command[0] == "python"
    if not own and made.name == "system" and shutil.which(command[0]) is None:
        raise ArgumentError(f"program: there is no program {command[0]!r} here; give its path, or 'python' and a file")
    if own:
        provided(made)  # so that no episode waits for it, but on other machines

    async def start(task: Task, endpoint: Endpoint) -> Verdict | None:
        python, variables = await asyncio.to_thread(provided, made) if own else ("", made.env)
        order = {
            "argv": [python, *command[1:]] if own else command,
            "env": {**os.environ, **variables, **(env or {}), **endpoint.environ},
            "folder": str(Path.cwd()),
            "line": json.dumps(sendable(dict(task), "the task")),
            "open": False,
            "grace": 0.0,
        }
        # Files, since pipes are open for as long as anything that the program has left behind holds them
        with TemporaryFile() as said, TemporaryFile() as complained:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(reaper.__file__)),
                stdin=asyncio.subprocess.PIPE,
                stdout=said,
                stderr=complained,
                start_new_session=True,
            )
            assert process.stdin is not None
            process.stdin.write(json.dumps(order).encode() + b"\n")
            try:
                await process.wait()
            finally:
                process.stdin.close()  # at which it kills the program, if that has not ended
                await process.wait()
            found, last = (_end(each) for each in (said, complained))
        if process.returncode:
            raise EnvError(f"program: {' '.join(command)} exited with {process.returncode}; its last words: {last}")
        return _verdict(found, command)

    return start


@functools.cache
def provided(of: Executable) -> tuple[str, Mapping[str, str]]:
    """The Python of an executable, which is built if it is not there, and the variables of its processes.

    Raises:
        ExecutableError: it cannot be built.
    """
    known = make_recipe(of)
    python = ensure_env(known, say=lambda text: print(text, file=sys.stderr, flush=True))  # noqa: T201
    path = os.pathsep.join(list_sources(known, Path(python)))
    return str(python), {**of.env, **({"PYTHONPATH": path} if path else {})}


def _end(of: IO[bytes]) -> str:
    """The end of what was written."""
    of.seek(max(0, of.seek(0, os.SEEK_END) - _SHOWN))
    return of.read().decode(errors="replace").strip()


def _verdict(said: str, command: Sequence[str]) -> Verdict | None:
    lines = said.splitlines()
    if lines and lines[0].startswith('{"pid":'):  # of who looks after it
        del lines[0]
    try:
        found: Verdict | None = json.loads(lines[-1]) if lines else None
        return found
    except ValueError:
        raise EnvError(
            f"program: the last line that {' '.join(command)} prints is {lines[-1]!r:.200}, which is no JSON; print "
            "the verdict, a number or an object of components, or null"
        ) from None
