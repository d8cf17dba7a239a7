r"""The kinds of answers: number and expression, list and set, point and interval, relation, matrix, time, ratio, number in
a base, choice, words.

An answer is read once into one of them. `nrl.envs.mathematics.comparing` compares kinds.
"""

import re
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

from nrl.envs.mathematics.expressions import Node, UnreadableError, parse, symbols_in
from nrl.envs.mathematics.units import scaled, split_unit

__all__ = [
    "Answer",
    "Based",
    "Choice",
    "Listing",
    "Matrix",
    "Named",
    "Point",
    "Quantity",
    "Ratio",
    "Region",
    "Relation",
    "Time",
    "Words",
    "read",
    "split_at_top",
]


class Quantity(NamedTuple):
    """A number or an expression, its unit, and the letter in it that stands for every whole number."""

    value: Node
    unit: str = ""
    integer: str = ""


class Listing(NamedTuple):
    """Several answers in any order, with braces (a set) or without."""

    items: tuple["Answer", ...]
    braces: bool


class Point(NamedTuple):
    """Values in their order: coordinates, a vector; of two in parentheses, perhaps an open interval."""

    items: tuple["Answer", ...]
    brackets: str = "()"


class Piece(NamedTuple):
    """An interval."""

    low: Node
    high: Node
    closed_low: bool
    closed_high: bool


class Region(NamedTuple):
    """A set of real numbers: intervals, without some numbers."""

    pieces: tuple[Piece, ...]
    without: tuple[Node, ...] = ()
    name: str = ""


class Relation(NamedTuple):
    """An equation or an inequality; the sign is one of ``= < > <= >= !=``."""

    sign: str
    left: Node
    right: Node


class Named(NamedTuple):
    """An answer with the name of what it is the value of: ``x = 5``, ``f(x) = 2x``."""

    name: str
    value: "Answer"
    equation: Relation | None = None


class Matrix(NamedTuple):
    """Rows of expressions."""

    rows: tuple[tuple[Node, ...], ...]


class Time(NamedTuple):
    """A time of day: minutes, seconds, and whether it says a.m. or p.m."""

    minutes: int
    seconds: int
    half: str = ""


class Ratio(NamedTuple):
    """Parts of a ratio."""

    parts: tuple[Node, ...]


class Based(NamedTuple):
    """A number in a base: its digits, the base, and whether that is said."""

    digits: str
    base: int


class Choice(NamedTuple):
    """A letter that names an option; ``marked`` if it stands in parentheses or a text."""

    letter: str
    marked: bool


class Words(NamedTuple):
    """Words, in lower case, without what does not matter; and what they would be as a product of letters."""

    text: str
    product: str = ""


type Answer = Quantity | Listing | Point | Region | Relation | Named | Matrix | Time | Ratio | Based | Choice | Words

_SPACED = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?: [0-9]{3})+(?![0-9/])")  # 1 000 000
_INFINITY = Node("constant", (), "infinity")
_MINUS_INFINITY = Node("-", (_INFINITY,))
_REALS = Region((Piece(_MINUS_INFINITY, _INFINITY, False, False),))

_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname|rm|bf) ?\{([^{}]*)\}")
_TIME = re.compile(
    r"(?P<hour>[01]?[0-9]|2[0-4])(?::|\{:\}|\\colon ?)(?P<minute>[0-5][0-9])(?:(?::|\{:\})(?P<second>[0-5][0-9]))?"
    r" ?(?P<half>[ap]\.? ?m\.?)?",
    re.IGNORECASE,
)
_HOUR = re.compile(r"(?P<hour>1[0-2]|[1-9]) ?(?P<half>[ap]\.? ?m\.?)", re.IGNORECASE)
_BASED = re.compile(r"\(?([0-9A-Fa-f]+)\)?_ ?(?:\{ ?\(?([0-9]{1,2}|[a-z]+)\)? ?\}|([0-9]{1,2}))")
_BASE_WORDS = re.compile(r"([0-9A-Fa-f]+) ?(?:\(?(?:in )?base[- ]?([0-9]{1,2}|[a-z]+)\)?)", re.IGNORECASE)
_PREFIXED = re.compile(r"0([bxo])([0-9A-Fa-f]+)", re.IGNORECASE)
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
_BASES |= {"eleven": 11, "twelve": 12, "sixteen": 16}
_CHOICE = re.compile(
    r"(?:(?:option|choice|answer)[ :]*)?(?:\(([A-J])\)|([A-J])\)|([A-J])[.:](?=.)|([A-J]))", re.IGNORECASE
)
_CHOICE_AND_MORE = re.compile(r"(?:\(([A-J])\)|([A-J])[).:]) *\S.*")
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
_QUALIFIER = re.compile(
    r"(?:\\(?:text|mathrm) ?\{ ?(?:where|for|with|and)?[^{}]*\} ?)?(?:for )?([a-z])(?:\\in|∈) ?(?:\\mathbb ?\{?|\\mathbf ?\{?)?[ZN]\}?"
    r"(?:\^[+*]|_\+)?(?:\\text ?\{[^{}]*\})?|(?:where )?([a-z])(?:\\text ?\{ ?)? ?(?:is |are )?(?:an |any )?integers?\}?",
)
_MATH_WORDS = re.compile(
    r"(?:sqrt|cbrt|(?:arc|a)?(?:sin|cos|tan|cot|sec|csc)h?|log|ln|lg|exp|pi|Pi|inf(?:inity)?|oo|infty|max|min|abs|Abs|gcd|lcm"
    r"|floor|ceil|ceiling|factorial|binom|binomial|or|and|frac|alpha|beta|gamma|delta|theta|lambda|mu|phi|omega|rho|sigma)"
)
_EMPTY = frozenset(("empty set", "the empty set", "null set", "no solution", "no solutions", "{}"))
_ALL = frozenset(
    ("all real numbers", "all reals", "real numbers", "the real numbers", "all real values", "all real number")
)
_MONTHS = [
    "january",
    "february",
    "march",
    "april",
    "may",
    "june",
    "july",
    "august",
    "september",
    "october",
    "november",
    "december",
]


