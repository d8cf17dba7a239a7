"""KL penalties in the rewards instead of in the loss: ``batch -> batch``.

A reward is held fixed and reaches the gradient through log π alone. With `k1` the expected policy gradient is that of
the reward less coef times the true reverse KL(π_θ ‖ π_ref). The others differ: `k3`, although its value is unbiased,
gives the gradient of the reverse less that of the forward KL, and `k2` that of no divergence. A loss is the opposite
case: there, avoid `k1`. Source: https://arxiv.org/abs/2506.09477.
"""

import torch
from tensordict import TensorDict
from torch import Tensor

from nrl.algos._episodes import check_finite, episodes, over_episodes, row_rewards, trained_tokens
from nrl.algos.divergences import Penalty
from nrl.algos.masking import masked
from nrl.batch import Batch, assign, require

__all__ = ["penalized_rewards", "sampled_logprobs", "token_rewards"]


def sampled_logprobs(batch: TensorDict, reader: str) -> Tensor:
    """The log-probabilities of the policy that sampled, as constants: ``old_logprobs``, else ``rollout_logprobs``.

    Args:
        batch: has one of them.
        reader: who reads it, as a user would name it; for the error.

    Returns:
        ``[*B, T]``, nats; outside ``loss_mask`` it may hold anything.

    Raises:
        MissingColumn: the batch lacks both.
        NotFinite: one of a trained token is NaN or infinite.

    >>> import torch
    >>> mask = torch.tensor([[True]])
    >>> columns = {"rollout_logprobs": torch.tensor([[-1.0]]), "loss_mask": mask}
    >>> sampled_logprobs(Batch(columns, batch_size=[1]), reader="my_estimator").tolist()
    [[-1.0]]
    """
    column = "old_logprobs" if "old_logprobs" in batch.keys() or "rollout_logprobs" not in batch.keys() else None
    column = column or "rollout_logprobs"
    require(batch, column, reader=reader)
    check_finite(batch, column, reader=reader)
    logprobs: Tensor = batch[column].detach()
    return logprobs


def _penalties(batch: TensorDict, penalty: Penalty, reader: str) -> Tensor:
    mask = trained_tokens(batch)
    return masked(penalty(masked(sampled_logprobs(batch, reader), mask), batch).detach(), mask)


def _with_rest(turns: Tensor, totals: Tensor, mask: Tensor) -> Tensor:
    last = mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)
    return turns + masked(totals - turns.sum(-1, keepdim=True), last)


def token_rewards(batch: Batch, penalty: Penalty | None = None) -> Batch:
    """Add the column ``token_rewards``: an episode's reward at its last trained token, less a penalty at each.

        r_t = s_t + [t is the episode's last token] (r - Σ s) - penalty_t

    where s are the rewards of turns that `nrl.rollout` has put into the column, and 0 without it. So what was added to
    ``rewards`` since, such as a shaping of the length, is earned at the end. The rows of an episode that forked are one
    sequence: it earns its reward once, at the last token of its last turn.

    The penalty applies to the policy that sampled: ``old_logprobs``, else ``rollout_logprobs``. An episode without a
    trained token has none, whatever its reward was; invalid rows have 0.

    Args:
        batch: has ``rewards``, ``loss_mask``, and what the penalty reads; and ``turns``, where an episode has several
            rows.
        penalty: ``(logprobs, batch) -> [B, T]``, such as ``kl(k1, 0.01)``; None: no penalty.

    Raises:
        MissingColumn: the batch lacks a column.
        BatchError: a row has several rewards, the rows of an episode differ in theirs, or their turns do not say
            their order.
        NotFinite: a reward or log-probability of a valid row is NaN or infinite.

    Source: Ouyang et al., https://arxiv.org/abs/2203.02155, eq. 2; REINFORCE++, https://arxiv.org/abs/2501.03262v9,
    eq. 4.

    >>> import torch
    >>> from nrl.algos import k1, kl
    >>> mask = torch.tensor([[False, True, True]])
    >>> columns = {"old_logprobs": torch.tensor([[0.0, -1.0, -2.0]]), "ref_logprobs": torch.tensor([[0.0, -3.0, -2.0]])}
    >>> batch = Batch({**columns, "rewards": torch.tensor([1.0]), "loss_mask": mask}, batch_size=[1])
    >>> token_rewards(batch, kl(k1, 0.5))["token_rewards"].tolist()
    [[0.0, -1.0, 1.0]]
    """
    require(batch, "rewards", "loss_mask", reader="token_rewards")
    rewards = row_rewards(batch, reader="token_rewards")
    check_finite(batch, "rewards", reader="token_rewards")
    mask = trained_tokens(batch)
    episodes(batch, "rewards", reader="token_rewards")
    turns = (
        masked(batch["token_rewards"], mask)
        if "token_rewards" in batch.keys()
        else torch.zeros_like(rewards)[..., None].expand(mask.shape)
    )
    totals = rewards[..., None].expand(mask.shape)
    earned = over_episodes(_with_rest, batch, turns, totals, reader="token_rewards")
    if penalty is not None:
        earned = earned - _penalties(batch, penalty, "token_rewards")
    return assign(batch, token_rewards=earned)


def penalized_rewards(batch: Batch, penalty: Penalty) -> Batch:
    """Subtract the penalties of all of an episode's tokens from its reward, for estimators of one reward a row.

        r - Σ_t penalty_t

    The sum runs over the trained tokens of all valid rows of the episode, so that these keep one reward. The penalty is
    of the policy that sampled: ``old_logprobs``, else ``rollout_logprobs``. Invalid rows keep their reward.

    Args:
        batch: has ``rewards``, ``loss_mask``, and what the penalty reads.
        penalty: ``(logprobs, batch) -> [B, T]``, such as ``kl(k1, 0.05)``.

    Raises:
        MissingColumn: the batch lacks a column.
        BatchError: a row has several rewards.
        NotFinite: a reward or log-probability of a valid row is NaN or infinite.

    Source: Ahmadian et al., Back to Basics, https://arxiv.org/abs/2402.14740, section 2.

    >>> import torch
    >>> from nrl.algos import k1, kl
    >>> mask = torch.tensor([[False, True, True]])
    >>> columns = {"old_logprobs": torch.tensor([[0.0, -1.0, -2.0]]), "ref_logprobs": torch.tensor([[0.0, -3.0, -2.0]])}
    >>> batch = Batch({**columns, "rewards": torch.tensor([1.0]), "loss_mask": mask}, batch_size=[1])
    >>> penalized_rewards(batch, kl(k1, 0.25))["rewards"].tolist()
    [0.5]
    """
    require(batch, "rewards", "loss_mask", reader="penalized_rewards")
    rewards = row_rewards(batch, reader="penalized_rewards")
    check_finite(batch, "rewards", reader="penalized_rewards")
    by_episode = episodes(batch, "rewards", reader="penalized_rewards")
    cost = by_episode.rows(by_episode.sums(_penalties(batch, penalty, "penalized_rewards").sum(-1)))
    return assign(batch, rewards=rewards - cost)
