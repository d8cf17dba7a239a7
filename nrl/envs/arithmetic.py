"""Sums of two small numbers, generated without end: what the examples learn on a laptop with no download.

A task is a function of ``(seed, index)`` alone, so the state of the stream is one integer.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from nrl.envs.base import Task
from nrl.errors import DataError

__all__ = ["Counted", "task", "tasks"]


class Counted[T]:
    """An endless stream of a function of the index: ``at(0), at(1), ...``; its state is the index of the next.

    Args:
        at: gives the item at an index; the same one whenever it is asked.
        name: how errors name the stream.

    >>> squares = Counted(lambda index: index * index, name="squares")
    >>> squares.take(3), squares.state()
    ([0, 1, 4], {'cursor': 3})
    >>> squares.restore({"cursor": 1})
    >>> squares.take(2)
    [1, 4]
    """

    def __init__(self, at: Callable[[int], T], *, name: str) -> None:
        self._at, self._name, self._cursor = at, name, 0

    def take(self, n: int) -> list[T]:
        """The next ``n`` items.

        Raises:
            DataError: ``n`` is negative.
        """
        if n < 0:
            raise DataError(f"{self._name}: take({n}); the number of items cannot be negative")
        items = [self._at(index) for index in range(self._cursor, self._cursor + n)]
        self._cursor += n
        return items

    def state(self) -> dict[str, Any]:
        """How many items have been taken, as ``{"cursor": n}``; it can be written as JSON."""
        return {"cursor": self._cursor}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where a stream of the same items had this state.

        Raises:
            DataError: this is no state of such a stream.
        """
        cursor = state.get("cursor") if isinstance(state, Mapping) else None
        if isinstance(cursor, bool) or not isinstance(cursor, int) or cursor < 0:
            raise DataError(f"{self._name}: restore({state!r}); give what state() returned, such as {{'cursor': 0}}")
        self._cursor = cursor


def task(seed: int, index: int, *, largest: int = 19) -> Task:
    """The sum that a seed has at an index.

    Args:
        seed: not negative.
        index: not negative.
        largest: each of the two numbers is drawn evenly from ``0`` to this.

    Returns:
        ``prompt``, the sum as plain text that ends in an equals sign; ``answer``, its value as text; ``response``,
        the same, which is what supervised training learns.

    >>> task(0, 0)
    {'prompt': '17+12=', 'answer': '29', 'response': '29'}
    """
    first, second = np.random.default_rng([seed, index]).integers(0, largest + 1, 2).tolist()
    total = str(first + second)
    return {"prompt": f"{first}+{second}=", "answer": total, "response": total}


def tasks(seed: int = 0, *, largest: int = 19) -> Counted[Task]:
    """An endless stream of sums; see `task`.

    Args:
        seed: which stream. Streams of different seeds are independent draws of the same ``(largest + 1) ** 2`` sums.
        largest: the largest number that is added.

    Returns:
        A stream with ``take(n)``, ``state()`` and ``restore(state)``.

    Raises:
        DataError: ``seed`` or ``largest`` is negative or no integer.

    >>> stream = tasks(seed=0, largest=99)
    >>> [row["prompt"] for row in stream.take(2)]
    ['85+63=', '52+88=']
    """
    for name, value in (("seed", seed), ("largest", largest)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise DataError(f"arithmetic.tasks: {name} is {value!r}; it must be an integer that is not negative")
    return Counted(lambda index: task(seed, index, largest=largest), name="arithmetic.tasks")
