"""The generated task `reversal`: digits to write backwards, another task for a tiny model.

A task is a function of ``(seed, index)`` alone, so the state of the stream is one integer.
"""

from nrl.envs.seeds import generator
from nrl.envs.types import Task
from nrl.errors import DataError

__all__ = ["task"]


def task(seed: int, index: int, *, digits: int = 3) -> Task:
    """The digits that a seed has at an index.

    Args:
        seed: not negative.
        index: not negative.
        digits: how many, each drawn evenly; at least 1.

    Returns:
        ``prompt``, the digits and a less-than sign; ``answer``, the same digits backwards; ``response``, the same;
        ``chosen``, the same, and ``rejected``, with one digit changed.

    Raises:
        DataError: ``seed`` or ``index`` is negative or no integer, or ``digits`` is not positive.

    >>> task(0, 0)
    {'prompt': '779<', 'answer': '977', 'response': '977', 'chosen': '977', 'rejected': '917'}
    """
    for name, value, least in (("seed", seed, 0), ("index", index, 0), ("digits", digits, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise DataError(f"reversal.task: {name} is {value!r}; it must be an integer of at least {least}")
    draw = generator(seed, index, digits)
    drawn = draw.integers(0, 10, digits).tolist()
    wrong = list(drawn)
    place = int(draw.integers(digits))
    wrong[place] = (wrong[place] + int(draw.integers(1, 10))) % 10
    right, other = ("".join(map(str, reversed(some))) for some in (drawn, wrong))
    return {
        "prompt": "".join(map(str, drawn)) + "<",
        "answer": right,
        "response": right,
        "chosen": right,
        "rejected": other,
    }
