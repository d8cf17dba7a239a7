"""Policy-gradient losses, made of the parts in the other modules, and ready-made ones."""

import math

import torch
from tensordict import TensorDict
from torch import Tensor

from nrl.algos.aggregate import Aggregate, seq_mean, token_mean
from nrl.algos.corrections import Correction
from nrl.algos.divergences import Penalty, k3
from nrl.algos.masking import masked, masked_column
from nrl.algos.protocol import MeanLoss, name_of, named, needed, needs
from nrl.algos.ratios import Ratio, bounded, token_ratio
from nrl.algos.surrogates import Surrogate, clip
from nrl.batch import Batch
from nrl.reduce import Max, Mean, Metrics

__all__ = ["dapo_loss", "grpo_loss", "policy_loss"]


def policy_loss(
    surrogate: Surrogate,
    *,
    ratio: Ratio = token_ratio,
    penalty: Penalty | None = None,
    correction: Correction | None = None,
    aggregate: Aggregate = token_mean,
) -> MeanLoss:
    """A policy-gradient loss, put together from its parts.

        aggregate_t( w_t surrogate(ratio, log π_θ, A)_t + penalty_t )

    with w the correction's weight, 1 without one. The penalty is not weighted.

    Args:
        surrogate: `clip`, `cispo`, `reinforce`, or any ``(log_ratio, logprobs, advantages) -> per-token loss``.
        ratio: `token_ratio`, `on_policy_ratio`, `sequence_ratio`, or any ``(logprobs, batch) -> log-ratio``.
        penalty: `kl`, or any ``(logprobs, batch) -> per-token``.
        correction: `truncate`, `icepop`, or any ``(log_ratio, mask) -> weight``; detached. It gets old/rollout, or
            theta/rollout where the batch has no ``old_logprobs``.
        aggregate: `token_mean`, `seq_mean`, ``seq_sum(L)``, or any ``(x, mask) -> Mean``.

    Returns:
        A loss over ``loss_mask``, which reads ``advantages`` and what its parts read, and needs what they need.
        Metrics, over tokens: ``ratio`` and ``ratio_max``; ``clip_fraction`` where the surrogate clips; ``approx_kl``
        (k3 of old against theta) where the batch has ``old_logprobs``; ``penalty``, its coefficient included;
        ``correction``, the weights.

    Raises:
        MissingColumn: (when called) the batch lacks a column.

    >>> mask = torch.tensor([[False, True, True]])
    >>> columns = {"loss_mask": mask, "advantages": 2.0 * mask, "old_logprobs": -1.0 * mask}
    >>> batch = Batch(columns, batch_size=[1])
    >>> out = TensorDict({"logprobs": -1.0 * mask}, batch_size=[1])
    >>> loss, metrics = policy_loss(clip(0.2))(out, batch)
    >>> loss.total.item(), loss.weight.item(), metrics["ratio"].total.item()
    (-4.0, 2.0, 2.0)
    """

    @needs(*needed(surrogate, ratio, penalty, correction, aggregate))
    def policy_loss(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
        advantages = masked_column(batch, "advantages", reader=name_of(policy_loss))
        mask = batch["loss_mask"]
        logprobs = masked(out["logprobs"], mask)
        log_ratio = ratio(logprobs, batch)
        loss = surrogate(log_ratio, logprobs, advantages)
        metrics = _ratio_metrics(surrogate, log_ratio.detach(), logprobs.detach(), advantages, batch)
        if correction is not None:
            weight = correction(_mismatch(logprobs.detach(), batch, name_of(policy_loss)), mask).detach()
            loss = loss * weight
            metrics["correction"] = token_mean(weight, mask)
        if penalty is not None:
            cost = penalty(logprobs, batch)
            loss = loss + cost
            metrics["penalty"] = token_mean(cost.detach(), mask)
        return aggregate(loss, mask), metrics

    return policy_loss


def _mismatch(logprobs: Tensor, batch: Batch, reader: str) -> Tensor:
    """The log-ratio of the trainer's policy to the sampler's."""
    trained = masked_column(batch, "old_logprobs", reader) if "old_logprobs" in batch.keys() else logprobs
    return trained - masked_column(batch, "rollout_logprobs", reader)


def _ratio_metrics(
    surrogate: Surrogate, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, batch: Batch
) -> Metrics:
    mask, ratio = batch["loss_mask"], bounded(log_ratio).exp()
    none = ratio.new_full((1,), -math.inf)
    largest = torch.cat([none, torch.where(mask, ratio, -math.inf).flatten()]).max()
    metrics: Metrics = {"ratio": token_mean(ratio, mask), "ratio_max": Max(largest)}
    if hasattr(surrogate, "clipped"):
        metrics["clip_fraction"] = token_mean(surrogate.clipped(log_ratio, advantages).to(ratio.dtype), mask)
    if "old_logprobs" in batch.keys():
        old = masked_column(batch, "old_logprobs", reader="policy_loss")
        metrics["approx_kl"] = token_mean(k3(old, logprobs), mask)
    return metrics


grpo_loss = named(
    "grpo_loss",
    """GRPO without a penalty: ``policy_loss(clip(0.2), aggregate=seq_mean)``.

    Reads ``advantages``, ``old_logprobs`` and ``loss_mask``. The paper adds ``penalty=kl(k3, 0.04)``.

    Source: https://arxiv.org/abs/2402.03300, eq. 3.

    >>> mask = torch.tensor([[True, True], [True, False]])
    >>> columns = {"loss_mask": mask, "advantages": 1.0 * mask, "old_logprobs": -1.0 * mask}
    >>> out = TensorDict({"logprobs": -1.0 * mask}, batch_size=[2])
    >>> loss, _ = grpo_loss(out, Batch(columns, batch_size=[2]))
    >>> loss.total.item(), loss.weight.item()
    (-2.0, 2.0)
    """,
    policy_loss(clip(0.2), aggregate=seq_mean),
)

dapo_loss = named(
    "dapo_loss",
    """DAPO's loss, clip-higher and a mean over tokens: ``policy_loss(clip(0.2, 0.28))``.

    Reads ``advantages``, ``old_logprobs`` and ``loss_mask``. The method's dynamic sampling is `nrl.drop_uniform`.

    Source: https://arxiv.org/abs/2503.14476, eq. 8.

    >>> mask = torch.tensor([[True, True], [True, False]])
    >>> columns = {"loss_mask": mask, "advantages": 1.0 * mask, "old_logprobs": -1.0 * mask}
    >>> out = TensorDict({"logprobs": -1.0 * mask}, batch_size=[2])
    >>> loss, _ = dapo_loss(out, Batch(columns, batch_size=[2]))
    >>> loss.total.item(), loss.weight.item()
    (-3.0, 3.0)
    """,
    policy_loss(clip(0.2, 0.28)),
)
