"""Decide whether two expressions are equal: rationals exactly, everything else by its values at several points.

Values have 60 digits first. Where they agree, 150 digits decide: two values that are equal then agree in all of them,
and the rest of a difference that is zero shrinks with the precision. So numbers of every size are told apart, also
``1/2^89`` and ``1/2^88``, and no simplification has to find out that two forms are the same.
"""

import functools
import math
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import mpmath  # type: ignore[import-untyped]
from mpmath import mp

from nrl.envs.library.mathematics.nodes import Node, NoValueError, UnreadableError, functions_in, symbols_in
from nrl.envs.library.mathematics.words.tidying import rounds

__all__ = ["constant_ratio", "equal_values", "exact", "fault_of", "number_at"]

_BITS = 1e9  # of a power; what is larger cannot be evaluated
_EXACT_BITS = 20_000
_LARGEST_FACTORIAL = 10**9


def exact(node: Node) -> Fraction | None:
    """Return the rational number that an expression is, where whole numbers and fractions make it; otherwise None.

    >>> from nrl.envs.library.mathematics.expressions import parse
    >>> exact(parse("(1 + 2^3)/6")), exact(parse("sqrt(4)"))
    (Fraction(3, 2), None)
    """
    try:
        return _exact(node)
    except (ZeroDivisionError, OverflowError):
        return None


@functools.lru_cache(2048)
def _exact(node: Node) -> Fraction | None:
    if node.kind == "number":
        return Fraction(node.value)
    if node.kind not in ("+", "-", "*", "/", "^", "mixed", "%", "factorial", "binom"):
        return None
    parts = [_exact(part) for part in node.parts]
    found = [part for part in parts if part is not None]
    if len(found) < len(parts):
        return None
    if any(_bits(part) > _EXACT_BITS for part in found):
        return None
    first, last = found[0], found[-1]
    match node.kind:
        case "+" | "mixed":
            return sum(found, Fraction(0))
        case "-":
            return -first
        case "*":
            return math.prod(found, start=Fraction(1))
        case "/":
            return first / last
        case "%":
            return first / 100
        case "factorial":
            return Fraction(math.factorial(int(first))) if first.denominator == 1 and 0 <= first <= 1000 else None
        case "binom":
            whole = first.denominator == last.denominator == 1 and 0 <= last <= first <= 1000
            return Fraction(math.comb(int(first), int(last))) if whole else None
    if last.denominator != 1 or abs(last) * _bits(first) > _EXACT_BITS:
        return None
    return first ** int(last) if first or last > 0 else None


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def number_at(node: Node, digits: int = 60, at: Mapping[str, Any] | None = None) -> Any:
    """Return the value of an expression, real or complex, where the variables have these values.

    Raises:
        UnreadableError: it is too large to evaluate.
        NoValueError: it has none there.
    """
    with mp.workdps(digits + 10):
        try:
            found = mpmath.mpmathify(_number(node, at or {}, False))
        except (UnreadableError, NoValueError):
            raise
        except (ArithmeticError, ValueError, TypeError, KeyError) as error:
            raise NoValueError(f"no value ({type(error).__name__})") from error
    if mpmath.isnan(found):
        raise NoValueError("no value")
    return found.real if isinstance(found, mpmath.mpc) and not found.imag else found


_ONE: Mapping[str, Callable[[Any], Any]] = {
    **{name: getattr(mpmath, name) for name in ("sin", "cos", "tan", "cot", "sec", "csc", "exp", "ln", "log10")},
    **{name: getattr(mpmath, name) for name in ("sinh", "cosh", "tanh", "coth", "re", "im")},
    "abs": abs,
    "arcsin": mpmath.asin,
    "arccos": mpmath.acos,
    "arctan": mpmath.atan,
    "arcsinh": mpmath.asinh,
    "arccosh": mpmath.acosh,
    "arctanh": mpmath.atanh,
    "arccot": lambda x: mpmath.pi / 2 - mpmath.atan(x),
    "log": mpmath.log10,
}


