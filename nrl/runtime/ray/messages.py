"""Messages between the driver and the processes of a mesh: orders and receipts."""

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import attrs

from nrl.runtime.mesh.placement import Out

__all__ = ["FUNCTIONS", "Argument", "NeverMade", "Order", "Receipt", "folded", "unfolded"]

FUNCTIONS = 64
"""How many functions a process remembers; an older one is opened again.

>>> FUNCTIONS
64
"""


class NeverMade(Exception):
    """A value is not there, because the call that was to make it has failed."""


class Argument(NamedTuple):
    """How a process finds an argument of a call.

    Args:
        key: of a value that it keeps.
        donated: that value is consumed.
        parts: where, in what came with the order, the parts of the argument are.
        combine: where what makes one value of them is; None: there is one part.
        rows: where the numbers of the rows to take of it are; None: all.
    """

    key: int | None = None
    donated: bool = False
    parts: tuple[int, ...] = ()
    combine: int | None = None
    rows: int | None = None


class Order(NamedTuple):
    """What a process is asked to do. What it needs for it comes beside, shipped.

    Args:
        who: how errors name the call.
        function: a hash of the function, which is the first of what comes beside.
        args: its arguments.
        outs: what it returns.
        keys: for each of ``outs``, under which key a value is kept; None: it is not.
        wanted: for each of ``outs``, whether this process sends it.
        compared: for each of ``outs``, whether its digest is part of the receipt.
        dropped: keys of values that nobody has a name for any more.
        trace: where to write a profile of the call.
        turn: whether what rests comes back to the device for it.
    """

    who: str
    function: bytes
    args: tuple[Argument, ...]
    outs: Out | tuple[Out, ...]
    keys: tuple[int | None, ...]
    wanted: tuple[bool, ...]
    compared: tuple[bool, ...]
    dropped: tuple[int, ...] = ()
    trace: str | None = None
    turn: bool = True


@attrs.frozen
class Receipt:
    """When a call ran, in seconds of the epoch, and the digests of results that have to be the same everywhere."""

    start: float
    end: float
    digests: tuple[bytes | None, ...]


def folded(order: Order, beside: Sequence[Any]) -> list[Any]:
    """An order and what is small of what comes beside as bytes, which Ray sends several times as fast as objects.

    Args:
        order: what to do.
        beside: `Shipped` values that are small, and references to others.

    Returns:
        The bytes, and the references.

    >>> letter, reference = folded("order", [[b"small"], "reference"])
    >>> unfolded(letter, ["value"])
    ('order', [[b'small'], 'value'])
    """
    small = [item if isinstance(item, list) else None for item in beside]
    return [pickle.dumps((order, small)), *(item for item in beside if not isinstance(item, list))]


def unfolded(letter: bytes, arrived: Sequence[Any]) -> tuple[Order, list[Any]]:
    """The order and what came beside it; the inverse of `folded`, once Ray has replaced references by values.

    >>> unfolded(folded("order", [])[0], [])
    ('order', [])
    """
    order, small = pickle.loads(letter)
    values = iter(arrived)
    return order, [next(values) if item is None else item for item in small]
