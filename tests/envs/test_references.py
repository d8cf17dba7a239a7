"""The check of tasks before a run: who has one, what it finds, and what becomes of rows that no answer can meet."""

import asyncio
import functools
from typing import Any

import pytest

import nrl
from nrl import data
from nrl.envs import (
    Environment,
    Score,
    Step,
    Trace,
    by_source,
    choice,
    constraints,
    exact,
    gated,
    judged,
    limited,
    linear,
    number,
    of_group,
    product,
    single_turn,
    weighted,
)
from nrl.envs.builtin import environments
from nrl.envs.references import faults_of, report, task_check
from nrl.errors import DataError
from tests.rollout.scripted import Scripted

GOOD, BAD = {"prompt": "1+1=", "answer": "2"}, {"prompt": "1+1=", "answer": "two"}


def never(task: Any) -> str | None:
    return None


def anything(task: Any, trace: Trace) -> float:
    return 1.0


PLAYED = Environment(lambda task: (task, task["prompt"]), lambda state, turn: Step(state))


@pytest.mark.parametrize(
    "part",
    [
        number,
        single_turn(number),
        weighted(right=(1.0, number), any=(0.5, anything)),
        product(any=anything, right=number),
        gated(anything, number),
        single_turn(weighted(right=(1.0, number), any=(0.5, exact))),
        judged(PLAYED, number),
        judged(single_turn(number), anything),
        limited(single_turn(number), turns=2),
        linear(single_turn(number)),
        nrl.pooled(number, workers=1),
    ],
)
def test_who_has_the_check_of_a_verifier(part: Any) -> None:
    check = task_check(part)
    assert check is not None
    assert list(faults_of(check, [GOOD, BAD])) == [1]


@pytest.mark.parametrize("part", [anything, PLAYED, single_turn(anything), weighted(any=(1.0, anything))])
def test_who_has_none(part: Any) -> None:
    assert task_check(part) is None


def test_the_check_of_a_mixture_is_that_of_the_source() -> None:
    check = task_check(by_source(single_turn(number), single_turn(anything)))
    assert check is not None
    assert list(faults_of(check, [{**BAD, "source": 0}, {**BAD, "source": 1}, {**GOOD, "source": 0}])) == [0]


def test_a_verifier_of_groups_has_its_check() -> None:
    made: Any = of_group(lambda task, traces: [1.0] * len(traces))
    made.check_task = lambda task: "never"
    assert faults_of(task_check(single_turn(made)) or never, [GOOD]) == {0: "never"}


def test_checks_may_be_async_and_run_within_a_loop() -> None:
    async def check(task: Any) -> str | None:
        await asyncio.sleep(0)
        return f"is {task['answer']}" if task["answer"] == "two" else None

    async def within() -> dict[int, str]:
        return faults_of(check, [GOOD, BAD])

    assert faults_of(check, [GOOD, BAD]) == asyncio.run(within()) == {1: "is two"}


def test_an_error_of_the_program_is_no_fault_of_a_task() -> None:
    with pytest.raises(ZeroDivisionError):
        faults_of(lambda task: str(1 / 0), [GOOD])


def test_a_report_shows_twenty() -> None:
    lines = report("a.jsonl", [(f"line {n}", "bad") for n in range(23)], 50).split("\n")
    assert lines[0].startswith("23 of 50 tasks of a.jsonl")
    assert (len(lines), lines[1], lines[-1]) == (22, "  line 0: bad", "  ... and 3 more")


def test_rows_that_no_answer_can_meet_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [GOOD, BAD, {**GOOD, "answer": "3"}, {"prompt": "no answer"}]
    stream = data.tasks(rows, shuffle=False, chat=False, check=task_check(number))
    assert [task["answer"] for task in stream.take(4)] == ["2", "3", "2", "3"]
    assert (stream.size, stream.dropped) == (2, {"check": 2})
    said = capsys.readouterr().out
    assert "data: 2 of 4 tasks" in said
    assert "row 1: task['answer'] is 'two', from which no number can be read" in said
    assert "row 3: number: the task has no 'answer'" in said


