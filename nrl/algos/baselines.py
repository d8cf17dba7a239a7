"""Estimators that need more of a batch than one reward a row and its group: lengths, a greedy row, several rewards."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nrl.algos._episodes import check_finite, episodes, row_rewards
from nrl.algos.estimators import Estimator
from nrl.algos.groups import group_center, group_normalize
from nrl.arguments import checked
from nrl.batch import Batch, require
from nrl.errors import ArgumentError, BatchError

__all__ = ["gdpo", "greedy_baseline", "optimal_baseline"]


def optimal_baseline(batch: Batch) -> Tensor:
    """Rewards less the mean of their group, in which each episode counts by its length (OPO).

        A_i = r_i - Σ_j l_j r_j / Σ_j l_j,   j over i's group, l the number of trained tokens

    This baseline has the least variance if the gradients of tokens are about equally large and orthogonal. An episode
    of several rows has the tokens of all of them. Exactly 0 in a group whose rewards are all equal, so also in a group
    of one, where verl leaves the bare reward; with equal lengths it is `group_center`. It reads lengths from
    ``loss_mask``, so narrow the mask afterwards.

    Args:
        batch: has ``rewards``, ``group_ids`` and ``loss_mask``.

    Returns:
        ``[B, T]``, in the dtype of ``rewards``; 0 on invalid rows and outside ``loss_mask``.

    Raises:
        MissingColumn: the batch lacks a column.
        BatchError: a row has several rewards, or the rows of one episode differ in reward or group.
        NotFinite: the reward of a valid row is NaN or infinite.

    Source: Hao et al., https://arxiv.org/abs/2505.23585, b*.

    >>> columns = {"rewards": torch.tensor([1.0, 0.0]), "group_ids": torch.tensor([0, 0])}
    >>> mask = torch.tensor([[True, False, False], [True, True, True]])
    >>> optimal_baseline(Batch({**columns, "loss_mask": mask}, batch_size=[2])).tolist()
    [[0.75, 0.0, 0.0], [-0.25, -0.25, -0.25]]
    """
    require(batch, "rewards", "group_ids", "loss_mask", reader="optimal_baseline")
    rewards = row_rewards(batch, reader="optimal_baseline")
    check_finite(batch, "rewards", reader="optimal_baseline")
    by_episode = episodes(batch, "rewards", "group_ids", reader="optimal_baseline")
    lengths = by_episode.sums(batch["loss_mask"].sum(-1).double())
    ids, group = batch["group_ids"][by_episode.firsts].unique(return_inverse=True)
    # A baseline moves with the rewards, so the plain mean may go first: equal rewards are exactly 0 from here on.
    centred = group_center(rewards[by_episode.firsts].double(), group)
    none = lengths.new_zeros(len(ids))
    baseline = none.index_add(0, group, lengths * centred) / none.index_add(0, group, lengths).clamp(min=1)
    return by_episode.tokens((centred - baseline[group]).to(rewards.dtype), batch["loss_mask"])


def greedy_baseline(batch: Batch) -> Tensor:
    """Rewards less that of the greedy answer to the same prompt (ReMax).

        A_i = r_i - r(greedy answer of i's group)

    The greedy answers are the group's rows of ``temperature`` 0; the baseline is the mean of several. They have
    advantage 0, and `mask_greedy` takes them out of the loss, whose denominator would count them. A group without a
    valid greedy row, because none was sampled or it failed, has no baseline, and all its advantages are 0. Exactly 0 in
    a group whose rewards are all equal. verl samples the greedy answer separately and passes its reward in a column.

    Args:
        batch: has ``rewards``, ``group_ids``, ``temperature`` and ``loss_mask``.

    Returns:
        ``[B, T]``, in the dtype of ``rewards``; 0 on invalid rows and outside ``loss_mask``.

    Raises:
        MissingColumn: the batch lacks a column.
        BatchError: a row has several rewards, or the rows of one episode differ in reward, group or temperature.
        NotFinite: the reward of a valid row is NaN or infinite.

    Source: Li et al., ReMax, https://arxiv.org/abs/2310.10505.

    >>> columns = {"rewards": torch.tensor([1.0, 0.25]), "group_ids": torch.tensor([0, 0])}
    >>> columns |= {"temperature": torch.tensor([1.0, 0.0]), "loss_mask": torch.tensor([[True], [True]])}
    >>> greedy_baseline(Batch(columns, batch_size=[2])).tolist()
    [[0.75], [0.0]]
    """
    require(batch, "rewards", "group_ids", "temperature", "loss_mask", reader="greedy_baseline")
    rewards = row_rewards(batch, reader="greedy_baseline")
    check_finite(batch, "rewards", reader="greedy_baseline")
    by_episode = episodes(batch, "rewards", "group_ids", "temperature", reader="greedy_baseline")
    ids, group = batch["group_ids"][by_episode.firsts].unique(return_inverse=True)
    greedy = batch["temperature"][by_episode.firsts] == 0
    centred = group_center(rewards[by_episode.firsts].double(), group)
    none = centred.new_zeros(len(ids))
    num_greedy = none.index_add(0, group, greedy.double())
    baseline = none.index_add(0, group, centred * greedy) / num_greedy.clamp(min=1)
    advantages = torch.where(greedy | (num_greedy == 0)[group], 0, centred - baseline[group])
    return by_episode.tokens(advantages.to(rewards.dtype), batch["loss_mask"])


@checked("gdpo", finite=False)
def gdpo(weights: Sequence[float] | None = None) -> Estimator:
    """Several rewards, each normalized in its group before they are added (GDPO).

        A_i = (S_i - mean S) / (std S + 1e-6),   S_i = Σ_k w_k (r_ik - mean_k) / (std_k + 1e-6)

    mean_k and std_k are those of reward k in i's group, mean S and std S those of all valid episodes of the batch, all
    with n - 1. If rewards were added first, the one that varies most would hide the others. Exactly 0 where all S are
    equal. With one reward it is `group_normalize`, over the deviation of these in the batch. The libraries differ: the
    paper and TRL take the last statistics over episodes as here, verl over tokens; NeMo RL leaves the row itself out of
    mean_k, and adds nothing to std S. To count one reward only where another is reached, change the column first:
    ``assign(batch, rewards=...)``.

    Args:
        weights: w, one for each reward, in the order of the columns of ``rewards``; None: all 1.

    Returns:
        ``batch -> [B, T]``, in the dtype of ``rewards``; 0 on invalid rows and outside ``loss_mask``. It reads
        ``rewards`` ``[B, K]`` (``[B]``: K is 1), ``group_ids``, ``loss_mask`` and, if present, ``valid`` and
        ``episode_ids``.

    Raises:
        ValueError: ``weights`` is empty, or a weight is not finite.
        MissingColumn: (when called) the batch lacks one of the first three.
        BatchError: (when called) the number of weights differs from that of rewards, or the rows of one episode differ.
        NotFinite: (when called) one of the rewards of a valid row is NaN or infinite.

    Source: https://arxiv.org/abs/2601.05242, eq. 4 to 7.

    >>> rewards = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 30.0], [0.0, 10.0]])
    >>> mask = torch.ones(4, 1, dtype=torch.bool)
    >>> batch = Batch({"rewards": rewards, "group_ids": torch.tensor([0, 0, 1, 1]), "loss_mask": mask}, batch_size=[4])
    >>> [round(x, 3) for x in gdpo()(batch)[:, 0].tolist()]
    [0.548, -0.548, 1.095, -1.095]
    """
    weight_tensor = None if weights is None else torch.tensor(list(weights), dtype=torch.float64)
    if weight_tensor is not None and (len(weight_tensor) == 0 or not all(map(math.isfinite, weight_tensor.tolist()))):
        raise ArgumentError(f"gdpo: weights is {weights}; it must be finite numbers, one for each reward")

    def gdpo(batch: Batch) -> Tensor:
        require(batch, "rewards", "group_ids", "loss_mask", reader="gdpo")
        check_finite(batch, "rewards", reader="gdpo")
        by_episode = episodes(batch, "rewards", "group_ids", reader="gdpo")
        rewards = batch["rewards"][by_episode.firsts].double()
        rewards = rewards if rewards.ndim > 1 else rewards.unsqueeze(-1)
        factors = rewards.new_ones(rewards.shape[-1]) if weight_tensor is None else weight_tensor.to(rewards.device)
        if len(factors) != rewards.shape[-1]:
            raise BatchError(
                f"gdpo: there are {len(factors)} weights, but rewards has shape {list(batch['rewards'].shape)}; give "
                "one weight for each reward of a row"
            )
        groups = batch["group_ids"][by_episode.firsts]
        parts = [group_normalize(rewards[:, k], groups) for k in range(rewards.shape[-1])]
        total = torch.stack(parts, -1) @ factors
        advantages = group_normalize(total, torch.zeros_like(groups))
        return by_episode.tokens(advantages.to(batch["rewards"].dtype), batch["loss_mask"])

    return gdpo
