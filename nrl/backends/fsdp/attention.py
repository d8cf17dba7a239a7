"""Attention over packed rows: causal inside of each row, blind to all others."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from nrl.errors import ModelError

__all__ = ["NAME", "register"]

NAME = "nrl_blocks"
"""The attention implementation's name in transformers.

>>> NAME
'nrl_blocks'
"""


def register() -> str:
    """Make the attention known to transformers, and return its name.

    transformers builds no mask for it: each block is a rectangle of right-padded rows, so causality is the whole mask.
    Its own packing by ``position_ids`` is not used; it is switched off silently by a cache or a mask of ones.

    >>> register()
    'nrl_blocks'
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    # Not compiled: the blocks differ from batch to batch, and each layout would be compiled anew
    AttentionInterface.register(NAME, torch.compiler.disable(_attend))
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
    return NAME


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    nrl_blocks: tuple[tuple[int, int], ...] = (),
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """``query`` ``[1, H, N, D]``, ``key`` and ``value`` ``[1, h, N, D]``; returns ``[1, N, H, D]``."""
    for unsupported in ("softcap", "s_aux"):
        if options.get(unsupported) is not None:
            raise ModelError(
                f"{type(module).__name__}: packed rows do not support attention with '{unsupported}'; "
                "use fsdp.trainer(..., packed=False)"
            )
    if not nrl_blocks:
        raise ModelError(
            f"{type(module).__name__}: the model does not hand its attention what packed rows need; "
            "use fsdp.trainer(..., packed=False)"
        )
    outputs, start = [], 0
    for rows, width in nrl_blocks:
        q, k, v = (_rectangle(x, start, rows, width) for x in (query, key, value))
        start += rows * width
        band = None
        if sliding_window is not None and sliding_window < width:
            ones = torch.ones(width, width, dtype=torch.bool, device=q.device)
            band = ones.tril() & ~ones.tril(-sliding_window)
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=band, is_causal=band is None, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(out.transpose(1, 2).reshape(rows * width, *out.shape[1::2]))
    return torch.cat(outputs)[None], None


def _rectangle(x: Tensor, start: int, rows: int, width: int) -> Tensor:
    """``[1, H, N, D]`` to ``[rows, H, width, D]``."""
    heads, _, dim = x.shape[1:]
    return x[0, :, start : start + rows * width].view(heads, rows, width, dim).transpose(0, 1)
