"""The entropy of the policy, as a term of a loss."""

from tensordict import TensorDict

from nrl.algos.aggregate import token_mean
from nrl.algos.loss_contract import needs
from nrl.batch import Batch, require
from nrl.batch.metrics import Mean, Metrics

__all__ = ["entropy_loss"]


@needs("entropy")
def entropy_loss(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
    """The mean entropy over tokens, in nats; with a negative coefficient, an entropy bonus.

        1/N Σ_i Σ_t H(π_θ(· | y_{i,<t}))

    Use it as ``add((1.0, grpo_loss), (-0.01, entropy_loss))``. This is the entropy at each token's position given the
    tokens before it. Its gradient leaves out how the policy changes which positions are reached.

    Args:
        out: has ``entropy`` ``[*B, T]``, nats.
        batch: has ``loss_mask`` ``[*B, T]``.

    Returns:
        The mean, and the metric ``entropy``.

    Raises:
        MissingColumn: the batch lacks the column.

    Source: A3C, https://arxiv.org/abs/1602.01783, section 4.

    >>> import torch
    >>> batch = Batch({"loss_mask": torch.tensor([[False, True, True]])}, batch_size=[1])
    >>> loss, metrics = entropy_loss(TensorDict({"entropy": torch.tensor([[9.0, 1.0, 2.0]])}, batch_size=[1]), batch)
    >>> loss.total.item(), loss.weight.item()
    (3.0, 2.0)
    """
    require(batch, "loss_mask", reader="entropy_loss")
    mean = token_mean(out["entropy"], batch["loss_mask"])
    return mean, {"entropy": Mean(mean.total.detach(), mean.weight)}
