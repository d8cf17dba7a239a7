"""Measurements of devices during steps, on their way to the next line of the log.

They depend on the clock, so they are no metrics of a step, which are the same each time.
"""

from nrl.batch.metrics import Metrics, merge

__all__ = ["add", "take"]

_PENDING: list[Metrics] = []


def add(metrics: Metrics) -> None:
    """Keep metrics for the next line."""
    _PENDING[:] = [merge(_PENDING[0], metrics) if _PENDING else metrics]


def take() -> Metrics:
    """Return all metrics since the last line, merged, and forget them.

    >>> import torch
    >>> from nrl.batch.metrics import Max, finalize
    >>> _ = take()  # Drop metrics of earlier steps.
    >>> add({"device/max_memory_allocated": Max(torch.tensor(3.0))})
    >>> add({"device/max_memory_allocated": Max(torch.tensor(2.0))})
    >>> finalize(take()), take()
    ({'device/max_memory_allocated': 3.0}, {})
    """
    return _PENDING.pop() if _PENDING else {}
