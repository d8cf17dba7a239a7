"""Where a run is, on the terminal."""

import math
import sys
import time
from collections.abc import Mapping
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

__all__ = ["Progress", "duration"]


def duration(seconds: float) -> str:
    """Seconds as a person reads them.

    >>> duration(75), duration(3700)
    ('1:15', '1:01:40')
    """
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


class Progress:
    """A line that shows where a run is: live on a terminal, a plain line every ``interval`` seconds elsewhere.

    Args:
        interval: seconds between plain lines; the first and the last step always have one.

    >>> with Progress() as progress:  # doctest: +ELLIPSIS
    ...     progress.show("train", 0, 1, {"reward": 0.25})
    train 1/1 | reward 0.25 | ...
    """

    def __init__(self, interval: float = 5.0) -> None:
        self._console = Console(file=sys.stdout)
        self._live: Live | None = None
        self._interval, self._last = interval, -math.inf
        self._phase, self._start, self._first = "", 0.0, 0

    def show(self, phase: str, step: int, steps: int, numbers: Mapping[str, float]) -> None:
        """Show a step that has ended.

        Args:
            phase: which loop; the time that is left is counted within it.
            step: from 0.
            steps: of the loop, in all.
            numbers: what to show, in this order.
        """
        now = time.monotonic()
        if phase != self._phase:
            self._phase, self._start, self._first, self._last = phase, now, step, -math.inf
        done = step - self._first
        left = duration((now - self._start) / done * (steps - 1 - step)) if done else "?"
        parts = [
            f"{phase} {step + 1}/{steps}",
            *(f"{key} {value:.4g}" for key, value in numbers.items()),
            f"{left} left",
        ]
        if sys.stdout.isatty():  # rich also calls a file a terminal where FORCE_COLOR is set
            self._show_live(parts)
        elif now - self._last >= self._interval or step == steps - 1:
            self._last = now
            print(" | ".join(parts), flush=True)  # noqa: T201 (this is the module that prints)

    def _show_live(self, parts: list[str]) -> None:
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        table = Table.grid(padding=(0, 2))
        table.add_row(*parts)
        self._live.update(table, refresh=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
