r"""`choice`: multiple choice, by the letter that a response ends with.

**Where it looks.** The first of these that a response has decides, and of several of one kind the last:

1. ``\boxed{B}``;
2. "the answer is B", "answer: (B)", "option B is correct" and the like;
3. a response, or its last line, that is nothing but a letter: ``B``, ``(b)``, ``**B.**``.

A response that names several letters there (``A or B``, ``A, B, C, D``) has no answer. A letter elsewhere is a word.
"""

import re
from typing import Any

from nrl.envs.contract import Score, Task, Trace
from nrl.envs.verifiers import extracts
from nrl.errors import EnvError

__all__ = ["choice", "chosen_letter"]

_LETTER = r"[\s*_`$({\[\"']*(?:\\text(?:bf)?\{)?(?P<letter>[A-Za-z])(?![\w'\u2019])[)}\]*_`\"'$.:]*"
_BOXED = re.compile(r"\\boxed\{" + _LETTER + r"\s*\}")
_SAID = re.compile(
    r"\b(?:answer|choice|option)\b(?:\s(?:is|(?:would|must)\sbe|choice|option))*\s?[:=]?\s?(?:option|choice)?"
    + _LETTER,
    re.IGNORECASE,
)
_ALONE = re.compile(_LETTER + r"\s*")
_MORE = re.compile(r"\s*(?:,|/|\bor\b|\band\b|&)\s*[(\[*]*[A-Za-z](?!\w)", re.IGNORECASE)  # another letter behind


def chosen_letter(response: str) -> str | None:
    r"""The letter that a response chooses, in upper case; the module's docstring has the rules.

    >>> chosen_letter("A is tempting, but the answer is (b)."), chosen_letter(r"So \boxed{C}"), chosen_letter("A or B")
    ('B', 'C', None)
    """
    text = "\n".join(" ".join(line.split()) for line in response.splitlines() if line.strip())  # patterns stay linear
    for pattern in (_BOXED, _SAID):
        found = list(pattern.finditer(text))
        if found:
            last = found[-1]
            return None if _MORE.match(text, last.end()) else last["letter"].upper()
    lines = text.splitlines()
    alone = _ALONE.fullmatch(lines[-1]) if lines else None
    return alone["letter"].upper() if alone else None


@extracts(chosen_letter)
def choice(task: Task, trace: Trace) -> Score:
    """1 if the response chooses the right letter; otherwise 0. The module's docstring has the rules.

    Args:
        task: ``"answer"`` is a letter; or, if there is ``"choices"``, a list of texts, one of these, or its place
            from 0.
        trace: its last answer is read.

    Returns:
        A reward of 1 or 0; if the response chooses nothing 0, with the status ``"parse_fail"``.

    Raises:
        EnvError: the task has no such ``"answer"``.

    >>> choice({"answer": "B"}, Trace("", ["The answer is B."])).reward
    1.0
    >>> choice({"answer": "Paris", "choices": ["Rome", "Paris"]}, Trace("", ["A"])).reward
    0.0
    """
    right, found = _right(task), chosen_letter(trace.text)
    return Score(float(found == right), "parse_fail" if found is None else "ok")


def _right(task: Task) -> str:
    answer, choices = task.get("answer"), task.get("choices")
    if choices is not None:
        place = _place(answer, list(choices))
        if place is not None:
            return chr(ord("A") + place)
    if isinstance(answer, str) and re.fullmatch(r"\(?[A-Za-z]\)?", answer.strip()):
        return answer.strip(" ()").upper()
    raise EnvError(
        f"choice: the task's answer is {answer!r}, and its choices are {choices!r}; give a letter, or a text or a "
        "place among the choices"
    )


def _place(answer: Any, choices: list[Any]) -> int | None:
    if answer in choices and not isinstance(answer, bool):
        return choices.index(answer)
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        return answer
    return None
