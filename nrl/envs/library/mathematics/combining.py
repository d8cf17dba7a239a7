"""Combine several answers into one: a list, a union of intervals, or answers for every whole number."""

from nrl.envs.library.mathematics.evaluating import number_at
from nrl.envs.library.mathematics.kinds import (
    INFINITY,
    MINUS_INFINITY,
    REALS,
    Answer,
    Listing,
    Named,
    Piece,
    Quantity,
    Region,
    as_region,
)
from nrl.envs.library.mathematics.nodes import UnreadableError, symbols_in

__all__ = ["both", "overlapping", "several", "union", "with_integer"]


def several(items: list[Answer]) -> Answer:
    """Return the union of intervals of one variable, what is left of all real numbers, or else a list."""
    regions = [item for item in items if isinstance(item, Region)]
    if len(regions) == len(items) and len({region.name for region in regions if region.name}) < 2:
        without = tuple(point for region in regions for point in region.without)
        solved = all(region.solved for region in regions)
        whole = [region for region in regions if region.pieces == REALS.pieces]
        parts = [region for region in regions if region.pieces != REALS.pieces]
        if not parts:
            return regions[0]._replace(without=without, solved=solved)
        if len(parts) == 1 and all(region.without for region in whole):  # x > 0, x != 1
            return parts[0]._replace(without=without, solved=solved)
        if not whole:
            pieces = tuple(piece for region in parts for piece in region.pieces)
            return Region(pieces, without, regions[0].name, solved)
    flat = list[Answer]()
    for item in items:
        flat.extend(item.items if isinstance(item, Listing) and not item.braces else [item])
    return Listing(tuple(flat), False)


def both(items: list[Answer]) -> Answer:
    """Return the interval that "x > 2 and x < 5" is; otherwise several answers."""
    halves = sorted(
        (x for x in items if isinstance(x, Region) and len(x.pieces) == 1 and not x.without),
        key=lambda x: x.pieces[0].low != MINUS_INFINITY,
    )
    if len(halves) == 2 == len(items) and halves[0].name == halves[1].name:
        below, above = halves[0].pieces[0], halves[1].pieces[0]
        if below.low == MINUS_INFINITY and above.high == INFINITY != below.high:
            return Region((Piece(above.low, below.high, above.closed_low, below.closed_high),), name=halves[0].name)
    return several(items)


def overlapping(items: list[Answer]) -> Answer:
    """Return the interval that "x > 2, x < 5" is, where the two half-lines have numbers in common; else several."""
    found = both(items)
    if isinstance(found, Region) and len(items) == 2 and len(found.pieces) == 1:
        low, high = found.pieces[0].low, found.pieces[0].high
        if low == MINUS_INFINITY or high == INFINITY or symbols_in(low) | symbols_in(high):
            return several(items)
        if not complex(number_at(low, 20)).real < complex(number_at(high, 20)).real:
            return several(items)
    return found


def union(parts: list[Answer]) -> Answer:
    """Return the union of intervals and sets of numbers, or of sets."""
    if all(isinstance(part, Listing) for part in parts):
        return Listing(tuple(item for part in parts if isinstance(part, Listing) for item in part.items), True)
    pieces, solved = list[Piece](), True
    for part in parts:
        region = as_region(part)
        if region is None:
            if not isinstance(part, Listing) or not all(isinstance(item, Quantity) for item in part.items):
                raise UnreadableError("a union of what are no intervals")
            pieces.extend(Piece(x.value, x.value, True, True) for x in part.items if isinstance(x, Quantity))
        else:
            pieces.extend(region.pieces)
            solved = solved and region.solved
    return Region(tuple(pieces), solved=solved)


def with_integer(found: Answer, letter: str, numbers: str) -> Answer:
    """Return an answer in which a letter stands for every whole number (Z), or those that count (N)."""
    match found:
        case Quantity():
            return found._replace(integer=letter, numbers=numbers)
        case Named():
            return found._replace(value=with_integer(found.value, letter, numbers), equation=None)
        case Listing():
            return found._replace(items=tuple(with_integer(item, letter, numbers) for item in found.items))
    return found
