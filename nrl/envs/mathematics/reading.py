r"""Read an answer once, into one of its kinds."""

import functools
import re
from collections.abc import Callable
from fractions import Fraction

from nrl.envs.mathematics.expressions import parse
from nrl.envs.mathematics.kinds import (
    INFINITY,
    MINUS_INFINITY,
    REALS,
    Answer,
    Listing,
    Matrix,
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
from nrl.envs.mathematics.nodes import Node, UnreadableError, symbols_in
from nrl.envs.mathematics.plain_kinds import (
    TEXT,
    read_based,
    read_choice,
    read_prose,
    read_special,
    read_time,
    read_words,
)
from nrl.envs.mathematics.units import scaled, split_unit

__all__ = ["read", "split_at_top"]

_SPACED = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?: [0-9]{3})+(?![0-9/])")  # 1 000 000
_MATRIX = re.compile(
    r"(?P<factor>.*?)\\begin\{(?:[pbBvV]?matrix|array)\}(?:\{[lcr| ]*\})?(?P<body>(?:(?!\\begin).)*?)"
    r"\\end\{(?:[pbBvV]?matrix|array)\}",
    re.DOTALL,
)
_AND = re.compile(
    r"\s*(?:,\s*)?(?:\\text ?\{ ?,? ?(?:and|or) ?\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|\\(?:lor|vee)(?![A-Za-z]))\s*"
)
_RELATIONS = {
    "=": "=",
    "<": "<",
    ">": ">",
    r"\le": "<=",
    r"\ge": ">=",
    r"\lt": "<",
    r"\gt": ">",
    r"\ne": "!=",
    "!=": "!=",
    "<=": "<=",
    ">=": ">=",
    r"\leqslant": "<=",
    r"\geqslant": ">=",
    r"\equiv": "=",
    "==": "=",
}
_SIGN = re.compile(r"<=|>=|!=|==|=|<|>|\\(?:le|ge|lt|gt|ne|leqslant|geqslant)(?![A-Za-z])")
_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}
_NAME = re.compile(
    r"(?:[A-Za-z]|\\(?:[a-z]+|Delta|Gamma|Omega))(?:_(?:\{[^{}]*\}|[A-Za-z0-9]))?'*(?:\^\{?-1\}?)?"
    r"(?:\([A-Za-z0-9, ]*\))?|\\frac\{d[^{}]{0,3}\}\{d[^{}]{1,3}\}|[a-z]{1,2}/d[a-z]|(?:m ?)?\\angle ?[A-Z]{1,3}"
    r"|\([A-Za-z](?:_[0-9])?(?:,[A-Za-z](?:_[0-9])?)+\)|[A-Z]{2,3}|\\overline\{[A-Z]{2}\}"
)
_VARIABLE = re.compile(
    r"(?:[A-Za-z]|\\(?:alpha|beta|gamma|theta|lambda|mu|phi|omega|rho|sigma))(?:_(?:\{[^{}]*\}|[A-Za-z0-9]))?"
)
_WHOLE = r"(?:\\in|∈) ?(?:\\mathbb ?\{?|\\mathbf ?\{?)?[ZN]\}?(?:\^[+*]|_\+)?(?:\\text ?\{[^{}]*\})?"
_QUALIFIER = re.compile(
    rf"(?:\\(?:text|mathrm) ?\{{ ?(?:where|for|with|and)?[^{{}}]*\}} ?)?(?:for )?([a-z]){_WHOLE}"
    r"|(?:where )?([a-z])(?:\\text ?\{ ?)? ?(?:is |are )?(?:an |any )?integers?\}?"
)


@functools.lru_cache(256)
def read(text: str) -> Answer:
    r"""Read an answer, in one way to write it (`nrl.envs.mathematics.answers.tidy`).

    Raises:
        UnreadableError: it is no answer of any kind.

    >>> read("3:30"), read("101_2")
    (Time(minutes=210, seconds=-1, half=''), Based(digits='101', base=2))
    >>> read("Monday"), read("(B)")
    (Words(text='monday', product=''), Choice(letter='B', marked=True))
    >>> read("x=5").name, read("[1,2)").pieces[0].closed_high, len(read(r"\pm 2").items)
    ('x', False, 2)
    """
    text = text.replace(r"\langle", "⟨").replace(r"\rangle", "⟩")  # brackets like the others
    text = _outside(_SPACED.sub(lambda found: found[0].replace(" ", ","), text))
    for reader in (read_time, read_based, read_choice, read_special, read_words):
        if (found := reader(text)) is not None:
            return found
    try:
        return _formula(text)
    except UnreadableError:
        if prose := read_prose(text):
            return prose
        raise


