"""Multiple choice: what is chosen, and what is not."""

import time
from typing import Any

import pytest

from nrl.envs import Score, Trace, choice, chosen_letter
from nrl.errors import EnvError


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("B", "B"),
        (" (c) ", "C"),
        ("**D.**", "D"),
        ("Well.\n\nB", "B"),
        ("The answer is B.", "B"),
        ("Answer: (b)", "B"),
        ("The correct answer is option **C**, since A is a distractor.", "C"),
        ("Option D is tempting. The answer would be A", "A"),
        ("I first thought the answer is A. But the answer is C.", "C"),
        (r"Thus $\boxed{B}$. The answer is clear.", "B"),
        (r"\boxed{\text{D}}", "D"),
        (r"\boxed{A} or rather \boxed{B}", "B"),
        ("A\nB\nC\nD", "D"),
        ("The answer is B. Option A is wrong.", "B"),
        ("The answer is B, as option I considered first was off.", "B"),
        ("The answer is B, I think.", "B"),
        ("The answer is B I think.", "B"),
        ("The answer is B, a classic.", "B"),
        ("The answer is B (A is wrong).", "B"),
        ("The answer is B and C is wrong.", "B"),
        ("The answer is B\nA) is tempting.", "B"),
        ("The answer is A because of its size", "A"),
        ("The answer is A\nMany would say so.", "A"),
        ("So the answer is a.", "A"),
        ("So the answer is (a) cat", "A"),
        ("Answer: **a** cat", "A"),
        ("Answer: I", "I"),
        ("**Answer:** B", "B"),
        ("**Answer**: B", "B"),
        ("Answer:\n\nB", "B"),
        ("The answer is 'B'", "B"),
        ("Option C is correct", "C"),
        ("I choose option C, since B is odd", "C"),
        ("Option C", "C"),
        ("The right choice is: option (d)", "D"),
        ("Let us see.\nB) Paris", "B"),
        ("(B) Paris", "B"),
        ("b) Paris", "B"),
        ("**B.** Paris", "B"),
        (r"\boxed{B) Paris}", "B"),
        (r"\boxed{\textbf{(B)}}", "B"),
        (r"\boxed{\text{B. Paris}}", "B"),
        (r"\mathrm{B}", "B"),
        (r"$\mathrm{B}$.", "B"),
        (r"The answer is $\mathrm{(B)}$.", "B"),
        # Nothing is chosen
        ("The answer is a bit unclear.", None),
        ("Answer: I do not know", None),
        ("Answer: A cat", None),
        ("The answer is A and/or B", None),
        ("The answer is A; or B", None),
        ("The answer is A B C D", None),
        ("Answer:\nA\nB\nC", None),
        ("Answer: B is wrong.", None),
        ("Option B is not correct", None),
        ("I would not choose option C there", None),
        ("Option A is tempting", None),
        (r"\boxed{A, B}", None),
        (r"\boxed{A) Rome B) Paris}", None),
        (r"\boxed{N = 3}", None),
        ("A) Rome\nB) Paris", None),
        ("A) Rome B) Paris", None),
        ("B) is wrong", None),
        ("The U.S. answer: U.S.", None),
        ("The answer is C++", None),
        ("", None),
        ("A or B", None),
        ("The answer is A or B", None),
        ("The answer is A, B, C, D", None),
        ("The answer is (A) and (C)", None),
        ("A cat sat on a mat", None),
        ("The answer is a cat", None),
        ("The answer is an apple", None),
        ("It's I who answer", None),
        ("The answer is I'm not sure", None),
        ("42", None),
    ],
)
def test_the_letter_that_is_chosen(response: str, letter: str | None) -> None:
    assert chosen_letter(response) == letter


@pytest.mark.parametrize(
    ("task", "right"),
    [
        ({"answer": "b"}, "B"),
        ({"answer": "(C)"}, "C"),
        ({"answer": "Paris", "choices": ["Rome", "Paris"]}, "B"),
        ({"answer": 2, "choices": ["x", "y", "z"]}, "C"),
        ({"answer": 2, "choices": [2, 1, 0]}, "A"),  # a value wins over a place
        ({"answer": "D", "choices": ["w", "x", "y", "z"]}, "D"),
    ],
)
def test_what_is_right(task: dict[str, Any], right: str) -> None:
    for letter in "ABCD":
        there = letter in "ABCD"[: len(task.get("choices", "ABCD"))]
        assert choice(task, Trace("", [letter])) == Score(float(letter == right), "ok" if there else "parse_fail")
    assert choice(task, Trace("", ["Hm."])) == Score(0.0, "parse_fail")
    assert choice(task, Trace()) == Score(0.0, "parse_fail")


def test_letters_beyond_the_choices_are_none() -> None:
    task = {"answer": "B", "choices": ["x", "y", "z"]}
    assert choice(task, Trace("", ["The answer is B. The answer is D"])) == Score(1.0)
    assert choice(task, Trace("", ["The answer is D"])) == Score(0.0, "parse_fail")
    assert choice({"answer": "B"}, Trace("", ["The answer is D"])) == Score(0.0)


@pytest.mark.parametrize("task", [{}, {"answer": "Paris"}, {"answer": 7, "choices": ["a"]}, {"answer": True}])
def test_a_task_that_says_nothing(task: dict[str, Any]) -> None:
    with pytest.raises(EnvError, match="choice: the task's answer is .*; give a letter, or a text or a place among"):
        choice(task, Trace("", ["A"]))


@pytest.mark.parametrize(
    "text",
    ["(", "answer ", "\\boxed{", "A or ", "answer ( ", "answer" + " " * 1000, "answer is a and ", "B) x ", "A) x\n"],
)
def test_long_answers_take_little_time(text: str) -> None:
    began = time.process_time()
    assert chosen_letter(text * (400_000 // len(text)) + "42") is None
    assert time.process_time() - began < 30  # linear: 0.1; quadratic: 400,000 ** 2 steps, which are an hour
