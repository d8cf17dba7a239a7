"""Pairs of answers: which of them count, and the loss on the differences of their scores."""

from torch import Tensor

from nrl.algos.aggregate import token_mean
from nrl.algos.link_functions import Link
from nrl.algos.masking import masked
from nrl.batch import Batch, require
from nrl.batch.metrics import Mean, Metrics
from nrl.errors import BatchError

__all__ = ["counted_pairs", "pairwise_loss"]


def counted_pairs(batch: Batch, reader: str) -> Tensor:
    """The pairs whose rows both have a token: a pair with a missing answer compares nothing.

    Args:
        batch: has ``loss_mask`` ``[P, 2, T]``.
        reader: the function that asks, as a user would name it; for the error.

    Returns:
        ``[P]`` bool.

    Raises:
        MissingColumn: the batch lacks the column.
        BatchError: the batch is not one of pairs.
    """
    require(batch, "loss_mask", reader=reader)
    mask: Tensor = batch["loss_mask"]
    if mask.ndim != 3 or mask.shape[1] != 2:
        raise BatchError(
            f"{reader}: loss_mask has shape {list(mask.shape)}; preferences are pairs, [P, 2, T] with the chosen row "
            "first (batch size [P, 2])"
        )
    return mask.any(-1).all(-1)


def pairwise_loss(scores: Tensor, counted: Tensor, link: Link) -> tuple[Mean, Metrics]:
    """The loss on the differences of scores, and their metrics, over the pairs that count.

    Args:
        scores: ``[P, 2]``, chosen first.
        counted: ``[P]`` bool, such as `counted_pairs`.
        link: ``margin [P] -> loss [P]``.

    Returns:
        The sum of the losses over the number of pairs; the metrics of `preference_loss`.
    """
    chosen, rejected = (masked(x, counted) for x in scores.unbind(-1))
    margin = chosen - rejected
    seen = {
        "accuracy": (margin > 0).to(margin.dtype),
        "margin": margin,
        "chosen_score": chosen,
        "rejected_score": rejected,
    }
    return token_mean(link(margin), counted), {key: token_mean(x.detach(), counted) for key, x in seen.items()}