def _outside(text: str) -> str:
    """Return a text without what stands around all of it."""
    text = text.strip()
    while True:
        before = text
        text = text.strip(" ,;*").removesuffix(".").removeprefix("=").strip()
        if (found := TEXT.fullmatch(text)) and not re.search(r"[A-Za-z]", found[1]):
            text = found[1]
        if text.startswith("(\\begin{") and text.endswith("})") and text.count("\\begin") == 1:
            text = text[1:-1]
        if text == before:
            return text


def split_at_top(text: str, at: re.Pattern[str]) -> list[tuple[str, str]]:
    """Split a text where a pattern is found outside of all brackets: each part with the separator before it.

    >>> split_at_top("a,(b,c),d", re.compile(","))
    [('', 'a'), (',', '(b,c)'), (',', 'd')]
    """
    parts, depth, start, before, place = list[tuple[str, str]](), 0, 0, "", 0
    while place < len(text):
        if depth == 0 and (found := at.match(text, place)) and found.end() > place:
            parts.append((before, text[start:place]))
            before, place = found[0], found.end()
            start = place
            continue
        if text[place] == "\\" and place + 1 < len(text) and text[place + 1] in "{}":
            depth += 1 if text[place + 1] == "{" else -1
            place += 2
            continue
        depth += (text[place] in "([{⟨") - (text[place] in ")]}⟩")
        depth = max(depth, 0)
        place += 1
    parts.append((before, text[start:]))
    return parts


_COMMA = re.compile(r"[,;]")
_THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])")
_CUP = re.compile(r"\\cup(?![A-Za-z])|∪|(?<![A-Za-z])U(?![A-Za-z])")
_CAP = re.compile(r"\\(?:setminus|backslash)(?![A-Za-z])|\\\\|-(?=\\\{)")


def _formula(text: str) -> Answer:
    text = _drop_words_of_items(text)
    marked = _THOUSANDS.sub(lambda found: found[0].replace(",", "\1"), text)
    parts = split_at_top(marked, _AND)
    pieces = [piece for _, part in parts for _, piece in split_at_top(part, _COMMA)]
    items = [each for piece in pieces if (each := _outside(piece.replace("\1", ",")))]
    integers = [found for item in items if (found := _QUALIFIER.fullmatch(item))]
    if integers and len(integers) < len(items):
        items = [item for item in items if not _QUALIFIER.fullmatch(item)]
        letter = integers[0][1] or integers[0][2]
        return _with_integer(
            _several([_expanded(item) for item in items]) if len(items) > 1 else _expanded(items[0]), letter
        )
    if not items:
        raise UnreadableError("nothing")
    if len(items) == 1:
        return _expanded(items[0])
    if len(items) > 300:
        raise UnreadableError("too many answers")
    if any("dots" in item for item in items):
        return _sequence(items)
    if all(_SIGN.search(item) and not _SIGN.match(item) for item in items):
        relations = [_expanded(item) for item in items]
        return _both(relations) if len(parts) == len(items) == 2 and "and" in parts[1][0] else _several(relations)
    first = items[0].partition("=")
    if first[1] and _NAME.fullmatch(first[0].strip()) and not any(_SIGN.search(item) for item in items[1:]):
        values = _several([_expanded(item) for item in [first[2], *items[1:]]])
        return Named(_name(first[0]), values)
    return _several([_expanded(item) for item in items])


def _with_integer(found: Answer, letter: str) -> Answer:
    match found:
        case Quantity():
            return found._replace(integer=letter)
        case Named():
            return found._replace(value=_with_integer(found.value, letter), equation=None)
        case Listing():
            return found._replace(items=tuple(_with_integer(item, letter) for item in found.items))
    return found


def _drop_words_of_items(text: str) -> str:
    r"""Return a text whose "and" and "or" stand alone: of ``12 \text{ ducks and } 23``, and of ``\text{ or 43}``."""

    def split(found: re.Match[str]) -> str:
        before, word, after = (part.strip(" ,") for part in found.groups())
        return "".join(rf"\text{{{part}}}" for part in (before, word, after) if part)

    return re.sub(r"\\text ?\{([^{}]*?)(?<![A-Za-z])(and|or)(?![A-Za-z])([^{}]*)\}", split, text)


def _several(items: list[Answer]) -> Answer:
    regions = [item for item in items if isinstance(item, Region)]
    if len(regions) == len(items) and all(region.pieces == REALS.pieces for region in regions):
        return regions[0]._replace(without=tuple(point for region in regions for point in region.without))
    if len(regions) == len(items):
        return Region(tuple(piece for region in regions for piece in region.pieces), name=regions[0].name)
    flat = list[Answer]()
    for item in items:
        flat.extend(item.items if isinstance(item, Listing) and not item.braces else [item])
    return Listing(tuple(flat), False)


