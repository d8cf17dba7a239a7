"""Checks of the arguments of losses and their parts, with the same messages everywhere."""

import math
from numbers import Real
from typing import Any

from torch import Tensor

from nrl.errors import ArgumentError, BatchError, NotFinite

__all__ = ["check_numbers", "check_terms", "in_unit_interval", "not_negative", "positive", "smoothing_below_half"]


def positive(reader: str, name: str, value: float) -> None:
    """Check that a number is positive and finite.

    Raises:
        ArgumentError: the number is out of range.
    """
    if not 0 < value < math.inf:
        raise ArgumentError(f"{reader}: {name} is {value}; it must be positive and finite", name)


def not_negative(reader: str, name: str, value: float) -> None:
    """Check that a number is finite and at least 0.

    Raises:
        ArgumentError: the number is out of range.
    """
    if not 0 <= value < math.inf:
        raise ArgumentError(f"{reader}: {name} is {value}; it must be finite and at least 0", name)


def in_unit_interval(reader: str, name: str, value: float) -> None:
    """Check that a number is between 0 and 1.

    Raises:
        ArgumentError: the number is out of range.
    """
    if not 0 <= value <= 1:
        raise ArgumentError(f"{reader}: {name} is {value}; it must be between 0 and 1", name)


def check_terms(reader: str, kind: str, terms: tuple[Any, ...]) -> None:
    """Check that every term is a pair of a finite coefficient and a function.

    Raises:
        ArgumentError: no terms are given, a term is not such a pair, or a coefficient is not finite.
    """
    if not terms:
        raise ArgumentError(f"{reader}: there are no terms; give pairs (coefficient, {kind})")
    for number, term in enumerate(terms, 1):
        if not isinstance(term, tuple) or len(term) != 2 or not callable(term[1]):
            raise ArgumentError(f"{reader}: term {number} is {term!r}; give a pair (coefficient, {kind})")
        if not isinstance(term[0], Real) or not math.isfinite(term[0]):
            raise ArgumentError(f"{reader}: the coefficient of term {number} is {term[0]}; it must be finite")


def smoothing_below_half(reader: str, value: float) -> None:
    """Check the probability of a wrong label: labels must be right more often than wrong.

    Raises:
        ArgumentError: they are not, or it is not a probability.
    """
    if not 0 <= value < 0.5:
        raise ArgumentError(
            f"{reader}: smoothing is {value}; it must be at least 0 and less than 0.5, how probable it is that a label "
            "is wrong"
        )


def check_numbers(reader: str, value: Any, got: str, shape: tuple[int, ...]) -> Tensor:
    """Return what a user's function of rewards returned, if it is a tensor of finite numbers of this shape.

    Args:
        reader: how errors name the function.
        value: that it returned.
        got: what it was given, in words.
        shape: that the value has to have.

    Raises:
        BatchError: the value has another type or shape.
        NotFinite: it has NaN or an infinity.

    >>> import torch
    >>> check_numbers("mine", torch.tensor([1, 0]), "2 rewards", (2,)).tolist()
    [1, 0]
    """
    if not isinstance(value, Tensor):
        raise BatchError(f"{reader}: the function got {got} and returned {value!r:.80}; return a tensor")
    if value.shape != shape:
        raise BatchError(
            f"{reader}: the function got {got} and returned shape {list(value.shape)}; return one number for each"
        )
    if value.is_complex():
        raise BatchError(f"{reader}: the function got {got} and returned {value.dtype}; return real numbers")
    if not bool(value.isfinite().all()):
        wrong = value[~value.isfinite()][0].item()
        raise NotFinite(
            f"{reader}: the function got {got} and returned {wrong}; guard what it divides by, or the logarithm of 0"
        )
    return value
