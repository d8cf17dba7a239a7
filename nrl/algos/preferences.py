"""Ready-made preference losses: a score of each answer, and a link on the difference of two scores.

Each is a `preference_loss`, or the sum of one and supervised fine-tuning on the chosen answers.
"""

from nrl.algos._arguments import not_negative, positive, smoothing_below_half
from nrl.algos.aggregate import Aggregate, seq_mean, token_mean
from nrl.algos.answer_scores import (
    Score,
    implicit_reward,
    log_likelihood,
    log_odds,
    mean_implicit_reward,
    mean_log_likelihood,
)
from nrl.algos.link_functions import Link, hinge, log_sigmoid, robust_log_sigmoid, squared
from nrl.algos.loss_contract import Loss, MeanLoss, add, named
from nrl.algos.pairwise import chosen_nll, preference_loss
from nrl.arguments import checked

__all__ = [
    "cdpo_loss",
    "cpo_loss",
    "dpo_loss",
    "hinge_loss",
    "ipo_loss",
    "length_normalized_dpo_loss",
    "length_normalized_ipo_loss",
    "orpo_loss",
    "robust_dpo_loss",
    "rpo_loss",
    "simpo_loss",
]


def _preference(name: str, doc: str, score: Score, link: Link) -> MeanLoss:
    return named(name, f"{doc}; see `nrl.algos.{name}`.", preference_loss(score, link))


@checked("dpo_loss", finite=False)
def dpo_loss(beta: float) -> MeanLoss:
    """Direct preference optimization: ``preference_loss(implicit_reward(beta), log_sigmoid())``.

        -log σ(β Σ_t [log π_θ/π_ref](chosen) - β Σ_t [log π_θ/π_ref](rejected))

    log 2 where theta is the reference. Scores are the implicit rewards, in nats times β.

    Args:
        beta: β > 0; often 0.1.

    Returns:
        A `preference_loss`, which reads ``ref_logprobs`` and ``loss_mask``.

    Raises:
        ValueError: ``beta`` is not positive and finite.

    Source: https://arxiv.org/abs/2305.18290, eq. 7.

    >>> import torch
    >>> from nrl.batch import Batch
    >>> mask = torch.ones(1, 2, 1, dtype=torch.bool)
    >>> batch = Batch({"loss_mask": mask, "ref_logprobs": -1.0 * mask}, batch_size=[1, 2])
    >>> out = Batch({"logprobs": -1.0 * mask}, batch_size=[1, 2])
    >>> round(dpo_loss(0.1)(out, batch)[0].total.item(), 4)
    0.6931
    """
    positive("dpo_loss", "beta", beta)
    return _preference("dpo_loss", "DPO", implicit_reward(beta), log_sigmoid())


@checked("length_normalized_dpo_loss", finite=False)
def length_normalized_dpo_loss(beta: float) -> MeanLoss:
    """DPO on log-ratios a token: ``preference_loss(mean_implicit_reward(beta), log_sigmoid())``.

        -log σ(β/|y_w| Σ_t [log π_θ/π_ref](chosen) - β/|y_l| Σ_t [log π_θ/π_ref](rejected))

    TRL's ``sigmoid_norm``.

    Args:
        beta: β > 0; larger than that of DPO by about the length of an answer, 5 in Tülu 3.

    Returns:
        A `preference_loss`, which reads ``ref_logprobs`` and ``loss_mask``.

    Raises:
        ValueError: ``beta`` is not positive and finite.

    Source: Tülu 3, https://arxiv.org/abs/2411.15124, its length-normalized DPO.

    >>> import torch
    >>> from nrl.batch import Batch
    >>> mask = torch.tensor([[[True, True], [True, False]]])
    >>> batch = Batch({"loss_mask": mask, "ref_logprobs": -1.0 * mask}, batch_size=[1, 2])
    >>> out = Batch({"logprobs": torch.tensor([[[-2.0, -2.0], [-2.0, 0.0]]])}, batch_size=[1, 2])
    >>> round(length_normalized_dpo_loss(5.0)(out, batch)[0].total.item(), 4)  # a nat a token less on both sides
    0.6931
    """
    positive("length_normalized_dpo_loss", "beta", beta)
    return _preference("length_normalized_dpo_loss", "Length-normalized DPO", mean_implicit_reward(beta), log_sigmoid())


