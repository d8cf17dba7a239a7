r"""Read an answer once, into one of its kinds."""

import functools
import re
from collections.abc import Callable
from fractions import Fraction

from nrl.envs.library.mathematics.combining import both, overlapping, several, union, with_integer
from nrl.envs.library.mathematics.evaluating import exact
from nrl.envs.library.mathematics.expressions import parse
from nrl.envs.library.mathematics.kinds import (
    INFINITY,
    MINUS_INFINITY,
    REALS,
    Answer,
    Choice,
    Listing,
    Named,
    Piece,
    Point,
    Quantity,
    Ratio,
    Region,
    Relation,
    Words,
    as_region,
)
from nrl.envs.library.mathematics.logic import read_logic
from nrl.envs.library.mathematics.matrices import read_matrix, read_rows
from nrl.envs.library.mathematics.nodes import Node, UnreadableError, symbols_in
from nrl.envs.library.mathematics.notation import as_latex
from nrl.envs.library.mathematics.patterns import FLIPPED, INTEGERS, NAME, RELATIONS, SIGN, VALUE, VARIABLE
from nrl.envs.library.mathematics.regions import intersection
from nrl.envs.library.mathematics.remainders import read_congruences, read_division
from nrl.envs.library.mathematics.separators import (
    drop_words_of_items,
    is_bracketed,
    items_in,
    outside_removed,
    split_at_top,
)
from nrl.envs.library.mathematics.words.plain_kinds import (
    TEXT,
    read_based,
    read_choice,
    read_prose,
    read_special,
    read_statement,
    read_time,
    read_word_list,
    read_words,
    split_choice,
    unwrap_text,
)
from nrl.envs.library.mathematics.words.spoken import read_marks, spoken_number
from nrl.envs.library.mathematics.words.units import read_measures, scaled, split_unit
from nrl.envs.library.mathematics.working import values_in

__all__ = ["read"]

_SPACED = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?: [0-9]{3})+(?![0-9/])")  # 1 000 000
_AND = re.compile(
    r"\s*(?:,\s*)?(?:\\text ?\{ ?,? ?(?:and|or) ?\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|\\(?:lor|vee)(?![A-Za-z]))\s*"
)


@functools.lru_cache(256)
def read(text: str) -> Answer:
    r"""Read an answer, in one way to write it (`nrl.envs.library.mathematics.words.tidying.tidy`).

    Raises:
        UnreadableError: it is no answer of any kind.

    >>> read("3:30"), read("101_2")
    (Time(minutes=210, seconds=-1, half='', numbers=(3, 30)), Based(digits='101', base=2, literal=False))
    >>> read("Monday"), read("(B)")
    (Words(text='monday', product='', options=''), Choice(letter='B', marked=True, option=None))
    >>> read("x=5").name, read("[1,2)").pieces[0].closed_high, len(read(r"\pm 2").items)
    ('x', False, 2)
    """
    text = text.replace(r"\langle", "⟨").replace(r"\rangle", "⟩")  # brackets like the others
    text = as_latex(outside_removed(_SPACED.sub(lambda found: found[0].replace(" ", ","), text)))
    readers: tuple[Callable[[str], Answer | None], ...] = (
        _numeral, read_time, read_based, read_choice, _option, read_special, read_division, _congruence, read_logic,
        read_word_list, read_words,
    )  # fmt: skip
    for reader in readers:
        if (found := reader(text)) is not None:
            return found
    try:
        return _formula(text)
    except UnreadableError:
        if (words := read_statement(text) or read_prose(text)) is not None:
            return words
        raise


def _option(text: str) -> Choice | None:
    """Read an option with its text: ``(B) 12``."""
    parts = split_choice(text)
    if parts is None:
        return None
    try:
        return Choice(parts[0], True, read(parts[1]))
    except UnreadableError:
        return Choice(parts[0], True, Words(" ".join(parts[1].lower().split())))


def _numeral(text: str) -> Answer | None:
    """Read "twelve", "1 hour 30 minutes", or options such as "A, C"."""
    plain = unwrap_text(text)
    if (number := spoken_number(plain)) is not None:
        return Quantity(Node("number", (), number))
    if (measure := read_measures(plain)) is not None:
        return Quantity(Node("number", (), measure[0]), measure[1])
    return read_marks(re.sub(r" (?=[,;])|(?<=[,;]) ", "", plain))


def _congruence(text: str) -> Answer | None:
    classes = read_congruences(text)
    return classes[0] if len(classes) == 1 else Listing(tuple(classes), False) if classes else None


