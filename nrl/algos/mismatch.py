"""The mismatch of trainer and sampler on the sampled tokens: its metrics, and a bound on it.

Both compute the log-probability of each token: the sampler when it draws the token (``rollout_logprobs``), and theta
when it trains on it. A policy-gradient method takes their difference for the policy's own change, whatever its cause.
"""

import math
from collections.abc import Mapping

import torch
from tensordict import TensorDict
from torch import Tensor

from nrl.algos._reductions import token_max
from nrl.algos.aggregate import token_mean
from nrl.algos.masking import masked
from nrl.batch import Batch
from nrl.batch.metrics import Ess, Metrics
from nrl.errors import ArgumentError, ConfigError, RolloutMismatch

__all__ = ["check_mismatch", "mismatch_metrics"]

_NAMES = ("mismatch/kl", "mismatch/ess", "mismatch/max_abs", "mismatch/chi2", "mismatch/max_ratio")


def mismatch_metrics(out: TensorDict | Mapping[str, Tensor], batch: Batch) -> Metrics:
    """Metrics of the mismatch of theta and the policy that sampled, over the tokens of ``loss_mask`` in valid rows.

        x_t = log π_θ(y_t | y_<t) - log π_rollout(y_t | y_<t),   r_t = exp(x_t)

        mismatch/kl       1/n Σ_t (r_t - 1 - x_t)           nats a token
        mismatch/ess      (Σ_t r_t)² / (n Σ_t r_t²)         in (0, 1]
        mismatch/max_abs  max_t |x_t|                       nats
        mismatch/chi2     1/n Σ_t r_t² - 1                  the variance of r, where its mean is 1
        mismatch/max_ratio  max_t r_t

    ``kl`` is the k3 estimate of KL(π_rollout ‖ π_θ) from tokens of π_rollout: never negative, of low variance, and
    unbiased where π_θ gives no probability to tokens that π_rollout cannot sample. Under top-k or top-p it does give
    them some: then the mean of r is the kept mass and not 1. ``ess`` is the effective share of the tokens after
    weighting by r.

    Nothing is bounded: a log-probability that is NaN or infinite makes ``kl`` NaN or infinite. Sums are in float64,
    without a gradient, and `train_step` reports them for every batch that has ``rollout_logprobs``.

    Args:
        out: has ``logprobs`` ``[*B, T]``, nats; those that the loss sees. A critic's has none.
        batch: has ``rollout_logprobs`` ``[*B, T]``, nats, ``loss_mask`` ``[*B, T]``, and where rows may be invalid
            ``valid`` ``[*B]``.

    Returns:
        All of them, still being added up; none without ``logprobs``, ``rollout_logprobs`` or ``loss_mask``.

    Raises:
        BatchError: the shapes differ.

    Source: J. Schulman, Approximating KL divergence, http://joschu.net/blog/kl-approx.html, k3 with p = π_θ and
    q = π_rollout; the effective sample size: `nrl.batch.metrics.Ess`.

    >>> from nrl.batch.metrics import finalize
    >>> mask = torch.tensor([[False, True, True]])
    >>> rollout = torch.tensor([[0.0, -1.0, -2.0]])
    >>> batch = Batch({"loss_mask": mask, "rollout_logprobs": rollout}, batch_size=[1])
    >>> out = TensorDict({"logprobs": rollout + torch.tensor([[0.0, 0.0, 3.0]]).log1p()}, batch_size=[1])
    >>> [round(x, 4) for x in finalize(mismatch_metrics(out, batch)).values()]  # ratios 1 and 4
    [0.8069, 0.7353, 1.3863, 7.5, 4.0]
    """
    if "logprobs" not in out.keys() or {"rollout_logprobs", "loss_mask"} - set(batch.keys()):
        return {}
    mask = batch["loss_mask"]
    if "valid" in batch.keys():
        mask = mask & batch["valid"].unsqueeze(-1)
    theta, rollout = (masked(x.detach().double(), mask) for x in (out["logprobs"], batch["rollout_logprobs"]))
    x = theta - rollout
    ratio = masked(x.exp(), mask)
    kl = token_mean(torch.expm1(x) - x, mask)
    squares = ratio.square()
    reductions = (
        kl,
        Ess(ratio.sum(), squares.sum(), kl.weight),
        token_max(x.abs(), mask),
        token_mean(squares - 1, mask),
        token_max(ratio, mask),
    )
    return dict(zip(_NAMES, reductions, strict=True))


