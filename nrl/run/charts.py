"""Charts as SVG: numbers to lines, areas and shades.

A chart is a dict for ``report.html.jinja``: paths and ticks in the chart's own units, and the numbers themselves, for
the script that shows them under the pointer.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nrl.log import NOISE, format_number, noise_limit

__all__ = [
    "BOX",
    "NARROW",
    "Array",
    "Axis",
    "Histogram",
    "Series",
    "bars",
    "curve",
    "heatmap",
    "number",
    "phase_colors",
    "precise",
    "stack",
    "to_float",
]

type Array = NDArray[np.floating[Any]]
type Series = tuple[Array, Array]  # steps, values


BOX = {"width": 360, "height": 180, "left": 50, "right": 352, "top": 8, "bottom": 158}  # sizes of a chart and its plot
_TOP, _BOTTOM = BOX["top"], BOX["bottom"]
NARROW = 252  # the right end of the plot of a chart in a row of many
_POINTS = 1000  # points of a curve, at most
_COLUMNS, _BINS, _SHADES = 100, 20, 8  # columns of a heatmap, at most


class Histogram(NamedTuple):
    """Counts in bins of equal width, of one step."""

    step: float
    low: float
    high: float
    counts: Array


class Axis:
    """Places of values between ``start`` and ``end``; a single value is in the middle.

    Args:
        low: the lowest value.
        high: the highest value.
        start: the place of the lowest value.
        end: the place of the highest value.
        width: the least difference between the values at both ends. An axis that is widened to it begins or ends at 0
            where it would cross 0 and the values do not.
    """

    def __init__(self, low: float, high: float, start: float, end: float, width: float = 0.0) -> None:
        if high - low <= NOISE * max(abs(low), abs(high)):
            margin = 0.5 if float(low).is_integer() and abs(low) < 1e6 else abs(low) / 10
            low, high = low - margin, high + margin
        elif high - low < width:
            middle = (low + high) / 2
            if low >= 0:
                middle = max(middle, width / 2)
            elif high <= 0:
                middle = min(middle, -width / 2)
            low, high = middle - width / 2, middle + width / 2
        self.low, self.high, self.start, self.end = low, high, start, end

    def __call__(self, values: Any) -> Any:
        """Return the positions of values, in units of the chart."""
        return self.start + (np.asarray(values) - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, count: int, integers: bool = False) -> list[tuple[str, float]]:
        """Return at most about ``count`` round numbers, as text, and their positions."""
        rough = (self.high - self.low) / count
        power = 10.0 ** math.floor(math.log10(rough))
        width = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
        width = max(width, 1.0) if integers else width
        places = np.arange(math.ceil(self.low / width - 1e-9), math.floor(self.high / width + 1e-9) + 1)
        # This many digits distinguish two ticks.
        digits = math.ceil(math.log10(max(abs(self.low), abs(self.high)) / width)) + 1
        return [
            (precise(multiple * width, max(digits, 6)), round(float(self(multiple * width)), 1)) for multiple in places
        ]


def number(value: float, name: str = "") -> str:
    """Format a number as the log does, with a typographic minus; ``name`` is that of its metric.

    >>> number(-0.000012345), number(1234567), number(0.5), number(math.nan)
    ('−1.234e−5', '1.235M', '0.5', 'undefined')
    """
    return format_number(value, name).replace("-", "−") if math.isfinite(value) else "undefined"


def precise(value: float, digits: int) -> str:
    """Format a number that has to be told from its neighbours, such as a tick or the number of a row.

    >>> precise(1048581, 9), precise(1.00001, 6), precise(-1e-13, 6)
    ('1048581', '1.00001', '−1e−13')
    """
    if not math.isfinite(value):
        return "undefined"
    mantissa, e, exponent = f"{value:.{digits}g}".partition("e")
    return mantissa.replace("-", "−") + (f"e{int(exponent)}".replace("-", "−") if e else "")


def to_float(value: Any) -> float:
    """Return a value of a log as a number to draw; NaN for anything else.

    >>> to_float(2), to_float("two"), to_float(10**400)
    (2.0, nan, nan)
    """
    return float(value) if isinstance(value, int | float) and abs(value) < 1e300 else math.nan


def _axis_of_values(name: str, low: float, high: float, start: float, end: float) -> Axis:
    """Return the axis of a metric's values, on which rounding looks flat.

    Rounding moves extremes and sums of about 1 by up to 10 `NOISE`, and large values by up to `NOISE` of their size.
    The axis is at least 10 times as wide.
    """
    return Axis(low, high, start, end, max(100 * noise_limit(name), 10 * NOISE * max(abs(low), abs(high))))


def _chart(kind: str, name: str, x: Axis, y: Axis, steps: Array, series: Mapping[str, Array]) -> dict[str, Any]:
    return {
        "kind": kind,
        "name": name,
        "x": x.ticks(5, integers=True),
        "y": y.ticks(4),
        "right": x.end,
        "noise": noise_limit(name),
        "x_range": f"{x.low:.9g} {x.high:.9g}",
        "steps": " ".join(f"{step:.9g}" for step in steps),
        "series": ";".join(" ".join(f"{value:.5g}" for value in values) for values in series.values()),
        "labels": ";".join(series),
    }


def curve(name: str, steps: Array, values: Array, x: Axis) -> dict[str, Any]:
    """Draw a line through the values, broken where they are not finite, and a moving mean of many values."""
    finite = np.isfinite(values)
    low, high = float(values[finite].min()), float(values[finite].max())
    y = _axis_of_values(name, low, high, _BOTTOM - 6, _TOP + 6)
    shown = _select_points(values)
    window = max(5, int(finite.sum()) // 20) | 1
    smooth = finite.sum() >= 50 and high - low > NOISE * max(abs(low), abs(high))
    middle = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), _POINTS // 2)).astype(int))
    return _chart("curve", name, x, y, steps[shown], {"": values[shown]}) | {
        "last": number(values[finite][-1], name),
        "lost": int((~finite).sum()),
        "path": _path(x(steps[shown]), y(values[shown])),
        "dots": _path(x(steps[finite]), y(values[finite]), joined=False) if finite.sum() <= 30 else "",
        "window": window if smooth else 0,
        "mean": _path(x(steps[middle]), y(_moving_mean(values, window)[middle])) if smooth else "",
    }


def _select_points(values: Array) -> np.ndarray:
    """Select the values to draw: the first, the last, and the lowest and highest of each few between."""
    if len(values) <= _POINTS:
        return np.arange(len(values))
    chosen = {0, len(values) - 1}
    for part in np.array_split(np.arange(len(values)), _POINTS // 2 - 1):
        finite = part[np.isfinite(values[part])]
        chosen |= {finite[values[finite].argmin()], finite[values[finite].argmax()]} if len(finite) else {part[0]}
    return np.array(sorted(chosen))


def _moving_mean(values: Array, window: int) -> Array:
    """Return the mean of the finite values in a window around each value; NaN: there is none."""
    finite, half = np.isfinite(values), window // 2
    totals, counts = (np.concatenate([[0.0], np.cumsum(column)]) for column in (np.where(finite, values, 0.0), finite))
    index = np.arange(len(values))
    first, end = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    count = counts[end] - counts[first]
    mean: Array = np.where(count > 0, (totals[end] - totals[first]) / np.maximum(count, 1), np.nan)
    return mean


def _path(x: Array, y: Array, joined: bool = True) -> str:
    """Return an SVG path; with round ends it also shows a point without neighbours."""
    parts, before = [], False
    for across, down in zip(x.tolist(), y.tolist(), strict=True):
        if math.isfinite(down):
            parts.append(f"{'L' if before and joined else 'M'}{across:.1f} {down:.1f}")
            parts += [] if before and joined else ["h0"]
        before = math.isfinite(down)
    return "".join(parts)


def bars(name: str, edges: Array, counts: Array, x: Axis) -> dict[str, Any]:
    """Draw a histogram: a bar for each bin, named by its middle."""
    y = Axis(0.0, float(counts.max()) or 1.0, _BOTTOM, _TOP + 4)
    sides, heights = x(edges), y(counts)
    path = "".join(
        f"M{begin + 0.5:.1f} {_BOTTOM}V{top:.1f}H{end - 0.5:.1f}V{_BOTTOM}Z"
        for (begin, end), top, count in zip(pairwise(sides.tolist()), heights.tolist(), counts.tolist(), strict=True)
        if count
    )
    chart = _chart("curve", name, x, y, (edges[1:] + edges[:-1]) / 2, {"": counts})
    return chart | {"x": x.ticks(5), "areas": ["", path], "last": f"{int(counts.sum())} tasks"}


# Variables of report.css, so that they fit the page by day and by night
_PHASE_COLORS = {
    "rollout": "var(--second)",
    "train": "var(--ink)",
    "publish": "var(--third)",
    "save": "var(--fourth)",
    "data": "var(--fifth)",
}
# Chosen one after the other, each as far as possible (in CIELAB) from those above and before it
_OTHER_COLORS = (
    "#20b620", "#d93826", "#635136", "#d926d9", "#628217", "#176282",
    "#c9a99c", "#6e26d9", "#1c9c4f", "#c9695e", "#26b5d9", "#a7b474",
)  # fmt: skip


def phase_colors(names: Iterable[str]) -> dict[str, str]:
    """Return the color of each phase, in CSS: its own for a phase of nrl's loops, else the next of 12 others.

    A page has one such mapping, so that a phase has the same color in all of its charts.

    >>> phase_colors(["train", "sort", "train", "data"])
    {'train': 'var(--ink)', 'sort': '#20b620', 'data': 'var(--fifth)'}
    """
    other_colors = itertools.cycle(_OTHER_COLORS)
    return {name: _PHASE_COLORS.get(name) or next(other_colors) for name in dict.fromkeys(names)}


def stack(phases: Mapping[str, Series], x: Axis) -> dict[str, Any]:
    """Draw the seconds of each phase, stacked."""
    steps = np.unique(np.concatenate([phase_steps for phase_steps, _ in phases.values()]))
    seconds = [np.interp(steps, phase_steps[np.isfinite(v)], v[np.isfinite(v)]) for phase_steps, v in phases.values()]
    shown = _select_points(np.sum(seconds, axis=0))
    levels = np.cumsum([np.zeros(len(steps)), *seconds], axis=0)[:, shown]
    y = Axis(0.0, float(levels.max()) or 1.0, _BOTTOM, _TOP + 4)
    across = np.concatenate([x(steps[shown]), x(steps[shown])[::-1]])
    labels = [key.removeprefix("time/") for key in phases]
    chart = _chart("stack", "time, s", x, y, steps[shown], {k: v[shown] for k, v in zip(labels, seconds, strict=True)})
    areas = [np.concatenate([y(upper), y(lower)[::-1]]) for lower, upper in pairwise(levels)]
    return chart | {"areas": [_path(across, area) + "Z" for area in areas], "legend": labels, "unit": "s"}


def heatmap(name: str, histograms: Sequence[Histogram], x: Axis) -> dict[str, Any]:
    """Draw the share of rows in each bin of a common scale, for each few steps; larger shares are darker."""
    low, high = min(histogram.low for histogram in histograms), max(histogram.high for histogram in histograms)
    y = _axis_of_values(name, low, high, _BOTTOM, _TOP)
    edges = np.linspace(y.low, y.high, _BINS + 1)
    parts = np.array_split(np.arange(len(histograms)), min(len(histograms), _COLUMNS))
    columns = np.array([np.sum([_rebin(histograms[i], edges) for i in part], axis=0) for part in parts])
    shares = columns / columns.sum(axis=1, keepdims=True)
    firsts, lasts = ([histograms[part[end]].step for part in parts] for end in (0, -1))
    between = [(last + first) / 2 for last, first in zip(lasts[:-1], firsts[1:], strict=True)]
    ends = (firsts[0], lasts[-1]) if len(parts) > 1 else (x.low, x.high)
    sides, heights = x([ends[0], *between, ends[1]]), y(edges)
    shades: list[str] = [""] * (_SHADES + 1)
    for (column, row), share in np.ndenumerate(shares):
        begin, end, up, down = sides[column], sides[column + 1], heights[row + 1], heights[row]
        shades[math.ceil(math.sqrt(share) * _SHADES)] += f"M{begin:.1f} {down:.1f}V{up:.1f}H{end:.1f}V{down:.1f}Z"
    means = (shares * (edges[1:] + edges[:-1]) / 2).sum(axis=1)
    return _chart("heat", name, x, y, np.array(firsts), {"mean": means}) | {
        "shades": [(round(level / _SHADES, 3), path) for level, path in enumerate(shades) if level and path],
        "sides": " ".join(f"{side:.1f}" for side in sides),
        "bins": " ".join(f"{edge:.5g}" for edge in edges),
        "shares": ";".join(" ".join(f"{100 * share:.3g}" for share in column) for column in shares),
    }


def _rebin(histogram: Histogram, edges: Array) -> Array:
    """Return the counts in other bins; the rows of a bin are spread evenly, rows of one value stay together."""
    counts: Array
    if histogram.low == histogram.high:
        counts = np.histogram([histogram.low], edges)[0] * histogram.counts.sum()
        return counts
    own_edges = np.linspace(histogram.low, histogram.high, len(histogram.counts) + 1)
    counts = np.diff(np.interp(edges, own_edges, np.concatenate([[0.0], np.cumsum(histogram.counts)])))
    return counts
