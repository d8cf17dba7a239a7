"""Reductions of per-token numbers that losses share: by an aggregate, the mean of each row, and the largest of all."""

import functools
import math
from typing import Any

import torch
from torch import Tensor

from nrl.algos.aggregate import Aggregate
from nrl.algos.loss_contract import episode_shares
from nrl.batch import Batch
from nrl.batch.metrics import Max, Mean

__all__ = ["aggregate_tokens", "row_means", "token_max"]


def aggregate_tokens(aggregate: Aggregate, x: Tensor, batch: Batch) -> Mean:
    """Aggregate per-token numbers over the ``loss_mask`` of a batch; every loss over rows ends with it.

    Args:
        aggregate: called with `episode_shares` if it takes them, as `by_episode` says.
        x: ``[*B, T]`` float.
        batch: has ``loss_mask``.

    >>> from nrl.algos import seq_mean
    >>> columns = {"loss_mask": torch.ones(2, 1, dtype=torch.bool), "episode_ids": torch.tensor([5, 5])}
    >>> [
    ...     part.item()
    ...     for part in aggregate_tokens(seq_mean, torch.tensor([[1.0], [3.0]]), Batch(columns, batch_size=[2]))
    ... ]
    [2.0, 1.0]
    """
    fn: Any = aggregate.func if isinstance(aggregate, functools.partial) else aggregate
    shares = (episode_shares(batch),) if getattr(fn, "by_episode", False) else ()
    return aggregate(x, batch["loss_mask"], *shares)


def row_means(x: Tensor, mask: Tensor) -> Tensor:
    """Each row's mean over the mask's tokens: ``[*B, 1]``, 0 for a row without any.

    Args:
        x: ``[*B, T]``, 0 outside the mask.
        mask: ``[*B, T]`` bool.

    >>> row_means(torch.tensor([[1.0, 0.0, 3.0]]), torch.tensor([[True, False, True]])).tolist()
    [[2.0]]
    """
    return x.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def token_max(x: Tensor, mask: Tensor) -> Max:
    """The largest number of the mask's tokens, for metrics; minus infinity if there are none.

    >>> token_max(torch.tensor([[1.0, 9.0]]), torch.tensor([[True, False]])).value.item()
    1.0
    """
    none = x.new_full((1,), -math.inf)
    return Max(torch.cat([none, torch.where(mask, x, -math.inf).flatten()]).max())
