"""Losses on pairs of answers, the chosen one first: `preference_loss`, and `chosen_nll` to add to it.

A pair with a row that has no token, because it is invalid or empty, compares nothing, and every loss ignores it.
"""

from tensordict import TensorDict

from nrl.algos._pairwise import counted_pairs, pairwise_loss
from nrl.algos.aggregate import Aggregate, token_mean
from nrl.algos.answer_scores import Score
from nrl.algos.link_functions import Link
from nrl.algos.loss_contract import MeanLoss, name_of, needed, needs
from nrl.algos.masking import masked
from nrl.batch import Batch
from nrl.batch.metrics import Mean, Metrics
from nrl.errors import BatchError

__all__ = ["chosen_nll", "preference_loss"]


def preference_loss(score: Score, link: Link) -> MeanLoss:
    """A loss on the difference between the scores of two answers, the chosen and the rejected one.

        mean over pairs of link(score_chosen - score_rejected)

    Args:
        score: `implicit_reward`, `mean_log_likelihood`, `log_odds`, or any ``(logprobs [P, 2, T], batch) -> [P, 2]``;
            the log-probabilities are 0 outside ``loss_mask``.
        link: `log_sigmoid`, `squared`, `hinge`, or any ``margin [P] -> loss [P]``, element by element.

    Returns:
        A loss on batches of size ``[P, 2]``, chosen first. Weight: the pairs whose rows both have a token; the loss
        ignores others. Metrics, over pairs: ``accuracy`` (how often the chosen one scores higher), ``margin``,
        ``chosen_score``, ``rejected_score``.

    Raises:
        MissingColumn: (when called) the batch lacks a column.
        BatchError: (when called) the batch is not one of pairs, or a part returned the wrong shape.

    >>> import torch
    >>> batch = Batch({"loss_mask": torch.ones(1, 2, 1, dtype=torch.bool)}, batch_size=[1, 2])
    >>> out = TensorDict({"logprobs": torch.tensor([[[-1.0], [-3.0]]])}, batch_size=[1, 2])
    >>> from nrl.algos import hinge, log_likelihood
    >>> loss, metrics = preference_loss(log_likelihood(1.0), hinge(3.0))(out, batch)
    >>> loss.total.item(), loss.weight.item(), metrics["margin"].total.item()
    (1.0, 1.0, 2.0)
    """

    @needs(*needed(score, link))
    def preference_loss(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
        name = name_of(preference_loss)
        counted = counted_pairs(batch, name)
        mask = batch["loss_mask"]
        scores = score(masked(out["logprobs"], mask), batch)
        if scores.shape != mask.shape[:-1]:
            raise BatchError(
                f"{name}: the score has shape {list(scores.shape)}; it must be one number a row, "
                f"{list(mask.shape[:-1])}"
            )
        return pairwise_loss(scores, counted, link)

    return preference_loss


def chosen_nll(aggregate: Aggregate = token_mean) -> MeanLoss:
    """Supervised fine-tuning on the chosen answers of pairs, to be added to a preference loss.

        -aggregate( log π_θ(y_w) )

    Papers and programs divide by different numbers; the aggregate selects one: `token_mean`, all tokens of the chosen
    answers (the code of CPO and of ORPO, TRL); `seq_mean`, each answer's own length, and then the pairs (the papers of
    ORPO and RPO); ``seq_sum(1)``, the pairs alone (the paper of CPO). Here the prompt never counts.

    Args:
        aggregate: `token_mean`, `seq_mean`, ``seq_sum(L)``, or any ``(x [P, T], mask [P, T]) -> Mean``.

    Returns:
        A loss on batches of size ``[P, 2]`` that sees the same pairs as `preference_loss`, and reads ``loss_mask``.
        Weight: the aggregate's.

    Raises:
        MissingColumn: (when called) the batch lacks a column.
        BatchError: (when called) the batch is not one of pairs.

    Source: maximum likelihood.

    >>> import torch
    >>> from nrl.algos import seq_mean
    >>> batch = Batch({"loss_mask": torch.tensor([[[True, True], [True, False]]])}, batch_size=[1, 2])
    >>> out = TensorDict({"logprobs": torch.tensor([[[-1.0, -3.0], [-2.5, 0.0]]])}, batch_size=[1, 2])
    >>> [[part.item() for part in chosen_nll(form)(out, batch)[0]] for form in (token_mean, seq_mean)]
    [[4.0, 2.0], [2.0, 1.0]]
    """

    @needs(*needed(aggregate))
    def chosen_nll(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
        counted = counted_pairs(batch, name_of(chosen_nll))
        mask = batch["loss_mask"]
        logprobs = masked(out["logprobs"], mask)
        return aggregate(-logprobs[:, 0], mask[:, 0] & counted.unsqueeze(-1)), {}

    return chosen_nll
