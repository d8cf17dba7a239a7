"""SIGTERM: saves a run and ends it in the time that the scheduler grants.

A run that waits for a batch stops at once, by an exception, and saves what the last step left. In the middle of a step
the state has been consumed, so the run goes on to the end of that step. What takes too long is ended.
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

__all__ = ["Preemption", "Terminated", "ending", "heeded", "patience"]

_WAITS, _RAISES, _EXITS = 0.4, 0.7, 0.95  # of the time: waits end, an exception breaks off, the process exits
_asked: "_Asked | None" = None  # the process heeds one signal, and there is no way back


class Terminated(SystemExit):
    """The run was asked to end. It leaves all `with` blocks, and the process with the status 143."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


def patience() -> float | None:
    """Seconds left to wait for work that a restart can do again; None: no signal has come, so any time."""
    return None if _asked is None else max(0.0, _WAITS * _asked.grace - _asked.past())


class _Asked:
    """The first SIGTERM, and the time since then."""

    def __init__(self, grace: float) -> None:
        self.grace = grace
        self.leaving = False  # the blocks, which no other exception may break off
        self.said = "no checkpoint could be saved"
        self._began = time.monotonic()

    def past(self) -> float:
        return time.monotonic() - self._began

    def late(self) -> bool:
        return not self.leaving and self.past() >= _RAISES * self.grace

    def watch(self) -> None:
        """Send the signal again where the run is late, and exit shortly before the time is over."""
        time.sleep(_RAISES * self.grace)
        if _asked is self and self.late():
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep((_EXITS - _RAISES) * self.grace)
        if _asked is self:
            os.write(2, f"run: {_EXITS * self.grace:g} s are over; {self.said}\n".encode())
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):
                    stream.flush()
            os._exit(128 + signal.SIGTERM)


class Preemption:
    """The answer of a run to SIGTERM; made by `heeded`.

    Args:
        grace: seconds from the signal to the end of the process.
    """

    def __init__(self, grace: float) -> None:
        self.grace = grace
        self.going_on = False
        """Whether the running work may finish in time; otherwise an exception breaks it off."""
        self._pid = os.getpid()

    @property
    def asked(self) -> bool:
        """Whether a signal has come, in this block or before it."""
        return _asked is not None

    def end(self) -> NoReturn:
        """Leave all blocks, since nothing is left to do.

        Raises:
            Terminated: always.
        """
        if _asked is not None:
            _asked.leaving = True
        raise Terminated

    def say(self, text: str) -> None:
        """Write a line to the standard error, also where the signal has interrupted a ``print``."""
        if _asked is not None:
            _asked.said = text
        os.write(2, f"run: {text}\n".encode())

    def handle(self, number: int, frame: Any) -> None:
        """The handler of the signal."""
        global _asked
        if os.getpid() != self._pid:  # a fork does what it would without nrl
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif _asked is None:
            _asked = _Asked(self.grace)
            _thread.start_new_thread(_asked.watch, ())  # not a Thread, whose start may be what was interrupted
            how = "going on to the end of this step" if self.going_on else "ending"
            os.write(2, f"run: SIGTERM; {how}, within {self.grace:g} s (checkpoints.grace)\n".encode())
            if not self.going_on:
                raise Terminated
        elif _asked.late():  # an earlier second signal breaks nothing off, such as a checkpoint
            self.end()


@contextmanager
def ending() -> Iterator[None]:
    """Turn any error into `Terminated` once SIGTERM has come: the signal may have ended a process that the run needs.

    Raises:
        Terminated: from that error.
    """
    try:
        yield
    except Terminated:
        if _asked is not None:
            _asked.leaving = True
        raise
    except Exception as error:
        if _asked is None:
            raise
        _asked.leaving = True
        os.write(2, f"run: {_asked.said}; what ran was ended by {type(error).__name__}: {error}\n".encode())
        raise Terminated from error


@contextmanager
def heeded(grace: float) -> Iterator[Preemption]:
    """Heed SIGTERM, in the main thread and where the program has no handler of its own.

    Once a signal has come, the process heeds it until its end, also after the block.

    Args:
        grace: seconds from the signal to the end of the process.

    Raises:
        Terminated: a signal came; also in place of another error: see `ending`.

    >>> with heeded(30.0) as preemption:
    ...     preemption.asked
    False
    """
    preemption, before = Preemption(grace), signal.getsignal(signal.SIGTERM)
    ours = threading.current_thread() is threading.main_thread() and (before is signal.SIG_DFL or _is_ours(before))
    if ours:
        signal.signal(signal.SIGTERM, preemption.handle)
    try:
        with ending():
            yield preemption
    finally:
        if ours and _asked is None and signal.getsignal(signal.SIGTERM) == preemption.handle:
            signal.signal(signal.SIGTERM, before)


def _is_ours(handler: Any) -> bool:
    return getattr(handler, "__module__", "").startswith("nrl.")
