"""Columns that processes hold, as arguments of a call: their results go there, and the batch is put together there."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDict

from nrl.batch.handles import ColumnHandle, ColumnPart, fill_column, handles_of
from nrl.runtime.mesh.processes import Rows
from nrl.runtime.ray.pending_call import Call, Ref
from nrl.runtime.ray.results import Pending

__all__ = ["Column", "Held", "column_of", "handles_in", "opened"]


class Held(NamedTuple):
    """Rows of a column in results of processes.

    Args:
        results: how many results they are in.
        combine: makes one value of these; None: the one result is the rows.
        part: which rows, and where in the column.
    """

    results: int
    combine: Callable[[list[Any]], Any] | None
    part: ColumnPart


class Column(NamedTuple):
    """A column that processes hold."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    held: list[Held]


def handles_in(arg: TensorDict | Rows) -> dict[str, ColumnHandle]:
    """The columns of a batch, or of rows of one, that other processes hold."""
    if isinstance(arg, TensorDict):
        return handles_of(arg)
    found = handles_of(cast(TensorDict, arg.whole))
    return {name: cast(ColumnHandle, handle[arg.index]) for name, handle in found.items()}


def column_of(name: str, handle: ColumnHandle) -> tuple[Column, list[Ref], list[Call]]:
    """What `opened` has to know of a column, the results that it is made of, and the calls that these are from."""
    refs: list[Ref] = []
    calls: list[Call] = []
    held = []
    for part in handle.parts:
        source: Pending = part.source
        alone = source.part(part.rows).alone()
        some = source.refs if alone is None else [alone]
        held.append(Held(len(some), source.combine if alone is None else None, part._replace(source=None)))
        refs += some
        calls.append(source.call)
    return Column(name, tuple(handle.shape), handle.dtype, held), refs, calls


def opened(columns: Sequence[Column], values: Sequence[Any]) -> TensorDict:
    """In a process: the batch that is the first of the values, locked, with columns that are made of the others."""
    batch, left = values[0].copy(), iter(values[1:])
    for name, shape, dtype, held in columns:
        rows = []
        for results, combine, part in held:
            some = list(itertools.islice(left, results))
            rows.append(some[0] if combine is None else combine(some)[part.rows])
        batch.set(name, fill_column(shape, dtype, [each.part for each in held], rows))
    whole: TensorDict = batch.lock_()
    return whole
