"""Distillation from a teacher's most probable tokens at each position.

The teacher's probability of all other tokens is one more event, the tail, so nothing is renormalised and no mass is
lost: a divergence of these k + 1 events is at most the one over the vocabulary, by the data processing inequality.
"""

import math
from collections.abc import Callable

import torch
from tensordict import TensorDict
from torch import Tensor

from nrl.algos._reductions import aggregate_tokens
from nrl.algos.aggregate import Aggregate, token_mean
from nrl.algos.divergences import log1mexp
from nrl.algos.loss_contract import MeanLoss, logprobs_at, name_of, named, needs
from nrl.algos.masking import masked
from nrl.arguments import checked
from nrl.batch import Batch, require
from nrl.batch.metrics import Mean, Metrics
from nrl.errors import ArgumentError, BatchError

__all__ = ["Distance", "distillation_loss", "forward_kl", "jsd", "reverse_kl", "with_tail"]

_LEAST = -1e4
"""Nats of a token that a teacher rules out, as top-p does: no probability, and a distance that is finite."""

type Distance = Callable[[Tensor, Tensor], Tensor]
"""``(student [*, n], teacher [*, n]) -> [*]``: between two distributions, given by their log-probabilities in nats."""


def with_tail(logprobs: Tensor) -> Tensor:
    """Append the log-probability of all other tokens together.

        log(1 - Σ_j exp(x_j))

    Args:
        logprobs: ``[*, k]``, nats, of different tokens. A sum above 1, which rounding can cause, counts as 1 - 1e-7.

    Returns:
        ``[*, k + 1]``.

    Source: the events that are compared in DPPO, https://arxiv.org/abs/2602.04879, eq. 15 and 16.

    >>> with_tail(torch.tensor([0.5, 0.25]).log()).exp().tolist()
    [0.5, 0.25, 0.25]
    """
    return torch.cat([logprobs, log1mexp(logprobs.logsumexp(-1, keepdim=True))], -1)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)


def forward_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher ‖ student): the student covers what the teacher does.

        Σ_j p_j (log p_j - log q_j),   p the teacher's, q the student's

    Args:
        student: ``[*, n]``, nats.
        teacher: ``[*, n]``, nats.

    Source: Hinton et al., https://arxiv.org/abs/1503.02531, up to the teacher's own entropy.

    >>> half, most = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.75, 0.25]).log()
    >>> round(forward_kl(half, most).item(), 4)
    0.1308
    """
    return _kl(teacher, student)


def reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(student ‖ teacher): the student stays within what the teacher does.

        Σ_j q_j (log q_j - log p_j),   p the teacher's, q the student's

    Args:
        student: ``[*, n]``, nats.
        teacher: ``[*, n]``, nats.

    Source: MiniLLM, https://arxiv.org/abs/2306.08543.

    >>> half, most = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.75, 0.25]).log()
    >>> round(reverse_kl(half, most).item(), 4)
    0.1438
    """
    return _kl(student, teacher)


@checked("jsd", finite=False)
def jsd(beta: float) -> Distance:
    """The generalised Jensen-Shannon divergence, between the two KLs.

        β KL(p ‖ m) + (1 - β) KL(q ‖ m),   m = β p + (1 - β) q,   p the teacher's, q the student's

    Divided by β it tends to the forward KL as β goes to 0; divided by 1 - β, to the reverse KL as β goes to 1. It is at
    most log 2. Libraries that exchange the weights of the mixture write 1 - β for this β.

    Args:
        beta: β, between 0 and 1 and neither; 0.5 is the Jensen-Shannon divergence itself.

    Raises:
        ValueError: ``beta`` is not between 0 and 1.

    Source: GKD, https://arxiv.org/abs/2306.13649, eq. 1.

    >>> half, most = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.75, 0.25]).log()
    >>> round(jsd(0.5)(half, most).item(), 4)
    0.0338
    """
    if not 0 < beta < 1:
        raise ArgumentError(
            f"jsd: beta is {beta}; it is the teacher's part of the mixture, between 0 and 1. For the ends take "
            "forward_kl and reverse_kl"
        )

    def jsd(student: Tensor, teacher: Tensor) -> Tensor:
        mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
        return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)

    return jsd


