"""Batches as values: locked TensorDicts of tensors, which no function changes.

A column at position ``t`` describes token ``t``. Rows are right-padded. `nrl.COLUMNS` is the vocabulary. Other columns
are carried along, as `nrl.declare` says.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from nrl.arguments import check_argument, checked, register_kind
from nrl.batch.columns import COLUMNS, Column, kind_of
from nrl.batch.handles import handle_of
from nrl.batch.ragged import is_ragged, memory_of
from nrl.errors import ColumnError, MissingColumn, MutatedBatch
from nrl.flags import flag

__all__ = ["Batch", "assign", "check_batch", "forbid_writes", "lengths", "memoize", "require"]

_ANSWERS: Any = WeakTensorKeyDictionary()  # values of `memoize`

Batch = TensorDict
"""An immutable batch; an alias of TensorDict, so that losses take any, locked or not.

>>> batch = Batch({"input_ids": torch.tensor([[5, 6]])}, batch_size=[1])
>>> batch["input_ids"].shape
torch.Size([1, 2])
"""


def _instead_of_batch(value: Any) -> str:
    if isinstance(value, Mapping):
        return "give a batch: nrl.Batch(columns, batch_size=[rows]), with a tensor for each column"
    if isinstance(value, list | tuple) and value and all(isinstance(item, TensorDict) for item in value):
        return "give one batch: nrl.concatenate(batches)"
    return "give a batch, such as nrl.data.supervised(rows, tokenizer) or nrl.rollout(...) makes one"


register_kind(TensorDict, _instead_of_batch, words="a batch")


def check_batch(caller: str, batch: Any) -> None:
    """Check that an argument ``batch`` is one.

    Raises:
        ArgumentError: the argument is no batch.

    >>> check_batch("assign", {"rewards": torch.ones(2)})
    Traceback (most recent call last):
    nrl.errors.ArgumentError: assign: batch is a dict; give a batch: nrl.Batch(columns, batch_size=[rows]), with a \
