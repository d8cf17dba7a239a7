"""Comparing two answers by math-verify, in a process that may be killed at any time.

A worker of a pool imports math-verify once and forks. The fork reads what models wrote, one pair after the other; the
worker itself never does. Where a pair takes too long, or too much memory, the fork is killed, also if it holds the
interpreter (``9 ** 9 ** 9``), and the next pair has another one, milliseconds later.
"""

import contextlib
import functools
import logging
import re
import signal
import sys
import time
from typing import Any, Literal

from nrl.envs.mathematics.answers import one_numeral, two_kinds
from nrl.envs.pools.forked import Crashed, Fork, Late
from nrl.errors import EnvError

__all__ = ["Outcome", "compare"]

type Outcome = Literal["right", "wrong", "unread", "late", "crashed", "starved"]
"""Whether the answer equals the reference; or it cannot be read; it took all of its time, or brought the process down;
or the machine was too busy to give it its time."""

_REQUESTS = 20_000  # of a fork: two for each pair
_WARM = (
    *(
        r"\frac{\sqrt{3}}{2}+1",
        r"\frac{3}{2\sqrt{3}}",
        r"-\frac{1}{2}x",
        r"\sqrt[3]{2}-x",
        r"3.5\cdot 10^{-5}",
        r"50\%",
    ),
    *("x^{2}+2x-1=0", "y=2x+1", "x(x+1)(2x-3)", "x^2-3xy+y^2", "(x+1)^2", "f(x)=x^{3}-1", "2^{10}-1", "1+2i", "n!"),
    *(r"(0,1)\cup[2,\infty)", "(1,-2)", r"\{1,-2\}", "1,-2", r"1 \text{ or } 2", r"x\in[1,2]", r"1<x\le 2", r"x\ge 1"),
    *(r"2\pi", r"\frac{\pi}{4}+2\pi k", r"\sin(x)+\cos x", r"\log_{2}8", r"\ln 2", "e^{x}", r"90^{\circ}", r"\pm 1"),
    *(r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\binom{5}{2}", "|x-1|", r"5\text{ cm}", r"\text{Monday}", "A"),
)


def compare(reference: str, answer: tuple[str, float]) -> tuple[Outcome | None, str]:
    """Compare an answer with a reference by math-verify, in a fork of this process.

    Args:
        reference: the right answer, in LaTeX.
        answer: the answer, in LaTeX, and seconds that both together may take; half of them for the reference.

    Returns:
        What became of the answer; and nothing. Or None, if the reference cannot be used, and the reason.

    Raises:
        EnvError: math-verify is not installed, or something else ended the fork.
    """
    text, seconds = answer
    fork = _fork()
    fork.ready(2)  # neither half pays for starting it
    began = time.monotonic()
    try:
        if why := fork.ask((reference, None), seconds / 2):
            return None, why
    except Late as late:  # of the processor: on a busy machine, a right answer may need more time than it was given
        if not late.busy(seconds / 2):
            return "starved", ""
        return None, f"which math-verify did not read within {seconds / 2:g} s"
    except Crashed as crashed:
        return None, f"which ended the process that read it (status {crashed.signal})"
    try:
        return fork.ask((reference, text), began + seconds - time.monotonic()) or "unread", ""
    except Late as late:  # likewise
        return ("late" if late.busy(seconds / 2) else "starved"), ""
    except Crashed as crashed:
        if crashed.signal == signal.SIGKILL:  # not by this process
            raise EnvError("math_verifier: its process was killed; is there enough memory?") from None
        return "crashed", ""


@functools.cache
def _fork() -> Fork:
    try:
        _prepare()
    except ImportError as error:
        raise EnvError(
            f"math_verifier: {sys.executable} has no math-verify ({error}); use executable='gym', or another one "
            "with nrl's extra 'gym'"
        ) from error
    return Fork(_told, most=_REQUESTS)


# --- In the fork alone.


def _told(request: tuple[str, str | None]) -> str:
    """Why a reference cannot be used, empty if it can; or with an answer, what becomes of that."""
    reference, answer = request
    if answer is not None:
        return _outcome(reference, answer)  # what it raises nothing but the answer can be the cause of
    try:
        return _trouble(reference)
    except Exception as error:
        return f"on which math-verify raised {type(error).__name__}"


def _prepare() -> None:
    """Import all and use it once: its parser learns its grammar as it goes."""
    import math_verify
    from antlr4 import PredictionMode
    from latex2sympy2_extended import latex2sympy2
    from sympy import Integer

    assert math_verify
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    # ANTLR's two stages: its simple prediction gives the same tree as the full one, or an error, in a fifth of the time
    converter = latex2sympy2._Latex2Sympy
    create, parse = converter.create_parser, converter.parse

    def simple(self: Any, latex: str) -> Any:
        parser = create(self, latex)
        parser._interp.predictionMode = PredictionMode.SLL
        return parser

    def staged(self: Any, latex: str) -> Any:
        self.create_parser = functools.partial(simple, self)
        try:
            return parse(self, latex)
        except Exception:
            del self.create_parser
            return parse(self, latex)

    number = converter.parse_number

    def integer(self: Any, text: str) -> Any:  # which SymPy would parse as Python
        return Integer(int(text)) if text.isascii() and text.isdigit() else number(self, text)

    converter.parse, converter.parse_number = staged, integer
    for text in _WARM:
        _outcome(text, text.replace("1", "5"))
    _read.cache_clear()


@functools.lru_cache(256)
def _read(text: str) -> Any:
    """What an answer is, as SymPy has it; None: math-verify cannot read it."""
    from math_verify import LatexExtractionConfig, parse

    formula = (LatexExtractionConfig(boxed_match_priority=-1),)  # exactly what is between the signs
    found = parse(f"${text}$", formula, fallback_mode="no_fallback", parsing_timeout=None)
    return found[0] if found else None


@functools.lru_cache(256)
def _trouble(reference: str) -> str:
    """Why a reference cannot be used; empty: it can."""
    from sympy import Rational

    right = _read(reference)
    if right is None:
        return "which math-verify cannot read"
    if not _equal(right, right):
        return "which does not equal itself"
    _equal(right, Rational(7919, 7907))  # does what comparing will do, while the time counts for the reference
    return ""


def _equal(right: Any, found: Any) -> bool:
    from math_verify import verify
    from sympy import Expr

    with contextlib.suppress(Exception):  # they may be matrices of different shapes
        if isinstance(right, Expr) and isinstance(found, Expr) and (right - found).doit() == 0:
            return True  # as simplify would find out later
    # A set of numbers may be given by a condition: x < 2 is as good as (-oo, 2)
    return bool(verify(right, found, timeout_seconds=None, allow_set_relation_comp=True))


_ROUNDED = re.compile(
    r"[^0-9]*[0-9][0-9,{}!]*(?:\.(?P<decimals>[0-9]+))?(?: ?\\(?:cdot|times) ?10\^\{?(?P<ten>-?[0-9]{1,2})\}?)?[^0-9]*"
)


def _outcome(reference: str, answer: str) -> Outcome:
    exact, about, rounded = answer.rpartition(r"\approx")
    if not about:
        return _alone(reference, answer)
    if not exact.strip():
        return _alone(reference, rounded)
    if not _rounds(exact, rounded):  # two answers
        return "wrong"
    both = {_outcome(reference, exact), _alone(reference, rounded)}
    return next(outcome for outcome in ("right", "wrong", "unread") if outcome in both)


def _rounds(exact: str, rounded: str) -> bool:
    """Whether the second of two numbers is the first with fewer digits, rounded or cut off."""
    from sympy import Expr

    number = _ROUNDED.fullmatch(rounded)
    sides = [_last_side(_read(each), each)[1] for each in (exact.rpartition(r"\approx")[2], rounded)]
    if number is None or any(not isinstance(each, Expr) or each.free_symbols for each in sides):
        return False
    value, short = (complex(each.doit().evalf(20)) for each in sides)  # per cent are left alone otherwise
    unit = 10.0 ** (int(number["ten"] or 0) - len(number["decimals"] or "") - 2 * ("%" in rounded))
    return abs(value - short) < unit and abs(value) - abs(short) > -0.501 * unit


def _alone(reference: str, answer: str) -> Outcome:
    right, found = _read(reference), _read(answer)
    if found is None:
        return "unread"
    if two_kinds(reference, answer) or _cents(right, found):
        return "wrong"
    if _unsolved(right, found) or _unworked(right, found, reference, answer) or _far(right, found):
        return "wrong"
    return "right" if _equal(right, found) else "wrong"


def _cents(right: Any, found: Any) -> bool:
    """Whether per cent are none of a number without them: of one below 1 they are hundredths, else a unit."""
    from sympy import Expr, Rational, UnevaluatedExpr

    cent = UnevaluatedExpr(Rational(1, 100))
    first, last = _last_side(right, "")[1], _last_side(found, "")[1]
    if not (isinstance(first, Expr) and isinstance(last, Expr)) or first.has(cent) or not last.has(cent):
        return False
    if first.free_symbols or last.free_symbols:
        return False
    value, said = (
        complex(first.evalf(20)),
        complex(last.subs(cent, Rational(1, 100) if abs(first) < 1 else 1).evalf(20)),
    )
    return abs(value - said) > 1e-6 * abs(value)


def _unsolved(right: Any, found: Any) -> bool:
    """Whether an answer is an equation to solve, and the reference is its solution: math-verify would solve it."""
    from sympy import Expr, Symbol
    from sympy.core.function import AppliedUndef
    from sympy.core.relational import Relational

    def solved(relation: Any) -> bool:
        sides = (relation.lhs, relation.rhs), (relation.rhs, relation.lhs)
        return any(isinstance(a, Symbol | AppliedUndef) and not b.free_symbols for a, b in sides)

    if isinstance(right, Expr):  # then the last side of the answer counts
        return False
    return all(map(solved, right.atoms(Relational))) and not all(map(solved, found.atoms(Relational)))


def _unworked(right: Any, found: Any, reference: str, answer: str) -> bool:
    """Whether an answer leaves the work to math-verify: a sum for a number, an integral for its value."""
    from sympy import Derivative, Expr, Integral, Limit, Product, Sum, count_ops
    from sympy.matrices import MatrixBase

    kinds = (Integral, Derivative, Limit, Sum, Product)
    if any(found.has(kind) and not right.has(kind) for kind in kinds):
        return True
    told, last = _last_side(found, answer)
    asked, first = _last_side(right, reference)
    if isinstance(first, MatrixBase):
        return not isinstance(last, MatrixBase) and not _multiple(last)
    if not isinstance(first, Expr) or first.free_symbols:
        return False
    if _numeral(first) and one_numeral(asked):
        return not (_numeral(last) and one_numeral(told))
    if not isinstance(last, Expr) or last.free_symbols:
        return False
    return not _functions(last) <= _functions(first) or bool(count_ops(last) > 2 * count_ops(first) + 3)


def _last_side(tree: Any, text: str) -> tuple[str, Any]:
    """The side of equations that counts, as text and as SymPy has it; of a set of one number, the number."""
    from sympy import And, Eq, FiniteSet, Symbol

    sides = text.split("=")
    last = tree.args[-1] if isinstance(tree, And) else tree
    if isinstance(last, Eq):
        turned = isinstance(last.rhs, Symbol) and not last.lhs.free_symbols  # 3 = x
        text, last = (sides[-2], last.lhs) if turned and len(sides) > 1 else (sides[-1], last.rhs)
    if isinstance(last, FiniteSet) and len(last) == 1:
        text, (last,) = text.replace(r"\{", "").replace(r"\}", ""), last
    return text, last


def _numeral(tree: Any) -> bool:
    """Whether SymPy has a number that is worked out: at most a fraction, per cent, 3.5 * 10^-5 or 10^6."""
    from sympy import Integer, Mul, Number, Pow, Rational, Symbol, UnevaluatedExpr

    if isinstance(tree, Symbol):  # as it has \mathbf{5}
        return bool(tree.name.replace(".", "", 1).isdecimal())
    if not isinstance(tree, Mul | Pow):
        return isinstance(tree, Number)
    factors = list[Any]()
    for each in Mul.make_args(tree):
        factors += Mul.make_args(each)
    cent = [each for each in factors if isinstance(each, UnevaluatedExpr) and each.args[0] == Rational(1, 100)]
    tens = [each for each in factors if isinstance(each, Pow) and each.base == 10 and isinstance(each.exp, Integer)]
    below = [
        each
        for each in factors
        if each not in tens and isinstance(each, Pow) and isinstance(each.base, Number) and each.exp == -1
    ]
    numbers = [each for each in factors if isinstance(each, Number) and each != -1]
    if len(factors) > len(cent) + len(tens) + len(below) + len(numbers) + factors.count(Integer(-1)):
        return False
    if tens and tens[0].exp != -1 and numbers and not 1 <= abs(numbers[0]) < 10:
        return False
    return len(cent) <= 1 and len(tens) + len(below) <= 1 and len(numbers) <= 1


def _multiple(tree: Any) -> bool:
    """Whether it is a number times a matrix."""
    from sympy import MatMul
    from sympy.matrices import MatrixBase

    return isinstance(tree, MatMul) and sum(isinstance(each, MatrixBase) for each in tree.args) == 1 == sum(
        getattr(each, "is_Matrix", False) for each in tree.args
    )


def _functions(tree: Any) -> set[Any]:
    """The functions in it; those of trigonometry are as good as each other."""
    from sympy import Function, exp
    from sympy.functions.elementary.trigonometric import InverseTrigonometricFunction, TrigonometricFunction

    families = (TrigonometricFunction, InverseTrigonometricFunction)
    return {
        next((family for family in families if isinstance(each, family)), type(each))
        for each in tree.atoms(Function)
        if not isinstance(each, exp)
    }


_AT = (0.7390851, 1.3247179, 0.5671432, 1.9021605, 0.9159655)


def _far(right: Any, found: Any) -> bool:
    """Whether two answers clearly differ at one point: that saves all of the algebra.

    It also parts small numbers, which are equal to six decimals.
    """
    from sympy import Eq, Expr, Interval, Symbol

    if isinstance(right, Interval) and isinstance(found, Interval):
        return _far(right.start, found.start) or _far(right.end, found.end)
    if isinstance(right, Eq) and isinstance(found, Eq):  # of y = f(x)
        same = isinstance(right.lhs, Symbol) and right.lhs == found.lhs and not found.rhs.has(right.lhs)
        return same and not right.rhs.has(right.lhs) and _far(right.rhs, found.rhs)
    if any(not isinstance(each, Expr) or isinstance(each, Symbol) for each in (right, found)):
        return False
    if right.free_symbols != found.free_symbols or len(right.free_symbols) > len(_AT):
        return False
    at = dict(zip(sorted(right.free_symbols, key=str), _AT, strict=False))
    try:
        a, b = (complex(each.evalf(20, subs=at)) for each in (right, found))
    except Exception:  # no number there
        return False
    ratios = (1.0, 100.0, 0.01)  # of per cent
    return all(abs(ratio * a - b) > 1e-4 * max(abs(a), abs(b)) + 1e-15 for ratio in ratios)
