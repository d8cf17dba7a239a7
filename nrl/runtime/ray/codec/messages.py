"""Messages between the driver and the processes of a mesh: orders and receipts."""

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import attrs

from nrl.runtime.mesh.processes import Out

__all__ = ["FUNCTIONS", "Argument", "NeverMade", "Order", "Receipt", "folded", "unfolded"]

FUNCTIONS = 64
"""How many functions a process remembers, so that it need not deserialize them again."""


class NeverMade(Exception):
    """A value is missing, because the call that was to make it has failed."""


class Argument(NamedTuple):
    """How a process finds an argument of a call.

    ``parts``, ``combine`` and ``rows`` are places in the list that comes with the order.

    Args:
        key: of a value that the process keeps.
        donated: whether the call consumes that value.
        parts: of the argument's parts.
        combine: of the function that makes one value of the parts; None: there is one part.
        rows: of the numbers of the rows to take; None: all.
    """

    key: int | None = None
    donated: bool = False
    parts: tuple[int, ...] = ()
    combine: int | None = None
    rows: int | None = None


class Order(NamedTuple):
    """A call that a process has to make. The function and its arguments come beside it, serialized.

    Args:
        who: how errors name the call.
        function: a hash of the function, which is the first item beside the order.
        args: its arguments.
        outs: how its results come back.
        keys: for each of ``outs``, the key under which the process keeps the value; None: it does not.
        wanted: for each of ``outs``, whether this process sends it.
        compared: for each of ``outs``, whether its digest is part of the receipt.
        dropped: keys of values that the driver has no name for any more.
        trace: where to write a profile of the call.
        turn: whether resting values come back to the device for the call.
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
    """When a call ran, in seconds since the epoch, and digests of results that must be the same in all processes."""

    start: float
    end: float
    digests: tuple[bytes | None, ...]


def folded(order: Order, beside: Sequence[Any]) -> list[Any]:
    """Fold an order and the small items beside it into bytes, which Ray sends several times as fast as objects.

    Args:
        order: for a process.
        beside: small `Serialized` values, and references to others.

    Returns:
        The bytes, and the references.

    >>> letter, reference = folded("order", [[b"small"], "reference"])
    >>> unfolded(letter, ["value"])
    ('order', [[b'small'], 'value'])
    """
    small = [item if isinstance(item, list) else None for item in beside]
    return [pickle.dumps((order, small)), *(item for item in beside if not isinstance(item, list))]


def unfolded(letter: bytes, arrived: Sequence[Any]) -> tuple[Order, list[Any]]:
    """The order and the items beside it; the inverse of `folded`, once Ray has replaced references by values."""
    order, small = pickle.loads(letter)
    values = iter(arrived)
    return order, [next(values) if item is None else item for item in small]
