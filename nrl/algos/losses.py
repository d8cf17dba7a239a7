"""Losses, made of the parts in the other modules, and ready-made ones."""

import math
from collections.abc import Callable

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import logsigmoid

from nrl.algos.aggregate import Aggregate, seq_mean, token_mean
from nrl.algos.corrections import Correction
from nrl.algos.divergences import Penalty, k3
from nrl.algos.masking import masked, masked_column
from nrl.algos.protocol import MeanLoss, name_of, named, needed, needs
from nrl.algos.ratios import Ratio, bounded, token_ratio
from nrl.algos.surrogates import Surrogate, clip
from nrl.batch import Batch, require
from nrl.errors import BatchError
from nrl.reduce import Max, Mean, Metrics

__all__ = [
    "Link",
    "Score",
    "dapo_loss",
    "dpo_loss",
    "grpo_loss",
    "policy_loss",
    "preference_loss",
    "sft_loss",
    "simpo_loss",
]


type Score = Callable[[Tensor, TensorDict], Tensor]
"""``(logprobs [P, 2, T], batch) -> [P, 2]``: how good an answer is, as the model sees it."""

type Link = Callable[[Tensor], Tensor]
"""``margin [P] -> loss [P]``, element by element."""


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


def preference_loss(score: Score, link: Link) -> MeanLoss:
    """A loss on the difference between the scores of two answers, the chosen and the rejected one.

        mean over pairs of link(score_chosen - score_rejected)

    Args:
        score: ``(logprobs [P, 2, T], batch) -> [P, 2]``; the log-probabilities are 0 outside ``loss_mask``.
        link: ``margin [P] -> loss [P]``, element by element.

    Returns:
        A loss on batches of size ``[P, 2]``, chosen first. Weight: the pairs of which both rows have a token; others
        are not seen. Metrics, over pairs: ``accuracy`` (how often the chosen one scores higher), ``margin``,
        ``chosen_score``, ``rejected_score``.

    Raises:
        MissingColumn: (when called) the batch lacks a column.
        BatchError: (when called) the batch is not one of pairs, or a part returned the wrong shape.

    >>> batch = Batch({"loss_mask": torch.ones(1, 2, 1, dtype=torch.bool)}, batch_size=[1, 2])
    >>> out = TensorDict({"logprobs": torch.tensor([[[-1.0], [-3.0]]])}, batch_size=[1, 2])
    >>> hinge = preference_loss(lambda logprobs, batch: logprobs.sum(-1), lambda margin: (3 - margin).relu())
    >>> loss, metrics = hinge(out, batch)
    >>> loss.total.item(), loss.weight.item(), metrics["margin"].total.item()
    (1.0, 1.0, 2.0)
    """

    @needs(*needed(score, link))
    def preference_loss(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
        name = name_of(preference_loss)
        require(batch, "loss_mask", reader=name)
        mask = batch["loss_mask"]
        if mask.ndim != 3 or mask.shape[1] != 2:
            raise BatchError(
                f"{name}: loss_mask has shape {list(mask.shape)}; preferences are pairs, [P, 2, T] with the chosen row "
                "first (batch size [P, 2])"
            )
        scores = score(masked(out["logprobs"], mask), batch)
        if scores.shape != mask.shape[:-1]:
            raise BatchError(
                f"{name}: the score has shape {list(scores.shape)}; it must be one number a row, "
                f"{list(mask.shape[:-1])}"
            )
        counted = mask.any(-1).all(-1)
        chosen, rejected = (masked(x, counted) for x in scores.unbind(-1))
        margin = chosen - rejected
        seen = {
            "accuracy": (margin > 0).to(margin.dtype),
            "margin": margin,
            "chosen_score": chosen,
            "rejected_score": rejected,
        }
        return token_mean(link(margin), counted), {key: token_mean(x.detach(), counted) for key, x in seen.items()}

    return preference_loss


def _log_sigmoid_link(gamma: float) -> Link:
    return lambda margin: -logsigmoid(margin - gamma)


def _check_positive(reader: str, name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{reader}: {name} is {value}; it must be positive and finite")


def dpo_loss(beta: float) -> MeanLoss:
    """Direct preference optimization.

        -log σ(β Σ_t [log π_θ/π_ref](chosen) - β Σ_t [log π_θ/π_ref](rejected))

    log 2 where theta is the reference. Scores are the implicit rewards, in nats times β.

    Args:
        beta: β > 0; often 0.1.

    Returns:
        A `preference_loss`, which reads ``ref_logprobs`` and ``loss_mask``.

    Raises:
        ValueError: ``beta`` is not positive and finite.

    Source: https://arxiv.org/abs/2305.18290, eq. 7.

    >>> mask = torch.ones(1, 2, 1, dtype=torch.bool)
    >>> batch = Batch({"loss_mask": mask, "ref_logprobs": -1.0 * mask}, batch_size=[1, 2])
    >>> out = TensorDict({"logprobs": -1.0 * mask}, batch_size=[1, 2])
    >>> round(dpo_loss(0.1)(out, batch)[0].total.item(), 4)
    0.6931
    """
    _check_positive("dpo_loss", "beta", beta)

    def score(logprobs: Tensor, batch: Batch) -> Tensor:
        return beta * (logprobs - masked_column(batch, "ref_logprobs", reader="dpo_loss")).sum(-1)

    return named("dpo_loss", "DPO; see `nrl.algos.dpo_loss`.", preference_loss(score, _log_sigmoid_link(0.0)))


def simpo_loss(beta: float, gamma: float) -> MeanLoss:
    """Simple preference optimization: length-normalised, with a margin and without a reference.

        -log σ(β/|y_w| Σ_t log π_θ(chosen) - β/|y_l| Σ_t log π_θ(rejected) - γ)

    γ is subtracted from the scaled difference, as in the paper; where a library gives the ratio γ/β, multiply it by β.

    Args:
        beta: β > 0; often 2 to 2.5.
        gamma: γ >= 0, the margin to reach; often 0.5 to 1.5.

    Returns:
        A `preference_loss`, which reads ``loss_mask``. Its metric ``margin`` is before γ.

    Raises:
        ValueError: ``beta`` is not positive and finite, or ``gamma`` is negative or not finite.

    Source: https://arxiv.org/abs/2405.14734, eq. 6.

    >>> batch = Batch({"loss_mask": torch.tensor([[[True, True], [True, False]]])}, batch_size=[1, 2])
    >>> out = TensorDict({"logprobs": torch.tensor([[[-1.0, -3.0], [-2.5, 0.0]]])}, batch_size=[1, 2])
    >>> round(simpo_loss(beta=2.0, gamma=1.0)(out, batch)[0].total.item(), 4)  # the margin reaches gamma
    0.6931
    """
    _check_positive("simpo_loss", "beta", beta)
    if not 0 <= gamma < math.inf:
        raise ValueError(f"simpo_loss: gamma is {gamma}; it must be finite and at least 0")

    def score(logprobs: Tensor, batch: Batch) -> Tensor:
        lengths: Tensor = batch["loss_mask"].sum(-1)
        return beta * logprobs.sum(-1) / lengths.clamp(min=1)

    return named("simpo_loss", "SimPO; see `nrl.algos.simpo_loss`.", preference_loss(score, _log_sigmoid_link(gamma)))


def sft_loss(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
    """Supervised fine-tuning: the negative log-likelihood of the tokens of ``loss_mask``, in nats a token.

        -1/N Σ_i Σ_t log π_θ(y_{i,t})

    Args:
        out: has ``logprobs`` ``[*B, T]``.
        batch: has ``loss_mask`` ``[*B, T]``.

    Raises:
        MissingColumn: the batch lacks it.

    Source: maximum likelihood.

    >>> batch = Batch({"loss_mask": torch.tensor([[False, True, True]])}, batch_size=[1])
    >>> loss, _ = sft_loss(TensorDict({"logprobs": torch.tensor([[0.0, -1.0, -2.0]])}, batch_size=[1]), batch)
    >>> loss.total.item(), loss.weight.item()
    (3.0, 2.0)
    """
    require(batch, "loss_mask", reader="sft_loss")
    return token_mean(-out["logprobs"], batch["loss_mask"]), {}


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
