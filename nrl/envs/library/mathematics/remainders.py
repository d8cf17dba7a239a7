r"""Read and compare what divisions leave: congruences (``x\equiv 2\pmod 5``), quotients with remainders (``12 R3``)."""

import re
from fractions import Fraction

from nrl.envs.library.mathematics.evaluating import equal_values, exact, number_at
from nrl.envs.library.mathematics.expressions import parse
from nrl.envs.library.mathematics.kinds import Congruence, Division, Quantity
from nrl.envs.library.mathematics.nodes import Node, NoValueError, symbols_in

__all__ = ["equal_congruences", "equal_lines", "has_residue", "is_solution", "read_congruences", "read_division"]

_MODULUS = re.compile(
    r"(?P<left>.+?)[ ,]*(?:\\pmod ?|\( ?(?:\\?(?:b|p)?mod|\\text ?\{ ?mod ?\}|\\mathrm ?\{ ?mod ?\}) ?"
    r"|\\[bp]?mod(?![A-Za-z]) ?|\\(?:text|mathrm) ?\{ ?mod ?\} ?|(?<![A-Za-z])mod(?:ulo)? ?)"
    r"(?P<modulus>\{[^{}]+\}|[0-9A-Za-z^]+)\)?"
)
_NAMED = re.compile(r"(?P<name>[A-Za-z](?:_\{?[0-9A-Za-z]\}?)?) ?(?:\\equiv(?![A-Za-z])|≡|==?) ?(?P<value>.+)")
_DIVISION = re.compile(
    r"(?:(?:the )?quotient:? ?(?:is |=)? ?)?(?P<quotient>-?[0-9]{1,20}(?:,[0-9]{3})*)[ ,]*"
    r"(?:[Rr](?:em(?:ainder)?)?\.?|(?:and |with )?(?:an? |the )?remainder:?) ?(?:is |of |=)? ?"
    r"(?P<remainder>[0-9]{1,20})"
)


def read_congruences(text: str) -> list[Congruence]:
    r"""Return the residue classes of a text, one for each residue; an empty list: it is no congruence.

    >>> [found.name for found in read_congruences(r"x\equiv 2, 3\pmod 5")], read_congruences("x=5")
    (['x', 'x'], [])
    """
    match = _MODULUS.fullmatch(text.strip())
    if match is None:
        return []
    name, values = "", match["left"].strip()
    if named := _NAMED.fullmatch(values):
        name, values = named["name"], named["value"]
    modulus = parse(match["modulus"])
    values = re.sub(r"\\text ?\{ ?(?:or|and) ?\}|(?<![A-Za-z])(?:or|and)(?![A-Za-z])", ",", values)
    if r"\pm" in values:
        values = values.replace(r"\pm", "") + "," + values.replace(r"\pm", "-")
    return [Congruence(parse(value), modulus, name) for value in values.split(",") if value.strip()]


def read_division(text: str) -> Division | None:
    """Read a quotient with its remainder.

    >>> read_division("12 R3") == read_division("12 remainder 3"), read_division("12")
    (True, None)
    """
    plain = " ".join(re.sub(r"\\(?:text|mathrm|mbox) ?\{([^{}]*)\}", r" \1 ", text).split())
    match = _DIVISION.fullmatch(plain)
    return None if match is None else Division(parse(match["quotient"]), parse(match["remainder"]))


def equal_congruences(left: Congruence, right: Congruence) -> bool:
    """Return whether two residue classes are the same."""
    if (left.name and right.name and left.name != right.name) or not equal_values(left.modulus, right.modulus):
        return False
    numbers = [exact(node) for node in (left.residue, right.residue, left.modulus)]
    if any(number is None for number in numbers):
        return equal_values(left.residue, right.residue)
    first, second, modulus = (number for number in numbers if number is not None)
    return modulus != 0 and ((first - second) / modulus).denominator == 1


def has_residue(congruence: Congruence, value: Node) -> bool:
    """Return whether a number is the residue as it is written, or the least one that is not negative."""
    number, residue, modulus = exact(value), exact(congruence.residue), exact(congruence.modulus)
    if number is None or residue is None or modulus is None:
        return equal_values(congruence.residue, value)
    return number == residue or (modulus > 0 and number == residue % modulus)


def is_solution(congruence: Congruence, answer: Quantity) -> bool:
    """Return whether an answer with a letter for every whole number, such as ``5k+2``, is the residue class."""
    line = _line(answer.value, answer.integer)
    residue, modulus = exact(congruence.residue), exact(congruence.modulus)
    if line is None or residue is None or not modulus:
        return False
    start, step = line
    at_start = equal_values(start, Node("number", (), residue))
    whole = exact(Node("/", (Node("+", (start, Node("number", (), -residue))), Node("number", (), modulus))))
    same = at_start or (whole is not None and whole.denominator == 1)
    return same and exact(step) in (modulus, -modulus)


def equal_lines(left: Node, right: Node, letter: str) -> bool:
    """Return whether two expressions take the same values where a letter runs through all whole numbers.

    Both are linear in the letter, and have no other one.
    """
    first, second = _line(left, letter), _line(right, letter)
    if first is None or second is None:
        return False
    steps = (second[1], Node("-", (second[1],)))
    if not any(equal_values(first[1], step) for step in steps):
        return False
    try:
        ratio = number_at(Node("/", (Node("+", (first[0], Node("-", (second[0],)))), first[1])), 60)
    except NoValueError:
        return False
    return bool(abs(ratio - round(float(ratio.real))) < 1e-50)


def _line(node: Node, letter: str) -> tuple[Node, Node] | None:
    """Return the value where a letter is 0, and the step from whole number to whole number; None: it is no line."""
    if not letter or symbols_in(node) != {letter}:
        return None
    start, first, second, far = (_with_value(node, letter, number) for number in (0, 1, 2, 7))
    step = Node("+", (first, Node("-", (start,))))
    try:
        straight = equal_values(second, Node("+", (start, step, step))) and equal_values(
            far, Node("+", (start, *[step] * 7))
        )
    except NoValueError:
        return None
    return (start, step) if straight else None


def _with_value(node: Node, letter: str, number: int) -> Node:
    if node.kind == "symbol" and node.value == letter:
        return Node("number", (), Fraction(number))
    return node._replace(parts=tuple(_with_value(part, letter, number) for part in node.parts))
