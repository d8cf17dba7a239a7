"""Packing: padded rows to flat tokens and back, so that linear layers see each token once.

A batch ``[B, T]`` is packed into ``N`` tokens in a row. Rows are sorted by length and laid out in blocks, rectangles of
rows of like length. Inside a block, causal attention over right-padded rows is exact, since no real token comes after
padding; between rows there is no attention at all.

If rows begin with the same tokens, as the answers to one prompt do, these may be laid out once, as a row of their own,
because a token's hidden state is a function of the tokens up to it. `After` says which row a block continues.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from nrl.batch import lengths, require
from nrl.batch.prefixes import common_prefixes, media_numbers

__all__ = ["After", "Block", "Packed", "blocks", "pack", "packed", "unpack"]

_BLOCK_COST = 50
"""The cost of one more block, a call of the attention kernel, in tokens of padding."""


class After(NamedTuple):
    """The tokens before those of a block's rows, in an earlier block.

    Args:
        block: the number of the earlier block.
        row: ``[rows]`` int64, the row there that each row continues.
        length: ``[rows]`` int64, the number of tokens of that row that come before.
    """

    block: int
    row: Tensor
    length: Tensor


class Block(NamedTuple):
    """A rectangle of right-padded rows; ``after`` is None if they begin at position 0."""

    rows: int
    width: int
    after: After | None = None


class Packed(NamedTuple):
    """Tokens of a batch without its padding.

    Args:
        input_ids: ``[N]`` int64.
        position_ids: ``[N]`` int64, from 0 in every row of the batch.
        blocks: of rows, in the order of the tokens; their areas add up to N.
        source: ``[N]`` int64, the place of each token in the flattened batch ``[B * T]``; for a token that several rows
            share, its place in one of them.
        real: ``[N]`` bool, false for the little padding that is left inside blocks.
        place: ``[B * T]`` int64, the place of each token of the batch among the N; -1: nowhere, as for padding.
        shape: of the batch, ``(*B, T)``.

    >>> mask = torch.tensor([[1, 1, 0], [1, 1, 1]], dtype=torch.bool)
    >>> ids = torch.tensor([[5, 6, 0], [7, 8, 9]])
    >>> pack(TensorDict({"input_ids": ids, "attention_mask": mask}, batch_size=[2])).blocks
    (Block(rows=2, width=3, after=None),)
    """

    input_ids: Tensor
    position_ids: Tensor
    blocks: tuple[Block, ...]
    source: Tensor
    real: Tensor
    place: Tensor
    shape: torch.Size


def blocks(widths: Sequence[int], cost: int = _BLOCK_COST) -> list[tuple[int, int]]:
    """Cut sorted rows into rectangles so that padding plus ``cost`` a rectangle is least.

    Dynamic programming over the distinct widths: ``best[j] = min over i < j of best[i] + rows(i..j) * width[j] +
    cost``.

    Args:
        widths: of the rows, ascending, each at least 1.
        cost: of a rectangle, in tokens.

    Returns:
        ``(rows, width)`` of each rectangle, in the same order.

    >>> blocks([2, 3, 100], cost=10)
    [(2, 3), (1, 100)]
    """
    if len(widths) == 0:
        return []
    distinct, counts = np.unique(np.asarray(widths), return_counts=True)
    ends = np.concatenate([[0], np.cumsum(counts)])
    best, previous = np.zeros(len(ends)), np.zeros(len(ends), dtype=int)
    for j in range(1, len(ends)):
        costs = best[:j] + (ends[j] - ends[:j]) * distinct[j - 1] + cost
        previous[j] = int(costs.argmin())
        best[j] = costs[previous[j]]
    cut, j = [], len(ends) - 1
    while j > 0:
        i = previous[j]
        cut.append((int(ends[j] - ends[i]), int(distinct[j - 1])))
        j = i
    return cut[::-1]


class _Planned(NamedTuple):
    """A block while it is planned, and for each of its rows: the row of the batch, its first token and its end."""

    block: Block
    owner: np.ndarray
    start: np.ndarray
    stop: np.ndarray


def pack(batch: TensorDict, *, ends: Tensor | None = None, share: bool | None = False) -> Packed:
    """Lay the tokens of a batch out flat. Rows without tokens take no place.

    Args:
        batch: rows, right-padded.
        ends: ``[*B]`` int64, the number of each row's tokens to lay out, at most its length; None: all.
        share: whether to lay out common first tokens of rows once; None: if that is the cheaper layout, counting tokens
            and blocks.

    Raises:
        MissingColumn: there are no ``input_ids``.

    >>> batch = TensorDict({"input_ids": torch.tensor([[5, 6, 7], [5, 6, 9]])}, batch_size=[2])
    >>> pack(batch).input_ids.tolist()
    [5, 6, 7, 5, 6, 9]
    >>> pack(batch, share=True).input_ids.tolist()
    [5, 6, 7, 9]
    """
    require(batch, "input_ids", reader="pack")
    ids = batch["input_ids"]
    rows = ids.reshape(-1, ids.shape[-1]).cpu().numpy()
    sizes = (lengths(batch) if ends is None else ends).flatten().cpu().numpy()
    stem, shared = np.arange(len(sizes)), sizes
    pieces = _planned(sizes, stem, shared)
    if share is not False:
        common = common_prefixes(rows, sizes, media_numbers(batch))
        if bool((common[0] != stem).any()):
            other = _planned(sizes, *common)
            if share or _cost(other) < _cost(pieces):
                pieces, (stem, shared) = other, common
    return _lay(ids, rows, sizes, pieces, stem, shared)


def _cost(pieces: Sequence[_Planned]) -> int:
    return sum(piece.block.rows * piece.block.width + _BLOCK_COST for piece in pieces)


def _planned(sizes: np.ndarray, stem: np.ndarray, shared: np.ndarray) -> list[_Planned]:
    """Blocks for the first ``shared`` tokens of each stem, and then for the rest of the rows."""
    pieces = []
    for block, members in _blocks(np.unique(stem[sizes > 0]), shared):
        pieces.append(_Planned(block, members, np.zeros_like(members), shared[members]))
    rank = np.zeros_like(stem)
    for number in range(len(pieces)):
        stems = pieces[number].owner
        rank[stems] = np.arange(len(stems))
        tails = np.flatnonzero(np.isin(stem, stems) & (sizes > shared))
        for block, members in _blocks(tails, sizes - shared):
            after = After(number, torch.from_numpy(rank[stem[members]]), torch.from_numpy(shared[members]))
            pieces.append(_Planned(block._replace(after=after), members, shared[members], sizes[members]))
    return pieces


def _blocks(rows: np.ndarray, widths: np.ndarray) -> list[tuple[Block, np.ndarray]]:
    """Rectangles for some rows, each with its rows."""
    rows = rows[np.argsort(widths[rows], kind="stable")]
    cut = blocks(widths[rows].tolist(), _BLOCK_COST)
    ends = np.cumsum([count for count, _ in cut], dtype=np.int64)
    return [(Block(*shape), members) for shape, members in zip(cut, np.split(rows, ends), strict=False)]


def _lay(
    ids: Tensor, rows: np.ndarray, sizes: np.ndarray, pieces: Sequence[_Planned], stem: np.ndarray, shared: np.ndarray
) -> Packed:
    width, end = rows.shape[1], 0
    none = np.zeros(0, dtype=np.int64)
    places, owners, reals = [none], [none], [none.astype(bool)]
    first, rest = np.zeros_like(stem), np.zeros_like(stem)  # where each row's stem begins, and its rest
    for (count, wide, after), owner, start, stop in pieces:
        # The padding of a block may reach over the end of the batch
        position = start[:, None] + np.arange(wide)
        places.append(np.minimum(position, width - 1).ravel())
        reals.append((position < stop[:, None]).ravel())
        owners.append(np.repeat(owner, wide))
        (first if after is None else rest)[owner] = end + wide * np.arange(count)
        end += count * wide
    position, row = np.concatenate(places), np.concatenate(owners)
    source, column = row * width + position, np.arange(width)
    place = np.where(column < shared[:, None], first[stem, None], (rest - shared)[:, None]) + column
    place[column >= sizes[:, None]] = -1

    def tensor(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(ids.device)

    return Packed(
        input_ids=tensor(rows.ravel()[source]),
        position_ids=tensor(position),
        blocks=tuple(piece.block for piece in pieces),
        source=tensor(source),
        real=tensor(np.concatenate(reals)),
        place=tensor(place.ravel()),
        shape=ids.shape,
    )


def unpack(values: Tensor, tokens: Packed) -> Tensor:
    """Put values of packed tokens back into the shape of the batch, with zeros at padding.

    Args:
        values: ``[N, ...]``, one entry for each of ``tokens``.
        tokens: from `pack`.

    Returns:
        ``[*B, T, ...]``.

    >>> tokens = pack(TensorDict({"input_ids": torch.tensor([[5, 6]])}, batch_size=[1]))
    >>> unpack(torch.tensor([1.0, 2.0]), tokens)
    tensor([[1., 2.]])
    """
    there = torch.nonzero(tokens.place >= 0)[:, 0]
    flat = values.new_zeros((tokens.shape.numel(), *values.shape[1:]))
    flat = flat.index_copy(0, there, values.index_select(0, tokens.place[there]))
    return flat.view(*tokens.shape, *values.shape[1:])


def packed(forward: Callable[[Packed], Tensor]) -> Callable[[TensorDict], Tensor]:
    """Turn a forward over flat tokens into a forward over padded rows that never computes on their padding.

    Args:
        forward: ``Packed`` to ``[N, ...]``; tokens of one block attend within their row.

    Returns:
        A function of a batch, whose result is ``[*B, T, ...]``, zero at padding.

    >>> embed = packed(lambda tokens: tokens.input_ids.float())
    >>> embed(TensorDict({"input_ids": torch.tensor([[5, 6]])}, batch_size=[1]))
    tensor([[5., 6.]])
    """

    def over(batch: TensorDict) -> Tensor:
        tokens = pack(batch)
        return unpack(forward(tokens), tokens)

    return over
