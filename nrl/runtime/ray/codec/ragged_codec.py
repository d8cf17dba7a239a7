"""A codec of batches without padding: only a row's tokens travel, and the receiver pads the row again.

A column of a batch is as wide as its longest row. Beyond its tokens a row nearly always holds one number, mostly zero:
this number travels once, whatever the column's name. A column whose padding holds different numbers travels in full, as
does a column without an entry for each token. A row of a ragged column travels with its own entries.
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

__all__ = ["BatchLayout", "UnpaddedBatch", "decode_batch"]

_BITS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_ALIGNED = 8  # the alignment of a column, in bytes


class _ColumnLayout(NamedTuple):
    """The layout of a column: its dtype, its shape without the first dimension, and the bits in its padding.

    Where ``filler`` is None, its rows travel whole.
    """

    dtype: torch.dtype
    tail: tuple[int, ...]
    filler: int | None


class _RaggedLayout(NamedTuple):
    """The layout of a ragged column: the dtype and the shape of an entry."""

    dtype: torch.dtype
    tail: tuple[int, ...]


class _RaggedSource(NamedTuple):
    """The memory of a ragged column, the size of an entry in bytes, and the bounds of each row's entries."""

    memory: memoryview
    size: int
    ends: list[int]


class BatchLayout(NamedTuple):
    """The layout of a batch, which is the same for any of its rows.

    Args:
        tail: the batch size without the first dimension.
        across: rows of tokens in a row of the batch: two in a batch of pairs.
        width: the width of a padded row, in tokens.
        columns: layouts of columns and of nested batches by name, in order.
    """

    tail: tuple[int, ...]
    across: int
    width: int
    columns: "dict[str, _ColumnLayout | _RaggedLayout | BatchLayout]"


@attrs.frozen
class UnpaddedBatch:
    """A batch that is ready to travel, in whole or in parts.

    Args:
        layout: the layout of its rows.
        count: the number of rows.
        lengths: the length of each row of tokens.
        sources: for each column, in order: its memory, the bytes of a row, and the bytes of a token's entry; 0: its
            rows travel in full. For a ragged column, its entries.

    >>> mask = torch.tensor([[True, True, False], [True, False, False]])
    >>> batch = TensorDict({"attention_mask": mask, "versions": torch.where(mask, 7, -1)}, batch_size=[2])
    >>> unpadded = UnpaddedBatch.from_batch(batch)
    >>> decode_batch(unpadded.layout, unpadded.encode_rows([1]))["versions"].tolist()
    [[7, -1, -1]]
    """

    layout: BatchLayout
    count: int
    lengths: tuple[int, ...]
    sources: list[tuple[memoryview, int, int] | _RaggedSource]

    @classmethod
    def from_batch(cls, batch: TensorDict) -> Self | None:
        """Make an unpadded batch; None: the batch has no known padding, or holds more than ordinary tensors."""
        mask = batch.get("attention_mask", None)
        has_mask = type(mask) is Tensor and mask.dtype == torch.bool and mask.ndim > batch.ndim > 0 and mask.numel() > 0
        if type(batch) is not TensorDict or not has_mask or not all(map(_is_ordinary, _iter_leaves(batch))):
            return None
        lengths: tuple[int, ...] = memoize(
            mask, "rows", lambda: tuple(mask.flatten(0, -2).sum(-1, dtype=torch.int32).tolist())
        )
        if min(lengths) == mask.shape[-1]:
            return None
        sources: list[tuple[memoryview, int, int] | _RaggedSource] = []
        return cls(_make_layout(batch, mask, lengths, sources), len(batch), lengths, sources)

    def encode_rows(self, index: Sequence[int] | None = None) -> bytes:
        """Encode the rows of an index, or all: their number, their lengths, and their columns one after the other."""
        chosen = range(self.count) if index is None else index
        across = self.layout.across
        token_rows = [row * across + offset for row in chosen for offset in range(across)]
        lengths = [self.lengths[row] for row in token_rows]
        parts: list[Any] = [struct.pack(f"<{1 + len(token_rows)}q", len(chosen), *lengths)]
        tokens = sum(lengths)
        for source in self.sources:
            if isinstance(source, _RaggedSource):
                parts += _encode_ragged_rows(source, chosen)
                continue
            memory, stride, size = source
            if size:
                starts = [row * stride for row in token_rows]
                ends = [start + length * size for start, length in zip(starts, lengths, strict=True)]
                parts += [memory[start:end] for start, end in zip(starts, ends, strict=True)]
                parts.append(bytes(-tokens * size % _ALIGNED))
            else:
                parts += [memory[row * stride : (row + 1) * stride] for row in chosen]
                parts.append(bytes(-len(chosen) * stride % _ALIGNED))
        return b"".join(parts)


def _encode_ragged_rows(source: _RaggedSource, chosen: Sequence[int]) -> Iterator[Any]:
    """Yield the number of entries of each row, and the entries."""
    memory, size, ends = source
    counts = [ends[row + 1] - ends[row] for row in chosen]
    yield struct.pack(f"<{len(counts)}q", *counts)
    for row in chosen:
        yield memory[ends[row] * size : ends[row + 1] * size]
    yield bytes(-sum(counts) * size % _ALIGNED)


