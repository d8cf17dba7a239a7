"""Between padded rows and flat tokens: the linear layers see tokens without padding, attention sees whole rows.

A batch ``[B, T]`` is packed into ``N`` tokens in a row. Rows are sorted by length and laid out in blocks, rectangles of
rows of like length. Inside of a block, causal attention over right-padded rows is exact, since no real token comes
after padding; between rows there is no attention at all.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from nrl.batch import lengths, require

__all__ = ["Packed", "blocks", "pack", "packed", "unpack"]

_BLOCK_COST = 150
"""What one more block costs, in tokens of padding: a call of the attention kernel."""


class Packed(NamedTuple):
    """Tokens of a batch without its padding.

    Args:
        input_ids: ``[N]`` int64.
        position_ids: ``[N]`` int64, from 0 in every row.
        blocks: rows and width of each rectangle; their areas add up to N.
        source: ``[N]`` int64, where each token stood in the flattened batch ``[B * T]``.
        real: ``[N]`` bool, false for the little padding that is left inside of blocks.
        shape: of the batch, ``(*B, T)``.

    >>> mask = torch.tensor([[1, 1, 0], [1, 1, 1]], dtype=torch.bool)
    >>> ids = torch.tensor([[5, 6, 0], [7, 8, 9]])
    >>> pack(TensorDict({"input_ids": ids, "attention_mask": mask}, batch_size=[2])).blocks
    ((2, 3),)
    """

    input_ids: Tensor
    position_ids: Tensor
    blocks: tuple[tuple[int, int], ...]
    source: Tensor
    real: Tensor
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
    if not widths:
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


def pack(batch: TensorDict) -> Packed:
    """Lay the tokens of a batch out flat. Rows without tokens take no place.

    Raises:
        MissingColumn: there are no ``input_ids``.

    >>> ids = torch.tensor([[5, 6, 0], [7, 8, 9]])
    >>> pack(TensorDict({"input_ids": ids}, batch_size=[2])).input_ids.tolist()
    [5, 6, 0, 7, 8, 9]
    """
    require(batch, "input_ids", reader="pack")
    ids = batch["input_ids"]
    device, width = ids.device, ids.shape[-1]
    sizes = lengths(batch).flatten()
    order = torch.argsort(sizes, stable=True)
    order = order[sizes[order] > 0]
    layout = blocks(sizes[order].tolist())
    starts, ends, position, owner = 0, 0, [], []
    for rows, wide in layout:
        starts, ends = ends, ends + rows
        position.append(torch.arange(wide, device=device).expand(rows, wide).flatten())
        owner.append(order[starts:ends, None].expand(rows, wide).flatten())
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    positions, owners = torch.cat([empty, *position]), torch.cat([empty, *owner])
    source = owners * width + positions
    return Packed(
        input_ids=ids.reshape(-1)[source],
        position_ids=positions,
        blocks=tuple(layout),
        source=source,
        real=positions < sizes[owners],
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
    flat = values.new_zeros((tokens.shape.numel(), *values.shape[1:]))
    flat = flat.index_put((tokens.source[tokens.real],), values[tokens.real])
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
