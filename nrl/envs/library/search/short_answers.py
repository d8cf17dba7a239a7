"""`short_answer`: a name, a date, a few words, compared as SQuAD does, but for numbers.

**Where it looks.** In the last ``<answer>...</answer>`` of a response; where there is none, in its last line, without
an ``Answer:`` in front. A response that opens the last pair and does not close it has no answer.

**When texts are equal.** Without case, punctuation, the articles a, an and the, and further white space. Where a text
is nothing but a number, its value counts instead: without punctuation ``-5`` would be ``5``, and ``1/2`` would be
``12``.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from nrl.envs.types import Score, Task, Trace
from nrl.envs.verifiers import extracts
from nrl.errors import EnvError

__all__ = ["short_answer"]

_READ = 10_000  # characters of a response's end
_OPEN, _CLOSE = "<answer>", "</answer>"
_LED = re.compile(r"(?:final )?answer\s*:", re.IGNORECASE)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_NUMBER = re.compile(  # one with a zero in front, such as 007, is a name
    r"(?P<sign>[-+\u2212]?) ?[$\u20ac\u00a3]?(?P<value>(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[1-9][0-9]*|0)(?:\.[0-9]+)?"
    r"|\.[0-9]+)(?: ?/ ?(?P<under>[1-9][0-9]*))?\.?"
)
_LONGEST = 100  # characters of a number


def _number(text: str) -> str | None:
    found = _NUMBER.fullmatch(text) if len(text) <= _LONGEST else None
    if found is None:
        return None
    value = Fraction(found["value"].replace(",", "")) / int(found["under"] or 1)
    return str(-value if found["sign"] in ("-", "\u2212") else value)


def _normal(text: str) -> str:
    if (number := _number(text.strip())) is not None:
        return number
    plain = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", plain).split()) or " ".join(text.lower().split())  # "The" is an answer, too


def _given(response: str) -> str | None:
    """The answer of a response as it is compared; None: there is none."""
    text = response[-_READ:]
    opened = text.rfind(_OPEN)
    if opened >= 0:
        closed = text.find(_CLOSE, opened)
        found = text[opened + len(_OPEN) : closed] if closed >= 0 else ""
    else:
        lines = [line.strip(" \t*_`") for line in text.splitlines() if line.strip(" \t*_`")]
        found = lines[-1] if lines else ""
        led = _LED.match(found)
        found = found[led.end() :] if led else found
    return _normal(found) or None


@extracts(_given)
def short_answer(task: Task, trace: Trace) -> Score:
    """1 if the response's answer is one of the right ones; otherwise 0. The module's docstring has the rules.

    Args:
        task: ``"answers"``, a list of texts, or else ``"answer"``, a text or a list.
        trace: its last answer is read.

    Returns:
        A reward of 1 or 0, with the component ``f1``, the harmonic mean of precision and recall over words, against the
        right answer that fits best; if the response has no answer 0, with the status ``"parse_fail"``.

    Raises:
        EnvError: the task has no such answer.

    >>> task = {"answer": ["the Analytical Engine", "Analytical Engine"]}
    >>> short_answer(task, Trace("", ["<answer>Analytical engine.</answer>"])).reward
    1.0
    >>> short_answer(task, Trace("", ["Answer: an engine"]))
    Score(reward=0.0, status='ok', components={'f1': 0.6666666666666666})

    >>> short_answer({"answer": "1/2"}, Trace("", ["0.5"])).reward
    1.0

    Source: the evaluation of SQuAD 1.1, Rajpurkar et al., 2016 (1606.05250), but for numbers.
    """
    right = [_normal(each) for each in _right(task)]
    found = _given(trace.answer)
    if found is None:
        return Score(0.0, "parse_fail", {"f1": 0.0})
    return Score(float(found in right), components={"f1": max(_f1(found, each) for each in right)})


def _f1(found: str, right: str) -> float:
    some, others = Counter(found.split()), Counter(right.split())
    return 2 * (some & others).total() / (some.total() + others.total())


def _right(task: Task) -> Sequence[str]:
    given = task.get("answers", task.get("answer"))
    every = [given] if isinstance(given, str) else given
    if isinstance(every, Sequence) and every and all(isinstance(each, str) and each.strip() for each in every):
        return every
    raise EnvError(
        f"short_answer: the task's answer is {given!r:.200}; give a text, or a list of all texts that are right, as "
        "'answer' or 'answers'"
    )
