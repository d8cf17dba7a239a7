r"""Find the final answer of a response, as text.

**Where it is looked for**, in the last 16,384 characters of a response. The first of these that it has decides:

1. the last line that ``####`` begins and that is no heading;
2. the last ``\boxed{...}``, which has to be closed, and those that only a comma, "and" or "or" parts from it: then the
   answer is all of them together;
3. the last ``<answer>...</answer>``, ``"answer": ...`` of JSON, or line ``Answer: even``, if no formula stands behind;
4. the last formula (``$...$``, ``$$...$$``, ``\(...\)``, ``\[...\]``), unless a number stands behind it;
5. a last line, or what follows "answer is", "答案是" or the like in it, that has no words in it; or so an earlier line,
   where those behind it have no numbers;
6. the last number, as `nrl.envs.final_number` finds it.

All of it is linear in the text, and nothing is evaluated.
"""

import re
from typing import NamedTuple

from nrl.envs.final_numbers import final_number, joined_boxes, marked_number
from nrl.envs.library.mathematics.words.hedges import is_denied, is_doubted, is_question, retraction_end
from nrl.envs.library.mathematics.words.spoken import spoken_number
from nrl.envs.library.mathematics.words.statements import (
    SAYS,
    is_taken_back,
    last_statement,
    may_be_formula,
    sentence_end_removed,
)
from nrl.envs.library.mathematics.words.tidying import LONGEST, written

__all__ = ["FORMULA", "READ", "answer_span", "final_answer"]

READ = 16_384
_MOST_RETRACTIONS = 3
_MARKS = 8  # of which the last is no heading
_LINES = 8  # from the last, where those behind an answer have no numbers in them

_MARK = re.compile(r"(?<!#)####(?!#)([^\n#]*)")
_JOINED = re.compile(r"[\s,]*(?:or|and)\s*")
FORMULA = re.compile(
    r"(?<!\\)\$\$(?P<a>[^$]+)\$\$|\\\[(?P<b>(?:[^\\]|\\[^\]\[])+)\\\]|\\\((?P<c>(?:[^\\]|\\[^()])+)\\\)"
    r"|(?<![\\$])\$(?=[^\s$])(?P<d>[^$\n]*[^\s$\\])\$(?![0-9$])"
)


def final_answer(response: str) -> str | None:
    r"""The final answer of a response; the module's docstring says where it is looked for.

    Args:
        response: the model's text.

    Returns:
        A number in lowest terms, or LaTeX without what does not matter; equal texts are equal answers, though equal
        answers may have texts that differ. None: the response holds no answer.

    >>> final_answer(r"So \boxed{0.50}."), final_answer(r"It is $x = \dfrac12$."), final_answer("Nothing.")
    ('1/2', 'x=\\frac12', None)
    """
    span = answer_span(response)
    return None if span is None else written(span)


def answer_span(response: str) -> str | None:
    r"""Return the part of a response that is its final answer, as it stands there; None: there is none.

    >>> answer_span(r"So \boxed{0.50}."), answer_span("Nothing."), answer_span(r"It is not \boxed{2}.")
    ('0.50', None, None)
    """
    text = response[-READ:]
    for _ in range(_MOST_RETRACTIONS):
        span = _candidate(text)
        if span is None:
            return None
        if (behind := retraction_end(text, span.end)) < 0:
            doubted = is_denied(text, span.start, span.end) or is_doubted(text, span.start, span.end)
            return None if doubted or is_question(text, span.end) else span.text
        text = text[behind:]
    return None


class _Span(NamedTuple):
    """An answer and where it begins and ends."""

    text: str
    start: int
    end: int


def _candidate(text: str) -> _Span | None:
    """Return what a text ends with as its answer, whether or not the words around it deny it."""
    for mark in reversed(list(_MARK.finditer(text))[-_MARKS:]):
        if mark[1].strip() and (_may_be_answer(mark[1]) or next(marked_number(mark[0]), None) is not None):
            return _Span(mark[1], *mark.span())
    boxes = joined_boxes(text)
    if boxes is None:
        return None
    if boxes:
        return _Span(", ".join(box[2] for box in boxes), boxes[0][0], boxes[-1][1])
    formulas = list(FORMULA.finditer(text))[-2:]
    formula = formulas[-1] if formulas else None
    statement = last_statement(text)
    if statement is not None and (formula is None or formula.end() <= statement.end):
        inner = answer_span(statement.text) if statement.marked and len(statement.text.split()) > 3 else statement.text
        if inner and not is_taken_back(text[statement.end :]):
            return _Span(inner, statement.start, statement.end)
    if formula is not None:
        if behind := final_number(text[formula.end() :]):
            return _Span(behind, len(text), len(text))
        start = formula.start()
        contents = _content(formula)
        if len(formulas) == 2 and _JOINED.fullmatch(text, formulas[0].end(), start):
            start, contents = formulas[0].start(), f"{_content(formulas[0])}, {contents}"
        return _Span(contents, start, formula.end())
    end = len(text)
    lines = text.split("\n")
    for count, line in enumerate(line for line in reversed(lines[-_LINES:]) if line.strip()):
        start = text.rindex(line, 0, end)
        *_, said = [0, *(match.end() for match in SAYS.finditer(line))]
        bare = sentence_end_removed(line[said:], bool(said))
        if bare and (_may_be_answer(bare) or spoken_number(bare) is not None) and (said or not count):
            return _Span(bare, start + said, start + line.index(bare, said) + len(bare))
        if re.search(r"[0-9=+*/^\\$]", line) or is_taken_back(line):
            break
        end = start
    number = final_number(text)
    return None if number is None else _Span(number, len(text), len(text))


def _content(formula: re.Match[str]) -> str:
    return next(part for part in formula.group("a", "b", "c", "d") if part is not None)


def _may_be_answer(text: str) -> bool:
    return len(text) <= LONGEST and may_be_formula(text)
