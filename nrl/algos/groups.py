"""Functions of the rewards of groups, ``(rewards [B], group_ids [B]) -> [B]``; `from_rewards` makes estimators of them.

Statistics are two-pass and in float64. Equal rewards are compared rather than subtracted, so rounding cannot become an
advantage. A group of one teaches nothing: its advantage is 0, where some libraries (verl) leave it the bare reward.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from nrl.algos._arguments import check_numbers
from nrl.algos.loss_contract import name_of
from nrl.errors import BatchError

__all__ = [
    "GroupFunction",
    "group_center",
    "group_center_batch_std",
    "group_normalize",
    "leave_one_out",
    "max_rl",
    "per_group",
]

type GroupFunction = Callable[[Tensor, Tensor], Tensor]
"""``(rewards [B], group_ids [B]) -> [B]``."""

_EPS = 1e-6


def _check_rows(reader: str, rewards: Tensor, group_ids: Tensor) -> None:
    if rewards.ndim != 1 or rewards.shape != group_ids.shape:
        raise BatchError(
            f"{reader}: rewards has shape {list(rewards.shape)} and group_ids {list(group_ids.shape)}; both must be "
            "[B], one number a row"
        )


class _Centred(NamedTuple):
    rewards: Tensor  # less their group's mean, in float64
    means: Tensor  # one entry for each row's group
    groups: Tensor  # the number of each row's group
    sizes: Tensor  # the size of each row's group


def _center(reader: str, rewards: Tensor, group_ids: Tensor) -> _Centred:
    _check_rows(reader, rewards, group_ids)
    _, group, counts = torch.unique(group_ids, return_inverse=True, return_counts=True)
    exact = rewards.double()
    none = exact.new_zeros(len(counts))
    means = none.index_add(0, group, exact) / counts
    low = none.scatter_reduce(0, group, exact, "amin", include_self=False)
    high = none.scatter_reduce(0, group, exact, "amax", include_self=False)
    # A mean of equal numbers need not be that number, and normalizing would blow the rounding up to an advantage.
    centred = torch.where((low == high)[group], 0, exact - means[group])
    return _Centred(centred, means[group], group, counts[group])


def _std(centred: Tensor, groups: Tensor, sizes: Tensor) -> Tensor:
    """Each row's group's standard deviation, with n - 1; 0 in a group of one."""
    squares = torch.zeros_like(centred).index_add(0, groups, centred.square())[groups]
    return (squares / (sizes - 1).clamp(min=1)).sqrt()


def _dtype(rewards: Tensor) -> torch.dtype:
    return torch.promote_types(rewards.dtype, torch.float32)


def group_center(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Rewards less the mean of their group.

        A_i = r_i - mean(r of i's group)

    Exactly 0 in a group whose rewards are all equal, so also in a group of one.

    Args:
        rewards: ``[B]`` float.
        group_ids: ``[B]`` int64; in any order, groups of any size.

    Returns:
        ``[B]``, in the dtype of ``rewards``.

    Raises:
        BatchError: the shapes are not ``[B]`` and ``[B]``.

    Source: Dr. GRPO, https://arxiv.org/abs/2503.20783.

    >>> group_center(torch.tensor([1.0, 5.0, 0.0, 7.0]), torch.tensor([3, 8, 3, 8])).tolist()
    [0.5, -1.0, -0.5, 1.0]
    """
    return _center("group_center", rewards, group_ids).rewards.to(_dtype(rewards))


