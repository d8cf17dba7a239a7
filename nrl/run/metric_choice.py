"""The choice of metrics that a report shows first, and of those that it folds away."""

import re
from collections.abc import Iterable, Mapping

import numpy as np

from nrl.log import NOISE, noise_limit
from nrl.run.charts import Array, Series

__all__ = ["is_flat", "key_metrics", "order_metrics", "time_phases"]

# What a reader looks for, one chart each. Of each line the first metric that exists is shown.
_KEY = tuple(
    tuple(map(re.compile, names))
    for names in (
        ("reward", "accuracy", "loss"),
        ("margin",),
        ("eval/reward", "eval/accuracy", "eval/pass@1", "eval/loss", r"(.+/)?eval/.+"),
        ("length", "eval/length", r"length/.+"),
        ("entropy", "kl", "approx_kl", "mismatch/kl", r"(.+[/_])?(entropy|kl)(/.+)?"),
    )
)
# The order of the charts that follow; all others come last.
_ORDER = tuple(
    map(re.compile, (r"reward(/|$)", r"loss(/|$)", r"eval/", r"mismatch/", r"(.*[_/])?kl(/|$)", r"length", r"accuracy"))
)


def is_flat(name: str, values: Array) -> bool:
    """Check whether a curve says no more than one number: it is constant, or differs by rounding alone.

    Rounding is below 1e-6, beside 1 or relative to the values; of learning rates it is relative alone. A single value
    is no curve, and a curve with values that are not finite is not flat.

    >>> is_flat("loss", np.array([2e-8, -1e-8])), is_flat("lr", np.array([2e-8, 1e-8])), is_flat("lag", np.zeros(3))
    (True, False, True)
    """
    if len(values) < 2 or not np.isfinite(values).all():
        return False
    width, size = float(values.max() - values.min()), float(np.abs(values).max())
    return width <= NOISE * size or width < noise_limit(name)


def key_metrics(names: Iterable[str]) -> list[str]:
    """Return the metrics of a report's first row, such as reward, eval/reward, length and entropy.

    >>> key_metrics(["grad_norm", "loss", "eval/loss", "lr"])
    ['loss', 'eval/loss']
    """
    available = list(names)
    firsts = [
        next((name for pattern in patterns for name in available if pattern.fullmatch(name)), None) for patterns in _KEY
    ]
    return list(dict.fromkeys(name for name in firsts if name is not None))


def order_metrics(names: Iterable[str]) -> list[str]:
    """Sort metrics as a report shows them: rewards and losses first, then in the order in which they were logged."""

    def rank(name: str) -> int:
        return next((index for index, pattern in enumerate(_ORDER) if pattern.match(name)), len(_ORDER))

    return sorted(names, key=rank)


def time_phases(metrics: Mapping[str, Series], samples: bool, saves: Mapping[float, float]) -> dict[str, Series]:
    """Split the time of each step into the phases that the loop has, in seconds.

    Args:
        metrics: of the loop.
        samples: whether its batches come from rollouts; else the wait for a batch is that for data.
        saves: seconds that `run.save` took, by step.

    Returns:
        By name, in order: ``rollout`` or ``data``, ``train``, and ``publish`` and ``save``, where they take at least
        0.5 % of the time. Empty: the times were not logged.
    """
    if not {"time/rollout", "time/train"} <= metrics.keys():
        return {}
    steps, train = metrics["time/train"]
    publish = _seconds_at(steps, dict(zip(*map(np.ndarray.tolist, metrics.get("time/publish", _NONE)), strict=True)))
    phases = {
        "rollout" if samples else "data": metrics["time/rollout"],
        "train": (steps, np.maximum(train - publish, 0.0)),
        "publish": (steps, publish),
        "save": (steps, _seconds_at(steps, saves)),
    }
    seconds = {name: float(np.nansum(phase[1])) for name, phase in phases.items()}
    least = 0.005 * sum(seconds.values())
    return {name: phases[name] for name in phases if name not in ("publish", "save") or seconds[name] > least}


_NONE: Series = (np.empty(0), np.empty(0))


def _seconds_at(steps: Array, seconds: Mapping[float, float]) -> Array:
    column: Array = np.nan_to_num(np.array([seconds.get(step, 0.0) for step in steps.tolist()], dtype=float))
    return column