def _number(node: Node, at: Mapping[str, Any], of_angle: bool) -> Any:
    match node.kind:
        case "number":
            return mpmath.mpf(node.value.numerator) / node.value.denominator
        case "symbol":
            return at[node.value]
        case "constant":
            return {"pi": +mp.pi, "e": +mp.e, "i": mpmath.mpc(0, 1), "infinity": mp.inf}[node.value]
        case "calculus":
            return _calculus(node.value, at)
    of_angle = of_angle or node.kind in ("sin", "cos", "tan", "cot", "sec", "csc")
    values = [_number(part, at, of_angle) for part in node.parts]
    first, last = values[0], values[-1]
    if node.kind != "-" and any(mpmath.isinf(value) for value in values):
        raise NoValueError("a calculation with infinity")
    match node.kind:
        case "+" | "mixed":
            return mpmath.fsum(values)
        case "-":
            return -first
        case "*":
            return mpmath.fprod(values)
        case "/":
            return first / last
        case "%":
            return first / 100
        case "degrees":
            return first * mp.pi / 180 if of_angle else first
        case "^":
            return _power(first, last, node.parts[1])
        case "root":
            return _power(first, 1 / last, Node("/", (Node("number", (), Fraction(1)), node.parts[1])))
        case "factorial":
            _check_size(first)
            return mpmath.factorial(first)
        case "double factorial":
            _check_size(first)
            return mpmath.fac2(first)
        case "binom":
            _check_size(first)
            return mpmath.binomial(first, last)
        case "floor" | "ceil":
            nearest = mpmath.nint(first)  # A value that is whole up to rounding is that whole number.
            whole = abs(first - nearest) < mpmath.mpf(10) ** (10 - mp.dps)
            return nearest if whole else (mpmath.floor if node.kind == "floor" else mpmath.ceil)(first)
        case "max" | "min":
            return (max if node.kind == "max" else min)(values)
        case "gcd" | "lcm":
            if any(mpmath.im(value) or mpmath.nint(value) != value for value in values):
                raise UnreadableError(f"{node.kind} of numbers that are not whole")
            return mpmath.mpf((math.gcd if node.kind == "gcd" else math.lcm)(*map(int, values)))
        case "log" if len(values) == 2:
            return mpmath.log(first) / mpmath.log(last)
        case "call":  # Some function, which the letter and the arguments decide
            seed = ord(node.value)
            return mpmath.fsum(mpmath.cos(value * (seed % 7 + 1.25) + n) + value for n, value in enumerate(values))
        case name if name in _ONE:
            return _ONE[name](first)
    raise UnreadableError(f"the function {node.kind}")


def _calculus(text: str, at: Mapping[str, Any]) -> Any:
    """Return the value of a sum, an integral or a limit, which math-verify's parser reads and SymPy works out."""
    try:
        found = _sympy(text)
        values = {symbol: at[symbol.name] for symbol in found.free_symbols}
        return mpmath.mpmathify(found.evalf(mp.dps, subs=values))
    except UnreadableError:
        raise
    except Exception as error:
        raise UnreadableError(f"{type(error).__name__} in {text!r}") from error


@functools.lru_cache(256)
def _sympy(text: str) -> Any:
    from math_verify.parser import parse_latex_cached

    return parse_latex_cached(text).doit()


def _power(base: Any, exponent: Any, form: Node) -> Any:
    size = abs(exponent)
    if size > 64 and base and mpmath.isfinite(base) and mpmath.isfinite(size):
        magnitude = abs(mpmath.log(abs(base), 2))
        if magnitude * size > _BITS:
            raise UnreadableError("a power that is too large")
    fraction = exact(form)
    if fraction is not None and fraction.denominator % 2 and not mpmath.im(base) and mpmath.re(base) < 0:
        root = -mpmath.power(-base, mpmath.mpf(1) / fraction.denominator)  # The real root, as sqrt[3]{-8} is -2
        return root ** int(fraction.numerator)
    if fraction is not None and fraction.denominator == 1 and abs(fraction) < 10**12:
        return base ** int(fraction)
    return mpmath.power(base, exponent)


