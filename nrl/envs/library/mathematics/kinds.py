"""The kinds of answers, such as a number, a set, an interval, a relation, a time or words."""

from typing import NamedTuple

from nrl.envs.library.mathematics.nodes import Node

__all__ = [
    "INFINITY",
    "MINUS_INFINITY",
    "REALS",
    "Answer",
    "Based",
    "Choice",
    "Congruence",
    "Division",
    "Listing",
    "Logic",
    "Matrix",
    "Named",
    "Piece",
    "Point",
    "Quantity",
    "Ratio",
    "Region",
    "Relation",
    "Time",
    "Words",
    "as_region",
]


class Quantity(NamedTuple):
    """A number or an expression, its unit, and the letter in it that stands for every number of a set: Z or N."""

    value: Node
    unit: str = ""
    integer: str = ""
    numbers: str = ""


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
    """A set of real numbers: intervals, without some numbers.

    It is not solved where its bounds are still to be found, as those of ``|x| < 2``.
    """

    pieces: tuple[Piece, ...]
    without: tuple[Node, ...] = ()
    name: str = ""
    solved: bool = True


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
    """A time of day: minutes, seconds (-1: none are said), and whether it says a.m. or p.m.

    ``numbers`` are those between the colons where the text may be a ratio as well, such as ``4:10``.
    """

    minutes: int
    seconds: int = -1
    half: str = ""
    numbers: tuple[int, ...] = ()


class Ratio(NamedTuple):
    """Parts of a ratio."""

    parts: tuple[Node, ...]


class Based(NamedTuple):
    """A number in a base: its digits, the base, and whether Python writes it so (``0x1F``), which is a number."""

    digits: str
    base: int
    literal: bool = False


class Choice(NamedTuple):
    """A letter that names an option; ``marked`` if it stands in parentheses or a text; and the option's text."""

    letter: str
    marked: bool
    option: "Answer | None" = None


class Congruence(NamedTuple):
    """A residue, the modulus, and the letter of which it is said."""

    residue: Node
    modulus: Node
    name: str = ""


class Division(NamedTuple):
    """A quotient and a remainder."""

    quotient: Node
    remainder: Node


class Logic(NamedTuple):
    """A formula of sets or of statements: its letters, and its value for each choice of theirs, as bits."""

    letters: tuple[str, ...]
    values: int
    sets: bool


class Words(NamedTuple):
    """Words, in lower case, without what does not matter; and what they would be as a product of letters.

    ``options`` are the letters of a text such as ``ACD``, which may name several options.
    """

    text: str
    product: str = ""
    options: str = ""


type Answer = (
    Quantity
    | Listing
    | Point
    | Region
    | Relation
    | Named
    | Matrix
    | Time
    | Ratio
    | Based
    | Choice
    | Words
    | Congruence
    | Division
    | Logic
)


INFINITY = Node("constant", (), "infinity")
MINUS_INFINITY = Node("-", (INFINITY,))
REALS = Region((Piece(MINUS_INFINITY, INFINITY, False, False),))


def as_region(found: Answer) -> Region | None:
    """Return the interval that an answer is; a point with two coordinates is an open one."""
    if isinstance(found, Region):
        return found
    if isinstance(found, Point) and len(found.items) == 2 and found.brackets == "()":
        ends = [item.value for item in found.items if isinstance(item, Quantity)]
        return Region((Piece(ends[0], ends[1], False, False),)) if len(ends) == 2 else None
    return None
