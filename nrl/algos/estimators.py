"""Advantages, on the driver, where the whole batch can be seen.

Group functions take ``(rewards [B], group_ids [B])`` and give ``[B]``; `from_rewards` makes one of them a function of
the batch, and `advantages` writes the column. Group statistics are two-pass and in float64.
"""

from collections.abc import Callable

import torch
from tensordict import TensorDict
from torch import Tensor

from nrl.algos.masking import masked
from nrl.algos.protocol import name_of
from nrl.batch import Batch, assign, require, unchanged
from nrl.errors import BatchError, NotFinite

__all__ = [
    "Estimator",
    "GroupFunction",
    "advantages",
    "discounted_returns",
    "from_rewards",
    "gae",
    "group_center",
    "group_normalize",
    "leave_one_out",
    "per_group",
    "whiten",
]

type GroupFunction = Callable[[Tensor, Tensor], Tensor]
"""``(rewards [B], group_ids [B]) -> [B]``."""

type Estimator = Callable[[TensorDict], Tensor]
"""``batch -> advantages [B, T]``."""

_EPS = 1e-6


def _check_rows(reader: str, rewards: Tensor, group_ids: Tensor) -> None:
    if rewards.ndim != 1 or rewards.shape != group_ids.shape:
        raise BatchError(
            f"{reader}: rewards has shape {list(rewards.shape)} and group_ids {list(group_ids.shape)}; both must be "
            "[B], one number a row"
        )


