"""Log-probabilities of given tokens straight from hidden states, without the `[tokens, vocabulary]` matrix.

The logits of a large vocabulary are the largest tensor of a training step: 4,096 tokens by 151,936 words are 2.3 GiB in
float32, and autograd keeps several such. A loss reads two numbers a token, so `linear_logprobs` computes the logits for
one chunk of tokens at a time, keeps those two numbers, and computes the chunk's logits again in the backward.
`linear_top_k` finds the most probable words in the same way, for a teacher.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nrl.backends.training.outputs.head_chunks import (
    HeadGradients,
    accumulating,
    buffer,
    check_inputs,
    chunk_logits,
    chunk_size,
    factor_of,
    slices,
)
from nrl.backends.training.outputs.vocab_parallel import VocabularyShard
from nrl.errors import ConfigError

__all__ = ["KEEP_BYTES", "linear_logprobs", "linear_top_k"]

KEEP_BYTES = 64 * 2**20
"""Log-probabilities of all tokens and all words are kept for the backward where they are no larger than this.

They are then cheaper to hold than to compute again: for a small vocabulary that computation is a quarter of the time.
"""


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: Tensor | None = None,
    bias: Tensor | None = None,
    entropy: bool = False,
    chunk: int | None = None,
    shard: VocabularyShard | None = None,
) -> tuple[Tensor, Tensor | None]:
    r"""Log-probabilities of `targets` under the softmax of a linear layer, and that distribution's entropy.

    With ``z_n = (W h_n + b) / temperature_n``::

        logprobs_n = z_n[targets_n] - log sum_v exp z_n[v]                      (for each of its targets)
        entropy_n  = - sum_v p_n[v] log p_n[v],    p_n = softmax(z_n)

    Equal to ``log_softmax`` and ``gather`` on the whole matrix of logits, in memory that does not grow with tokens
    times vocabulary. Gradients of both results flow to `hidden`, `weight` and `bias`; there is no second derivative.
    An entropy without an incoming gradient costs nothing in the backward. Nothing waits for the device.

    Logits are products of numbers in the inputs' dtype. They are added up and kept in float32, and everything after
    them is float32, too (float64 for float64 inputs). Rounded to bfloat16, logits would move log-probabilities by 0.03
    nats. The weight's gradient is added up over chunks in that dtype and cast once.

    Args:
        hidden: ``[N, H]`` float32, bfloat16 or float64; N may be 0.
        weight: ``[V, H]``, of hidden's dtype.
        targets: ``[N]`` or ``[N, K]`` int64 in ``[0, V)``: one word a token, or several. Give tokens that a mask leaves
            out any word of the vocabulary, such as 0.
        temperature: ``[N]`` floating, greater than 0 (not checked: that would wait for the device); no gradient flows
            to it. None: 1.
        bias: ``[V]``, of hidden's dtype. None: 0.
        entropy: whether to return the entropy.
        chunk: the most tokens whose logits exist at once. None: as many as fit in `CHUNK_BYTES` of
            `nrl.backends.training.outputs.head_chunks`, or in a part of the memory of a GPU. If one chunk holds all
            tokens, and their log-probabilities fit in `KEEP_BYTES`, these are kept for the backward.
        shard: which words `weight` and `bias` are of, where processes share the vocabulary. All call this together,
            with equal tokens and targets, and get equal results. The gradient of `hidden` is then a part, to be added
            up over them.

    Returns:
        ``(logprobs, entropy)``: nats, float32 (float64 for float64 inputs), in the shape of the targets and ``[N]``;
        the entropy is None unless asked for.

    Raises:
        ModelError: hidden, weight and bias do not fit together.
        BatchError: targets or temperature have the wrong shape or dtype.
        ConfigError: chunk is less than 1.

    >>> hidden, weight = torch.tensor([[0.0, 0.0], [3.0, 0.0]]).log1p(), torch.eye(2)
    >>> logprobs, entropy = linear_logprobs(hidden, weight, torch.tensor([1, 0]), entropy=True)
    >>> logprobs.exp()
    tensor([0.5000, 0.8000])
    >>> entropy.exp()
    tensor([2.0000, 1.6494])
    """
    check_inputs(hidden, weight, targets, temperature, bias, chunk)
    if temperature is not None:
        temperature = temperature.detach().to(accumulating(hidden.dtype))[:, None]
    size = chunk_size(hidden, _words(weight, shard), chunk)
    words = targets[:, None] if targets.ndim == 1 else targets
    outputs: tuple[Tensor, Tensor | None] = _LinearLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, words, temperature, entropy, size, shard
    )
    return outputs[0].view(targets.shape), outputs[1]


@torch.no_grad()
def linear_top_k(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    *,
    temperature: Tensor | None = None,
    bias: Tensor | None = None,
    chunk: int | None = None,
    shard: VocabularyShard | None = None,
) -> tuple[Tensor, Tensor]:
    """Find the most probable words under the softmax of a linear layer, and their log-probabilities, without gradient.

    Args:
        hidden: ``[N, H]``; these are as for `linear_logprobs`.
        weight: ``[V, H]``.
        k: how many words, from 1 to V.
        temperature: ``[N]``, or None.
        bias: ``[V]``, or None.
        chunk: the most tokens whose logits exist at once; None: as many as fit.
        shard: which words `weight` and `bias` are of, where processes share the vocabulary.

    Returns:
        ``(words, logprobs)``: ``[N, k]`` each, int64 and nats, the most probable first.

    Raises:
        ModelError: hidden, weight and bias do not fit together.
        BatchError: temperature has the wrong shape or dtype.
        ConfigError: k or chunk is out of range.

    >>> words, logprobs = linear_top_k(torch.tensor([[0.25, 0.5, 0.25]]).log(), torch.eye(3), 1)
    >>> words.tolist(), logprobs.exp().tolist()
    ([[1]], [[0.5]])
    """
    check_inputs(hidden, weight, None, temperature, bias, chunk)
    words_here = torch.tensor(len(weight))
    vocabulary = int(words_here if shard is None else shard.all_reduce(words_here.to(weight.device)))
    if not 1 <= k <= vocabulary:
        raise ConfigError(f"top_k: k is {k}; it must be at least 1 and at most the {vocabulary} words of the model")
    if temperature is not None:
        temperature = temperature.to(accumulating(hidden.dtype))[:, None]
    size = chunk_size(hidden, _words(weight, shard), chunk)
    logits, factor = buffer(hidden, weight, size), factor_of(weight)
    logp = torch.empty_like(logits)
    words = torch.empty((len(hidden), k), dtype=torch.int64, device=hidden.device)
    logprobs = logits.new_empty(words.shape)
    for rows in slices(len(hidden), size):
        chunk_logprobs = _log_softmax(hidden, factor, bias, temperature, rows, logits, logp, shard)
        if shard is None:
            logprobs[rows], words[rows] = chunk_logprobs.topk(k)
        else:
            words[rows], logprobs[rows] = shard.top_k(chunk_logprobs, k)
    return words, logprobs


def _words(weight: Tensor, shard: VocabularyShard | None) -> int:
    """Return the words of a chunk's logits; where processes share the vocabulary, the most that one of them has."""
    return len(weight) if shard is None else shard.max_words


