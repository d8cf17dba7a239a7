"""KTO: the loss on single answers labelled good or bad, and the reference point that the driver computes for it.

The reference point is the divergence of the policy from the reference on answers to other prompts. It depends on the
whole batch, so the driver computes it before the split, as a column, with two forwards over mismatched answers:

    other = mismatched(batch)
    ours, theirs = (trainer.logprobs(params, other).result() for params in (state.params, reference))
    point = reference_point(ours, theirs, other["loss_mask"])
    batch = nrl.assign(batch, reference_point=point.expand(len(batch)))
"""

import torch
from tensordict import TensorDict
from torch import Tensor

from nrl.algos._arguments import positive
from nrl.algos.aggregate import token_mean
from nrl.algos.loss_contract import MeanLoss, named
from nrl.algos.masking import masked, masked_column
from nrl.arguments import checked
from nrl.batch import Batch, assign, lengths, require
from nrl.batch.metrics import Mean, Metrics
from nrl.errors import BatchError

__all__ = ["kto_loss", "mismatched", "reference_point"]


@checked("kto_loss", finite=False)
def kto_loss(beta: float, desirable: float = 1.0, undesirable: float = 1.0) -> MeanLoss:
    """Kahneman-Tversky optimization: answers above or below a reference point, as in prospect theory.

        λ_D (1 - σ(β (r - z_0)))   of a desirable answer,   λ_U (1 - σ(β (z_0 - r)))   of an undesirable one,
        r = Σ_t log π_θ/π_ref(y_t),   mean over rows

    z_0 is the column ``reference_point``, a constant; see `mismatched`. It belongs to the weights that it was computed
    with; the paper and TRL compute it anew for each micro-batch. λ/2 a row where theta is the reference. A batch may
    hold only desirable, or only undesirable, answers.

    Args:
        beta: β > 0; often 0.1.
        desirable: λ_D > 0. With n_D desirable and n_U undesirable answers in the data, λ_D n_D / (λ_U n_U) should lie
            between 1 and 3/2 (eq. 9; 4/3 in the first version of the paper).
        undesirable: λ_U > 0.

    Returns:
        A loss on rows ``[B]``, which reads ``desirable``, ``reference_point``, ``ref_logprobs`` and ``loss_mask``.
        Weight: the rows that have a token; the loss ignores others. Metrics: ``desirable_score`` and
        ``undesirable_score``, β r over the rows of either kind; ``reference_point``, over all rows.

    Raises:
        ValueError: a number is not positive and finite.
        MissingColumn: (when called) the batch lacks a column.

    Source: https://arxiv.org/abs/2402.01306v4, eq. 8, which is eq. 7 in the first version.

    >>> mask = torch.ones(2, 1, dtype=torch.bool)
    >>> columns = {"loss_mask": mask, "ref_logprobs": -1.0 * mask, "desirable": torch.tensor([True, False])}
    >>> batch = Batch(columns | {"reference_point": torch.zeros(2)}, batch_size=[2])
    >>> loss, _ = kto_loss(0.1)(TensorDict({"logprobs": -1.0 * mask}, batch_size=[2]), batch)
    >>> loss.total.item(), loss.weight.item()
    (1.0, 2.0)
    """
    for name, value in (("beta", beta), ("desirable", desirable), ("undesirable", undesirable)):
        positive("kto_loss", name, value)

    def kto_loss(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
        require(batch, "desirable", "reference_point", reader="kto_loss")
        ref = masked_column(batch, "ref_logprobs", reader="kto_loss")
        mask, good = batch["loss_mask"], batch["desirable"]
        counted = mask.any(-1)
        log_ratio = (masked(out["logprobs"], mask) - ref).sum(-1)
        point = masked(batch["reference_point"].detach(), counted)
        gain = beta * (log_ratio - point)
        # 1 - σ(x) is σ(-x), which does not round to 0 where x is large
        loss = torch.where(good, desirable * (-gain).sigmoid(), undesirable * gain.sigmoid())
        score = beta * log_ratio.detach()
        metrics: Metrics = {
            "desirable_score": token_mean(score, counted & good),
            "undesirable_score": token_mean(score, counted & ~good),
            "reference_point": token_mean(point, counted),
        }
        return token_mean(loss, counted), metrics

    return named("kto_loss", "KTO; see `nrl.algos.kto_loss`.", kto_loss)


def mismatched(batch: Batch) -> Batch:
    """Pair each prompt with the answer to the next one, and the last with the first's, for `reference_point`.

    The prompt of a row precedes its first token of ``loss_mask``; its answer is the rest. Rows without such a token,
    invalid ones among them, stay as they are, with nothing to measure, and so does a single row. Neighbours should have
    different prompts: shuffle if several answers share one.

    Args:
        batch: of size ``[B]``, with ``input_ids``, ``attention_mask`` and ``loss_mask`` ``[B, T]``, right-padded.

    Returns:
        As many rows, with these columns alone, and ``temperature`` if there is one; as wide as the longest new row,
        which may be longer than any old one.

    Raises:
        MissingColumn: the batch lacks a column.
        BatchError: the batch has pairs.

    Source: KTO, https://arxiv.org/abs/2402.01306v4, section 4.1, j = (i + 1) mod m. TRL takes the answer to the
    previous prompt.

    >>> ids = torch.tensor([[1, 2, 30, 0], [1, 40, 41, 42]])
    >>> mask = torch.tensor([[False, False, True, False], [False, True, True, True]])
    >>> batch = Batch({"input_ids": ids, "attention_mask": ids > 0, "loss_mask": mask}, batch_size=[2])
    >>> mismatched(batch)["input_ids"].tolist()
    [[1, 2, 40, 41, 42], [1, 30, 0, 0, 0]]
    """
    require(batch, "input_ids", "attention_mask", "loss_mask", reader="mismatched")
    mask: Tensor = batch["loss_mask"]
    if mask.ndim != 2:
        raise BatchError(f"mismatched: loss_mask has shape {list(mask.shape)}; give rows, [B, T] (batch size [B])")
    long, rows = lengths(batch), torch.arange(len(batch), device=mask.device)
    answering = mask.any(-1)
    giver = rows.clone()
    giver[answering] = rows[answering].roll(-1)
    start = torch.where(answering, mask.int().argmax(-1), long)
    size = start + (long - start)[giver]
    position = torch.arange(int(size.max()) if len(batch) else 0, device=mask.device).expand(len(batch), -1)
    in_prompt, real = position < start.unsqueeze(-1), position < size.unsqueeze(-1)
    source = torch.where(in_prompt, rows.unsqueeze(-1), giver.unsqueeze(-1))
    source_position = torch.where(in_prompt, position, position + (start[giver] - start).unsqueeze(-1)).clamp(
        0, max(0, mask.shape[-1] - 1)
    )
    other = (giver != rows).unsqueeze(-1)
    columns = {
        "input_ids": torch.where(real, batch["input_ids"][source, source_position], 0),
        "attention_mask": real,
        "loss_mask": mask[source, source_position] & real & ~in_prompt & other,
    }
    if "temperature" in batch.keys():
        columns["temperature"] = batch["temperature"]
    return assign(Batch({}, batch_size=batch.batch_size), **columns)


def reference_point(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """KTO's z_0: the mean log-ratio of the policy to the reference over rows, at least 0.

        max(0, mean over rows of Σ_t [log π_θ(y_t) - log π_ref(y_t)])

    On `mismatched` answers this is a biased estimate of the divergence of the policy from the reference, cheap and
    never negative.

    Args:
        logprobs: ``[B, T]``, nats, of the policy.
        ref_logprobs: ``[B, T]``, nats, of the reference.
        mask: ``[B, T]`` bool, the ``loss_mask`` of the mismatched rows. Rows without a token do not count.

    Returns:
        Scalar, nats, without a gradient; 0 if no row counts.

    Raises:
        BatchError: the shapes differ.

    Source: KTO, https://arxiv.org/abs/2402.01306v4, section 4.1.

    >>> mask = torch.tensor([[False, True, True], [False, True, False]])
    >>> reference_point(-1.0 * mask, -2.0 * mask, mask).item()
    1.5
    """
    log_ratio = masked(logprobs.detach(), mask) - masked(ref_logprobs.detach(), mask)
    total, weight = token_mean(log_ratio.sum(-1), mask.any(-1))
    return (total / weight.clamp(min=1)).clamp(min=0)
