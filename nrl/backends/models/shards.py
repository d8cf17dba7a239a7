"""Pieces of weights: cutting weights into them, putting them together again, and filling other pieces with them.

A process never has to hold more of a model than its own pieces and those that are under way. Whoever sends pieces and
whoever receives them may have cut the weights in different ways.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import attrs
import numpy as np
import torch
from torch import Tensor

from nrl.backends.models.named_weights import a_few, check_arrived, check_weight, is_head, is_score
from nrl.backends.types import Piece
from nrl.errors import ModelError

__all__ = [
    "ShardAssembler",
    "ShardLoader",
    "are_disjoint",
    "cast_matrix",
    "empty_shard",
    "fill",
    "full_shard",
    "full_shards",
    "overlap",
]

type _Index = tuple[slice, ...]


def full_shard(name: str, tensor: Tensor) -> Piece:
    """Return a full weight as a piece.

    >>> full_shard("norm.weight", torch.ones(3)).index
    (slice(0, 3, None),)
    """
    return Piece(name, tuple(tensor.shape), tuple(slice(0, size) for size in tensor.shape), tensor)


def empty_shard(piece: Piece) -> Piece:
    """Return an empty piece of the same weight."""
    return Piece(piece.name, piece.shape, tuple(slice(0, 0) for _ in piece.shape), piece.tensor.new_empty(0))


def cast_matrix(piece: Piece, dtype: torch.dtype) -> Piece:
    """Cast a piece if it is of a matrix; vectors are few, and models keep some of them as they are.

    >>> cast_matrix(full_shard("w", torch.ones(2, 2)), torch.bfloat16).tensor.dtype
    torch.bfloat16
    """
    matrix = len(piece.shape) > 1 and piece.tensor.is_floating_point()
    return attrs.evolve(piece, tensor=piece.tensor.detach().to(dtype)) if matrix else piece


def are_disjoint(blocks: Collection[_Index]) -> bool:
    """Return whether no two blocks of a weight overlap.

    >>> are_disjoint([(slice(0, 2),), (slice(2, 3),)]), are_disjoint([(slice(0, 2),), (slice(1, 3),)])
    (True, False)
    """
    ends = np.array([[(dim.start, dim.stop) for dim in block] for block in blocks], dtype=np.int64)
    starts, stops = ends.reshape(len(blocks), -1, 2).transpose(2, 0, 1)
    overlap = ((starts[:, None] < stops) & (starts < stops[:, None])).all(-1)
    return not (overlap & ~np.eye(len(blocks), dtype=bool)).any()


def full_shards(tensors: Mapping[str, Tensor]) -> dict[str, Piece]:
    """Return full weights as pieces by name; a tensor that has two names is one piece."""
    pieces: dict[int, Piece] = {}
    return {name: pieces.setdefault(id(tensor), full_shard(name, tensor)) for name, tensor in tensors.items()}


def overlap(first: Piece, second: Piece) -> tuple[_Index, _Index] | None:
    """Return the overlap of two pieces of a weight, as an index into the tensor of each; None: they do not overlap.

    >>> rows = Piece("w", (4,), (slice(1, 3),), torch.tensor([5, 6]))
    >>> overlap(full_shard("w", torch.arange(4)), rows)
    ((slice(1, 3, None),), (slice(0, 2, None),))
    """
    bounds = [(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(first.index, second.index, strict=True)]
    if any(start >= stop for start, stop in bounds):
        return None
    in_first, in_second = (
        tuple(
            slice(start - outer.start, stop - outer.start)
            for (start, stop), outer in zip(bounds, piece.index, strict=True)
        )
        for piece in (first, second)
    )
    return in_first, in_second


class ShardLoader:
    """A loader that copies incoming pieces into a model's own; call `add` any number of times, then `end`.

    Each number is written exactly once. Of a tensor that has two names one is enough; what comes by the other one is
    compared.

    Args:
        targets: the pieces to fill, by name: one, or several; a tied weight is the same pieces under two names. An
            empty piece stands for a weight of other processes alone.
        caller: the name of the caller in errors.
        other_head: whether the weights may be of a model with another head. Then all but the head is used; value and
            reward heads share their weight.
    """

    def __init__(
        self, targets: Mapping[str, Piece | Sequence[Piece]], caller: str, *, other_head: bool = False
    ) -> None:
        self._own = {name: [pieces] if isinstance(pieces, Piece) else pieces for name, pieces in targets.items()}
        self._who, self._other_head = caller, other_head
        self._shapes = {name: pieces[0].shape for name, pieces in self._own.items()}
        named_pieces = [(name, piece) for name, pieces in self._own.items() for piece in pieces]
        self._names: dict[int, str] = {}
        for name, piece in named_pieces:
            self._names.setdefault(id(piece), name)
        self._missing = {id(piece): piece.tensor.numel() for _, piece in named_pieces}
        self._filled: dict[int, set[_Index]] = {piece: set() for piece in self._missing}

    @torch.no_grad()
    def add(self, pieces: Iterable[Piece]) -> None:
        """Copy some pieces in.

        Raises:
            ModelError: a name that the model does not have, a wrong shape, or a second value for the same numbers.
        """
        incoming = list(pieces)
        order = {piece.name: order for order, piece in reversed(list(enumerate(incoming)))}
        # Tied weights are compared, so load one weight after the other.
        for piece in sorted(incoming, key=lambda piece: order[piece.name]):
            if self._other_head and piece.name not in self._own and is_head(piece.name):
                continue
            check_weight(piece.name, piece.shape, self._shapes, self._who)
            for target in self._own[piece.name]:
                self._copy(target, piece)

    def _copy(self, target: Piece, piece: Piece) -> None:
        where = overlap(target, piece)
        if where is None:
            return
        in_target, in_piece = where
        mine, theirs = target.tensor[in_target], piece.tensor[in_piece]
        if in_target not in (filled := self._filled[id(target)]):
            filled.add(in_target)
            self._missing[id(target)] -= mine.numel()
            mine.copy_(theirs)
        elif not torch.equal(mine, theirs.to(mine)):
            raise ModelError(
                f"{self._who}: '{piece.name}' came twice with different values, or is tied to another weight here and "
                "not where it came from; build both sides from the same Model"
            )

    def end(self) -> None:
        """Check that all weights have come.

        Raises:
            ModelError: a weight is missing, or some of its pieces overlapped.
        """
        lost, wrong = set[str](), set[str]()
        for piece, name in self._names.items():
            filled = self._filled[piece]
            if self._missing[piece] and not filled and not (self._other_head and is_score(name)):
                lost.add(name)
            elif filled and (self._missing[piece] or not are_disjoint(filled)):
                wrong.add(name)
        check_arrived(sorted(lost), self._who)
        if wrong:
            raise _make_overlap_error(self._who, sorted(wrong))


def _make_overlap_error(caller: str, names: Sequence[str]) -> ModelError:
    return ModelError(
        f"{caller}: of {a_few(names)} not every number came, or one came twice; the pieces of an engine's processes "
        "have to be each number of each weight once"
    )


def fill(
    targets: Mapping[str, Piece | Sequence[Piece]], pieces: Iterable[Piece], *, caller: str, other_head: bool = False
) -> None:
    """Fill pieces with others that come all at once; see `ShardLoader`.

    >>> weight = torch.zeros(3)
    >>> fill({"w": full_shard("w", weight)}, [full_shard("w", torch.ones(3))], caller="receive")
    >>> weight
    tensor([1., 1., 1.])
    """
    loader = ShardLoader(targets, caller, other_head=other_head)
    loader.add(pieces)
    loader.end()


class ShardAssembler:
    """An assembler of pieces into full weights; `add` yields the weights that are complete by then.

    >>> joining, half = ShardAssembler(), Piece("w", (2,), (slice(0, 1),), torch.ones(1))
    >>> list(joining.add([half])), list(joining.add([Piece("w", (2,), (slice(1, 2),), torch.ones(1))]))
    ([], [('w', tensor([1., 1.]))])
    """

    def __init__(self) -> None:
        self._partial: dict[str, tuple[Tensor, list[_Index]]] = {}
        self._missing: dict[str, int] = {}

    def add(self, pieces: Iterable[Piece]) -> Iterator[tuple[str, Tensor]]:
        """Take some pieces, and yield each weight with its name when its last piece has come.

        Raises:
            ModelError: pieces of a weight overlap.
        """
        for piece in pieces:
            if piece.tensor.shape == piece.shape:
                yield piece.name, piece.tensor
                continue
            weight, blocks = self._partial.setdefault(piece.name, (piece.tensor.new_empty(piece.shape), []))
            weight[piece.index] = piece.tensor
            blocks.append(piece.index)
            self._missing[piece.name] = self._missing.get(piece.name, weight.numel()) - piece.tensor.numel()
            if self._missing[piece.name] <= 0:
                if not are_disjoint(blocks):
                    raise _make_overlap_error("weights", [piece.name])
                del self._partial[piece.name], self._missing[piece.name]
                yield piece.name, weight

    def end(self, caller: str) -> None:
        """Check that nothing is left.

        Raises:
            ModelError: of a weight only some pieces came.
        """
        check_arrived(self._partial, caller)