def _center(reader: str, rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards less their group's mean, in float64; each row's group number; how many rows each row's group has."""
    _check_rows(reader, rewards, group_ids)
    _, group, counts = torch.unique(group_ids, return_inverse=True, return_counts=True)
    exact = rewards.double()
    none = exact.new_zeros(len(counts))
    means = none.index_add(0, group, exact) / counts
    low = none.scatter_reduce(0, group, exact, "amin", include_self=False)
    high = none.scatter_reduce(0, group, exact, "amax", include_self=False)
    # A mean of equal numbers need not be that number, and normalizing would blow the rounding up to an advantage.
    centred = torch.where((low == high)[group], 0, exact - means[group])
    return centred, group, counts[group]


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
    return _center("group_center", rewards, group_ids)[0].to(_dtype(rewards))


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
    centred, group, size = _center("group_normalize", rewards, group_ids)
    squares = torch.zeros_like(centred).index_add(0, group, centred.square())[group]
    std = (squares / (size - 1).clamp(min=1)).sqrt()
    return (centred / (std + _EPS)).to(_dtype(rewards))


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
    centred, _, size = _center("leave_one_out", rewards, group_ids)
    return (centred * size / (size - 1).clamp(min=1)).to(_dtype(rewards))


def per_group(fn: Callable[[Tensor], Tensor]) -> GroupFunction:
    """Lift a function of one group's rewards to all groups.

    Args:
        fn: ``[n] -> [n]``; rows keep their order within the group.

    Returns:
        ``(rewards [B], group_ids [B]) -> [B]``.

    Raises:
        BatchError: (when called) ``fn`` gave another shape than it got, or the inputs are not ``[B]`` and ``[B]``.

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
            found = fn(rewards[rows])
            if found.shape != (int(rows.sum()),):
                raise BatchError(
                    f"{name}: the function got {int(rows.sum())} rewards of group {int(group)} and returned shape "
                    f"{list(found.shape)}; return one number a row"
                )
            out = out.masked_scatter(rows, found.to(out.dtype))
        return out

    lifted.__name__ = name
    return lifted


def from_rewards(fn: GroupFunction) -> Estimator:
    """Make a function of rewards and groups one of the batch.

    Leaves out the rows that ``valid`` marks false, gives ``fn`` each episode once (``episode_ids``; absent, every row
    is one), and spreads what it returns over all rows of the episode and all tokens of ``loss_mask``.

    Args:
        fn: ``(rewards [n], group_ids [n]) -> [n]``, such as `group_normalize`; n is the number of valid episodes.

    Returns:
        ``batch -> [B, T]``, in the dtype of ``rewards``; 0 on invalid rows and outside ``loss_mask``. It reads
        ``rewards``, ``group_ids``, ``loss_mask`` and, where they are there, ``valid`` and ``episode_ids``.

    Raises:
        MissingColumn: (when called) the batch lacks one of the first three.
        BatchError: (when called) there are several rewards a row, the rows of one episode differ in reward or group, or
            ``fn`` did not return a number for each episode.
        NotFinite: (when called) the reward of a valid row is NaN or infinite.

    >>> batch = Batch(
    ...     {
    ...         "rewards": torch.tensor([1.0, 0.0]),
    ...         "group_ids": torch.tensor([0, 0]),
    ...         "loss_mask": torch.tensor([[False, True, True], [False, True, False]]),
    ...     },
    ...     batch_size=[2],
    ... )
    >>> from_rewards(group_center)(batch).tolist()
    [[0.0, 0.5, 0.5], [0.0, -0.5, 0.0]]
    """
    name = f"from_rewards({name_of(fn)})"

    def estimator(batch: Batch) -> Tensor:
        require(batch, "rewards", "group_ids", "loss_mask", reader=name)
        rewards, group_ids, mask = batch["rewards"], batch["group_ids"], batch["loss_mask"]
        if rewards.ndim > 1:
            raise BatchError(
                f"{name}: rewards has shape {list(rewards.shape)}; combine a row's rewards into one first: "
                "assign(batch, rewards=batch['rewards'].sum(-1))"
            )
        valid = batch.get("valid", torch.ones_like(group_ids, dtype=torch.bool))
        _check_finite(name, rewards, valid)
        rows = valid.nonzero().squeeze(-1)
        firsts, episode = _episodes(name, batch, rows)
        found = fn(rewards[firsts], group_ids[firsts]) if len(firsts) else rewards[firsts]
        if found.shape != firsts.shape:
            raise BatchError(
                f"{name}: the function got {len(firsts)} rewards and returned shape {list(found.shape)}; return one "
                "number for each"
            )
        per_row = torch.zeros_like(rewards).index_copy(0, rows, found.to(rewards.dtype)[episode])
        return masked(per_row.unsqueeze(-1).expand(mask.shape), mask)

    estimator.__name__ = name
    return estimator


def _check_finite(reader: str, rewards: Tensor, valid: Tensor) -> None:
    bad = (valid & ~rewards.isfinite()).nonzero().squeeze(-1).tolist()
    if bad:
        rows = ", ".join(map(str, bad[:8])) + (", ..." if len(bad) > 8 else "")
        raise NotFinite(
            f"{reader}: rewards is NaN or infinite in {len(bad)} valid rows ({rows}). A reward that could not be "
            "computed is no reward: mark these rows invalid with assign(batch, valid=batch['rewards'].isfinite())"
        )


def _episodes(reader: str, batch: TensorDict, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The first row of each episode among ``rows``, and for each of ``rows`` the number of its episode."""
    if "episode_ids" not in batch.keys():
        return rows, torch.arange(len(rows), device=rows.device)
    ids, episode = batch["episode_ids"][rows].unique(return_inverse=True)
    firsts = rows.new_zeros(len(ids)).scatter_reduce(0, episode, rows, "amin", include_self=False)
    for column in ("rewards", "group_ids"):
        differs = batch[column][rows] != batch[column][firsts][episode]
        if bool(differs.any()):
            row = int(rows[differs][0])
            raise BatchError(
                f"{reader}: row {row} has another value of {column} than the first row of its episode "
                f"{int(batch['episode_ids'][row])}; all rows of an episode share one reward and one group"
            )
    return firsts, episode


_NORMALIZED = from_rewards(group_normalize)


def advantages(batch: Batch, estimator: Estimator = _NORMALIZED) -> Batch:
    """Add the column ``advantages``; by default GRPO's, ``from_rewards(group_normalize)``.

    Args:
        batch: what the estimator reads; it is left as it is.
        estimator: ``batch -> [B, T]``.

    Raises:
        ColumnError: the estimator returned another shape, or no floats.
        MutatedBatch: (under ``NRL_DEBUG=1``) it wrote into the batch.

    >>> batch = Batch(
    ...     {
    ...         "rewards": torch.tensor([3.0, 1.0]),
    ...         "group_ids": torch.tensor([0, 0]),
    ...         "loss_mask": torch.tensor([[False, True], [False, True]]),
    ...     },
    ...     batch_size=[2],
    ... )
    >>> advantages(batch, from_rewards(leave_one_out))["advantages"].tolist()
    [[0.0, 2.0], [0.0, -2.0]]
    """
    with unchanged(batch, name_of(estimator)):
        found = estimator(batch)
    return assign(batch, advantages=found)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation, over the mask's tokens in their order.

        δ_k = r_k + γ V_{k+1} - V_k,   A_k = δ_k + γ λ A_{k+1},   R_k = A_k + V_k

    k counts the mask's tokens: those between (a tool's output, padding) are skipped without decay, and their rewards
    and values are not seen. After the last token both V and A are 0.

    Args:
        rewards: ``[*B, T]``; what each token earned.
        values: ``[*B, T]``; V before the token.
        mask: ``[*B, T]`` bool.
        gamma: discount, in [0, 1].
        lam: λ in [0, 1]; 0 is one-step TD, 1 is Monte Carlo.

    Returns:
        Advantages and returns, each ``[*B, T]``, 0 outside the mask. Without gradient.

    Raises:
        BatchError: the shapes differ.
        ValueError: ``gamma`` or ``lam`` is outside [0, 1].

    Source: https://arxiv.org/abs/1506.02438, eq. 16.

    >>> mask = torch.tensor([[True, False, True]])
    >>> rewards, values = torch.tensor([[0.0, 9.0, 1.0]]), torch.tensor([[0.5, 9.0, 0.5]])
    >>> [x.tolist() for x in gae(rewards, values, mask, gamma=1.0, lam=0.5)]
    [[[0.25, 0.0, 0.5]], [[0.75, 0.0, 1.0]]]
    """
    _check_fraction("gae", "gamma", gamma)
    _check_fraction("gae", "lam", lam)
    rewards, values = masked(rewards.detach(), mask), masked(values.detach(), mask)
    next_advantage = next_value = rewards.new_zeros(rewards.shape[:-1])
    found = []
    for t in reversed(range(mask.shape[-1])):
        here, value = mask[..., t], values[..., t]
        delta = rewards[..., t] + gamma * next_value - value
        next_advantage = torch.where(here, delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(here, value, next_value)
        found.append(next_advantage)
    advantages = masked(torch.stack(found[::-1], -1), mask) if found else values
    return advantages, advantages + values


def _check_fraction(reader: str, name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{reader}: {name} is {value}; it must be between 0 and 1")


def discounted_returns(rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """What each token and those after it earned, discounted; time runs over the mask's tokens as in `gae`.

        R_k = r_k + γ R_{k+1}

    Args:
        rewards: ``[*B, T]``; what each token earned.
        mask: ``[*B, T]`` bool.
        gamma: discount, in [0, 1].

    Returns:
        ``[*B, T]``, 0 outside the mask.

    Raises:
        BatchError: the shapes differ.
        ValueError: ``gamma`` is outside [0, 1].

    Source: Sutton and Barto, Reinforcement Learning (2018), eq. 3.9.

    >>> mask = torch.tensor([[True, False, True]])
    >>> discounted_returns(torch.tensor([[1.0, 9.0, 2.0]]), mask, gamma=0.5).tolist()
    [[2.0, 0.0, 2.0]]
    """
    _check_fraction("discounted_returns", "gamma", gamma)
    return gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, lam=1.0)[0]


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Shift and scale the mask's numbers, over the whole batch, to mean 0 and standard deviation 1.

        (x - mean) / (std + 1e-6),   std with n - 1

    Exactly 0 where they are all equal. A statistic of the whole batch, so for the driver.

    Args:
        x: ``[*B, T]`` float.
        mask: ``[*B, T]`` bool.

    Returns:
        ``[*B, T]``, 0 outside the mask.

    Raises:
        BatchError: the shapes differ.

    Source: advantage normalization, as in https://arxiv.org/abs/2005.12729, section 3.

    >>> mask = torch.tensor([[True, True, False, True]])
    >>> [round(v, 4) for v in whiten(torch.tensor([[1.0, 2.0, 9.0, 3.0]]), mask)[0].tolist()]
    [-1.0, 0.0, 0.0, 1.0]
    """
    chosen = masked(x, mask)[mask]
    whitened = group_normalize(chosen, torch.zeros_like(chosen, dtype=torch.int64))
    return torch.zeros_like(x, dtype=whitened.dtype).masked_scatter(mask, whitened)