@checked("cdpo_loss", finite=False)
def cdpo_loss(beta: float, smoothing: float) -> MeanLoss:
    """Conservative DPO: DPO with smoothed labels, for labels that are sometimes wrong.

        -(1 - ε) log σ(m) - ε log σ(-m),   m the difference of the implicit rewards, as in `dpo_loss`

    TRL had this as ``loss_type="sigmoid"`` with ``label_smoothing``, which TRL 1.16 does not read there.

    Args:
        beta: β > 0; often 0.1.
        smoothing: ε in [0, 0.5), how probable it is that a label is wrong; often 0.1. 0 is DPO.

    Returns:
        A `preference_loss`, which reads ``ref_logprobs`` and ``loss_mask``.

    Raises:
        ValueError: ``beta`` is not positive and finite, or ``smoothing`` is not in [0, 0.5).

    Source: E. Mitchell, A note on DPO with noisy preferences and relationship to IPO (2023),
    https://ericmitchell.ai/cdpo.pdf, eq. 3.

    >>> import torch
    >>> from nrl.batch import Batch
    >>> mask = torch.ones(1, 2, 1, dtype=torch.bool)
    >>> batch = Batch({"loss_mask": mask, "ref_logprobs": -1.0 * mask}, batch_size=[1, 2])
    >>> out = Batch({"logprobs": torch.tensor([[[-1.0], [-21.0]]])}, batch_size=[1, 2])
    >>> round(cdpo_loss(0.1, smoothing=0.1)(out, batch)[0].total.item(), 4)  # the margin is 2
    0.3269
    """
    positive("cdpo_loss", "beta", beta)
    smoothing_below_half("cdpo_loss", smoothing)
    return _preference("cdpo_loss", "cDPO", implicit_reward(beta), log_sigmoid(smoothing=smoothing))


@checked("robust_dpo_loss", finite=False)
def robust_dpo_loss(beta: float, smoothing: float) -> MeanLoss:
    """Robust DPO (rDPO): with some labels flipped, its expectation is that of DPO on the right labels.

        [-(1 - ε) log σ(m) + ε log σ(-m)] / (1 - 2 ε),   m the difference of the implicit rewards, as in `dpo_loss`

    It has no lower bound: each unit of a large margin gains ε / (1 - 2 ε).

    Args:
        beta: β > 0; often 0.1.
        smoothing: ε in [0, 0.5), how probable it is that a label is wrong; often 0.1. 0 is DPO.

    Returns:
        A `preference_loss`, which reads ``ref_logprobs`` and ``loss_mask``.

    Raises:
        ValueError: ``beta`` is not positive and finite, or ``smoothing`` is not in [0, 0.5).

    Source: https://arxiv.org/abs/2403.00409, section 3.1.

    >>> import torch
    >>> from nrl.batch import Batch
    >>> mask = torch.ones(1, 2, 1, dtype=torch.bool)
    >>> batch = Batch({"loss_mask": mask, "ref_logprobs": -1.0 * mask}, batch_size=[1, 2])
    >>> out = Batch({"logprobs": torch.tensor([[[-1.0], [-21.0]]])}, batch_size=[1, 2])
    >>> round(robust_dpo_loss(0.1, smoothing=0.1)(out, batch)[0].total.item(), 4)  # the margin is 2
    -0.1231
    """
    positive("robust_dpo_loss", "beta", beta)
    smoothing_below_half("robust_dpo_loss", smoothing)
    return _preference("robust_dpo_loss", "Robust DPO", implicit_reward(beta), robust_log_sigmoid(smoothing))


