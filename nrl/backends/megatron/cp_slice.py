"""The tokens of a micro-batch that a process computes on: all of them, or, along cp, its part."""

from typing import NamedTuple

import torch
from torch import Tensor

from nrl.backends.training.layout.h2d import copy_to_device
from nrl.backends.training.layout.microbatch_plan import Plan
from nrl.backends.training.layout.packed_attention import RectangleAttention, SequenceAttention, make_attention
from nrl.batch.packed_rows import Block, Rectangles, Sequences

__all__ = ["Tokens", "pad_rows", "slice_rows", "slice_tokens"]


class Tokens(NamedTuple):
    """Some of the flat tokens of a micro-batch.

    Args:
        input_ids: ``[1, n]`` int64, on the device.
        position_ids: ``[1, n]`` int64, on the device.
        attention: over them.
        places: ``[m]`` int64, on the device, those among them whose hidden states are read.
        read: ``[m]`` int64, on the CPU, which of the plan's places these are.
        reads: ``[n]`` int64, on the device, how many outputs are read at each of them.
        routes: ``[n, layers, k]`` int16, on the CPU, the experts of each; None: routers choose.
    """

    input_ids: Tensor
    position_ids: Tensor
    attention: RectangleAttention | SequenceAttention
    places: Tensor
    read: Tensor
    reads: Tensor
    routes: Tensor | None


def slice_tokens(plan: Plan, min_tokens: int, multiple: int, count: int, rank: int, device: torch.device) -> Tokens:
    """Return the tokens that one of ``count`` processes along cp computes on.

    Args:
        plan: from `nrl.backends.training.layout.microbatch_plan.plan`, with packed rows.
        min_tokens: how many tokens all processes have together at least; padding fills them up.
        multiple: of which the number of a process's tokens has to be.
        count: of processes along cp.
        rank: of this one.
        device: where to.
    """
    assert plan.rows is not None
    assert plan.places is not None
    ids, positions = plan.inputs["input_ids"][0], plan.inputs["position_ids"][0]
    size = max(len(ids), min_tokens)
    missing = size - len(ids) + -size % (multiple * (1 if count == 1 else 2 * count))
    ids, positions = (torch.nn.functional.pad(x, (0, missing)) for x in (ids, positions))
    rows = pad_rows(plan.rows, missing)
    mine = torch.arange(len(ids))
    if count > 1:
        assert isinstance(rows, Sequences)
        mine, rows = slice_rows(rows, len(ids), count, rank)
    where = torch.full((len(ids),), -1)
    where[mine] = torch.arange(len(mine))
    places = where[plan.places]
    read = torch.nonzero(places >= 0)[:, 0]
    ids, positions = (x[mine][None] for x in (ids, positions))
    routes = plan.routes
    if routes is not None:
        any_legal = torch.arange(routes.shape[2], dtype=routes.dtype).expand(missing, *routes.shape[1:])
        routes = torch.cat([routes, any_legal])[mine]
    local_places = places[read]
    reads = torch.bincount(local_places, minlength=len(mine))  # here, since on a GPU it would wait
    ids, positions, rows, local_places, reads = copy_to_device((ids, positions, rows, local_places, reads), device)
    return Tokens(ids, positions, make_attention(rows), local_places, read, reads, routes)


def pad_rows(rows: Rectangles | Sequences, missing: int) -> Rectangles | Sequences:
    """Add a row of ``missing`` tokens, which nobody reads."""
    if missing == 0:
        return rows
    if isinstance(rows, Rectangles):
        real = torch.cat([rows.real, torch.zeros(missing, dtype=torch.bool)])
        return Rectangles((*rows.blocks, Block(1, missing)), real)
    end = int(rows.cu_seqlens_q[-1])
    padding = torch.arange(end, end + missing)
    return Sequences(
        cu_seqlens_q=_with_end(rows.cu_seqlens_q, missing),
        cu_seqlens_k=_with_end(rows.cu_seqlens_k, missing),
        max_seqlen_q=max(rows.max_seqlen_q, missing),
        max_seqlen_k=max(rows.max_seqlen_k, missing),
        keys=None if rows.keys is None else torch.cat([rows.keys, padding]),
        parent=torch.cat([rows.parent, torch.tensor([-1])]),
        shared=torch.cat([rows.shared, torch.tensor([0])]),
    )


def _with_end(cumulative: Tensor, length: int) -> Tensor:
    return torch.cat([cumulative, cumulative[-1:] + length])


def slice_rows(rows: Sequences, size: int, count: int, rank: int) -> tuple[Tensor, Sequences]:
    """Return the flat tokens that one of ``count`` processes has, and how they attend to the keys of all.

    Tokens are cut into ``2 * count`` chunks, of which process r has the r-th from the beginning and the r-th from the
    end: so all have about equally many keys before their queries.

    Args:
        rows: of all tokens.
        size: the number of tokens, a multiple of ``2 * count``.
        count: of processes.
        rank: of this one.

    Returns:
        ``[size / count]`` int64, its tokens; and the rows that they are parts of. Their keys are among those of all
        processes, gathered by rank.
    """
    chunk = size // (2 * count)

    def chunks(of: int) -> list[int]:
        return [of * chunk, (2 * count - 1 - of) * chunk]

    order = torch.cat([torch.arange(first, first + chunk) for of in range(count) for first in chunks(of)])
    gathered = torch.empty_like(order)
    gathered[order] = torch.arange(size)
    keys = torch.arange(size) if rows.keys is None else rows.keys
    begin, begin_k = rows.cu_seqlens_q.tolist(), rows.cu_seqlens_k.tolist()
    queries, seen = list[int](), list[Tensor]()
    for first in chunks(rank):
        for row in range(len(begin) - 1):
            x, y = max(begin[row], first), min(begin[row + 1], first + chunk)
            if x < y:
                after = begin[row + 1] - y  # its own tokens after the last of these queries
                queries.append(y - x)
                seen.append(gathered[keys[begin_k[row] : begin_k[row + 1] - after]])
    lengths = [len(keys_of_row) for keys_of_row in seen]
    part = Sequences(
        cu_seqlens_q=_cumulative(queries),
        cu_seqlens_k=_cumulative(lengths),
        max_seqlen_q=max(queries),
        max_seqlen_k=max(lengths),
        keys=torch.cat(seen),
        parent=torch.full((len(queries),), -1),
        shared=torch.tensor([k - q for q, k in zip(queries, lengths, strict=True)]),
    )
    return order[rank * 2 * chunk : (rank + 1) * 2 * chunk], part


def _cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
