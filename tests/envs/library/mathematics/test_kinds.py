"""Answers to references of every kind: which are right, that equality is symmetric, and what the docs say of it."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nrl.envs import Trace, number, score_of
from nrl.envs.library.mathematics.answers import answer_span
from nrl.envs.library.mathematics.comparing import equal, is_right, unusable
from nrl.envs.library.mathematics.nodes import NoValueError, UnreadableError
from nrl.envs.library.mathematics.reading import read
from nrl.envs.library.mathematics.words.tidying import same_number, tidy
from tests.envs import mathematics_doubts as doubts
from tests.envs.library.mathematics.rows import RESPONSES, ROWS, SHOWN

PAGE = Path(__file__).parents[4] / "docs" / "verifiers.md"


def reference_text(reference: str) -> str:
    """Return a reference in one way to write it; of a solution, its answer."""
    text = tidy(reference if "\\boxed" not in reference else answer_span(reference) or "")
    assert text is not None
    return text


def verdict(reference: str, answer: str | None) -> bool:
    """Return what the verifier's worker finds; an answer that cannot be read is wrong."""
    right, found = reference_text(reference), None if answer is None else tidy(answer)
    if found is not None and (right == found or (same := same_number(right, found)) is not None):
        return right == found or bool(same)
    try:
        return found is not None and is_right(right, found)
    except UnreadableError:
        return False


@pytest.mark.parametrize("kind", ROWS)
def test_verdicts_by_kind(kind: str) -> None:
    mistakes = [row for row in ROWS[kind] if verdict(row[0], row[1]) != row[2]]
    assert mistakes == []


@pytest.mark.parametrize("kind", ROWS)
def test_no_readable_reference_is_refused(kind: str) -> None:
    references = {tidy(reference) or "" for reference, _, _ in ROWS[kind]}
    assert {reference: why for reference in references if (why := unusable(reference))} == {}


@pytest.mark.parametrize("kind", ROWS)
def test_equality_is_symmetric(kind: str) -> None:
    for reference, answer, _ in ROWS[kind]:
        try:
            first, second = (read(tidy(text) or "") for text in (reference, answer))
            assert equal(first, second) == equal(second, first), (reference, answer)
        except (UnreadableError, NoValueError):
            continue


TEXTS = sorted({text for rows in ROWS.values() for row in rows for text in row[:2]})


@given(st.sampled_from(TEXTS), st.sampled_from(TEXTS))
@settings(max_examples=400, deadline=None)
def test_equality_is_symmetric_between_kinds(first: str, second: str) -> None:
    """Two texts of any rows, which few rows compare."""
    try:
        left, right = read(tidy(first) or ""), read(tidy(second) or "")
        assert equal(left, right) == equal(right, left)
    except (UnreadableError, NoValueError):
        return


@pytest.mark.parametrize(("reference", "response", "right"), RESPONSES)
def test_verdicts_on_whole_responses(reference: str, response: str, right: bool) -> None:
    assert verdict(reference, answer_span(response)) is right


def mistakes_in(rows: Mapping[str, tuple[str, str]], pays: Callable[[str, str], bool]) -> list[tuple[str, str, bool]]:
    """Return the answers of a table that do not get what they should, each with its reference."""
    answers = [
        (reference, answer, right)
        for reference, sides in rows.items()
        for right, side in zip((True, False), sides, strict=True)
        for answer in side.split(" ¦ ")
        if answer
    ]
    return [row for row in answers if pays(row[0], row[1]) is not row[2]]


def test_answers_in_boxes_pay_what_they_say() -> None:
    assert not mistakes_in(
        doubts.BOXED, lambda right, answer: verdict(right, answer_span(rf"So $\boxed{{{answer}}}$."))
    )
    assert {reference: why for reference in doubts.BOXED if (why := unusable(reference_text(reference)))} == {}


def test_responses_that_doubt_their_answer_earn_nothing() -> None:
    assert not mistakes_in(doubts.RESPONSES, lambda right, response: verdict(right, answer_span(response)))


def test_responses_that_doubt_their_number_earn_nothing() -> None:
    def pays(right: str, response: str) -> bool:
        return bool(score_of(number({"answer": right}, Trace("", [response]))).reward)

    assert not mistakes_in(doubts.NUMBERS, pays)


@pytest.mark.parametrize("size", [1e-300, 1e-30, 1e-16, 1.0, 1e16, 1e300])
def test_numbers_of_every_size_are_told_apart(size: float) -> None:
    """Also where both are smaller than any tolerance, as numbers, within lists and within intervals."""
    first, second = f"{size:.0e}", f"{2 * size:.0e}"
    for form in ("{}", r"\sqrt{{{}}}", "(0,{})", "1, {}", "x < {}", "{}x", "[-1,{}]", r"\frac{{1}}{{{}}}"):
        assert not verdict(form.format(first), form.format(second))
        assert verdict(form.format(first), form.format(first))


@pytest.mark.parametrize("text", ["", r"\frac{1}{", "42 43", "1/0", "0/0", "9^{9^9}", "(1,", r"\unknown{2}", "[3,1]"])
def test_an_unusable_reference_has_a_reason(text: str) -> None:
    assert unusable(text)


def table_of(kind: str) -> str:
    """Return the rows of a kind as the docs show them."""
    shown = ROWS[kind][: SHOWN[kind]]
    found = dict[str, tuple[list[str], list[str]]]()
    for reference, answer, right in shown:
        found.setdefault(reference, ([], []))[not right].append(f"`{answer}`".replace("|", "\\|"))
    lines = [f"| {kind} | right | wrong |", "|---|---|---|"]
    lines += [f"| `{reference}` | {', '.join(a)} | {', '.join(b)} |" for reference, (a, b) in found.items()]
    return "\n".join(lines)


@pytest.mark.parametrize("kind", ROWS)
def test_the_docs_have_the_table_of_each_kind(kind: str) -> None:
    assert table_of(kind) in PAGE.read_text()
