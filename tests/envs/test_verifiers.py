"""Verifiers: which responses hold the answer, and which tasks have none."""

import json
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nrl import envs
from nrl.envs import Score, Task, Trace, extractor, extracts, final_number
from nrl.errors import EnvError
from tests.work import calls


def exact(task: Task, response: str) -> float:
    return envs.exact(task, Trace("", [response]))


def number(task: Task, response: str) -> float:
    return graded(envs.number(task, Trace("", [response])), response)


def number_or_wrong(task: Task, response: str) -> float:
    return graded(envs.number_or_wrong(task, Trace("", [response])), response)


def graded(score: Score, response: str) -> float:
    assert score.status == ("ok" if final_number(response) is not None else "parse_fail")
    assert isinstance(score.reward, float)
    return score.reward


ROWS = [
    json.loads(line) for line in (Path(__file__).parents[1] / "data" / "gsm8k_sample.jsonl").read_text().splitlines()
]


@pytest.mark.parametrize(
    ("answer", "response", "reward"),
    [
        ("Paris", "Paris", 1.0),
        ("Paris", " \n Paris\t", 1.0),
        (" Paris\n", "Paris", 1.0),
        ("Paris", "paris", 0.0),
        ("Paris", "Paris.", 0.0),
        ("", "", 1.0),
        ("", "x", 0.0),
        ("4", "4.0", 0.0),
        (4, "4", 1.0),
        (0.5, "0.5", 1.0),
        (Fraction(1, 2), "1/2", 1.0),
    ],
)
def test_exact(answer: Any, response: str, reward: float) -> None:
    got = exact({"answer": answer}, response)
    assert type(got) is float
    assert got == reward


def test_numbers_of_many_digits_are_compared_as_text() -> None:
    digits = "1" + "0" * 5000
    for answer, response in ((10**5000, digits), (-(10**5000), f"-{digits}"), (Fraction(10**5000, 3), f"{digits}/3")):
        assert exact({"answer": answer}, response) == 1.0
        assert exact({"answer": answer}, f"{response}0") == 0.0