def _check_size(value: Any) -> None:
    if not abs(value) < _LARGEST_FACTORIAL:
        raise UnreadableError("a factorial that is too large")


def fault_of(node: Node) -> str:
    """Return why an expression cannot be compared with any other; empty: it has a value at one of the points.

    >>> from nrl.envs.library.mathematics.expressions import parse
    >>> fault_of(parse("1/x")), fault_of(parse("1/0")), fault_of(parse("9^9^9"))
    ('', 'which has no value', 'which is too large to evaluate')
    """
    why = ""
    for at in _points(frozenset(symbols_in(node))):
        try:
            number_at(node, 20, _at(at, 20))
            return ""
        except NoValueError:
            why = why or "which has no value"
        except UnreadableError:
            why = "which is too large to evaluate"
    return why


@functools.lru_cache(64)
def _points(names: frozenset[str]) -> tuple[Mapping[str, Any], ...]:
    """Values of variables: positive ones, some of both signs, and whole numbers."""
    if not names:
        return ({},)
    ordered = sorted(names)
    found = list[Mapping[str, Any]]()
    for j in range(9):
        kind, values = j % 3, {}
        for k, name in enumerate(ordered):
            value = Fraction(1 + 7919 * (k + 1) * (j + 2) % 1009, 613)
            if kind == 1 and (k + j // 3) % 2 == 0:
                value = -value
            if kind == 2:
                value = Fraction(2 + 7 * (k + 1) * (j + 3) % 11)
            values[name] = value
        found.append(values)
    return tuple(found)


def _at(values: Mapping[str, Any], digits: int) -> dict[str, Any]:
    with mp.workdps(digits + 10):
        return {name: mpmath.mpf(value.numerator) / value.denominator for name, value in values.items()}


def _same(left: Any, right: Any, again: Callable[[int], tuple[Any, Any]]) -> bool:
    """Return whether two values are equal, given how to have them with more digits.

    The rest of a difference that is zero shrinks with the precision; that of two numbers does not.
    """
    if mpmath.isinf(left) or mpmath.isinf(right):
        return bool(left == right)
    with mp.workdps(70):
        difference, size = abs(left - right), max(abs(left), abs(right))
        if difference > size * mpmath.mpf("1e-50") and difference > mpmath.mpf("1e-45"):
            return False
    with mp.workdps(160):
        first, second = again(150)
        rest, size = abs(first - second), max(abs(first), abs(second))
        zero = rest <= size * mpmath.mpf("1e-148") or (difference and rest <= difference * mpmath.mpf("1e-60"))
        if zero or (difference and rest > size * mpmath.mpf("1e-100")):
            return bool(zero)
    with mp.workdps(310):
        return bool(abs(operator.sub(*again(300))) <= rest * mpmath.mpf("1e-100"))


def _agree(left: Node, right: Node) -> bool:
    """Return whether two expressions have equal values at all points at which both are real.

    Expressions that are real nowhere are compared wherever they have values.
    """
    real, others = list[bool](), list[bool]()
    points = _points(frozenset(symbols_in(left) | symbols_in(right)))
    apart = len({"abs" in functions_in(side) for side in (left, right)}) == 2
    if apart:  # Far from zero, ln|x+1| and ln(x+1) differ.
        points += tuple({name: -8 * value for name, value in point.items()} for point in points)
    for point in points:
        try:
            values = _values(left, right, point, 60)
            same = _same(*values, functools.partial(_values, left, right, point))
        except (UnreadableError, NoValueError):
            if not point:
                raise
            continue
        complex_ones = sum(isinstance(value, mpmath.mpc) for value in values)
        if complex_ones == 0:
            if not same:
                return False
            real.append(True)
        elif complex_ones == 2 or not point:
            others.append(same)
        elif apart:
            return False  # ln|x| is real where ln x is not.
    if not point:
        return all([*real, *others])
    return len(real) >= 2 or (not real and len(others) >= 2 and all(others))


def _values(left: Node, right: Node, point: Mapping[str, Any], digits: int) -> tuple[Any, Any]:
    at = _at(point, digits)
    return number_at(left, digits, at), number_at(right, digits, at)


def _depends_on(node: Node, names: set[str]) -> bool:
    """Return whether the value of an expression changes with letters, as that of ``x/x`` does not."""
    if not names or "calculus" in functions_in(node):
        return bool(names)
    points, equal = _points(frozenset(symbols_in(node))), 0
    for k, point in enumerate(points):
        moved = {**point, **{name: points[(k + 1) % len(points)][name] for name in names}}
        try:
            first, second = (number_at(node, 20, _at(values, 20)) for values in (point, moved))
        except (UnreadableError, NoValueError):
            continue
        if abs(first - second) > abs(first) * mpmath.mpf("1e-15"):
            return True
        equal += 1
        if equal == 2:
            return False
    return True


def equal_values(left: Node, right: Node) -> bool:
    """Return whether two expressions are equal wherever both have values.

    A decimal of six digits or more equals an irrational number that it is the rounding of, or the beginning. To equal a
    fraction it needs ten.

    Raises:
        UnreadableError: a number is too large to evaluate.
        NoValueError: a number has no value.

    >>> from nrl.envs.library.mathematics.expressions import parse
    >>> equal_values(parse("sqrt(12)"), parse("2sqrt(3)")), equal_values(parse("1/1004!"), parse("1/1006!"))
    (True, False)
    >>> equal_values(parse("2pi"), parse("6.283185")), equal_values(parse("2pi"), parse("6.28"))
    (True, False)
    """
    first, second = exact(left), exact(right)
    if first is not None and second is not None:
        return first == second or rounds(first, second) or rounds(second, first)
    names, others = symbols_in(left), symbols_in(right)
    if _depends_on(left, names - others) or _depends_on(right, others - names):
        return False
    if (left == right and names) or _agree(left, right):
        return True
    if symbols_in(left) | symbols_in(right):
        return False
    if first is not None or second is not None:
        short, other = (first, right) if first is not None else (second, left)
        assert short is not None
        value = number_at(other, 40)
        if isinstance(value, mpmath.mpc) or not mpmath.isfinite(value):
            return False
        with mp.workdps(50):
            if abs(value) >= mpmath.mpf("1e30"):
                return False
            near = Fraction(int(mpmath.nint(value * 10**40)), 10**40)
            return rounds(short, near, endless=True)
    return False


def constant_ratio(left: Node, right: Node) -> int:
    """Return 1 or -1, the sign of the number that one expression is of the other; 0: it is no number.

    >>> from nrl.envs.library.mathematics.expressions import parse
    >>> constant_ratio(parse("2x-2"), parse("1-x")), constant_ratio(parse("x"), parse("x^2"))
    (-1, 0)
    """
    if symbols_in(left) != symbols_in(right) or not symbols_in(left):
        return 0
    ratios = list[Any]()
    for point in _points(frozenset(symbols_in(left))):
        at = _at(point, 60)
        try:
            values = number_at(left, 60, at), number_at(right, 60, at)
        except (UnreadableError, NoValueError):
            continue
        if any(isinstance(value, mpmath.mpc) or not mpmath.isfinite(value) for value in values):
            continue
        if not (values[0] and values[1]):
            if bool(values[0]) != bool(values[1]):
                return 0
            continue
        with mp.workdps(70):
            ratios.append(values[0] / values[1])
    with mp.workdps(70):
        same = all(abs(ratio - ratios[0]) <= abs(ratios[0]) * mpmath.mpf("1e-45") for ratio in ratios)
        return 0 if len(ratios) < 3 or not same else 1 if ratios[0] > 0 else -1