_COMMA = re.compile(r"[,;]")
_THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])")
_TIMES = re.compile(r"\\times(?![A-Za-z])|×")
_SHARED = re.compile(r"\\cap(?![A-Za-z])|∩")
_CUP = re.compile(r"\\cup(?![A-Za-z])|∪|(?<![A-Za-z])U(?![A-Za-z])")
_CAP = re.compile(r"\\(?:setminus|backslash)(?![A-Za-z])|\\\\|-(?=\\\{)")


def _formula(text: str) -> Answer:
    if whole := INTEGERS.fullmatch(unwrap_text(text)):
        positive = whole["set"] == "N" or whole["part"]
        return _with_integer(whole["value"], whole["a"] or whole["b"] or whole["c"], "N" if positive else "Z")
    text = drop_words_of_items(text)
    marked = _THOUSANDS.sub(lambda found: found[0].replace(",", "\1"), text)
    parts = split_at_top(marked, _AND)
    pieces = [piece for _, part in parts for _, piece in split_at_top(part, _COMMA)]
    items = [each for piece in pieces if (each := outside_removed(piece.replace("\1", ",")))]
    if not items:
        raise UnreadableError("nothing")
    if len(items) == 1:
        return _expanded(items[0])
    if len(items) > 300:
        raise UnreadableError("too many answers")
    if any("dots" in item for item in items):
        return _sequence(items)
    if all(SIGN.search(item) and not SIGN.match(item) for item in items):
        relations = [_expanded(item) for item in items]
        if len(parts) == 1:
            return overlapping(relations)
        return both(relations) if len(parts) == len(items) == 2 and "and" in parts[1][0] else several(relations)
    first = items[0].partition("=")
    if first[1] and NAME.fullmatch(first[0].strip()) and not any(SIGN.search(item) for item in items[1:]):
        values = several([_expanded(item) for item in [first[2], *items[1:]]])
        return Named(_name(first[0]), values)
    return several([_expanded(item) for item in items])


def _with_integer(text: str, letter: str, numbers: str) -> Answer:
    """Read an answer in which a letter stands for every whole number; of another one, that is a second condition."""
    found = _formula(text.strip())
    if any(letter in symbols_in(value) for value in values_in(found)):
        return with_integer(found, letter, numbers)
    return Listing((found, Words(f"{letter} is an integer")), False)


def _sequence(items: list[str]) -> Words:
    """Read ``1, 2, ..., n``, which is a text: what the dots stand for is a guess."""
    return Words("sequence " + ",".join("..." if "dots" in item else item for item in items))


def _expanded(item: str) -> Answer:
    r"""Read one answer; of one with ``\pm``, both."""
    if not re.search(r"\\[pm][mp](?![A-Za-z])|\+-|\+/-", item):
        return _one(item)
    item = re.sub(r"\+-|\+/-", r"\\pm ", item)
    upper = re.sub(r"\\pm(?![A-Za-z])", "+", re.sub(r"\\mp(?![A-Za-z])", "-", item))
    lower = re.sub(r"\\pm(?![A-Za-z])", "-", re.sub(r"\\mp(?![A-Za-z])", "+", item))
    first, second = _one(upper), _one(lower)
    if isinstance(first, Named) and isinstance(second, Named):
        return Named(first.name, Listing((first.value, second.value), False))
    return several([first, second])


def _one(text: str) -> Answer:
    text = outside_removed(text)
    readers: tuple[Callable[[str], Answer | None], ...] = (
        read_special, read_time, read_based, read_matrix, _member, _relation, _union, _bracketed,
        _labelled_point, _ratio,
    )  # fmt: skip
    for reader in readers:
        if (found := reader(text)) is not None:
            return found
    value, unit = split_unit(text)
    return Quantity(scaled(parse(value), unit), unit)


def _member(text: str) -> Answer | None:
    r"""Read ``x \in [1,2]``."""
    found = re.fullmatch(rf"({VARIABLE.pattern}|\([a-z](?:,[a-z])+\)) ?(?:\\in(?![A-Za-z])|∈) ?(.+)", text)
    if found is None:
        return None
    value = _one(found[2])
    return value._replace(name=found[1]) if isinstance(value, Region) else Named(found[1], value)


