"""Compare two answers by kind. Equality is symmetric; what an answer may leave to be worked out is decided apart."""

import functools
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

from nrl.envs.mathematics.evaluating import constant_ratio, equal_values, exact, fault_of, number_at
from nrl.envs.mathematics.expressions import (
    Node,
    NoValueError,
    UnreadableError,
    functions_in,
    operations,
    parse,
    symbols_in,
)
from nrl.envs.mathematics.kinds import (
    Answer,
    Based,
    Choice,
    Listing,
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
    read,
)
from nrl.envs.mathematics.units import differ

__all__ = ["equal", "is_right", "unusable"]

_MOST = 12  # items of a set, since each may have to be compared with each


def unusable(text: str) -> str:
    r"""Return why a reference cannot be met by any answer; empty: it can.

    >>> unusable(r"\frac{1}{2}"), unusable(r"\frac{1}{0}")
    ('', 'which has no value')
    """
    try:
        found = read(text)
    except (UnreadableError, NoValueError) as error:
        return f"which cannot be read as mathematics ({error})"
    return next((why for value in _values(found) if (why := fault_of(value))), "")


def _values(found: Answer) -> list[Node]:
    match found:
        case Quantity():
            return [found.value]
        case Listing() | Point():
            return [value for item in found.items for value in _values(item)]
        case Region():
            return [*found.without, *(end for piece in found.pieces for end in (piece.low, piece.high))]
        case Relation():
            return [found.left, found.right]
        case Named():
            return _values(found.value)
        case Matrix():
            return [cell for row in found.rows for cell in row]
        case Ratio():
            return list(found.parts)
    return []


def is_right(reference: str, answer: str) -> bool:
    """Return whether an answer equals a reference, and leaves nothing to be worked out.

    Raises:
        UnreadableError: one of the two cannot be read.

    >>> is_right("x=3", "3"), is_right("x=3", "2x+1=7"), is_right("29", "12+17")
    (True, False, False)
    """
    right = read(reference)
    exact_part, about, rounded = answer.rpartition(r"\approx")
    answers = [part for part in (exact_part, rounded) if part.strip()]
    if about and len(answers) == 2 and not _is_rounding(*answers):
        return False  # two answers
    try:
        return any(_is_worked(right, found) and equal(right, found) for found in map(read, answers))
    except NoValueError:
        return False


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
        return _bare(_last(found.value, found))
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
            return left == right
        case Choice(), Choice():
            marked = left.marked or right.marked
            return left.letter.upper() == right.letter.upper() if marked else left.letter == right.letter
        case Words(), Words():
            return left.text == right.text or _products(left.product, right.product)
        case Matrix(), Matrix():
            return [len(row) for row in left.rows] == [len(row) for row in right.rows] and all(
                equal_values(a, b)
                for a, b in zip(itertools.chain(*left.rows), itertools.chain(*right.rows), strict=True)
            )
        case Relation(), Relation():
            return _relations(left, right)
        case Region(), Region():
            return _regions(left, right)
        case Point(), Point():
            return _in_order(left.items, right.items)
        case Listing(), Listing():
            return _in_any_order(left.items, right.items)
        case Named(), Named():
            return _named(left, right)
    return None


def _coerced(left: Answer, right: Answer) -> bool | None:
    """Compare two kinds where one may be meant by the other."""
    match left, right:
        case Named(), Relation():
            return left.equation is not None and left.equation.sign == "=" and _relations(left.equation, right)
        case Named(), Listing() if isinstance(left.value, Quantity) and len(right.items) > 1:
            return False
        case Named(), _:
            return equal(_last(left.value, left), right) if _is_calculation_true(left) else False
        case Region(), Point():
            region = as_region(right)
            return region is not None and _regions(left, region)
        case Region(), Relation() if (relation := _as_relation(left)) is not None:
            return _relations(relation, right)
        case Listing(), Point():
            if all(isinstance(item, Named) for item in left.items):
                return _in_order(_by_name(left.items), right.items)
            return not left.braces and right.brackets == "()" and _in_order(left.items, right.items)
        case Listing(), _ if len(left.items) == 1 and not isinstance(right, Region):
            return equal(left.items[0], right)
        case Ratio(), Quantity():
            return len(left.parts) == 2 and not right.unit and equal_values(Node("/", left.parts), right.value)
        case Choice(), Quantity():
            return not left.marked and equal(Quantity(parse(left.letter)), right)
        case Words(), Quantity():
            return bool(left.product) and equal_values(parse(left.product), right.value)
        case Choice(), Words():
            return False
    return None


_RULES: tuple[Callable[[Answer, Answer], bool | None], ...] = (_same_kind, _coerced)


def _quantities(left: Quantity, right: Quantity) -> bool:
    if differ(left.unit, right.unit):
        return False
    if left.integer or right.integer:
        mine, other = (symbols_in(side.value) for side in (left, right))
        if len(mine - other) == len(other - mine) == 1 and (other - mine) <= set("kmn"):
            right = right._replace(value=_renamed(right.value, *(other - mine), *(mine - other)))
    cents = [_is_percent(side.value) for side in (left, right)]
    if sum(cents) != 1:
        return equal_values(left.value, right.value)
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
    return node.kind == "%" or (node.kind in "-" and _is_percent(node.parts[0]))


