"""Sending batches without padding: only a row's tokens travel, and the receiver pads the row again.

A column of a batch is as wide as its longest row. Beyond its tokens a row nearly always holds one number, mostly zero:
that number travels once. Names play no part. A column whose padding holds different numbers travels whole, and so does
one that has no entry for each token. Of a ragged column each row brings its own entries.
"""

import functools
import math
import operator
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

import attrs
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from nrl.batch.ragged import is_ragged, memory_of, of_values, parts_of
from nrl.batch.raw import flat_bytes
from nrl.batch.values import memoize

__all__ = ["BatchLayout", "Unpadded", "padded"]

_BITS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_ALIGNED = 8  # bytes of which the beginning of a column is a multiple


class _ColumnLayout(NamedTuple):
    """The layout of a column: its dtype, its shape without the first dimension, and the bits in its padding.

    Where ``filler`` is None, its rows travel whole.
    """

    dtype: torch.dtype
    tail: tuple[int, ...]
    filler: int | None


class _Ragged(NamedTuple):
    """How a ragged column arrives: the dtype and the shape of an entry."""

    dtype: torch.dtype
    tail: tuple[int, ...]


class _Entries(NamedTuple):
    """The memory of a ragged column, the bytes of an entry, and where the entries of each row begin and end."""

    memory: memoryview
    size: int
    ends: list[int]


class BatchLayout(NamedTuple):
    """The layout of a batch, which is the same for any of its rows.

    Args:
        tail: the batch size without the first dimension.
        across: how many rows of tokens a row of the batch has: two, where it is a pair.
        width: of a padded row, in tokens.
        columns: layouts of columns and of nested batches by name, in order.
    """

    tail: tuple[int, ...]
    across: int
    width: int
    columns: "dict[str, _ColumnLayout | _Ragged | BatchLayout]"


@attrs.frozen
class Unpadded:
    """A batch that is ready to travel, in whole or in parts.

    Args:
        layout: of any of its rows.
        count: of its rows.
        lengths: of each row of tokens.
        sources: for each column, in order: its memory, the bytes of a row, and those of a token's entry; 0: its rows
            travel whole. Of a ragged column, its entries.

    >>> mask = torch.tensor([[True, True, False], [True, False, False]])
    >>> batch = TensorDict({"attention_mask": mask, "versions": torch.where(mask, 7, -1)}, batch_size=[2])
    >>> found = Unpadded.of(batch)
    >>> padded(found.layout, found.rows([1]))["versions"].tolist()
    [[7, -1, -1]]
    """

    layout: BatchLayout
    count: int
    lengths: tuple[int, ...]
    sources: list[tuple[memoryview, int, int] | _Entries]

    @classmethod
    def of(cls, batch: TensorDict) -> Self | None:
        """Make one of a batch; None: it has no known padding, or holds more than ordinary tensors."""
        mask = batch.get("attention_mask", None)
        known = type(mask) is Tensor and mask.dtype == torch.bool and mask.ndim > batch.ndim > 0 and mask.numel() > 0
        if type(batch) is not TensorDict or not known or not all(map(_is_ordinary, _leaves(batch))):
            return None
        lengths: tuple[int, ...] = memoize(
            mask, "rows", lambda: tuple(mask.flatten(0, -2).sum(-1, dtype=torch.int32).tolist())
        )
        if min(lengths) == mask.shape[-1]:
            return None
        sources: list[tuple[memoryview, int, int] | _Entries] = []
        return cls(_layout(batch, mask, lengths, sources), len(batch), lengths, sources)

    def rows(self, index: Sequence[int] | None = None) -> bytes:
        """Some rows, or all, as bytes: their number, their lengths, and their columns one after the other."""
        chosen = range(self.count) if index is None else index
        across = self.layout.across
        each = [row * across + place for row in chosen for place in range(across)]
        lengths = [self.lengths[row] for row in each]
        parts: list[Any] = [struct.pack(f"<{1 + len(each)}q", len(chosen), *lengths)]
        tokens = sum(lengths)
        for source in self.sources:
            if isinstance(source, _Entries):
                parts += _ragged_rows(source, chosen)
                continue
            memory, stride, size = source
            if size:
                starts = [row * stride for row in each]
                ends = [start + length * size for start, length in zip(starts, lengths, strict=True)]
                parts += [memory[start:end] for start, end in zip(starts, ends, strict=True)]
                parts.append(bytes(-tokens * size % _ALIGNED))
            else:
                parts += [memory[row * stride : (row + 1) * stride] for row in chosen]
                parts.append(bytes(-len(chosen) * stride % _ALIGNED))
        return b"".join(parts)


def _ragged_rows(source: _Entries, chosen: Sequence[int]) -> Iterator[Any]:
    """How many entries each row has, and they."""
    memory, size, ends = source
    counts = [ends[row + 1] - ends[row] for row in chosen]
    yield struct.pack(f"<{len(counts)}q", *counts)
    for row in chosen:
        yield memory[ends[row] * size : ends[row + 1] * size]
    yield bytes(-sum(counts) * size % _ALIGNED)


