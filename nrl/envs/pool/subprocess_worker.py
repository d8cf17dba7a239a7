"""A process that makes the calls of a pool, as who starts it sees it: bytes go in, bytes come out.

On a node of a Ray cluster this class is an actor. A node's Python need not have nrl, so this module travels by value
(`nrl.runtime.ray.nodes.send_by_value`), and imports nothing but the standard library, frames, and `nrl.runtime.node`.
"""

import fcntl
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from nrl.envs.pool.framing import unframed
from nrl.runtime.venvs.building import ensure_env
from nrl.runtime.venvs.environments import Recipe, list_sources

__all__ = ["Child"]

_LINES = 10  # of what a process wrote, in an error
_TAIL = 64 << 10  # bytes of it that are kept
_LOG = 4 << 20  # bytes beyond which it is cut to these, between two calls
_READ = 1 << 16  # bytes at once


class Child:
    """A process that runs `nrl.envs.pool.worker`.

    Args:
        popen: starts it. The kernel kills it when the thread ends that this is called in.
        say: gets lines of progress; None: print.
    """

    def __init__(
        self,
        popen: Callable[..., "subprocess.Popen[bytes]"] = subprocess.Popen,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._popen, self._say = popen, say
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  # as long as the process
        fcntl.fcntl(self._log, fcntl.F_SETFL, fcntl.fcntl(self._log, fcntl.F_GETFL) | os.O_APPEND)  # since it is cut
        self._own, self._other = socket.socketpair()
        self._channel = _Channel(self._own)

    def there(self) -> None:
        """Answer: on a Ray cluster this begins to exist when a node has room for it."""

    def start(self, recipe: Recipe, env: Mapping[str, str], path: Sequence[str]) -> None:
        """Start it in its Python environment, which is built where it is not there.

        Args:
            recipe: of the environment.
            env: environment variables of it.
            path: where it imports from, if the recipe has no sources.
        """
        python = ensure_env(recipe, say=self._say)
        found = os.pathsep.join(list_sources(recipe, Path(python)) or path)
        self._process = self._popen(
            [str(python), "-c", "from nrl.envs.pool.worker import main; main()"],
            stdin=self._other,
            stdout=self._other,
            stderr=self._log,
            env={**os.environ, **env, "PYTHONPATH": found},
            start_new_session=True,
        )
        self._other.close()  # so that nobody else holds that end

    def ask(self, request: bytes, timeout: float | None) -> list[bytes]:
        """The parts of the answer to a request, within seconds; None: no limit.

        Raises:
            TimeoutError: it took longer.
            EOFError, OSError: the process is gone.
        """
        if os.fstat(self._log.fileno()).st_size > _LOG:
            tail = self._tail()
            self._log.truncate(0)
            self._log.write(tail)
        self._channel.within(timeout)
        self._channel.write(request)
        return unframed(self._channel)

    def kill(self) -> None:
        """End the process, what descends from it, and its process group; in any thread, also before it has started."""
        if self._process is not None:
            found = _stopped(self._process.pid) if self._process.returncode is None else []
            for pid in found:
                _signal(pid, signal.SIGKILL)
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def fate(self, why: str) -> str:
        """How it ended, and the last lines that it wrote; ``why`` it was killed, if it was."""
        process = self._process
        assert process is not None
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
        code = process.returncode
        how = "does not answer" if code is None else f"ended by signal {-code}" if code < 0 else f"ended with {code}"
        lines = self._tail().decode(errors="replace").splitlines()[-_LINES:]
        return "\n".join([f"its process {why and f'({why}) '}{how}", *(f"    {line}" for line in lines)])

    def _tail(self) -> bytes:
        fd = self._log.fileno()
        return os.pread(fd, _TAIL, max(0, os.fstat(fd).st_size - _TAIL))

    def leave(self) -> None:
        """Close what leads to it."""
        self._log.close()
        self._own.close()
        self._other.close()
        if self._process is not None:
            self._process.wait()


def _stopped(pid: int) -> list[int]:
    """A process and its descendants, in whatever session; each is stopped first, so that it starts no more."""
    found = [pid]
    for each in found:  # which grows
        _signal(each, signal.SIGSTOP)
        with suppress(OSError):  # it has ended, or there is no /proc
            for thread in Path(f"/proc/{each}/task").iterdir():
                found += map(int, (thread / "children").read_text().split())
    return found


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # it has ended, or is another user's
        os.kill(pid, number)


class _Channel:
    """One end of a pair of sockets, which raises TimeoutError where writing and reading take too long."""

    def __init__(self, own: socket.socket) -> None:
        self._socket, self._left = own, bytearray()
        self._until: float | None = None

    def within(self, seconds: float | None) -> None:
        """Until when all is to be written and read."""
        self._until = None if seconds is None else time.monotonic() + seconds

    def write(self, data: bytes) -> None:
        """Write all of it."""
        self._bound()
        self._socket.sendall(data)

    def read(self, size: int) -> bytes:
        """As many bytes, or fewer at the end."""
        while len(self._left) < size:
            self._bound()
            found = self._socket.recv(max(size - len(self._left), _READ))
            if not found:
                break
            self._left += found
        found = bytes(self._left[:size])
        del self._left[:size]
        return found

    def _bound(self) -> None:
        left = None if self._until is None else self._until - time.monotonic()
        self._socket.settimeout(left if left is None else max(left, 1e-6))
