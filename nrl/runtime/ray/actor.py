"""The actor that Ray starts as a process of a mesh: sets its environment before it imports anything else.

The variables are an argument of the actor, since Ray writes those of a ``runtime_env`` in clear into logs, which
everybody on the node can read. The class travels by value and imports the standard library alone, so that torch, vLLM
and nrl find the variables when they are imported. nrl is in no environment: the actor puts its source on the path.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nrl.runtime.venvs.environments import lock_env

__all__ = ["Actor", "split_env", "tail"]

# Variables that the loader, the interpreter, OpenMP (of numpy, which Ray imports), the shell or Ray read at the start.
_READ_AT_START = re.compile(r"(LD|DYLD|MALLOC|GLIBC|LC|RAY|OMP|GOMP|KMP|MKL|OPENBLAS)_.*|PYTHON.*|LANG|PATH|TZ")


def split_env(env: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Split variables into those that a process needs when it starts, and those that its actor can set later.

    >>> split_env({"OMP_NUM_THREADS": "4", "HF_TOKEN": "secret"})
    ({'OMP_NUM_THREADS': '4'}, {'HF_TOKEN': 'secret'})
    """
    early = {name: value for name, value in env.items() if _READ_AT_START.fullmatch(name)}
    return early, {name: value for name, value in env.items() if name not in early}


class Actor:
    """An actor that sets the environment, and holds the process's `nrl.runtime.ray.worker.Worker`.

    Args:
        env: environment variables.
        sources: folders to import from, beside the environment.
        name: of the process in logs.
        args: the worker's arguments.
    """

    def __init__(self, env: Mapping[str, str], sources: Sequence[str], name: str, *args: Any) -> None:
        self._name = name
        for folder in (sys.prefix, *sources):
            lock_env(Path(folder))
        os.environ.update(env)
        sys.path += sources
        if sources:  # Processes that this one starts inherit the path.
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), *sources)))
        from nrl.runtime.ray.worker import Worker

        self._worker = Worker(*args)

    def __repr__(self) -> str:
        return self._name  # Ray writes it before each line of the log, also where it does not start

    def do(self, name: str, *args: Any) -> Any:
        """Call a method of the worker."""
        return getattr(self._worker, name)(*args)


def tail(files: Sequence[str], limit: int) -> str:
    """Return the last lines of files, without the marks that Ray writes; a missing file has no lines."""
    lines: list[str] = []
    for path in files:
        try:
            text = Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        lines += [line for line in text.splitlines(keepends=True) if not line.startswith(":")][-limit:]
    return "".join(lines[-limit:])
