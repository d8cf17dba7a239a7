"""Packing: padded rows to flat tokens and back, so that linear layers see each token once.

A batch ``[B, T]`` is packed into ``N`` tokens in a row. Between rows there is no attention. How the rows lie is a
value (`nrl.batch.packed_rows`): in rectangles of rows of like length, or one after the other.

If rows begin with the same tokens, as the answers to one prompt do, these may be laid out once, because a token's
hidden state is a function of the tokens up to it. The form of the rows says which row continues which.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from nrl.batch import lengths, require
from nrl.batch.packed_rows import Packing, Rectangles, Runs, Sequences
from nrl.batch.prefixes import common_prefixes, media_numbers, routed_tokens

__all__ = ["Packed", "pack", "packed", "unpack"]


class Packed(NamedTuple):
    """Tokens of a batch without its padding.

    Args:
        input_ids: ``[N]`` int64.
        position_ids: ``[N]`` int64, from 0 in every row of the batch.
        rows: which of the tokens are a row, and what comes before them.
        source: ``[N]`` int64, the place of each token in the flattened batch ``[B * T]``; for a token that several rows
            share, its place in one of them.
        place: ``[B * T]`` int64, the place of each token of the batch among the N; -1: nowhere, as for padding.
        shape: of the batch, ``(*B, T)``.

    >>> mask = torch.tensor([[1, 1, 0], [1, 1, 1]], dtype=torch.bool)
    >>> ids = torch.tensor([[5, 6, 0], [7, 8, 9]])
    >>> batch = TensorDict({"input_ids": ids, "attention_mask": mask}, batch_size=[2])
    >>> pack(batch).rows.blocks
    (Block(rows=2, width=3, after=None),)
    >>> pack(batch, packing=Sequences).rows.cu_seqlens_q
    tensor([0, 2, 5], dtype=torch.int32)
    """

    input_ids: Tensor
    position_ids: Tensor
    rows: Rectangles | Sequences
    source: Tensor
    place: Tensor
    shape: torch.Size


def pack(
    batch: TensorDict, *, packing: Packing = Rectangles, ends: Tensor | None = None, share: bool | None = False
) -> Packed:
    """Lay the tokens of a batch out flat. Rows without tokens take no place.

    Args:
        batch: rows, right-padded.
        packing: the form of the rows: `Rectangles`, or `Sequences`, which have no padding at all.
        ends: ``[*B]`` int64, the number of each row's tokens to lay out, at most its length; None: all.
        share: whether to lay out common first tokens of rows once; None: if that is cheaper, counting tokens and what
            attention costs in this form.

    Raises:
        MissingColumn: the batch has no ``input_ids``.

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
    laid, runs = packing.of(sizes, stem, shared)
    if share is not False:
        common = common_prefixes(routed_tokens(batch), sizes, media_numbers(batch))
        if bool((common[0] != stem).any()):
            other = packing.of(sizes, *common)
            if share or other[0].cost < laid.cost:
                (laid, runs), (stem, shared) = other, common
    position, source = _sources(rows, runs)

    def tensor(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(ids.device)

    return Packed(
        input_ids=tensor(rows.ravel()[source]),
        position_ids=tensor(position),
        rows=laid.to(ids.device),
        source=tensor(source),
        place=tensor(_places(rows, sizes, runs, stem, shared)),
        shape=ids.shape,
    )


def _sources(rows: np.ndarray, runs: Runs) -> tuple[np.ndarray, np.ndarray]:
    """The position of each token in its row, and its place in the flattened batch."""
    end = np.cumsum(runs.width)
    position = np.arange(runs.width.sum()) - np.repeat(end - runs.width - runs.start, runs.width)
    column = np.minimum(position, rows.shape[1] - 1)  # the padding of a block may reach over the end of the batch
    return column, np.repeat(runs.owner, runs.width) * rows.shape[1] + column


def _places(rows: np.ndarray, sizes: np.ndarray, runs: Runs, stem: np.ndarray, shared: np.ndarray) -> np.ndarray:
    """The place of each token of the batch among those that are laid out, or -1."""
    begin = np.cumsum(runs.width) - runs.width
    from_start = runs.start == 0
    first = np.zeros_like(stem)  # position of the first token of each row, if it is laid out
    first[runs.owner[from_start]] = begin[from_start]
    rest = first.copy()  # position it would have before the tokens that only this row has
    rest[runs.owner[~from_start]] = (begin - runs.start)[~from_start]
    column = np.arange(rows.shape[1])
    position: np.ndarray = np.where(column < shared[:, None], first[stem, None], rest[:, None]) + column
    position[column >= sizes[:, None]] = -1
    return position.reshape(-1)


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
    present = torch.nonzero(tokens.place >= 0)[:, 0]
    flat = values.new_zeros((tokens.shape.numel(), *values.shape[1:]))
    flat = flat.index_copy(0, present, values.index_select(0, tokens.place[present]))
    return flat.view(*tokens.shape, *values.shape[1:])


def packed(forward: Callable[[Packed], Tensor], *, packing: Packing = Rectangles) -> Callable[[TensorDict], Tensor]:
    """Turn a forward over flat tokens into a forward over padded rows that never computes on their padding.

    Args:
        forward: ``Packed`` to ``[N, ...]``; tokens attend within their row.
        packing: the form of the rows, as for `pack`.

    Returns:
        A function of a batch, whose result is ``[*B, T, ...]``, zero at padding.

    >>> embed = packed(lambda tokens: tokens.input_ids.float())
    >>> embed(TensorDict({"input_ids": torch.tensor([[5, 6]])}, batch_size=[1]))
    tensor([[5., 6.]])
    """

    def over(batch: TensorDict) -> Tensor:
        tokens = pack(batch, packing=packing)
        return unpack(forward(tokens), tokens)

    return over