# What each response says, as a fraction; None where it has no answer.
SAYS: list[tuple[str, str | None]] = [
    # after ####
    ("#### 42", "42"),
    ("####42", "42"),
    ("6 * 7 = 42\n#### 42\n", "42"),
    ("#### 42 apples", "42"),
    ("#### 42.", "42"),
    ("#### -42", "-42"),
    ("#### −42", "-42"),
    ("#### $1,234.50 in all", "1234.5"),
    ("#### **42**", "42"),
    ("#### `42`", "42"),
    ("#### \\(42\\)", "42"),
    ("#### $42$", "42"),
    ("#### \\boxed{42}", "42"),
    ("#### \\frac{3}{4}", "3/4"),
    ("#### 50%", "50"),
    ("#### 6 * 7 = 42", "42"),
    ("#### 42 = 6 * 7", "42"),
    ("#### 1\n#### 2", "2"),
    ("#### 1 #### 2", "2"),
    ("#### 42\nThat took 3 steps.", "42"),
    ("#### 1,2", None),
    ("#### 1, 2", None),
    ("#### 41 or 42", None),
    ("#### 41 and 42", None),
    ("#### 6 * 7", None),
    ("#### 42 43", None),
    ("#### 42 | 43", None),
    ("#### 42 (or 43)", None),
    ("#### 42 to 50", None),
    ("#### 42 apples or maybe 43", None),
    ("#### 41 = 42", "42"),
    ("#### 6 * 7 = 42 or 43", None),
    ("#### (2 + 4) * 7 = 42", "42"),
    ("#### 42 apples = 6 * 7 apples", "42"),
    ("#### 9^{9^9}", None),
    # ... which a heading is not
    ("#### Step 1\nAdd.\n#### Step 2\nSo 42.", "42"),
    ("#### 1. Add up\n#### 2. Conclude\nIt is 42.", "42"),
    ("#### 2) **Conclude**\nIt is 42.", "42"),
    ("#### 42\n#### Done", "42"),
    ("####\n42", "42"),
    ("##### 1\nIt is 42.", "42"),
    # in a box
    ("\\boxed{42}", "42"),
    ("$\\boxed{42}$.", "42"),
    ("\\boxed {42}", "42"),
    ("\\fbox{42}", "42"),
    ("\\boxed{1} or rather \\boxed{2}", "2"),
    ("\\boxed{42} of the 50", "42"),
    ("\\boxed{-42}", "-42"),
    ("\\boxed{\\$1{,}234}", "1234"),
    ("\\boxed{1,\\!234}", "1234"),
    ("\\boxed{1\\,234\\,567}", "1234567"),
    ("\\boxed{42\\%}", "42"),
    ("\\boxed{x = 42}", "42"),
    ("\\boxed{6 \\times 7 = 42}", "42"),
    ("\\boxed{\\text{42}}", "42"),
    ("\\boxed{\\mathbf{42}}", "42"),
    ("\\boxed{42 \\text{ apples}}", "42"),
    ("\\boxed{42\\text{ cm}^2}", "42"),
    ("\\boxed{42\\ \\mathrm{m}^{2}}", "42"),
    ("\\boxed{90^\\circ}", "90"),
    ("\\boxed{90^{\\circ}}", "90"),
    ("\\boxed{\\frac{3}{4}}", "3/4"),
    ("\\boxed{-\\dfrac{3}{4}}", "-3/4"),
    ("\\boxed{\\frac{-3}{4}}", "-3/4"),
    ("\\boxed{\\frac34}", "3/4"),
    ("\\boxed{1\\frac{1}{2}}", "3/2"),
    ("\\boxed{1 \\tfrac12}", "3/2"),
    ("\\boxed{\\left( 42 \\right)}", "42"),
    ("\\boxed{\\boxed{42}}", "42"),
    ("\\boxed{42 \\} \\text{cats \\{ here}}", "42"),
    ("\\boxed{1,2}", None),
    ("\\boxed{1, 2}", None),
    ("\\boxed{(3, 4)}", None),
    ("\\boxed{3 \\text{ or } 4}", None),
    ("\\boxed{10 - 3}", None),
    ("\\boxed{2^{10}}", None),
    ("\\boxed{9^{9^9}}", None),
    ("\\boxed{9^{9^{9^{9}}}}", None),
    ("\\boxed{x^2}", None),
    ("\\boxed{2\\pi}", None),
    ("\\boxed{\\sqrt{4}}", None),
    ("\\boxed{√4}", None),
    ("\\boxed{5!}", None),
    ("\\boxed{\\frac{x}{2}}", None),
    ("\\boxed{5 \\times 10^3}", None),
    ("\\boxed{}", None),
    ("\\boxed{none}", None),
    ("It is 42, so \\boxed{none}", None),
    ("\\boxed{42", None),
    ("\\boxed{4} no, \\boxed{42", None),
    # #### before a box before the last number
    ("#### 1\n\\boxed{2}\n3", "1"),
    ("\\boxed{2}\n#### 1\n3", "1"),
    ("\\boxed{2} and 3", "2"),
    # the last number
    ("42", "42"),
    ("The answer is 42.", "42"),
    ("The answer is 42.0.", "42"),
    ("So it is 42.5, I think", "42.5"),
    ("First 1, then 2, at last 42!", "42"),
    ("6 * 7 = 42", "42"),
    ("<<48/2=24>>24 clips", "24"),
    ("The answer is **42**.", "42"),
    ("The answer is *42*.", "42"),
    ("The answer is __42__.", "42"),
    ("It is $42.", "42"),
    ("It is $ 42.", "42"),
    ("It is -$42.", "-42"),
    ("It is $-42.", "-42"),
    ("It costs 42€ or £ 43", "43"),
    ("Rs.500", "500"),
    ("US$42", "42"),
    ("It is 1,234,567.89", "1234567.89"),
    ("It is 1{,}234", "1234"),
    ("It is 1\u202f234, not 1\u00a0235", "1234"),
    ("42%", "42"),
    ("42 percent", "42"),
    ("5kg", "5"),
    ("the 42nd", "42"),
    ("42 m^2", "42"),
    ("42 m²", "42"),
    ("20°", "20"),
    ("-42", "-42"),
    ("x=-42", "-42"),
    ("(42)", "42"),
    ("(-42)", "-42"),
    ("+42", "42"),
    ("- 42", "42"),  # a list's dash
    ("item-42", "42"),
    ("007", "7"),
    ("0.50", "1/2"),
    (".5", "1/2"),
    ("...5", "5"),
    ("3/4", "3/4"),
    ("-3/4", "-3/4"),
    ("3 / 4", "3/4"),
    ("1 1/2 hours", "3/2"),
    ("-1 1/2", "-3/2"),
    ("1½ hours", "3/2"),
    ("½", "1/2"),
    ("A ¼", "1/4"),
    ("¾ of it", "3/4"),
    ("⅓", "1/3"),
    ("⅔", "2/3"),
    ("1e3", "1000"),
    ("1.5E-3", "0.0015"),
    ("答案是42。", "42"),
    ("I saw v1.5 of GPT4 say 42", "42"),
    ("1, 2", None),
    ("", None),
    ("I do not know.", None),
    ("forty-two", None),
    ("H2O and v1.5", None),
    ("1,2", None),
    ("1,23,456", None),
    ("0,123", None),
    ("1.2.3", None),
    ("10:30", None),
    ("3-4", None),
    ("10 - 3", None),
    ("6*7", None),
    ("6 x 7", None),
    ("6 × 7", None),
    ("2^10", None),
    ("2**10", None),
    ("2^{10}", None),
    ("10²", None),
    ("\\sqrt{2}", None),
    ("1/0", None),
    ("3/4/5", None),
    ("1 3/2", None),
    ("1e5000", None),
    ("1e999999999999", None),
    ("9" * 1001, None),
    ("42, to be exact 1,2", None),
]


