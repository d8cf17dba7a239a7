"""Sums of two small numbers, generated without end: what the examples learn on a laptop with no download.

A task is a function of ``(seed, index)`` alone, so the state of the stream is one integer.
"""

import numpy as np

from nrl.envs.base import Task
from nrl.errors import DataError

__all__ = ["task"]


def task(seed: int, index: int, *, largest: int = 19) -> Task:
    """The sum that a seed has at an index.

    Args:
        seed: not negative.
        index: not negative.
        largest: each of the two numbers is drawn evenly from ``0`` to this.

    Returns:
        ``prompt``, the sum as plain text that ends in an equals sign; ``answer``, its value as text; ``response``,
        the same, which is what supervised training learns.

    Raises:
        DataError: ``seed`` or ``largest`` is negative or no integer.

    >>> task(0, 0)
    {'prompt': '17+12=', 'answer': '29', 'response': '29'}
    """
    for name, value in (("seed", seed), ("largest", largest)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise DataError(f"arithmetic.task: {name} is {value!r}; it must be an integer that is not negative")
    first, second = np.random.default_rng([seed, index]).integers(0, largest + 1, 2).tolist()
    total = str(first + second)
    return {"prompt": f"{first}+{second}=", "answer": total, "response": total}
