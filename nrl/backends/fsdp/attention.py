"""Attention over packed rows (`nrl.backends.training.layout.packed_attention`), as transformers' models call it."""

from typing import Any

import torch
from torch import Tensor, nn

from nrl.backends.training.layout.packed_attention import RectangleAttention, SequenceAttention
from nrl.errors import ModelError

__all__ = ["NAME", "register_attention"]

NAME = "nrl_packed"
"""The name of this attention in transformers."""


def register_attention() -> str:
    """Make the attention known to transformers, and return its name.

    transformers makes no mask for an attention that is none of its own, and then does not look for rows among the
    positions either, for which it would wait for the device: rows are known by the form that they lie in.
    transformers' own packing by ``position_ids`` is not used: a cache or a mask of ones switches it off silently.
    """
    from transformers import AttentionInterface

    # Not compiled: the rows differ from batch to batch, and torch would compile for each anew
    AttentionInterface.register(NAME, torch.compiler.disable(_attend))
    return NAME


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    nrl_attention: RectangleAttention | SequenceAttention | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """``query`` ``[1, H, N, D]``, ``key`` and ``value`` ``[1, h, N, D]``; returns ``[1, N, H, D]``."""
    for unsupported in ("softcap", "s_aux"):
        if options.get(unsupported) is not None:
            raise ModelError(
                f"{type(module).__name__}: packed rows do not support attention with '{unsupported}'; "
                "use fsdp.trainer(..., packing=None)"
            )
    if nrl_attention is None:
        raise ModelError(
            f"{type(module).__name__}: the model does not hand its attention what packed rows need; "
            "use fsdp.trainer(..., packing=None)"
        )
    return nrl_attention(query[0], key[0], value[0], sliding_window, scaling)[None], None
