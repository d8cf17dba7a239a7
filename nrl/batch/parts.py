"""Splitting batches into parts and joining them again."""

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from nrl.arguments import checked
from nrl.batch.columns import COLUMNS, kind_of
from nrl.batch.ragged import is_ragged, make_ragged, rows_of, take
from nrl.batch.values import Batch, lengths, memoize, require
from nrl.errors import BatchError

__all__ = [
    "Parts",
    "concatenate",
    "deal",
    "microbatches",
    "minibatches",
    "pad",
    "restore",
    "rows_of_microbatches",
    "rows_of_shards",
    "shard",
]


class Parts(list[Batch]):
    """The parts of a batch, and the rows of each part, so that outputs can be put back into the batch's order.

    >>> whole = Batch({"input_ids": torch.arange(6).view(3, 2)}, batch_size=[3])
    >>> parts = shard(whole, 2)
    >>> bool((parts.restore([part["input_ids"] for part in parts]) == whole["input_ids"]).all())
    True
    """

    def __init__(self, batch: TensorDict, rows: Sequence[Tensor], *, trim: bool = False) -> None:
        self.rows = list(rows)
        row_lengths = lengths(batch) if trim else None
        super().__init__(_take(batch, index, row_lengths) for index in self.rows)

    def restore(self, outputs: Sequence[Any]) -> Any:
        """Put outputs of the parts back into the order of the batch, as the function `restore` does."""
        return restore(self.rows, outputs)


def restore(rows: Sequence[Tensor], outputs: Sequence[Any], *, caller: str = "restore") -> Any:
    """Put rows that were computed in parts back into their order; the inverse of splitting.

    Args:
        rows: for each part, its rows of the whole.
        outputs: for each part, a tensor or batch with an entry for each of its rows.
        caller: how errors name the caller.

    Returns:
        The whole, in new memory.

    Raises:
        BatchError: an output does not have one entry for each row of its part.

    >>> restore([torch.tensor([2]), torch.tensor([0, 1])], [torch.tensor([30]), torch.tensor([10, 20])]).tolist()
    [10, 20, 30]
    """
    if not rows:
        raise BatchError(f"{caller}: there are no parts to put together")
    for index, output in zip(rows, outputs, strict=True):
        if not isinstance(output, Tensor | TensorDict) or output.ndim == 0 or output.shape[0] != len(index):
            received = list(output.shape) if isinstance(output, Tensor | TensorDict) else type(output).__name__
            raise BatchError(
                f"{caller}: the part has {len(index)} rows, but what was computed on it is {received}; "
                "return one entry for each row, or sums (merged)"
            )
    joined: Any = _put_together(rows, outputs)
    return joined.lock_() if isinstance(joined, TensorDict) else joined


def _put_together(rows: Sequence[Tensor], outputs: Sequence[Any]) -> Any:
    """Copy each row once, to its place, if the outputs are alike; otherwise let torch concatenate, or complain."""
    first = outputs[0]
    if all(_are_alike(output, first) for output in outputs):
        columns = {name: _put_together(rows, [output[name] for output in outputs]) for name in first.keys()}
        return TensorDict(columns, batch_size=[sum(map(len, rows)), *first.batch_size[1:]])
    if isinstance(first, Tensor) and all(map(is_ragged, outputs)):
        joined: Any = make_ragged([row for output in outputs for row in rows_of(output)])
        return take(joined, torch.argsort(torch.cat(list(rows))))
    if len({_kind(output) for output in outputs}) == 1 and isinstance(first, Tensor):
        column = first.new_empty((sum(map(len, rows)), *first.shape[1:]))
        for index, output in zip(rows, outputs, strict=True):
            column.index_copy_(0, index.to(column.device), output)
        return column
    joined = torch.cat(cast(Any, outputs))
    return joined[torch.argsort(torch.cat(list(rows))).to(joined.device)]


def _are_alike(first: Any, second: Any) -> bool:
    same_columns = type(first) is type(second) is TensorDict and set(first.keys()) == set(second.keys())
    return same_columns and all(map(_no_subclass, first.values()))


def _kind(value: Any) -> Any:
    return (value.dtype, value.device, value.shape[1:]) if isinstance(value, Tensor) else type(value)


def _no_subclass(value: Any) -> bool:
    return type(value) in (Tensor, TensorDict)


