"""The actor that Ray starts as a process of a mesh: sets its environment before it imports anything else.

The values get here as an argument of the actor. Ray writes those of a ``runtime_env`` in clear into logs that everybody
on the node can read. The class travels by value, with what it uses, and imports the standard library alone, so that
torch, vLLM and nrl find the variables when they are imported.
"""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nrl.runtime.executables.environments import hold
from nrl.runtime.ray.on_node import by_value

__all__ = ["Actor", "actor_class", "split"]

# Read by the loader, the interpreter, OpenMP (numpy's, which Ray imports), the shell that starts it or Ray itself.
_EARLY = re.compile(r"(LD|DYLD|MALLOC|GLIBC|LC|RAY|OMP|GOMP|KMP|MKL|OPENBLAS)_.*|PYTHON.*|LANG|PATH|TZ")


def split(env: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Variables that a process needs before it can be told anything, and the others.

    >>> split({"OMP_NUM_THREADS": "4", "HF_TOKEN": "secret"})
    ({'OMP_NUM_THREADS': '4'}, {'HF_TOKEN': 'secret'})
    """
    early = {name: value for name, value in env.items() if _EARLY.fullmatch(name)}
    return early, {name: value for name, value in env.items() if name not in early}


def actor_class() -> Any:
    """The class of actors, as Ray takes it."""
    import ray

    by_value(hold)
    return ray.remote(by_value(Actor))


class Actor:
    """A `nrl.runtime.ray.worker.Worker`, in an environment that has these variables.

    Args:
        env: environment variables.
        mesh: the name of the mesh.
        rank: its number there.
        given: the worker's other arguments.
    """

    def __init__(self, env: Mapping[str, str], mesh: str, rank: int, *given: Any) -> None:
        self._name = f"{mesh}[{rank}]"
        hold(Path(sys.prefix))
        os.environ.update(env)
        from nrl.runtime.ray.worker import Worker

        self._worker = Worker(mesh, rank, *given)

    def __repr__(self) -> str:
        return self._name  # Ray writes it before each line of the log, also where it does not start

    def logs(self) -> Any:
        """See `Worker.logs`."""
        return self._worker.logs()

    def listen(self, *given: Any) -> Any:
        """See `Worker.listen`."""
        return self._worker.listen(*given)

    def join(self, *given: Any) -> Any:
        """See `Worker.join`."""
        return self._worker.join(*given)

    def rest(self) -> Any:
        """See `Worker.rest`."""
        return self._worker.rest()

    def call(self, *given: Any) -> Any:
        """See `Worker.call`."""
        return self._worker.call(*given)
