"""What steps took of their devices, from where it is found out to the line of the log that it belongs to.

It is no metric of a step, since it depends on the clock: the metrics of a step are the same each time.
"""

from nrl.batch.metrics import Metrics, merge

__all__ = ["add", "taken"]

_FOUND: list[Metrics] = []


def add(some: Metrics) -> None:
    """Keep some numbers for the next line."""
    _FOUND[:] = [merge(_FOUND[0], some) if _FOUND else some]


def taken() -> Metrics:
    """All numbers since the last line, merged; they are given once.

    >>> import torch
    >>> from nrl.batch.metrics import Max, finalize
    >>> _ = taken()  # what steps before left
    >>> add({"device/max_memory_allocated": Max(torch.tensor(3.0))})
    >>> add({"device/max_memory_allocated": Max(torch.tensor(2.0))})
    >>> finalize(taken()), taken()
    ({'device/max_memory_allocated': 3.0}, {})
    """
    return _FOUND.pop() if _FOUND else {}
