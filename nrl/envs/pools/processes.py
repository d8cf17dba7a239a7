"""The processes of this machine in which a pool makes its calls."""

import fcntl
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent import futures
from contextlib import suppress
from pathlib import Path
from typing import Any

from nrl.envs.pools.worker import packed, receive, send
from nrl.errors import EnvError
from nrl.runtime.executables.recipes import recipe
from nrl.runtime.executables.registry import Executable
from nrl.runtime.executables.registry import executable as registered
from nrl.runtime.node.building import provide
from nrl.runtime.node.environments import sources
from nrl.runtime.ray.pickling import holds_tensors

__all__ = ["Process"]

_LINES = 10  # of what a worker wrote, in an error
_TAIL = 64 << 10  # bytes of it that are kept
_LOG = 4 << 20  # bytes beyond which it is cut to these, between two calls
_START = 300.0  # seconds for a worker to start
_READ = 1 << 16  # bytes at once


class Process:
    """A process of this machine, which starts with the first call.

    Args:
        who: how errors name it.
        f: what it calls.
        executable: its Python environment.
        memory: bytes of address space; None: no limit.
    """

    after_late = "its process was killed"

    def __init__(self, who: str, f: Any, executable: str | Executable, memory: int | None) -> None:
        self._who, self._f, self._executable, self._memory = who, f, executable, memory
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  # as long as the worker
        fcntl.fcntl(self._log, fcntl.F_SETFL, fcntl.fcntl(self._log, fcntl.F_GETFL) | os.O_APPEND)  # since it is cut
        self._own, self._other = socket.socketpair()
        self._channel = _Channel(self._own)
        self._has_torch = False

    def start(self) -> None:
        """Start it in its Python environment, which is built where it is not there."""
        made = recipe(self._executable)
        python = provide(made, say=_say)
        found = sources(made, Path(python))
        path = os.pathsep.join(found or [each for each in sys.path if each])
        self._process = _STARTER.start(
            [str(python), "-c", "from nrl.envs.pools.worker import main; main()"],
            stdin=self._other,
            stdout=self._other,
            stderr=self._log,
            env={**os.environ, **registered(self._executable).env, "PYTHONPATH": path},
            start_new_session=True,
        )
        self._other.close()  # so that nobody else holds that end
        self._channel.within(_START)
        try:
            send(self._channel, (self._f, self._memory))
            receive(self._channel)
        except (EOFError, OSError) as error:
            why = "it did not start" if isinstance(error, TimeoutError) else ""
            self.kill()
            raise EnvError(f"{self._who}: could not start: {self.fate(why)}") from None

    def ask(self, what: str, args: tuple[Any, ...], timeout: float | None) -> tuple[bool, Any]:
        """Make a call."""
        if os.fstat(self._log.fileno()).st_size > _LOG:
            tail = self._tail()
            self._log.truncate(0)
            self._log.write(tail)
        request = packed((what, *args))
        if not self._has_torch and holds_tensors(request):  # seconds that are not the call's
            good, value = self._answer(packed(("prepare",)), _START)
            if not good:
                return good, value
            self._has_torch = True
        return self._answer(request, timeout)

    def _answer(self, request: bytes, timeout: float | None) -> tuple[bool, Any]:
        self._channel.within(timeout)
        self._channel.write(request)
        good, value = receive(self._channel)
        return good, value if good else value.original()

    def kill(self) -> None:
        """End the process, what descends from it, and its process group."""
        if self._process is not None:
            found = _stopped(self._process.pid) if self._process.returncode is None else []
            for pid in found:
                _signal(pid, signal.SIGKILL)
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def fate(self, why: str) -> str:
        """How it ended, and the last lines that it wrote."""
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


def _say(text: str) -> None:
    """Say what takes long, apart from what a program prints."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201


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

    def flush(self) -> None:
        """All is written."""

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
