"""Attention over packed rows: causal inside of each row, blind to all others.

Each form of packed rows has its own: `RectangleAttention` calls a kernel for each block, `SequenceAttention` for each
row.
"""

import warnings
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nrl.backends.training.layout.varlen import attention
from nrl.batch.packed_rows import Block, Packing, Rectangles, Sequences

__all__ = ["RectangleAttention", "SequenceAttention", "choose_packing", "make_attention"]

_SMALL = 8192
"""Up to so many scores for a row and key-value head, two plain products are faster on a CPU than the fused kernel."""


class RectangleAttention:
    """Attention over rectangles, with their masks, which are made once for all layers.

    Args:
        rows: from `nrl.batch.packing.pack`, on the device of the tokens.
    """

    def __init__(self, rows: Rectangles) -> None:
        self.device, self.blocks = rows.real.device, rows.blocks
        self._biases: dict[tuple[object, ...], Tensor] = {}

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, window: int | None, scaling: float | None) -> Tensor:
        """``query`` ``[H, N, D]``, ``key`` and ``value`` ``[h, N, D]``; returns ``[N, H, D]``."""
        outputs = []
        sizes = [block.rows * block.width for block in self.blocks]
        parts = [zip(*(x.split(sizes, 1) for x in (query, key, value)), strict=True)]
        earlier: list[tuple[Tensor, Tensor]] = []
        for number, (block, qkv) in enumerate(zip(self.blocks, *parts, strict=True)):
            q, k, v = (x.unflatten(1, (block.rows, block.width)).transpose(0, 1) for x in qkv)
            earlier.append((k, v))
            if block.after is not None:
                before = (x.index_select(0, block.after.row) for x in earlier[block.after.block])
                k, v = (torch.cat(pair, 2) for pair in zip(before, (k, v), strict=True))
            block_window = None if window is None or window >= k.shape[2] else window
            outputs.append(self._one(q, k, v, number, block_window, scaling).transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs)

    def _one(self, q: Tensor, k: Tensor, v: Tensor, number: int, window: int | None, scaling: float | None) -> Tensor:
        """Attend in one block: ``[rows, H, width, D]`` against keys ``[rows, h, keys, D]``."""
        rows, H, width, D = q.shape
        h, keys = k.shape[1:3]
        group = H // h
        if q.device.type == "cpu" and q.dtype.itemsize > 2 and group * width * keys <= _SMALL:
            # The query heads that share a key-value head are queries of one product, so keys are never repeated
            bias = self.bias(number, window, q.dtype, (h, group))
            q, k, v = (x.reshape(rows * h, -1, x.shape[-1]) for x in (q, k, v))
            scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=D**-0.5 if scaling is None else scaling)
            return torch.bmm(scores.softmax(-1), v).view(rows, H, width, -1)
        causal = window is None and self.blocks[number].after is None
        bias_or_none = None if causal else self.bias(number, window, q.dtype)
        return scaled_dot_product_attention(
            q, k, v, attn_mask=bias_or_none, is_causal=causal, scale=scaling, enable_gqa=h != H
        )

    def bias(self, number: int, window: int | None, dtype: torch.dtype, heads: tuple[int, int] | None = None) -> Tensor:
        """Return the bias for the scores of a block, minus infinity where a token does not see a key.

        Keys are the tokens of the earlier row, as wide as its block, and then the row's own.

        Args:
            number: of the block.
            window: a token at position p sees those from ``p - window + 1`` to p; None: all up to p.
            dtype: of the scores.
            heads: (h, G), the key-value heads, and the query heads of each; None: one bias for all heads.

        Returns:
            ``[rows, 1, width, keys]``; with ``heads``, ``[rows * h, G * width, keys]``.
        """
        key = number, window, dtype, heads
        if key not in self._biases:
            block = self.blocks[number]
            seen = self._visible_keys(block, window)
            bias = torch.zeros(seen.shape, dtype=dtype, device=self.device).masked_fill_(~seen, -torch.inf)
            if heads is not None:
                h, group = heads
                bias = bias.expand(block.rows, h, -1, -1).flatten(0, 1).repeat(1, group, 1)
            self._biases[key] = bias
        return self._biases[key]

    def _visible_keys(self, block: Block, window: int | None) -> Tensor:
        causal = torch.ones(block.width, block.width, dtype=torch.bool, device=self.device).tril()
        if window is not None:
            causal &= ~causal.tril(-window)
        if block.after is None:
            return causal.expand(block.rows, 1, -1, -1)
        length = block.after.length[:, None, None, None]
        column = torch.arange(self.blocks[block.after.block].width, device=self.device)
        before = column < length
        if window is not None:
            position = length + torch.arange(block.width, device=self.device)[:, None]
            before = before & (position - column < window)
        return torch.cat([x.expand(block.rows, 1, block.width, -1) for x in (before, causal)], -1)


