"""What the factories of losses and their parts demand of their numbers, in the same words everywhere."""

import math

__all__ = ["not_negative", "positive", "smoothing_below_half"]


def positive(reader: str, name: str, value: float) -> None:
    """Say who was given which number, unless it is positive and finite.

    Raises:
        ValueError: it is not.

    >>> positive("my_loss", "beta", 0.1)
    """
    if not 0 < value < math.inf:
        raise ValueError(f"{reader}: {name} is {value}; it must be positive and finite")


def not_negative(reader: str, name: str, value: float) -> None:
    """Say who was given which number, unless it is finite and at least 0.

    Raises:
        ValueError: it is not.

    >>> not_negative("my_loss", "alpha", 0.0)
    """
    if not 0 <= value < math.inf:
        raise ValueError(f"{reader}: {name} is {value}; it must be finite and at least 0")


def smoothing_below_half(reader: str, value: float) -> None:
    """Say who was given which probability of a wrong label, unless labels are right more often than wrong.

    Raises:
        ValueError: they are not, or it is not a probability.

    >>> smoothing_below_half("my_loss", 0.1)
    """
    if not 0 <= value < 0.5:
        raise ValueError(
            f"{reader}: smoothing is {value}; it must be at least 0 and less than 0.5, how probable it is that a label "
            "is wrong"
        )