def _percentage(node: Node) -> Node:
    return node.parts[0] if node.kind == "%" else node._replace(parts=(_percentage(node.parts[0]),))


def _products(left: str, right: str) -> bool:
    """Return whether two words are products of the same letters; words that can be spoken are words."""
    return bool(left and right) and sorted(left) == sorted(right) and not set("aeiouAEIOU") & set(left)


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
    if len(left) == len(right) and all(equal(a, b) for a, b in zip(left, right, strict=True)):
        return True
    if max(len(left), len(right)) > _MOST:
        return len(left) == len(right) and all(map(equal, *map(_sorted, (left, right))))
    return all(any(equal(a, b) for b in right) for a in left) and all(any(equal(a, b) for a in left) for b in right)


def _sorted(items: Sequence[Answer]) -> list[Answer]:
    """Return many answers in the order of their values."""

    def key(item: Answer) -> Any:
        value = number_at(item.value, 20) if isinstance(item, Quantity) and not symbols_in(item.value) else 0
        return complex(value).real, complex(value).imag

    return sorted(items, key=key)


def _by_name(items: Sequence[Answer]) -> list[Answer]:
    return [item.value for item in sorted((x for x in items if isinstance(x, Named)), key=lambda item: item.name)]


def _last(value: Answer, named: Named) -> Answer:
    """Return the side of a calculation that counts, which is the last."""
    calculation = named.equation is not None and named.equation.sign == "chain"
    return value.items[-1] if calculation and isinstance(value, Listing) else value


def _is_calculation_true(named: Named) -> bool:
    """Return whether the sides of ``x = 6*7 = 42`` are equal, as far as they are numbers."""
    if named.equation is None or named.equation.sign != "chain" or not isinstance(named.value, Listing):
        return True
    *others, last = named.value.items
    return all(equal(other, last) for other in others if isinstance(other, Quantity) and not symbols_in(other.value))


def _named(left: Named, right: Named) -> bool:
    if left.equation and right.equation and left.equation.sign == right.equation.sign == "=":
        if left.name != right.name:
            return _relations(left.equation, right.equation) or (
                _same_name(left.name, right.name) and equal(left.value, right.value)
            )
    elif not _same_name(left.name, right.name):
        return False
    if not (_is_calculation_true(left) and _is_calculation_true(right)):
        return False
    return equal(_last(left.value, left), _last(right.value, right))


def _same_name(left: str, right: str) -> bool:
    """Return whether two names may be of the same: y and f(x), a letter and words."""

    def kind(name: str) -> str:
        return "function" if "(" in name else "words" if len(name) > 3 and name.isalpha() else "letter"

    if left == right or not left or not right:
        return True
    kinds = {kind(left), kind(right)}
    return "words" in kinds or (kinds == {"function", "letter"} and "y" in (left, right))


# --- Relations and sets of numbers


def _relations(left: Relation, right: Relation) -> bool:
    first, second = left, right
    flips = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}
    sign = constant_ratio(_difference(first), _difference(second))
    if not sign and first.sign == second.sign == "=":
        sign = constant_ratio(_without_fractions(_difference(first)), _without_fractions(_difference(second)))
    return bool(sign) and first.sign == (second.sign if sign > 0 else flips[second.sign])


def _difference(relation: Relation) -> Node:
    return Node("+", (relation.left, Node("-", (relation.right,))))


def _without_fractions(node: Node) -> Node:
    """Return a sum times the denominators of its terms."""
    below = [term.parts[1] for term in _terms(node) if term.kind == "/" and symbols_in(term.parts[1])]
    return Node("*", (node, *below)) if below else node


def _terms(node: Node) -> list[Node]:
    return [term for part in node.parts for term in _terms(part)] if node.kind in ("+", "-") else [node]


def _as_relation(region: Region) -> Relation | None:
    """Return the inequality of which a half-line is the solution."""
    if len(region.pieces) != 1 or region.without or not region.name:
        return None
    piece, variable = region.pieces[0], parse(region.name)
    below, above = _is_infinite(piece.low), _is_infinite(piece.high)
    if below == above:
        return None
    if below:
        return Relation("<=" if piece.closed_high else "<", variable, piece.high)
    return Relation(">=" if piece.closed_low else ">", variable, piece.low)


def _is_infinite(node: Node) -> bool:
    return (node.kind == "constant" and node.value == "infinity") or (node.kind == "-" and _is_infinite(node.parts[0]))


type _Interval = tuple[Any, Any, bool, bool]


def _regions(left: Region, right: Region) -> bool:
    if left.name and right.name and left.name != right.name:
        return False
    ends = [end for side in (left, right) for piece in side.pieces for end in piece[:2]] + [
        *left.without,
        *right.without,
    ]
    if any(symbols_in(end) for end in ends):
        return len(left.pieces) == len(right.pieces) and all(
            a[2:] == b[2:] and equal_values(a.low, b.low) and equal_values(a.high, b.high)
            for a, b in zip(left.pieces, right.pieces, strict=True)
        )
    first, second = _intervals(left), _intervals(right)
    return len(first) == len(second) and all(
        a[2:] == b[2:] and equal_values(a[0], b[0]) and equal_values(a[1], b[1])
        for a, b in zip(first, second, strict=True)
    )