def decode_batch(layout: BatchLayout, data: Any) -> TensorDict:
    """Return a locked batch of the rows of `UnpaddedBatch.encode_rows`; columns without padding share ``data``."""
    memory = np.frombuffer(data, dtype=np.uint8)
    count = int(memory[:8].view(np.int64)[0])
    end = 8 * (1 + count * layout.across)
    lengths: list[int] = memory[8:end].view(np.int64).tolist()
    tokens, full = sum(lengths), all(length == layout.width for length in lengths)
    offset = end

    def read_column(column: _ColumnLayout) -> Tensor:
        nonlocal offset
        row = math.prod(column.tail) * column.dtype.itemsize  # bytes
        size = 0 if column.filler is None else row // (layout.across * layout.width)
        length = tokens * size if size else count * row
        numbers = memory[offset : offset + length]
        offset += length + -length % _ALIGNED
        if column.filler is not None and not full:
            numbers = _pad_rows(numbers, lengths, layout.width * size, size, column.dtype.itemsize, column.filler)
        if numbers.size == 0:
            return torch.empty((count, *column.tail), dtype=column.dtype)
        return torch.from_numpy(numbers).view(column.dtype).view(count, *column.tail)

    def read_ragged(column: _RaggedLayout) -> Tensor:
        nonlocal offset
        offsets = torch.zeros(1 + count, dtype=torch.int64)
        offsets[1:] = torch.from_numpy(memory[offset : offset + 8 * count].view(np.int64)).cumsum(0)
        offset += 8 * count
        length = int(offsets[-1]) * math.prod(column.tail) * column.dtype.itemsize
        numbers = memory[offset : offset + length]
        offset += length + -length % _ALIGNED
        shape = int(offsets[-1]), *column.tail
        if not length:
            return of_values(torch.empty(shape, dtype=column.dtype), offsets)
        return of_values(torch.from_numpy(numbers).view(column.dtype).view(shape), offsets)

    def read_batch(batch: BatchLayout) -> TensorDict:
        columns: dict[str, Tensor | TensorDict] = {}
        for name, column in batch.columns.items():
            match column:
                case BatchLayout():
                    columns[name] = read_batch(column)
                case _RaggedLayout():
                    columns[name] = read_ragged(column)
                case _ColumnLayout():
                    columns[name] = read_column(column)
        return TensorDict(columns, batch_size=[count, *batch.tail])

    full_batch = read_batch(layout)
    full_batch.lock_()
    return full_batch


def _pad_rows(data: Any, lengths: Sequence[int], row: int, size: int, item: int, filler: int) -> Any:
    """Pad rows to ``row`` bytes: ``size`` bytes for each token, then the filler, a number of ``item`` bytes."""
    count = len(lengths) * row // item
    # The system's pages of zeros take no memory before the first write.
    numbers = np.full(count, filler, _BITS[item]) if filler else np.zeros(count, _BITS[item])
    rows, start = numbers.view(np.uint8).reshape(len(lengths), row), 0
    for index, length in enumerate(lengths):
        rows[index, : length * size] = data[start : start + length * size]
        start += length * size
    return numbers.view(np.uint8)


def _is_ordinary(value: Any) -> bool:
    value = memory_of(value)
    return type(value) is Tensor and value.layout is torch.strided and not (value.is_quantized or value.requires_grad)


def _iter_leaves(batch: TensorDict) -> Iterator[Any]:
    for value in batch.values():
        if type(value) is TensorDict:
            yield from _iter_leaves(value)
        else:
            yield value


def _make_layout(batch: TensorDict, mask: Tensor, lengths: tuple[int, ...], sources: list[Any]) -> BatchLayout:
    across, width = math.prod(mask.shape[1:-1]), mask.shape[-1]
    columns: dict[str, _ColumnLayout | _RaggedLayout | BatchLayout] = {}
    value: Any
    for name, value in batch.items():
        if isinstance(value, TensorDict):
            columns[str(name)] = _make_layout(value, mask, lengths, sources)
            continue
        if is_ragged(value):
            values, offsets = parts_of(value)
            columns[str(name)] = _RaggedLayout(values.dtype, tuple(values.shape[1:]))
            memory = memoryview(flat_bytes(_to_contiguous(values)).numpy())
            sources.append(_RaggedSource(memory, math.prod(values.shape[1:]) * values.dtype.itemsize, offsets.tolist()))
            continue
        plain = _to_contiguous(value)
        per_token = value.shape[: mask.ndim] == mask.shape and value.dtype.itemsize in _BITS and value.numel() > 0
        filler: int | None = None
        if per_token:
            key = "padding", width, lengths
            filler = memoize(value, key, functools.partial(_find_filler, plain, lengths, width))
        columns[str(name)] = _ColumnLayout(value.dtype, tuple(value.shape[1:]), filler)
        stride = plain[0].numel() * value.dtype.itemsize // (1 if filler is None else across)
        memory = memoryview(flat_bytes(plain).numpy())
        sources.append((memory, stride, 0 if filler is None else stride // width))
    return BatchLayout(tuple(batch.batch_size[1:]), across, width, columns)


def _to_contiguous(value: Tensor) -> Tensor:
    return value.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _find_filler(plain: Tensor, lengths: Sequence[int], width: int) -> int | None:
    """Find the bits that fill a column beyond its tokens; None: they differ. A negative zero is a zero."""
    bits = flat_bytes(plain).numpy().view(_BITS[plain.dtype.itemsize])
    rows = bits.reshape(len(lengths), width, -1)
    beyond = [rows[index, length:] for index, length in enumerate(lengths) if length < width]
    any_bits = functools.reduce(operator.or_, (int(np.bitwise_or.reduce(part, axis=None)) for part in beyond))
    if any_bits == 0 or (plain.is_floating_point() and any_bits == 1 << (8 * plain.dtype.itemsize - 1)):
        return 0
    all_bits = functools.reduce(operator.and_, (int(np.bitwise_and.reduce(part, axis=None)) for part in beyond))
    return any_bits if any_bits == all_bits else None
