"""Compare two answers by kind. Equality is symmetric; what an answer may leave to be worked out is decided apart."""

import functools
import itertools
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from nrl.envs.library.mathematics.evaluating import equal_values, exact, fault_of, number_at
from nrl.envs.library.mathematics.expressions import parse
from nrl.envs.library.mathematics.kinds import (
    Answer,
    Based,
    Choice,
    Congruence,
    Division,
    Listing,
    Logic,
    Matrix,
    Named,
    Point,
    Quantity,
    Ratio,
    Region,
    Relation,
    Time,
    Words,
    as_region,
)
from nrl.envs.library.mathematics.nodes import Node, NoValueError, UnreadableError, symbols_in
from nrl.envs.library.mathematics.reading import read
from nrl.envs.library.mathematics.regions import as_relation, equal_regions, equal_relations
from nrl.envs.library.mathematics.remainders import equal_congruences, equal_lines, has_residue, is_solution
from nrl.envs.library.mathematics.words.units import conversion, differ
from nrl.envs.library.mathematics.working import is_worked, last_side, values_in

__all__ = ["equal", "is_right", "unusable"]

_MOST = 12  # items of a set, since each may have to be compared with each


@functools.lru_cache(256)
def unusable(text: str) -> str:
    r"""Return why a reference cannot be met by any answer; empty: it can.

    >>> unusable(r"\frac{1}{2}"), unusable(r"\frac{1}{0}")
    ('', 'which has no value')
    """
    try:
        sides = _sides(text)
        if len(sides) == 2 and not _is_rounding(*sides):
            return "of which one side of \\approx is no rounding of the other"
        for found in map(read, sides):
            if why := next((why for value in values_in(found) if (why := fault_of(value))), ""):
                return why
            if not equal(found, found):
                return "which does not equal itself"
    except (UnreadableError, NoValueError) as error:
        return f"which cannot be read as mathematics ({error})"
    return ""


def is_right(reference: str, answer: str) -> bool:
    """Return whether an answer equals a reference, and leaves nothing to be worked out.

    Raises:
        UnreadableError: one of the two cannot be read.

    >>> is_right("x=3", "3"), is_right("x=3", "2x+1=7"), is_right("29", "12+17")
    (True, False, False)
    """
    rights, answers = list(map(read, _sides(reference))), _sides(answer)
    if len(answers) == 2 and not _is_rounding(*answers):
        return False  # two answers
    try:
        found = list(map(read, answers))
        return any(is_worked(right, answer) and equal(right, answer) for answer in found for right in rights)
    except NoValueError:
        return False


_LETTER = re.compile(r"\\?[A-Za-z]+(?:_\{?[A-Za-z0-9]+\}?)?(?:\([a-z]\))?")


def _sides(text: str) -> list[str]:
    r"""Return a value and its rounding, where ``\approx`` stands between the two; otherwise the text alone."""
    exact_part, about, rounded = text.rpartition(r"\approx")
    if about and _LETTER.fullmatch(exact_part.strip()) and exact_part.strip() not in (r"\pi", "e"):
        return [f"{exact_part}={rounded}"]  # x \approx 5.2
    return [part for part in (exact_part, rounded) if part.strip()] or [text]


_DECIMAL = re.compile(
    r"[^0-9]*[0-9][0-9,{}!]*(?:\.(?P<decimals>[0-9]+))?(?: ?\\(?:cdot|times) ?10\^\{?(?P<ten>-?[0-9]{1,2})\}?)?[^0-9]*"
)


def _is_rounding(longer: str, rounded: str) -> bool:
    """Return whether the second of two numbers is the first with fewer digits, rounded or cut off."""
    number = _DECIMAL.fullmatch(rounded)
    sides = [_bare(read(side.rpartition(r"\approx")[2])) for side in (longer, rounded)]
    if number is None or any(side is None or symbols_in(side) for side in sides):
        return False
    value, short = (complex(number_at(side, 30)) for side in sides if side is not None)
    unit = 10.0 ** (int(number["ten"] or 0) - len(number["decimals"] or "") - 2 * ("%" in rounded))
    return abs(value - short) < unit and abs(value) - abs(short) > -0.501 * unit


