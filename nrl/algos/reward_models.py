"""Losses of reward models, on pairs of answers."""

from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import logsigmoid

from nrl.algos._arguments import not_negative
from nrl.algos._pairwise import counted_pairs, pairwise_loss
from nrl.algos.loss_contract import MeanLoss, name_of, named, needs
from nrl.algos.masking import masked
from nrl.arguments import checked
from nrl.batch import Batch
from nrl.batch.metrics import Mean, Metrics
from nrl.errors import BatchError

__all__ = ["bradley_terry_loss", "reward_model_loss"]


@checked("bradley_terry_loss", finite=False)
def bradley_terry_loss(centering: float = 0.0) -> MeanLoss:
    """The negative log-likelihood of preferences under the model of Bradley and Terry, with rewards near 0.

        -log σ(r_w - r_l - m) + η (r_w + r_l)²,   mean over pairs

    m is the chosen row's ``margin`` where the batch has that column, and 0 elsewhere. Preferences do not fix where 0
    is; η does. log 2 where both rewards are 0 and there is no margin.

    Args:
        centering: η >= 0; 0.01 in the paper.

    Returns:
        A loss on batches of size ``[P, 2]``, chosen first, which needs the output ``rewards`` ``[P, 2]`` and reads
        ``loss_mask``. Weight: the pairs whose rows both have a token; the loss ignores others. Metrics, over pairs:
        ``accuracy``, ``margin`` (of the rewards, before m), ``chosen_score``, ``rejected_score``.

    Raises:
        ValueError: ``centering`` is negative or not finite.
        MissingColumn: (when called) the batch lacks ``loss_mask``.
        BatchError: (when called) the batch is not one of pairs, or ``rewards`` is not a number a row.

    Source: InstructGPT, https://arxiv.org/abs/2203.02155, eq. 1; m: Llama 2, https://arxiv.org/abs/2307.09288, eq. 2;
    η: https://arxiv.org/abs/2312.09244, eq. 2.

    >>> import torch
    >>> batch = Batch({"loss_mask": torch.ones(1, 2, 1, dtype=torch.bool)}, batch_size=[1, 2])
    >>> out = TensorDict({"rewards": torch.tensor([[2.0, 2.0]])}, batch_size=[1, 2])
    >>> [round(loss(out, batch)[0].total.item(), 4) for loss in (reward_model_loss, bradley_terry_loss(0.01))]
    [0.6931, 0.8531]
    """
    not_negative("bradley_terry_loss", "centering", centering)

    @needs("rewards")
    def bradley_terry_loss(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
        name = name_of(bradley_terry_loss)
        counted, rewards = counted_pairs(batch, name), out["rewards"]
        if rewards.shape != batch["loss_mask"].shape[:-1]:
            raise BatchError(
                f"{name}: out['rewards'] has shape {list(rewards.shape)}; it must be one number a row, "
                f"{list(batch['loss_mask'].shape[:-1])}"
            )
        least = masked(batch["margin"][:, 0].detach(), counted) if "margin" in batch.keys() else 0.0

        def link(margin: Tensor) -> Tensor:
            return -logsigmoid(margin - least)

        (total, weight), metrics = pairwise_loss(rewards, counted, link)
        sums = masked(rewards.sum(-1), counted)
        return Mean(total + centering * sums.square().sum(dtype=total.dtype), weight), metrics

    return named("bradley_terry_loss", "Rewards from pairs; see `nrl.algos.bradley_terry_loss`.", bradley_terry_loss)


reward_model_loss = named(
    "reward_model_loss",
    """Bradley-Terry without centering: ``bradley_terry_loss()``.

        -log σ(r_w - r_l - m),   mean over pairs

    Needs the output ``rewards``; reads ``loss_mask`` and, where the batch has it, ``margin``.

    Source: InstructGPT, https://arxiv.org/abs/2203.02155, eq. 1.

    >>> import torch
    >>> batch = Batch({"loss_mask": torch.ones(1, 2, 1, dtype=torch.bool)}, batch_size=[1, 2])
    >>> out = TensorDict({"rewards": torch.tensor([[3.0, 1.0]])}, batch_size=[1, 2])
    >>> loss, metrics = reward_model_loss(out, batch)
    >>> round(loss.total.item(), 4), metrics["margin"].total.item()
    (0.1269, 2.0)
    """,
    bradley_terry_loss(),
)
