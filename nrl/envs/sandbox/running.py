"""A sandboxed process while it runs: what it reads and writes, its limits, and its end."""

import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from nrl.envs.sandbox.base import Dialogue, Finished, Limits
from nrl.envs.sandbox.usage import usage
from nrl.errors import EnvError

__all__ = ["run"]

_TICK = 0.05  # seconds between two looks at what it uses
_CHUNK = 1 << 16
_INODES = 4096  # files that it may have, and for each 16 KiB of disk one more: an empty one is memory of the kernel
_LAST = 1.0  # seconds between the end of a program's output and its own
_END = 20.0  # seconds in which the kernel has to end a process that was killed

type _Limit = Literal["seconds", "cpu_seconds", "memory", "output", "disk"]


class _Reached(Exception):
    """A limit was reached, and the process killed."""

    def __init__(self, limit: _Limit, of: "_Running") -> None:
        super().__init__(limit)
        self.limit: _Limit = limit
        self.of = of


def run(
    arguments: Sequence[str], inherited: Sequence[int], status: tuple[int, int], stdin: bytes | Dialogue, limits: Limits
) -> Finished:
    """Run bwrap.

    Args:
        arguments: its command line.
        inherited: file descriptors that it inherits.
        status: both ends of the pipe into which it writes its ``--json-status-fd``; both are closed here.
        stdin: what the command reads, or talks to it.
        limits: those that are watched from outside.

    Raises:
        EnvError: bwrap could not start the command.
    """
    began = time.monotonic()
    reading, writing = status
    try:
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[*inherited, writing],
            env={},  # what the first process of the namespace is started with can be read within
            cwd="/",
            start_new_session=True,  # Ctrl-C is for the program, which ends the sandbox
        )
    except OSError as error:
        os.close(reading)
        raise EnvError(f"bubblewrap: {arguments[0]} cannot be started: {error}; install it again") from error
    finally:
        os.close(writing)
    running = _Running(process, reading, limits, began)
    reached: _Limit | Literal["exited", "stopped"] = "exited"
    try:
        if callable(stdin):
            stdin(running)
            reached = "exited" if running.ending() else "stopped"
        else:
            running.send(stdin)
            running.finish()
    except _Reached as error:
        if error.of is not running:  # a dialogue may talk to several programs
            raise
        reached = error.limit
    finally:
        running.end()
    code = running.code()
    if reached == "exited" and len(running.out) + len(running.err) > limits.output:  # in its last moment
        reached = "output"
    if code is None and (reached == "exited" or not running.inner):
        said = running.err.decode(errors="replace").strip()[:2000] or f"it ended with {process.returncode}"
        raise EnvError(
            f"bubblewrap: the sandbox could not be made: {said}; it needs namespaces: run as root with CAP_SYS_ADMIN, "
            "or allow users to make namespaces (user.max_user_namespaces, kernel.unprivileged_userns_clone, AppArmor, "
            "the seccomp profile of a container), or give another sandbox"
        )
    return Finished(
        reached,
        code if reached == "exited" else None,
        bytes(running.out[: limits.output]),
        bytes(running.err[: limits.output]),
        time.monotonic() - began,
    )


