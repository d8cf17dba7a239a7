"""Waits that may be long, which so say what they wait for."""

import time
from collections.abc import Callable

__all__ = ["SILENCE", "waited"]

SILENCE = 10.0
"""Seconds after which a wait says what it is for.

>>> SILENCE
10.0
"""

_LONGEST = 600.0  # seconds between two lines


def waited(
    ready: Callable[[float], bool], limit: float, told: Callable[[float], str], silence: float = SILENCE
) -> bool:
    """Wait until something is ready, and print what is waited for: after a while, and then less and less often.

    Args:
        ready: waits for so many seconds at most, and returns whether it is.
        limit: seconds.
        told: the line to print, of the seconds so far.
        silence: seconds before the first line; each further one takes twice as long as the one before.

    Returns:
        Whether it was ready in time.

    >>> from threading import Event
    >>> waited(Event().wait, 0.08, lambda seconds: "waiting for Godot", silence=0.02)
    waiting for Godot
    waiting for Godot
    False
    """
    started = time.monotonic()
    while (left := limit - (time.monotonic() - started)) > silence:
        if ready(silence):
            return True
        print(told(time.monotonic() - started), flush=True)  # noqa: T201
        silence = min(2 * silence, _LONGEST)
    return bool(ready(max(0.0, left)))
