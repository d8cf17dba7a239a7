"""Attention over packed rows: causal inside of each row, blind to all others."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from nrl.batch.packing import Block
from nrl.errors import ModelError

__all__ = ["NAME", "PackedLayout", "register_attention"]

NAME = "nrl_blocks"
"""The name of this attention in transformers."""

_SMALL = 8192
"""Up to so many scores for a row and key-value head, two plain products are faster on a CPU than the fused kernel."""


class PackedLayout:
    """The blocks of packed tokens on a device, with their masks, which are made once for all layers.

    Args:
        blocks: from `nrl.batch.packing.pack`.
        device: of the tokens.
    """

    def __init__(self, blocks: Sequence[Block], device: torch.device) -> None:
        self.device = device
        self.blocks = tuple(
            block
            if block.after is None
            else block._replace(
                after=block.after._replace(row=block.after.row.to(device), length=block.after.length.to(device))
            )
            for block in blocks
        )
        self._biases: dict[tuple[object, ...], Tensor] = {}

    def bias(self, number: int, window: int | None, dtype: torch.dtype, heads: tuple[int, int] = (1, 1)) -> Tensor:
        """The bias for the scores of a block, minus infinity where a token does not see a key.

        Keys are the tokens of the earlier row, as wide as its block, and then the row's own.

        Args:
            number: of the block.
            window: a token at position p sees those from ``p - window + 1`` to p; None: all up to p.
            dtype: of the scores.
            heads: (h, G), the key-value heads, and the query heads of each.

        Returns:
            ``[rows, 1, width, keys]``; for heads other than (1, 1), ``[rows * h, G * width, keys]``.
        """
        key = number, window, dtype, heads
        if key not in self._biases:
            block, (h, group) = self.blocks[number], heads
            seen = self._seen(block, window)
            bias = torch.zeros(seen.shape, dtype=dtype, device=self.device).masked_fill_(~seen, -torch.inf)
            if heads != (1, 1):
                bias = bias.expand(block.rows, h, -1, -1).flatten(0, 1).repeat(1, group, 1)
            self._biases[key] = bias
        return self._biases[key]

    def _seen(self, block: Block, window: int | None) -> Tensor:
        own = torch.ones(block.width, block.width, dtype=torch.bool, device=self.device).tril()
        if window is not None:
            own &= ~own.tril(-window)
        if block.after is None:
            return own.expand(block.rows, 1, -1, -1)
        length = block.after.length[:, None, None, None]
        column = torch.arange(self.blocks[block.after.block].width, device=self.device)
        before = column < length
        if window is not None:
            position = length + torch.arange(block.width, device=self.device)[:, None]
            before = before & (position - column < window)
        return torch.cat([x.expand(block.rows, 1, block.width, -1) for x in (before, own)], -1)


def register_attention() -> str:
    """Make the attention known to transformers, and return its name.

    transformers builds no mask for it: each block is a rectangle of right-padded rows, so causality is the whole mask.
    transformers' own packing by ``position_ids`` is not used: a cache or a mask of ones switches it off silently.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    # Not compiled: the blocks differ from batch to batch, and torch would compile each layout anew
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
    nrl_blocks: PackedLayout | None = None,
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
    if nrl_blocks is None:
        raise ModelError(
            f"{type(module).__name__}: the model does not hand its attention what packed rows need; "
            "use fsdp.trainer(..., packed=False)"
        )
    layout, outputs = nrl_blocks, []
    sizes = [block.rows * block.width for block in layout.blocks]
    parts = [zip(*(x[0].split(sizes, 1) for x in (query, key, value)), strict=True)]
    earlier: list[tuple[Tensor, Tensor]] = []
    for number, (block, qkv) in enumerate(zip(layout.blocks, *parts, strict=True)):
        q, k, v = (x.unflatten(1, (block.rows, block.width)).transpose(0, 1) for x in qkv)
        earlier.append((k, v))
        if block.after is not None:
            before = (x.index_select(0, block.after.row) for x in earlier[block.after.block])
            k, v = (torch.cat(pair, 2) for pair in zip(before, (k, v), strict=True))
        window = None if sliding_window is None or sliding_window >= k.shape[2] else sliding_window
        outputs.append(_one(q, k, v, layout, number, window, scaling).transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[None], None


def _one(
    q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, number: int, window: int | None, scaling: float | None
) -> Tensor:
    """One block: ``[rows, H, width, D]`` against keys ``[rows, h, keys, D]``."""
    rows, H, width, D = q.shape
    h, keys = k.shape[1:3]
    group = H // h
    if q.device.type == "cpu" and not torch.is_autocast_enabled("cpu") and group * width * keys <= _SMALL:
        # The query heads that share a key-value head are queries of one product, so keys are never repeated
        bias = layout.bias(number, window, q.dtype, (h, group))
        q, k, v = (x.reshape(rows * h, -1, x.shape[-1]) for x in (q, k, v))
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=D**-0.5 if scaling is None else scaling)
        return torch.bmm(scores.softmax(-1), v).view(rows, H, width, -1)
    causal = window is None and layout.blocks[number].after is None
    bias_or_none = None if causal else layout.bias(number, window, q.dtype)
    return scaled_dot_product_attention(
        q, k, v, attn_mask=bias_or_none, is_causal=causal, scale=scaling, enable_gqa=h != H
    )
