"""Ragged columns: as many entries a row as the row has of something, such as images.

They are torch's nested tensors of the layout ``torch.jagged``, ``[B, j, ...]``. TensorDict cuts, joins and locks them.
Here is what torch does not do with one alone.
"""

import itertools
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nrl.batch.raw import flat_bytes

__all__ = ["is_ragged", "make_ragged", "memory_of", "number_rows", "of_values", "parts_of", "rows_of", "take"]


# Where the first nested tensor is made, torch warns of something that concerns torch.fx alone
logging.getLogger("torch.fx._symbolic_trace").addFilter(lambda record: "is_fx_tracing" not in str(record.msg))


def is_ragged(value: Any) -> bool:
    """Return whether a value is a jagged nested tensor of contiguous rows.

    >>> is_ragged(make_ragged([torch.zeros(2, 3), torch.zeros(0, 3)])), is_ragged(torch.zeros(2))
    (True, False)
    """
    if not isinstance(value, Tensor) or value.layout is not torch.jagged:
        return False
    nested: Any = value
    return nested._ragged_idx == 1 and nested._lengths is None


def make_ragged(rows: Sequence[Tensor]) -> Tensor:
    """Join the entries of all rows into one column.

    Args:
        rows: for each its entries, ``[j, ...]``; j differs, and may be 0.

    >>> make_ragged([torch.tensor([1, 2]), torch.tensor([3])]).offsets().tolist()
    [0, 2, 3]
    """
    offsets = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    return of_values(torch.cat(list(rows)), offsets)


def of_values(values: Tensor, offsets: Tensor) -> Tensor:
    """Make a ragged column from values and offsets, in their memory.

    Args:
        values: ``[N, ...]``, the entries of all rows, one row after the other.
        offsets: ``[B + 1]`` int64, where each row begins, and N.
    """
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def parts_of(column: Tensor) -> tuple[Tensor, Tensor]:
    """Return the arguments of `of_values`; values are the same tensor object, so that writes are detected.

    >>> [part.tolist() for part in parts_of(make_ragged([torch.tensor([1, 2]), torch.tensor([3])]))]
    [[1, 2, 3], [0, 2, 3]]
    """
    nested: Any = column
    return nested._values, nested._offsets


def memory_of(column: Tensor) -> Tensor:
    """Return the tensor whose version counter counts writes to a column: itself, or the values of a ragged one."""
    return parts_of(column)[0] if is_ragged(column) else column


def rows_of(column: Tensor) -> list[Tensor]:
    """Return the entries of each row.

    >>> [row.tolist() for row in rows_of(make_ragged([torch.tensor([1, 2]), torch.tensor([3])]))]
    [[1, 2], [3]]
    """
    values, offsets = parts_of(column)
    ends: list[int] = offsets.tolist()
    return [values[start:end] for start, end in itertools.pairwise(ends)]


def take(value: Any, index: Tensor) -> Any:
    """Select rows of a tensor or a batch, ragged or not, in this order.

    >>> rows_of(take(make_ragged([torch.tensor([1, 2]), torch.tensor([3])]), torch.tensor([1])))
    [tensor([3])]
    """
    if not is_ragged(value):
        return value[index]
    if len(index) == 0:
        return of_values(parts_of(value)[0][:0], torch.zeros(1, dtype=torch.int64))
    rows = rows_of(value)
    return make_ragged([rows[row] for row in index.tolist()])


def number_rows(column: Tensor) -> np.ndarray:
    """Number the rows of a column, ragged or not, so that equal rows, and no others, have the same number.

    Returns:
        ``[B]`` int64.

    >>> number_rows(make_ragged([torch.tensor([1, 2]), torch.tensor([3]), torch.tensor([1, 2])])).tolist()
    [0, 1, 0]
    """
    rows = rows_of(column) if is_ragged(column) else list(column)
    number_of: dict[Any, int] = {}
    return np.array([number_of.setdefault(_content(row), len(number_of)) for row in rows], dtype=np.int64)


def _content(row: Tensor) -> tuple[tuple[int, ...], bytes]:
    return tuple(row.shape), flat_bytes(row.detach().cpu()).numpy().tobytes()
