"""Generated tasks for `choice`, `code`, `short_answer` and the tool `python`.

They are to try an environment before there is data for it; real work takes data. A task is a function of
``(seed, index)`` alone, so the state of the stream is one integer.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nrl.envs.seeds import check_not_negative, generator
from nrl.envs.types import Task

if TYPE_CHECKING:
    import numpy as np

__all__ = ["choices", "passages", "products", "programs"]

_PROGRAMS: dict[str, tuple[str, str, Callable[[list[int], int], Any]]] = {
    "total": (
        "the sum of the numbers of a list that are greater than {k}",
        "sum(x for x in numbers if x > {k})",
        lambda numbers, k: sum(x for x in numbers if x > k),
    ),
    "count": (
        "how many numbers of a list are multiples of {k}",
        "sum(x % {k} == 0 for x in numbers)",
        lambda numbers, k: sum(x % k == 0 for x in numbers),
    ),
    "shifted": (
        "the list with {k} added to each number, backwards",
        "[x + {k} for x in reversed(numbers)]",
        lambda numbers, k: [x + k for x in reversed(numbers)],
    ),
    "largest": (
        "the largest number of a list, or {k} if that is larger",
        "max([*numbers, {k}])",
        lambda numbers, k: max([*numbers, k]),
    ),
}

_PEOPLE = ("Ann", "Ben", "Eve", "Ian", "Joe", "Kim", "Lea", "Max", "Sue", "Tom")
_CITIES = ("Baku", "Bern", "Bonn", "Cork", "Kyiv", "Lima", "Nice", "Oslo", "Riga", "Rome")


def choices(seed: int, index: int) -> Task:
    """A product to choose among four numbers, for `nrl.envs.choice`.

    Args:
        seed: not negative.
        index: not negative.

    Returns:
        ``prompt``; ``choices``, four texts, one of them right; ``answer`` and ``response``, its letter.

    Raises:
        DataError: ``seed`` or ``index`` is negative or no integer.

    >>> found = choices(0, 0)
    >>> found["prompt"].splitlines()[0], found["answer"]
    ('What is 17 * 13?', 'B')
    """
    draw = _generator(seed, index)
    a, b = draw.integers(3, 20, 2).tolist()
    times = draw.choice([1, 2, 3], 3).tolist()
    shown = [a * b, *(a * b + off * n for off, n in zip((-a, a, b), times, strict=True))]
    shown = draw.permutation(list(dict.fromkeys([*shown, *range(a * b + 1, a * b + 5)]))[:4]).tolist()
    lines = [f"{letter}) {number}" for letter, number in zip("ABCD", shown, strict=True)]
    prompt = "\n".join([f"What is {a} * {b}?", *lines, "Answer with a letter."]) + "\n"
    answer = "ABCD"[shown.index(a * b)]
    return {"prompt": prompt, "choices": [str(each) for each in shown], "answer": answer, "response": answer}


def programs(seed: int, index: int) -> Task:
    """A short function to write, for `nrl.envs.code`.

    Args:
        seed: not negative.
        index: not negative.

    Returns:
        ``prompt``; ``tests``, four calls of the function; ``response``, a block of code that passes them.

    Raises:
        DataError: ``seed`` or ``index`` is negative or no integer.

    >>> programs(0, 0)["tests"][0]
    'assert largest([10]) == 10'
    """
    draw = _generator(seed, index)
    name, k = str(draw.choice(list(_PROGRAMS))), int(draw.integers(2, 8))
    says, body, right = _PROGRAMS[name]
    inputs = [draw.integers(-9, 30, length).tolist() for length in (1, 3, 5, 8)]
    prompt = f"Write a Python function {name}(numbers) that returns {says.format(k=k)}. Answer with a block of code."
    response = f"```python\ndef {name}(numbers):\n    return {body.format(k=k)}\n```"
    tests = [f"assert {name}({numbers}) == {right(numbers, k)}" for numbers in inputs]
    return {"prompt": prompt, "tests": tests, "response": response}


def products(seed: int, index: int) -> Task:
    """A product that is hard by head and easy for a program, for the tool `python`.

    Args:
        seed: not negative.
        index: not negative.

    Returns:
        ``prompt``; ``answer``, the number as text.

    Raises:
        DataError: ``seed`` or ``index`` is negative or no integer.

    >>> products(0, 0)["prompt"]
    'What is 865561 * 673265? Compute it, and answer with the number.'
    """
    a, b = _generator(seed, index).integers(10**5, 10**6, 2).tolist()
    return {"prompt": f"What is {a} * {b}? Compute it, and answer with the number.", "answer": str(a * b)}


def passages(seed: int, index: int) -> Task:
    """A short text and a question about it, for `nrl.envs.short_answer`.

    Args:
        seed: not negative.
        index: not negative.

    Returns:
        ``prompt``; ``answer`` and ``response``, a city of the text.

    Raises:
        DataError: ``seed`` or ``index`` is negative or no integer.

    >>> passages(0, 0)["prompt"].splitlines()
    ['Joe lives in Bonn. Lea lives in Rome. Eve lives in Cork.', 'Where does Lea live? Answer with the city alone.']
    """
    draw = _generator(seed, index)
    people, cities = (draw.permutation(each)[:3].tolist() for each in (_PEOPLE, _CITIES))
    asked = int(draw.integers(3))
    text = " ".join(f"{person} lives in {city}." for person, city in zip(people, cities, strict=True))
    prompt = f"{text}\nWhere does {people[asked]} live? Answer with the city alone.\n"
    return {"prompt": prompt, "answer": cities[asked], "response": cities[asked]}


def _generator(seed: int, index: int) -> "np.random.Generator":
    check_not_negative("generated_tasks", seed=seed, index=index)
    return generator(seed, index)
