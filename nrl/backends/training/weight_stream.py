"""The pieces of a model on their way out of its processes: a bucket of them at a time."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from math import prod
from typing import Any

from torch import Tensor

from nrl.backends.models.shards import ShardAssembler, full_shard
from nrl.backends.training.collectives import DeferredError, ProcessGroup
from nrl.backends.types import Bucket, Piece
from nrl.runtime.mesh.current_process import process
from nrl.runtime.transfer import Tensors, all_gather_tensors, receive_tensors, send_tensors

__all__ = ["WeightStream", "iter_full_weights", "next_bucket", "receive_bucket", "write_full_weights"]

_BUCKET = 256 * 2**20
"""Bytes of weights that travel at once, unless one alone is larger."""


class WeightStream:
    """A stream of pieces, read a bucket at a time. All processes that share a model read on together.

    A bucket ends where the weights that it has pieces of would fill it if they were whole, so that processes which hold
    pieces of the same weights come to their other pieces at the same time.

    >>> from nrl.backends.models.shards import full_shard
    >>> import torch
    >>> reading = WeightStream([full_shard("score.weight", torch.ones(2))])
    >>> len(reading.next()), reading.has_more
    (1, False)
    """

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._pieces, self._joining = iter(pieces), ShardAssembler()
        self.has_more = True
        """True while there may be more pieces."""

    def next(self, share: float = 1) -> list[Piece]:
        """Return more pieces of this process, a share of a bucket; at the end none."""
        pieces, size = list[Piece](), 0
        for piece in self._pieces:
            pieces.append(piece)
            size += prod(piece.shape) * piece.tensor.element_size()
            if size >= share * _BUCKET / _count_stages():
                return pieces
        self.has_more = False
        return pieces

    def next_full(self, group: Any = None) -> list[Piece]:
        """Return more full weights, put together from the pieces of all processes; a collective."""
        mine = self.next(1 / 2)  # they are there twice, in pieces and whole
        gathered_parts = all_gather_tensors(_tensors(mine), (_places(mine), self.has_more), group)
        self.has_more = any(has_more for _, (_, has_more) in gathered_parts)
        pieces = chain(*(_pieces(tensors, places) for tensors, (places, _) in gathered_parts))
        return [full_shard(name, tensor) for name, tensor in self._joining.add(pieces)]

    def end(self, caller: str) -> None:
        """Check that no weight was left in parts; `next_full` alone puts them together."""
        self._joining.end(caller)


def _count_stages() -> int:
    """Return the number of pipeline stages, which read different weights at the same time and share a bucket."""
    mesh = process().device_mesh
    return int(mesh["pp"].size()) if mesh is not None and "pp" in (mesh.mesh_dim_names or ()) else 1


def iter_full_weights(pieces: Iterable[Piece], caller: str, group: Any = None) -> Iterator[tuple[str, Tensor]]:
    """Yield the full weights that all processes have pieces of, in each process; a collective.

    Raises:
        ModelError: a weight is incomplete; ``caller`` begins the message.

    >>> import torch
    >>> [name for name, _ in iter_full_weights([full_shard("score.weight", torch.ones(2))], "export")]
    ['score.weight']
    """
    reading = WeightStream(pieces)
    while reading.has_more:
        for piece in reading.next_full(group):
            yield piece.name, piece.tensor
    reading.end(caller)


def write_full_weights(
    pieces: Iterable[Piece], peers: ProcessGroup, write: Callable[[Iterator[tuple[str, Tensor]]], None]
) -> None:
    """Let the first process write the full weights that all processes have pieces of; a collective.

    Raises:
        Exception: what writing raised; or as `iter_full_weights`.
    """
    deferred = DeferredError(peers)
    weights = iter_full_weights(pieces, "export", peers.group)
    with deferred.capture():
        if peers.rank == 0:
            write(weights)
    for _ in weights:  # all processes read together
        pass
    deferred.gather_or_raise("export")


def next_bucket(caller: str, send: Callable[[Tensors], Any], same: bool, stream: WeightStream) -> tuple[Any, bool]:
    """Send more pieces from a process, and return whether there may be others; see `nrl.runtime.transfer.Route`."""
    pieces = stream.next_full() if same else stream.next()
    if not stream.has_more:
        stream.end(caller)
    return (_places(pieces), *send_tensors(send, _tensors(pieces))), stream.has_more


type _Places = dict[str, tuple[str, tuple[int, ...], tuple[slice, ...]]]


def receive_bucket(results: Sequence[tuple[_Places, Any, dict[str, int]]]) -> Bucket:
    """Receive the pieces that `next_bucket` sent. Raises as `nrl.runtime.transfer.receive_tensors`."""
    tensors = receive_tensors([(travelled, sums) for _, travelled, sums in results])
    places = {key: entry for entries, *_ in results for key, entry in entries.items()}
    return list(_pieces(tensors, places))


def _key(piece: Piece) -> str:
    """Return a unique name of a piece: that of the weight, where it is whole."""
    if piece.tensor.shape == piece.shape:
        return piece.name
    return f"{piece.name}[{', '.join(f'{dim.start}:{dim.stop}' for dim in piece.index)}]"


def _tensors(pieces: Iterable[Piece]) -> dict[str, Tensor]:
    return {_key(piece): piece.tensor for piece in pieces if _travels(piece)}


def _places(pieces: Iterable[Piece]) -> _Places:
    return {_key(piece): (piece.name, piece.shape, piece.index) for piece in pieces if _travels(piece)}


def _travels(piece: Piece) -> bool:
    return bool(piece.tensor.numel() or not prod(piece.shape))


def _pieces(tensors: Tensors, places: _Places) -> Iterator[Piece]:
    return (Piece(*places[key], tensor) for key, tensor in tensors.items())
