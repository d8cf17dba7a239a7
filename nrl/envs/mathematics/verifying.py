"""`math_verifier`: the verifier of mathematics, which knows that 1/2 is 0.5, and that (x + 1)^2 is x^2 + 2x + 1."""

import functools
import math
from collections.abc import Awaitable, Callable
from typing import Any

from nrl.envs.contract import Score, Task, Trace, text_of
from nrl.envs.mathematics.answers import decimal, final_answer, repeats, same_number, written
from nrl.envs.mathematics.worker import Outcome, compare
from nrl.envs.pools.pool import pooled
from nrl.envs.verifiers import answer_of, boxes, extracts
from nrl.errors import ArgumentError, EnvError
from nrl.runtime.executables.registry import Executable, check_has

__all__ = ["math_verifier"]

_KEPT = 4096  # outcomes: a group's answers are often the same
_START = 60.0  # seconds of a call in which a worker imports math-verify


def math_verifier(
    *, workers: int | None = None, executable: str | Executable = "gym", timeout: float = 1.0
) -> Callable[[Task, Trace], Awaitable[Score]]:
    r"""A verifier that is 1 if the final answer of a response equals the task's, as mathematics; otherwise 0.

    What needs no mathematics is decided in this process, at once: equal texts, and two plain numbers, which are
    compared exactly. Everything else math-verify decides (numbers to six decimals, sets, intervals, equations,
    matrices, per cent, units), in processes of this machine that are killed where an answer takes too long. They start
    when they are first needed. The task's ``"answer"`` is a number, LaTeX, or a solution that ends in ``#### 42`` or
    ``\boxed{42}``.

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

    @extracts(final_answer)
    async def equal(task: Task, trace: Trace) -> Score:
        right = answer_of("math_verifier", task)
        given = str(right)
        if not isinstance(right, str | int) and not math.isfinite(right):
            raise _unusable(given, "which is no finite number")
        reference = _reference(given)
        if reference is None:
            raise _unusable(given, "in which there is no answer")
        answer = final_answer(trace.answer)
        if answer is None:
            return Score(0.0, "parse_fail")
        same = same_number(reference, answer)
        if same is not None:
            return Score(float(same))
        if repeats(answer, text_of(task.get("prompt", trace.prompt)), reference):
            return Score(0.0)
        outcome = outcomes.get((reference, answer))
        if outcome is None:
            outcome, why = await ask(decimal(reference), (decimal(answer), timeout))
            if outcome is None:
                raise _unusable(given, why)
            if outcome != "starved":
                if len(outcomes) >= _KEPT:
                    outcomes.pop(next(iter(outcomes)), None)
                outcomes[reference, answer] = outcome
        match outcome:
            case "right" | "wrong":
                return Score(float(outcome == "right"))
            case "starved":
                return Score(0.0, "timeout")
            case _:
                return Score(0.0, "parse_fail")

    equal.forget = outcomes.clear  # type: ignore[attr-defined]
    equal.timeout = None  # type: ignore[attr-defined]  # that of a comparison begins when it does
    return equal


@functools.lru_cache(_KEPT)
def _reference(answer: str) -> str | None:
    """A task's answer as `written`; of a solution, its final answer."""
    solution = "####" in answer or next(boxes(answer), None) is not None or len(answer) > 200 or "\n" in answer
    return final_answer(answer) if solution else written(answer)


def _unusable(answer: str, why: str) -> EnvError:
    told = answer if len(answer) < 200 else "..." + answer[-200:]
    return EnvError(
        f"math_verifier: task['answer'] is {told!r}, {why}; give a number, an expression in LaTeX, or a solution that "
        "ends in '#### 42' or '\\boxed{42}'"
    )
