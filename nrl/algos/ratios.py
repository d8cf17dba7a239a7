"""Log-ratios of two policies: ``(logprobs, batch) -> log-ratio``, all ``[*B, T]`` in nats.

``logprobs`` are those of theta, the policy in training, and carry the gradient. Log-ratios are 0 outside ``loss_mask``
and `bounded`, so that their ``exp`` is finite.
"""

from collections.abc import Callable

import torch
from tensordict import TensorDict
from torch import Tensor

from nrl.algos._reductions import row_means
from nrl.algos.masking import masked, masked_column
from nrl.arguments import checked
from nrl.batch import Batch, require
from nrl.errors import ArgumentError

__all__ = [
    "Ratio",
    "bounded",
    "geometric_ratio",
    "on_policy_ratio",
    "product_ratio",
    "rollout_ratio",
    "sequence_ratio",
    "token_ratio",
]

type Ratio = Callable[[Tensor, TensorDict], Tensor]
"""``(logprobs, batch) -> log-ratio``, ``[*B, T]`` in nats, 0 outside ``loss_mask``."""

_BOUND = 20.0


def bounded(log_ratio: Tensor) -> Tensor:
    """A log-ratio of at most 20 nats, so that its ``exp`` (at most 4.9e8) is finite; beyond that its gradient is 0.

        min(x, 20)

    Small ratios need no bound: their ``exp`` is 0, and so is its gradient.

    Args:
        log_ratio: any shape, nats.

    >>> bounded(torch.tensor([1e4, 0.5, -1e4])).tolist()
    [20.0, 0.5, -10000.0]
    """
    return log_ratio.clamp(max=_BOUND)


def token_ratio(logprobs: Tensor, batch: Batch) -> Tensor:
    """Each token's log-ratio of theta to the policy that the step started from.

        log π_θ(y_t | y_<t) - log π_old(y_t | y_<t)

    Args:
        logprobs: ``[*B, T]``, nats.
        batch: has ``old_logprobs`` and ``loss_mask``, both ``[*B, T]``.

    Raises:
        MissingColumn: the batch lacks a column.

    Source: PPO, https://arxiv.org/abs/1707.06347, eq. 6.

    >>> mask = torch.tensor([[False, True]])
    >>> batch = Batch({"loss_mask": mask, "old_logprobs": torch.tensor([[0.0, -1.5]])}, batch_size=[1])
    >>> token_ratio(torch.tensor([[0.0, -1.0]]), batch).tolist()
    [[0.0, 0.5]]
    """
    old = masked_column(batch, "old_logprobs", reader="token_ratio")
    return bounded(masked(logprobs, batch["loss_mask"]) - old)


def rollout_ratio(logprobs: Tensor, batch: Batch) -> Tensor:
    """Each token's log-ratio of theta to the policy that sampled it.

        log π_θ(y_t | y_<t) - log π_rollout(y_t | y_<t)

    Methods that bound the distance of theta from the sampler, rather than correct for it, use this ratio.

    Args:
        logprobs: ``[*B, T]``, nats.
        batch: has ``rollout_logprobs`` and ``loss_mask``, both ``[*B, T]``.

    Raises:
        MissingColumn: the batch lacks a column.

    Source: DPPO, https://arxiv.org/abs/2602.04879, eq. 12, where the sampler's policy is μ.

    >>> mask = torch.tensor([[False, True]])
    >>> batch = Batch({"loss_mask": mask, "rollout_logprobs": torch.tensor([[0.0, -1.5]])}, batch_size=[1])
    >>> rollout_ratio(torch.tensor([[0.0, -1.0]]), batch).tolist()
    [[0.0, 0.5]]
    """
    sampled = masked_column(batch, "rollout_logprobs", reader="rollout_ratio")
    return bounded(masked(logprobs, batch["loss_mask"]) - sampled)


def on_policy_ratio(logprobs: Tensor, batch: Batch) -> Tensor:
    """The log-ratio of theta to itself: 0, with the gradient of ``logprobs``.

        log π_θ(y_t | y_<t) - stop_gradient(log π_θ(y_t | y_<t))

    Use it with one update a batch, where theta is the policy that the step started from, and ``old_logprobs`` are not
    needed.

    Args:
        logprobs: ``[*B, T]``, nats.
        batch: has ``loss_mask`` ``[*B, T]``.

    Raises:
        MissingColumn: the batch lacks the column.

    Source: REINFORCE's gradient as that of a ratio, as in DiCE, https://arxiv.org/abs/1802.05098.

    >>> batch = Batch({"loss_mask": torch.tensor([[False, True]])}, batch_size=[1])
    >>> on_policy_ratio(torch.tensor([[0.0, -1.0]]), batch).tolist()
    [[0.0, 0.0]]
    """
    require(batch, "loss_mask", reader="on_policy_ratio")
    theta = masked(logprobs, batch["loss_mask"])
    return theta - theta.detach()


