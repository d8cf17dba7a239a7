"""The generated task `arithmetic`: sums of two small numbers, which the examples learn on a laptop.

A task is a function of ``(seed, index)`` alone, so the state of the stream is one integer.
"""

from nrl.envs.seeds import check_not_negative, generator
from nrl.envs.types import Task

__all__ = ["task"]


def task(seed: int, index: int, *, largest: int = 19) -> Task:
    """The sum that a seed has at an index.

    Args:
        seed: not negative.
        index: not negative.
        largest: each of the two numbers is drawn evenly from ``0`` to this.

    Returns:
        ``prompt``, the sum as plain text that ends in an equals sign; ``answer``, its value as text. For supervised
        training ``response``, the same; for preference training ``chosen``, the same, and ``rejected``, another number
        nearby.

    Raises:
        DataError: ``seed`` or ``largest`` is negative or no integer.

    >>> task(0, 0)
    {'prompt': '17+12=', 'answer': '29', 'response': '29', 'chosen': '29', 'rejected': '24'}
    """
    check_not_negative("arithmetic.task", seed=seed, largest=largest)
    draw = generator(seed, index)
    first, second = draw.integers(0, largest + 1, 2).tolist()
    total = first + second
    wrong = total + int(draw.integers(1, 10)) * (1 if total < 10 else int(draw.choice([-1, 1])))
    right = str(total)
    return {
        "prompt": f"{first}+{second}=",
        "answer": right,
        "response": right,
        "chosen": right,
        "rejected": str(wrong),
    }
