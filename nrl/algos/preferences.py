"""Losses on answers that somebody has compared: a score of each answer, and a link from their difference to a loss."""

import math
from collections.abc import Callable

from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import logsigmoid

from nrl.algos.aggregate import token_mean
from nrl.algos.masking import masked, masked_column
from nrl.algos.protocol import MeanLoss, name_of, named, needed, needs
from nrl.batch import Batch, require
from nrl.errors import BatchError
from nrl.reduce import Mean, Metrics

__all__ = ["Link", "Score", "dpo_loss", "preference_loss", "simpo_loss"]

type Score = Callable[[Tensor, TensorDict], Tensor]
"""``(logprobs [P, 2, T], batch) -> [P, 2]``: how good an answer is, as the model sees it."""

type Link = Callable[[Tensor], Tensor]
"""``margin [P] -> loss [P]``, element by element."""


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