def sequence_ratio(logprobs: Tensor, batch: Batch) -> Tensor:
    """Each row's length-normalised log-ratio, the same at all of its tokens.

        log s_i = 1/|y_i| Σ_t (log π_θ(y_{i,t} | y_{i,<t}) - log π_old(y_{i,t} | y_{i,<t}))

    The gradient flows through the mean, to every token of the row. This is GSPO itself, not GSPO-token (which has the
    value of ``s_i`` and the gradient of each token's own log-probability).

    Args:
        logprobs: ``[*B, T]``, nats.
        batch: has ``old_logprobs`` and ``loss_mask``, both ``[*B, T]``.

    Raises:
        MissingColumn: the batch lacks a column.

    Source: GSPO, https://arxiv.org/abs/2507.18071, eq. 7.

    >>> mask = torch.tensor([[False, True, True]])
    >>> batch = Batch({"loss_mask": mask, "old_logprobs": torch.tensor([[0.0, -1.0, -2.0]])}, batch_size=[1])
    >>> sequence_ratio(torch.tensor([[0.0, -2.0, -4.0]]), batch).tolist()
    [[0.0, -1.5, -1.5]]
    """
    old = masked_column(batch, "old_logprobs", reader="sequence_ratio")
    mask = batch["loss_mask"]
    means = bounded(row_means(masked(logprobs, mask) - old, mask))
    return masked(means.expand(mask.shape), mask)


def product_ratio(ratio: Ratio) -> Ratio:
    """The ratio of whole rows, the product over their tokens, the same at all of them.

        log W_i = Σ_t log r_{i,t}

    It has no length normalisation, unlike `sequence_ratio`, so its spread grows with the length of a row. The tokens'
    own ratios are `bounded`, and so is their product.

    Args:
        ratio: of the tokens: `token_ratio`, `rollout_ratio`, or another.

    Returns:
        ``(logprobs, batch) -> log-ratio [*B, T]``; the gradient flows through the sum, to every token of the row.

    Source: VESPO, https://arxiv.org/abs/2602.10693, section 2, where W is the ratio to the sampler's policy.

    >>> mask = torch.tensor([[False, True, True]])
    >>> batch = Batch({"loss_mask": mask, "old_logprobs": torch.tensor([[0.0, -1.0, -2.0]])}, batch_size=[1])
    >>> product_ratio(token_ratio)(torch.tensor([[0.0, -2.0, -4.0]]), batch).tolist()
    [[0.0, -3.0, -3.0]]
    """

    def product_ratio(logprobs: Tensor, batch: Batch) -> Tensor:
        tokens = ratio(logprobs, batch)
        return masked(bounded(tokens.sum(-1, keepdim=True)).expand(tokens.shape), batch["loss_mask"])

    return product_ratio


@checked("geometric_ratio", finite=False)
def geometric_ratio(low: float, high: float | None = None) -> Ratio:
    """The geometric mean of a row's ratios, each clipped where that lowers the objective, the same at all its tokens.

        log ρ_i = 1/|y_i| Σ_t s min(s x_t, s clamp(x_t, -low, high)),   x_t = log r_{i,t},   s = sign(A_{i,t})

    Each token is clipped before the mean, so that no single token can move the row far. `nrl.algos.gmpo_loss` uses it,
    for advantages that are the same over a row.

    Args:
        low: nats that a token may lose, at least 0; 0.4 in the paper. Not a distance from 1.
        high: nats that it may gain; ``low`` unless given.

    Returns:
        ``(logprobs, batch) -> log-ratio [*B, T]``, which reads ``old_logprobs``, ``advantages`` and ``loss_mask``.

    Raises:
        ValueError: a bound is negative.

    Source: GMPO, https://arxiv.org/abs/2507.20673, eq. 4.

    >>> mask = torch.tensor([[True, True]])
    >>> columns = {"loss_mask": mask, "old_logprobs": torch.zeros(1, 2), "advantages": torch.ones(1, 2)}
    >>> geometric_ratio(0.5)(torch.tensor([[1.5, -1.5]]), Batch(columns, batch_size=[1])).tolist()  # 0.5 and -1.5
    [[-0.5, -0.5]]
    """
    high = low if high is None else high
    for name, bound in (("low", low), ("high", high)):
        if not bound >= 0:
            raise ArgumentError(
                f"geometric_ratio: {name} is {bound}; it is a distance in nats, so it must be at least 0", name
            )

    def geometric_ratio(logprobs: Tensor, batch: Batch) -> Tensor:
        tokens = token_ratio(logprobs, batch)
        mask = batch["loss_mask"]
        sign = masked_column(batch, "advantages", reader="geometric_ratio").sign()
        clipped = tokens.clamp(-low, high)
        worse = torch.where(sign < 0, torch.maximum(tokens, clipped), torch.minimum(tokens, clipped))
        return masked(row_means(worse, mask).expand(mask.shape), mask)

    return geometric_ratio