class _LinearLogprobs(torch.autograd.Function):
    """Log-probabilities and entropy, with the logits computed again in the backward.

    `targets` is ``[N, K]``, `temperature` ``[N, 1]``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor | None,
        entropy: bool,
        size: int,
        shard: VocabularyShard | None,
    ) -> tuple[Tensor, Tensor | None]:
        logits, factor = buffer(hidden, weight, size), factor_of(weight)
        logp = torch.empty_like(logits)
        logprobs = logits.new_empty(targets.shape)
        entropies = logits.new_empty(hidden.shape[0]) if entropy else None
        for rows in slices(hidden.shape[0], size):
            chunk = _log_softmax(hidden, factor, bias, temperature, rows, logits, logp, shard)
            logprobs[rows] = chunk.gather(1, targets[rows]) if shard is None else shard.gather(chunk, targets[rows])
            if entropies is not None:
                p = torch.exp(chunk, out=logits[: len(chunk)])
                entropies[rows] = p.mul_(chunk).sum(1).neg_()
        if entropies is not None and shard is not None:
            shard.all_reduce(entropies)
        keep = size == hidden.shape[0] and size * _words(weight, shard) * logp.itemsize <= KEEP_BYTES
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, entropies, logp if keep else None)
        ctx.set_materialize_grads(False)
        ctx.size, ctx.shard = size, shard
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_logprobs is None and grad_entropy is None:
            return (None,) * 8
        hidden, weight, bias, targets, temperature, entropies, saved_logprobs = ctx.saved_tensors
        hidden_grad, weight_sum, bias_sum = _gradients(
            hidden,
            weight,
            bias,
            targets,
            temperature,
            entropies,
            saved_logprobs,
            _by_temperature(grad_logprobs, temperature),
            _by_temperature(None if grad_entropy is None else grad_entropy[:, None], temperature),
            ctx.needs_input_grad[:3],
            ctx.size,
            ctx.shard,
        )
        # Here the chunk's buffers are gone: the weight's cast needs memory too.
        weight_grad = None if weight_sum is None else weight_sum.to(weight.dtype)
        bias_grad = None if bias_sum is None else bias_sum.to(bias.dtype)
        return hidden_grad, weight_grad, bias_grad, None, None, None, None, None


def _gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Tensor | None,
    entropies: Tensor | None,
    saved_logprobs: Tensor | None,
    of_logprobs: Tensor | None,
    of_entropy: Tensor | None,
    needs: tuple[bool, bool, bool],
    size: int,
    shard: VocabularyShard | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute gradients of hidden, weight and bias, the last two as sums over chunks, which the caller casts."""
    logits, factor = buffer(hidden, weight, size), factor_of(weight)
    logp = torch.empty_like(logits) if saved_logprobs is None or of_entropy is not None else saved_logprobs
    gradients = HeadGradients(hidden, weight, logits, needs, size)
    for rows in slices(hidden.shape[0], size):
        chunk = saved_logprobs
        if chunk is None:
            chunk = _log_softmax(hidden, factor, bias, temperature, rows, logits, logp, shard)
        # d logprob / d z_v = 1[v = target] - p_v and d entropy / d z_v = -p_v (log p_v + entropy)
        grad = torch.exp(chunk, out=logits[: len(chunk)])
        summed = None if of_logprobs is None else of_logprobs[rows].sum(1, keepdim=True)  # over a token's targets
        if of_entropy is not None and entropies is not None:
            constant = of_entropy[rows] * entropies[rows, None]
            constant = constant if summed is None else constant + summed
            slope = torch.mul(chunk, -of_entropy[rows], out=logp[: len(chunk)])
            grad.mul_(slope.sub_(constant))
        elif summed is not None:
            grad.mul_(-summed)
        if of_logprobs is not None and shard is None:
            grad.scatter_add_(1, targets[rows], of_logprobs[rows])
        elif of_logprobs is not None and shard is not None:
            shard.add_at(grad, targets[rows], of_logprobs[rows])
        gradients.add(rows, grad)
    return gradients.hidden, gradients.weight, gradients.bias


def _log_softmax(
    hidden: Tensor,
    factor: Tensor,
    bias: Tensor | None,
    temperature: Tensor | None,
    rows: slice,
    logits: Tensor,
    out: Tensor,
    shard: VocabularyShard | None,
) -> Tensor:
    """Compute log-probabilities of all words for the tokens `rows` into `out`; `logits` is scratch."""
    logits = chunk_logits(hidden, factor, bias, temperature, rows, logits)
    out = out[: len(logits)]
    return torch.log_softmax(logits, 1, out=out) if shard is None else shard.log_softmax(logits, out)


def _by_temperature(grad: Tensor | None, temperature: Tensor | None) -> Tensor | None:
    """Return the incoming gradient, with the temperature's share of the chain rule."""
    return grad if grad is None or temperature is None else grad / temperature
