"""Metrics of a step that say how it was laid out; all others are the same in any layout."""

from collections.abc import Mapping

__all__ = ["LAYOUT", "of_any_layout"]

LAYOUT = frozenset({"tokens/computed", "tokens/saved"})


def of_any_layout(numbers: Mapping[str, float]) -> dict[str, float]:
    """The numbers without those that depend on micro-batches, shards and packing."""
    return {name: number for name, number in numbers.items() if name not in LAYOUT}