def _relation(text: str) -> Answer | None:
    parts = split_at_top(text, SIGN)
    if len(parts) == 1:
        return None
    signs = [RELATIONS[sign.strip()] for sign, _ in parts[1:]]
    sides = [outside_removed(side) for _, side in parts]
    if len(sides) == 2 and not sides[0] and signs[0] not in ("=", "!="):
        return _half_line(signs[0], "x", sides[1], name="")
    if any(not side for side in sides):
        raise UnreadableError("a relation without one of its sides")
    if set(signs) == {"="}:
        return _equation(sides)
    if len(sides) == 2 and (found := _half_line(signs[0], *sides)) is not None:
        return found
    if (
        len(sides) == 3
        and VARIABLE.fullmatch(sides[1])
        and set(signs) in ({"<"}, {"<="}, {"<", "<="}, {">"}, {">="}, {">", ">="})
    ):
        low, high = parse(sides[0]), parse(sides[2])
        closed = [len(sign) == 2 for sign in signs]
        if signs[0][0] == ">":
            low, high, closed = high, low, closed[::-1]
        return Region((Piece(low, high, *closed),), name=sides[1])
    if len(sides) != 2:
        raise UnreadableError("a chain of relations")
    left, right = parse(sides[0]), parse(sides[1])
    if left.kind == "abs" and left.parts[0].kind == "symbol" and (bound := exact(right)) is not None and bound > 0:
        return _around_zero(signs[0], str(left.parts[0].value), right)
    return Relation(signs[0], left, right)


def _around_zero(sign: str, name: str, bound: Node) -> Region:
    """Read ``|x| < 2`` and ``|x| > 2``."""
    closed, below = len(sign) == 2, Node("-", (bound,))
    if sign == "!=":
        return Region(REALS.pieces, (bound, below), name, solved=False)
    if sign[0] == "<":
        return Region((Piece(below, bound, closed, closed),), name=name, solved=False)
    pieces = Piece(MINUS_INFINITY, below, False, closed), Piece(bound, INFINITY, closed, False)
    return Region(pieces, name=name, solved=False)


def _half_line(sign: str, left: str, right: str, name: str | None = None) -> Region | None:
    if VARIABLE.fullmatch(right) and not VARIABLE.fullmatch(left):
        left, right, sign = right, left, FLIPPED[sign]
    if not VARIABLE.fullmatch(left) or left in ("e", "i"):
        return None
    bound = parse(right)
    if symbols_in(bound) & {left} or VARIABLE.fullmatch(right):
        return None
    name = left if name is None else name
    if sign == "!=":
        return Region(REALS.pieces, (bound,), name)
    if sign[0] == "<":
        return Region((Piece(MINUS_INFINITY, bound, False, sign == "<="),), name=name)
    return Region((Piece(bound, INFINITY, sign == ">=", False),), name=name)


def _equation(sides: list[str]) -> Answer:
    """Read ``x = 5``, ``3x + 4y = 0``, and a calculation such as ``x = 6*7 = 42``, whose last side counts."""
    first, last = sides[0], sides[-1]
    if VARIABLE.fullmatch(last) and not VARIABLE.fullmatch(first) and len(sides) == 2 and last not in ("e", "i"):
        first, last = last, first  # 5 = x
    if len(sides) > 2:
        tail = _one(last)
        inner = [_one(side) for side in sides[1:-1]]
        return Named(
            _name(first) if NAME.fullmatch(first) else "",
            Listing((*inner, tail), False),
            Relation("chain", _ZERO, _ZERO),
        )
    if VALUE.fullmatch(first) or first == "e":  # the eccentricity of an ellipse
        return Named(_name(first), _one(last))
    equation = None
    try:
        equation = Relation("=", parse(first), parse(last))
    except UnreadableError:
        if not NAME.fullmatch(first) and not TEXT.fullmatch(first) and not re.fullmatch(r"[A-Za-z ]{2,}", first):
            raise
    numbers = equation is not None and not symbols_in(equation.left) | symbols_in(equation.right)
    if equation is not None and numbers and equation.left.kind != "call":
        return Named("", Listing((_one(first), _one(last)), False), Relation("chain", _ZERO, _ZERO))
    if NAME.fullmatch(first) or TEXT.fullmatch(first) or equation is None:
        return Named(_name(first), _one(last), equation)
    assert equation is not None
    return equation


_ZERO = Node("number", (), Fraction(0))


def _name(text: str) -> str:
    return re.sub(r"[{} ]|^\|(?=[A-Z]{2}\|$)|(?<=[A-Z]{2})\|$", "", TEXT.sub(r"\1", text.strip()))


