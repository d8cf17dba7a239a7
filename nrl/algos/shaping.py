"""Shaping on the driver: changing rewards, and taking rows and tokens out of the loss, ``batch -> batch``.

Reshape rewards before `advantages`, and narrow ``loss_mask`` after it, so that the rows that leave the loss stay in the
statistics of their group. `nrl.drop_uniform` and the metrics mean the original rewards: filter and measure before
reshaping. Rewards of invalid rows may or may not be reshaped, since nobody reads them. A NaN stays NaN, and the
estimator rejects it. The length of an answer is the number of its trained tokens, over all valid rows of its episode.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from nrl.algos._arguments import in_unit_interval, not_negative
from nrl.algos._episodes import check_finite, episodes, row_rewards, trained_tokens, valid_rows
from nrl.algos.masking import masked
from nrl.arguments import checked
from nrl.batch import Batch, assign, require
from nrl.errors import ArgumentError

__all__ = [
    "Shaping",
    "clip_rewards",
    "keep_at_least",
    "keep_best",
    "length_penalty",
    "mask_greedy",
    "mask_truncated",
    "overlong_penalty",
    "scale_rewards",
    "stop_properly",
    "top_entropy",
]

type Shaping = Callable[[Batch], Batch]
"""``batch -> batch``, with other rewards, or with fewer tokens in ``loss_mask``."""


@checked("scale_rewards", finite=False)
def scale_rewards(factor: float, offset: float = 0.0) -> Shaping:
    """Multiply rewards by a factor, then add an offset.

        factor r + offset

    Args:
        factor: finite.
        offset: finite; estimators that subtract a baseline do not see it.

    Returns:
        ``batch -> batch``; of several rewards a row, each is scaled.

    Raises:
        ValueError: ``factor`` or ``offset`` is not finite.
        MissingColumn: (when called) the batch lacks ``rewards``.

    >>> batch = Batch({"rewards": torch.tensor([0.0, 1.0])}, batch_size=[2])
    >>> scale_rewards(2.0, offset=-1.0)(batch)["rewards"].tolist()
    [-1.0, 1.0]
    """
    for name, value in (("factor", factor), ("offset", offset)):
        if not math.isfinite(value):
            raise ArgumentError(f"scale_rewards: {name} is {value}; it must be finite")

    def scale_rewards(batch: Batch) -> Batch:
        require(batch, "rewards", reader="scale_rewards")
        return assign(batch, rewards=factor * batch["rewards"] + offset)

    return scale_rewards


@checked("clip_rewards", finite=False)
def clip_rewards(low: float, high: float) -> Shaping:
    """Bound rewards, so that no single reward can move the parameters far.

        min(max(r, low), high)

    Args:
        low: the smallest reward; -inf for none.
        high: the largest reward, at least ``low``; inf for none.

    Returns:
        ``batch -> batch``; of several rewards a row, each is bounded. Infinite ones are bounded too, NaN stays.

    Raises:
        ValueError: ``low`` is greater than ``high``, or one of them is NaN.
        MissingColumn: (when called) the batch lacks ``rewards``.

    Source: Mnih et al., Human-level control through deep reinforcement learning (2015), methods.

    >>> batch = Batch({"rewards": torch.tensor([-30.0, 0.5, 20.0])}, batch_size=[3])
    >>> clip_rewards(-10.0, 10.0)(batch)["rewards"].tolist()
    [-10.0, 0.5, 10.0]
    """
    if not low <= high:
        raise ArgumentError(f"clip_rewards: low is {low}; it must be at most high, which is {high}")

    def clip_rewards(batch: Batch) -> Batch:
        require(batch, "rewards", reader="clip_rewards")
        return assign(batch, rewards=batch["rewards"].clamp(low, high))

    return clip_rewards


@checked("overlong_penalty", finite=False)
def overlong_penalty(limit: int, buffer: int) -> Shaping:
    """Lower the reward of answers that come near the length limit, by up to 1 (DAPO's soft overlong punishment).

        r + 0                                 up to limit - buffer tokens
        r - (|y| - (limit - buffer)) / buffer in the buffer
        r - 1                                 beyond the limit

    The penalty is capped at -1, as in the paper and in TRL. verl and NeMo RL do not cap it, so an answer beyond the
    limit, such as one of several turns, may lose more. They also have a factor; here, use `scale_rewards`.

    Args:
        limit: the longest answer, in trained tokens.
        buffer: how many of these, at the end, are punished; between 1 and ``limit``.

    Returns:
        ``batch -> batch``. It reads ``rewards``, ``loss_mask`` and, if present, ``valid`` and
        ``episode_ids``.

    Raises:
        ValueError: ``buffer`` is not between 1 and ``limit``.
        MissingColumn: (when called) the batch lacks ``rewards`` or ``loss_mask``.
        BatchError: (when called) there are several rewards a row.

    Source: https://arxiv.org/abs/2503.14476, eq. 13.

    >>> mask = torch.arange(6) < torch.tensor([[2], [3], [6]])
    >>> batch = Batch({"rewards": torch.ones(3), "loss_mask": mask}, batch_size=[3])
    >>> overlong_penalty(limit=4, buffer=2)(batch)["rewards"].tolist()
    [1.0, 0.5, 0.0]
    """
    if not 1 <= buffer <= limit:
        raise ArgumentError(f"overlong_penalty: buffer is {buffer}; it must be between 1 and limit, which is {limit}")

    def overlong_penalty(batch: Batch) -> Batch:
        rewards, lengths = _lengths(batch, "overlong_penalty")
        return assign(batch, rewards=rewards + ((limit - buffer - lengths) / buffer).clamp(-1, 0).to(rewards.dtype))

    return overlong_penalty


def _lengths(batch: Batch, reader: str) -> tuple[Tensor, Tensor]:
    """Each row's reward, and the number of trained tokens of its episode; 0 on invalid rows."""
    require(batch, "rewards", "loss_mask", reader=reader)
    by_episode = episodes(batch, reader=reader)
    return row_rewards(batch, reader=reader), by_episode.rows(by_episode.sums(batch["loss_mask"].sum(-1).double()))


@checked("stop_properly", finite=False)
def stop_properly(coef: float) -> Shaping:
    """Multiply the rewards of truncated episodes by a factor, so that it pays to finish (NeMo RL).

        coef r   where truncated

    This would improve a negative reward, so use it for rewards that are at least 0.

    Args:
        coef: in [0, 1]; 0 takes the whole reward, 1 changes nothing.

    Returns:
        ``batch -> batch``; an episode is truncated if one of its valid rows is.

    Raises:
        ValueError: ``coef`` is outside [0, 1].
        MissingColumn: (when called) the batch lacks ``rewards`` or ``truncated``.

    Source: NeMo RL's ``stop_properly_penalty_coef``, https://github.com/NVIDIA-NeMo/RL.

    >>> batch = Batch({"rewards": torch.ones(2), "truncated": torch.tensor([True, False])}, batch_size=[2])
    >>> stop_properly(0.25)(batch)["rewards"].tolist()
    [0.25, 1.0]
    """
    in_unit_interval("stop_properly", "coef", coef)

    def stop_properly(batch: Batch) -> Batch:
        require(batch, "rewards", "truncated", reader="stop_properly")
        rewards, hit = batch["rewards"], _anywhere(batch, batch["truncated"], "stop_properly")
        return assign(
            batch, rewards=torch.where(hit if rewards.ndim == 1 else hit.unsqueeze(-1), coef * rewards, rewards)
        )

    return stop_properly


def _anywhere(batch: Batch, marked: Tensor, reader: str) -> Tensor:
    """The rows of episodes with a marked valid row."""
    by_episode = episodes(batch, reader=reader)
    return by_episode.rows(by_episode.sums(marked.long())) > 0


@checked("length_penalty", finite=False)
def length_penalty(weight: float, threshold: float = 0.0) -> Shaping:
    """Raise the reward of the shorter answers of a group and lower that of the longer ones (Kimi k1.5).

        r + weight λ           where r > threshold (a right answer)
        r + weight min(0, λ)   elsewhere,   λ = 1/2 - (l - l_min) / (l_max - l_min)

    l_min and l_max are over all valid episodes of the group, right or wrong. Where all are of one length, so also in a
    group of one, nothing changes.

    Args:
        weight: at least 0.
        threshold: the reward above which an answer is right.

    Returns:
        ``batch -> batch``. It reads ``rewards``, ``group_ids``, ``loss_mask`` and, if present, ``valid`` and
        ``episode_ids``.

    Raises:
        ValueError: ``weight`` is negative or not finite, or ``threshold`` is NaN.
        MissingColumn: (when called) the batch lacks one of the first three.
        BatchError: (when called) there are several rewards a row, or the rows of one episode differ in reward or group.

    Source: https://arxiv.org/abs/2501.12599, length penalty.

    >>> mask = torch.arange(4) < torch.tensor([[1], [3], [4]])
    >>> columns = {"rewards": torch.tensor([1.0, 1.0, 0.0]), "group_ids": torch.tensor([0, 0, 0])}
    >>> [round(x, 4) for x in length_penalty(1.0)(Batch({**columns, "loss_mask": mask}, [3]))["rewards"].tolist()]
    [1.5, 0.8333, -0.5]
    """
    not_negative("length_penalty", "weight", weight)
    if math.isnan(threshold):
        raise ArgumentError(f"length_penalty: threshold is {threshold}; it must be a number")

    def length_penalty(batch: Batch) -> Batch:
        require(batch, "group_ids", reader="length_penalty")
        rewards, lengths = _lengths(batch, "length_penalty")
        by_episode = episodes(batch, "rewards", "group_ids", reader="length_penalty")
        lengths = lengths[by_episode.firsts]
        ids, group = batch["group_ids"][by_episode.firsts].unique(return_inverse=True)
        none = lengths.new_zeros(len(ids))
        least = none.scatter_reduce(0, group, lengths, "amin", include_self=False)[group]
        longest = none.scatter_reduce(0, group, lengths, "amax", include_self=False)[group]
        shorter = torch.where(longest > least, 0.5 - (lengths - least) / (longest - least).clamp(min=1), 0)
        right = rewards[by_episode.firsts] > threshold
        added = weight * torch.where(right, shorter, shorter.clamp(max=0))
        return assign(batch, rewards=rewards + by_episode.rows(added).to(rewards.dtype))

    return length_penalty


def mask_truncated(batch: Batch) -> Batch:
    """Take truncated episodes out of the loss, after `advantages` (overlong filtering).

    Their rewards stay in the statistics of their group, as in DAPO and TRL. ``assign(batch, valid=~truncated)`` before
    `advantages` would also take them out of these and of the metrics.

    Args:
        batch: has ``truncated`` and ``loss_mask``. An episode is truncated if one of its valid rows is.

    Raises:
        MissingColumn: the batch lacks a column.

    Source: DAPO, https://arxiv.org/abs/2503.14476, section 3.4.

    >>> mask = torch.tensor([[True, True], [True, False]])
    >>> batch = Batch({"truncated": torch.tensor([True, False]), "loss_mask": mask}, batch_size=[2])
    >>> mask_truncated(batch)["loss_mask"].tolist()
    [[False, False], [True, False]]
    """
    require(batch, "truncated", "loss_mask", reader="mask_truncated")
    cut = _anywhere(batch, batch["truncated"], "mask_truncated")
    return assign(batch, loss_mask=batch["loss_mask"] & ~cut.unsqueeze(-1))


def mask_greedy(batch: Batch) -> Batch:
    """Take the rows of temperature 0 out of the loss, after `advantages` with `greedy_baseline` (ReMax).

    Their advantages are 0, but their tokens would be in the loss's denominator.

    Args:
        batch: has ``temperature`` and ``loss_mask``.

    Raises:
        MissingColumn: the batch lacks a column.

    Source: Li et al., ReMax, https://arxiv.org/abs/2310.10505.

    >>> mask = torch.tensor([[True, True], [True, False]])
    >>> batch = Batch({"temperature": torch.tensor([0.0, 1.0]), "loss_mask": mask}, batch_size=[2])
    >>> mask_greedy(batch)["loss_mask"].tolist()
    [[False, False], [True, False]]
    """
    require(batch, "temperature", "loss_mask", reader="mask_greedy")
    return assign(batch, loss_mask=batch["loss_mask"] & (batch["temperature"] != 0).unsqueeze(-1))


@checked("top_entropy", finite=False)
def top_entropy(fraction: float) -> Shaping:
    """Train only on the tokens at which the policy was least certain, after `advantages`.

        loss_mask_t and H_t >= τ,   τ the n-th largest H of the batch, n = fraction of its trained tokens

    n is rounded, and at least 1; all ties at τ stay. τ is that of the whole batch; TRL takes a quantile within each
    micro-batch. H is a column, so it is that of the policy that the step starts from; the paper and TRL take the policy
    in training, which is the same in the first update of a batch. The other tokens leave the whole loss, denominator
    and penalty included. In TRL they stay in both, which makes the step about ``fraction`` as large. For that, clear
    their advantages instead.

    Args:
        fraction: in (0, 1]; 0.2 in the paper.

    Returns:
        ``batch -> batch``. It reads ``entropy``, ``loss_mask`` and, if present, ``valid``.

    Raises:
        ValueError: ``fraction`` is not in (0, 1].
        MissingColumn: (when called) the batch lacks one of the first two.
        NotFinite: (when called) the entropy at a trained token is NaN or infinite.

    Source: Wang et al., Beyond the 80/20 rule, https://arxiv.org/abs/2506.01939.

    >>> columns = {"entropy": torch.tensor([[9.0, 0.1, 2.0, 0.3, 1.0]])}
    >>> mask = torch.tensor([[False, True, True, True, True]])
    >>> top_entropy(0.5)(Batch({**columns, "loss_mask": mask}, batch_size=[1]))["loss_mask"].tolist()
    [[False, False, True, False, True]]
    """
    if not 0 < fraction <= 1:
        raise ArgumentError(f"top_entropy: fraction is {fraction}; it must be greater than 0 and at most 1")

    def top_entropy(batch: Batch) -> Batch:
        require(batch, "entropy", "loss_mask", reader="top_entropy")
        check_finite(batch, "entropy", reader="top_entropy")
        mask = trained_tokens(batch)
        entropy = masked(batch["entropy"], mask)
        chosen = entropy[mask]
        if len(chosen):
            mask = mask & (entropy >= chosen.topk(max(1, round(fraction * len(chosen)))).values[-1])
        return assign(batch, loss_mask=mask)

    return top_entropy


@checked("keep_at_least", finite=False)
def keep_at_least(threshold: float) -> Shaping:
    """Mark rows with too small a reward invalid, for supervised fine-tuning on the others (rejection sampling).

    With `sft_loss` this is rejection-sampling fine-tuning (RFT, STaR). Marked rows leave the loss, statistics and
    metrics alike, so summarise first. For groups that keep no row, see `nrl.filtered`.

    Args:
        threshold: the smallest reward to keep.

    Returns:
        ``batch -> batch``, with ``valid``. It reads ``rewards`` and, if present, ``valid``.

    Raises:
        ValueError: ``threshold`` is NaN.
        MissingColumn: (when called) the batch lacks ``rewards``.
        BatchError: (when called) there are several rewards a row.
        NotFinite: (when called) the reward of a valid row is NaN or infinite.

    Source: Yuan et al., https://arxiv.org/abs/2308.01825, RFT.

    >>> batch = Batch({"rewards": torch.tensor([0.0, 1.0, 0.5])}, batch_size=[3])
    >>> keep_at_least(0.5)(batch)["valid"].tolist()
    [False, True, True]
    """
    if math.isnan(threshold):
        raise ArgumentError(f"keep_at_least: threshold is {threshold}; it must be a number")

    def keep_at_least(batch: Batch) -> Batch:
        rewards = row_rewards(batch, reader="keep_at_least")
        check_finite(batch, "rewards", reader="keep_at_least")
        return assign(batch, valid=valid_rows(batch) & (rewards >= threshold))

    return keep_at_least


def keep_best(batch: Batch) -> Batch:
    """Mark all rows but the best of each group invalid, for supervised fine-tuning on the best (RAFT).

    All ties stay, so that the order of rows does not matter. Where all rewards are equal, bad ones too, the whole group
    stays: combine it with `keep_at_least`. Marked rows leave the loss, statistics and metrics alike, so summarise
    first.

    Args:
        batch: has ``rewards`` and ``group_ids``.

    Returns:
        The batch with ``valid``.

    Raises:
        MissingColumn: the batch lacks a column.
        BatchError: a row has several rewards.
        NotFinite: the reward of a valid row is NaN or infinite.

    Source: Dong et al., RAFT, https://arxiv.org/abs/2304.06767.

    >>> columns = {"rewards": torch.tensor([0.0, 1.0, 0.5]), "group_ids": torch.tensor([0, 0, 1])}
    >>> keep_best(Batch(columns, batch_size=[3]))["valid"].tolist()
    [False, True, True]
    """
    require(batch, "rewards", "group_ids", reader="keep_best")
    rewards, valid = row_rewards(batch, reader="keep_best"), valid_rows(batch)
    check_finite(batch, "rewards", reader="keep_best")
    ids, group = batch["group_ids"].unique(return_inverse=True)
    floor = rewards.new_full((len(ids),), -math.inf)
    best = floor.scatter_reduce(0, group, torch.where(valid, rewards, -math.inf), "amax")[group]
    return assign(batch, valid=valid & (rewards == best))
