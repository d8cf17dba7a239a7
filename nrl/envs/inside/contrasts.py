"""Comparisons that a class of the program decides, held against others that have to come out differently.

A test of ``Point(1, 2) + Point(3, 4) == Point(4, 6)`` asks the program's own ``__eq__``. One that is always true would
pass every such test. So the test's end also asks about points that differ from the expected one: if those are equal,
too, the comparison says nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

__all__ = ["differs", "variants"]

_VARIANTS = 6  # of a value that are tried, at most
_PARTS = 3  # of a container or of arguments that are varied
_DEPTH = 3

type _Compare = Callable[[Any, Any], object]
type _Remake = Callable[[Any, Callable[[Sequence[Any]], Iterator[Sequence[Any]]]], Iterator[Any]]
"""Makes objects of the program again, from arguments that a function varies; nothing for what it cannot make again."""


def variants(value: Any, remake: _Remake, depth: int = _DEPTH) -> Iterator[Any]:
    """Yield values of a kind that differ from a value.

    Args:
        value: of the test, also with objects of the program in it.
        remake: makes objects of the program again.
        depth: of containers that are looked into.

    >>> list(variants((1, "a"), lambda value, vary: iter(())))
    [(2, 'a'), (-1000003, 'a'), (1, 'ax'), (1,)]
    """
    kind = type(value)
    if kind is bool:
        yield not value
    elif kind in (int, float, complex):
        yield value + 1
        yield -value - 1_000_002
    elif kind is str:
        yield f"{value}x"
    elif kind is bytes:
        yield value + b"x"
    elif kind in (list, tuple):
        yield from map(kind, _parts(value, remake, depth))
        yield kind(value[:-1]) if value else kind([0])
    elif kind is dict:
        for key, item in list(value.items())[:_PARTS] if depth else []:
            yield from (value | {key: other} for other in variants(item, remake, depth - 1))
        yield {} if value else {0: 0}
    elif kind in (set, frozenset):
        yield kind([]) if value else kind([0])
    elif depth:
        yield from remake(value, lambda args: _parts(args, remake, depth))


def _parts(values: Sequence[Any], remake: _Remake, depth: int) -> Iterator[list[Any]]:
    """Yield a sequence with one of its values varied."""
    for place, value in enumerate(values[:_PARTS]) if depth else []:
        for other in variants(value, remake, depth - 1):
            yield [*values[:place], other, *values[place + 1 :]]


def differs(compare: _Compare, sides: tuple[Any, Any], remake: _Remake) -> bool:
    """Return whether a comparison that holds for two values fails for a variant of either.

    Args:
        compare: of two values, in order.
        sides: both.
        remake: makes objects of the program again.

    >>> differs(lambda one, other: one == other, (1, 1), lambda value, vary: iter(()))
    True
    >>> differs(lambda one, other: True, (1, 1), lambda value, vary: iter(()))
    False
    """
    left, right = sides
    pairs = [(left, variant) for variant in islice(variants(right, remake), _VARIANTS)]
    pairs += [(variant, right) for variant in islice(variants(left, remake), _VARIANTS)]
    return any(_fails(compare, *pair) for pair in pairs or [(left, None)])


def _fails(compare: _Compare, left: object, right: object) -> bool:
    try:
        return not compare(left, right)
    except Exception:  # a method may take only what it knows
        return True
