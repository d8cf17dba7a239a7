"""The two forms in which packed rows lie: rectangles, and sequences one after the other.

Both lay out the same tokens, and what is computed on them is the same. `Rectangles` are best on a CPU. `Sequences` are
what varlen kernels and context parallelism take.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from nrl.arguments import register_kind

__all__ = ["After", "Block", "Packing", "Rectangles", "Runs", "Sequences", "blocks"]

_BLOCK_COST = 50
"""The cost of one more block, a call of the attention kernel, in tokens of padding."""


class Runs(NamedTuple):
    """Tokens of rows that lie side by side, in the order in which they lie.

    Args:
        owner: ``[n]`` int64, the row of the batch that the tokens are from.
        start: ``[n]`` int64, the first of them; 0, or as many as the row has in common with others.
        stop: ``[n]`` int64, the end of them.
        width: ``[n]`` int64, how many places they take; those after ``stop`` are padding.
    """

    owner: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    width: np.ndarray


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


class Rectangles(NamedTuple):
    """Rows sorted by length, in blocks of rows of like length; the common beginnings of rows are rows of their own.

    Inside a block, causal attention is exact without a mask, since no real token comes after padding.

    Args:
        blocks: in the order of the tokens; their areas add up to N.
        real: ``[N]`` bool, false for the little padding that is left inside blocks.

    >>> rows, _ = Rectangles.of(np.array([3, 2, 4]), np.array([0, 1, 0]), np.array([2, 2, 2]))
    >>> [(block.rows, block.width) for block in rows.blocks]
    [(2, 2), (2, 2)]
    >>> rows.real.tolist()
    [True, True, True, True, True, False, True, True]
    """

    blocks: tuple[Block, ...]
    real: Tensor

    @classmethod
    def of(cls, sizes: np.ndarray, stem: np.ndarray, shared: np.ndarray) -> tuple[Self, Runs]:
        """Blocks for the first ``shared`` tokens of each stem, and then for the rest of the rows.

        Args:
            sizes: ``[B]`` int64, the tokens of each row.
            stem: ``[B]`` int64, a row of the same set, as from `nrl.batch.prefixes.common_prefixes`.
            shared: ``[B]`` int64, the number of first tokens that the set has in common; all tokens of a row alone.
        """
        none = np.zeros(0, dtype=np.int64)
        blocks: list[Block] = []
        runs = [Runs(none, none, none, none)]
        rank = np.zeros_like(stem)
        for block, members in _blocks(np.unique(stem[sizes > 0]), shared):
            blocks.append(block)
            runs.append(Runs(members, np.zeros_like(members), shared[members], np.full_like(members, block.width)))
        for number, (stems, *_) in enumerate(runs[1:]):
            rank[stems] = np.arange(len(stems))
            tails = np.flatnonzero(np.isin(stem, stems) & (sizes > shared))
            for block, members in _blocks(tails, sizes - shared):
                after = After(number, torch.from_numpy(rank[stem[members]]), torch.from_numpy(shared[members]))
                blocks.append(block._replace(after=after))
                runs.append(Runs(members, shared[members], sizes[members], np.full_like(members, block.width)))
        all_runs = Runs(*(np.concatenate(parts) for parts in zip(*runs, strict=True)))
        column, width = _within(all_runs.width), np.repeat(all_runs.stop - all_runs.start, all_runs.width)
        return cls(tuple(blocks), torch.from_numpy(column < width)), all_runs

    @property
    def cost(self) -> int:
        """Return the measure that decides whether beginnings are shared, in tokens."""
        return len(self.real) + _BLOCK_COST * len(self.blocks)

    def to(self, device: torch.device) -> Self:
        """The same with its tensors there."""
        moved = []
        for block in self.blocks:
            after = block.after
            if after is not None:
                after = after._replace(row=after.row.to(device), length=after.length.to(device))
            moved.append(block._replace(after=after))
        return self._replace(blocks=tuple(moved), real=self.real.to(device))


class Sequences(NamedTuple):
    """Rows one after the other, in the order of the batch, without any padding; row s may continue an earlier one.

    The fields have the names of FlashAttention's ``flash_attn_varlen_func``. torch's ``varlen_attn`` calls them
    ``cu_seq_q``, ``cu_seq_k``, ``max_q`` and ``max_k``, Megatron's ``PackedSeqParams`` (``qkv_format="thd"``)
    ``cu_seqlens_q``, ``cu_seqlens_kv``, ``max_seqlen_q`` and ``max_seqlen_kv``. Queries are ``[N, heads, D]``. Keys and
    values are ``[K, heads, D]``: ``keys`` puts those of its prefix before a row's own. Then the causal mask is aligned
    to the lower right, so that a row's last query sees its last key. It is what FlashAttention and torch mean by
    causal; Transformer Engine calls it ``padding_causal_bottom_right``.

    Args:
        cu_seqlens_q: ``[S + 1]`` int32; the own tokens of row s are those from ``cu_seqlens_q[s]`` to
            ``cu_seqlens_q[s + 1]``. It ends with N.
        cu_seqlens_k: ``[S + 1]`` int32, the same for keys: of the prefix and then of the own tokens.
        max_seqlen_q: the most own tokens of a row.
        max_seqlen_k: the most keys of a row.
        keys: ``[K]`` int64, the token among the N of each key, to ``index_select`` with; None: all tokens in their
            order, because no row continues another. Then ``cu_seqlens_k`` equals ``cu_seqlens_q``.
        parent: ``[S]`` int64, the row that each row continues, which comes earlier and continues none; -1: none.
        shared: ``[S]`` int64, how many first tokens of its parent a row continues; 0 without a parent.

    >>> rows, _ = Sequences.of(np.array([3, 2, 4]), np.array([0, 1, 0]), np.array([2, 2, 2]))
    >>> rows.cu_seqlens_q.tolist(), rows.parent.tolist(), rows.shared.tolist()
    ([0, 3, 5, 7], [-1, -1, 0], [0, 0, 2])
    >>> rows.cu_seqlens_k.tolist(), rows.keys.tolist()
    ([0, 3, 5, 9], [0, 1, 2, 3, 4, 0, 1, 5, 6])
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    keys: Tensor | None
    parent: Tensor
    shared: Tensor

    @classmethod
    def of(cls, sizes: np.ndarray, stem: np.ndarray, shared: np.ndarray) -> tuple[Self, Runs]:
        """Each stem whole, and of the other rows what comes after their first ``shared`` tokens, if anything does.

        Args:
            sizes: ``[B]`` int64, the tokens of each row.
            stem: ``[B]`` int64, a row of the same set, as from `nrl.batch.prefixes.common_prefixes`.
            shared: ``[B]`` int64, the number of first tokens that the set has in common; all tokens of a row alone.
        """
        start = np.where(stem == np.arange(len(stem)), 0, shared)
        members = np.flatnonzero(sizes > start)
        start, stop = start[members], sizes[members]
        number = np.zeros_like(stem)
        number[members] = np.arange(len(members))
        parent = np.where(start > 0, number[stem[members]], -1)
        begin, begin_k = _cumulative(stop - start), _cumulative(stop)
        keys = None
        if start.any():
            column, before = _within(stop), np.repeat(start, stop)
            of_parent, of_own = np.repeat(begin[parent], stop), np.repeat(begin[:-1] - start, stop)
            keys = torch.from_numpy(np.where(column < before, of_parent, of_own) + column)
        packed = cls(
            cu_seqlens_q=torch.from_numpy(begin.astype(np.int32)),
            cu_seqlens_k=torch.from_numpy(begin_k.astype(np.int32)),
            max_seqlen_q=int((stop - start).max(initial=0)),
            max_seqlen_k=int(stop.max(initial=0)),
            keys=keys,
            parent=torch.from_numpy(parent),
            shared=torch.from_numpy(start),
        )
        return packed, Runs(members, start, stop, stop - start)

    @property
    def cost(self) -> int:
        """Return the measure that decides whether beginnings are shared: tokens, since gathering keys is cheap."""
        return int(self.cu_seqlens_q[-1])

    def to(self, device: torch.device) -> Self:
        """The same with its tensors there."""
        return self._replace(
            cu_seqlens_q=self.cu_seqlens_q.to(device),
            cu_seqlens_k=self.cu_seqlens_k.to(device),
            keys=None if self.keys is None else self.keys.to(device),
            parent=self.parent.to(device),
            shared=self.shared.to(device),
        )


type Packing = type[Rectangles] | type[Sequences]
register_kind(
    Packing, lambda value: "give nrl.Rectangles or nrl.Sequences", lambda value: value in (Rectangles, Sequences)
)
"""How rows are packed: the form in which they lie."""


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


def _blocks(rows: np.ndarray, widths: np.ndarray) -> list[tuple[Block, np.ndarray]]:
    """Rectangles for some rows, each with its rows."""
    rows = rows[np.argsort(widths[rows], kind="stable")]
    cut = blocks(widths[rows].tolist(), _BLOCK_COST)
    ends = np.cumsum([count for count, _ in cut], dtype=np.int64)
    return [(Block(*shape), members) for shape, members in zip(cut, np.split(rows, ends), strict=False)]


def _cumulative(lengths: np.ndarray) -> np.ndarray:
    """Return the start of each run, and the end of the last."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)])


def _within(lengths: np.ndarray) -> np.ndarray:
    """The numbers from 0 of each of several runs: 0 1 2, 0 1, 0 1 2 3."""
    begin = _cumulative(lengths)
    numbers: np.ndarray = np.arange(begin[-1]) - np.repeat(begin[:-1], lengths)
    return numbers
