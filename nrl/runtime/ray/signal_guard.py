"""Deferring Ctrl-C and SIGTERM around work that must not stop halfway."""

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

__all__ = ["defer_signals"]

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def defer_signals() -> Iterator[None]:
    """Let Python's handlers of SIGINT and SIGTERM run after the block and not in the middle of it.

    Each handler runs once for its signal, as soon as the block ends. A second signal of the same kind goes through, to
    end a block that hangs. Handlers run in the main thread alone, so other threads defer nothing. A signal without a
    Python handler has its usual effect.

    >>> import os
    >>> before = signal.signal(signal.SIGINT, lambda *_: print("interrupted"))
    >>> with defer_signals():
    ...     os.kill(os.getpid(), signal.SIGINT)
    ...     print("whole")
    whole
    interrupted
    >>> _ = signal.signal(signal.SIGINT, before)
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers: dict[int, Any] = {
        number: previous for number in _NUMBERS if callable(previous := signal.getsignal(number))
    }
    waiting: dict[int, FrameType | None] = {}
    inside = True

    def note(number: int, frame: FrameType | None) -> None:
        if inside and number not in waiting:
            waiting[number] = frame
        else:  # also where a signal, in the code below, kept the handlers from being put back
            handlers[number](number, frame)

    try:
        for number in handlers:
            signal.signal(number, note)
        yield
    finally:
        inside = False
        with ExitStack() as after:  # all callbacks run, even if one raises
            for number, frame in waiting.items():
                after.callback(handlers[number], number, frame)
            for number, handler in handlers.items():
                after.callback(signal.signal, number, handler)
