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

__all__ = ["ColumnHandle", "Part", "filled", "handle_of", "handles_of", "stand_ins", "without_handles"]


class Part(NamedTuple):
    """What of a column comes from one source.

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

    parts: tuple[Part, ...]

    @staticmethod
    def __new__(cls, parts: Sequence[Part], shape: Sequence[int], dtype: torch.dtype) -> "ColumnHandle":
        """A tensor of this shape that has no memory."""
        made: ColumnHandle = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype)
        made.parts = tuple(part for part in parts if len(part.rows))
        return made

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
        found = _CARRIED[func](*args, **kwargs) if func in _CARRIED else None
        return func(*tree_map(_fetched, args), **tree_map(_fetched, kwargs)) if found is None else found

    @property
    def like(self) -> Tensor:
        """Zeros of its shape and dtype, which take no memory."""
        return torch.zeros((), dtype=self.dtype).expand(self.shape)

    def tolist(self) -> Any:
        """The numbers, as lists."""
        return self.fetch().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The numbers, as an array."""
        return self.fetch().numpy(force=force)

    def fetch(self) -> Tensor:
        """The numbers."""
        return filled(self.shape, self.dtype, self.parts, [part.source.result()[part.rows] for part in self.parts])

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.fetch().__reduce_ex__(protocol)  # what it knows of processes means nothing elsewhere

    def __deepcopy__(self, memo: Any) -> "ColumnHandle":
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ColumnHandle({list(self.shape)}, {self.dtype})"


def handle_of(value: Any) -> Any:
    """A handle of what other processes hold row by row, if its shape is known; any other value is returned as it is.

    >>> handle_of(3)
    3
    """
    like = getattr(value, "like", None)
    if isinstance(value, Tensor) or like is None or not value.rows:
        return value
    rows = torch.arange(len(like))
    return ColumnHandle([Part(value, rows, rows, tuple(like.shape[1:]))], like.shape, like.dtype)


def filled(shape: Sequence[int], dtype: torch.dtype, parts: Sequence[Part], values: Sequence[Tensor]) -> Tensor:
    """A column of the rows that its parts have.

    Args:
        shape: of the column.
        dtype: of the column.
        parts: of it.
        values: for each part, its rows of the source. One that is the whole column is returned as it is.

    >>> part = Part(None, torch.tensor([4, 7]), torch.tensor([1, 0]), (1,))
    >>> filled([2, 3], torch.int64, [part], [torch.tensor([[5, 9], [6, 9]])])
    tensor([[6, 0, 0],
            [5, 0, 0]])
    """
    size = torch.Size(shape)
    whole = torch.zeros(size, dtype=dtype)
    for part, value in zip(parts, values, strict=True):
        if value.shape == size == (len(part.rows), *part.tail) and torch.equal(part.places, torch.arange(size[0])):
            return value
        some: list[Any] = [slice(0, width) for width in part.tail]
        whole[(part.places, *some)] = value[(slice(None), *some)]
    return whole


def handles_of(batch: TensorDict) -> dict[str, ColumnHandle]:
    """The columns of a batch that are handles, by name."""
    return {str(name): value for name, value in batch.items() if isinstance(value, ColumnHandle)}


def without_handles(batch: TensorDict) -> TensorDict:
    """The columns whose numbers are here, locked; the batch itself, if all are."""
    found = handles_of(batch)
    return batch.exclude(*found).lock_() if found else batch


def stand_ins(batch: TensorDict) -> TensorDict:
    """A locked batch with zeros in the place of handles, for what reads their shapes alone; the batch, if none are."""
    found = handles_of(batch)
    out = batch.copy() if found else batch
    for name, handle in found.items():
        out.set(name, handle.like)
    return out.lock_() if found else batch


def _fetched(value: Any) -> Any:
    return value.fetch() if isinstance(value, ColumnHandle) else value


# What handles do themselves: torch's functions, each with its arguments; None: it takes the numbers


def _same(column: ColumnHandle, **_: Any) -> ColumnHandle:
    return ColumnHandle(column.parts, column.shape, column.dtype)


def _zeros(column: ColumnHandle, shape: Sequence[int], **how: Any) -> Tensor:
    return column.like.new_zeros(shape, **how)


def _taken(column: ColumnHandle, dim: int, index: Tensor) -> ColumnHandle | None:
    """Some rows, in this order."""
    if dim % column.ndim:
        return None
    parts = []
    for part in column.parts:
        known = torch.full((len(column),), -1)
        known[part.places] = part.rows
        rows = known[index]
        places = torch.nonzero(rows >= 0)[:, 0]
        parts.append(part._replace(rows=rows[places], places=places))
    return ColumnHandle(parts, (len(index), *column.shape[1:]), column.dtype)


def _indexed(column: ColumnHandle, indices: Sequence[Tensor | None]) -> ColumnHandle | None:
    index = indices[0]
    if len(indices) > 1 or index is None or index.ndim != 1:
        return None
    return _taken(column, 0, torch.arange(len(column))[index])


def _sliced(
    column: ColumnHandle, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> ColumnHandle | None:
    at = dim % column.ndim
    if at == 0:
        return _taken(column, 0, torch.arange(len(column))[start:end:step])
    if start or step != 1:
        return None
    size = len(range(column.shape[at])[:end])

    def cut(part: Part) -> Part:
        tail = list(part.tail)
        tail[at - 1] = min(size, tail[at - 1])
        return part._replace(tail=tuple(tail))

    shape = *column.shape[:at], size, *column.shape[at + 1 :]
    return ColumnHandle([cut(part) for part in column.parts], shape, column.dtype)


def _joined(columns: Sequence[Tensor], dim: int = 0) -> ColumnHandle | None:
    """Rows under one another, or padding on the right: zeros that are here."""
    made = torch.cat([torch.empty(column.shape, dtype=column.dtype, device="meta") for column in columns], dim)
    if dim % made.ndim:
        first, *others = columns
        if not isinstance(first, ColumnHandle) or first.dtype != made.dtype or any(map(_says_more, others)):
            return None
        return ColumnHandle(first.parts, made.shape, made.dtype)
    found: dict[Any, list[Part]] = {}
    begin = 0
    for column in columns:
        if not isinstance(column, ColumnHandle) or column.dtype != made.dtype:
            return None
        for part in column.parts:
            found.setdefault((id(part.source), part.tail), []).append(part._replace(places=part.places + begin))
        begin += len(column)
    parts = [
        Part(some[0].source, torch.cat([x.rows for x in some]), torch.cat([x.places for x in some]), some[0].tail)
        for some in found.values()
    ]
    return ColumnHandle(parts, made.shape, made.dtype)


def _says_more(column: Tensor) -> bool:
    return isinstance(column, ColumnHandle) or bool(column.any())


_ATEN: Any = torch.ops.aten
_CARRIED: dict[Any, Callable[..., Tensor | None]] = {
    _ATEN.alias.default: _same,
    _ATEN.cat.default: _joined,
    _ATEN.clone.default: _same,
    _ATEN.detach.default: _same,
    _ATEN.index.Tensor: _indexed,
    _ATEN.index_select.default: _taken,
    _ATEN.new_zeros.default: _zeros,
    _ATEN.slice.Tensor: _sliced,
}
