"""Supervised losses, on given tokens."""

from tensordict import TensorDict

from nrl.algos.aggregate import token_mean
from nrl.algos.masking import masked
from nrl.batch import Batch, require
from nrl.batch.metrics import Mean, Metrics

__all__ = ["sft_loss", "weighted_sft_loss"]


def sft_loss(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
    """Supervised fine-tuning: the negative log-likelihood of the tokens of ``loss_mask``, in nats a token.

        -1/N Σ_i Σ_t log π_θ(y_{i,t})

    Args:
        out: has ``logprobs`` ``[*B, T]``.
        batch: has ``loss_mask`` ``[*B, T]``.

    Raises:
        MissingColumn: the batch lacks the column.

    Source: maximum likelihood.

    >>> import torch
    >>> batch = Batch({"loss_mask": torch.tensor([[False, True, True]])}, batch_size=[1])
    >>> loss, _ = sft_loss(TensorDict({"logprobs": torch.tensor([[0.0, -1.0, -2.0]])}, batch_size=[1]), batch)
    >>> loss.total.item(), loss.weight.item()
    (3.0, 2.0)
    """
    require(batch, "loss_mask", reader="sft_loss")
    return token_mean(-out["logprobs"], batch["loss_mask"]), {}


def weighted_sft_loss(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
    """Supervised fine-tuning with a weight for each row: the weighted mean over tokens.

        -Σ_i w_i Σ_t log π_θ(y_{i,t}) / Σ_i w_i |y_i|

    Weights are relative: doubling all of them changes nothing, 1 for all is `sft_loss`, 0 leaves a row out. If all rows
    with a token have weight 0, the step learns nothing. To divide by Σ_i |y_i| instead, so that small weights make
    small steps: ``policy_loss(reinforce, ratio=on_policy_ratio)`` on ``advantages`` that are the weights.

    Args:
        out: has ``logprobs`` ``[*B, T]``.
        batch: has ``loss_mask`` ``[*B, T]`` and ``weights`` ``[*B]``, none of them negative: a denominator that
            cancels would let the loss grow without bound.

    Returns:
        Total: the weighted sum over tokens, in nats; weight: the tokens, each times the weight of its row.

    Raises:
        MissingColumn: the batch lacks a column.

    Source: weighted maximum likelihood.

    >>> import torch
    >>> columns = {"loss_mask": torch.tensor([[True, True], [True, False]]), "weights": torch.tensor([1.0, 0.5])}
    >>> out = TensorDict({"logprobs": torch.tensor([[-1.0, -2.0], [-4.0, 0.0]])}, batch_size=[2])
    >>> loss, _ = weighted_sft_loss(out, Batch(columns, batch_size=[2]))
    >>> loss.total.item(), loss.weight.item()
    (5.0, 2.5)
    """
    require(batch, "loss_mask", "weights", reader="weighted_sft_loss")
    mask = batch["loss_mask"]
    weights = masked(batch["weights"].detach().unsqueeze(-1).expand_as(mask), mask).to(out["logprobs"].dtype)
    # Masked before the product: tokens outside the mask may be infinite, and times 0 they would be NaN
    total, _ = token_mean(-weights * masked(out["logprobs"], mask), mask)
    return Mean(total, weights.sum(dtype=total.dtype)), {}
