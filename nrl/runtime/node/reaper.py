"""A process between the supervisor and a server: no process of the server outlives the supervisor.

It runs as a file, in any Python, and imports nothing of nrl. On its stdin it gets one line of JSON, ``{"argv", "env",
"folder", "line", "open", "grace"}``. Then it starts the server, whose first line of output is ``{"pid": ...}``;
``line`` is written to the server's stdin, which then stays open if ``open`` is true. When the supervisor writes
``stop``, or its end of stdin closes for any reason, the server gets SIGTERM and ``grace`` seconds; after ``kill`` it is
killed at once. In the end all descendants of the server are killed, in any session; on Linux also orphans.
"""

import ctypes
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

__all__ = ["main"]

_PDEATHSIG, _SUBREAPER = 1, 36  # options of prctl(2)


def main() -> int:
    """Run one server; return its exit status, or 128 plus the signal that ended it."""
    request = json.loads(sys.stdin.buffer.readline())
    events: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: events.put(("stop", 0)))
    _prctl(_SUBREAPER, 1)
    try:
        child = subprocess.Popen(
            request["argv"],
            stdin=subprocess.PIPE,
            env=request["env"],
            cwd=request["folder"],
            preexec_fn=_prepare_child,
            bufsize=0,
        )
    except OSError as error:
        sys.stderr.write(f"{error.filename or request['argv'][0]}: {error.strerror}\n")
        return 127
    assert child.stdin is not None
    with suppress(BrokenPipeError):
        if request["line"] is not None:
            child.stdin.write(request["line"].encode() + b"\n")
        if not request["open"]:
            child.stdin.close()
    threading.Thread(target=_listen, args=(events,), daemon=True).start()
    waiter = threading.Thread(target=_wait, args=(child.pid, events), daemon=True)
    waiter.start()
    event, status = events.get()
    if event == "stop":
        with suppress(OSError):
            child.stdin.close()
        with suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGTERM)
        until = time.monotonic() + request["grace"]
        with suppress(queue.Empty):
            while event == "stop":
                event, status = events.get(timeout=max(0.0, until - time.monotonic()))
    if event != "ended":
        status = 128 + signal.SIGKILL
        with suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
    for pid in _descendants(os.getpid()):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    waiter.join(5.0)  # until no child is left, not even as a zombie
    return status


def _prepare_child() -> None:
    """Prepare the server's process, before its program starts."""
    _prctl(_PDEATHSIG, signal.SIGKILL)
    os.write(1, b'{"pid": %d}\n' % os.getpid())


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _listen(events: "queue.SimpleQueue[tuple[str, int]]") -> None:
    for line in sys.stdin.buffer:
        events.put((line.decode().strip(), 0))
    events.put(("stop", 0))


def _wait(pid: int, events: "queue.SimpleQueue[tuple[str, int]]") -> None:
    """Wait for the server, and for orphans that this process has adopted."""
    while True:
        try:
            ended_pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            return
        if ended_pid == pid:
            code = os.waitstatus_to_exitcode(status)
            events.put(("ended", code if code >= 0 else 128 - code))


def _descendants(root: int) -> list[int]:
    """Return all descendants of a process; each is stopped first, so that it starts no more."""
    pids = [root]
    for pid in pids:  # The list grows while it is read.
        if pid != root:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGSTOP)
        with suppress(OSError):  # The process has ended, or there is no /proc.
            for thread in Path(f"/proc/{pid}/task").iterdir():
                pids += map(int, (thread / "children").read_text().split())
    return pids[1:]


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(main())