def check_mismatch(numbers: Mapping[str, float], bound: float) -> None:
    """Stop a run whose trainer and sampler disagree by more than a bound, and name the likely cause.

        mismatch/kl <= bound

    A skipped step measured nothing, and passes.

    Args:
        numbers: of a step, as ``run.log`` returns them.
        bound: nats a token, greater than 0; ``math.inf``: whatever is a number passes.

    Raises:
        RolloutMismatch: ``mismatch/kl`` is larger, or NaN.
        ConfigError: the bound is not positive.
        ValueError: the step was not measured.

    Source: the metrics are those of `mismatch_metrics`.

    >>> check_mismatch({"mismatch/kl": 0.001, "mismatch/ess": 0.99, "mismatch/max_abs": 0.3, "lag": 0.0}, bound=0.1)
    >>> check_mismatch({"mismatch/kl": 0.2, "mismatch/ess": 0.7, "mismatch/max_abs": 2.0, "lag": 4.0}, bound=0.1)
    Traceback (most recent call last):
    nrl.errors.RolloutMismatch: check_mismatch: trainer and sampler disagree: mismatch/kl is 0.2 nats a token, ...
    """
    if not bound > 0:
        raise ConfigError(f"check_mismatch: the bound is {bound}; it is in nats a token, and greater than 0")
    if "mismatch/kl" not in numbers:
        if numbers.get("skipped"):
            return
        raise ArgumentError(
            "check_mismatch: there is no 'mismatch/kl' among the numbers, so they cannot be bounded. Give it what "
            "run.log returns of the metrics of train_step, for a batch with the column 'rollout_logprobs'"
        )
    kl, ess, largest = (numbers[key] for key in _NAMES[:3])
    if kl <= bound or largest == -math.inf:  # the largest of none
        return
    lag = numbers.get("lag")
    raise RolloutMismatch(kl, ess, largest, lag, bound, _diagnosis(kl, largest, lag))


_ALIKE, _FEW = 4.0, 20.0
"""Bounds on the largest log-ratio over the typical one. Below the first, all tokens disagree alike, as under top-p;
above the second, few tokens make up the whole KL. Other weights, another temperature and rounding give 5 to 10."""

_MUCH = 0.5
"""In nats. Above it, neither rounding nor a truncated distribution explains the mismatch."""


def _diagnosis(kl: float, largest: float, lag: float | None) -> str:
    likely = "Otherwise likely" if lag else "Likely"
    return " ".join([_about_lag(lag), _about_size(kl, largest, likely), _WHAT_TO_DO])


def _about_lag(lag: float | None) -> str:
    if lag is None:
        return "The rows have no 'version', so how old the weights are that sampled them is not known."
    if lag > 0:
        return (
            f"The weights that are trained are newer than those that sampled, by a lag of {lag:.3g}, so this has in it "
            "what the policy itself has changed: allow less lag, or lower the learning rate."
        )
    return (
        "The lag is 0: no publish lies between. Where the batch is trained on in several updates, those before this "
        "one are in it (make fewer of them, or lower the learning rate); otherwise it is no change of the policy."
    )


def _about_size(kl: float, largest: float, likely: str) -> str:
    if not math.isfinite(kl):
        return (
            "A log-probability is NaN or infinite, or so far from the other that their ratio is: look for tokens to "
            "which the trainer gives no probability at all, and for overflow in the dtype of either side."
        )
    # Of tokens that all disagree by x: kl is x²/2 where x is small, and |x| - 1 where the trainer likes them far less
    typical = max(math.sqrt(2 * kl), kl)
    sizes = f"(were all tokens alike, each would be off by about {typical:.2g} nats; the worst is off by {largest:.3g})"
    if largest > _FEW * typical:
        return (
            f"Few tokens disagree by much {sizes}. {likely}: tokens in loss_mask that the sampler did not sample, or "
            "has no log-probability for; or rounding at improbable tokens, by the dtype of either side."
        )
    if typical > _MUCH:
        return (
            f"Many tokens disagree by much {sizes}. {likely}: the sampler holds other weights (a publish that was left "
            "out, another model); a column 'temperature' that is not what was sampled with; or rows whose tokens or "
            "positions are not those that were sampled."
        )
    if largest < _ALIKE * typical:
        return (
            f"No token disagrees by much more than the others {sizes}. {likely}: top-k or top-p, under which "
            "rollout_logprobs are renormalised over the tokens that were kept; sample with temperature alone."
        )
    return (
        f"Many tokens disagree by a little {sizes}. {likely}: a column 'temperature' that is not what was sampled "
        "with; weights that are a few updates older; the dtype of either side; or top-k or top-p, under which "
        "rollout_logprobs are renormalised over the tokens that were kept."
    )


_WHAT_TO_DO = (
    "To find out, compare batch['rollout_logprobs'] with trainer.logprobs(state.params, batch) token by token, right "
    "after a publish. What has to stay apart can be weighed in the loss (nrl.algos.truncate, icepop), under a larger "
    "bound."
)
