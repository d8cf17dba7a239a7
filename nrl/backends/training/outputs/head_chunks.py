"""Chunks of tokens for heads: their size, their logits, and gradients of a head.

A chunk's logits are added up and kept in float32 (float64 for float64 inputs), and so is the gradient of the weight.
"""

import torch
from torch import Tensor

from nrl.errors import BatchError, ConfigError, ModelError

__all__ = [
    "CHUNK_BYTES",
    "HeadGradients",
    "accumulating",
    "buffer",
    "check_inputs",
    "chunk_logits",
    "chunk_size",
    "factor_of",
    "of_device",
    "slices",
]

CHUNK_BYTES = 256 * 2**20
"""Size of one chunk's logits, in bytes of the accumulating dtype, where `linear_logprobs` chooses the chunk itself.

A chunk needs two such matrices, and in the backward one more in the inputs' dtype where that is bfloat16. Every chunk
passes once over the weight and its gradient's sum, so much smaller chunks are slower; on a CPU larger ones hardly gain.
(441 tokens at a vocabulary of 151,936; 745,654 at one of 90.) A GPU of 80 GB takes `_OF_DEVICE` of its memory instead.
"""

_OF_DEVICE = 80
"""The part of a GPU's memory that a chunk's logits may take is one in so many."""

_ACCUMULATE = {torch.float32: torch.float32, torch.bfloat16: torch.float32, torch.float64: torch.float64}


def accumulating(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the logits of inputs of this dtype."""
    return _ACCUMULATE[dtype]


def of_device(memory: float) -> int:
    """Return the bytes of a chunk's logits on a GPU with so many bytes of memory."""
    return int(memory) // _OF_DEVICE


def chunk_size(hidden: Tensor, words: int, chunk: int | None) -> int:
    """Return the tokens of a chunk: as even as possible, since a small last chunk also costs a pass over the weight."""
    if chunk is None:
        room = CHUNK_BYTES
        if hidden.device.type == "cuda":
            room = of_device(torch.cuda.get_device_properties(hidden.device).total_memory)
        chunk = max(1, room // (words * _ACCUMULATE[hidden.dtype].itemsize))
    chunks = max(1, -(-hidden.shape[0] // chunk))
    return -(-hidden.shape[0] // chunks)


class HeadGradients:
    """Gradients of hidden states, and those of a head's weight and bias as sums over chunks, which the caller casts.

    Args:
        hidden: ``[N, H]``.
        weight: ``[V, H]``.
        logits: the buffer of a chunk's logits.
        needs: which of the gradients of hidden states, weight and bias are wanted.
        size: the tokens of a chunk.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, logits: Tensor, needs: tuple[bool, bool, bool], size: int
    ) -> None:
        self._states, self._weight = hidden, weight
        self._low = None if logits.dtype == hidden.dtype else torch.empty_like(logits, dtype=hidden.dtype)
        # A single chunk is added to zeros, which rounds once in the weight's own dtype, too
        sum_dtype = weight.dtype if size == hidden.shape[0] else logits.dtype
        self.hidden = torch.empty_like(hidden) if needs[0] else None
        self.weight = torch.zeros_like(weight, dtype=sum_dtype) if needs[1] else None
        self.bias = logits.new_zeros(len(weight)) if needs[2] else None

    def add(self, rows: slice, grad: Tensor) -> None:
        """Add the contribution of the gradient of the logits ``[n, V]`` of some tokens."""
        if self.bias is not None:
            self.bias.add_(grad.sum(0))
        if self._low is not None:
            grad = self._low[: len(grad)].copy_(grad)
        if self.hidden is not None:
            torch.mm(grad, self._weight, out=self.hidden[rows])
        if self.weight is not None:
            _add_product(self.weight, grad, self._states[rows])


def slices(tokens: int, size: int) -> list[slice]:
    """Return the tokens of each chunk."""
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, max(size, 1))]


def buffer(hidden: Tensor, weight: Tensor, size: int) -> Tensor:
    """Allocate a chunk's logits, in the accumulating dtype.

    All chunks share it, since new pages for each would cost as much as the arithmetic on them.
    """
    return hidden.new_empty((size, len(weight)), dtype=_ACCUMULATE[hidden.dtype])


def factor_of(weight: Tensor) -> Tensor:
    """Return the weight as a factor: a GPU adds up products of bfloat16 in float32, and a CPU has no such product."""
    return weight if weight.device.type == "cuda" else weight.to(_ACCUMULATE[weight.dtype])


def chunk_logits(
    hidden: Tensor, factor: Tensor, bias: Tensor | None, temperature: Tensor | None, rows: slice, out: Tensor
) -> Tensor:
    """Compute the logits of the tokens `rows`, divided by their temperature, into `out`."""
    logits = out[: rows.stop - rows.start]
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
    return logits


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
        for words in slices(len(total), max(1, 2**21 // hidden.shape[1])):
            total[words].add_(grad[:, words].t() @ hidden)


def check_inputs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor | None,
    temperature: Tensor | None,
    bias: Tensor | None,
    chunk: int | None,
) -> None:
    """Check shapes and dtypes only: looking at values would wait for the device."""
    if hidden.ndim != 2:
        raise ModelError(f"linear_logprobs: hidden is {_show(hidden)}; flatten it to [tokens, width].")
    if hidden.dtype not in _ACCUMULATE:
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in _ACCUMULATE)
        raise ModelError(f"linear_logprobs: hidden is {_show(hidden)}; use one of {dtypes}.")
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
