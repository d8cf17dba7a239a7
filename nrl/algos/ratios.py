"""Log-ratios of two policies: ``(logprobs, batch) -> log-ratio``, all ``[*B, T]`` in nats.

``logprobs`` are those of theta, the policy that is trained, and carry the gradient. Log-ratios are 0 outside
``loss_mask`` and `bounded`, so that their ``exp`` is finite.
"""

from collections.abc import Callable

from tensordict import TensorDict
from torch import Tensor

from nrl.algos.masking import masked, masked_column
from nrl.batch import Batch, require

__all__ = ["Ratio", "bounded", "on_policy_ratio", "sequence_ratio", "token_ratio"]

type Ratio = Callable[[Tensor, TensorDict], Tensor]
"""``(logprobs, batch) -> log-ratio``, ``[*B, T]`` in nats, 0 outside ``loss_mask``."""

_BOUND = 20.0


def bounded(log_ratio: Tensor) -> Tensor:
    """A log-ratio of at most 20 nats, whose ``exp`` (at most 4.9e8) is finite; without a gradient beyond that.

        min(x, 20)

    Small ratios need no bound: their ``exp`` is 0, and so is its gradient.

    Args:
        log_ratio: any shape, nats.

    >>> import torch
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
        MissingColumn: the batch lacks one of them.

    Source: PPO, https://arxiv.org/abs/1707.06347, eq. 6.

    >>> import torch
    >>> mask = torch.tensor([[False, True]])
    >>> batch = Batch({"loss_mask": mask, "old_logprobs": torch.tensor([[0.0, -1.5]])}, batch_size=[1])
    >>> token_ratio(torch.tensor([[0.0, -1.0]]), batch).tolist()
    [[0.0, 0.5]]
    """
    old = masked_column(batch, "old_logprobs", reader="token_ratio")
    return bounded(masked(logprobs, batch["loss_mask"]) - old)


def on_policy_ratio(logprobs: Tensor, batch: Batch) -> Tensor:
    """The log-ratio of theta to itself: 0, with the gradient of ``logprobs``.

        log π_θ(y_t | y_<t) - stop_gradient(log π_θ(y_t | y_<t))

    For one update a batch, where theta is the policy that the step started from and ``old_logprobs`` are not needed.

    Args:
        logprobs: ``[*B, T]``, nats.
        batch: has ``loss_mask`` ``[*B, T]``.

    Raises:
        MissingColumn: the batch lacks it.

    Source: REINFORCE's gradient as that of a ratio, as in DiCE, https://arxiv.org/abs/1802.05098.

    >>> import torch
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
        MissingColumn: the batch lacks one of them.

    Source: GSPO, https://arxiv.org/abs/2507.18071, eq. 7.

    >>> import torch
    >>> mask = torch.tensor([[False, True, True]])
    >>> batch = Batch({"loss_mask": mask, "old_logprobs": torch.tensor([[0.0, -1.0, -2.0]])}, batch_size=[1])
    >>> sequence_ratio(torch.tensor([[0.0, -2.0, -4.0]]), batch).tolist()
    [[0.0, -1.5, -1.5]]
    """
    old = masked_column(batch, "old_logprobs", reader="sequence_ratio")
    mask = batch["loss_mask"]
    sums = (masked(logprobs, mask) - old).sum(-1, keepdim=True)
    means = bounded(sums / mask.sum(-1, keepdim=True).clamp(min=1))
    return masked(means.expand(mask.shape), mask)
