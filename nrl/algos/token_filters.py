"""Selections of the tokens of a policy loss: ``(logprobs, batch) -> weight``, ``[*B, T]``, without gradient.

A selection sees theta and the whole batch, advantages too; a correction sees only a log-ratio. It multiplies the
surrogate and not the penalty. Tokens of weight 0 stay in the denominator.
"""

from collections.abc import Callable

from tensordict import TensorDict
from torch import Tensor

from nrl.algos._reductions import row_means
from nrl.algos.masking import masked, masked_column
from nrl.arguments import checked
from nrl.batch import Batch
from nrl.errors import ArgumentError

__all__ = ["Selection", "opsm"]

type Selection = Callable[[Tensor, TensorDict], Tensor]
"""``(logprobs, batch) -> weight``, ``[*B, T]``; `policy_loss` detaches it."""


@checked("opsm", finite=False)
def opsm(delta: float) -> Selection:
    """Off-policy sequence masking: leave out bad rows that have become unlikely under theta.

        0  where A_t < 0 and 1/|y| Σ_t log(π_rollout/π_θ) > delta,  1 elsewhere

    An unlikely bad row teaches little. Good rows stay, however far theta is.

    Args:
        delta: nats a token, at least 0.

    Returns:
        ``(logprobs, batch) -> weight``, which reads ``rollout_logprobs``, ``advantages`` and ``loss_mask``.

    Raises:
        ValueError: ``delta`` is negative or NaN.

    Source: DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, eq. 8 and 9; as there, the older policy is the sampler's
    own.

    >>> import torch
    >>> mask, signs = torch.ones(2, 2, dtype=torch.bool), torch.tensor([[-1.0, -1.0], [1.0, 1.0]])
    >>> columns = {"loss_mask": mask, "rollout_logprobs": torch.full((2, 2), -1.0), "advantages": signs}
    >>> opsm(0.5)(torch.full((2, 2), -2.0), Batch(columns, batch_size=[2])).tolist()
    [[0.0, 0.0], [1.0, 1.0]]
    """
    if not delta >= 0:
        raise ArgumentError(f"opsm: delta is {delta}; it is a divergence in nats a token, so it must be at least 0")

    def opsm(logprobs: Tensor, batch: Batch) -> Tensor:
        sampled = masked_column(batch, "rollout_logprobs", reader="opsm")
        advantages = masked_column(batch, "advantages", reader="opsm")
        mask = batch["loss_mask"]
        apart = sampled - masked(logprobs.detach(), mask)
        left_behind = (advantages < 0) & (row_means(apart, mask) > delta)
        mask_of_kept: Tensor = mask & ~left_behind
        return mask_of_kept.to(apart.dtype)

    return opsm
