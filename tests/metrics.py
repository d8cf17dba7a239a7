"""Metrics of steps, and those that say how a step was laid out; all others are the same in any layout."""

from collections.abc import Mapping, Sequence

import pytest

__all__ = ["LAYOUT", "assert_same_steps", "of_any_layout"]

LAYOUT = frozenset({"tokens/computed", "tokens/saved", "flops"})


def of_any_layout(numbers: Mapping[str, float]) -> dict[str, float]:
    """The numbers without those that depend on micro-batches, shards and packing."""
    return {name: number for name, number in numbers.items() if name not in LAYOUT}


def assert_same_steps(
    found: Sequence[Mapping[str, float]], expected: Sequence[Mapping[str, float]], tolerance: float
) -> None:
    """The metrics of steps are those of others, which may have been laid out in another way."""
    assert [of_any_layout(step).keys() for step in found] == [of_any_layout(step).keys() for step in expected]
    for one, other in zip(found, expected, strict=True):
        assert of_any_layout(one) == pytest.approx(of_any_layout(other), rel=tolerance, abs=tolerance)
