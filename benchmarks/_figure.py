"""Draw curves over steps as one SVG, for a page of the documentation. Needs numpy alone."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nrl.run.charts import Axis

__all__ = ["curves", "smooth"]

_STYLES = (("#0072b2", ""), ("#009e73", ""), ("#d55e00", ""), ("#e6a100", ""), ("#777777", "7 4"), ("#aa3377", "2 3"))


def smooth(values: Sequence[float], width: int) -> list[float]:
    """The mean of each value and those within ``width // 2`` steps of it.

    >>> smooth([0.0, 3.0, 0.0, 3.0], 3)
    [1.5, 1.0, 2.0, 1.5]
    """
    half = width // 2
    return [statistics.fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def curves(found: Mapping[str, Sequence[Sequence[float]]], what: str, width: int = 11) -> str:
    """Values between 0 and 1 over steps, a moving mean, as SVG; six names at most.

    Args:
        found: for each name the values of its repetitions: their mean is a line, from the lowest to the highest a band.
        what: the values are.
        width: of the moving mean, in steps.

    >>> drawn = curves({"one": [[0.0, 0.5, 1.0], [0.0, 0.4, 0.8]], "other": [[0.1, 0.2, 0.3]]}, "reward")
    >>> drawn.count("<polyline"), drawn.count("<polygon"), drawn.count("other")
    (2, 2, 1)
    """
    most = max(len(values) for repetitions in found.values() for values in repetitions)
    x, y = Axis(1, most, 50, 700), Axis(0.0, 1.0, 330, 14)
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 372" font-family="sans-serif" font-size="12">',
        '<rect width="720" height="372" fill="#fff"/>',
        f'<text x="375" y="366" text-anchor="middle">step ({what}: moving mean over {width} steps)</text>',
    ]
    for label, at in y.ticks(5):
        parts.append(f'<path d="M50 {at}H700" stroke="#e3e6eb"/>')
        parts.append(f'<text x="43" y="{at + 4}" text-anchor="end">{label}</text>')
    parts += [f'<text x="{at}" y="347" text-anchor="middle">{label}</text>' for label, at in x.ticks(6, integers=True)]
    for row, (name, repetitions) in enumerate(found.items()):
        colour, dashes = _STYLES[row]
        stroke = f'stroke="{colour}" stroke-width="1.8" stroke-dasharray="{dashes}"'
        values = np.array([smooth(each, width) for each in repetitions])
        across = x(np.arange(1, values.shape[1] + 1))
        low, high, mean = (_points(across, y(each)) for each in (values.min(0), values.max(0), values.mean(0)))
        parts.append(f'<polygon points="{" ".join(low + high[::-1])}" fill="{colour}" opacity="0.13"/>')
        parts.append(f'<polyline points="{" ".join(mean)}" fill="none" {stroke}/>')
        parts.append(f'<path d="M520 {212 + 19 * row}h32" {stroke}/><text x="560" y="{216 + 19 * row}">{name}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _points(across: Any, down: Any) -> list[str]:
    return [f"{a:.1f},{b:.1f}" for a, b in zip(across.tolist(), down.tolist(), strict=True)]