def _intervals(region: Region) -> list[_Interval]:
    """Return intervals that do not touch, in their order, without the numbers that are taken out."""

    def compare(a: Node, b: Node) -> int:
        if equal_values(a, b):
            return 0
        first, second = (number_at(end, 60) for end in (a, b))
        if isinstance(first, complex) or isinstance(second, complex):
            raise UnreadableError("an interval whose ends are no real numbers")
        return -1 if first < second else 1

    def start(a: _Interval, b: _Interval) -> int:
        return compare(a[0], b[0]) or (b[2] - a[2])

    pieces = [
        (p.low, p.high, p.closed_low and not _is_infinite(p.low), p.closed_high and not _is_infinite(p.high))
        for p in region.pieces
    ]
    for low, high, closed_low, closed_high in pieces:
        order = compare(low, high)
        if order > 0 or (order == 0 and not (closed_low and closed_high)):
            raise UnreadableError("an interval whose ends are the wrong way round")
    joined = list[_Interval]()
    for piece in sorted(pieces, key=functools.cmp_to_key(start)):
        if joined:
            low, high, closed_low, closed_high = joined[-1]
            order = compare(piece[0], high)
            if order < 0 or (order == 0 and (closed_high or piece[2])):
                later = compare(piece[1], high)
                if later > 0 or (later == 0 and piece[3]):
                    high, closed_high = piece[1], piece[3] if later > 0 else True
                joined[-1] = (low, high, closed_low, closed_high)
                continue
        joined.append(piece)
    for point in region.without:
        split = list[_Interval]()
        for low, high, closed_low, closed_high in joined:
            at_low, at_high = compare(point, low), compare(point, high)
            if at_low < 0 or at_high > 0:
                split.append((low, high, closed_low, closed_high))
            elif at_low == 0 or at_high == 0:
                if at_low != at_high:
                    split.append((low, high, closed_low and at_low != 0, closed_high and at_high != 0))
            else:
                split += [(low, point, closed_low, False), (point, high, False, closed_high)]
        joined = split
    return joined


# --- What leaves the work to the verifier


def _is_worked(right: Answer, found: Answer) -> bool:
    """Return whether an answer is as far worked out as the reference: a number is a numeral, a solution is no equation."""
    match right, found:
        case (Named() | Region(), Relation()):
            return bool(_free(right) - {right.name})
        case (Named(), Named()):
            solved = right.equation is None or not _free(right.value) or bool(_free(found.value))
            return solved and _is_worked(_last(right.value, right), _last(found.value, found))
        case (Named(), _):
            return _is_worked(_last(right.value, right), found)
        case (_, Named()):
            return _is_worked(right, _last(found.value, found))
        case (Quantity(), Listing()) if len(found.items) == 1:
            return _is_worked(right, found.items[0])
        case (Quantity(), Quantity()):
            return _is_number_worked(right.value, found.value)
        case (Listing() | Point(), Listing() | Point()) if len(right.items) == len(found.items):
            bare = [[_last(x.value, x) if isinstance(x, Named) else x for x in side.items] for side in (right, found)]
            if not all(isinstance(x, Quantity) and _is_numeral(x.value) for x in bare[0]):
                return True
            return all(not isinstance(x, Quantity) or _is_numeral(x.value) for x in bare[1])
    return True


def _free(found: Answer) -> set[str]:
    return set[str]().union(*map(symbols_in, _values(found)))


def _is_number_worked(right: Node, found: Node) -> bool:
    if symbols_in(right):
        return True
    if symbols_in(found):
        return False
    if _is_numeral(right):
        return _is_numeral(found)
    return functions_in(found) <= functions_in(right) and operations(found) <= 2 * operations(right) + 3


def _is_numeral(node: Node) -> bool:
    """Return whether an expression is one number that is worked out: at most a fraction, per cent, 3.5 * 10^-5, 10^6."""
    match node.kind:
        case "number" | "mixed":
            return True
        case "-" | "%" | "degrees":
            return node.parts[0].kind != node.kind and _is_numeral(node.parts[0])
        case "/":
            return all(
                part.kind == "number" or (part.kind == "-" and part.parts[0].kind == "number") for part in node.parts
            )
        case "^":
            return _is_power_of_ten(node)
        case "*" if len(node.parts) == 2:
            factor, power = node.parts
            factor = factor.parts[0] if factor.kind == "-" else factor
            return factor.kind == "number" and _is_power_of_ten(power) and 1 <= abs(factor.value) < 10
    return False


def _is_power_of_ten(node: Node) -> bool:
    if node.kind != "^" or node.parts[0].kind != "number" or node.parts[0].value != 10:
        return False
    power = exact(node.parts[1])
    return power is not None and power.denominator == 1
