"""SIGTERM: a machine is wanted back. The run saves what it has and ends, in the time that it is given.

Where it waits for a batch it is broken off at once, by an exception, and what the last step left is saved. In the
middle of a step, when the state has been consumed, it goes on to the end of that step. What takes too long is ended.
"""

import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

__all__ = ["Preemption", "Terminated", "heeded", "patience"]

_WAITS, _RAISES, _EXITS = 0.4, 0.7, 0.95  # parts of the time: for what is pending; for a checkpoint; for `with` blocks
_until: float | None = None


class Terminated(SystemExit):
    """The run was asked to end. It leaves all `with` blocks, and the process with the status 143.

    >>> Terminated().code
    143
    """

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


def patience() -> float | None:
    """Seconds that one may wait for something that can be done again after a restart; None: any time.

    >>> patience() is None
    True
    """
    return None if _until is None else max(0.0, _until - time.monotonic())


class Preemption:
    """What has become of a SIGTERM; made by `heeded`.

    Args:
        grace: seconds from the signal to the end of the process.

    >>> Preemption(30.0).asked
    False
    """

    def __init__(self, grace: float) -> None:
        self.grace = grace
        self.asked = False
        """Whether there was one."""
        self.going_on = False
        """Whether what runs comes to its end first, unless that takes too long; else an exception breaks it off."""
        self.left = False
        """Whether the block of `heeded` has been left."""
        self._said = "no checkpoint could be saved"
        self._late = self._ends = False
        self._pid = os.getpid()

    def end(self) -> NoReturn:
        """Leave all blocks, now that there is nothing left to do.

        Raises:
            Terminated: always.
        """
        self._ends = True
        raise Terminated

    def say(self, text: str) -> None:
        """Also where a ``print`` has been interrupted."""
        self._said = text
        os.write(2, f"run: {text}\n".encode())

    def handle(self, number: int, frame: Any) -> None:
        """The signal."""
        global _until
        if os.getpid() != self._pid:  # a fork, whose parent ends it
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if not self.asked:
            self.asked, _until = True, time.monotonic() + _WAITS * self.grace
            _thread.start_new_thread(self._watch, ())  # not a Thread, whose start may be what was interrupted
            how = "going on to the end of this step" if self.going_on else "ending"
            os.write(2, f"run: SIGTERM; {how}, within {self.grace:g} s (checkpoints.grace)\n".encode())
        if not self._ends and (self._late or not self.going_on):
            self.going_on = True  # what is saved from here on is not broken off by another signal
            raise Terminated

    def _watch(self) -> None:
        time.sleep(_RAISES * self.grace)
        if not self.left:
            self._late = True
            os.kill(self._pid, signal.SIGTERM)
        time.sleep((_EXITS - _RAISES) * self.grace)
        if not self.left or not threading.main_thread().is_alive():
            os.write(2, f"run: {_EXITS * self.grace:g} s are over; {self._said}\n".encode())
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):
                    stream.flush()
            os._exit(128 + signal.SIGTERM)


@contextmanager
def heeded(grace: float) -> Iterator[Preemption]:
    """Heed SIGTERM, in the main thread and where the program has no handler of its own.

    >>> with heeded(30.0) as preemption:
    ...     preemption.asked
    False
    """
    global _until
    preemption = Preemption(grace)
    if threading.current_thread() is not threading.main_thread():
        yield preemption
        return
    before = signal.getsignal(signal.SIGTERM)
    ours = before is signal.SIG_DFL or getattr(before, "__module__", "").startswith("nrl.")
    if ours:
        signal.signal(signal.SIGTERM, preemption.handle)
    try:
        yield preemption
    finally:
        preemption.left, _until = True, None
        if ours and signal.getsignal(signal.SIGTERM) == preemption.handle:
            signal.signal(signal.SIGTERM, before)