def group_normalize(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Rewards less the mean of their group, over its standard deviation.

        A_i = (r_i - mean) / (std + 1e-6),   std with n - 1

    Exactly 0 in a group whose rewards are all equal, so also in a group of one.

    Args:
        rewards: ``[B]`` float.
        group_ids: ``[B]`` int64; in any order, groups of any size.

    Returns:
        ``[B]``, in the dtype of ``rewards``.

    Raises:
        BatchError: the shapes are not ``[B]`` and ``[B]``.

    Source: GRPO, https://arxiv.org/abs/2402.03300, section 4.1.2.

    >>> found = group_normalize(torch.tensor([1.0, 2.0, 3.0, 5.0]), torch.tensor([0, 0, 0, 1]))
    >>> [round(x, 4) for x in found.tolist()]
    [-1.0, 0.0, 1.0, 0.0]
    """
    centred, _, groups, sizes = _center("group_normalize", rewards, group_ids)
    return (centred / (_std(centred, groups, sizes) + _EPS)).to(_dtype(rewards))


def leave_one_out(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Rewards less the mean of the *other* rows of their group (RLOO).

        A_i = r_i - 1/(n-1) Σ_{j≠i} r_j = n/(n-1) (r_i - mean)

    Exactly 0 in a group whose rewards are all equal, and in a group of one. There is no division by a deviation.

    Args:
        rewards: ``[B]`` float.
        group_ids: ``[B]`` int64; in any order, groups of any size.

    Returns:
        ``[B]``, in the dtype of ``rewards``.

    Raises:
        BatchError: the shapes are not ``[B]`` and ``[B]``.

    Source: Ahmadian et al., Back to Basics, https://arxiv.org/abs/2402.14740, section 3.3.

    >>> leave_one_out(torch.tensor([1.0, 0.0, 0.0, 7.0]), torch.tensor([0, 0, 0, 1])).tolist()
    [1.0, -0.5, -0.5, 0.0]
    """
    centred, _, _, sizes = _center("leave_one_out", rewards, group_ids)
    return (centred * sizes / (sizes - 1).clamp(min=1)).to(_dtype(rewards))


def group_center_batch_std(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Rewards less the mean of their group, over the standard deviation of all rewards (Lite PPO).

        A_i = (r_i - mean(r of i's group)) / (std(all r) + 1e-6),   std with n - 1

    This does not blow up an easy or hard group, whose own deviation is small, as `group_normalize` does. Exactly 0 in a
    group whose rewards are all equal, so also in a group of one.

    Three methods go by this name: this one, which TRL calls ``scale_rewards="batch"`` (with 1e-4), takes the deviation
    of the rewards; ``whitened(from_rewards(group_center))`` that of the centred rewards, once a token; NeMo RL's
    REINFORCE++ the latter with n instead of n - 1.

    Args:
        rewards: ``[B]`` float.
        group_ids: ``[B]`` int64; in any order, groups of any size.

    Returns:
        ``[B]``, in the dtype of ``rewards``.

    Raises:
        BatchError: the shapes are not ``[B]`` and ``[B]``.

    Source: Liu et al., Tricks or Traps, https://arxiv.org/abs/2508.08221, takeaway 3.

    >>> found = group_center_batch_std(torch.tensor([1.0, 3.0, 4.0, 4.0]), torch.tensor([0, 0, 1, 1]))
    >>> [round(x, 4) for x in found.tolist()]
    [-0.7071, 0.7071, 0.0, 0.0]
    """
    centred = _center("group_center_batch_std", rewards, group_ids).rewards
    everything, _, groups, sizes = _center("group_center_batch_std", rewards, torch.zeros_like(group_ids))
    return (centred / (_std(everything, groups, sizes) + _EPS)).to(_dtype(rewards))


def max_rl(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Rewards less the mean of their group, over that mean (MaxRL).

        A_i = (r_i - mean) / mean,   0 where the mean is 0

    With rewards of 0 and 1 and n rows a group this is the gradient of the likelihood of success, truncated at order
    n - 1, where plain centring is that of order 1. For other rewards the paper proves nothing. Exactly 0 in a group
    whose rewards are all equal, so also in a group of one, where the paper's form without the baseline would be r. The
    official code and TRL's proposal add a small number to the mean; here as in prime-rl nothing is added.

    Args:
        rewards: ``[B]`` float, none of them negative.
        group_ids: ``[B]`` int64; in any order, groups of any size.

    Returns:
        ``[B]``, in the dtype of ``rewards``; at most n - 1.

    Raises:
        BatchError: the shapes are not ``[B]`` and ``[B]``, or a reward is negative.

    Source: https://arxiv.org/abs/2602.02710, algorithm 1.

    >>> max_rl(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([5, 5, 5, 5])).tolist()
    [3.0, -1.0, -1.0, -1.0]
    """
    centred, means, _, _ = _center("max_rl", rewards, group_ids)
    if bool((rewards < 0).any()):
        raise BatchError(
            f"max_rl: the reward of row {int((rewards < 0).nonzero()[0, 0])} is negative; what is divided by the mean "
            "must be at least 0, such as 0 for a failure and 1 for a success"
        )
    return torch.where(means == 0, 0, centred / means).to(_dtype(rewards))


def per_group(fn: Callable[[Tensor], Tensor]) -> GroupFunction:
    """Lift a function of one group's rewards to all groups.

    Args:
        fn: ``[n] -> [n]``; rows keep their order within the group.

    Returns:
        ``(rewards [B], group_ids [B]) -> [B]``.

    Raises:
        BatchError: (when called) ``fn`` gave something else than a tensor of the shape that it got, or the inputs are
            not ``[B]`` and ``[B]``.
        NotFinite: (when called) ``fn`` gave NaN or an infinity.

    >>> best = per_group(lambda rewards: (rewards == rewards.max()).float())
    >>> best(torch.tensor([1.0, 5.0, 3.0, 4.0]), torch.tensor([0, 1, 0, 1])).tolist()
    [0.0, 1.0, 1.0, 0.0]
    """
    name = f"per_group({name_of(fn)})"

    def lifted(rewards: Tensor, group_ids: Tensor) -> Tensor:
        _check_rows(name, rewards, group_ids)
        out = torch.zeros_like(rewards, dtype=_dtype(rewards))
        for group in group_ids.unique():
            rows = group_ids == group
            count = int(rows.sum())
            numbers = check_numbers(name, fn(rewards[rows]), f"{count} rewards of group {int(group)}", (count,))
            out = out.masked_scatter(rows, numbers.to(out.dtype))
        return out

    lifted.__name__ = name
    return lifted