def _take(batch: TensorDict, rows: Tensor, row_lengths: Tensor | None) -> Batch:
    if row_lengths is not None and len(rows) > 0:  # cut before rows are copied, so that no padding is
        batch = _resize(batch, max(1, int(row_lengths[rows].max())), "microbatches")
    return cast(Batch, batch[rows].lock_())


@checked("shard")
def shard(batch: TensorDict, n: int) -> Parts:
    """Split rows into ``n`` parts of about equal numbers of tokens; ``.restore`` puts outputs back in order.

    Longest row first, each to the part with the fewest tokens, which is within 4/3 of the best. Pairs of a preference
    batch are rows here, so none is split. With fewer rows than parts, some parts have no rows.

    Raises:
        BatchError: ``n`` is not positive.

    >>> mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]], dtype=torch.bool)
    >>> batch = Batch({"input_ids": mask.long(), "attention_mask": mask}, batch_size=[3])
    >>> [rows.tolist() for rows in shard(batch, 2).rows]
    [[0], [1, 2]]
    """
    return Parts(batch, deal(batch, n))


def deal(batch: TensorDict, n: int) -> list[Tensor]:
    """The rows that `shard` gives to each of ``n`` parts, without making the parts; computed once for each mask.

    Raises:
        BatchError: ``n`` is not positive.

    >>> [rows.tolist() for rows in deal(Batch({"input_ids": torch.zeros(3, 2)}, batch_size=[3]), 2)]
    [[0, 2], [1]]
    """
    if n < 1:
        raise BatchError(f"shard: n is {n}; it must be at least 1")
    _check_rows("shard", batch)

    def rows() -> list[Tensor]:
        row_lengths = lengths(batch)
        tokens = row_lengths.flatten(1).sum(1) if row_lengths.ndim > 1 else row_lengths
        return [torch.tensor(part, dtype=torch.int64) for part in rows_of_shards(tokens.tolist(), n)]

    read = batch["attention_mask" if "attention_mask" in batch.keys() else "input_ids"]  # the column of `lengths`
    return list(memoize(read, ("deal", n), rows))


def rows_of_shards(tokens: Sequence[int], n: int) -> list[list[int]]:
    """Deal rows to ``n`` parts: longest first, each to the part with the fewest tokens; ties: fewest rows, then first.

    Args:
        tokens: of each row.
        n: at least 1.

    Returns:
        The rows of each part, in their order.

    >>> rows_of_shards([1, 3, 1, 2], 2)
    [[1, 2], [0, 3]]
    """
    rows: list[list[int]] = [[] for _ in range(n)]
    parts = [(0, 0, part) for part in range(n)]  # a heap: tokens, rows, which
    for row in sorted(range(len(tokens)), key=lambda row: (-tokens[row], row)):
        load, count, part = parts[0]
        rows[part].append(row)
        heapq.heapreplace(parts, (load + tokens[row], count + 1, part))
    return [sorted(part) for part in rows]


def _check_rows(caller: str, batch: TensorDict) -> None:
    require(batch, "input_ids", reader=caller)
    if batch.ndim == 0:
        raise BatchError(
            f"{caller}: splitting takes at least one batch dimension; create the batch with batch_size=[B]"
        )


@checked("microbatches")
def microbatches(batch: TensorDict, *, max_tokens: int) -> Parts:
    """Split a batch into padded batches of at most ``max_tokens`` tokens each, padding counted.

    Rows of like length go together and each part is cut to its longest row. A pair counts as its two rows.

    Raises:
        BatchError: one row alone has more than ``max_tokens`` tokens.

    >>> mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]], dtype=torch.bool)
    >>> batch = Batch({"input_ids": mask.long(), "attention_mask": mask}, batch_size=[3])
    >>> [list(part["input_ids"].shape) for part in microbatches(batch, max_tokens=4)]
    [[1, 3], [2, 2]]
    """
    _check_rows("microbatches", batch)
    row_lengths = lengths(batch).flatten(1) if batch.ndim > 1 else lengths(batch).unsqueeze(1)
    widths = (row_lengths.amax(1).clamp(min=1) * row_lengths.shape[1]).tolist() if len(row_lengths) else []
    return Parts(batch, [torch.tensor(rows) for rows in rows_of_microbatches(widths, max_tokens)], trim=True)