def _bare(found: Answer) -> Node | None:
    """Return the number of an answer that is one, without its name."""
    if isinstance(found, Named):
        return _bare(last_side(found.value, found))
    return found.value if isinstance(found, Quantity) else None


# --- Equality


def equal(first: Answer, second: Answer) -> bool:
    """Return whether two answers are equal; the order of the two does not matter."""
    for rule in _RULES:
        for left, right in ((first, second), (second, first)):
            if (found := rule(left, right)) is not None:
                return found
    return False


def _same_kind(left: Answer, right: Answer) -> bool | None:
    match left, right:
        case Quantity(), Quantity():
            return _quantities(left, right)
        case Time(), Time():
            both = bool(left.half and right.half) or left.half == right.half or max(left.minutes, right.minutes) >= 780
            same = left.minutes == right.minutes or (not both and left.minutes % 720 == right.minutes % 720)
            return same and left.seconds == right.seconds
        case Ratio(), Ratio():
            return _ratios(left.parts, right.parts)
        case Based(), Based():
            return left[:2] == right[:2]
        case Choice(), Choice():
            if left.option is not None and right.option is not None and not equal(left.option, right.option):
                return False
            marked = left.marked or right.marked
            return left.letter.upper() == right.letter.upper() if marked else left.letter == right.letter
        case Logic(), Logic():
            return left == right
        case Congruence(), Congruence():
            return equal_congruences(left, right)
        case Division(), Division():
            return equal_values(left.quotient, right.quotient) and equal_values(left.remainder, right.remainder)
        case Words(), Words():
            return left.text == right.text or _products(left.product, right.product)
        case Matrix(), Matrix():
            return [len(row) for row in left.rows] == [len(row) for row in right.rows] and all(
                equal_values(a, b)
                for a, b in zip(itertools.chain(*left.rows), itertools.chain(*right.rows), strict=True)
            )
        case Relation(), Relation():
            return equal_relations(left, right)
        case Region(), Region():
            return equal_regions(left, right)
        case Point(), Point():
            special = {left.brackets, right.brackets} & {"{|}", "x"}
            return (left.brackets == right.brackets or not special) and _in_order(left.items, right.items)
        case Listing(), Listing():
            return _in_any_order(left.items, right.items)
        case Named(), Named():
            return _named(left, right)
    return None


def _coerced(left: Answer, right: Answer) -> bool | None:
    """Compare two kinds where one may be meant by the other."""
    match left, right:
        case Named(), Relation():
            return left.equation is not None and left.equation.sign == "=" and equal_relations(left.equation, right)
        case Named(), Listing() if isinstance(left.value, Quantity) and len(right.items) > 1:
            return False
        case Named(), _:
            return equal(last_side(left.value, left), right) if _is_calculation_true(left) else False
        case Region(), Point():
            region = as_region(right)
            return region is not None and equal_regions(left, region)
        case Region(), Relation() if (relation := as_relation(left)) is not None:
            return equal_relations(relation, right)
        case Listing(), Point():
            if all(isinstance(item, Named) for item in left.items):
                return _in_order(_by_name(left.items), right.items)
            return not left.braces and right.brackets in ("()", "[]") and _in_order(left.items, right.items)
        case Listing(), _ if len(left.items) == 1 and not isinstance(right, Region):
            return equal(left.items[0], right)
        case Ratio(), Quantity():
            whole = exact(right.value)
            if whole is not None and whole.denominator == 1:
                return False  # 7:1 is not 7
            return len(left.parts) == 2 and not right.unit and equal_values(Node("/", left.parts), right.value)
        case Time(), Ratio():
            return _ratios([Node("number", (), Fraction(number)) for number in left.numbers], right.parts)
        case Choice(), _ if left.option is not None:
            return equal(left.option, right)
        case Congruence(), Quantity() if right.numbers == "Z":
            return is_solution(left, right)
        case Congruence(), Quantity():
            return not left.name and has_residue(left, right.value)
        case Based(), Quantity() if left.literal:
            return equal_values(Node("number", (), Fraction(int(left.digits, left.base))), right.value)
        case Choice(), Quantity():
            return not left.marked and equal(Quantity(parse(left.letter)), right)
        case Words(), Quantity():
            return bool(left.product) and equal_values(parse(left.product), right.value)
        case Choice(), Words():
            return right.product == left.letter  # statement I
        case Words(), Listing() if left.options:
            return sorted(left.options) == sorted(item.letter for item in right.items if isinstance(item, Choice))
        case Relation(), Quantity() if left.sign == "=" and left.left.kind == "+":  # m+n=73, as AIME asks for it
            letters = all(part.kind == "symbol" for part in left.left.parts)
            return letters and not symbols_in(left.right) and equal_values(left.right, right.value)
        case Point(), Quantity() if len(left.items) == 1:
            return equal(left.items[0], right)
    return None