def _both(items: list[Answer]) -> Answer:
    """Return the interval that "x > 2 and x < 5" is; otherwise several answers."""
    halves = sorted(
        (x.pieces[0] for x in items if isinstance(x, Region) and len(x.pieces) == 1),
        key=lambda x: x.low != MINUS_INFINITY,
    )
    if len(halves) == 2 and halves[0].low == MINUS_INFINITY and halves[1].high == INFINITY != halves[0].high:
        return Region((Piece(halves[1].low, halves[0].high, halves[1].closed_low, halves[0].closed_high),))
    return _several(items)


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
    return _several([first, second])


def _one(text: str) -> Answer:
    text = _outside(text)
    readers: tuple[Callable[[str], Answer | None], ...] = (
        read_special, read_time, read_based, _matrix, _member, _relation, _union, _bracketed, _ratio,
    )  # fmt: skip
    for reader in readers:
        if (found := reader(text)) is not None:
            return found
    value, unit = split_unit(text)
    return Quantity(scaled(parse(value), unit), unit)


def _matrix(text: str) -> Matrix | None:
    if "\\begin" not in text:
        return None
    found = _MATRIX.fullmatch(text)
    if found is None:
        raise UnreadableError("an environment that is no matrix")
    body = re.sub(r"\\\\ *(?:\[[^\]]*\])? *$", "", re.sub(r"\\hline", "", found["body"].strip()))
    rows = [tuple(parse(cell) for cell in row.split("&")) for row in re.split(r"\\\\|\\cr(?![A-Za-z])", body)]
    if len({len(row) for row in rows}) != 1:
        raise UnreadableError("rows of different lengths")
    factor = found["factor"].strip().removesuffix("\\cdot").strip()
    if name := re.fullmatch(rf"(?:{_NAME.pattern})=(.*)", factor):
        factor = name[1].strip()
    if factor:
        times = parse("-1" if factor == "-" else factor)
        rows = [tuple(Node("*", (times, cell)) for cell in row) for row in rows]
    return Matrix(tuple(rows))


def _member(text: str) -> Answer | None:
    r"""Read ``x \in [1,2]``."""
    found = re.fullmatch(rf"({_VARIABLE.pattern}|\([a-z](?:,[a-z])+\)) ?(?:\\in(?![A-Za-z])|∈) ?(.+)", text)
    if found is None:
        return None
    value = _one(found[2])
    return value._replace(name=found[1]) if isinstance(value, Region) else Named(found[1], value)


def _relation(text: str) -> Answer | None:
    parts = split_at_top(text, _SIGN)
    if len(parts) == 1:
        return None
    signs = [_RELATIONS[sign.strip()] for sign, _ in parts[1:]]
    sides = [_outside(side) for _, side in parts]
    if any(not side for side in sides):
        raise UnreadableError("a relation without one of its sides")
    if set(signs) == {"="}:
        return _equation(sides)
    if len(sides) == 2 and (found := _half_line(signs[0], *sides)) is not None:
        return found
    if (
        len(sides) == 3
        and _VARIABLE.fullmatch(sides[1])
        and set(signs) in ({"<"}, {"<="}, {"<", "<="}, {">"}, {">="}, {">", ">="})
    ):
        low, high = parse(sides[0]), parse(sides[2])
        closed = [len(sign) == 2 for sign in signs]
        if signs[0][0] == ">":
            low, high, closed = high, low, closed[::-1]
        return Region((Piece(low, high, *closed),), name=sides[1])
    if len(sides) != 2:
        raise UnreadableError("a chain of relations")
    return Relation(signs[0], parse(sides[0]), parse(sides[1]))


def _half_line(sign: str, left: str, right: str) -> Region | None:
    if _VARIABLE.fullmatch(right) and not _VARIABLE.fullmatch(left):
        left, right, sign = right, left, _FLIPPED[sign]
    if not _VARIABLE.fullmatch(left) or left in ("e", "i"):
        return None
    bound = parse(right)
    if symbols_in(bound) & {left} or _VARIABLE.fullmatch(right):
        return None
    if sign == "!=":
        return Region(REALS.pieces, (bound,), left)
    if sign[0] == "<":
        return Region((Piece(MINUS_INFINITY, bound, False, sign == "<="),), name=left)
    return Region((Piece(bound, INFINITY, sign == ">=", False),), name=left)


