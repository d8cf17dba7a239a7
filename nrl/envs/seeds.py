"""What every task that is a function of a seed and an index checks, and draws from."""

import functools
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nrl.errors import DataError

if TYPE_CHECKING:
    import numpy as np

    from nrl.envs.types import Task

__all__ = ["check_not_negative", "generator", "shuffled"]


def check_not_negative(who: str, **numbers: object) -> None:
    """Check that numbers are integers and not negative.

    Raises:
        DataError: one is not; ``who`` begins the message.

    >>> check_not_negative("arithmetic.task", seed=0, index=-1)
    Traceback (most recent call last):
    nrl.errors.DataError: arithmetic.task: index is -1; it must be an integer that is not negative
    """
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise DataError(f"{who}: {name} is {value!r}; it must be an integer that is not negative")


def generator(*numbers: int) -> "np.random.Generator":
    """What a task draws from: numpy's generator of these numbers, which begins anew each time.

    >>> generator(0, 1).integers(100, size=3).tolist() == generator(0, 1).integers(100, size=3).tolist()
    True
    """
    import numpy as np  # an environment that draws no task needs none

    return np.random.default_rng(numbers)


def shuffled(rows: "Callable[[], Sequence[Task]]") -> "Callable[[int, int], Task]":
    """Tasks that are rows, in a new order for each seed and epoch.

    Args:
        rows: gives all of them; called once, when the first task is asked for.

    >>> task = shuffled(lambda: [{"prompt": text} for text in "abc"])
    >>> [task(0, index)["prompt"] for index in range(6)]
    ['a', 'c', 'b', 'b', 'c', 'a']
    """
    kept = list["Sequence[Task]"]()

    def all_rows() -> "Sequence[Task]":
        if not kept:
            kept.append(rows())
        return kept[0]

    def task(seed: int, index: int) -> "Task":
        every = all_rows()
        return every[_order(seed, index // len(every), len(every))[index % len(every)]]

    made: Any = task
    made.all_rows = all_rows  # for `nrl.data.tasks`
    return made  # type: ignore[no-any-return]


@functools.lru_cache(16)
def _order(seed: int, epoch: int, count: int) -> list[int]:
    found = list(range(count))
    random.Random(f"{seed} {epoch}").shuffle(found)
    return found
