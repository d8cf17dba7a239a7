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

from nrl.runtime.venvs.environments import hold

__all__ = ["Actor", "split", "tail"]

# The loader, the interpreter, OpenMP (of numpy, which Ray imports), the shell or Ray itself reads them at the start
_EARLY = re.compile(r"(LD|DYLD|MALLOC|GLIBC|LC|RAY|OMP|GOMP|KMP|MKL|OPENBLAS)_.*|PYTHON.*|LANG|PATH|TZ")


def split(env: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Variables that a process needs when it starts, and those that its actor can set later.

    >>> split({"OMP_NUM_THREADS": "4", "HF_TOKEN": "secret"})
    ({'OMP_NUM_THREADS': '4'}, {'HF_TOKEN': 'secret'})
    """
    early = {name: value for name, value in env.items() if _EARLY.fullmatch(name)}
    return early, {name: value for name, value in env.items() if name not in early}


class Actor:
    """Sets the environment, and holds the process's `nrl.runtime.ray.worker.Worker`.

    Args:
        env: environment variables.
        sources: folders to import from, beside the environment.
        name: of the process in logs.
        given: the worker's arguments.
    """

    def __init__(self, env: Mapping[str, str], sources: Sequence[str], name: str, *given: Any) -> None:
        self._name = name
        for folder in (sys.prefix, *sources):
            hold(Path(folder))
        os.environ.update(env)
        sys.path += sources
        if sources:  # for the processes that this one starts
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), *sources)))
        from nrl.runtime.ray.worker import Worker

        self._worker = Worker(*given)

    def __repr__(self) -> str:
        return self._name  # Ray writes it before each line of the log, also where it does not start

    def do(self, name: str, *given: Any) -> Any:
        """Call a method of the worker."""
        return getattr(self._worker, name)(*given)


def tail(files: Sequence[str], most: int) -> str:
    """The last lines of some files, without the marks that Ray makes in them; of a file that is gone, none."""
    lines: list[str] = []
    for path in files:
        try:
            text = Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        lines += [line for line in text.splitlines(keepends=True) if not line.startswith(":")][-most:]
    return "".join(lines[-most:])
