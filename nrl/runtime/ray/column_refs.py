"""Columns that processes hold, as arguments of a call: the receiving process assembles the batch from results."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDict

from nrl.batch.handles import ColumnHandle, ColumnPart, fill_column, handles_of
from nrl.runtime.mesh.processes import RowSlice
from nrl.runtime.ray.pending_call import Call, Ref
from nrl.runtime.ray.results import Pending

__all__ = ["HeldRows", "RemoteColumn", "assemble_batch", "describe_column", "find_handles"]


class HeldRows(NamedTuple):
    """Rows of a column in results of processes.

    Args:
        results: the number of results that hold the rows.
        combine: makes one value of these results; None: the only result is the rows.
        part: the rows, and their position in the column.
    """

    results: int
    combine: Callable[[list[Any]], Any] | None
    part: ColumnPart


class RemoteColumn(NamedTuple):
    """A column that processes hold."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    held: list[HeldRows]


def find_handles(arg: TensorDict | RowSlice) -> dict[str, ColumnHandle]:
    """Return the columns of a batch, or of rows of one, that other processes hold."""
    if isinstance(arg, TensorDict):
        return handles_of(arg)
    handles = handles_of(cast(TensorDict, arg.source))
    return {name: cast(ColumnHandle, handle[arg.index]) for name, handle in handles.items()}


def describe_column(name: str, handle: ColumnHandle) -> tuple[RemoteColumn, list[Ref], list[Call]]:
    """Describe a column for `assemble_batch`; return also its results, and the calls that they are from."""
    refs: list[Ref] = []
    calls: list[Call] = []
    held = []
    for part in handle.parts:
        source: Pending = part.source
        exact = source.part(part.rows).find_exact_result()
        results = source.refs if exact is None else [exact]
        held.append(HeldRows(len(results), source.combine if exact is None else None, part._replace(source=None)))
        refs += results
        calls.append(source.call)
    return RemoteColumn(name, tuple(handle.shape), handle.dtype, held), refs, calls


def assemble_batch(columns: Sequence[RemoteColumn], values: Sequence[Any]) -> TensorDict:
    """Return the first value, a batch, locked, with columns made of the other values; runs in a process."""
    batch, remaining = values[0].copy(), iter(values[1:])
    for name, shape, dtype, held in columns:
        rows = []
        for results, combine, part in held:
            parts = list(itertools.islice(remaining, results))
            rows.append(parts[0] if combine is None else combine(parts)[part.rows])
        batch.set(name, fill_column(shape, dtype, [item.part for item in held], rows))
    locked: TensorDict = batch.lock_()
    return locked
