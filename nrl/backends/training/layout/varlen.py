"""Attention over sequences by torch's varlen kernel, on a GPU: one call a layer, without padding, without masks.

The kernel is FlashAttention's (Dao, arXiv 2307.08691). Its causal mask is aligned to the lower right, which is what the
own tokens of a row after a shared prefix need. Keys of a prefix are gathered for the forward, and gathered again in the
backward: kept for each layer, they would be as many as if no row shared anything.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen as _  # noqa: F401  # defines the operators

from nrl.batch.packed_rows import Sequences
from nrl.errors import ModelError

__all__ = ["attention", "check_kernel"]

_OPS = torch.ops.torch_attn
_LARGEST = 256  # the largest head
_WHERE = "the varlen kernel of torch"


def attention(
    rows: Sequences, query: Tensor, key: Tensor, value: Tensor, window: int | None, scaling: float | None
) -> Tensor:
    """Compute causal attention of each row over its prefix and itself.

    Args:
        rows: how the N tokens lie; tensors on the device of the query.
        query: ``[N, H, D]``, bfloat16 or float16.
        key: ``[N, h, D]``; H is a multiple of h.
        value: ``[N, h, D]``.
        window: a token at position p sees those from ``p - window + 1`` to p; None: all up to p.
        scaling: of the scores; None: ``D ** -0.5``.

    Returns:
        ``[N, H, D]``.

    Raises:
        ModelError: the kernel does not take such tensors.
    """
    check_kernel(rows, query, key, value)
    sizes = rows.max_seqlen_q, rows.max_seqlen_k
    lookback = -1 if window is None else window - 1
    result: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        query, key, value, rows.keys, rows.cu_seqlens_q, rows.cu_seqlens_k, sizes, (lookback, 0), scaling
    )
    return result


def check_kernel(rows: Sequences, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Refuse what the kernel refuses, or would compute wrongly; shapes without values take anything.

    Raises:
        ModelError: there is such a tensor.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dtype not in (torch.bfloat16, torch.float16):
            raise ModelError(
                f"{_WHERE} takes bfloat16 and float16, and the {name} is {x.dtype}; train with "
                "Model(..., dtype='bfloat16')"
            )
        if x.stride(-1) != 1:
            raise ModelError(
                f"{_WHERE} reads the numbers of a head one after the other, and in the {name} they are {x.stride(-1)} "
                "apart; make it contiguous"
            )
    heads, size = query.shape[1:]
    if size > _LARGEST or size % 8:
        raise ModelError(
            f"{_WHERE} takes heads of a multiple of 8 numbers, {_LARGEST} at most, and the model has heads of {size}; "
            "use fsdp.trainer(..., packing=None)"
        )
    if heads % key.shape[1] or key.shape != value.shape or query.shape[-1] != key.shape[-1]:
        raise ModelError(
            f"{_WHERE} takes keys and values of one shape, whose heads divide those of the query; found the query "
            f"{[*query.shape]}, the key {[*key.shape]}, the value {[*value.shape]}; use fsdp.trainer(..., packing=None)"
        )
    for name, lengths in (("cu_seqlens_q", rows.cu_seqlens_q), ("cu_seqlens_k", rows.cu_seqlens_k)):
        if lengths.dtype != torch.int32 or lengths.device != query.device:
            raise ModelError(
                f"{_WHERE} takes lengths in int32 on the device of the tokens, {query.device}, and {name} is "
                f"{lengths.dtype} on {lengths.device}; move the rows there, Sequences.to(device)"
            )


class _Attention(torch.autograd.Function):
    """The kernel over gathered keys and values, of which nothing but the tokens' own is saved."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: Tensor | None,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        sizes: tuple[int, int],
        window: tuple[int, int],
        scaling: float | None,
    ) -> Tensor:
        causal = window == (-1, 0)
        k, v = (_gather_keys(x, keys) for x in (key, value))
        grouped = query.shape[1] != key.shape[1]
        out, lse, state = _OPS._varlen_attn(
            query, k, v, cu_seqlens_q, cu_seqlens_k, *sizes, causal, scaling, [*window], grouped
        )
        ctx.save_for_backward(query, key, value, keys, cu_seqlens_q, cu_seqlens_k, out, lse, state)
        ctx.options = sizes, causal, scaling, [*window]
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, keys, cu_seqlens_q, cu_seqlens_k, out, lse, state = ctx.saved_tensors
        sizes, causal, scaling, window = ctx.options
        k, v = (_gather_keys(x, keys) for x in (key, value))
        dq, dk, dv = _OPS._varlen_attn_backward(
            gradient.contiguous(),
            query,
            k,
            v,
            out,
            lse,
            cu_seqlens_q,
            cu_seqlens_k,
            *sizes,
            causal,
            state,
            scaling,
            window,
        )
        return dq, _scatter_gradient(dk, key, keys), _scatter_gradient(dv, value, keys), *(None,) * 6


def _gather_keys(x: Tensor, keys: Tensor | None) -> Tensor:
    return x if keys is None else x.index_select(0, keys)


def _scatter_gradient(gradient: Tensor, x: Tensor, keys: Tensor | None) -> Tensor:
    """Sum the gradients of a token's keys over all rows that continue it, in float32."""
    if keys is None:
        return gradient
    return torch.zeros(x.shape, dtype=torch.float32, device=x.device).index_add_(0, keys, gradient.float()).to(x.dtype)