def _union(text: str) -> Answer | None:
    factors = [part.strip() for _, part in split_at_top(text, _TIMES)]
    if len(factors) > 1 and all(map(is_bracketed, factors)) and all(len(items_in(part[1:-1])) > 1 for part in factors):
        return Point(tuple(map(_one, factors)), "x")  # a product of sets
    shared = [part for _, part in split_at_top(text, _SHARED)]
    if len(shared) > 1:
        first, *others = (as_region(_one(part)) for part in shared)
        for other in others:
            first = intersection(first, other)
        return first
    parts = [part for _, part in split_at_top(text, _CUP)]
    if len(parts) > 1:
        return union([_one(part) for part in parts])
    taken = split_at_top(text, _CAP)
    if len(taken) == 2:
        whole, away = _one(taken[0][1]), _one(taken[1][1])
        if isinstance(whole, Region) and isinstance(away, Listing) and all(isinstance(x, Quantity) for x in away.items):
            points = tuple(x.value for x in away.items if isinstance(x, Quantity))
            return whole._replace(without=whole.without + points)
        raise UnreadableError("a difference of sets")
    return None


_OPENINGS = re.compile(r"(\\\{|[{(\[⟨])(.*)(\\\}|(?<!\\)[})\]⟩])", re.DOTALL)
_BUILDER = re.compile(
    rf"({VARIABLE.pattern})(?: ?(?:\\in|∈) ?\\mathbb ?\{{?R\}}?)? ?(?:\||:|\\mid(?![a-z])|\\vert(?![a-z])) ?(.+)"
)


def _bracketed(text: str) -> Answer | None:
    found = _OPENINGS.fullmatch(text)
    if found is None or not is_bracketed(text):
        return None
    opening, inner, closing = found.groups()
    if opening == "{" and len(items_in(inner)) == 1 and not _BUILDER.fullmatch(inner.strip()):
        return None  # a group, not a set
    if opening in (r"\{", "{"):
        if builder := _BUILDER.fullmatch(inner.strip()):
            region = _formula(builder[2])
            if isinstance(region, Region) and region.name not in ("", builder[1]):
                raise UnreadableError(f"a set of {builder[1]} without a condition of it")
            return region
        head = split_at_top(inner, _SUCH_THAT)
        if len(head) == 2 and (len(items_in(head[0][1])) == 1 or is_bracketed(head[0][1].strip())):
            return Point((_one(head[0][1]), _condition(head[1][1])), "{|}")
        items = items_in(inner)
        if any("dots" in item for item in items):
            return _sequence([item.strip() for item in items])
        if opening == "{":
            items = [re.sub(r"^\{([^{}]*)\}$", r"\\{\1\\}", item.strip()) for item in items]  # sets in a set
        read_items = list[Answer]()
        for item in items:
            value = _expanded(item)
            read_items.extend(value.items if isinstance(value, Listing) and not value.braces else [value])
        return Listing(tuple(read_items), True)
    items = items_in(inner)
    if opening == "[" and (rows := read_rows(inner)) is not None:
        return rows
    if len(items) == 1 and opening == "[":
        return Point((_one(items[0]),), "[]")  # A list of Python with one item.
    if len(items) == 1:
        return None if opening != "⟨" else _one(items[0])
    values = tuple(_one(item) for item in items)
    if opening == "⟨":
        return Point(values, "<>")
    mixed = opening + closing
    if len(values) == 2 and mixed != "()" and all(isinstance(value, Quantity) for value in values):
        low, high = (value.value for value in values if isinstance(value, Quantity))
        return Region((Piece(low, high, opening == "[", closing == "]"),))
    if mixed in ("(]", "[)"):
        raise UnreadableError("an interval of more than two ends")
    return Point(values, mixed)


_SUCH_THAT = re.compile(r"\\(?:mid|vert)(?![A-Za-z])|:|\|")


def _condition(text: str) -> Answer:
    if whole := re.fullmatch(r"([A-Za-z]) ?(?:\\in|∈) ?\\mathbb ?\{?([A-Z])\}?(.*)", text.strip()):
        return Words(f"{whole[1]} in {whole[2]}{whole[3]}")
    return _formula(text.strip())


_POINT = re.compile(r"([A-Z])(?:_\{?[0-9]\}?|')? ?(\(.+\))")


def _labelled_point(text: str) -> Named | None:
    """Read ``A(1,2)``, the point with a name."""
    match = _POINT.fullmatch(text)
    if match is None or not is_bracketed(match[2]) or len(items_in(match[2][1:-1])) == 1:
        return None
    pair = re.fullmatch(r"\(([0-9]+),([0-9]+)\)", match[2])
    if match[1] == "C" and pair and int(pair[1]) >= int(pair[2]):
        return None  # combinations
    return Named(match[1], _one(match[2]))


_COLON = re.compile(r"(?::|\{:\}|\\colon(?![A-Za-z])|(?:\\text ?\{ ?to ?\}| to ))")


def _ratio(text: str) -> Ratio | None:
    parts = [part for _, part in split_at_top(text.replace("{:}", ":"), _COLON)]
    return Ratio(tuple(parse(outside_removed(part)) for part in parts)) if len(parts) > 1 else None
