"""A process that does what may hang, fill the memory or crash, and may be killed at any time: a fork of this one.

This process imports what is slow to import, once. Its fork reads what models wrote, one request after the other; where
one takes too long, the fork is killed, also if it holds the interpreter, and the next request has another one,
milliseconds later.
"""

import ctypes
import gc
import json
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["Crashed", "Fork", "Late"]

_HEAD = struct.Struct("!Qd")  # bytes that follow, and seconds of the processor that the fork has had


class Late(Exception):
    """A request took longer than it may.

    Args:
        spent: seconds of a processor that the fork had meanwhile.
    """

    def __init__(self, spent: float) -> None:
        super().__init__(spent)
        self.spent = spent

    def busy(self, seconds: float) -> bool:
        """Whether the fork had a processor for most of so many seconds; if not, the machine did other things."""
        return self.spent >= 0.6 * seconds


class Crashed(Exception):
    """A request ended the fork.

    Args:
        signal: that ended it; 0: it exited.
    """

    def __init__(self, signal: int) -> None:
        super().__init__(signal)
        self.signal = signal


class Fork:
    """A forked process and its successors, each in place of one that was killed or has served its time.

    Args:
        serve: ``request -> answer``, called there. A request can be pickled, an answer is what JSON can say. What it
            raises is answered as None.
        memory: bytes that a fork may have beyond what it is born with.
        most: requests of one fork, since what it remembers takes memory from the next ones.

    >>> fork = Fork(lambda n: 2 * n)
    >>> fork.ask(21, seconds=5)
    42
    >>> fork.end()
    """

    def __init__(self, serve: Callable[[Any], Any], *, memory: int = 1 << 30, most: int = 10_000) -> None:
        self._serve, self._memory, self._most = serve, memory, most
        self._pid, self._asked, self._spent = 0, 0, 0.0
        self._channel: socket.socket | None = None

    def ask(self, request: Any, seconds: float) -> Any:
        """The answer to a request.

        Raises:
            Late: it took longer.
            Crashed: it ended the fork.
        """
        self.ready()
        assert self._channel is not None
        self._asked += 1
        deadline = time.monotonic() + seconds
        try:
            sent = pickle.dumps(request)
            self._channel.settimeout(max(seconds, 1e-3))
            self._channel.sendall(_HEAD.pack(len(sent), 0.0) + sent)
            size, spent = _HEAD.unpack(self._exactly(_HEAD.size, deadline))
            answer = json.loads(self._exactly(size, deadline))  # a fork that has gone wrong runs nothing here
        except TimeoutError:
            _, took = self._gone()
            raise Late(took - self._spent) from None
        except OSError:
            status, _ = self._gone(dying=True)
            raise Crashed(status) from None
        self._spent = spent
        return answer

    def ready(self, requests: int = 1) -> None:
        """Have one fork for so many requests, so that the next ones neither wait for it nor are parted."""
        if self._asked + requests > self._most:
            self.end()
        if self._channel is None:
            self._begin()

    def end(self) -> None:
        """Kill the fork, if there is one."""
        if self._channel is not None:
            self._gone()

    def _exactly(self, size: int, deadline: float) -> bytes:
        assert self._channel is not None
        parts = []
        while size:
            self._channel.settimeout(max(deadline - time.monotonic(), 1e-3))
            if not (found := self._channel.recv(min(size, 1 << 20))):
                raise ConnectionError
            parts.append(found)
            size -= len(found)
        return b"".join(parts)

    def _begin(self) -> None:
        own, other = socket.socketpair()
        parent = os.getpid()
        gc.collect()
        gc.freeze()  # so that the fork shares what is there
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which nobody uses in the fork
            self._pid = os.fork()
        if not self._pid:
            try:
                own.close()
                self._answer(other, parent)
            finally:
                os._exit(0)
        other.close()
        self._channel, self._asked, self._spent = own, 0, 0.0

    def _gone(self, dying: bool = False) -> tuple[int, float]:
        """Kill it, unless it is ending; the signal that ended it, and the seconds of a processor that it has had."""
        assert self._channel is not None
        self._channel.close()
        self._channel = None
        if not dying:
            os.kill(self._pid, signal.SIGKILL)  # it has not been waited for, so the number is still its own
        _, status, usage = os.wait4(self._pid, 0)
        return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, usage.ru_utime + usage.ru_stime

    def _answer(self, channel: socket.socket, parent: int) -> None:
        """Answer until nobody asks any more; in the fork."""
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            if os.getppid() != parent:
                return
            size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + self._memory, size + self._memory))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        requests = channel.makefile("rb")
        while len(head := requests.read(_HEAD.size)) == _HEAD.size:
            request = pickle.loads(requests.read(_HEAD.unpack(head)[0]))
            try:
                answer = self._serve(request)
            except Exception:  # memory and depth that ran out, too
                answer = None
            said = json.dumps(answer).encode()
            channel.sendall(_HEAD.pack(len(said), time.process_time()) + said)
