"""`math_verifier`: the verifier of mathematics, which knows that 1/2 is 0.5, and that (x + 1)^2 is x^2 + 2x + 1."""

import functools
import math
from collections.abc import Awaitable, Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

from nrl.envs.final_numbers import boxes
from nrl.envs.library.mathematics.answers import answer_span, final_answer
from nrl.envs.library.mathematics.comparison_worker import Outcome, compare
from nrl.envs.library.mathematics.words.repeating import repeats
from nrl.envs.library.mathematics.words.tidying import LONGEST, plain_number, same_number, tidy, written
from nrl.envs.pool.pool import pooled
from nrl.envs.types import Score, Task, Trace, text_of
from nrl.envs.verifiers import answer_of, describe_answer, extracts
from nrl.errors import ArgumentError, EnvError
from nrl.runtime.venvs.registry import Executable, check_has

__all__ = ["math_verifier"]

_KEPT = 4096  # outcomes: a group's answers are often the same
_REMEDY = (
    "give a number, an expression in LaTeX or plain notation, words, or a solution that ends in '#### 42' or "
    "'\\boxed{42}'"
)
_START = 60.0  # seconds of a call in which a worker imports math-verify


def math_verifier(
    *, workers: int | None = None, executable: str | Executable = "gym", timeout: float = 1.0
) -> Callable[[Task, Trace], Awaitable[Score]]:
    r"""A verifier that is 1 if the final answer of a response equals the task's, as mathematics; otherwise 0.

    The reference is read once as a number, an expression, a list or a set, a point or an interval, a relation, a
    matrix, a time, a ratio, a number in a base, a choice or words (``docs/verifiers.md`` has a table of each). Answers
    are compared by kind. The task's ``"answer"`` is a number, LaTeX, plain notation such as ``sqrt(2)/2``, words, or a
    solution that ends in ``#### 42`` or ``\boxed{42}``.

    Two plain numbers are compared in this process, exactly. Everything else is compared in processes of this machine
    that are killed where an answer takes too long; they start when they are first needed.

    A response without a final answer, and one whose answer cannot be read, takes too long or brings the process down,
    has a reward of 0 with the status ``"parse_fail"``: the model wrote it, and the same processes have read the
    reference before. Were its row left out instead, a tower of powers would be worth more than an answer that may be
    wrong. Only where the machine had no time for the two, the status is ``"timeout"``, and the row is left out.

    What leaves the work to the verifier is wrong: a formula of the question, an equation that is to be solved, an
    integral, a sum of matrices; and where the reference is a number, everything that still has to be calculated.

    Args:
        workers: how many processes, at most; None: one for each processor.
        executable: their Python environment, which has math-verify.
        timeout: seconds for a comparison, half of them for the reference.

    Returns:
        An ``async`` verifier with an extractor (`nrl.envs.extractor`). It reads the last answer of a trace, and the
        task's prompt. Its own ``timeout`` is None. It remembers outcomes; its ``forget()`` makes every call a new one.

    Raises:
        ValueError: ``workers`` or ``timeout`` is not positive.
        EnvError: (when called) the task has no ``"answer"``, or none that can be read in time; or math-verify is not
            there.

    >>> import asyncio
    >>> verify = math_verifier()
    >>> asyncio.run(verify({"answer": r"\frac{1}{2}"}, Trace("1/4+1/4=", [r"It is \boxed{0.5}."])))
    Score(reward=1.0, status='ok', components={})

    Source: math-verify 0.9 (Kydlíček et al., 2025), https://github.com/huggingface/Math-Verify.
    """
    if not timeout > 0:
        raise ArgumentError(f"math_verifier: timeout is {timeout}; it must be positive")
    worker: Any = compare  # it has the arguments of a verifier only in number
    check_has("math_verifier", executable, "math_verify")
    ask: Any = pooled(worker, workers=workers, executable=executable, timeout=_START + timeout)
    outcomes: dict[tuple[str, str], Outcome] = {}
    faults: dict[str, str] = {}

    async def fault_of(reference: str) -> str | None:
        """Return why a reference cannot be used; empty: it can; None: the machine had no time to find out."""
        if plain_number(reference) is not None:
            return ""
        if (known := faults.get(reference)) is not None:
            return known
        outcome, why = await ask(reference, (None, timeout))
        if outcome == "starved":
            return None
        _keep(faults, reference, str(why))
        return str(why)

    async def check_task(task: Task) -> str | None:
        right = answer_of("math_verifier", task)
        reference = _reference(right)
        why = _empty(right) if reference is None else await fault_of(reference)
        return _fault(right, why) if why else None

    def at_once(reference: str, answer: str | None, prompt: str) -> Score | None:
        """Return the score of an answer that needs no comparison by a worker."""
        if answer is None:
            return Score(0.0, "parse_fail")
        if answer == reference:
            return Score(1.0)
        same = same_number(reference, answer)
        if same is None and repeats(written(answer) or answer, prompt, written(reference) or reference):
            same = False
        return None if same is None else Score(float(same))

    @extracts(final_answer)
    async def equal(task: Task, trace: Trace) -> Score:
        right = answer_of("math_verifier", task)
        reference = _reference(right)
        if reference is None:
            raise EnvError(f"math_verifier: {_fault(right, _empty(right))}; {_REMEDY}")
        span = answer_span(trace.answer)
        answer = None if span is None else tidy(span)
        score = at_once(reference, answer, text_of(task.get("prompt", trace.prompt)))
        if score is not None and (why := await fault_of(reference)) != "":  # then no answer has a score
            if why is None:
                return Score(0.0, "timeout")
            raise EnvError(f"math_verifier: {_fault(right, why)}; {_REMEDY}")
        if score is not None:
            return score
        assert answer is not None
        outcome = outcomes.get((reference, answer))
        if outcome is None:
            outcome, why = await ask(reference, (answer, timeout))
            if outcome is None:
                raise EnvError(f"math_verifier: {_fault(right, str(why))}; {_REMEDY}")
            if outcome != "starved":
                _keep(outcomes, (reference, answer), outcome)
        match outcome:
            case "right" | "wrong":
                return Score(float(outcome == "right"))
            case "starved":
                return Score(0.0, "timeout")
            case _:
                return Score(0.0, "parse_fail")

    def forget() -> None:
        outcomes.clear()
        faults.clear()

    equal.check_task = check_task  # type: ignore[attr-defined]
    equal.forget = forget  # type: ignore[attr-defined]
    equal.timeout = None  # type: ignore[attr-defined]  # that of a comparison begins when it does
    return equal


def _keep[K, V](kept: dict[K, V], key: K, value: V) -> None:
    if len(kept) >= _KEPT:
        kept.pop(next(iter(kept)), None)
    kept[key] = value


@functools.lru_cache(_KEPT)
def _reference(answer: str | float | Decimal | Fraction) -> str | None:
    """Return a task's answer in one way to write it (`tidy`); of a solution, its final answer."""
    if isinstance(answer, int | Fraction):
        return str(answer) if max(abs(answer.numerator), answer.denominator) < 10**LONGEST else None
    if not isinstance(answer, str):
        return str(answer) if math.isfinite(answer) else None
    solution = "####" in answer or next(boxes(answer), None) is not None or len(answer) > 200 or "\n" in answer
    if not solution:
        return tidy(answer)
    span = answer_span(answer)
    return None if span is None else tidy(span)


def _empty(answer: object) -> str:
    if isinstance(answer, float | Decimal):
        return "which is no finite number"
    too_long = not isinstance(answer, str) or (len(answer) > LONGEST and len(answer.split()) == 1)
    return f"which has more than {LONGEST} characters" if too_long else "in which there is no answer"


def _fault(answer: object, why: str) -> str:
    return f"task['answer'] is {describe_answer(answer)}, {why}"
