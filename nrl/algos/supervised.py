"""Losses on tokens that somebody has written or chosen."""

from tensordict import TensorDict

from nrl.algos.aggregate import token_mean
from nrl.batch import Batch, require
from nrl.reduce import Mean, Metrics

__all__ = ["sft_loss"]


def sft_loss(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
    """Supervised fine-tuning: the negative log-likelihood of the tokens of ``loss_mask``, in nats a token.

        -1/N Σ_i Σ_t log π_θ(y_{i,t})

    Args:
        out: has ``logprobs`` ``[*B, T]``.
        batch: has ``loss_mask`` ``[*B, T]``.

    Raises:
        MissingColumn: the batch lacks it.

    Source: maximum likelihood.

    >>> import torch
    >>> batch = Batch({"loss_mask": torch.tensor([[False, True, True]])}, batch_size=[1])
    >>> loss, _ = sft_loss(TensorDict({"logprobs": torch.tensor([[0.0, -1.0, -2.0]])}, batch_size=[1]), batch)
    >>> loss.total.item(), loss.weight.item()
    (3.0, 2.0)
    """
    require(batch, "loss_mask", reader="sft_loss")
    return token_mean(-out["logprobs"], batch["loss_mask"]), {}