def padded(layout: BatchLayout, data: Any) -> TensorDict:
    """A locked batch of the rows that `Unpadded.rows` wrote; columns without padding lie in ``data``."""
    memory = np.frombuffer(data, dtype=np.uint8)
    count = int(memory[:8].view(np.int64)[0])
    end = 8 * (1 + count * layout.across)
    lengths: list[int] = memory[8:end].view(np.int64).tolist()
    tokens, full = sum(lengths), all(length == layout.width for length in lengths)
    at = end

    def column(made: _ColumnLayout) -> Tensor:
        nonlocal at
        row = math.prod(made.tail) * made.dtype.itemsize  # bytes
        size = 0 if made.filler is None else row // (layout.across * layout.width)
        taken = tokens * size if size else count * row
        there = memory[at : at + taken]
        at += taken + -taken % _ALIGNED
        if made.filler is not None and not full:
            there = _pad_rows(there, lengths, layout.width * size, size, made.dtype.itemsize, made.filler)
        if there.size == 0:
            return torch.empty((count, *made.tail), dtype=made.dtype)
        return torch.from_numpy(there).view(made.dtype).view(count, *made.tail)

    def entries(made: _Ragged) -> Tensor:
        nonlocal at
        offsets = torch.zeros(1 + count, dtype=torch.int64)
        offsets[1:] = torch.from_numpy(memory[at : at + 8 * count].view(np.int64)).cumsum(0)
        at += 8 * count
        taken = int(offsets[-1]) * math.prod(made.tail) * made.dtype.itemsize
        there = memory[at : at + taken]
        at += taken + -taken % _ALIGNED
        shape = int(offsets[-1]), *made.tail
        values = torch.from_numpy(there).view(made.dtype).view(shape) if taken else torch.empty(shape, dtype=made.dtype)
        return of_values(values, offsets)

    def batch(made: BatchLayout) -> TensorDict:
        columns: dict[str, Tensor | TensorDict] = {}
        for name, x in made.columns.items():
            match x:
                case BatchLayout():
                    columns[name] = batch(x)
                case _Ragged():
                    columns[name] = entries(x)
                case _ColumnLayout():
                    columns[name] = column(x)
        return TensorDict(columns, batch_size=[count, *made.tail])

    whole = batch(layout)
    whole.lock_()
    return whole


def _pad_rows(data: Any, lengths: Sequence[int], row: int, size: int, item: int, filler: int) -> Any:
    """Rows of ``row`` bytes: ``size`` bytes for each token, then the filler, a number of ``item`` bytes."""
    count = len(lengths) * row // item
    # The system's pages of zeros take no memory before somebody writes into them
    whole = np.full(count, filler, _BITS[item]) if filler else np.zeros(count, _BITS[item])
    rows, start = whole.view(np.uint8).reshape(len(lengths), row), 0
    for place, length in enumerate(lengths):
        rows[place, : length * size] = data[start : start + length * size]
        start += length * size
    return whole.view(np.uint8)


def _is_ordinary(value: Any) -> bool:
    value = memory_of(value)
    return type(value) is Tensor and value.layout is torch.strided and not (value.is_quantized or value.requires_grad)


def _leaves(batch: TensorDict) -> Iterator[Any]:
    for value in batch.values():
        if type(value) is TensorDict:
            yield from _leaves(value)
        else:
            yield value


def _layout(batch: TensorDict, mask: Tensor, lengths: tuple[int, ...], sources: list[Any]) -> BatchLayout:
    across, width = math.prod(mask.shape[1:-1]), mask.shape[-1]
    columns: dict[str, _ColumnLayout | _Ragged | BatchLayout] = {}
    value: Any
    for name, value in batch.items():
        if isinstance(value, TensorDict):
            columns[str(name)] = _layout(value, mask, lengths, sources)
            continue
        if is_ragged(value):
            values, offsets = parts_of(value)
            columns[str(name)] = _Ragged(values.dtype, tuple(values.shape[1:]))
            memory = memoryview(flat_bytes(_contiguous(values)).numpy())
            sources.append(_Entries(memory, math.prod(values.shape[1:]) * values.dtype.itemsize, offsets.tolist()))
            continue
        plain = _contiguous(value)
        per_token = value.shape[: mask.ndim] == mask.shape and value.dtype.itemsize in _BITS and value.numel() > 0
        filler: int | None = None
        if per_token:
            asked = "padding", width, lengths
            filler = memoize(value, asked, functools.partial(_filler, plain, lengths, width))
        columns[str(name)] = _ColumnLayout(value.dtype, tuple(value.shape[1:]), filler)
        stride = plain[0].numel() * value.dtype.itemsize // (1 if filler is None else across)
        memory = memoryview(flat_bytes(plain).numpy())
        sources.append((memory, stride, 0 if filler is None else stride // width))
    return BatchLayout(tuple(batch.batch_size[1:]), across, width, columns)


def _contiguous(value: Tensor) -> Tensor:
    return value.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _filler(plain: Tensor, lengths: Sequence[int], width: int) -> int | None:
    """The bits that a column holds everywhere beyond its tokens; None: they differ. A negative zero is a zero."""
    bits = flat_bytes(plain).numpy().view(_BITS[plain.dtype.itemsize])
    rows = bits.reshape(len(lengths), width, -1)
    beyond = [rows[place, length:] for place, length in enumerate(lengths) if length < width]
    some = functools.reduce(operator.or_, (int(np.bitwise_or.reduce(part, axis=None)) for part in beyond))
    if some == 0 or (plain.is_floating_point() and some == 1 << (8 * plain.dtype.itemsize - 1)):
        return 0
    same = functools.reduce(operator.and_, (int(np.bitwise_and.reduce(part, axis=None)) for part in beyond))
    return some if some == same else None