@checked("ipo_loss", finite=False)
def ipo_loss(beta: float) -> MeanLoss:
    """Identity preference optimization: a target for the difference of log-ratios, rather than a lower bound.

        (Σ_t [log π_θ/π_ref](chosen) - Σ_t [log π_θ/π_ref](rejected) - 1/(2β))²

    1/(4β²) where theta is the reference. The log-probabilities are those of whole answers, sums, as in the paper and in
    the code of DPO's authors. TRL divides each by its length: `length_normalized_ipo_loss`. Scores are log-ratios, in
    nats, not times β.

    Args:
        beta: β > 0, the paper's τ; often 0.1.

    Returns:
        A `preference_loss`, which reads ``ref_logprobs`` and ``loss_mask``.

    Raises:
        ValueError: ``beta`` is not positive and finite.

    Source: https://arxiv.org/abs/2310.12036, eq. 17.

    >>> import torch
    >>> from nrl.batch import Batch
    >>> mask = torch.ones(1, 2, 2, dtype=torch.bool)
    >>> batch = Batch({"loss_mask": mask, "ref_logprobs": -1.0 * mask}, batch_size=[1, 2])
    >>> out = Batch({"logprobs": torch.tensor([[[-1.0, -1.0], [-2.0, -2.0]]])}, batch_size=[1, 2])
    >>> ipo_loss(0.1)(out, batch)[0].total.item()  # 2 of 5 nats
    9.0
    """
    positive("ipo_loss", "beta", beta)
    return _preference("ipo_loss", "IPO", implicit_reward(1.0), squared(1 / (2 * beta)))


@checked("length_normalized_ipo_loss", finite=False)
def length_normalized_ipo_loss(beta: float) -> MeanLoss:
    """IPO on log-ratios a token, so that the target does not depend on the length of the answers.

        (1/|y_w| Σ_t [log π_θ/π_ref](chosen) - 1/|y_l| Σ_t [log π_θ/π_ref](rejected) - 1/(2β))²

    TRL's ``loss_type="ipo"``. TRL's authors asked the paper's authors; the paper itself does not say this.

    Args:
        beta: β > 0, the paper's τ; often 0.1.

    Returns:
        A `preference_loss`, which reads ``ref_logprobs`` and ``loss_mask``.

    Raises:
        ValueError: ``beta`` is not positive and finite.

    Source: https://github.com/huggingface/trl/pull/1265, of https://arxiv.org/abs/2310.12036, eq. 17.

    >>> import torch
    >>> from nrl.batch import Batch
    >>> mask = torch.ones(1, 2, 2, dtype=torch.bool)
    >>> batch = Batch({"loss_mask": mask, "ref_logprobs": -1.0 * mask}, batch_size=[1, 2])
    >>> out = Batch({"logprobs": torch.tensor([[[-1.0, -1.0], [-2.0, -2.0]]])}, batch_size=[1, 2])
    >>> length_normalized_ipo_loss(0.1)(out, batch)[0].total.item()  # 1 of 5 nats a token
    16.0
    """
    positive("length_normalized_ipo_loss", "beta", beta)
    return _preference(
        "length_normalized_ipo_loss", "Length-normalized IPO", mean_implicit_reward(1.0), squared(1 / (2 * beta))
    )


@checked("hinge_loss", finite=False)
def hinge_loss(beta: float) -> MeanLoss:
    """DPO with the hinge of a support vector machine: ``preference_loss(implicit_reward(beta), hinge())``.

        max(0, 1 - m),   m the difference of the implicit rewards, as in `dpo_loss`

    1 where theta is the reference. Pairs that reach the margin give no gradient. TRL's ``loss_type="hinge"``. SLiC-HF
    has no reference, but a margin δ and supervised fine-tuning beside it:
    ``add((1.0, preference_loss(log_likelihood(1.0), hinge(delta))), (coef, chosen_nll()))``.

    Args:
        beta: β > 0, the reciprocal of the margin in nats; often 0.1.

    Returns:
        A `preference_loss`, which reads ``ref_logprobs`` and ``loss_mask``.

    Raises:
        ValueError: ``beta`` is not positive and finite.

    Source: RSO's hinge-norm, https://arxiv.org/abs/2309.06657, section 3, after SLiC-HF,
    https://arxiv.org/abs/2305.10425.

    >>> import torch
    >>> from nrl.batch import Batch
    >>> mask = torch.ones(1, 2, 1, dtype=torch.bool)
    >>> batch = Batch({"loss_mask": mask, "ref_logprobs": -1.0 * mask}, batch_size=[1, 2])
    >>> out = Batch({"logprobs": torch.tensor([[[-1.0], [-3.0]]])}, batch_size=[1, 2])
    >>> hinge_loss(0.25)(out, batch)[0].total.item()
    0.5
    """
    positive("hinge_loss", "beta", beta)
    return _preference("hinge_loss", "The hinge loss", implicit_reward(beta), hinge())