class SequenceAttention:
    """Attention over sequences: by torch's varlen kernel where there is one, else by a call for each row.

    There is one on a GPU, for 16-bit numbers. It is the same on a CPU and in float32, and slower.

    Args:
        rows: from `nrl.batch.packing.pack`, on the device of the tokens.
    """

    def __init__(self, rows: Sequences) -> None:
        self.rows, self.device, self.keys = rows, rows.cu_seqlens_q.device, rows.keys
        self._biases: dict[tuple[object, ...], Tensor] = {}

    @cached_property
    def query_lengths(self) -> list[int]:
        """The number of queries of each row: its own tokens."""
        lengths: list[int] = self.rows.cu_seqlens_q.diff().tolist()
        return lengths

    @cached_property
    def key_lengths(self) -> list[int]:
        """The number of keys of each row: the tokens that it sees."""
        lengths: list[int] = self.rows.cu_seqlens_k.diff().tolist()
        return lengths

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, window: int | None, scaling: float | None) -> Tensor:
        """``query`` ``[H, N, D]``, ``key`` and ``value`` ``[h, N, D]``; returns ``[N, H, D]``."""
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))  # tokens first, as varlen kernels have them
        if self.device.type == "cuda" and q.dtype.itemsize == 2:
            return attention(self.rows, q, k, v, window, scaling)
        if self.keys is not None:
            k, v = (x.index_select(0, self.keys) for x in (k, v))
        outputs = []
        for parts in zip(
            q.split(self.query_lengths), k.split(self.key_lengths), v.split(self.key_lengths), strict=True
        ):
            q, k, v = (x.transpose(0, 1)[None] for x in parts)
            outputs.append(self._one(q, k, v, window, scaling)[0].transpose(0, 1))
        return torch.cat(outputs)

    def _one(self, q: Tensor, k: Tensor, v: Tensor, window: int | None, scaling: float | None) -> Tensor:
        """Attend in one row: ``[1, H, queries, D]`` against keys ``[1, h, keys, D]``."""
        queries, keys = q.shape[2], k.shape[2]
        window = None if window is None or window >= keys else window
        causal = window is None and queries == keys
        bias = None if causal else self._bias(window, q.dtype)[-queries:, -keys:]
        return scaled_dot_product_attention(
            q, k, v, attn_mask=bias, is_causal=causal, scale=scaling, enable_gqa=k.shape[1] != q.shape[1]
        )

    def _bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return ``[max queries, max keys]``, aligned to the lower right: any row's bias is its lower right corner."""
        if (window, dtype) not in self._biases:
            wide = [
                (q, k) for q, k in zip(self.query_lengths, self.key_lengths, strict=True) if q < k or window is not None
            ]
            queries, keys = (max(sizes) for sizes in zip(*wide, strict=True))
            position = torch.arange(keys - queries, keys, device=self.device)[:, None]
            ahead = position - torch.arange(keys, device=self.device)  # how far the query is ahead of the key
            hidden = (ahead < 0) if window is None else (ahead < 0) | (ahead >= window)
            bias = torch.zeros(queries, keys, dtype=dtype, device=self.device)
            self._biases[window, dtype] = bias.masked_fill_(hidden, -torch.inf)
        return self._biases[window, dtype]


def choose_packing(device: torch.device, packing: Packing | None, dtype: str, caller: str) -> Packing | None:
    """Return the form of rows on a device: on a GPU, the one that its kernel for 16-bit numbers takes.

    Args:
        device: of the model.
        packing: that was asked for.
        dtype: of the model.
        caller: asks, for a warning.

    >>> choose_packing(torch.device("cpu"), Rectangles, "bfloat16", "me").__name__
    'Rectangles'
    >>> choose_packing(torch.device("cuda"), Rectangles, "bfloat16", "me").__name__
    'Sequences'
    """
    if device.type != "cuda" or packing is None:
        return packing
    if dtype == "bfloat16":
        return Sequences
    warnings.warn(
        f"{caller}: the model is in {dtype}, and attention has a fast kernel on a GPU for 16-bit numbers alone. "
        "Without it one runs for each block, and where rows share a beginning, or a layer has a window, it holds all "
        "scores, of rows x heads x tokens x tokens. Train with Model(..., dtype='bfloat16')",
        UserWarning,
        stacklevel=2,
    )
    return packing


def make_attention(rows: Rectangles | Sequences) -> RectangleAttention | SequenceAttention:
    """Return attention over rows in this form, on the device of the tokens."""
    return RectangleAttention(rows) if isinstance(rows, Rectangles) else SequenceAttention(rows)
