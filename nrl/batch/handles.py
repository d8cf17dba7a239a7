"""Heavy columns: a batch has a handle of numbers that other processes hold, and a mesh opens it.

A handle is a tensor without numbers. It has a shape and a dtype, so a batch with it is checked, cut, joined and padded
as any other. Whoever computes with it gets the numbers, which then do come through this program.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.utils._pytree import tree_map

from nrl.errors import MutatedBatch

__all__ = ["ColumnHandle", "ColumnPart", "fill_column", "handle_of", "handles_of", "stand_ins", "without_handles"]


class ColumnPart(NamedTuple):
    """The part of a column that comes from one source.

    Args:
        source: a future of a tensor that other processes hold (`nrl.runtime.mesh.futures.RemoteFuture`).
        rows: ``[n]`` int64, of the source.
        places: ``[n]`` int64, which rows of the column they are.
        tail: the shape of a row. What is beyond it in the source has been cut off, and where the column's rows are
            larger, they have zeros on the right.
    """

    source: Any
    rows: Tensor
    places: Tensor
    tail: tuple[int, ...]


class ColumnHandle(Tensor):
    """A column whose numbers other processes hold; `handle_of` makes it.

    Taking rows, joining, cutting and padding make other handles. Everything else fetches the numbers.
    """

    parts: tuple[ColumnPart, ...]

    @staticmethod
    def __new__(cls, parts: Sequence[ColumnPart], shape: Sequence[int], dtype: torch.dtype) -> "ColumnHandle":
        """Create a tensor of this shape without memory."""
        handle: ColumnHandle = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype)
        handle.parts = tuple(part for part in parts if len(part.rows))
        return handle

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Make another handle where that can be done; otherwise compute with the numbers.

        Raises:
            MutatedBatch: the function writes.
        """
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            raise MutatedBatch(
                f"{func} writes into a column that other processes hold; batches are values: use an out-of-place "
                "operation"
            )
        result = _CARRIED[func](*args, **kwargs) if func in _CARRIED else None
        return func(*tree_map(_fetch, args), **tree_map(_fetch, kwargs)) if result is None else result

    @property
    def like(self) -> Tensor:
        """Zeros of the same shape and dtype, without memory."""
        return torch.zeros((), dtype=self.dtype).expand(self.shape)

    def tolist(self) -> Any:
        """Fetch the numbers, as lists."""
        return self.fetch().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Fetch the numbers, as an array."""
        return self.fetch().numpy(force=force)

    def fetch(self) -> Tensor:
        """Fetch the numbers."""
        return fill_column(self.shape, self.dtype, self.parts, [part.source.result()[part.rows] for part in self.parts])

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.fetch().__reduce_ex__(protocol)  # References to processes have no meaning elsewhere.

    def __deepcopy__(self, memo: Any) -> "ColumnHandle":
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ColumnHandle({list(self.shape)}, {self.dtype})"


def handle_of(value: Any) -> Any:
    """Return a handle of a value that other processes hold row by row; any other value is returned as it is.

    >>> handle_of(3)
    3
    """
    like = getattr(value, "like", None)
    if isinstance(value, Tensor) or like is None or not value.rows:
        return value
    rows = torch.arange(len(like))
    return ColumnHandle([ColumnPart(value, rows, rows, tuple(like.shape[1:]))], like.shape, like.dtype)


def fill_column(
    shape: Sequence[int], dtype: torch.dtype, parts: Sequence[ColumnPart], values: Sequence[Tensor]
) -> Tensor:
    """Assemble a column from the rows of its parts.

    Args:
        shape: of the column.
        dtype: of the column.
        parts: of it.
        values: for each part, its rows of the source. One that is the whole column is returned as it is.

    >>> part = ColumnPart(None, torch.tensor([4, 7]), torch.tensor([1, 0]), (1,))
    >>> fill_column([2, 3], torch.int64, [part], [torch.tensor([[5, 9], [6, 9]])])
    tensor([[6, 0, 0],
            [5, 0, 0]])
    """
    size = torch.Size(shape)
    column = torch.zeros(size, dtype=dtype)
    for part, value in zip(parts, values, strict=True):
        if value.shape == size == (len(part.rows), *part.tail) and torch.equal(part.places, torch.arange(size[0])):
            return value
        slices: list[Any] = [slice(0, width) for width in part.tail]
        column[(part.places, *slices)] = value[(slice(None), *slices)]
    return column


def handles_of(batch: TensorDict) -> dict[str, ColumnHandle]:
    """Return the columns of a batch that are handles, by name."""
    return {str(name): value for name, value in batch.items() if isinstance(value, ColumnHandle)}


def without_handles(batch: TensorDict) -> TensorDict:
    """Return the columns that are not handles, locked; the batch itself, if it has no handles."""
    handles = handles_of(batch)
    return batch.exclude(*handles).lock_() if handles else batch


def stand_ins(batch: TensorDict) -> TensorDict:
    """Return a locked batch with zeros in place of handles, for readers of shapes; the batch, if it has none."""
    handles = handles_of(batch)
    out = batch.copy() if handles else batch
    for name, handle in handles.items():
        out.set(name, handle.like)
    return out.lock_() if handles else batch


def _fetch(value: Any) -> Any:
    return value.fetch() if isinstance(value, ColumnHandle) else value


# What handles do themselves: torch's functions, each with its arguments; None: it takes the numbers


def _same(column: ColumnHandle, **_: Any) -> ColumnHandle:
    return ColumnHandle(column.parts, column.shape, column.dtype)


def _zeros(column: ColumnHandle, shape: Sequence[int], **how: Any) -> Tensor:
    return column.like.new_zeros(shape, **how)


def _take_rows(column: ColumnHandle, dim: int, index: Tensor) -> ColumnHandle | None:
    """Select rows, in this order."""
    if dim % column.ndim:
        return None
    parts = []
    for part in column.parts:
        source_rows = torch.full((len(column),), -1)
        source_rows[part.places] = part.rows
        rows = source_rows[index]
        places = torch.nonzero(rows >= 0)[:, 0]
        parts.append(part._replace(rows=rows[places], places=places))
    return ColumnHandle(parts, (len(index), *column.shape[1:]), column.dtype)


def _index_rows(column: ColumnHandle, indices: Sequence[Tensor | None]) -> ColumnHandle | None:
    index = indices[0]
    if len(indices) > 1 or index is None or index.ndim != 1:
        return None
    return _take_rows(column, 0, torch.arange(len(column))[index])


def _slice_column(
    column: ColumnHandle, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> ColumnHandle | None:
    axis = dim % column.ndim
    if axis == 0:
        return _take_rows(column, 0, torch.arange(len(column))[start:end:step])
    if start or step != 1:
        return None
    size = len(range(column.shape[axis])[:end])

    def cut_part(part: ColumnPart) -> ColumnPart:
        tail = list(part.tail)
        tail[axis - 1] = min(size, tail[axis - 1])
        return part._replace(tail=tuple(tail))

    shape = *column.shape[:axis], size, *column.shape[axis + 1 :]
    return ColumnHandle([cut_part(part) for part in column.parts], shape, column.dtype)


def _join_columns(columns: Sequence[Tensor], dim: int = 0) -> ColumnHandle | None:
    """Concatenate rows, or pad them on the right with local zeros."""
    template = torch.cat([torch.empty(column.shape, dtype=column.dtype, device="meta") for column in columns], dim)
    if dim % template.ndim:
        first, *padding = columns
        if not isinstance(first, ColumnHandle) or first.dtype != template.dtype or any(map(_says_more, padding)):
            return None
        return ColumnHandle(first.parts, template.shape, template.dtype)
    parts_by_source: dict[Any, list[ColumnPart]] = {}
    begin = 0
    for column in columns:
        if not isinstance(column, ColumnHandle) or column.dtype != template.dtype:
            return None
        for part in column.parts:
            parts_by_source.setdefault((id(part.source), part.tail), []).append(
                part._replace(places=part.places + begin)
            )
        begin += len(column)
    parts = [
        ColumnPart(
            group[0].source, torch.cat([x.rows for x in group]), torch.cat([x.places for x in group]), group[0].tail
        )
        for group in parts_by_source.values()
    ]
    return ColumnHandle(parts, template.shape, template.dtype)


def _says_more(column: Tensor) -> bool:
    return isinstance(column, ColumnHandle) or bool(column.any())


_ATEN: Any = torch.ops.aten
_CARRIED: dict[Any, Callable[..., Tensor | None]] = {
    _ATEN.alias.default: _same,
    _ATEN.cat.default: _join_columns,
    _ATEN.clone.default: _same,
    _ATEN.detach.default: _same,
    _ATEN.index.Tensor: _index_rows,
    _ATEN.index_select.default: _take_rows,
    _ATEN.new_zeros.default: _zeros,
    _ATEN.slice.Tensor: _slice_column,
}
