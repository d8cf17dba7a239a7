"""The processes in which a pool makes its calls, on this machine or on the nodes of a Ray cluster."""

import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any, Protocol

from nrl.envs.pool import subprocess_worker
from nrl.envs.pool.worker import packed, unpacked
from nrl.errors import EnvError
from nrl.runtime.ray.codec.pickling import holds_tensors
from nrl.runtime.venvs.environments import Recipe
from nrl.runtime.venvs.recipes import make_recipe
from nrl.runtime.venvs.registry import Executable
from nrl.runtime.venvs.registry import executable as registered

__all__ = ["Child", "Process", "Python", "here"]

_START = 300.0  # seconds for a worker to start


class Child(Protocol):
    """A process, here or there; `nrl.envs.pool.subprocess_worker.Child` says more."""

    def start(self, recipe: Recipe, env: Mapping[str, str], path: Sequence[str]) -> None:
        """Start it in its Python environment."""
        ...

    def ask(self, request: bytes, timeout: float | None) -> list[bytes]:
        """The parts of the answer to a request."""
        ...

    def kill(self) -> None:
        """End it, with what descends from it."""
        ...

    def fate(self, why: str) -> str:
        """How it ended."""
        ...

    def leave(self) -> None:
        """Close what leads to it."""
        ...


class Python:
    """The Python environment of processes, by its executable.

    In another program it is what it was in this one: the recipe travels, since the other may have no lock. The
    executable ``system`` is that program's own Python.

    Args:
        of: the executable, or its name.
        known: the recipe, and the variables of its processes; None: they are looked up when they are first needed.
    """

    def __init__(self, of: str | Executable, known: tuple[Recipe, Mapping[str, str]] | None = None) -> None:
        self._of, self._known = of, known

    def found(self) -> tuple[Recipe, Mapping[str, str]]:
        """The recipe of the environment, and the variables of its processes.

        Raises:
            PlacementError: no executable has this name.
            ExecutableError: there is no recipe; the message says why.
        """
        if self._known is None:
            self._known = make_recipe(self._of), registered(self._of).env
        return self._known

    def __reduce__(self) -> Any:
        name = self._of if isinstance(self._of, str) else self._of.name
        return Python, (self._of, None if name == "system" else self.found())


class Process:
    """A process, which starts with the first call.

    Args:
        who: how errors name it.
        f: what it calls.
        python: its Python environment.
        memory: bytes of address space; None: no limit.
        within: the process.
    """

    after_late = "its process was killed"

    def __init__(self, who: str, f: Any, python: Python, memory: int | None, within: Child) -> None:
        self._who, self._f, self._python, self._memory = who, f, python, memory
        self._child, self._has_torch = within, False
        self.kill, self.fate, self.leave = within.kill, within.fate, within.leave

    def start(self) -> None:
        """Start it in its Python environment, which is built where it is not there."""
        path = [each for each in sys.path if each]
        self._child.start(*self._python.found(), path)
        try:
            self._child.ask(packed((self._f, self._memory)), _START)
        except (EOFError, OSError) as error:
            why = "it did not start" if isinstance(error, TimeoutError) else ""
            self.kill()
            raise EnvError(f"{self._who}: could not start: {self.fate(why)}") from None

    def ask(self, what: str, args: tuple[Any, ...], timeout: float | None) -> tuple[bool, Any]:
        """Make a call."""
        request = packed((what, *args))
        if not self._has_torch and holds_tensors(request):  # seconds that are not the call's
            good, value = self._answer(packed(("prepare",)), _START)
            if not good:
                return good, value
            self._has_torch = True
        return self._answer(request, timeout)

    def _answer(self, request: bytes, timeout: float | None) -> tuple[bool, Any]:
        good, value = unpacked(self._child.ask(request, timeout))
        return good, value if good else value.rebuild()


def here() -> Child:
    """A process of this machine."""
    return subprocess_worker.Child(_STARTER.start, _say)


def _say(text: str) -> None:
    """Say what takes long, apart from what a program prints."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201


class _Starter:
    """A thread that starts all processes and never ends, since the kernel kills them with the thread that did."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._guard, self._thread = threading.Lock(), threading.Thread(target=self._work, name="pools", daemon=True)

    def start(self, *args: Any, **options: Any) -> "subprocess.Popen[bytes]":
        """A process."""
        found: futures.Future[subprocess.Popen[bytes]] = futures.Future()

        def begin() -> None:
            try:
                found.set_result(subprocess.Popen(*args, **options))
            except Exception as error:
                found.set_exception(error)

        with self._guard:
            if self._thread.ident is None:
                self._thread.start()
        self._asked.put(begin)
        return found.result()

    def _work(self) -> None:
        while True:
            self._asked.get()()


_STARTER = _Starter()