class _Running:
    """The process, and what came out of it."""

    def __init__(self, process: "subprocess.Popen[bytes]", status: int, limits: Limits, began: float) -> None:
        self.process, self.limits = process, limits
        self.out, self.err, self.status = bytearray(), bytearray(), bytearray()
        self.inner = 0
        """The first process of the namespace, with which all others end; 0: not known yet."""
        self._inner_fd = -1
        self._unsent = memoryview(b"")
        self._deadline, self._look = began + limits.seconds, began + _TICK
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._stdin, self._status = process.stdin, status
        self._process_fd = os.pidfd_open(process.pid)
        self._selector = selectors.DefaultSelector()
        for fd, into in ((process.stdout.fileno(), self.out), (process.stderr.fileno(), self.err), (status, None)):
            os.set_blocking(fd, False)
            self._selector.register(fd, selectors.EVENT_READ, self.status if into is None else into)
        os.set_blocking(self._stdin.fileno(), False)
        self._selector.register(self._process_fd, selectors.EVENT_READ, None)

    def send(self, data: bytes) -> None:
        """Write all of it."""
        if self._stdin.closed or not data:
            return
        self._unsent = memoryview(data)
        self._selector.register(self._stdin.fileno(), selectors.EVENT_WRITE, None)
        while self._unsent and not self.over():
            self._turn(_TICK)
        if not self._stdin.closed:
            self._selector.unregister(self._stdin.fileno())

    def receive(self, seconds: float) -> bytes:
        """What it has written."""
        until = time.monotonic() + seconds
        while not self.out and not self.over() and self._open(self.out):
            left = until - time.monotonic()
            self._turn(left)
            if left <= 0 and not self.out:
                raise TimeoutError(f"it wrote nothing within {seconds:g} s")
        got = bytes(self.out)
        self.out.clear()
        return got

    def finish(self) -> None:
        """Close its input, and wait for its end."""
        self._close_stdin()
        while not self.over():
            self._turn(_TICK)

    def over(self) -> bool:
        """Whether it has ended."""
        return self.process.poll() is not None

    def ending(self) -> bool:
        """Whether it has ended, or does so by itself: its output closes a moment before."""
        until = time.monotonic() + _LAST
        while not self.over() and not self._open(self.out) and time.monotonic() < until:
            self._read(_TICK)
        return self.over()

    def end(self) -> None:
        """Kill whatever is left of it, wait until nothing is, and read what is still to be read."""
        until = time.monotonic() + _END
        try:
            while not self.inner and not self.over() and time.monotonic() < until:  # it is starting
                self._read(_TICK)
            self._kill()
            self._close_stdin()
            while any(self._open(each) for each in (self.out, self.err, self.status)):
                if not self._read(_END):
                    raise EnvError(f"bubblewrap: a process of the sandbox did not end within {_END:g} s of its kill")
        finally:
            self._selector.close()
            for pipe in (self.process.stdout, self.process.stderr):
                pipe.close()  # type: ignore[union-attr]
            for fd in (self._status, self._process_fd, self._inner_fd):
                if fd >= 0:
                    os.close(fd)

    def code(self) -> int | None:
        """The exit status of the command, as bwrap tells it; None if the command did not run to its end."""
        for line in self.status.decode(errors="replace").splitlines():
            with suppress(ValueError):
                found = json.loads(line)
                if "exit-code" in found:
                    return int(found["exit-code"])
        return None

    def _open(self, into: bytearray) -> bool:
        return any(key.data is into for key in self._selector.get_map().values())

    def _turn(self, seconds: float) -> None:
        """Move what can be moved, for some time at most; raise where a limit is reached."""
        now = time.monotonic()
        self._read(max(0.0, min(seconds, self._deadline - now, self._look - now)))
        if len(self.out) + len(self.err) > self.limits.output:
            raise _Reached("output", self)
        now = time.monotonic()
        if now >= self._deadline:
            raise _Reached("seconds", self)
        if now >= self._look:
            self._watch()
            self._look = time.monotonic() + _TICK

    def _read(self, seconds: float) -> int:
        """Move what can be moved, once; how many files were ready."""
        ready = self._selector.select(seconds)
        for key, _ in ready:
            if key.data is None:
                if key.fd == self._process_fd:
                    self._selector.unregister(key.fd)
                    self.process.wait()
                else:
                    self._write()
                continue
            got = b""
            with suppress(BlockingIOError):
                got = os.read(key.fd, _CHUNK)
                if not got:
                    self._selector.unregister(key.fd)
            most = _CHUNK if key.data is self.status else self.limits.output  # what bwrap says is not the program's
            if len(key.data) <= most:  # what is beyond is read, so that its writer can end, and dropped
                key.data.extend(got)
            if key.data is self.status and not self.inner:
                self._find_inner()
        return len(ready)

    def _write(self) -> None:
        try:
            self._unsent = self._unsent[os.write(self._stdin.fileno(), self._unsent[:_CHUNK]) :]
        except BlockingIOError:
            return
        except OSError:  # it has closed its input
            self._unsent = memoryview(b"")
            self._close_stdin()

    def _close_stdin(self) -> None:
        if not self._stdin.closed:
            with suppress(KeyError):
                self._selector.unregister(self._stdin.fileno())
            self._stdin.close()

    def _find_inner(self) -> None:
        with suppress(ValueError, KeyError):
            self.inner = int(json.loads(self.status.split(b"\n")[0])["child-pid"])
            with suppress(ProcessLookupError):
                self._inner_fd = os.pidfd_open(self.inner)

    def _watch(self) -> None:
        if not self.inner:
            return
        used = usage(self.inner, self.limits.memory)
        if used.memory > self.limits.memory:
            raise _Reached("memory", self)
        if used.cpu_seconds > self.limits.cpu_seconds:
            raise _Reached("cpu_seconds", self)
        with suppress(OSError):
            files: Any = os.statvfs(Path(f"/proc/{self.inner}/root", "sandbox"))
            made = 0 <= files.f_blocks * files.f_frsize - self.limits.disk < files.f_frsize  # else the machine's own
            if made and files.f_files - files.f_ffree > _INODES + self.limits.disk // 16384:
                raise _Reached("disk", self)

    def _kill(self) -> None:
        """End the namespace by its first process. The kernel kills all others before that one has ended."""
        if self._inner_fd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._inner_fd, signal.SIGKILL)
            waiting = selectors.DefaultSelector()
            with waiting:
                waiting.register(self._inner_fd, selectors.EVENT_READ)
                waiting.select(_END)
        elif not self.over():
            self.process.kill()
        try:
            self.process.wait(_END)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
