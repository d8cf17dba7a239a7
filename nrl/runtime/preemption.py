"""SIGTERM and Ctrl-C: save a run and end it, after SIGTERM in the time that the scheduler grants.

A run that waits for a batch stops at once, by an exception, and saves what the last step left. In the middle of a step
the state has been consumed, so the run goes on to the end of that step. After SIGTERM, what takes too long is ended;
after Ctrl-C, a second one ends it.
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

__all__ = ["Preemption", "Terminated", "end_after_signal", "heed_signals", "note_save", "patience_left"]

# Fractions of the grace: waits end, an exception breaks off, the process exits.
_WAITS, _RAISES, _EXITS = 0.4, 0.7, 0.95
_CLOSING = 5.0  # seconds to leave all blocks where nothing is to be saved: neither a step nor a save has begun
_HURRYING = 3.0  # seconds to leave all blocks after a second Ctrl-C
_ECHO = 0.3  # seconds in which a second SIGINT is the first one again: launchers forward what a terminal sends to all
_LOOK = 0.1  # seconds between two looks at the time
_signal: "_Signal | None" = None  # the process heeds one signal, and there is no way back
_saves = False  # whether this process has begun to save anything


class Terminated(SystemExit):
    """A request to end the run: it leaves all `with` blocks, and exits with the status 143."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


def patience_left() -> float | None:
    """Return the seconds left for work that a restart can repeat; None: no signal has come, so no limit."""
    return None if _signal is None else max(0.0, _WAITS * _signal.grace - _signal.past())


def note_save() -> None:
    """Note that something is being saved: from now on the end of the process has the whole time."""
    global _saves
    _saves = True


class _Signal:
    """The first signal, and the time since then.

    Args:
        number: SIGTERM, or SIGINT, which sets no limit of time.
        preemption: of the run.
    """

    def __init__(self, number: int, preemption: "Preemption") -> None:
        self.number, self.grace = number, preemption.grace
        self.leaving = False  # the blocks, which no other exception may break off
        self.outcome = "no checkpoint could be saved"
        self._preemption = preemption
        self._began = time.monotonic()

    def past(self) -> float:
        return time.monotonic() - self._began

    def late(self) -> bool:
        return self.number == signal.SIGTERM and not self.leaving and self.past() >= _RAISES * self.grace

    def error(self) -> BaseException:
        return Terminated() if self.number == signal.SIGTERM else KeyboardInterrupt()

    def watch(self) -> None:
        """Send the signal again where the run is late, and exit shortly before the time is over.

        Where neither a step nor a save has begun, nothing is to be saved, and the time is short.
        """
        end, sent = _EXITS * self.grace, False
        while _signal is self:
            limit = end if self._preemption.begun or _saves else min(end, _CLOSING)
            if self.past() >= limit:
                self.exit(f"{limit:g} s are over; {self.outcome}")
            if self.late() and not sent:
                sent = True
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(_LOOK)

    def hurry(self) -> None:
        """Exit soon, whatever the run does."""
        time.sleep(_HURRYING)
        if _signal is self:
            self.exit(f"stopped after a second Ctrl-C; {self.outcome}")

    def exit(self, text: str) -> None:
        os.write(2, f"run: {text}\n".encode())
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(128 + self.number)


