"""Expressions as trees, and what is in them."""

import re
from typing import Any, NamedTuple

__all__ = ["NoValueError", "Node", "UnreadableError", "functions_in", "operations", "symbols_in"]


class UnreadableError(ValueError):
    """A text is no expression that can be read."""


class NoValueError(ValueError):
    """An expression has no value, or more than one, such as ``1/0`` or ``42 43``."""


class Node(NamedTuple):
    """A number, a symbol, or an operation on other nodes.

    Args:
        kind: ``"number"``, ``"symbol"``, ``"constant"``, an operation (``"+"``, ``"*"``, ``"/"``, ``"^"``, ``"-"``,
            ``"root"``, ``"mixed"``, ``"%"``, ``"degrees"``, ``"call"``) or the name of a function.
        parts: what it operates on.
        value: the number, or the name.
    """

    kind: str
    parts: tuple["Node", ...] = ()
    value: Any = None


def symbols_in(node: Node) -> set[str]:
    """Return the names of the variables of an expression.

    >>> from nrl.envs.library.mathematics.expressions import parse
    >>> sorted(symbols_in(parse("x + y_1 + pi")))
    ['x', 'y_1']
    """
    if node.kind == "calculus":
        of = r"_\{? ?|d ?" if "int" in node.value else r"_\{? ?"
        bound = re.findall(rf"(?:{of})([a-z])(?: ?=| ?\\to|(?![a-z]))", node.value)
        return set(re.findall(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])", node.value)) - {"e", "i", "d", *bound}
    own = {node.value} if node.kind == "symbol" else set[str]()
    return own.union(*map(symbols_in, node.parts))


_FAMILIES = {
    **dict.fromkeys(("sin", "cos", "tan", "cot", "sec", "csc"), "trigonometric"),
    **dict.fromkeys(("arcsin", "arccos", "arctan", "arccot"), "inverse trigonometric"),
    **dict.fromkeys(("arcsinh", "arccosh", "arctanh"), "logarithm"),
    **dict.fromkeys(("sinh", "cosh", "tanh", "coth"), "hyperbolic"),
    **dict.fromkeys(("log", "ln", "log10"), "logarithm"),
}
_PLAIN = frozenset(("number", "symbol", "constant", "+", "-", "*", "/", "^", "root", "mixed", "%", "degrees", "exp"))


def functions_in(node: Node) -> set[str]:
    """Return the functions of an expression; those of a family count as one.

    >>> from nrl.envs.library.mathematics.expressions import parse
    >>> functions_in(parse("sin(x)/cos(x) + sqrt(2)"))
    {'trigonometric'}
    """
    own = set() if node.kind in _PLAIN else {_FAMILIES.get(node.kind, node.kind)}
    return own.union(*map(functions_in, node.parts))


def operations(node: Node) -> int:
    """Return how many operations an expression has.

    >>> from nrl.envs.library.mathematics.expressions import parse
    >>> operations(parse("1+1+1")), operations(parse("2"))
    (2, 0)
    """
    own = len(node.parts) - 1 if node.kind in ("+", "*") else bool(node.parts)
    return own + sum(map(operations, node.parts))
