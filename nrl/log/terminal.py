"""The progress of a run: a live panel on a terminal, plain lines elsewhere.

The panel is made of parts of rich. `rich.progress` is not among them: it estimates the time left from the last 30
seconds, so it has no estimate if steps are longer, and it shows bars and no metrics.
"""

import math
import sys
import time
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Self

import attrs
from rich.box import ROUNDED
from rich.console import Console, Group, RenderableType
from rich.control import Control
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.segment import ControlType
from rich.table import Table
from rich.text import Text

from nrl.log.number_text import format_number, format_seconds

__all__ = ["Progress", "duration"]

_SHOWN = (
    "reward", "eval/reward", "loss", "eval/loss", "grad_norm", "kl", "mismatch/kl", "length", "lag", "invalid",
    "skipped", "tokens_per_second",
)  # fmt: skip
_QUIET_AT_ZERO = ("lag", "invalid", "skipped")
_DRAWN = ("reward", "loss")  # metrics drawn as sparklines
_WIDE = 60  # columns, from which the panel has two metrics a line
_REST = 0.1  # seconds between two drawings of the panel, which takes milliseconds


def duration(seconds: float) -> str:
    """Seconds as a person reads them.

    >>> duration(75), duration(3700)
    ('1:15', '1:01:40')
    """
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{remainder:02}" if hours else f"{minutes}:{remainder:02}"


@attrs.define(eq=False)
class _Seen:
    """The last step of a loop, and the history of its metrics."""

    name: str
    steps: int
    first: int
    start: float
    step: int = -1
    shown: float = -math.inf  # the time of the last output
    numbers: dict[str, float] = attrs.field(factory=dict)
    history: dict[str, list[float]] = attrs.field(factory=dict)

    def add(self, step: int, steps: int, numbers: Mapping[str, float]) -> None:
        self.step, self.steps, self.numbers = step, steps, dict(numbers)
        for key in _DRAWN:
            if math.isfinite(value := numbers.get(key, math.nan)):
                self.history.setdefault(key, []).append(value)

    @property
    def is_done(self) -> bool:
        return self.step >= self.steps - 1

    @property
    def chosen(self) -> dict[str, float]:
        shown = ((key, self.numbers[key]) for key in _SHOWN if key in self.numbers)
        return {key: value for key, value in shown if value != 0 or key not in _QUIET_AT_ZERO}

    def format_time_left(self, timestamp: float) -> str:
        done = self.step - self.first
        return duration((timestamp - self.start) / done * (self.steps - 1 - self.step)) if done else "?"


class Progress:
    """The progress of a run: one live panel on a terminal, a plain line every ``interval`` seconds elsewhere.

    The panel shows the step, the time that is left, the main metrics, and the times of the phases. Each loop has a
    panel of its own, which stays when the loop has ended. A loop within a step of another, such as an evaluation, takes
    the panel's place until the outer one goes on. Other output appears above the panel.

    Args:
        interval: seconds between plain lines; the first and the last step always have one.

    >>> with Progress() as progress:  # doctest: +ELLIPSIS
    ...     progress.show("train", 0, 1, {"step": 0, "reward": 0.25, "time/total": 1.5})
    train 1/1 | reward 0.25 | ...
    """

    def __init__(self, interval: float = 5.0) -> None:
        self._interval = interval
        self._loops: list[_Seen] = []  # nested loops; the last is shown
        self._console = Console(file=sys.stdout)
        self._live: Live | None = None
        self._size = self._console.size

    def show(self, phase: str, step: int, steps: int, numbers: Mapping[str, float]) -> None:
        """Show a step that has ended.

        Args:
            phase: the loop; the time that is left is its own.
            step: from 0.
            steps: of the loop, in all.
            numbers: all measurements; the panel chooses some.
        """
        timestamp, draws = time.monotonic(), self._can_draw()
        loop = self._loop(phase, step, steps, timestamp)
        loop.add(step, steps, numbers)
        if timestamp - loop.shown < (_REST if draws else self._interval) and not loop.is_done:
            return
        loop.shown = timestamp
        if draws:
            self._draw(loop, timestamp)
        else:
            metrics = (f"{key} {format_number(value, key)}" for key, value in loop.chosen.items())
            line = [f"{phase} {step + 1}/{steps}", *metrics, f"{loop.format_time_left(timestamp)} left"]
            print(" | ".join(line), flush=True)  # noqa: T201 (this is the module that prints)

    def _loop(self, phase: str, step: int, steps: int, timestamp: float) -> _Seen:
        names = [loop.name for loop in self._loops]
        if phase in names:
            del self._loops[names.index(phase) + 1 :]  # loops within one of its steps have ended
            if step > self._loops[-1].step:
                return self._loops[-1]
            self._loops.pop()  # it starts anew
        if len(self._loops) == 1 and self._loops[0].is_done:
            self._stop()
            self._loops.clear()
        self._loops.append(_Seen(phase, steps, step, timestamp))
        return self._loops[-1]

    def _can_draw(self) -> bool:
        # rich also calls a file a terminal where FORCE_COLOR is set, and raises where a character has no encoding.
        unicode = self._console.encoding.startswith("utf")
        return self._console.file.isatty() and unicode and not self._console.is_dumb_terminal

    def _draw(self, loop: _Seen, timestamp: float) -> None:
        if self._live is None:
            # rich would print stderr on the terminal even if it goes to a file.
            self._live = Live(console=self._console, auto_refresh=False, redirect_stderr=sys.stderr.isatty())
            self._live.start()
            self._console.show_cursor(True)  # A killed run leaves a visible cursor.
        elif self._console.size != self._size:
            # The terminal has wrapped the old panel's lines in its own way, so its beginning is unknown.
            self._console.control(Control.home(), Control((ControlType.ERASE_IN_LINE, 2)), Control.clear())
        self._size = self._console.size
        self._live.update(_panel(loop, timestamp, self._console.width), refresh=True)

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()


