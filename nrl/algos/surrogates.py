"""What is minimised at each token: ``(log_ratio, logprobs, advantages) -> per-token loss``, all ``[*B, T]``.

``log_ratio`` and ``logprobs`` carry the gradient, ``advantages`` are constants. A surrogate may have an attribute
``clipped``, a function ``(log_ratio, advantages) -> bool [*B, T]`` that says where it clips; `policy_loss` then reports
the metric ``clip_fraction``.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from nrl.algos.ratios import bounded

__all__ = ["Surrogate", "cispo", "clip", "reinforce"]

type Surrogate = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``(log_ratio, logprobs, advantages) -> per-token loss``, all ``[*B, T]``."""


def _check_distance(reader: str, name: str, value: float) -> None:
    if not value >= 0:
        raise ValueError(f"{reader}: {name} is {value}; it is a distance from a ratio of 1, so it must be at least 0")


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
        raise ValueError(f"clip: dual is {dual}; it is a ratio, not a distance from 1, so it must be greater than 1")

    def clip(log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        ratio = bounded(log_ratio).exp()
        objective = torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
        if dual is not None:
            objective = torch.where(advantages < 0, torch.maximum(objective, dual * advantages), objective)
        return -objective

    def clipped(log_ratio: Tensor, advantages: Tensor) -> Tensor:
        ratio = bounded(log_ratio).exp()
        above = (advantages > 0) & (ratio > 1 + high)
        below = (advantages < 0) & ((ratio < 1 - low) | (ratio > (math.inf if dual is None else dual)))
        return above | below

    clip.__dict__["clipped"] = clipped
    return clip


def cispo(high: float, low: float | None = None) -> Surrogate:
    """REINFORCE, weighted by a clamped ratio that has no gradient of its own.

        -stop_gradient(clamp(r, 1 - low, 1 + high)) A log π_θ,   r = exp(log_ratio)

    No token loses its gradient, however far its ratio is. The paper's experiments use the upper bound alone, as here
    unless ``low`` is given. Libraries disagree on how to write that bound: here it is a distance from 1, as in the
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

    def clipped(log_ratio: Tensor, advantages: Tensor) -> Tensor:
        ratio = bounded(log_ratio).exp()
        return (advantages != 0) & ((ratio > 1 + high) | (ratio < 1 - low))

    cispo.__dict__["clipped"] = clipped
    return cispo


def reinforce(log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
    """The score-function surrogate, which assumes that theta sampled the tokens.

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