_RULES: tuple[Callable[[Answer, Answer], bool | None], ...] = (_same_kind, _coerced)


def _quantities(left: Quantity, right: Quantity) -> bool:
    if "+" in left.unit + right.unit and not (left.unit and right.unit):
        return False  # 90 is not 1 hour 30 minutes.
    if (factor := conversion(left.unit, right.unit)) not in (None, 1):
        return equal_values(Node("*", (left.value, Node("number", (), factor))), right.value)
    if factor is None and differ(left.unit, right.unit):
        return False
    if left.numbers and right.numbers and left.numbers != right.numbers:
        return False
    if left.integer or right.integer:
        names, others = (symbols_in(side.value) for side in (left, right))
        if len(names - others) == len(others - names) == 1 and (others - names) <= set("kmn"):
            right = right._replace(value=_renamed(right.value, *(others - names), *(names - others)))
        letter = (left.integer or right.integer) if symbols_in(left.value) == symbols_in(right.value) else ""
        if letter and "N" not in (left.numbers, right.numbers) and equal_lines(left.value, right.value, letter):
            return True
    cents = [_is_percent(side.value) for side in (left, right)]
    if sum(cents) != 1:
        return equal_values(left.value, right.value)
    if left.unit not in ("", "%") or right.unit not in ("", "%"):
        return False  # 5% is not 5 cm
    part, other = (left.value, right.value) if cents[0] else (right.value, left.value)
    hundredths, whole = _percentage(part), exact(other)
    if equal_values(part, other):  # 50% is 0.5, but nobody writes 500% for 5
        return whole is None or whole.denominator > 1 or abs(whole) <= 1
    number = exact(hundredths)
    return equal_values(hundredths, other) and (number is None or abs(number) >= 1)


def _renamed(node: Node, old: str, new: str) -> Node:
    return node._replace(
        parts=tuple(_renamed(part, old, new) for part in node.parts), value=new if node.value == old else node.value
    )


def _is_percent(node: Node) -> bool:
    return node.kind == "%" or (node.kind == "-" and _is_percent(node.parts[0]))


def _percentage(node: Node) -> Node:
    return node.parts[0] if node.kind == "%" else node._replace(parts=(_percentage(node.parts[0]),))


_WORDS = (
    "am an as at be by do go he hi if in is it me my no of oh ok on or so to up us we ad ah ha ma pa ox ax ex id la ho"
)
_SHORT_WORDS = frozenset(_WORDS.split())


def _products(left: str, right: str) -> bool:
    """Return whether two words are products of the same letters; words that can be spoken are words."""
    if not (left and right) or sorted(left) != sorted(right):
        return False
    if len(left) == 2 and (left + right).islower():
        return not {left, right} & _SHORT_WORDS
    return not set("aeiouAEIOU") & set(left)


def _ratios(left: Sequence[Node], right: Sequence[Node]) -> bool:
    if len(left) != len(right):
        return False
    pairs = zip(left[1:], right[1:], strict=True)
    return all(equal_values(Node("*", (left[0], b)), Node("*", (right[0], a))) for a, b in pairs)


