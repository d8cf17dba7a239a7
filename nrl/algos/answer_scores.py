"""Scores of answers: ``(logprobs, batch) -> [P, 2]``, a number a row.

`preference_loss` gives them log-probabilities that are 0 outside ``loss_mask``. A row without a token has score 0. The
scores know nothing of pairs: any batch shape ``[*B]`` will do.
"""

from collections.abc import Callable

from tensordict import TensorDict
from torch import Tensor

from nrl.algos._arguments import positive
from nrl.algos._reductions import row_means
from nrl.algos.masking import masked_column
from nrl.arguments import checked
from nrl.batch import Batch, require

__all__ = ["Score", "implicit_reward", "log_likelihood", "log_odds", "mean_implicit_reward", "mean_log_likelihood"]

type Score = Callable[[Tensor, TensorDict], Tensor]
"""``(logprobs [P, 2, T], batch) -> [P, 2]``: the model's score of each answer."""

_CERTAIN = -1e-6
"""Nearer to 0 a mean of float32 log-probabilities is rounding, and the gradient of its odds, 1 / (1 - P), unbounded."""


def _mean(x: Tensor, batch: TensorDict, reader: str) -> Tensor:
    require(batch, "loss_mask", reader=reader)
    return row_means(x, batch["loss_mask"]).squeeze(-1)


@checked("implicit_reward", finite=False)
def implicit_reward(beta: float) -> Score:
    """DPO's implicit reward: the reward under which theta is optimal, given a KL penalty of weight β to the reference.

        β Σ_t [log π_θ(y_t) - log π_ref(y_t)]

    It leaves out a constant of the prompt, which cancels in the difference of two answers.

    Args:
        beta: β > 0.

    Returns:
        A score, in nats times β. It reads ``ref_logprobs`` and ``loss_mask``.

    Raises:
        ValueError: ``beta`` is not positive and finite.

    Source: DPO, https://arxiv.org/abs/2305.18290, section 4, r̂_θ.

    >>> import torch
    >>> mask = torch.ones(1, 2, 2, dtype=torch.bool)
    >>> batch = Batch({"loss_mask": mask, "ref_logprobs": -3.0 * mask}, batch_size=[1, 2])
    >>> implicit_reward(0.5)(torch.tensor([[[-1.0, -1.0], [-3.0, -4.0]]]), batch).tolist()
    [[2.0, -0.5]]
    """
    positive("implicit_reward", "beta", beta)

    def implicit_reward(logprobs: Tensor, batch: Batch) -> Tensor:
        return beta * (logprobs - masked_column(batch, "ref_logprobs", reader="implicit_reward")).sum(-1)

    return implicit_reward


@checked("mean_implicit_reward", finite=False)
def mean_implicit_reward(beta: float) -> Score:
    """The implicit reward per token, so that long answers do not count more.

        β/|y| Σ_t [log π_θ(y_t) - log π_ref(y_t)]

    Args:
        beta: β > 0.

    Returns:
        A score, in nats a token times β. It reads ``ref_logprobs`` and ``loss_mask``.

    Raises:
        ValueError: ``beta`` is not positive and finite.

    Source: Tülu 3, https://arxiv.org/abs/2411.15124, its length-normalized DPO.

    >>> import torch
    >>> mask = torch.ones(1, 2, 2, dtype=torch.bool)
    >>> batch = Batch({"loss_mask": mask, "ref_logprobs": -3.0 * mask}, batch_size=[1, 2])
    >>> mean_implicit_reward(0.5)(torch.tensor([[[-1.0, -1.0], [-3.0, -4.0]]]), batch).tolist()
    [[1.0, -0.25]]
    """
    positive("mean_implicit_reward", "beta", beta)

    def mean_implicit_reward(logprobs: Tensor, batch: Batch) -> Tensor:
        log_ratio = logprobs - masked_column(batch, "ref_logprobs", reader="mean_implicit_reward")
        return beta * _mean(log_ratio, batch, "mean_implicit_reward")

    return mean_implicit_reward


@checked("log_likelihood", finite=False)
def log_likelihood(beta: float) -> Score:
    """The log-likelihood of an answer, without a reference.

        β Σ_t log π_θ(y_t)

    Args:
        beta: β > 0.

    Returns:
        A score, in nats times β.

    Raises:
        ValueError: ``beta`` is not positive and finite.

    Source: CPO, https://arxiv.org/abs/2401.08417, eq. 3.

    >>> import torch
    >>> batch = Batch({"loss_mask": torch.ones(1, 2, 2, dtype=torch.bool)}, batch_size=[1, 2])
    >>> log_likelihood(0.5)(torch.tensor([[[-1.0, -1.0], [-3.0, -4.0]]]), batch).tolist()
    [[-1.0, -3.5]]
    """
    positive("log_likelihood", "beta", beta)

    def log_likelihood(logprobs: Tensor, batch: Batch) -> Tensor:
        return beta * logprobs.sum(-1)

    return log_likelihood


@checked("mean_log_likelihood", finite=False)
def mean_log_likelihood(beta: float) -> Score:
    """The log-likelihood of an answer per token, without a reference.

        β/|y| Σ_t log π_θ(y_t)

    Args:
        beta: β > 0.

    Returns:
        A score, in nats a token times β. It reads ``loss_mask``.

    Raises:
        ValueError: ``beta`` is not positive and finite.

    Source: SimPO, https://arxiv.org/abs/2405.14734, section 2.2.

    >>> import torch
    >>> batch = Batch({"loss_mask": torch.ones(1, 2, 2, dtype=torch.bool)}, batch_size=[1, 2])
    >>> mean_log_likelihood(0.5)(torch.tensor([[[-1.0, -1.0], [-3.0, -4.0]]]), batch).tolist()
    [[-0.5, -1.75]]
    """
    positive("mean_log_likelihood", "beta", beta)

    def mean_log_likelihood(logprobs: Tensor, batch: Batch) -> Tensor:
        return beta * _mean(logprobs, batch, "mean_log_likelihood")

    return mean_log_likelihood


def log_odds(logprobs: Tensor, batch: Batch) -> Tensor:
    """The log-odds of an answer, by the geometric mean of its tokens' probabilities.

        log (P / (1 - P)),   log P = 1/|y| Σ_t log π_θ(y_t)

    Where log P > -1e-6, and so in a row without a token, the score is that of -1e-6, 13.8 nats, without a gradient: the
    odds of a certain answer would be infinite.

    Args:
        logprobs: ``[P, 2, T]``, nats, 0 outside ``loss_mask``.
        batch: has ``loss_mask`` ``[P, 2, T]``.

    Raises:
        MissingColumn: the batch lacks the column.

    Source: ORPO, https://arxiv.org/abs/2403.07691, eq. 4.

    >>> import torch
    >>> batch = Batch({"loss_mask": torch.ones(1, 2, 2, dtype=torch.bool)}, batch_size=[1, 2])
    >>> log_odds(torch.tensor([[[0.5, 0.5], [0.1, 0.4]]]).log(), batch).exp().tolist()  # P is 0.5, 0.2
    [[1.0, 0.25]]
    """
    mean = _mean(logprobs, batch, "log_odds").clamp(max=_CERTAIN)
    return mean - (-mean.expm1()).log()
