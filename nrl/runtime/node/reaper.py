"""A process between the supervisor and a server, so that nothing of the server outlives the supervisor.

It runs as a file, in any Python, and imports nothing of nrl. On its stdin it gets one line of JSON, ``{"argv", "env",
"folder", "line", "open", "grace"}``. Then it starts the server, whose first line of output is ``{"pid": ...}``;
``line`` is written to the server's stdin, which then stays open if ``open`` says so. When the supervisor writes
``stop``, or its end of stdin closes for whatever reason, the server gets SIGTERM and ``grace`` seconds; after ``kill``
it gets none. In the end all that descends from the server is killed, whatever session it is in; on Linux also what has
lost its parent.
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

_PDEATHSIG, _SUBREAPER = 1, 36  # of prctl(2)


def main() -> int:
    """Keep one server; the exit status is the server's, or 128 and the signal that ended it."""
    order = json.loads(sys.stdin.buffer.readline())
    events: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: events.put(("stop", 0)))
    _prctl(_SUBREAPER, 1)
    try:
        child = subprocess.Popen(
            order["argv"], stdin=subprocess.PIPE, env=order["env"], cwd=order["folder"], preexec_fn=_begin, bufsize=0
        )
    except OSError as error:
        sys.stderr.write(f"{error.filename or order['argv'][0]}: {error.strerror}\n")
        return 127
    assert child.stdin is not None
    with suppress(BrokenPipeError):
        if order["line"] is not None:
            child.stdin.write(order["line"].encode() + b"\n")
        if not order["open"]:
            child.stdin.close()
    threading.Thread(target=_listen, args=(events,), daemon=True).start()
    waiter = threading.Thread(target=_wait, args=(child.pid, events), daemon=True)
    waiter.start()
    what, status = events.get()
    if what == "stop":
        with suppress(OSError):
            child.stdin.close()
        with suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGTERM)
        until = time.monotonic() + order["grace"]
        with suppress(queue.Empty):
            while what == "stop":
                what, status = events.get(timeout=max(0.0, until - time.monotonic()))
    if what != "ended":
        status = 128 + signal.SIGKILL
        with suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
    for pid in _descendants(os.getpid()):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    waiter.join(5.0)  # until no child is left, not even as a zombie
    return status


def _begin() -> None:
    """In the server's process, before its program."""
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
    """Wait for the server, and for all that has become ours by the end of its parent."""
    while True:
        try:
            found, status = os.waitpid(-1, 0)
        except ChildProcessError:
            return
        if found == pid:
            code = os.waitstatus_to_exitcode(status)
            events.put(("ended", code if code >= 0 else 128 - code))


def _descendants(root: int) -> list[int]:
    """All below a process; each is stopped first, so that it starts no more."""
    found = [root]
    for each in found:  # which grows
        if each != root:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(each, signal.SIGSTOP)
        with suppress(OSError):  # it has ended, or there is no /proc
            for thread in Path(f"/proc/{each}/task").iterdir():
                found += map(int, (thread / "children").read_text().split())
    return found[1:]


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(main())
