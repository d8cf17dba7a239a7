import json
import re
from collections import Counter
from typing import Any, cast

import pytest

from nrl.data import Source, counting
from nrl.envs.library import arithmetic
from nrl.errors import DataError


def tasks(seed: int = 0, largest: int = 19) -> Source[Any]:
    return counting(lambda index: arithmetic.task(seed, index, largest=largest))


def test_a_task_is_a_sum_with_its_value_as_answer_and_response() -> None:
    for row in tasks(seed=3).take(200):
        match = re.fullmatch(r"(\d+)\+(\d+)=", row["prompt"])
        assert match is not None
        first, second = map(int, match.groups())
        assert 0 <= first <= 19
        assert 0 <= second <= 19
        assert row["answer"] == row["response"] == row["chosen"] == str(first + second)
        assert 1 <= abs(int(row["rejected"]) - (first + second)) <= 9
        assert int(row["rejected"]) >= 0
        assert set(row) == {"prompt", "answer", "response", "chosen", "rejected"}


def test_wrong_sums_are_above_and_below() -> None:
    wrong = [int(row["rejected"]) - int(row["chosen"]) for row in tasks(seed=1).take(2000)]
    assert set(wrong) == {*range(-9, 0), *range(1, 10)}


def test_largest_bounds_both_numbers_and_is_reached() -> None:
    drawn = {row["prompt"] for row in tasks(seed=0, largest=1).take(100)}
    assert drawn == {"0+0=", "0+1=", "1+0=", "1+1="}
    assert {row["answer"] for row in tasks(largest=0).take(5)} == {"0"}


def test_numbers_are_drawn_evenly() -> None:
    firsts = Counter(row["prompt"].split("+")[0] for row in tasks(seed=1).take(4000))
    assert len(firsts) == 20
    # 200 expected of each; the standard deviation is sqrt(4000 * 0.05 * 0.95) = 13.8
    assert all(120 < count < 280 for count in firsts.values())


def test_a_task_is_a_function_of_seed_and_index() -> None:
    stream = tasks(seed=5, largest=99)
    assert stream.take(20) == [arithmetic.task(5, index, largest=99) for index in range(20)]
    assert tasks(seed=5).take(20) != tasks(seed=6).take(20)


def test_what_is_taken_does_not_depend_on_how() -> None:
    together, apart = tasks(seed=2), tasks(seed=2)
    assert together.take(6) == [*apart.take(1), *apart.take(0), *apart.take(5)]


def test_restoring_continues() -> None:
    stream = tasks(seed=2)
    stream.take(7)
    state = json.loads(json.dumps(stream.state()))
    assert state == {"cursor": 7}
    again = tasks(seed=2)
    again.restore(state)
    assert again.take(5) == stream.take(5)
    assert again.state() == {"cursor": 12}


def test_changing_a_task_changes_no_other() -> None:
    stream = tasks()
    cast(dict[str, Any], stream.take(1)[0])["prompt"] = "changed"
    stream.restore({"cursor": 0})
    assert stream.take(1) == [arithmetic.task(0, 0)]


@pytest.mark.parametrize("options", [{"seed": -1}, {"seed": 1.0}, {"seed": True}, {"largest": -1}, {"largest": "9"}])
def test_options_that_cannot_be_used(options: dict[str, Any]) -> None:
    (name, value), *_ = options.items()
    with pytest.raises(DataError, match=f"arithmetic.task: {name} is {value!r}; it must be an integer"):
        tasks(**options).take(1)


@pytest.mark.parametrize("state", [{}, {"cursor": -1}, {"cursor": 1.5}, {"cursor": True}, {"cursor": None}, 3])
def test_states_that_are_none(state: Any) -> None:
    with pytest.raises(DataError, match=r"counting: restore\(.*\); give what state\(\) returned"):
        tasks().restore(state)


def test_a_negative_number_of_tasks() -> None:
    stream = tasks()
    with pytest.raises(DataError, match=r"counting: take\(-1\); the number of items cannot be negative"):
        stream.take(-1)
    assert stream.state() == {"cursor": 0}