def _panel(loop: _Seen, timestamp: float, width: int) -> Panel:
    columns = 2 if width >= _WIDE else 1
    inner = width - 4
    cells = [_cell(key, value, loop.history.get(key, ()), inner // columns) for key, value in loop.chosen.items()]
    metrics = Table.grid(padding=(0, 2), expand=True)
    for _ in range(columns):
        metrics.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    for start in range(0, len(cells), columns):
        metrics.add_row(*cells[start : start + columns])
    bar = Table.grid(padding=(0, 1), expand=True)
    bar.add_column(ratio=1)
    bar.add_column(no_wrap=True)
    bar.add_row(
        ProgressBar(total=loop.steps, completed=loop.step + 1),
        Text(f"{duration(timestamp - loop.start)} · {loop.format_time_left(timestamp)} left", style="dim"),
    )
    rows: list[RenderableType] = [bar, metrics]
    rows += [Text(" · ".join(times), style="dim", overflow="ellipsis") for times in [_times(loop.numbers)] if times]
    title = Text.assemble((loop.name, "bold"), f" {loop.step + 1}/{loop.steps}")
    return Panel(Group(*rows), title=title, title_align="left", box=ROUNDED, border_style="blue")


def _cell(key: str, value: float, history: Sequence[float], width: int) -> Text:
    name = key.replace("tokens_per_second", "tokens/s").replace("grad_norm", "grad norm")
    text = Text.assemble((f"{name:<11} ", "dim"), f"{format_number(value, key):<10} ")
    return text.append(_sparkline(history, min(24, width - len(text) - 2)), style="cyan")


def _times(numbers: Mapping[str, float]) -> list[str]:
    """Return seconds and share of each phase of the step, and of the rest."""
    total = numbers.get("time/total", math.nan)
    phases = {key.removeprefix("time/"): value for key, value in numbers.items() if key.startswith("time/")}
    phases.pop("total", None)
    if not total > 0:
        return []
    phases["other"] = total - sum(phases.values())
    return [
        f"{name} {format_seconds(value)} {value / total:.0%}"
        for name, value in phases.items()
        if value >= 0.005 * total
    ]


_LEVELS = "▁▂▃▄▅▆▇█"


def _sparkline(values: Sequence[float], width: int) -> str:
    """Means of equal stretches, from lowest to highest."""
    if len(values) < 2 or width < 4:
        return ""
    count, size = min(width, len(values)), len(values)
    means = [fmean(values[index * size // count : (index + 1) * size // count]) for index in range(count)]
    low, high = min(means), max(means)
    scale = (len(_LEVELS) - 1) / (high - low) if high > low else 0.0
    return "".join(_LEVELS[round((mean - low) * scale)] for mean in means)
