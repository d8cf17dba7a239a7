"""Advantages and returns over time, which runs over the mask's tokens in their order."""

import torch
from torch import Tensor

from nrl.algos._arguments import in_unit_interval
from nrl.algos.groups import group_normalize
from nrl.algos.masking import masked

__all__ = ["discounted_returns", "gae", "whiten"]


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation, over the mask's tokens in their order.

        δ_k = r_k + γ V_{k+1} - V_k,   A_k = δ_k + γ λ A_{k+1},   R_k = A_k + V_k

    k counts the mask's tokens. Time skips the tokens between them (a tool's output, padding) without decay, and ignores
    their rewards and values. After the last token both V and A are 0. Each row is a sequence of its own; where episodes
    may have several rows, take `episode_gae`.

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
    in_unit_interval("gae", "gamma", gamma)
    in_unit_interval("gae", "lam", lam)
    rewards, values = masked(rewards.detach(), mask), masked(values.detach(), mask)
    next_advantage = next_value = rewards.new_zeros(rewards.shape[:-1])
    reversed_advantages = []
    for t in reversed(range(mask.shape[-1])):
        is_action, value = mask[..., t], values[..., t]
        delta = rewards[..., t] + gamma * next_value - value
        next_advantage = torch.where(is_action, delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(is_action, value, next_value)
        reversed_advantages.append(next_advantage)
    advantages = masked(torch.stack(reversed_advantages[::-1], -1), mask) if reversed_advantages else values
    return advantages, advantages + values


def discounted_returns(rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """The discounted rewards of each token and those after it; time runs over the mask's tokens as in `gae`.

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
    in_unit_interval("discounted_returns", "gamma", gamma)
    if gamma == 1:  # a sum, which needs no loop over long rows
        return masked(masked(rewards.detach(), mask).flip(-1).cumsum(-1).flip(-1), mask)
    return gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, lam=1.0)[0]


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Shift and scale the mask's numbers, over the whole batch, to mean 0 and standard deviation 1.

        (x - mean) / (std + 1e-6),   std with n - 1

    Exactly 0 where they are all equal. The statistics are of the whole batch, so whiten on the driver. PPO's first code
    whitened each minibatch by itself, with n; the code for language models divides by sqrt(var + 1e-8), as verl does.

    Args:
        x: ``[*B, T]`` float.
        mask: ``[*B, T]`` bool.

    Returns:
        ``[*B, T]``, 0 outside the mask.

    Raises:
        BatchError: the shapes differ.

    Source: no paper's equation; ``whiten`` of https://github.com/openai/lm-human-preferences (``utils/core.py``), and
    before it ``train`` of https://github.com/openai/baselines (``ppo2/model.py``).

    >>> mask = torch.tensor([[True, True, False, True]])
    >>> [round(v, 4) for v in whiten(torch.tensor([[1.0, 2.0, 9.0, 3.0]]), mask)[0].tolist()]
    [-1.0, 0.0, 0.0, 1.0]
    """
    chosen = masked(x, mask)[mask]
    whitened = group_normalize(chosen, torch.zeros_like(chosen, dtype=torch.int64))
    return torch.zeros_like(x, dtype=whitened.dtype).masked_scatter(mask, whitened)