def read(text: str) -> Answer:
    r"""Read an answer, in one way to write it (`nrl.envs.mathematics.answers.tidy`).

    Raises:
        UnreadableError: it is no answer of any kind.

    >>> read("3:30"), read("101_2"), read("Monday"), read("(B)")
    (Time(minutes=210, seconds=0, half=''), Based(digits='101', base=2), Words(text='monday', product=''), Choice(letter='B', marked=True))
    >>> read("x=5").name, read("[1,2)").pieces[0].closed_high, len(read(r"\pm 2").items)
    ('x', False, 2)
    """
    text = text.replace(r"\langle", "⟨").replace(r"\rangle", "⟩")  # brackets like the others
    text = _outside(_SPACED.sub(lambda found: found[0].replace(" ", ","), text))
    for reader in (_time, _based, _choice, _special, _words):
        if (found := reader(text)) is not None:
            return found
    try:
        return _formula(text)
    except UnreadableError:
        if prose := _prose(text):
            return prose
        raise


def _outside(text: str) -> str:
    """Return a text without what stands around all of it."""
    text = text.strip()
    while True:
        before = text
        text = text.strip(" ,;").removesuffix(".").strip()
        if (found := _TEXT.fullmatch(text)) and not re.search(r"[A-Za-z]", found[1]):
            text = found[1]
        if text.startswith("(\\begin{") and text.endswith("})") and text.count("\\begin") == 1:
            text = text[1:-1]
        if text == before:
            return text


def _time(text: str) -> Time | None:
    plain = _TEXT.sub(r" \1", text).strip()
    found = _TIME.fullmatch(plain)
    if found is None and (hour := _HOUR.fullmatch(plain)):
        return _clock(int(hour["hour"]), 0, 0, hour["half"])
    if found is None:
        return None
    return _clock(int(found["hour"]), int(found["minute"]), int(found["second"] or 0), found["half"] or "")


def _clock(hour: int, minute: int, second: int, half: str) -> Time:
    half = half[:1].lower()
    if half and hour <= 12:
        return Time(60 * (hour % 12 + 12 * (half == "p")) + minute, second, half)
    return Time(60 * hour + minute, second)


def _based(text: str) -> Based | None:
    plain = _TEXT.sub(r"\1", text)
    if found := _PREFIXED.fullmatch(plain):
        base = {"b": 2, "o": 8, "x": 16}[found[1].lower()]
        return _digits(found[2], base)
    found = _BASED.fullmatch(plain) or _BASE_WORDS.fullmatch(plain)
    if found is None:
        return None
    said = next(each for each in found.groups()[1:] if each)
    base = int(said) if said.isdigit() else _BASES.get(said, 0)
    return _digits(found[1], base)


def _digits(digits: str, base: int) -> Based | None:
    if not 2 <= base <= 36 or any(int(digit, 36) >= base for digit in digits):
        return None
    return Based(digits.upper().lstrip("0") or "0", base)


def _choice(text: str) -> Choice | None:
    plain = _TEXT.sub(r"\1", text).strip()
    marked = plain != text
    if found := _CHOICE.fullmatch(plain):
        letter = next(each for each in found.groups() if each)
        return (
            Choice(letter, marked or found[4] is None or len(plain) > 1)
            if (letter != "e" and letter != "i") or marked
            else None
        )
    if marked and (found := _CHOICE_AND_MORE.fullmatch(plain)):
        return Choice(found[1] or found[2], True)
    return None


def _special(text: str) -> Answer | None:
    """Read the empty set, all real numbers, and infinity as words."""
    plain = " ".join(_TEXT.sub(r" \1 ", text).split()).lower()
    if re.fullmatch(r"\\(?:emptyset|varnothing)|\\\{ ?\\\}|\{ ?\}|∅|\\O", text) or plain in _EMPTY:
        return Listing((), True)
    if plain in _ALL or re.fullmatch(r"(?:[a-z]\\in ?)?\\(?:mathbb|mathbf|Bbb) ?\{?R\}?", text):
        return _REALS
    return None


