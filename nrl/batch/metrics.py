"""Metrics as sums: `Mean`, `Sum`, `Max`, `Min` and `Ess`, with `merge` and `finalize`.

A reduced number stays ``(total, weight)`` until somebody reads it. So adding up over rows, micro-batches, ranks or
steps gives the same value in any order. `merge` is the only rule that combines metrics, and `finalize` the only place
that divides.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from nrl.arguments import with_article
from nrl.errors import ArgumentError

__all__ = [
    "Ess",
    "Max",
    "Mean",
    "Metrics",
    "Min",
    "Reduced",
    "Sum",
    "finalize",
    "merge",
    "over_something",
    "prefixed",
    "without",
]


class Mean(NamedTuple):
    """A mean before its division: ``total / weight``.

    Args:
        total: scalar, the weighted sum.
        weight: scalar, the divisor. A loss's weight is a function of the batch alone.

    >>> finalize({"loss": Mean(torch.tensor(6.0), torch.tensor(4.0))})
    {'loss': 1.5}
    """

    total: Tensor
    weight: Tensor


class Sum(NamedTuple):
    """A number that adds up, such as a count of tokens.

    >>> finalize(merge({"tokens": Sum(torch.tensor(3))}, {"tokens": Sum(torch.tensor(4))}))
    {'tokens': 7.0}
    """

    total: Tensor


class Max(NamedTuple):
    """The largest of the numbers; minus infinity of none.

    >>> finalize(merge({"ratio": Max(torch.tensor(3.0))}, {"ratio": Max(torch.tensor(4.0))}))
    {'ratio': 4.0}
    """

    value: Tensor


class Min(NamedTuple):
    """The smallest of the numbers; infinity of none.

    >>> finalize(merge({"ratio": Min(torch.tensor(3.0))}, {"ratio": Min(torch.tensor(4.0))}))
    {'ratio': 3.0}
    """

    value: Tensor


class Ess(NamedTuple):
    """The effective sample size of weighted samples, as a fraction of their number; of none, NaN.

        total² / (weight squares),   total = Σ w,   squares = Σ w²

    1 if all weights are equal, 1 / weight if one sample has all the weight. Scaling all weights does not change it.

    Args:
        total: scalar, the sum of the weights, none of which is negative.
        squares: scalar, the sum of their squares.
        weight: scalar, how many there are.

    Source: A. Kong, A note on importance sampling using standardized weights (1992), over the number of samples.

    >>> w = torch.tensor([1.0, 3.0])
    >>> finalize({"ess": Ess(w.sum(), w.square().sum(), torch.tensor(2.0))})
    {'ess': 0.8}
    """

    total: Tensor
    squares: Tensor
    weight: Tensor


type Reduced = Mean | Sum | Max | Min | Ess
"""A number that is still being added up."""

type Metrics = dict[str, Mean | Sum | Max | Min | Ess]
"""Reduced numbers by name: what losses and steps return.

>>> metrics: Metrics = {"tokens": Sum(torch.tensor(3))}
"""


def merge(a: Mapping[str, Reduced], b: Mapping[str, Reduced]) -> Metrics:
    """Combine two sets of metrics; a key of only one set stays as it is.

    Associative and commutative (to rounding), with ``{}`` as its identity.

    Raises:
        TypeError: a key is of two kinds, for example a `Mean` here and a `Sum` there.

    >>> a = {"kl": Mean(torch.tensor(1.0), torch.tensor(2.0))}
    >>> finalize(merge(a, {"kl": Mean(torch.tensor(5.0), torch.tensor(1.0))}))
    {'kl': 2.0}
    """
    merged = dict(a)
    for key, value in b.items():
        merged[key] = _combine(key, merged[key], value) if key in merged else value
    return merged


def over_something(metrics: Mapping[str, Reduced]) -> Metrics:
    """The metrics without means over nothing.

    >>> zero, one = torch.tensor(0.0), torch.tensor(1.0)
    >>> list(over_something({"a": Mean(zero, one), "b": Mean(zero, zero)}))
    ['a']
    """
    return {key: value for key, value in metrics.items() if not (isinstance(value, Mean) and value.weight == 0)}


def prefixed(prefix: str, metrics: Mapping[str, Reduced]) -> Metrics:
    """Add a prefix to the names of metrics, to tell two models or sources apart.

    >>> finalize(prefixed("critic/", {"loss": Sum(torch.tensor(2.0))}))
    {'critic/loss': 2.0}
    """
    return {f"{prefix}{key}": value for key, value in metrics.items()}


def without(prefix: str, metrics: Mapping[str, Reduced]) -> Metrics:
    """Drop the metrics with a prefix, such as ``"mismatch/"``, which only a batch's first update can measure.

    >>> finalize(without("mismatch/", {"loss": Sum(torch.tensor(2.0)), "mismatch/kl": Sum(torch.tensor(1.0))}))
    {'loss': 2.0}
    """
    return {key: value for key, value in metrics.items() if not key.startswith(prefix)}


def _combine(key: str, a: Reduced, b: Reduced) -> Reduced:
    match a, b:
        case Mean(), Mean():
            return Mean(a.total + b.total, a.weight + b.weight)
        case Sum(), Sum():
            return Sum(a.total + b.total)
        case Max(), Max():
            return Max(torch.maximum(a.value, b.value))
        case Min(), Min():
            return Min(torch.minimum(a.value, b.value))
        case Ess(), Ess():
            return Ess(a.total + b.total, a.squares + b.squares, a.weight + b.weight)
    raise ArgumentError(
        f"merge: metric '{key}' is {with_article(type(a).__name__)} on one side and {with_article(type(b).__name__)} "
        "on the other; "
        "give the two numbers different names, or reduce both the same way"
    )


def finalize(metrics: Mapping[str, Reduced]) -> dict[str, float]:
    """Read metrics as plain numbers. A mean of weight 0 is NaN: nothing was measured.

    Raises:
        TypeError: a value is none of `Mean`, `Sum`, `Max`, `Min` and `Ess`.

    >>> finalize({"n": Sum(torch.tensor(2)), "loss": Mean(torch.tensor(1.0), torch.tensor(0.0))})
    {'n': 2.0, 'loss': nan}
    """
    return {key: _to_number(key, value) for key, value in metrics.items()}


def _to_number(key: str, value: Reduced) -> float:
    match value:
        case Mean(total, weight):
            divisor = float(weight.detach())
            return float(total.detach()) / divisor if divisor != 0 else float("nan")
        case Sum(number) | Max(number) | Min(number):
            return float(number.detach())
        case Ess(total, squares, weight):
            return _ess(*(float(x.detach()) for x in (total, squares, weight)))
    raise ArgumentError(
        f"finalize: metric '{key}' is {with_article(type(value).__name__)}; return a Mean, Sum, Max, Min or Ess"
    )


def _ess(total: float, squares: float, weight: float) -> float:
    if weight == 0 or squares == 0:
        return float("nan")
    fraction = (total / weight) * (total / squares)
    return 1.0 if fraction > 1 else fraction  # Rounding may exceed 1; NaN stays NaN.
