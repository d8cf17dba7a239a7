"""Surrogates: the loss at each token, ``(log_ratio, logprobs, advantages) -> per-token loss``, all ``[*B, T]``.

``log_ratio`` and ``logprobs`` carry the gradient; ``advantages`` are constants. A surrogate may have an attribute
``clipped``, a function of the same arguments ``-> bool [*B, T]`` that marks where it clips. `policy_loss` then reports
the metric ``clip_fraction``.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from nrl.algos.divergences import Divergence, binary_tv
from nrl.algos.ratios import bounded
from nrl.arguments import checked
from nrl.errors import ArgumentError

__all__ = ["Surrogate", "cispo", "clip", "dppo", "reinforce", "sapo", "vespo"]

type Surrogate = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``(log_ratio, logprobs, advantages) -> per-token loss``, all ``[*B, T]``."""


def _check_distance(reader: str, name: str, value: float) -> None:
    if not value >= 0:
        raise ArgumentError(
            f"{reader}: {name} is {value}; it is a distance from a ratio of 1, so it must be at least 0", name
        )


@checked("clip", finite=False)
def clip(low: float, high: float | None = None, dual: float | None = None) -> Surrogate:
    """PPO's clipped surrogate, with one bound or two, and optionally the dual clip.

        -min(r A, clamp(r, 1 - low, 1 + high) A),   r = exp(log_ratio)

    With ``dual`` = c, where A < 0:  -max(min(r A, clamp(r, ...) A), c A), which bounds the loss at -c A.
    ``clip(math.inf)`` clips nothing: plain importance sampling, -r A.

    Args:
        low: distance below 1, at least 0.
        high: distance above 1, at least 0; the same as ``low`` unless given.
        dual: c > 1, the ratio itself and not a distance; off unless given.

    Returns:
        A surrogate; its gradient reaches theta through ``log_ratio`` alone.

    Raises:
        ValueError: a bound is out of its range.

    Sources: PPO, https://arxiv.org/abs/1707.06347, eq. 7; two bounds: DAPO, https://arxiv.org/abs/2503.14476, eq. 10;
    dual: https://arxiv.org/abs/1912.09729.

    >>> log_ratio = torch.tensor([1.5, 0.5, 4.0]).log()
    >>> loss = clip(0.2, dual=3.0)(log_ratio, log_ratio, torch.tensor([1.0, -1.0, -1.0]))
    >>> [round(x, 4) for x in loss.tolist()]
    [-1.2, 0.8, 3.0]
    """
    high = low if high is None else high
    _check_distance("clip", "low", low)
    _check_distance("clip", "high", high)
    if dual is not None and not dual > 1:
        raise ArgumentError(f"clip: dual is {dual}; it is a ratio, not a distance from 1, so it must be greater than 1")

    def clip(log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        ratio = bounded(log_ratio).exp()
        objective = torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
        if dual is not None:
            objective = torch.where(advantages < 0, torch.maximum(objective, dual * advantages), objective)
        return -objective

    def is_clipped(log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        ratio = bounded(log_ratio).exp()
        above = (advantages > 0) & (ratio > 1 + high)
        below = (advantages < 0) & ((ratio < 1 - low) | (ratio > (math.inf if dual is None else dual)))
        return above | below

    clip.__dict__["clipped"] = is_clipped
    return clip


@checked("cispo", finite=False)
def cispo(high: float, low: float | None = None) -> Surrogate:
    """REINFORCE, weighted by a clamped ratio without a gradient.

        -stop_gradient(clamp(r, 1 - low, 1 + high)) A log π_θ,   r = exp(log_ratio)

    Every token keeps its gradient, however far its ratio is. The paper's experiments use the upper bound alone, and so
    does this unless you give ``low``. Libraries write that bound differently: here it is a distance from 1, as in the
    paper, and not the largest ratio itself (a bound of 5 on the ratio is ``high=4``).

    Args:
        high: distance above 1, at least 0.
        low: distance below 1, at least 0; no lower bound unless given.

    Returns:
        A surrogate; its gradient reaches theta through ``logprobs`` alone.

    Raises:
        ValueError: a bound is negative.

    Source: MiniMax-M1, https://arxiv.org/abs/2506.13585, eq. 4 and 5.

    >>> log_ratio = torch.tensor([6.0, 0.5]).log()
    >>> cispo(high=4.0)(log_ratio, torch.tensor([-1.0, -2.0]), torch.tensor([1.0, -1.0])).tolist()
    [5.0, -1.0]
    """
    low = math.inf if low is None else low
    _check_distance("cispo", "high", high)
    _check_distance("cispo", "low", low)

    def cispo(log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        weight = bounded(log_ratio.detach()).exp().clamp(1 - low, 1 + high)
        return -weight * advantages * logprobs

    def is_clipped(log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        ratio = bounded(log_ratio).exp()
        return (advantages != 0) & ((ratio > 1 + high) | (ratio < 1 - low))

    cispo.__dict__["clipped"] = is_clipped
    return cispo


@checked("sapo", finite=False)
def sapo(positive: float = 1.0, negative: float = 1.05) -> Surrogate:
    """A soft gate instead of a clip: the further the ratio is from 1, on either side, the less a token counts.

        -4/τ σ(τ (r - 1)) A,   τ = positive where A > 0, else negative,   r = exp(log_ratio)

    At r = 1 the gradient is that of `reinforce`, but the value is -2 A / τ.

    Args:
        positive: temperature τ of the gate for tokens that are encouraged, greater than 0.
        negative: for discouraged tokens; larger, since discouraging a token pushes up all others.

    Raises:
        ValueError: a temperature is not positive and finite.

    Source: SAPO, https://arxiv.org/abs/2511.20347, eq. 5 and 6.

    >>> loss = sapo()(torch.tensor([0.0, 0.0]), torch.zeros(2), torch.tensor([1.0, -1.0]))
    >>> [round(x, 4) for x in loss.tolist()]
    [-2.0, 1.9048]
    """
    for name, value in (("positive", positive), ("negative", negative)):
        if not 0 < value < math.inf:
            raise ArgumentError(f"sapo: {name} is {value}; it is a temperature, so it must be positive and finite")

    def sapo(log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        ratio = bounded(log_ratio).exp()
        temperature = torch.where(advantages > 0, ratio.new_tensor(positive), ratio.new_tensor(negative))
        return -4 / temperature * torch.sigmoid(temperature * (ratio - 1)) * advantages

    return sapo


@checked("dppo", finite=False)
def dppo(
    low: float, high: float | None = None, *, divergence: Divergence = binary_tv, cap: float = math.inf
) -> Surrogate:
    """A trust region: leave out a token that would take theta further from a policy that it is already too far from.

        -stop_gradient(M min(r, cap)) A log π_θ,   r = exp(log_ratio)
        M = 0 where A > 0, r > 1 and D > high, or where A < 0, r < 1 and D > low;   1 elsewhere

    D is a divergence of two distributions over {this token, any other}. So a rare token with a large ratio stays, and a
    common token with a ratio close to 1 may not. With ``cap`` infinite the gradient is that of -M r A.

    Args:
        low: the largest D at which a token may still be discouraged, at least 0: of `binary_tv` often 0.15 to 0.2, of
            `binary_kl` 0.05.
        high: the largest at which one may be encouraged; ``low`` unless given.
        divergence: `binary_tv`, `binary_kl`, or any ``(logprobs, other_logprobs) -> per-token``.
        cap: of the ratio, greater than 0; the paper's larger runs have 5.

    Returns:
        A surrogate. The paper takes `nrl.algos.rollout_ratio`: anchored to the sampler, it needs no correction.

    Raises:
        ValueError: a bound is negative, or ``cap`` not positive.

    Source: DPPO, https://arxiv.org/abs/2602.04879, eq. 12 to 14 and 23.

    >>> log_ratio, logprobs = torch.tensor([2.0, 1.2]).log(), torch.tensor([0.02, 0.6]).log()
    >>> [round(x, 3) for x in dppo(0.05)(log_ratio, logprobs, torch.ones(2)).tolist()]  # the rare token counts
    [7.824, 0.0]
    """
    high = low if high is None else high
    _check_distance("dppo", "low", low)
    _check_distance("dppo", "high", high)
    if not cap > 0:
        raise ArgumentError(f"dppo: cap is {cap}; it is the largest ratio, so it must be greater than 0")

    def is_clipped(log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        apart = divergence(logprobs, logprobs - log_ratio)
        above = (advantages > 0) & (log_ratio > 0) & (apart > high)
        below = (advantages < 0) & (log_ratio < 0) & (apart > low)
        return above | below

    def dppo(log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        fixed = log_ratio.detach()
        weight = bounded(fixed).exp().clamp(max=cap)
        left_out = is_clipped(fixed, logprobs.detach(), advantages)
        return -torch.where(left_out, 0, weight) * advantages * logprobs

    dppo.__dict__["clipped"] = is_clipped
    return dppo


@checked("vespo", finite=False)
def vespo(positive: tuple[float, float] = (2.0, 3.0), negative: tuple[float, float] = (3.0, 2.0)) -> Surrogate:
    """REINFORCE, weighted by a smooth function of the ratio that is 1 at 1 and decreases on both sides.

        -stop_gradient(φ(W)) A log π_θ,   φ(W) = W^a exp(b (1 - W)),   W = exp(log_ratio)

    Args:
        positive: a and b where A >= 0, neither negative. The larger b / a, the less a ratio above 1 counts.
        negative: where A < 0.

    Returns:
        A surrogate, for the ratio of whole rows: ``product_ratio(rollout_ratio)``.

    Raises:
        ValueError: an exponent is negative or not finite.

    Source: VESPO, https://arxiv.org/abs/2602.10693, eq. 17 and 20.

    >>> loss = vespo()(torch.tensor([1.0, 2.0]).log(), torch.tensor([-1.0, -1.0]), torch.ones(2))
    >>> [round(x, 4) for x in loss.tolist()]
    [1.0, 0.1991]
    """
    for name, pair in (("positive", positive), ("negative", negative)):
        if not all(0 <= value < math.inf for value in pair):
            raise ArgumentError(f"vespo: {name} is {pair}; both are exponents, which must be finite and at least 0")

    def vespo(log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        log_weight = bounded(log_ratio.detach())
        bad = (advantages < 0).unsqueeze(-1)
        a, b = torch.where(bad, log_weight.new_tensor(negative), log_weight.new_tensor(positive)).unbind(-1)
        # -inf times an exponent of 0 would be NaN; below this bound the weight is 0 to any precision
        phi = (a * log_weight.clamp(min=-1e4) + b * -torch.expm1(log_weight)).exp()
        return -phi * advantages * logprobs

    return vespo


def reinforce(log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
    """The score-function surrogate, for tokens that theta sampled.

        -A log π_θ

    Args:
        log_ratio: ``[*B, T]``; not used.
        logprobs: ``[*B, T]``, nats.
        advantages: ``[*B, T]``.

    Source: Williams, Simple statistical gradient-following algorithms (1992).

    >>> reinforce(torch.zeros(2), torch.tensor([-1.0, -2.0]), torch.tensor([1.0, -1.0])).tolist()
    [1.0, -2.0]
    """
    return -advantages * logprobs
