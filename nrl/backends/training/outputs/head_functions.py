"""Logits over the whole vocabulary, and functions of them that are computed by chunks of tokens.

`map_logits` never holds the matrix ``[tokens, vocabulary]``: it calls a function on the logits of one chunk of tokens
at a time, and in the backward computes the chunk's logits again and differentiates the function there. `linear_logits`
returns the whole matrix, for losses that need it. Where processes share the vocabulary, each gets the logits of all
words: from `linear_logits` those of all tokens, from `map_logits` those of one chunk.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nrl.algos import LogitsOutput
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

__all__ = ["call_on", "linear_logits", "map_logits"]


def linear_logits(
    hidden: Tensor,
    weight: Tensor,
    *,
    temperature: Tensor | None = None,
    bias: Tensor | None = None,
    shard: VocabularyShard | None = None,
) -> Tensor:
    """Compute the logits of a linear layer, ``(W h_n + b) / temperature_n``, in float32 (float64 for float64 inputs).

    Args:
        hidden: ``[N, H]``; these are as for `nrl.backends.training.outputs.fused_logprobs.linear_logprobs`.
        weight: ``[V, H]``.
        temperature: ``[N]``, or None.
        bias: ``[V]``, or None.
        shard: which words `weight` and `bias` are of, where processes share the vocabulary.

    Returns:
        ``[N, V]``, of all words in every process.

    >>> linear_logits(torch.tensor([[1.0, 2.0]]), torch.eye(2), temperature=torch.tensor([2.0]))
    tensor([[0.5000, 1.0000]])
    """
    return _apply(hidden, weight, None, (), temperature, bias, None, shard, nullcontext)


def map_logits(
    output: LogitsOutput,
    hidden: Tensor,
    weight: Tensor,
    columns: Sequence[Tensor] = (),
    *,
    temperature: Tensor | None = None,
    bias: Tensor | None = None,
    chunk: int | None = None,
    shard: VocabularyShard | None = None,
    guard: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Tensor:
    """Call a function on the logits of a linear layer, chunk by chunk of tokens.

    Args:
        output: the function, and how many numbers it returns for a token.
        hidden: ``[N, H]``; these are as for `linear_logits`.
        weight: ``[V, H]``.
        columns: ``[N, ...]`` each, what the function gets besides the logits.
        temperature: ``[N]``, or None.
        bias: ``[V]``, or None.
        chunk: the most tokens whose logits exist at once; None: as many as fit.
        shard: which words `weight` and `bias` are of, where processes share the vocabulary.
        guard: what a call of the function happens in. If that holds an error back, the numbers of the chunk are 0.

    Returns:
        ``[N]`` or ``[N, k]``, float32 (float64 for float64 inputs).

    Raises:
        TypeError: the function returned something else, or changed its logits.

    >>> from nrl.algos import from_logits
    >>> largest = from_logits(lambda logits: logits.amax(-1), name="largest")
    >>> map_logits(largest, torch.tensor([[1.0, 2.0], [4.0, 3.0]]), torch.eye(2), chunk=1)
    tensor([2., 4.])
    """
    return _apply(hidden, weight, output, columns, temperature, bias, chunk, shard, guard)


def _apply(
    hidden: Tensor,
    weight: Tensor,
    output: LogitsOutput | None,
    columns: Sequence[Tensor],
    temperature: Tensor | None,
    bias: Tensor | None,
    chunk: int | None,
    shard: VocabularyShard | None,
    guard: Callable[[], AbstractContextManager[Any]],
) -> Tensor:
    if shard is None or len(weight):  # The last process may have none of a few words.
        check_inputs(hidden, weight, None, temperature, bias, chunk)
    if temperature is not None:
        temperature = temperature.detach().to(accumulating(hidden.dtype))[:, None]
    size = chunk_size(hidden, len(weight) if shard is None else shard.words, chunk)
    result: Tensor = _MapLogits.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, temperature, output, size, shard, guard, *columns
    )
    return result


class _MapLogits(torch.autograd.Function):
    """A function of the logits, or the logits without a function. `temperature` is ``[N, 1]``."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperature: Tensor | None,
        output: LogitsOutput | None,
        size: int,
        shard: VocabularyShard | None,
        guard: Callable[[], AbstractContextManager[Any]],
        *columns: Tensor,
    ) -> Tensor:
        logits, factor, tokens = buffer(hidden, weight, size), factor_of(weight), len(hidden)
        words = len(weight) if shard is None else shard.words
        last = (words,) if output is None else () if output.k is None else (output.k,)
        result = logits.new_zeros((tokens, *last))
        for rows in slices(tokens, size):
            chunk = chunk_logits(hidden, factor, bias, temperature, rows, logits)
            if shard is not None:
                chunk = shard.gather_logits(chunk)
            if output is None:
                result[rows] = chunk
                continue
            with guard():
                result[rows] = call_on(output, chunk, [column[rows] for column in columns])
        ctx.save_for_backward(hidden, weight, bias, temperature, *columns)
        ctx.output, ctx.size, ctx.shard, ctx.guard = output, size, shard, guard
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_found: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, temperature, *columns = ctx.saved_tensors
        output, shard = ctx.output, ctx.shard
        logits, factor = buffer(hidden, weight, ctx.size), factor_of(weight)
        gradients = HeadGradients(hidden, weight, logits, ctx.needs_input_grad[:3], ctx.size)
        for rows in slices(len(hidden), ctx.size):
            grad = grad_found[rows]
            if output is not None:
                chunk = chunk_logits(hidden, factor, bias, temperature, rows, logits)
                if shard is not None:
                    chunk = shard.gather_logits(chunk)
                slope = torch.zeros_like(chunk)
                with ctx.guard():
                    slope = _slope(output, chunk, [column[rows] for column in columns], grad)
                grad = slope
            if shard is not None:
                grad = grad[:, shard.start : shard.start + len(weight)]
            gradients.add(rows, grad if temperature is None else grad / temperature[rows])
        weight_grad = None if gradients.weight is None else gradients.weight.to(weight.dtype)
        bias_grad = None if gradients.bias is None else gradients.bias.to(bias.dtype)
        return gradients.hidden, weight_grad, bias_grad, *[None] * (5 + len(columns))


