"""Generated tasks: right answers are right, and lazy ones are not."""

from collections.abc import Callable
from typing import Any

import pytest

import nrl
from nrl.envs import Trace, choice, code, short_answer
from nrl.envs.library.generated_tasks import choices, passages, products, programs
from nrl.errors import DataError

EVERY = [choices, passages, products, programs]
TASKS: list[Any] = ["choice", "code", "constraints", "exact", "math", "number", "python", "short_answer"]
TASKS += ["search", "sliding_puzzle", "tic_tac_toe", {"judge": {"url": "http://127.0.0.1:1"}}]
RIGHT = {
    "total": "def total(numbers):\n    return sum(each for each in numbers if each > {k})",
    "count": "def count(numbers):\n    return len([each for each in numbers if each % {k} == 0])",
    "shifted": "def shifted(numbers):\n    return [each + {k} for each in numbers][::-1]",
    "largest": "def largest(numbers):\n    return max(max(numbers), {k})",
}


def test_choices_have_one_right_letter() -> None:
    letters = []
    for index in range(300):
        task = choices(0, index)
        a, b = (int(each) for each in task["prompt"].splitlines()[0][len("What is ") : -1].split(" * "))
        assert len(set(task["choices"])) == 4
        right = task["choices"].index(str(a * b))
        assert [choice(task, Trace("", [each])).reward for each in "ABCD"] == [float(k == right) for k in range(4)]
        assert choice(task, Trace("", ["A, B, C, D"])).reward == 0
        assert choice(task, Trace("", [task["response"]])).reward == 1
        letters.append("ABCD"[right])
    assert min(map(letters.count, "ABCD")) > 45  # no letter is a good guess


def test_programs_are_solved_by_what_they_ask_for() -> None:
    verify: Any = code()
    seen = set()
    for index in range(8):
        task = programs(2, index)
        name = task["prompt"].split("function ")[1].split("(")[0]
        numbers = [int(word.strip(".,")) for word in task["prompt"].split() if word.strip(".,").isdigit()]
        good = RIGHT[name].format(k=numbers[0])
        bad = f"def {name}(numbers):\n    return 0"
        assert verify(task, Trace("", [f"```python\n{good}\n```"])).reward == 1
        assert verify(task, Trace("", [task["response"]])).reward == 1
        assert verify(task, Trace("", [f"```python\n{bad}\n```"])).reward < 1
        seen.add(name)
    assert len(seen) > 2


def test_products() -> None:
    task = products(0, 1)
    a, b = (int(each.strip("?")) for each in task["prompt"].split()[2:5:2])
    assert int(task["answer"]) == a * b > 10**10


@pytest.mark.parametrize("task", EVERY)
def test_a_task_is_a_function_of_seed_and_index(task: Callable[[int, int], Any]) -> None:
    assert task(1, 2) == task(1, 2)
    assert task(1, 2) != task(1, 3) != task(2, 3)
    for seed, index in ((-1, 0), (0, -1), (0, True)):
        with pytest.raises(DataError, match=r"generated_tasks: (seed|index) is (-1|True); it must be an integer"):
            task(seed, index)


def test_passages_say_who_lives_where_and_ask_for_one_of_them() -> None:
    places = list[int]()
    for index in range(300):
        task = passages(3, index)
        text, question = task["prompt"].splitlines()
        said = dict(each.rstrip(".").split(" lives in ") for each in text.split(". "))
        assert len(set(said.values())) == 3
        right = said[question.split()[2]]
        assert [short_answer(task, Trace("", [each])).reward for each in said.values()] == [
            float(each == right) for each in said.values()
        ]
        assert short_answer(task, Trace("", [task["response"]])).reward == 1
        assert short_answer(task, Trace("", [text])).reward == 0
        places.append(list(said.values()).index(right))
    assert min(map(places.count, range(3))) > 70  # no place is a good guess


@pytest.mark.parametrize("env", TASKS, ids=str)
def test_environments_that_ship_bring_tasks(env: Any) -> None:
    assert all(task["prompt"] for task in nrl.environments(env).tasks(1).take(3))