def _in_order(left: Sequence[Answer], right: Sequence[Answer]) -> bool:
    return len(left) == len(right) and all(equal(a, b) for a, b in zip(left, right, strict=True))


def _in_any_order(left: Sequence[Answer], right: Sequence[Answer]) -> bool:
    """Compare as sets: an element may stand there twice."""
    names = [all(isinstance(item, Named) for item in side) and bool(side) for side in (left, right)]
    if sum(names) == 1 and len(left) == len(right):
        named, bare = (left, right) if names[0] else (right, left)
        letters = {re.sub(r"_.*", "", item.name) for item in named if isinstance(item, Named)}
        if len(letters) > 1:  # x = 2, y = 3
            return _in_order(_by_name(named), bare)
    if len(left) != len(right) and max(len(left), len(right)) > _MOST:
        return False
    if len(left) == len(right) and all(_same_item(a, b) for a, b in zip(left, right, strict=True)):
        return True
    if max(len(left), len(right)) > _MOST:
        return len(left) == len(right) and all(map(equal, *map(_sorted, (left, right))))
    return all(any(_same_item(a, b) for b in right) for a in left) and all(
        any(_same_item(a, b) for a in left) for b in right
    )


def _same_item(left: Answer, right: Answer) -> bool:
    r"""Return whether two elements of sets are equal: ``\{1\}`` is another one than 1."""
    sets = [isinstance(item, Listing) and item.braces for item in (left, right)]
    return sets[0] == sets[1] and equal(left, right)


def _sorted(items: Sequence[Answer]) -> list[Answer]:
    """Return many answers in the order of their values."""

    def key(item: Answer) -> Any:
        value = number_at(item.value, 20) if isinstance(item, Quantity) and not symbols_in(item.value) else 0
        return complex(value).real, complex(value).imag

    return sorted(items, key=key)


def _by_name(items: Sequence[Answer]) -> list[Answer]:
    return [item.value for item in sorted((x for x in items if isinstance(x, Named)), key=lambda item: item.name)]


def _is_calculation_true(named: Named) -> bool:
    """Return whether the sides of ``x = 6*7 = 42`` are equal, as far as they are numbers."""
    if named.equation is None or named.equation.sign != "chain" or not isinstance(named.value, Listing):
        return True
    *others, last = named.value.items
    return all(equal(other, last) for other in others if isinstance(other, Quantity) and not symbols_in(other.value))


_FUNCTION = re.compile(r"([A-Za-z]+(?:_[A-Za-z0-9]+)?)\(([a-z])\)")


def _with_argument_of(left: Named, right: Named) -> Named:
    """Return a function of t as one of x, where the other is: ``f(t) = t^2`` is ``f(x) = x^2``."""
    first, second = _FUNCTION.fullmatch(left.name), _FUNCTION.fullmatch(right.name)
    if not (first and second) or first[1] != second[1] or not isinstance(right.value, Quantity):
        return right
    if first[2] == second[2] or first[2] in symbols_in(right.value.value):
        return right
    value = right.value._replace(value=_renamed(right.value.value, second[2], first[2]))
    return Named(left.name, value)


def _named(left: Named, right: Named) -> bool:
    right = _with_argument_of(left, right)
    if left.equation and right.equation and left.equation.sign == right.equation.sign == "=":
        if left.name != right.name:
            return equal_relations(left.equation, right.equation) or (
                _same_name(left.name, right.name) and equal(left.value, right.value)
            )
    elif not _same_name(left.name, right.name):
        return False
    if not (_is_calculation_true(left) and _is_calculation_true(right)):
        return False
    return equal(last_side(left.value, left), last_side(right.value, right))


def _same_name(left: str, right: str) -> bool:
    """Return whether two names may be of the same: y and f(x), a letter and words."""

    def kind(name: str) -> str:
        return "function" if "(" in name else "words" if len(name) > 3 and name.isalpha() else "letter"

    if left == right or not left or not right:
        return True
    kinds = {kind(left), kind(right)}
    return "words" in kinds or (kinds == {"function", "letter"} and "y" in (left, right))