@pytest.mark.parametrize(("response", "says"), SAYS)
def test_number(response: str, says: str | None) -> None:
    for candidate in {"42", "-42", "2", "10", "9", "12", says or "1"}:
        reward = number({"answer": Fraction(candidate)}, response)
        assert type(reward) is float
        assert reward == float(says is not None and Fraction(candidate) == Fraction(says)), candidate


@pytest.mark.parametrize(("response", "says"), SAYS)
def test_the_final_number_is_what_number_compares(response: str, says: str | None) -> None:
    assert final_number(response) == (None if says is None else str(Fraction(says)))


def test_the_longest_numeral_has_a_text() -> None:
    assert final_number("9" * 995 + "e999") == "9" * 995 + "0" * 999


@given(st.fractions(), st.sampled_from(["{}", "so {}", "#### {}", "\\boxed{{{}}}"]))
def test_equal_numbers_are_equal_answers(value: Fraction, template: str) -> None:
    assert final_number(template.format(value)) == str(value)


def test_a_verifier_says_how_its_answer_is_extracted() -> None:
    assert extractor(envs.number) is final_number
    found = extractor(envs.exact)
    assert found is not None
    assert (found(" Paris\n"), found(" ")) == ("Paris", "")
    assert extractor(lambda task, trace: 1.0) is None

    @extracts(str.upper)
    def loud(task: Any, trace: Trace) -> float:
        return float(trace.text.upper() == task["answer"])

    assert loud({"answer": "A"}, Trace("", ["a"])) == 1.0  # the verifier is what it was
    assert extractor(loud) is str.upper


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        (42, "42"),
        (-3, "-3"),
        (0.1, "0.1"),
        (1e-05, "0.00001"),
        (1e22, "1e22"),
        (Decimal("1.50"), "1.5"),
        (Fraction(3, 4), "3/4"),
        ("42", "42"),
        (" 42\n", "42"),
        ("$1,234.50", "1234.5"),
        ("3/4", "3/4"),
        ("42 apples", "42"),
        ("x = 42", "42"),
        ("\\boxed{42}", "42"),
        ("1 + 1 = 2\n2 + 2 = 4\n#### 4", "4"),
        ("#### 57,500", "57500"),
        ("#### -12", "-12"),
    ],
)
def test_what_an_answer_may_be(answer: Any, value: str) -> None:
    assert number({"answer": answer}, f"It is {value}") == 1.0
    assert number({"answer": answer}, "It is 77") == 0.0