def distillation_loss(distance: Distance = forward_kl, *, aggregate: Aggregate = token_mean) -> MeanLoss:
    """The distance of the student from the teacher, at each token of ``loss_mask``.

        aggregate_t( distance(q(· | y_<t), p(· | y_<t)) ),   over the teacher's k tokens and the tail

    The text may be the teacher's, a data set's, or the student's own (on-policy distillation, as in GKD). Tokens that
    the teacher rules out (-inf) count as -1e4 nats.

    Args:
        distance: `forward_kl`, `reverse_kl`, ``jsd(beta)``, or any ``(student, teacher) -> number``.
        aggregate: `token_mean`, `seq_mean`, ``seq_sum(L)``, or any ``(x, mask) -> Mean``.

    Returns:
        A loss, which reads ``teacher_ids`` ``[*B, T, k]`` (tokens that may be at t), ``teacher_topk_logprobs``
        ``[*B, T, k]`` and ``loss_mask``, and needs the student's log-probabilities of these tokens. Metric:
        ``teacher_mass``, the teacher's probability of the k tokens.

    Raises:
        MissingColumn: (when called) the batch lacks a column.
        BatchError: (when called) the columns do not have the same shape.

    Source: GKD, https://arxiv.org/abs/2306.13649, eq. 2; with the tail as one more event.

    >>> mask = torch.tensor([[False, True]])
    >>> ids, teacher = torch.tensor([[[4, 5], [4, 5]]]), torch.tensor([[[0.0, 0.0], [0.5, 0.25]]]).log()
    >>> batch = Batch({"loss_mask": mask, "teacher_ids": ids, "teacher_topk_logprobs": teacher}, batch_size=[1])
    >>> student = torch.tensor([[[0.1, 0.2], [0.25, 0.25]]]).log()
    >>> loss, _ = distillation_loss()(TensorDict({logprobs_at("teacher_ids"): student}, batch_size=[1]), batch)
    >>> round(loss.total.item(), 4)  # 1/2 log 2 + 1/4 log 1 + 1/4 log 1/2
    0.1733
    """
    output = logprobs_at("teacher_ids")

    @needs(output)
    def loss(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
        require(batch, "teacher_ids", "teacher_topk_logprobs", "loss_mask", reader="distillation_loss")
        mask, teacher_logprobs, student = batch["loss_mask"], batch["teacher_topk_logprobs"], out[output]
        if not batch["teacher_ids"].shape == teacher_logprobs.shape == student.shape:
            raise BatchError(
                f"distillation_loss: teacher_ids has shape {list(batch['teacher_ids'].shape)}, teacher_topk_logprobs "
                f"{list(teacher_logprobs.shape)} and the student's log-probabilities {list(student.shape)}; all are "
                "[*B, T, k]"
            )
        full_mask = mask.unsqueeze(-1).expand(student.shape)
        # Outside the mask the columns may hold anything, so any distribution will do there
        log_rest = -math.log(2 * student.shape[-1])
        teacher_logprobs = teacher_logprobs.detach().to(student.dtype).clamp(min=_LEAST)
        student, teacher = (torch.where(full_mask, x, log_rest) for x in (student, teacher_logprobs))
        apart = distance(with_tail(student), with_tail(teacher))
        mass = token_mean(masked(teacher.exp().sum(-1), mask), mask)
        return aggregate_tokens(aggregate, apart, batch), {"teacher_mass": mass}

    return named(
        "distillation_loss", f"Distillation with {name_of(distance)}; see `nrl.algos.distillation_loss`.", loss
    )
