"""The pieces of a model on their way out of its processes: a bucket of them at a time."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from math import prod
from typing import Any

from torch import Tensor

from nrl.backends.models.shards import Joining, whole
from nrl.backends.training.collectives import HeldError, Peers
from nrl.backends.types import Bucket, Piece
from nrl.runtime.mesh.current_process import process
from nrl.runtime.transfer import Tensors, gathered, opened, sent

__all__ = ["Reading", "next_bucket", "received", "whole_weights", "written_whole"]

_BUCKET = 256 * 2**20
"""Bytes of weights that travel at once, unless one alone is larger."""


class Reading:
    """Reads pieces, as many as make a bucket each time. All processes that share a model read on together.

    A bucket ends where the weights that it has pieces of would fill it if they were whole, so that processes which hold
    pieces of the same weights come to their other pieces at the same time.

    >>> from nrl.backends.models.shards import transactional
    >>> import torch
    >>> reading = Reading([transactional("score.weight", torch.ones(2))])
    >>> len(reading.next()), reading.more
    (1, False)
    """

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._pieces, self._joining = iter(pieces), Joining()
        self.more = True
        """Whether there may be others."""

    def next(self, share: float = 1) -> list[Piece]:
        """Some more pieces of this process, a share of a bucket; at the end none."""
        found, size = list[Piece](), 0
        for piece in self._pieces:
            found.append(piece)
            size += prod(piece.shape) * piece.tensor.element_size()
            if size >= share * _BUCKET / _stages():
                return found
        self.more = False
        return found

    def next_whole(self, group: Any = None) -> list[Piece]:
        """Some more whole weights, put together of the pieces of all processes; a collective."""
        mine = self.next(1 / 2)  # they are there twice, in pieces and whole
        each = gathered(_tensors(mine), (_places(mine), self.more), group)
        self.more = any(more for _, (_, more) in each)
        pieces = chain(*(_pieces(tensors, places) for tensors, (places, _) in each))
        return [whole(name, tensor) for name, tensor in self._joining.add(pieces)]

    def end(self, who: str) -> None:
        """Check that no weight was left in parts; `next_whole` alone puts them together."""
        self._joining.end(who)


def _stages() -> int:
    """How many processes read other weights than this one at the same time: those of a pipeline share a bucket."""
    mesh = process().device_mesh
    return int(mesh["pp"].size()) if mesh is not None and "pp" in (mesh.mesh_dim_names or ()) else 1


def whole_weights(pieces: Iterable[Piece], who: str, group: Any = None) -> Iterator[tuple[str, Tensor]]:
    """The whole weights that all processes have pieces of, some at a time, in each of them; a collective.

    Raises:
        ModelError: of a weight only some pieces came; ``who`` is how it begins.

    >>> import torch
    >>> [name for name, _ in whole_weights([whole("score.weight", torch.ones(2))], "export")]
    ['score.weight']
    """
    reading = Reading(pieces)
    while reading.more:
        for piece in reading.next_whole(group):
            yield piece.name, piece.tensor
    reading.end(who)


def written_whole(pieces: Iterable[Piece], peers: Peers, write: Callable[[Iterator[tuple[str, Tensor]]], None]) -> None:
    """Let the first process write the whole weights that all processes have pieces of; a collective.

    Raises:
        Exception: what writing raised; or as `whole_weights`.
    """
    held = HeldError(peers)
    weights = whole_weights(pieces, "export", peers.group)
    with held.back():
        if peers.rank == 0:
            write(weights)
    for _ in weights:  # all processes read together
        pass
    held.meet("export")


def next_bucket(who: str, send: Callable[[Tensors], Any], same: bool, reading: Reading) -> tuple[Any, bool]:
    """In a process: send some more pieces, and say whether there may be others; see `nrl.runtime.transfer.Route`."""
    pieces = reading.next_whole() if same else reading.next()
    if not reading.more:
        reading.end(who)
    return (_places(pieces), *sent(send, _tensors(pieces))), reading.more


type _Places = dict[str, tuple[str, tuple[int, ...], tuple[slice, ...]]]


def received(results: Sequence[tuple[_Places, Any, dict[str, int]]]) -> Bucket:
    """The pieces that `next_bucket` sent, in a process that receives them. Raises as `nrl.runtime.transfer.opened`."""
    tensors = opened([(travelled, sums) for _, travelled, sums in results])
    places = {key: place for told, *_ in results for key, place in told.items()}
    return list(_pieces(tensors, places))


def _key(piece: Piece) -> str:
    """A name of its own for each piece; that of the weight, where it is whole."""
    if piece.tensor.shape == piece.shape:
        return piece.name
    return f"{piece.name}[{', '.join(f'{each.start}:{each.stop}' for each in piece.index)}]"


def _tensors(pieces: Iterable[Piece]) -> dict[str, Tensor]:
    return {_key(piece): piece.tensor for piece in pieces if _travels(piece)}


def _places(pieces: Iterable[Piece]) -> _Places:
    return {_key(piece): (piece.name, piece.shape, piece.index) for piece in pieces if _travels(piece)}


def _travels(piece: Piece) -> bool:
    return bool(piece.tensor.numel() or not prod(piece.shape))


def _pieces(tensors: Tensors, places: _Places) -> Iterator[Piece]:
    return (Piece(*places[key], tensor) for key, tensor in tensors.items())
