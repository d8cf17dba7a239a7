"""Giving weights to engines, bucket by bucket, so that nobody holds a second copy of the model."""

import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

from nrl.backends.base import Bucket
from nrl.backends.samplers import Checked, Complete, Probed
from nrl.backends.sampling.seat import Seat
from nrl.errors import ConsumedState, CorruptedTransfer, TransferError
from nrl.runtime.mesh.futures import Coming, Future
from nrl.runtime.mesh.placement import Mesh

__all__ = ["give", "give_again", "say"]

type _Buckets = Iterable[Bucket | Future[Bucket]]


@runtime_checkable
class _Routed(Protocol):
    def to(self, meshes: Sequence[Mesh]) -> _Buckets: ...


def give(seats: Sequence[Seat], buckets: _Buckets, version: int) -> dict[Seat, Exception]:
    """Give engines the weights, by the best way that there is to them; where that fails, by value.

    Returns:
        The seats that died of it, or meanwhile, and what they said; the others have the weights.

    Raises:
        CorruptedTransfer: they did not arrive as they were sent.
        Exception: what an engine says of the weights.

    >>> give([], [], 1)
    {}
    """
    if isinstance(buckets, _Routed):
        try:
            return _give(seats, buckets.to([seat.mesh for seat in seats]), version)
        except CorruptedTransfer:
            raise
        except TransferError as error:  # as when one of those that are cast to dies: the others wait for it
            say(f"publish: the weights go by value now, which is slower: {error}")
    return _give(seats, buckets, version)


def give_again(seat: Seat, buckets: _Buckets | None, version: int, sampler: Probed, complete: Complete) -> bool:
    """Give an engine that has been started again the weights that the others have, and see that it computes with them.

    Args:
        seat: where it is.
        buckets: the weights; None: they cannot be had again.
        version: their number; 0: there have been none.
        sampler: whose engine it is.
        complete: asks it.

    Returns:
        Whether it has them; not if a step has consumed them.

    Raises:
        WeightMismatch: it has others, or computes with others.
        Exception: what it died of.
    """
    if buckets is None:
        return version == 0
    try:
        for death in give([seat], buckets, version).values():
            raise death
        if isinstance(buckets, Checked):
            buckets.check(sampler, version, complete)
    except ConsumedState:
        return False
    return True


def _give(seats: Sequence[Seat], buckets: _Buckets, version: int) -> dict[Seat, Exception]:
    dead: dict[Seat, Exception] = {}
    refused: list[Exception] = []

    def note(seat: Seat, error: Exception, given: Any) -> None:
        its_own = not (isinstance(given, Coming) and given.failure() is error)  # and not of the mesh that gives
        if its_own and (death := seat.death(error)) is not None:
            dead[seat] = death
        else:
            refused.append(error)

    def each(act: Callable[[Seat], Future[Any]], given: Any = None) -> None:
        """All are told before any is waited for, and all are waited for."""
        told = []
        for seat in seats:
            if seat not in dead:
                try:
                    told.append((seat, act(seat)))
                except Exception as error:
                    note(seat, error, given)
        for seat, reply in told:
            try:
                reply.result()
            except Exception as error:
                note(seat, error, given)
        if refused:
            raise refused[0]

    each(Seat.begin)
    for bucket in buckets:
        each(partial(Seat.add, bucket=bucket), bucket)
    each(partial(Seat.end, version=version))
    return dead


def say(text: str) -> None:
    """Warn, from a thread in which it would help nobody to raise.

    >>> with warnings.catch_warnings(record=True) as said:
    ...     warnings.simplefilter("always")
    ...     say("an engine was lost")
    >>> str(said[0].message)
    'an engine was lost'
    """
    try:
        warnings.warn(text, stacklevel=2)
    except Warning:
        print(text, file=sys.stderr)  # noqa: T201