@checked("simpo_loss", finite=False)
def simpo_loss(beta: float, gamma: float) -> MeanLoss:
    """Simple preference optimization: length-normalized, with a margin and without a reference.

        -log σ(β/|y_w| Σ_t log π_θ(chosen) - β/|y_l| Σ_t log π_θ(rejected) - γ)

    This subtracts γ from the scaled difference, as in the paper. If a library gives the ratio γ/β, multiply it by β.

    Args:
        beta: β > 0; often 2 to 2.5.
        gamma: γ >= 0, the margin to reach; often 0.5 to 1.5.

    Returns:
        A `preference_loss`, which reads ``loss_mask``. Its metric ``margin`` is before γ.

    Raises:
        ValueError: ``beta`` is not positive and finite, or ``gamma`` is negative or not finite.

    Source: https://arxiv.org/abs/2405.14734, eq. 6.

    >>> import torch
    >>> from nrl.batch import Batch
    >>> batch = Batch({"loss_mask": torch.tensor([[[True, True], [True, False]]])}, batch_size=[1, 2])
    >>> out = Batch({"logprobs": torch.tensor([[[-1.0, -3.0], [-2.5, 0.0]]])}, batch_size=[1, 2])
    >>> round(simpo_loss(beta=2.0, gamma=1.0)(out, batch)[0].total.item(), 4)  # the margin reaches gamma
    0.6931
    """
    positive("simpo_loss", "beta", beta)
    not_negative("simpo_loss", "gamma", gamma)
    return _preference("simpo_loss", "SimPO", mean_log_likelihood(beta), log_sigmoid(gamma))


@checked("cpo_loss", finite=False)
def cpo_loss(beta: float, alpha: float = 1.0, aggregate: Aggregate = token_mean) -> Loss:
    """Contrastive preference optimization: DPO without a reference, and supervised fine-tuning on the chosen answers.

        -log σ(β Σ_t log π_θ(chosen) - β Σ_t log π_θ(rejected)) - α aggregate( log π_θ(chosen) )

    The paper's second term is the log-likelihood of whole answers, ``seq_sum(1)``; its code and TRL divide by the
    tokens, as this does.

    Args:
        beta: β > 0; often 0.1.
        alpha: α >= 0; often 1.
        aggregate: of the second term; see `chosen_nll`.

    Returns:
        A sum of the terms ``preference_loss``, over pairs and with its metrics, and ``chosen_nll``. It
        reads ``loss_mask``.

    Raises:
        ValueError: ``beta`` is not positive and finite, or ``alpha`` is negative or not finite.

    Source: https://arxiv.org/abs/2401.08417, section 3.

    >>> import torch
    >>> from nrl.batch import Batch
    >>> batch = Batch({"loss_mask": torch.tensor([[[True, True], [True, False]]])}, batch_size=[1, 2])
    >>> out = Batch({"logprobs": torch.tensor([[[-1.0, -3.0], [-4.0, 0.0]]])}, batch_size=[1, 2])
    >>> terms, _ = cpo_loss(beta=0.1, alpha=1.0)(out, batch)
    >>> {key: [round(part.item(), 4) for part in term] for key, term in terms.items()}
    {'preference_loss': [0.6931, 1.0], 'chosen_nll': [4.0, 2.0]}
    """
    positive("cpo_loss", "beta", beta)
    not_negative("cpo_loss", "alpha", alpha)
    preference = preference_loss(log_likelihood(beta), log_sigmoid())
    return _with_nll("cpo_loss", "CPO", (1.0, preference), (alpha, chosen_nll(aggregate)))