def test_an_answer_with_more_digits_than_are_read_is_an_error() -> None:
    for answer in (10**5000, Fraction(10**5000, 7), "9" * 5001):
        with pytest.raises(EnvError, match=r"^number: task\['answer'\] is .*, from which no number can be read; give"):
            number({"answer": answer}, "1" + "0" * 5000)
    assert number({"answer": 42}, "9" * 5001) == 0.0


NO_NUMBER: list[Any] = ["", "forty-two", "1,2", "1 or 2", "2 + 2", "9^{9^9}", "One is 1, the other 2", "#### forty"]
NO_NUMBER += ["\\boxed{x}", "6 * 7 makes 42, see 1\n####", "9" * 1001, float("nan"), float("inf")]
NO_NUMBER += [Decimal("NaN"), Decimal("1e999999999")]


@pytest.mark.parametrize("answer", NO_NUMBER)
def test_an_answer_without_a_number_is_an_error_and_not_a_reward(answer: Any) -> None:
    with pytest.raises(EnvError, match=r"number: task\['answer'\] is .*, from which no number can be read; give"):
        number({"answer": answer}, "42")


@pytest.mark.parametrize("answer", NO_NUMBER)
def test_an_answer_without_a_number_makes_every_response_wrong_where_that_was_asked_for(answer: Any) -> None:
    for response in ("42", str(answer) if not isinstance(answer, int) else "", "I do not know."):
        assert number_or_wrong({"answer": answer}, response) == 0.0


@pytest.mark.parametrize("verifier", [exact, number, number_or_wrong])
@pytest.mark.parametrize("answer", [None, True, ["42"], {"a": 1}, b"42"])
def test_an_answer_of_another_type_is_an_error(verifier: Any, answer: Any) -> None:
    name = verifier.__name__
    with pytest.raises(EnvError, match=rf"{name}: task\['answer'\] is .*; give a string or a number"):
        verifier({"answer": answer}, "42")


@pytest.mark.parametrize("verifier", [exact, number, number_or_wrong])
@pytest.mark.parametrize(
    ("task", "found"), [({"prompt": "?", "solution": "42"}, "'prompt', 'solution'"), ({}, "nothing")]
)
def test_a_missing_answer_is_an_error(verifier: Any, task: dict[str, str], found: str) -> None:
    with pytest.raises(EnvError, match=f"{verifier.__name__}: the task has no 'answer', only {found}; name the column"):
        verifier(task, "42")


def test_a_long_answer_is_shown_by_its_end() -> None:
    with pytest.raises(EnvError, match=r"is '\.\.\.(a ){90,100}#### end', from which"):
        number({"answer": "a " * 1000 + "#### end"}, "42")


def test_the_lenient_verifier_is_number_where_there_is_one() -> None:
    assert extractor(envs.number_or_wrong) is final_number
    for row in ROWS:
        for response in (row["answer"], "72", "1,200", "I do not know."):
            assert number_or_wrong(row, response) == number(row, response)


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
def test_real_solutions(row: dict[str, str]) -> None:
    solution, last = row["answer"].rsplit("#### ", 1)
    value = int(last.replace(",", ""))
    right = [
        row["answer"],
        last,
        f"{solution}The answer is {last}.",
        f"{solution}\\boxed{{{last.replace(',', '{,}')}}}",
        f"{solution}So she pays **{'-' * (value < 0)}${abs(value):,}.00** in all.",
        f"{solution}#### {value}",
        f"{solution}#### {value}.0 dollars",
    ]
    wrong = [
        "",
        f"{solution}#### {value + 1}",
        f"{solution}\\boxed{{{-value or 1}}}",
        f"{solution}The answer is {value}1.",
        f"{solution}The answer is {value}.5",
        f"#### {value}, {value + 1}",
        f"#### {value - 1}\nor {value}",
        f"{row['answer']}\n#### {value + 10}",
    ]
    assert [number(row, response) for response in right] == [1.0] * len(right)
    assert [number(row, response) for response in wrong] == [0.0] * len(wrong)