def rows_of_microbatches(widths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Choose the rows of each micro-batch: at most ``max_tokens`` tokens, padding counted, and rows of like width.

    Args:
        widths: of each row, in tokens.
        max_tokens: bound on rows times the widest of them.

    Returns:
        Row numbers of each rectangle, widest first, so that the one that needs the most memory comes first.

    Raises:
        BatchError: a row alone is wider than ``max_tokens``.

    >>> rows_of_microbatches([3, 1, 2, 1], max_tokens=4)
    [[0], [2, 1], [3]]
    """
    order = sorted(range(len(widths)), key=lambda row: (-widths[row], row))
    if order and widths[order[0]] > max_tokens:
        raise BatchError(
            f"microbatches: row {order[0]} has {widths[order[0]]} tokens, more than max_tokens={max_tokens}; "
            "raise max_tokens, or leave out rows that long"
        )
    groups: list[list[int]] = []
    widest = 0
    for row in order:
        if not groups or (len(groups[-1]) + 1) * widest > max_tokens:
            groups.append([])
            widest = max(1, widths[row])
        groups[-1].append(row)
    return groups


@checked("minibatches")
def minibatches(batch: TensorDict, n: int, seed: int) -> list[Batch]:
    """Split the rows at random into ``n`` batches for several updates on one batch; sizes differ by at most one row.

    The rows of an episode that forked (``episode_ids``) stay together, so that it counts once in an epoch. Then the
    numbers of episodes differ by at most one.

    Raises:
        BatchError: ``n`` is not between 1 and the number of rows, or of episodes.

    >>> batch = Batch({"input_ids": torch.arange(6).view(3, 2)}, batch_size=[3])
    >>> [len(part) for part in minibatches(batch, 2, seed=0)]
    [2, 1]
    """
    episode = _episodes(batch)
    counts = torch.bincount(episode)
    if not 1 <= n <= len(counts):
        unit = "rows" if len(counts) == len(batch) else "episodes"
        raise BatchError(f"minibatches: n is {n}; it must be between 1 and the number of {unit}, {len(counts)}")
    order = torch.randperm(len(counts), generator=torch.Generator().manual_seed(seed))
    rows = order.argsort()[episode].argsort(stable=True)
    return list(Parts(batch, rows.split([int(part.sum()) for part in counts[order].tensor_split(n)])))


def _episodes(batch: TensorDict) -> Tensor:
    """Return the episode of each row, numbered in the order of first rows: ``[B]`` int64."""
    places = torch.arange(len(batch))
    if batch.ndim > 1 or "episode_ids" not in batch.keys():
        return places
    unique_ids, episode = batch["episode_ids"].unique(return_inverse=True)
    first = places.new_full((len(unique_ids),), len(batch)).scatter_reduce(0, episode, places, "amin")
    return first.argsort().argsort()[episode]


@checked("pad")
def pad(batch: TensorDict, width: int) -> Batch:
    """Pad every per-token column on the right to ``width`` tokens, with zeros (masks: false).

    ``turns`` and ``versions`` have -1 there, as wherever nothing was sampled, and so has ``routes``.

    Raises:
        BatchError: the batch is wider than that.
        ColumnError: of a column nobody has said whether it is per token; see `nrl.declare`.

    >>> pad(Batch({"input_ids": torch.tensor([[5, 6]])}, batch_size=[1]), 3)["input_ids"].tolist()
    [[5, 6, 0]]
    """
    require(batch, "input_ids", reader="pad")
    if batch["input_ids"].shape[-1] > width:
        raise BatchError(f"pad: the batch is {batch['input_ids'].shape[-1]} tokens wide, more than width={width}")
    return cast(Batch, _resize(batch, width, "pad").lock_())


def _resize(batch: TensorDict, width: int, caller: str) -> TensorDict:
    """Cut or pad the columns that are per token, on the right."""
    old, dim = batch["input_ids"].shape[-1], batch.ndim
    out = batch.copy()
    if "attention_mask" not in batch.keys() and width > old:
        out.set("attention_mask", torch.ones_like(batch["input_ids"], dtype=torch.bool))
    for name, value in out.items():
        if kind_of(str(name), value, dim, old, caller) == "token":
            short = value.narrow(dim, 0, min(old, width))
            filler = short.new_zeros((*short.shape[:dim], width - short.shape[dim], *short.shape[dim + 1 :]))
            if name in COLUMNS and COLUMNS[name].padding:
                filler.fill_(COLUMNS[name].padding)
            out.set(name, torch.cat([short, filler], dim) if width > old else short)
    return out


@checked("concatenate")
def concatenate(batches: Sequence[TensorDict]) -> Batch:
    """Put batches under one another, padded to the widest.

    If some of them lack a column, it gets its default, if `COLUMNS` has one: an absent ``valid`` is true. Numbers that
    only some rollouts report (``reward/<name>``, ``env/<name>``, and their entries of each turn in ``components`` and
    ``info``) are NaN elsewhere, as in the rows of one rollout.

    Raises:
        BatchError: ``batches`` is empty, or a batch lacks a column without a default.

    >>> a = Batch({"input_ids": torch.tensor([[5, 6]])}, batch_size=[1])
    >>> b = Batch({"input_ids": torch.tensor([[7]]), "valid": torch.tensor([False])}, batch_size=[1])
    >>> concatenate([a, b])["valid"].tolist()
    [True, False]
    """
    if not batches:
        raise BatchError("concatenate: there are no batches to put together")
    if len({(batch.ndim, *batch.batch_size[1:]) for batch in batches}) > 1:
        sizes = ", ".join(str(list(batch.batch_size)) for batch in batches)
        raise BatchError(f"concatenate: the batch sizes {sizes} differ in more than the first dimension")
    names = sorted({str(name) for batch in batches for name in batch.keys()})
    width = max(
        (batch["input_ids"].shape[-1] for batch in batches if "input_ids" in batch.keys()),
        default=0,
    )
    if width and any(_uneven(batch, width) for batch in batches):
        names = sorted({*names, "attention_mask"})
    reported = {name: _names_within(batches, name) for name in _OF_TURNS}
    filled = [_fill_columns(_with_reports(batch, reported), names, width) for batch in batches]
    return cast(Batch, torch.cat(cast(Any, filled)).lock_())  # type: ignore[attr-defined]


_OF_TURNS = ("components", "info")  # ragged columns by name, with entries for each turn
_REPORTED = ("reward/", "env/")


def _names_within(batches: Sequence[TensorDict], column: str) -> list[str]:
    return sorted({str(name) for batch in batches if column in batch.keys() for name in batch[column].keys()})


def _with_reports(batch: TensorDict, reported: Mapping[str, Sequence[str]]) -> TensorDict:
    """A batch with NaN for the numbers of turns that it does not report, where it knows its turns."""
    out = batch.copy()
    for column, names in reported.items():
        reported_columns = dict(batch[column].items()) if column in batch.keys() else {}
        if set(reported_columns) == set(names) or not (reported_columns or "turns" in batch.keys()):
            continue
        if reported_columns:
            counts = [len(row) for row in rows_of(next(iter(reported_columns.values())))]
        else:
            counts = (batch["turns"].max(-1).values + 1).tolist()
        absent = make_ragged([torch.full((count,), math.nan) for count in counts])
        out.set(
            column, Batch({name: reported_columns.get(name, absent) for name in names}, batch_size=batch.batch_size)
        )
    return out


def _uneven(batch: TensorDict, width: int) -> bool:
    return "attention_mask" in batch.keys() or ("input_ids" in batch.keys() and batch["input_ids"].shape[-1] < width)


def _fill_columns(batch: TensorDict, names: Sequence[str], width: int) -> TensorDict:
    out = batch.copy()
    for name in names:
        if name in out.keys():
            continue
        column = COLUMNS.get(name)
        if name == "attention_mask" and "input_ids" in out.keys():
            out.set(name, torch.ones_like(out["input_ids"], dtype=torch.bool))
        elif name.startswith(_REPORTED):
            out.set(name, torch.full(tuple(batch.batch_size), math.nan))
        elif column is not None and column.default is not None:
            out.set(
                name,
                torch.full(tuple(batch.batch_size), column.default, dtype=column.dtype),
            )
        else:
            raise BatchError(
                f"concatenate: one batch has the column '{name}' and another has not; assign it to all of them first"
            )
    return _resize(out, width, "concatenate") if width and "input_ids" in out.keys() else out