def _words(text: str) -> Words | None:
    """Read words: letters, perhaps with a date's or a name's numbers in them, and nothing of a formula."""
    plain = " ".join(_TEXT.sub(r" \1 ", text).split()).strip("\"'“”‘’")
    if date := _date(plain):
        return Words(date)
    if not re.fullmatch(r"[^\W\d_](?:[^\W\d_]|['’. -](?=.))*", plain) or not re.search(r"[^\W\d_]{2}", plain):
        return None
    runs = re.findall(r"[A-Za-z]+", plain)
    if all(_MATH_WORDS.fullmatch(run) or len(run) == 1 for run in runs) and plain == text:
        return None  # as "pi" and "x or y"
    if any(run in ("and", "or") for run in runs[1:-1]) and all(len(run) == 1 or run in ("and", "or") for run in runs):
        return None
    product = text if len(runs) == 1 and plain == text and len(text) <= 4 else ""
    return Words(_simple(plain), product)


def _date(text: str) -> str:
    words = re.findall(r"[A-Za-z]+|[0-9]+", text)
    month = next(
        (n for n, name in enumerate(_MONTHS) for word in words if len(word) > 2 and name.startswith(word.lower())), None
    )
    numbers = [word for word in words if word.isdigit()]
    rest = [word.lower() for word in words if word.isalpha()]
    if month is None or not 1 <= len(numbers) <= 2:
        return ""
    known = {
        "st",
        "nd",
        "rd",
        "th",
        "of",
        "the",
        "monday",
        "tuesday",
        "wednesday",
        "thursday",
        "friday",
        "saturday",
        "sunday",
    }
    if any(word not in known and not _MONTHS[month].startswith(word) for word in rest):
        return ""
    return f"date {month + 1} " + " ".join(sorted(number.lstrip("0") for number in numbers))


def _simple(text: str) -> str:
    words = re.sub(r"[-–.'’]", lambda found: " " if found[0] in "-–" else "", text.casefold()).split()
    while len(words) > 1 and words[0] in ("the", "a", "an"):
        words = words[1:]
    return " ".join(words)


def _prose(text: str) -> Words | None:
    """Read what has words in it and is no formula; so it equals the same words alone."""
    plain = " ".join(_TEXT.sub(r" \1 ", text).split())
    if not re.search(r"(?<![\\A-Za-z])[A-Za-z]{2,}", plain) or re.search(r"\\(?:frac|sqrt)\b", text):
        return None
    runs = re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", plain)
    return Words(_simple(plain)) if any(not _MATH_WORDS.fullmatch(run) for run in runs) else None


# --- Formulas


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
_CAP = re.compile(r"\\(?:setminus|backslash)(?![A-Za-z])|\\\\")


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
        found = [_expanded(item) for item in items]
        return _both(found) if len(parts) == len(items) == 2 and "and" in parts[1][0] else _several(found)
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
    if len(regions) == len(items) and all(region.pieces == _REALS.pieces for region in regions):
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
        key=lambda x: x.low != _MINUS_INFINITY,
    )
    if len(halves) == 2 and halves[0].low == _MINUS_INFINITY and halves[1].high == _INFINITY != halves[0].high:
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
    both = [_one(upper), _one(lower)]
    if all(isinstance(each, Named) for each in both):
        name = both[0].name  # type: ignore[union-attr]
        return Named(name, Listing(tuple(each.value for each in both), False))  # type: ignore[union-attr]
    return _several(both)


def _one(text: str) -> Answer:
    text = _outside(text)
    readers: tuple[Callable[[str], Answer | None], ...] = (
        _special, _time, _based, _matrix, _member, _relation, _union, _bracketed, _ratio,
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
        return Region(_REALS.pieces, (bound,), left)
    if sign[0] == "<":
        return Region((Piece(_MINUS_INFINITY, bound, False, sign == "<="),), name=left)
    return Region((Piece(bound, _INFINITY, sign == ">=", False),), name=left)


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
        if not _NAME.fullmatch(first) and not _TEXT.fullmatch(first) and not re.fullmatch(r"[A-Za-z ]{2,}", first):
            raise
    if equation is not None and not symbols_in(equation.left) | symbols_in(equation.right):
        return Named("", Listing((_one(first), _one(last)), False), Relation("chain", _ZERO, _ZERO))
    if _NAME.fullmatch(first) or _TEXT.fullmatch(first) or equation is None:
        return Named(_name(first), _one(last), equation)
    assert equation is not None
    return equation


_ZERO = Node("number", (), Fraction(0))


def _name(text: str) -> str:
    return re.sub(r"[{} ]", "", _TEXT.sub(r"\1", text.strip()))


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


def as_region(found: Answer) -> Region | None:
    """Return the interval that an answer is; a point with two coordinates is an open one."""
    if isinstance(found, Region):
        return found
    if isinstance(found, Point) and len(found.items) == 2 and found.brackets == "()":
        ends = [item.value for item in found.items if isinstance(item, Quantity)]
        return Region((Piece(ends[0], ends[1], False, False),)) if len(ends) == 2 else None
    return None


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