def test_the_solutions_of_other_questions_are_wrong() -> None:
    values = [int(row["answer"].rsplit("#### ", 1)[1].replace(",", "")) for row in ROWS]
    for row, value in zip(ROWS, values, strict=True):
        assert [number(row, other["answer"]) for other in ROWS] == [float(other == value) for other in values]


@given(
    st.integers(-(10**30), 10**30),
    st.sampled_from(["{}", "#### {}", "\\boxed{{{}}}", "is ${}.", "so **{}**", "x = {}", "{} apples", "1 + 1 = {}%"]),
)
def test_any_integer_is_found_in_any_form(value: int, form: str) -> None:
    for text in (f"{value}", f"{value:,}", f"{value:_}".replace("_", "{,}"), f"{value}.00", f"{value}/1"):
        assert number({"answer": value}, form.format(text)) == 1.0
        assert number({"answer": value + 1}, form.format(text)) == 0.0


@given(st.decimals(-(10**9), 10**9, places=3))
def test_decimals_are_exact(value: Decimal) -> None:
    assert number({"answer": str(value)}, f"It is {value}.") == 1.0
    assert number({"answer": Fraction(value) + Fraction(1, 10**30)}, f"It is {value}.") == 0.0


@given(st.integers(0, 10**6), st.integers(1, 10**6))
def test_fractions_are_exact(top: int, bottom: int) -> None:
    for form in (f"{top}/{bottom}", f"\\frac{{{top}}}{{{bottom}}}", f"\\boxed{{\\dfrac{{{top}}}{{{bottom}}}}}"):
        assert number({"answer": Fraction(top, bottom)}, form) == 1.0


def test_marks_without_a_number_take_no_time() -> None:
    """None of them is looked at closely: two functions are called for each."""

    def both() -> None:
        assert number({"answer": "42"}, "#### 42\n" + "#### and\n" * 100_000) == 1.0
        assert number({"answer": "0.5"}, "#### ½\n" + "#### \n" * 100_000) == 1.0

    assert calls(both) < 3 * 200_000


@given(st.text() | st.text(alphabet="0123456789.,:/-+*^$#{}\\boxedfrac _%=x½√\u2009\n ", max_size=200))
@example("9^{9^9}")
@example("#### " * 3)
def test_any_response_has_a_reward(response: str) -> None:
    assert number({"answer": "42"}, response) in (0.0, 1.0)


PIECES = ["9", "1,", "1.", "1/", "1 ", "1-", "1x", "1e", "1 1/", "a", "a_", "a.1", "a ^", "_", ".", "^", "^("]
PIECES += ["9^{", "#", "#### ", "#### 1\n", "#### a\n", "#### 1 or ", "\\", "\\boxed{", "\\boxed ", "\\frac", "\\frac{"]
PIECES += ["\\frac{1", "{", "}", " ", "$ ", "-$", "½", "1\u2009", "*", "1**", "=1"]


BEGINNINGS = [head + piece for head in ("1", "^", "^{", "a^", "a^{", "\\boxed{", "\\frac{1") for piece in " {}9"]


@pytest.mark.parametrize("text", [*PIECES, *BEGINNINGS])
def test_time_is_linear_in_the_response(text: str) -> None:
    long = text * (100_000 // len(text)) if text in PIECES else text + text[-1] * 100_000
    begin = time.process_time()
    number({"answer": "42"}, long)
    assert time.process_time() - begin < 30  # linear: 0.2; quadratic: 100,000 ** 2 steps, which are more
