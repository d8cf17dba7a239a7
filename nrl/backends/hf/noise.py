"""Drawing tokens from a distribution with counter-based noise.

A row's noise is a function of its seed and of the token's position, and of nothing else: not of other rows of the
batch, nor of their order, nor of the number of calls that sampled an episode.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

__all__ = ["draw", "keep_most_probable", "uniforms"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = z ^ (z >> np.uint64(31))
    return mixed


def uniforms(seeds: Sequence[int] | np.ndarray, starts: Sequence[int] | np.ndarray, n: int) -> Tensor:
    """Return uniform noise for n positions in a row, a function of (seed, position) alone.

    ``u(s, t) = ((mix(mix(k + t g) + k) >> 12) + 1/2) / 2^52`` with ``k = mix(s + g)``, g splitmix64's odd increment and
    ``mix`` its finalizer, all modulo 2^64. Because of the outer mix, two seeds whose counters happen to meet share no
    further noise.

    Args:
        seeds: ``[B]`` integers, taken modulo 2^64.
        starts: ``[B]`` integers, the first position of each row.
        n: how many positions.

    Returns:
        ``[n, B]`` float64 in the open interval (0, 1): row i has position ``starts + i``.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014, figure 14 (splitmix64).

    >>> noise = uniforms([7, 8], [3, 4], 2)
    >>> noise.shape, bool(noise[1, 0] == uniforms([7], [4], 1)[0, 0])
    (torch.Size([2, 2]), True)
    """
    seeds = np.asarray([int(seed) & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
    positions = np.asarray(starts, dtype=np.uint64)[None] + np.arange(n, dtype=np.uint64)[:, None]
    key = _mix(seeds + _GOLDEN)
    bits = _mix(_mix(positions * _GOLDEN + key) + key)
    # 52 bits and a half: with 53 the largest would round to 1
    return torch.from_numpy(((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52)


def keep_most_probable(logprobs: Tensor, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Restrict distributions to their most probable tokens: top-k, then top-p of the rest, renormalised.

    ``K = {v : p_v >= the k-th largest p}`` (ties at the k-th are all kept), then the smallest set whose mass, most
    probable tokens first, reaches ``top_p`` of the mass of K; at least one token. As transformers and vLLM do.

    Args:
        logprobs: ``[B, V]`` float, nats, normalised, temperature applied.
        top_k: 0: off.
        top_p: in (0, 1]; 1: off.

    Returns:
        ``[B, V]`` of the same dtype: log-probabilities over the kept tokens, minus infinity elsewhere.

    >>> half = keep_most_probable(torch.tensor([[0.4, 0.1, 0.4, 0.1]]).log(), top_k=2)
    >>> half.exp().tolist()
    [[0.5, 0.0, 0.5, 0.0]]
    """
    if 0 < top_k < logprobs.shape[-1]:
        least = logprobs.topk(top_k, dim=-1).values[:, -1:]
        logprobs = logprobs.masked_fill(logprobs < least, -torch.inf).log_softmax(-1)
    if top_p < 1:
        ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
        mass = ordered.double().exp()
        # A token goes if those before it have the mass already, so the first one always stays
        gone = torch.empty_like(ordered, dtype=torch.bool).scatter_(-1, order, mass.cumsum(-1) - mass >= top_p)
        logprobs = logprobs.masked_fill(gone, -torch.inf).log_softmax(-1)
    return logprobs


def draw(
    logits: Tensor, noise: Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Draw one token for each row by the inverse of the cumulative distribution.

    ``q = keep_most_probable(log_softmax(logits / temperature))``, and the token is the first whose cumulative
    probability reaches the noise. The sums run in float64, so that a large vocabulary loses nothing.

    Args:
        logits: ``[B, V]`` float.
        noise: ``[B]`` float64 in (0, 1).
        temperature: 0: the most probable token, with its log-probability at temperature 1 over all tokens.
        top_k: see `keep_most_probable`; 0: off.
        top_p: see `keep_most_probable`; 1: off.

    Returns:
        ``[B]`` int64 tokens and ``[B]`` their log-probabilities, nats, under q.

    >>> tokens, logprobs = draw(torch.tensor([[0.0, 0.0], [0.0, 9.0]]), torch.tensor([0.4, 0.4]).double())
    >>> tokens.tolist(), round(logprobs[0].exp().item(), 4)
    ([0, 1], 0.5)
    """
    scores = logits if logits.dtype == torch.float64 else logits.float()
    if temperature == 0:
        tokens = scores.argmax(-1, keepdim=True)
        return tokens[:, 0], scores.log_softmax(-1).gather(-1, tokens)[:, 0]
    logprobs = (scores if temperature == 1 else scores / temperature).log_softmax(-1)
    if top_k or top_p < 1:
        logprobs = keep_most_probable(logprobs, top_k, top_p)
    cdf = logprobs.exp().cumsum(-1, dtype=torch.float64)
    # clamp: if the logits are NaN, the search runs off the end; the log-probability shows the NaN
    tokens = torch.searchsorted(cdf, noise[:, None] * cdf[:, -1:]).clamp_(max=logits.shape[-1] - 1)
    return tokens[:, 0], logprobs.gather(-1, tokens)[:, 0]