def _slope(output: LogitsOutput, logits: Tensor, columns: Sequence[Tensor], grad: Tensor) -> Tensor:
    """Compute the gradient of the logits of a chunk from the gradient of the function's result."""
    leaf = logits.detach().requires_grad_()
    with torch.enable_grad():
        result = call_on(output, leaf, columns)
    if not result.requires_grad:
        return torch.zeros_like(logits)
    (slope,) = torch.autograd.grad(result, leaf, grad.to(result.dtype), allow_unused=True, materialize_grads=True)
    return slope


def call_on(output: LogitsOutput, logits: Tensor, columns: Sequence[Tensor]) -> Tensor:
    """Call the function of an output on the logits of some tokens, and check what it returns.

    Args:
        output: the function, and how many numbers it returns for a token.
        logits: ``[n, V]``.
        columns: ``[n, ...]`` each.

    Raises:
        TypeError: the function returned something else than ``[n]`` or ``[n, k]``, or changed its logits.
    """
    expected = (len(logits),) if output.k is None else (len(logits), output.k)
    version = logits._version
    result: Any = output.fn(logits, *columns)
    if logits._version != version:
        raise TypeError(
            f"{output}: the function changes its logits in place; compute on a copy, such as logits.clone()"
        )
    if not isinstance(result, Tensor) or tuple(result.shape) != expected:
        kind = f"a tensor {list(result.shape)}" if isinstance(result, Tensor) else f"a {type(result).__name__}"
        remedy = "a number for each token; reduce over the words, or declare how many numbers with from_logits(fn, k=)"
        if output.k is not None:
            remedy = f"k={output.k} numbers for each token"
        raise TypeError(
            f"{output}: the function returned {kind} for logits {list(logits.shape)}; it must return "
            f"{list(expected)}, {remedy}"
        )
    return result