@checked("orpo_loss", finite=False)
def orpo_loss(coef: float, aggregate: Aggregate = seq_mean) -> Loss:
    """Odds ratio preference optimization: supervised fine-tuning that also prefers, without a reference.

        -aggregate( log π_θ(chosen) ) - λ log σ(log odds(chosen) - log odds(rejected))

    The log odds are `log_odds`, of the mean log-likelihood. The paper's first term is a mean over pairs of means over
    tokens, as here; its code and TRL divide by the tokens (`token_mean`), and count those of the prompt.

    Args:
        coef: λ >= 0; often 0.1.
        aggregate: of the first term; see `chosen_nll`.

    Returns:
        A sum of the terms ``preference_loss``, over pairs and with its metrics, and ``chosen_nll``. It
        reads ``loss_mask``.

    Raises:
        ValueError: ``coef`` is negative or not finite.

    Source: https://arxiv.org/abs/2403.07691, eq. 4, 6, 7.

    >>> import torch
    >>> from nrl.batch import Batch
    >>> batch = Batch({"loss_mask": torch.tensor([[[True, True], [True, False]]])}, batch_size=[1, 2])
    >>> out = Batch({"logprobs": torch.tensor([[[0.5, 0.5], [0.2, 1.0]]]).log()}, batch_size=[1, 2])
    >>> terms, _ = orpo_loss(0.1)(out, batch)
    >>> {key: [round(part.item(), 4) for part in term] for key, term in terms.items()}  # the odds are 1 and 1/4
    {'preference_loss': [0.0223, 1.0], 'chosen_nll': [0.6931, 1.0]}
    """
    not_negative("orpo_loss", "coef", coef)
    preference = preference_loss(log_odds, log_sigmoid())
    return _with_nll("orpo_loss", "ORPO", (coef, preference), (1.0, chosen_nll(aggregate)))


@checked("rpo_loss", finite=False)
def rpo_loss(beta: float, alpha: float = 1.0, aggregate: Aggregate = seq_mean) -> Loss:
    """Iterative reasoning preference optimization: DPO and supervised fine-tuning on the chosen answers.

        DPO - α aggregate( log π_θ(chosen) )

    The paper divides the second term by the length of each answer, its reasoning included, as here; TRL, as a sum of
    the losses ``sigmoid`` and ``sft``, by the tokens of the batch (`token_mean`). NVIDIA's reward-aware RPO is another
    method.

    Args:
        beta: β > 0; often 0.1.
        alpha: α >= 0; often 1.
        aggregate: of the second term; see `chosen_nll`.

    Returns:
        A sum of the terms ``preference_loss``, over pairs and with its metrics, and ``chosen_nll``. It
        reads ``ref_logprobs`` and ``loss_mask``.

    Raises:
        ValueError: ``beta`` is not positive and finite, or ``alpha`` is negative or not finite.

    Source: https://arxiv.org/abs/2404.19733, eq. 1.

    >>> import torch
    >>> from nrl.batch import Batch
    >>> mask = torch.tensor([[[True, True], [True, False]]])
    >>> batch = Batch({"loss_mask": mask, "ref_logprobs": -2.0 * mask}, batch_size=[1, 2])
    >>> out = Batch({"logprobs": -2.0 * mask}, batch_size=[1, 2])
    >>> terms, _ = rpo_loss(beta=0.1, alpha=0.5)(out, batch)
    >>> {key: [round(part.item(), 4) for part in term] for key, term in terms.items()}
    {'preference_loss': [0.6931, 1.0], 'chosen_nll': [1.0, 1.0]}
    """
    positive("rpo_loss", "beta", beta)
    not_negative("rpo_loss", "alpha", alpha)
    preference = preference_loss(implicit_reward(beta), log_sigmoid())
    return _with_nll("rpo_loss", "RPO", (1.0, preference), (alpha, chosen_nll(aggregate)))


def _with_nll(name: str, doc: str, preference: tuple[float, MeanLoss], nll: tuple[float, MeanLoss]) -> Loss:
    return named(name, f"{doc}; see `nrl.algos.{name}`.", add(preference, nll))
