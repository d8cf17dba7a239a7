"""Compare relations, and sets of real numbers."""

import functools
import itertools
from typing import Any

from nrl.envs.library.mathematics.evaluating import constant_ratio, equal_values, number_at
from nrl.envs.library.mathematics.expressions import parse
from nrl.envs.library.mathematics.kinds import Piece, Region, Relation
from nrl.envs.library.mathematics.nodes import Node, UnreadableError, symbols_in

__all__ = ["as_relation", "equal_regions", "equal_relations", "intersection"]


def equal_relations(left: Relation, right: Relation) -> bool:
    """Return whether one relation is the other, multiplied by a number, or with its sides exchanged."""
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


def as_relation(region: Region) -> Relation | None:
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


def equal_regions(left: Region, right: Region) -> bool:
    """Return whether two sets of real numbers are equal, however they are cut into intervals."""
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


def _order(a: Node, b: Node) -> int:
    """Return -1, 0 or 1: whether the first number is less, equal or greater."""
    if equal_values(a, b):
        return 0
    first, second = (number_at(end, 60) for end in (a, b))
    if isinstance(first, complex) or isinstance(second, complex):
        raise UnreadableError("an interval whose ends are no real numbers")
    return -1 if first < second else 1


def intersection(left: Region | None, right: Region | None) -> Region:
    """Return the numbers that two sets have in common.

    Raises:
        UnreadableError: one of them is no set of intervals, or they have nothing in common.
    """
    if left is None or right is None or left.without or right.without:
        raise UnreadableError("an intersection of what are no intervals")
    pieces = list[Piece]()
    for a, b in itertools.product(left.pieces, right.pieces):
        at_low, at_high = _order(a.low, b.low), _order(a.high, b.high)
        low, high = (b.low if at_low < 0 else a.low), (a.high if at_high < 0 else b.high)
        closed_low = (a.closed_low or at_low < 0) and (b.closed_low or at_low > 0)
        closed_high = (a.closed_high or at_high > 0) and (b.closed_high or at_high < 0)
        between = _order(low, high)
        if between < 0 or (between == 0 and closed_low and closed_high):
            pieces.append(Piece(low, high, closed_low, closed_high))
    if not pieces:
        raise UnreadableError("an intersection with nothing in it")
    return Region(tuple(pieces), (), left.name or right.name, left.solved and right.solved)


def _intervals(region: Region) -> list[_Interval]:
    """Return intervals that do not touch, in their order, without the numbers that are taken out."""

    def start(a: _Interval, b: _Interval) -> int:
        return _order(a[0], b[0]) or (b[2] - a[2])

    pieces = [
        (p.low, p.high, p.closed_low and not _is_infinite(p.low), p.closed_high and not _is_infinite(p.high))
        for p in region.pieces
    ]
    for low, high, closed_low, closed_high in pieces:
        order = _order(low, high)
        if order > 0 or (order == 0 and not (closed_low and closed_high)):
            raise UnreadableError("an interval whose ends are the wrong way round")
    joined = list[_Interval]()
    for piece in sorted(pieces, key=functools.cmp_to_key(start)):
        if joined:
            low, high, closed_low, closed_high = joined[-1]
            order = _order(piece[0], high)
            if order < 0 or (order == 0 and (closed_high or piece[2])):
                later = _order(piece[1], high)
                if later > 0 or (later == 0 and piece[3]):
                    high, closed_high = piece[1], piece[3] if later > 0 else True
                joined[-1] = (low, high, closed_low, closed_high)
                continue
        joined.append(piece)
    for point in region.without:
        split = list[_Interval]()
        for low, high, closed_low, closed_high in joined:
            at_low, at_high = _order(point, low), _order(point, high)
            if at_low < 0 or at_high > 0:
                split.append((low, high, closed_low, closed_high))
            elif at_low == 0 or at_high == 0:
                if at_low != at_high:
                    split.append((low, high, closed_low and at_low != 0, closed_high and at_high != 0))
            else:
                split += [(low, point, closed_low, False), (point, high, False, closed_high)]
        joined = split
    return joined
