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

from nrl.backends.training.vocabulary import VocabularyShard
from nrl.errors import BatchError, ConfigError, ModelError

__all__ = ["CHUNK_BYTES", "KEEP_BYTES", "linear_logprobs", "linear_top_k", "of_device"]

CHUNK_BYTES = 256 * 2**20
"""Size of one chunk's logits, in bytes of the accumulating dtype, where `linear_logprobs` chooses the chunk itself.

A chunk needs two such matrices, and in the backward one more in the inputs' dtype where that is bfloat16. Every chunk
passes once over the weight and its gradient's sum, so much smaller chunks are slower; on a CPU larger ones hardly gain.
(441 tokens at a vocabulary of 151,936; 745,654 at one of 90.) A GPU of 80 GB takes `_OF_DEVICE` of its memory instead.
"""

_OF_DEVICE = 80
"""The part of a GPU's memory that a chunk's logits may take is one in so many."""

KEEP_BYTES = 64 * 2**20
"""Log-probabilities of all tokens and all words are kept for the backward where they are no larger than this.

They are then cheaper to hold than to compute again: for a small vocabulary that computation is a quarter of the time.
"""

_ACCUMULATE = {torch.float32: torch.float32, torch.bfloat16: torch.float32, torch.float64: torch.float64}


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
        chunk: the most tokens whose logits exist at once. None: as many as fit in `CHUNK_BYTES`, or in a part of the
            memory of a GPU. If one chunk holds all tokens, and their log-probabilities fit in `KEEP_BYTES`, these are
            kept for the backward.
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
    _check(hidden, weight, targets, temperature, bias, chunk)
    if temperature is not None:
        temperature = temperature.detach().to(_ACCUMULATE[hidden.dtype])[:, None]
    size = _chunk_size(hidden, _words(weight, shard), chunk)
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
    """The most probable words under the softmax of a linear layer, and their log-probabilities; without gradient.

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
    _check(hidden, weight, None, temperature, bias, chunk)
    words_here = torch.tensor(len(weight))
    known = int(words_here if shard is None else shard.summed(words_here.to(weight.device)))
    if not 1 <= k <= known:
        raise ConfigError(f"top_k: k is {k}; it must be at least 1 and at most the {known} words of the model")
    if temperature is not None:
        temperature = temperature.to(_ACCUMULATE[hidden.dtype])[:, None]
    size = _chunk_size(hidden, _words(weight, shard), chunk)
    logits, factor = _buffer(hidden, weight, size), _factor(weight)
    logp = torch.empty_like(logits)
    words = torch.empty((len(hidden), k), dtype=torch.int64, device=hidden.device)
    logprobs = logits.new_empty(words.shape)
    for rows in _slices(len(hidden), size):
        found = _log_softmax(hidden, factor, bias, temperature, rows, logits, logp, shard)
        if shard is None:
            logprobs[rows], words[rows] = found.topk(k)
        else:
            words[rows], logprobs[rows] = shard.top_k(found, k)
    return words, logprobs


def _words(weight: Tensor, shard: VocabularyShard | None) -> int:
    """The words of a chunk's logits; where processes share the vocabulary, the most that one of them has."""
    return len(weight) if shard is None else shard.most


def of_device(memory: float) -> int:
    """Bytes of a chunk's logits on a GPU with so many bytes of memory."""
    return int(memory) // _OF_DEVICE