tensor for each column
    """
    if not isinstance(batch, TensorDict):
        check_argument(caller, "batch", batch, TensorDict)


@checked("assign")
def assign(batch: TensorDict, **columns: Any) -> Batch:
    """Add or replace columns: the only way to change a batch, and it returns a new one.

    Waits for values with ``.result()``, except heavy columns of other processes: for these the batch has a handle,
    opened by meshes, and numbers are fetched only for computing in this process. Columns are constants: detached
    tensors in the memory of the given ones, so do not write into these afterwards. Rows with a false ``valid`` have
    their ``loss_mask`` cleared, whichever of the two is assigned.

    Args:
        batch: any TensorDict; it is left as it is.
        **columns: tensors, or futures of tensors. Those in `COLUMNS` are checked for dtype and shape. Columns that are
            ragged are jagged nested tensors, or nested batches of them.

    Raises:
        ColumnError: a column has the wrong type, dtype or shape; or a shape that may mean two things, and nobody has
            declared which (see `nrl.declare`); or ``attention_mask`` is not right-padded.

    >>> batch = Batch({"input_ids": torch.tensor([[5, 6]])}, batch_size=[1])
    >>> sorted(assign(batch, rewards=torch.tensor([1.0])).keys())
    ['input_ids', 'rewards']
    """
    values = {name: _constant(name, _here(name, value)) for name, value in columns.items()}
    width = _width({**dict(batch.items()), **values}, batch.ndim)
    for name, value in values.items():
        _check(name, value, batch.batch_size, width)
    if "input_ids" in values:
        for name, value in batch.items():
            if str(name) not in values:
                _check(str(name), value, batch.batch_size, width)
    out = batch.copy()
    for name, value in values.items():
        out.set(name, value)
    if {"valid", "loss_mask"} & values.keys() and "valid" in out.keys() and "loss_mask" in out.keys():
        out.set("loss_mask", out["loss_mask"] & out["valid"].unsqueeze(-1))
    return cast(Batch, out.lock_())


def _here(name: str, value: Any) -> Any:
    """Return the value of a future, or a handle of a heavy column."""
    if name in COLUMNS and COLUMNS[name].heavy:
        value = handle_of(value)
    return value.result() if hasattr(value, "result") else value


def _width(columns: Mapping[str, Any], dim: int) -> int | None:
    """Return the width of a batch in tokens, from its ids or another column that is per token."""
    names = ["input_ids", *(name for name, column in COLUMNS.items() if column.per == "token")]
    widths = (columns[name].shape[-1] for name in names if name in columns and columns[name].ndim == dim + 1)
    return next(widths, None)


def _constant(name: str, value: Any) -> Any:
    if not isinstance(value, Tensor | TensorDict):
        raise ColumnError(
            f"assign: column '{name}' is a {type(value).__name__}; give a torch tensor (or a future of one)"
        )
    # Locking the batch locks nested TensorDicts, which must not be the caller's: detach makes new ones
    return value.detach() if isinstance(value, TensorDict) or value.requires_grad else value


def _check(name: str, value: Any, size: torch.Size, width: int | None) -> None:
    ragged = is_ragged(value)
    if not isinstance(value, TensorDict) and value.is_nested and not (ragged and len(size) == 1):
        raise ColumnError(
            f"assign: column '{name}' is a nested tensor, of the layout {value.layout}, and the batch has batch size "
            f"{list(size)}; it must be torch.nested.nested_tensor(rows, layout=torch.jagged), with an entry for each "
            "row of a batch size [B]"
        )
    shape = [value.shape[0], "j", *value.shape[2:]] if ragged else list(value.shape)
    message = f"assign: column '{name}' has shape {shape}"
    if value.shape[: len(size)] != size:
        raise ColumnError(
            f"{message}, but the batch has batch size {list(size)}; its first dimensions must be the batch's"
        )
    kind = kind_of(name, value, len(size), width, "assign")
    if (kind == "ragged") != ragged and not isinstance(value, TensorDict):
        raise ColumnError(
            f"{message}, and it is {'' if kind == 'ragged' else 'per '}{kind}; ragged columns, and no others, are "
            "jagged nested tensors (torch.nested.nested_tensor(rows, layout=torch.jagged)), or batches of them"
        )
    if kind == "ragged" or (name not in COLUMNS and kind == "row"):
        return
    column = COLUMNS.get(name, Column(kind, None, "", entry=(0, value.ndim)))
    dtypes = (column.dtype, torch.float64) if column.dtype == torch.float32 else (column.dtype,)
    if column.dtype is not None and value.dtype not in dtypes:
        raise ColumnError(
            f"assign: column '{name}' has dtype {value.dtype}; it must be {column.dtype} "
            f"(convert it with .to({column.dtype}))"
        )
    smallest, largest = column.entry
    per_token, rest = kind == "token", shape[len(size) :]
    wrong = not smallest <= len(rest) - per_token <= largest
    if per_token and (wrong or (width is not None and rest[0] != width)):
        expected = [*size, "T" if width is None else width, *"k" * smallest]
        raise ColumnError(f"{message}; it is per token, so it must have shape {expected}, as wide as input_ids")
    if wrong:
        raise ColumnError(f"{message}; it is per row, so it must have shape {list(size)}")
    if name == "attention_mask" and bool((value[..., 1:] & ~value[..., :-1]).any()):
        raise ColumnError(
            "assign: 'attention_mask' has a false before a true; rows are right-padded, so move the padding to the end"
        )


def require(batch: TensorDict, *columns: str, reader: str = "this function") -> None:
    """Check that a batch has columns. The error names the missing one, its reader, the others, and how to add it.

    Raises:
        MissingColumn: the first of ``columns`` that the batch does not have.

    >>> require(Batch({"rewards": torch.zeros(2)}, batch_size=[2]), "rewards", reader="my_loss")
    """
    present = sorted(str(key) for key in batch.keys())
    for name in columns:
        if name not in present:
            hint = COLUMNS[name].hint if name in COLUMNS else f"Add it with assign(batch, {name}=...)."
            raise MissingColumn(reader, name, present, hint)


def lengths(batch: TensorDict) -> Tensor:
    """The number of real tokens in each row: ``[*B]`` int64, from ``attention_mask``; without one, the full width.

    >>> lengths(Batch({"input_ids": torch.zeros(2, 3, dtype=torch.int64)}, batch_size=[2])).tolist()
    [3, 3]
    """
    if "attention_mask" in batch.keys():
        # Several times as fast as a sum in int64
        return cast(Tensor, batch["attention_mask"].sum(-1, dtype=torch.int32).long())
    require(batch, "input_ids", reader="lengths")
    ids = batch["input_ids"]
    return torch.full(ids.shape[:-1], ids.shape[-1], dtype=torch.int64, device=ids.device)


@contextmanager
def forbid_writes(batch: TensorDict, caller: str) -> Iterator[None]:
    """With ``NRL_DEBUG=1``, catch a function that writes into its batch; otherwise do nothing.

    Compares the version counters that torch keeps for every tensor, before and after.

    Raises:
        MutatedBatch: it wrote; the message names the function and the columns.
    """
    if not flag("NRL_DEBUG"):
        yield
        return
    before = {key: (value, value._version) for key, value in _leaves(batch).items() if not value.is_inference()}
    names = set(_leaves(batch))
    yield
    after = _leaves(batch)
    written = names ^ set(after)
    for key, (value, version) in before.items():
        if key in after and (after[key] is not value or value._version != version):
            written.add(key)
    if written:
        raise MutatedBatch(
            f"{caller} wrote into its batch: {', '.join(sorted(written))}. Batches are values; use an out-of-place "
            "operation, or clone the column first"
        )


def _leaves(batch: TensorDict) -> dict[str, Tensor]:
    leaves = {str(key): cast(Tensor, value) for key, value in batch.items(include_nested=True, leaves_only=True)}
    return {key: memory_of(value) for key, value in leaves.items()}


def memoize[T](tensor: Tensor, key: Hashable, find: Callable[[], T]) -> T:
    """Call a function of a tensor once, and remember its value until somebody writes into the tensor.

    Args:
        tensor: all that ``find`` reads.
        key: the key of the value, besides the tensor.
        find: computes the value, which nobody may change.

    >>> mask = torch.ones(2, 3, dtype=torch.bool)
    >>> memoize(mask, "tokens", lambda: int(mask.sum())), memoize(mask, "tokens", lambda: 0)
    (6, 6)
    """
    if tensor.is_inference():  # its writes are not counted
        return find()
    written, answers = _ANSWERS.get(tensor, (-1, {}))
    if written != tensor._version:
        answers = {}
        _ANSWERS[tensor] = tensor._version, answers
    if key not in answers:
        answers[key] = find()
    answer: T = answers[key]
    return answer
