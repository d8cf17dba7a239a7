"""Messages between the driver and the processes of a mesh: requests and replies of calls."""

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import attrs

from nrl.runtime.mesh.processes import Out

__all__ = ["CACHED_FUNCTIONS", "Argument", "CallReply", "CallRequest", "MissingInput", "decode", "encode"]

CACHED_FUNCTIONS = 64
"""Number of functions that a process caches, so that it need not deserialize them again."""


class MissingInput(Exception):
    """An argument is missing, because the call that produces it has failed."""


class Argument(NamedTuple):
    """A reference to an argument of a call.

    ``parts``, ``combine`` and ``rows`` are indices into the list that comes with the request.

    Args:
        key: the key of a value that the process keeps.
        donated: whether the call consumes that value.
        parts: the argument's parts.
        combine: the function that makes one value of the parts; None: there is one part.
        rows: the numbers of the rows to take; None: all.
    """

    key: int | None = None
    donated: bool = False
    parts: tuple[int, ...] = ()
    combine: int | None = None
    rows: int | None = None


class CallRequest(NamedTuple):
    """A request to call a function. The function and its arguments come beside it, serialized.

    Args:
        caller: how errors name the call.
        function: a hash of the function, which is the first item beside the request.
        args: its arguments.
        outs: how its results come back.
        keys: for each of ``outs``, the key under which the process keeps the value; None: it does not.
        returned: for each of ``outs``, whether this process returns it.
        compared: for each of ``outs``, whether its digest is part of the reply.
        dropped: keys of values to which the driver holds no handle any more.
        trace: where to write a profile of the call.
        turn: whether offloaded values come back to the device for the call.
    """

    caller: str
    function: bytes
    args: tuple[Argument, ...]
    outs: Out | tuple[Out, ...]
    keys: tuple[int | None, ...]
    returned: tuple[bool, ...]
    compared: tuple[bool, ...]
    dropped: tuple[int, ...] = ()
    trace: str | None = None
    turn: bool = True


@attrs.frozen
class CallReply:
    """The time of a call, in seconds since the epoch, and digests of results that must be equal in all processes."""

    start: float
    end: float
    digests: tuple[bytes | None, ...]


def encode(request: CallRequest, items: Sequence[Any]) -> list[Any]:
    """Encode a request and its small items as bytes, which Ray sends several times as fast as objects.

    Args:
        request: for a process.
        items: small `Serialized` values, and references to others.

    Returns:
        The bytes, and the references.

    >>> letter, reference = encode("order", [[b"small"], "reference"])
    >>> decode(letter, ["value"])
    ('order', [[b'small'], 'value'])
    """
    small = [item if isinstance(item, list) else None for item in items]
    return [pickle.dumps((request, small)), *(item for item in items if not isinstance(item, list))]


def decode(payload: bytes, resolved: Sequence[Any]) -> tuple[CallRequest, list[Any]]:
    """Return a request and its items; the inverse of `encode`, once Ray has replaced references by values."""
    request, small = pickle.loads(payload)
    remaining = iter(resolved)
    return request, [next(remaining) if item is None else item for item in small]
