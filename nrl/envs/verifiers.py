r"""Verifiers for tasks with a known answer: `exact` compares text, `number` and `number_or_wrong` compare numbers.

Each has an extractor, by `extracts`, which takes the answer out of a response: for votes among several samples.
"""

from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

from nrl.envs.final_numbers import expected_value, final_number, final_value
from nrl.envs.plain_values import plain_text, shown_value
from nrl.envs.types import Score, Task, Trace, Verifier
from nrl.errors import EnvError

__all__ = [
    "VERIFIERS",
    "Extractor",
    "answer_of",
    "describe_answer",
    "exact",
    "extractor",
    "extracts",
    "number",
    "number_or_wrong",
]

type Extractor = Callable[[str], str | None]
"""``response -> answer``: equal answers have equal texts; None: the response holds no answer."""


def extracts[V: Callable[..., Any]](extract: Extractor) -> Callable[[V], V]:
    """Give a verifier its extractor, which takes the answer out of a response.

    Args:
        extract: from a response to the answer as text, or None. Responses with equal answers get equal rewards.

    >>> @extracts(lambda response: response.strip().lower() or None)
    ... def same_word(task, trace):
    ...     return float(trace.answer.strip().lower() == task["answer"])
    >>> extractor(same_word)(" Paris")
    'paris'
    """

    def decorate(verifier: V) -> V:
        verifier.__dict__["extract"] = extract
        return verifier

    return decorate


def extractor(verifier: Verifier) -> Extractor | None:
    """The extractor of a verifier; None: it has none.

    >>> extractor(number)("It is 6 * 7 = 42.0."), extractor(exact)(" Paris ")
    ('42', 'Paris')
    >>> extractor(lambda task, trace: 1.0)
    """
    found: Extractor | None = getattr(verifier, "extract", None)
    return found


@extracts(str.strip)
def exact(task: Task, trace: Trace) -> float:
    """1 if the response is the answer, up to white space around either; otherwise 0.

    Args:
        task: ``"answer"`` is a string or a number, which is compared as Python writes it.
        trace: its last answer is read.

    Returns:
        1.0 or 0.0.

    Raises:
        EnvError: the task has no such ``"answer"``.

    >>> exact({"answer": "Paris"}, Trace("", [" Paris\\n"])), exact({"answer": "4"}, Trace("", ["four"]))
    (1.0, 0.0)
    """
    answer = answer_of("exact", task)
    return float(trace.reasoning_ended and trace.answer.strip() == plain_text(answer).strip())


@extracts(final_number)
def number(task: Task, trace: Trace) -> Score:
    r"""1 if the final number of the response equals the answer's; otherwise 0. `nrl.envs.final_numbers` has the rules.

    Args:
        task: ``"answer"`` is a number, a string that holds one number (``"42"``, ``"$1,234.50"``, ``"\\boxed{42}"``),
            or a solution that ends in ``#### 42``. A ``float`` stands for the decimal that Python writes for it.
        trace: its last answer is read.

    Returns:
        A reward of 1 or 0; if the answer has no number 0, with the status ``"parse_fail"``.

    Raises:
        EnvError: the task has no ``"answer"``, or no number can be read from it.

    >>> number({"answer": "6 * 7 = 42\n#### 42"}, Trace("", ["The answer is $42.00."])).reward
    1.0
    >>> number({"answer": 1234}, Trace("", [r"So \boxed{1{,}234} apples, of which 5 are left."])).reward
    1.0
    >>> number({"answer": "12"}, Trace("", ["I do not know."]))
    Score(reward=0.0, status='parse_fail', components={})

    Source: the format ``#### 42`` is that of Cobbe et al., 2021, "Training Verifiers to Solve Math Word Problems".
    """
    answer = answer_of("number", task)
    expected = expected_value(answer)
    if expected is None:
        raise EnvError(
            f"number: {_no_number(answer)}; give a number, or a solution that ends in '#### 42'; or let every response "
            "to it count as wrong, by number_or_wrong"
        )
    return _score(trace, expected)


@extracts(final_number)
def number_or_wrong(task: Task, trace: Trace) -> Score:
    r"""`number`; but if no number can be read from the right answer, every response is wrong.

    For sources with some answers that are no numbers, such as expressions, names or intervals. `number` fails on them,
    so their rows are invalid. Here they are valid with a reward of 0, so they lower the mean reward; a group of them
    teaches nothing.

    Args:
        task: has an ``"answer"``, a string or a number.
        trace: its last answer is read.

    Returns:
        As `number`.

    Raises:
        EnvError: the task has no such ``"answer"``.

    >>> traces = Trace("", ["It is 42."]), Trace("", [r"It is 3\sqrt{2}."])
    >>> number_or_wrong({"answer": "42"}, traces[0]).reward, number_or_wrong({"answer": r"3\sqrt{2}"}, traces[1]).reward
    (1.0, 0.0)
    """
    return _score(trace, expected_value(answer_of("number_or_wrong", task)))


def describe_answer(answer: Any) -> str:
    """Return a task's answer as text for an error; of a long one its end, of an integer without a text its size.

    >>> describe_answer("1 or 2"), describe_answer(10**5000)
    ("'1 or 2'", 'a number of more than 4300 digits')
    """
    try:
        text = str(answer)
    except ValueError:
        return "a number of more than 4300 digits"
    return repr(text if len(text) < 200 else "..." + text[-200:])


def _no_number(answer: Any) -> str:
    return f"task['answer'] is {describe_answer(answer)}, from which no number can be read"


def _score(trace: Trace, expected: Fraction | None) -> Score:
    found = final_value(trace.answer)
    return Score(float(expected is not None and found == expected), "ok" if found is not None else "parse_fail")


def _check_exact(task: Task) -> None:
    answer_of("exact", task)


def _check_number(task: Task) -> str | None:
    """Return why no response can have the number of a task's answer."""
    answer = answer_of("number", task)
    return None if expected_value(answer) is not None else _no_number(answer)


exact.check_task = _check_exact  # type: ignore[attr-defined]
number.check_task = _check_number  # type: ignore[attr-defined]

VERIFIERS: Mapping[str, Verifier] = {"exact": exact, "number": number, "number_or_wrong": number_or_wrong}
"""The verifiers that a configuration can name."""


def answer_of(verifier: str, task: Task) -> str | int | float | Decimal | Fraction:
    """The right answer of a task.

    Args:
        verifier: its name, for errors.
        task: has an ``"answer"``, a string or a number.

    Raises:
        EnvError: it has none.

    >>> answer_of("example", {"answer": 4})
    4
    """
    if "answer" not in task:
        raise EnvError(
            f"{verifier}: the task has no 'answer', only {', '.join(map(repr, task)) or 'nothing'}; "
            "name the column that holds the right answer 'answer'"
        )
    answer = task["answer"]
    if isinstance(answer, bool) or not isinstance(answer, str | int | float | Decimal | Fraction):
        raise EnvError(f"{verifier}: task['answer'] is {shown_value(answer)}; give a string or a number")
    return answer