def _equation(sides: list[str]) -> Answer:
    """Read ``x = 5``, ``3x + 4y = 0``, and a calculation such as ``x = 6*7 = 42``, whose last side counts."""
    first, last = sides[0], sides[-1]
    if _VARIABLE.fullmatch(last) and not _VARIABLE.fullmatch(first) and len(sides) == 2 and last not in ("e", "i"):
        first, last = last, first  # 5 = x
    if len(sides) > 2:
        tail = _one(last)
        inner = [_one(side) for side in sides[1:-1]]
        return Named(
            _name(first) if _NAME.fullmatch(first) else "",
            Listing((*inner, tail), False),
            Relation("chain", _ZERO, _ZERO),
        )
    equation = None
    try:
        equation = Relation("=", parse(first), parse(last))
    except UnreadableError:
        if not _NAME.fullmatch(first) and not TEXT.fullmatch(first) and not re.fullmatch(r"[A-Za-z ]{2,}", first):
            raise
    if equation is not None and not symbols_in(equation.left) | symbols_in(equation.right):
        return Named("", Listing((_one(first), _one(last)), False), Relation("chain", _ZERO, _ZERO))
    if _NAME.fullmatch(first) or TEXT.fullmatch(first) or equation is None:
        return Named(_name(first), _one(last), equation)
    assert equation is not None
    return equation


_ZERO = Node("number", (), Fraction(0))


def _name(text: str) -> str:
    return re.sub(r"[{} ]", "", TEXT.sub(r"\1", text.strip()))


def _union(text: str) -> Answer | None:
    parts = [part for _, part in split_at_top(text, _CUP)]
    if len(parts) > 1:
        return _joined([_one(part) for part in parts])
    taken = split_at_top(text, _CAP)
    if len(taken) == 2:
        whole, away = _one(taken[0][1]), _one(taken[1][1])
        if isinstance(whole, Region) and isinstance(away, Listing) and all(isinstance(x, Quantity) for x in away.items):
            points = tuple(x.value for x in away.items if isinstance(x, Quantity))
            return whole._replace(without=whole.without + points)
        raise UnreadableError("a difference of sets")
    return None


def _joined(parts: list[Answer]) -> Answer:
    if all(isinstance(part, Listing) for part in parts):
        return Listing(tuple(item for part in parts if isinstance(part, Listing) for item in part.items), True)
    pieces = list[Piece]()
    for part in parts:
        region = as_region(part)
        if region is None:
            if not isinstance(part, Listing) or not all(isinstance(item, Quantity) for item in part.items):
                raise UnreadableError("a union of what are no intervals")
            pieces.extend(Piece(x.value, x.value, True, True) for x in part.items if isinstance(x, Quantity))
        else:
            pieces.extend(region.pieces)
    return Region(tuple(pieces))


_OPENINGS = re.compile(r"(\\\{|[(\[⟨])(.*)(\\\}|[)\]⟩])", re.DOTALL)
_BUILDER = re.compile(
    rf"({_VARIABLE.pattern})(?: ?(?:\\in|∈) ?\\mathbb ?\{{?R\}}?)? ?(?:\||:|\\mid(?![a-z])|\\vert(?![a-z])) ?(.+)"
)


def _bracketed(text: str) -> Answer | None:
    found = _OPENINGS.fullmatch(text)
    if found is None or not _matching(text):
        return None
    opening, inner, closing = found.groups()
    if opening == r"\{":
        if builder := _BUILDER.fullmatch(inner.strip()):
            return _formula(builder[2])
        items = _items(inner)
        read_items = list[Answer]()
        for item in items:
            value = _expanded(item)
            read_items.extend(value.items if isinstance(value, Listing) and not value.braces else [value])
        return Listing(tuple(read_items), True)
    items = _items(inner)
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


def _items(inner: str) -> list[str]:
    return [part for _, part in split_at_top(inner, re.compile(r"[,;]"))]


def _matching(text: str) -> bool:
    """Return whether the first bracket closes at the end; the two may differ, as in ``[1,2)``."""
    depth, plain = 0, text.replace(r"\{", "(").replace(r"\}", ")")
    for place, sign in enumerate(plain):
        depth += (sign in "([{⟨") - (sign in ")]}⟩")
        if depth == 0:
            return place == len(plain) - 1
    return False


_COLON = re.compile(r"(?::|\{:\}|\\colon(?![A-Za-z])|(?:\\text ?\{ ?to ?\}| to ))")


def _ratio(text: str) -> Ratio | None:
    parts = [part for _, part in split_at_top(text.replace("{:}", ":"), _COLON)]
    return Ratio(tuple(parse(_outside(part)) for part in parts)) if len(parts) > 1 else None