class Preemption:
    """The response of a run to SIGTERM and Ctrl-C; made by `heed_signals`.

    Args:
        grace: seconds from the signal to the end of the process.
    """

    def __init__(self, grace: float) -> None:
        self.grace = grace
        self.going_on = False
        """True if the running work may finish in time; otherwise an exception breaks it off."""
        self.begun = False
        """True once a step has begun. Before that nothing is to be saved, unless `note_save` was called."""
        self._pid = os.getpid()

    @property
    def is_requested(self) -> bool:
        """True if a signal has come, in this block or before it."""
        return _signal is not None

    def end(self) -> NoReturn:
        """Leave all blocks, since nothing is left to do.

        Raises:
            Terminated: after SIGTERM.
            KeyboardInterrupt: after Ctrl-C.
        """
        if _signal is None:
            raise Terminated
        _signal.leaving = True
        raise _signal.error()

    def say(self, text: str) -> None:
        """Write the outcome of the checkpoint; it is repeated at the end of the time."""
        if _signal is not None:
            _signal.outcome = text
        self.write(text)

    def write(self, text: str) -> None:
        """Write a line to standard error, also if the signal has interrupted a ``print``."""
        os.write(2, f"run: {text}\n".encode())

    def handle(self, number: int, frame: Any) -> None:
        """Handle a signal."""
        global _signal
        if os.getpid() != self._pid:  # a fork does what it would without nrl
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif _signal is None:
            _signal = _Signal(number, self)
            next_step = "going on to the end of this step" if self.going_on else "ending"
            if number == signal.SIGTERM:
                _thread.start_new_thread(_signal.watch, ())  # not a Thread, whose start may be what was interrupted
                text = f"SIGTERM; {next_step}, within {self.grace:g} s (checkpoints.grace)"
            else:
                text = f"Ctrl-C; {next_step}; press it again to stop at once"
            os.write(2, f"run: {text}\n".encode())
            if not self.going_on:
                raise _signal.error()
        elif number == signal.SIGINT:
            if _signal.past() >= _ECHO:
                _thread.start_new_thread(_signal.hurry, ())
                self.end()
        elif _signal.number == signal.SIGINT:  # A limit of time applies from now on.
            _signal = _Signal(number, self)
            _thread.start_new_thread(_signal.watch, ())
        elif _signal.late():  # an earlier second signal breaks nothing off, such as a checkpoint
            self.end()


@contextmanager
def end_after_signal() -> Iterator[None]:
    """Turn any error into the end of the program once a signal has come, which may have ended a process that it needs.

    Raises:
        Terminated: from that error, after SIGTERM.
        KeyboardInterrupt: from that error, after Ctrl-C.
    """
    try:
        yield
    except (Terminated, KeyboardInterrupt):
        if _signal is not None:
            _signal.leaving = True
        raise
    except Exception as error:
        if _signal is None:
            raise
        _signal.leaving = True
        os.write(2, f"run: {_signal.outcome}; what ran was ended by {type(error).__name__}: {error}\n".encode())
        raise _signal.error() from error


@contextmanager
def heed_signals(grace: float) -> Iterator[Preemption]:
    """Heed SIGTERM and Ctrl-C, in the main thread and where the program has no handler of its own.

    Once SIGTERM has come, the process heeds it until its end, also after the block. Ctrl-C ends with the outermost
    block.

    Args:
        grace: seconds from the signal to the end of the process.

    Raises:
        Terminated: SIGTERM came; also in place of another error: see `end_after_signal`.
        KeyboardInterrupt: Ctrl-C came; likewise.

    >>> with heed_signals(30.0) as preemption:
    ...     preemption.is_requested
    False
    """
    global _signal
    preemption, handlers = Preemption(grace), dict[int, Any]()
    if threading.current_thread() is threading.main_thread():
        for number, default in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
            before = signal.getsignal(number)
            if before is default or _is_ours(before):
                handlers[number] = before
                signal.signal(number, preemption.handle)
    try:
        with end_after_signal():
            yield preemption
    finally:
        # No handler is of another thread.
        outermost = signal.SIGINT in handlers and not _is_ours(handlers[signal.SIGINT])
        if outermost and _signal is not None and _signal.number == signal.SIGINT:
            _signal = None  # a notebook, or a shell, goes on
        if _signal is None:
            for handled, before in handlers.items():
                if signal.getsignal(handled) == preemption.handle:
                    signal.signal(handled, before)


def _is_ours(handler: Any) -> bool:
    return str(getattr(handler, "__module__", "")).startswith("nrl.")  # a callable's module may be None