def test_a_row_is_left_out_whole(capsys: pytest.CaptureFixture[str]) -> None:
    def twice(row: Any) -> list[Any]:
        return [row, {**row, "answer": row["other"]}]

    rows = [{**GOOD, "other": "5"}, {**GOOD, "other": "five"}]
    stream = data.tasks(rows, shuffle=False, chat=False, format=twice, check=task_check(number))
    assert [task["answer"] for task in stream.take(2)] == ["2", "5"]
    assert (stream.size, stream.dropped["check"]) == (2, 1)


def test_where_no_row_is_left_it_is_an_error() -> None:
    with pytest.raises(DataError, match="row 0: task"):
        data.tasks([BAD], chat=False, check=task_check(number))


def test_generated_tasks_are_checked_when_they_are_made(capsys: pytest.CaptureFixture[str]) -> None:
    def made(seed: int, index: int) -> Any:
        return {"prompt": str(index), "answer": "none" if index % 3 == 0 else str(index)}

    stream = data.tasks(made, check=task_check(number))
    assert [task["answer"] for task in stream.take(4)] == ["1", "2", "4", "5"]
    state = stream.state()
    assert stream.dropped == {"check": 2}
    following = [task["answer"] for task in stream.take(2)]
    again = data.tasks(made, check=task_check(number))
    again.restore(state)
    assert [task["answer"] for task in again.take(2)] == following == ["7", "8"]
    assert capsys.readouterr().out.count("left out") == 2  # once a stream

    with pytest.raises(DataError, match="1000 in a row"):
        data.tasks(lambda seed, index: BAD, check=task_check(number)).take(10)


def test_environments_check_what_they_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert environments("number", [GOOD, BAD], chat=False).tasks(0).size == 1
    assert "left out" in capsys.readouterr().out


@functools.cache
def mathematics() -> Any:
    return nrl.math_verifier(workers=1, timeout=60)


def test_references_of_mathematics_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    answers = ["1/2", r"\frac{1}{", r"\sqrt{2}", "1/0", "3:30", r"12\frac{1}{2}\%", "Monday", "", "101_2", "sqrt(2)/2"]
    rows = [{"prompt": "?", "answer": answer} for answer in answers]
    stream = data.tasks(rows, shuffle=False, chat=False, check=task_check(mathematics()))
    assert [task["answer"] for task in stream.take(7)] == [x for x in answers if x not in (r"\frac{1}{", "1/0", "")]
    assert stream.dropped == {"check": 3}
    assert "row 3: task['answer'] is '1/0', which has no value" in capsys.readouterr().out


@pytest.mark.parametrize("reference", [r"\frac{1}{", "1/0"])
def test_an_unreadable_reference_makes_its_group_invalid_whatever_is_answered(reference: str) -> None:
    """Also where an answer has the reference's own text."""
    sampler = Scripted([rf"\boxed{{{reference}}}", f"It is ${reference}$.", r"\boxed{7}", "what?"])
    with pytest.warns(UserWarning, match="4 of 4 episodes failed"):
        batch = nrl.rollout(sampler, single_turn(mathematics()), [{"prompt": "?", "answer": reference}], n=4)
    assert not batch["valid"].any()


def test_forgetting_checks_again() -> None:
    verify = mathematics()
    asyncio.run(verify.check_task({"answer": r"\sqrt{3}"}))
    verify.forget()
    assert asyncio.run(verify({"answer": r"\sqrt{3}"}, Trace("", [r"\boxed{\sqrt3}"]))) == Score(1.0)


@pytest.mark.parametrize(
    ("verifier", "task", "why"),
    [
        (choice, {"answer": "E", "choices": ["Rome", "Paris"]}, "task['answer'] is 'E', and there are 2 choices"),
        (choice, {"answer": "zz", "choices": ["Rome", "Paris"]}, "choice: the task's answer is 'zz'"),
        (choice, {"choices": ["Rome", "Paris"]}, "choice: the task's answer is None"),
        (constraints, {"constraints": ["nope"]}, "constraints: there is no 'nope'"),
        (constraints, {"constraints": [{"words": {"least": 5, "most": 3}}]}, "constraints: words does not take"),
    ],
)
def test_choices_and_constraints_are_checked_before_a_run(verifier: Any, task: dict[str, Any], why: str) -> None:
    check = task_check(verifier)
    assert check is not None
    right = {"answer": "B", "choices": ["Rome", "Paris"], "constraints": ["lowercase", {"words": {"most": 3}}]}
    found = faults_of(check, [task, right])
    assert list(found) == [0]
    assert found[0].startswith(why)
