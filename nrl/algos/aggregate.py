"""Aggregates: per-token numbers to one `Mean`, ``(x, mask) -> Mean``.

Each adds up over rows and has a weight that depends on the mask alone, so the value is the same however a batch is
split. Masked tokens have no effect; a row without a token adds 0 to the total and 0 to the weight.

Those that divide by the number of rows take the rows' shares of their episodes, too. With them an episode that forked,
and so has several rows, counts as much as one that did not.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from nrl.algos.loss_contract import by_episode
from nrl.algos.masking import masked
from nrl.arguments import checked
from nrl.batch.metrics import Mean
from nrl.errors import ArgumentError, BatchError

__all__ = ["Aggregate", "seq_mean", "seq_sum", "token_mean"]

type Aggregate = Callable[[Tensor, Tensor], Mean]
"""``(x [*B, T], mask [*B, T]) -> Mean``: per-token numbers to one; `by_episode` adds an argument."""


def _sums(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and number of each row's tokens, in at least float32: half precision cannot count past 256."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return masked(x, mask).sum(-1, dtype=dtype), mask.sum(-1, dtype=dtype)


def _row_weights(reader: str, counts: Tensor, shares: Tensor | None) -> Tensor:
    """Return the weight of each row: its share of an episode, or 1; 0 without a token; ``[*B]`` float64."""
    if shares is None:
        return (counts > 0).double()
    if shares.shape != counts.shape:
        raise BatchError(
            f"{reader}: shares has shape {list(shares.shape)}, and x has {list(counts.shape)} rows; give one number a "
            "row, as nrl.algos.episode_shares(batch) has them"
        )
    return torch.where(counts > 0, shares.double(), 0)


def token_mean(x: Tensor, mask: Tensor) -> Mean:
    """The mean over tokens: every token counts the same, so a long row counts more than a short one.

        Σ_i Σ_t x_{i,t} / Σ_i |y_i|

    Args:
        x: ``[*B, T]`` float.
        mask: ``[*B, T]`` bool.

    Returns:
        total: the sum over the mask's tokens; weight: how many there are.

    Source: DAPO, https://arxiv.org/abs/2503.14476, eq. 12.

    >>> mask = torch.tensor([[True, True, True], [True, False, False]])
    >>> [part.item() for part in token_mean(torch.tensor([[1.0, 2.0, 3.0], [8.0, 9.0, 9.0]]), mask)]
    [14.0, 4.0]
    """
    sums, counts = _sums(x, mask)
    return Mean(sums.sum(), counts.sum())


@by_episode
def seq_mean(x: Tensor, mask: Tensor, shares: Tensor | None = None) -> Mean:
    """The mean over rows of each row's mean: every row counts the same, or every episode.

        1/B Σ_i 1/|y_i| Σ_t x_{i,t},   with shares: Σ_i s_i 1/|y_i| Σ_t x_{i,t} / Σ_i s_i

    With the shares of a forked episode this is the mean over all its tokens, as if they lay in one row.

    Args:
        x: ``[*B, T]`` float.
        mask: ``[*B, T]`` bool.
        shares: ``[*B]`` float, `episode_shares`, which losses of nrl give it; None: every row is an episode.

    Returns:
        total: the sum of the rows' means, each times its share; weight: the rows that have a token, or their shares.

    Raises:
        BatchError: the shares are not one number a row.

    Source: GRPO, https://arxiv.org/abs/2402.03300, eq. 3.

    >>> mask = torch.tensor([[True, True, True], [True, False, False]])
    >>> [part.item() for part in seq_mean(torch.tensor([[1.0, 2.0, 3.0], [8.0, 9.0, 9.0]]), mask)]
    [10.0, 2.0]
    """
    sums, counts = _sums(x, mask)
    weights = _row_weights("seq_mean", counts, shares)
    means = sums / counts.clamp(min=1)
    # Added up in float64, the shares of whole episodes are a whole number in float32, in any order
    return Mean((weights.to(sums.dtype) * means).sum(), weights.sum().to(sums.dtype))


@checked("seq_sum", finite=False)
def seq_sum(norm: float) -> Callable[..., Mean]:
    """The mean over rows of each row's sum over a constant: a token counts the same in rows of any length.

        1/B Σ_i 1/L Σ_t x_{i,t},   with shares: Σ_i 1/L Σ_t x_{i,t} / Σ_i s_i

    With shares B is the number of episodes, and the sum of a forked one is that over all its rows.

    Args:
        norm: L > 0, in tokens; usually the longest completion that is allowed.

    Returns:
        An aggregate, ``(x, mask, shares=None) -> Mean`` as `seq_mean`. total: the sum of the rows' sums over L; weight:
        the rows that have a token, or their shares.

    Raises:
        ValueError: ``norm`` is not positive and finite.
        BatchError: (when called) the shares are not one number a row.

    Source: Dr. GRPO, https://arxiv.org/abs/2503.20783, section 3.2.

    >>> mask = torch.tensor([[True, True, True], [True, False, False]])
    >>> [part.item() for part in seq_sum(norm=2)(torch.tensor([[1.0, 2.0, 3.0], [8.0, 9.0, 9.0]]), mask)]
    [7.0, 2.0]
    """
    if not 0 < norm < math.inf:
        raise ArgumentError(f"seq_sum: norm is {norm}; it must be positive and finite, such as the longest completion")

    @by_episode
    def seq_sum(x: Tensor, mask: Tensor, shares: Tensor | None = None) -> Mean:
        sums, counts = _sums(x, mask)
        return Mean(sums.sum() / norm, _row_weights("seq_sum", counts, shares).sum().to(sums.dtype))

    return seq_sum
