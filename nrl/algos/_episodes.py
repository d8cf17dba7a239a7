"""The valid episodes of a batch; estimators and shaping count each of them once, however many rows it takes.

No statistic sees a row that ``valid`` marks false. Rows with one number in ``episode_ids`` are one episode, which has
one reward, and one place in its group.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from nrl.algos.masking import masked
from nrl.batch import require
from nrl.batch.columns import kind_of
from nrl.errors import BatchError, NotFinite

__all__ = ["Episodes", "check_finite", "episodes", "over_episodes", "row_rewards", "trained_tokens", "valid_rows"]


def valid_rows(batch: TensorDict) -> Tensor:
    """The column ``valid``, or true for all rows if the batch has none: ``[*B]`` bool.

    >>> valid_rows(TensorDict({"rewards": torch.zeros(2)}, batch_size=[2])).tolist()
    [True, True]
    """
    valid: Tensor = batch.get("valid", torch.ones(batch.batch_size, dtype=torch.bool, device=batch.device))
    return valid


def trained_tokens(batch: TensorDict) -> Tensor:
    """``loss_mask`` in valid rows: ``[*B, T]`` bool.

    `assign` keeps the mask of invalid rows empty, so this differs only in batches made by hand.

    >>> batch = TensorDict({"loss_mask": torch.tensor([[True], [True]]), "valid": torch.tensor([True, False])}, [2])
    >>> trained_tokens(batch).tolist()
    [[True], [False]]
    """
    require(batch, "loss_mask", reader="trained_tokens")
    trained: Tensor = batch["loss_mask"] & valid_rows(batch).unsqueeze(-1)
    return trained


def row_rewards(batch: TensorDict, reader: str) -> Tensor:
    """The column ``rewards``, which must hold one number a row.

    Args:
        batch: has ``rewards``.
        reader: who reads it, as a user would name it; for the error.

    Raises:
        MissingColumn: the batch lacks the column.
        BatchError: a row has several rewards.
    """
    require(batch, "rewards", reader=reader)
    rewards: Tensor = batch["rewards"]
    if rewards.ndim > len(batch.batch_size):
        raise BatchError(
            f"{reader}: rewards has shape {list(rewards.shape)}; combine a row's rewards into one first: "
            "assign(batch, rewards=batch['rewards'].sum(-1))"
        )
    return rewards


def check_finite(batch: TensorDict, column: str, reader: str) -> None:
    """Reject a column that is NaN or infinite where it counts: in valid rows, and if per token, in the mask.

    Args:
        batch: ``[B]``, has ``column``, and ``loss_mask`` if that is per token.
        column: the name of the column.
        reader: who reads it, as a user would name it; for the error.

    Raises:
        NotFinite: naming the rows.
    """
    values: Tensor = batch[column]
    per_token = kind_of(column, values, batch.ndim, None, reader) == "token"
    counts = trained_tokens(batch) if per_token else valid_rows(batch)
    wrong = ~values.isfinite() & (counts if counts.ndim == values.ndim else counts.unsqueeze(-1))
    bad = (wrong.any(-1) if wrong.ndim > 1 else wrong).nonzero().squeeze(-1).tolist()
    if bad:
        rows = ", ".join(map(str, bad[:8])) + (", ..." if len(bad) > 8 else "")
        finite = f"batch['{column}'].isfinite()"
        if per_token:
            finite = f"({finite} | ~batch['loss_mask'])"
        finite += ".all(-1)" if values.ndim > 1 else ""
        finite = f"batch['valid'] & {finite}" if "valid" in batch.keys() else finite
        raise NotFinite(
            f"{reader}: {column} is NaN or infinite in {len(bad)} valid rows ({rows}). "
            + ("A reward that could not be computed is no reward: m" if column == "rewards" else "M")
            + f"ark these rows invalid with assign(batch, valid={finite})"
        )


class Episodes(NamedTuple):
    """The m valid episodes of a batch of B rows.

    Args:
        firsts: ``[m]`` int64; the first valid row of each.
        numbers: ``[B]`` int64; which of the m episodes each row belongs to, -1 for invalid rows.

    >>> each = Episodes(torch.tensor([0, 2]), torch.tensor([0, 0, 1, -1]))
    >>> each.rows(torch.tensor([5.0, 7.0])).tolist(), each.sums(torch.tensor([1.0, 2.0, 4.0, 8.0])).tolist()
    ([5.0, 5.0, 7.0, 0.0], [3.0, 4.0])
    """

    firsts: Tensor
    numbers: Tensor

    def rows(self, values: Tensor) -> Tensor:
        """Give each row the number of its episode, and invalid rows 0: ``[m] -> [B]``."""
        return torch.cat([values, values.new_zeros(1)])[self.numbers]

    def sums(self, values: Tensor) -> Tensor:
        """Add up over the valid rows of each episode: ``[B] -> [m]``."""
        valid = self.numbers >= 0
        return values.new_zeros(len(self.firsts)).index_add(0, self.numbers[valid], values[valid])

    def tokens(self, values: Tensor, mask: Tensor) -> Tensor:
        """Give each token of the mask the number of its episode: ``[m], [B, T] -> [B, T]``, 0 elsewhere."""
        return masked(self.rows(values).unsqueeze(-1).expand(mask.shape), mask)


def episodes(batch: TensorDict, *same: str, reader: str = "episodes") -> Episodes:
    """Find the valid episodes; absent ``episode_ids``, every valid row is one.

    Args:
        batch: ``[B]``.
        *same: columns in which the rows of an episode must agree.
        reader: who asks, as a user would name it; for the error.

    Raises:
        BatchError: two valid rows of an episode differ in one of ``same``.

    >>> batch = TensorDict({"rewards": torch.tensor([1.0, 1.0, 0.0]), "episode_ids": torch.tensor([7, 7, 3])}, [3])
    >>> episodes(batch, "rewards").firsts.tolist()
    [2, 0]
    """
    rows = valid_rows(batch).nonzero().squeeze(-1)
    none = torch.full(batch.batch_size, -1, device=rows.device)
    if "episode_ids" not in batch.keys():
        return Episodes(rows, none.index_copy(0, rows, torch.arange(len(rows), device=rows.device)))
    ids, episode = batch["episode_ids"][rows].unique(return_inverse=True)
    firsts = rows.new_zeros(len(ids)).scatter_reduce(0, episode, rows, "amin", include_self=False)
    for column in same:
        differs = batch[column][rows] != batch[column][firsts][episode]
        differs = differs.any(-1) if differs.ndim > 1 else differs
        if bool(differs.any()):
            row = int(rows[differs][0])
            raise BatchError(
                f"{reader}: row {row} has another value of {column} than the first row of its episode "
                f"{int(batch['episode_ids'][row])}; the rows of an episode must agree in it"
            )
    return Episodes(firsts, none.index_copy(0, rows, episode))


def over_episodes(fn: Callable[..., Tensor], batch: TensorDict, *columns: Tensor, reader: str) -> Tensor:
    """Apply a function of time to the trained tokens of each valid episode, in the order in which they were sampled.

    An episode that forked has several rows, and its tokens are one row to the function. Turns say their order, whatever
    that of the rows is; each turn's tokens lie in one row.

    Args:
        fn: ``(*columns, mask) -> [m, L]``, of columns ``[m, L]`` and a mask bool; a row's result depends on the row
            alone.
        batch: ``[B]``, has ``loss_mask``; and ``turns``, where an episode has several rows with trained tokens.
        *columns: ``[B, T]`` each; what the function reads.
        reader: who asks, as a user would name it; for the error.

    Returns:
        ``[B, T]``, 0 outside the trained tokens.

    Raises:
        MissingColumn: an episode has several such rows, and the batch has no ``turns``.
        BatchError: two rows of an episode have trained tokens of one turn, or one has some of no turn.

    >>> columns = {"loss_mask": torch.tensor([[True, True], [True, False]]), "turns": torch.tensor([[1, 1], [0, -1]])}
    >>> batch = TensorDict({**columns, "episode_ids": torch.tensor([5, 5])}, [2])
    >>> over_episodes(lambda x, mask: x.cumsum(-1), batch, torch.tensor([[1, 2], [4, 0]]), reader="me").tolist()
    [[5, 7], [4, 0]]
    """
    mask, numbers = trained_tokens(batch), episodes(batch).numbers
    trained = numbers[mask.any(-1)]
    if len(trained.unique()) == len(trained):
        return masked(fn(*columns, mask), mask)
    require(batch, "turns", reader=reader)
    row, token = mask.nonzero().unbind(-1)
    turn = batch["turns"][row, token].long()
    order = turn.argsort(stable=True)
    order = order[numbers[row[order]].argsort(stable=True)]
    row, token, turn = row[order], token[order], turn[order]
    episode = numbers[row]
    unordered = turn < 0
    unordered[1:] |= (episode[1:] == episode[:-1]) & (turn[1:] == turn[:-1]) & (row[1:] != row[:-1])
    if bool(unordered.any()):
        wrong = int(row[unordered][0])
        raise BatchError(
            f"{reader}: row {wrong} is one of several of the episode {int(batch['episode_ids'][wrong])}, and its turns "
            "do not say when its trained tokens were sampled: they have no turn (-1), or one that another row has; "
            "number the turns of an episode through all of its rows"
        )
    _, index, counts = episode.unique_consecutive(return_inverse=True, return_counts=True)
    starts = counts.cumsum(0) - counts
    column = torch.arange(len(row), device=row.device) - starts[index]
    joined = torch.zeros(len(counts), int(counts.max()), dtype=torch.bool, device=row.device)
    joined[index, column] = True
    rows = [values.new_zeros(joined.shape).index_put((index, column), values[row, token]) for values in columns]
    result = fn(*rows, joined)[index, column]
    return result.new_zeros(mask.shape).index_put((row, token), result)