def _chunk_size(hidden: Tensor, words: int, chunk: int | None) -> int:
    """Tokens in a chunk: as even as possible, because a small last chunk costs a pass over the weight all the same."""
    if chunk is None:
        room = CHUNK_BYTES
        if hidden.device.type == "cuda":
            room = of_device(torch.cuda.get_device_properties(hidden.device).total_memory)
        chunk = max(1, room // (words * _ACCUMULATE[hidden.dtype].itemsize))
    chunks = max(1, -(-hidden.shape[0] // chunk))
    return -(-hidden.shape[0] // chunks)


class _LinearLogprobs(torch.autograd.Function):
    """The two results, with the logits computed again in the backward.

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
        logits, factor = _buffer(hidden, weight, size), _factor(weight)
        logp = torch.empty_like(logits)
        logprobs = logits.new_empty(targets.shape)
        entropies = logits.new_empty(hidden.shape[0]) if entropy else None
        for rows in _slices(hidden.shape[0], size):
            chunk = _log_softmax(hidden, factor, bias, temperature, rows, logits, logp, shard)
            logprobs[rows] = chunk.gather(1, targets[rows]) if shard is None else shard.gather(chunk, targets[rows])
            if entropies is not None:
                p = torch.exp(chunk, out=logits[: len(chunk)])
                entropies[rows] = p.mul_(chunk).sum(1).neg_()
        if entropies is not None and shard is not None:
            shard.summed(entropies)
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
        hidden, weight, bias, targets, temperature, entropies, kept = ctx.saved_tensors
        hidden_grad, weight_sum, bias_sum = _gradients(
            hidden,
            weight,
            bias,
            targets,
            temperature,
            entropies,
            kept,
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
    kept: Tensor | None,
    of_logprobs: Tensor | None,
    of_entropy: Tensor | None,
    needs: tuple[bool, bool, bool],
    size: int,
    shard: VocabularyShard | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, weight and bias, the last two as sums over chunks, which the caller casts."""
    logits, factor = _buffer(hidden, weight, size), _factor(weight)
    low = logits if logits.dtype == hidden.dtype else torch.empty_like(logits, dtype=hidden.dtype)
    logp = torch.empty_like(logits) if kept is None or of_entropy is not None else kept
    # A single chunk is added to zeros, which rounds once in the weight's own dtype, too
    sum_dtype = weight.dtype if size == hidden.shape[0] else logits.dtype
    hidden_grad = torch.empty_like(hidden) if needs[0] else None
    weight_sum = torch.zeros_like(weight, dtype=sum_dtype) if needs[1] else None
    bias_sum = logits.new_zeros(len(weight)) if needs[2] else None
    for rows in _slices(hidden.shape[0], size):
        chunk = kept
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
        if bias_sum is not None:
            bias_sum.add_(grad.sum(0))
        if low is not logits:
            grad = low[: len(grad)].copy_(grad)
        if hidden_grad is not None:
            torch.mm(grad, weight, out=hidden_grad[rows])
        if weight_sum is not None:
            _add_product(weight_sum, grad, hidden[rows])
    return hidden_grad, weight_sum, bias_sum


def _slices(tokens: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, max(size, 1))]


def _buffer(hidden: Tensor, weight: Tensor, size: int) -> Tensor:
    """A chunk's logits, in the accumulating dtype.

    All chunks share it, since new pages for each would cost as much as the arithmetic on them.
    """
    return hidden.new_empty((size, len(weight)), dtype=_ACCUMULATE[hidden.dtype])


def _factor(weight: Tensor) -> Tensor:
    """The weight as it is multiplied: a GPU adds up products of bfloat16 in float32, and a CPU has no such product."""
    return weight if weight.device.type == "cuda" else weight.to(_ACCUMULATE[weight.dtype])


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
    """Log-probabilities of all words for the tokens `rows`, written to `out`; `logits` is scratch."""
    count = rows.stop - rows.start
    logits, out = logits[:count], out[:count]
    if factor.dtype != logits.dtype:
        torch.mm(hidden[rows], factor.t(), out_dtype=logits.dtype, out=logits)
    elif bias is None or bias.dtype != logits.dtype:
        torch.mm(hidden[rows].to(factor.dtype), factor.t(), out=logits)
    else:
        torch.addmm(bias, hidden[rows], factor.t(), out=logits)
    if bias is not None and bias.dtype != logits.dtype:
        logits.add_(bias)
    if temperature is not None:
        logits.div_(temperature[rows])
    return torch.log_softmax(logits, 1, out=out) if shard is None else shard.log_softmax(logits, out)


def _add_product(total: Tensor, grad: Tensor, hidden: Tensor) -> None:
    """``total += grad.T @ hidden`` in total's dtype, which may be wider than that of the factors.

    A GPU adds such products up in one call. A CPU rounds them first, and copies what it adds to total's dtype: blocks
    of words that fit in the cache make that cheap (half the time of one large product).
    """
    if total.dtype == grad.dtype:
        total.addmm_(grad.t(), hidden)
    elif total.device.type == "cuda":
        torch.addmm(total, grad.t(), hidden, out_dtype=total.dtype, out=total)
    else:
        for words in _slices(len(total), max(1, 2**21 // hidden.shape[1])):
            total[words].add_(grad[:, words].t() @ hidden)


def _by_temperature(grad: Tensor | None, temperature: Tensor | None) -> Tensor | None:
    """The incoming gradient, with the temperature's share of the chain rule."""
    return grad if grad is None or temperature is None else grad / temperature


def _check(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor | None,
    temperature: Tensor | None,
    bias: Tensor | None,
    chunk: int | None,
) -> None:
    """Shapes and dtypes only: looking at values would wait for the device."""
    if hidden.ndim != 2:
        raise ModelError(f"linear_logprobs: hidden is {_show(hidden)}; flatten it to [tokens, width].")
    if hidden.dtype not in _ACCUMULATE:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _ACCUMULATE)
        raise ModelError(f"linear_logprobs: hidden is {_show(hidden)}; use one of {known}.")
    tokens, width = hidden.shape
    if weight.ndim != 2 or weight.shape[1] != width or weight.shape[0] < 1:
        raise ModelError(
            f"linear_logprobs: weight is {_show(weight)}; for hidden {_show(hidden)} it must be [vocabulary, {width}]."
        )
    _fits(ModelError, "weight", weight, tuple(weight.shape), hidden.dtype)
    if bias is not None:
        _fits(ModelError, "bias", bias, (weight.shape[0],), hidden.dtype)
    if targets is not None:
        _fits(BatchError, "targets", targets, (tokens, *targets.shape[1:2]), torch.int64)
    if temperature is not None:
        dtype = temperature.dtype if temperature.is_floating_point() else torch.float32
        _fits(BatchError, "temperature", temperature, (tokens,), dtype)
    if chunk is not None and chunk < 1:
        raise ConfigError(f"linear_logprobs: chunk is {chunk}; give at least 1 token, or None to have it chosen.")


def _fits(error: type[Exception], name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        kind = str(dtype).removeprefix("torch.")
        raise error(f"linear_logprobs: {name} is {_show(tensor)}; it must be {kind} {list(shape)}. Reshape or cast it.")


def _show(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
