"""The cache of keys and values while decoding, and the forward passes that use it.

There are two caches with the same three functions. `Preallocated` writes into memory that it has allocated before,
prefills without a mask, and shares key-value heads between query heads at each step; it needs a module that `prepare`
has switched to its attention function. `Generic` is transformers' own dynamic cache with left padding, exact for every
model that transformers can generate from.
"""

import inspect
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nrl.backends.hf import decoder_layers
from nrl.backends.hf.recording import Recording
from nrl.errors import ModelError

__all__ = ["ATTENTION", "Cache", "Generic", "Preallocated", "attend", "prepare"]

ATTENTION = "nrl_decode"  # the name of `attend` in transformers' registry

_PLAIN = frozenset(
    {"llama", "mistral", "qwen2", "qwen3", "qwen3_moe"}
)  # attention is softmax(QK)V over all of the past
_STACKED: WeakSet[Any] = WeakSet()  # prepared modules whose steps skip their modules
_PREFILL = 8192  # tokens, padding counted, that one forward pass over prompts takes
_GROWTH = 64  # columns for sampled tokens at first; doubled when they are full


class Cache(Protocol):
    """Keys and values of the rows in decoding, and the forward passes over them."""

    routes: dict[int, Tensor]
    """``[len(prompt), layers, k]`` of each prompt that was read, by its index, if routes are recorded."""

    def prefill(self, prompts: Sequence[Sequence[int]], origin: np.ndarray) -> Tensor:
        """Read each prompt once; row i answers ``prompts[origin[i]]``. Logits ``[B, V]`` of each row's next token."""
        ...

    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Append a token ``[n]`` at its position ``[n]`` to each row. Logits ``[n, V]`` of the next one."""
        ...

    def compact(self, rows: np.ndarray) -> None:
        """Keep some rows: from now on row i is what row ``kept[i]`` was, and ``kept[i] >= i``."""
        ...


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention for decoding, as transformers calls it: a causal prefill without a mask, or one token a row.

    For one token, the G query heads of a key-value head become G queries of this head: keys and values are never
    repeated.

    Args:
        module: the attention layer; not used.
        query: ``[B, H, T, D]``.
        key: ``[B, H / G, S, D]``; S is T unless T is 1.
        value: ``[B, H / G, S, D]``.
        attention_mask: ``[B, 1, 1, S]``, added to the scores, where T is 1; otherwise None.
        dropout: not used; a sampler has none.
        scaling: of the scores; None: ``D ** -0.5``.
        options: not used.

    Returns:
        ``[B, T, H, D]``, and None for the attention weights.

    >>> q, k, v = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    >>> repeated = scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
    >>> torch.allclose(attend(None, q, k, v, None)[0], repeated.transpose(1, 2), atol=1e-6)
    True
    """
    B, H, T, D = query.shape
    if T == 1:
        grouped = query.reshape(B, key.shape[1], H // key.shape[1], D)
        out = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
        return out.reshape(B, 1, H, D), None
    shared = key.shape[1] != H
    out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=shared)
    return out.transpose(1, 2).contiguous(), None


def prepare(module: Any) -> bool:
    """Switch a module to `attend`, for `Preallocated`, if its attention is plain.

    It changes no other module. Afterwards this one can prefill and decode, but not with padding masks.

    Args:
        module: a transformers causal language model, which the caller owns.

    Returns:
        Whether it was switched: Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE models without sliding windows are. Others
        stay as they were, for `Generic`.
    """
    from transformers import AttentionInterface

    config = module.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if config.model_type not in _PLAIN or kinds != {"full_attention"}:
        return False
    if window is not None and getattr(config, "layer_types", None) is None:
        return False
    # Left out of the registry of masks on purpose: transformers then builds no mask, and passes ours on
    AttentionInterface.register(ATTENTION, attend)
    module.set_attn_implementation(ATTENTION)
    if _computes_alike(module):
        _STACKED.add(module)
    return True


def _computes_alike(module: Any) -> bool:
    """Return whether `nrl.backends.hf.decoder_layers` computes the same as the module."""
    logits = []
    with torch.no_grad():
        for stacked in (False, True):
            cache = Preallocated(module, 1, 1)
            cache.prefill([[0, 1]], np.zeros(1, dtype=np.int64))
            try:
                cache.stack = decoder_layers.stack(module) if stacked else None
            except AttributeError:
                return False
            logits.append(cache.step(*torch.tensor([[1], [2]], device=module.device)))
    return bool((logits[0] - logits[1]).abs().max() <= 1e-2 * logits[0].std())  # bfloat16 rounds so coarsely


class Preallocated:
    """Keys and values in preallocated memory, whose room for sampled tokens doubles when it is full.

    Prompts are padded on the right: a causal prefill needs no mask. Keys contain their positions and never move, and
    one bias hides the columns between a short prompt and the first sampled token. Live rows are always the first
    rows: a step reads a contiguous prefix.

    Args:
        module: a model after `prepare`; this object is its cache.
        rows: the number of rows at first.
        new_tokens: the most tokens that any row will append.
        recording: of the module's routers, switched on; None: no recording.
    """

    def __init__(self, module: Any, rows: int, new_tokens: int, recording: Recording | None = None) -> None:
        self.module, self.rows, self.new_tokens = module, rows, new_tokens
        self.recording, self.routes = recording, dict[int, Tensor]()
        self.layers: list[Tensor] = []  # keys and values of each layer, [2, B, h, capacity, D]
        self.bias: Tensor | None = None  # [B, 1, 1, capacity]; None: all prompts have the same length
        self.columns = 0  # number of written columns
        self.width = 0  # columns of prompts
        self.stack = decoder_layers.stack(module) if module in _STACKED else None

    def prefill(self, prompts: Sequence[Sequence[int]], origin: np.ndarray) -> Tensor:
        """See `Cache`. Prompts of similar length are read together."""
        device, lengths = self.module.device, np.array([len(prompt) for prompt in prompts])
        self.width = int(lengths.max())
        logits: Tensor | None = None
        for block in _blocks(lengths):
            part = Preallocated(self.module, len(block), 0)
            T, last = int(lengths[block].max()), _index(lengths[block] - 1, device)
            ids = _pad_prompts([prompts[j] for j in block], pad_left=False)[0].to(device)
            hidden = part.forward(ids, torch.arange(T, device=device)[None])
            if self.recording is not None:
                routes = self.recording.take_routes().unflatten(0, (len(block), T))
                self.routes |= {int(j): row[: lengths[j]] for j, row in zip(block, routes, strict=True)}
            ends = self._head(hidden[torch.arange(len(block), device=device), last])
            if logits is None:
                logits = ends.new_empty(self.rows, ends.shape[-1])
                self._allocate(part.layers, hidden=bool((lengths < self.width).any()))
            index_in_block = np.full(len(prompts), -1)
            index_in_block[block] = np.arange(len(block))
            to = np.flatnonzero(index_in_block[origin] >= 0)
            rows, source = _index(to, device), _index(index_in_block[origin[to]], device)
            logits[rows] = ends[source]
            for layer, read in zip(self.layers, part.layers, strict=True):
                layer[:, rows, :, :T] = read[:, source]
        assert logits is not None
        if self.bias is not None:
            unused = np.arange(self.width) >= lengths[origin][:, None]
            self.bias[:, 0, 0, : self.width].masked_fill_(torch.from_numpy(unused).to(device), -torch.inf)
        self.columns = self.width
        return logits

    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """See `Cache`."""
        if self.columns == self.layers[0].shape[3]:
            self._grow()
        if self.stack is None:
            return self._head(self.forward(tokens[:, None], positions[:, None])[:, 0])
        bias = None if self.bias is None else self.bias[: self.rows, :, :, : self.columns + 1]
        hidden = decoder_layers.step(self.stack, tokens, positions, self.layers, self.columns, bias)
        self.columns += 1
        return self._head(hidden)

    def compact(self, rows: np.ndarray) -> None:
        """See `Cache`. Only rows that fill a gap are copied."""
        self.rows = len(rows)
        moved = np.flatnonzero(rows != np.arange(len(rows)))
        if len(moved) == 0:
            return
        to, source = _index(moved, self.module.device), _index(rows[moved], self.module.device)
        for layer in self.layers:
            layer[:, to, :, : self.columns] = layer[:, source, :, : self.columns]
        if self.bias is not None:
            self.bias[to] = self.bias[source]

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Append tokens ``[n, T]`` at positions ``[n, T]`` or ``[1, T]``; their last hidden states ``[n, T, H]``."""
        end = self.columns + ids.shape[1]
        bias = None if self.bias is None else self.bias[: self.rows, :, :, :end]
        out = self.module.base_model(
            input_ids=ids, position_ids=positions, attention_mask=bias, past_key_values=self, use_cache=True
        )
        self.columns = end
        hidden: Tensor = out.last_hidden_state
        return hidden

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values, and return all of the rows; transformers' attention layers call it."""
        if layer == len(self.layers):  # these are the first tokens, and nothing is allocated yet
            self.layers.append(torch.stack([key, value]))
            return key, value
        end = self.columns + key.shape[2]
        keys, values = self.layers[layer][:, : self.rows, :, :end]
        keys[:, :, self.columns :] = key
        values[:, :, self.columns :] = value
        return keys, values

    def get_seq_length(self, layer: int = 0) -> int:
        """Return the number of written columns; transformers calls it."""
        return self.columns

    def get_query_offset(self, layer: int = 0) -> int:
        """Return the column of the next token; transformers calls it."""
        return self.columns

    def get_mask_sizes(self, length: int, layer: int = 0) -> tuple[int, int]:
        """Return the columns of a mask for ``length`` more tokens, and its first one; transformers calls it."""
        return self.columns + length, 0

    def _head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.module.get_output_embeddings()(hidden)
        return logits

    def _allocate(self, like: list[Tensor], hidden: bool) -> None:
        columns = self.width + min(_GROWTH, self.new_tokens)
        for layer in like:
            _, _, heads, _, dim = layer.shape
            self.layers.append(layer.new_empty(2, self.rows, heads, columns, dim))
            if hidden:  # a weight of zero hides any number, but not a NaN in fresh memory
                self.layers[-1][:, :, :, : self.width] = 0
        if hidden:
            self.bias = like[0].new_zeros(self.rows, 1, 1, columns)

    def _grow(self) -> None:
        """Double the room for sampled tokens. Rows that have left are not copied."""
        columns = self.width + min(2 * (self.columns - self.width), self.new_tokens)
        for i, layer in enumerate(self.layers):
            _, _, heads, _, dim = layer.shape
            self.layers[i] = layer.new_empty(2, self.rows, heads, columns, dim)
            self.layers[i][:, :, :, : self.columns] = layer[:, : self.rows]
        if self.bias is not None:
            bias = self.bias.new_zeros(self.rows, 1, 1, columns)
            bias[..., : self.columns] = self.bias[: self.rows]
            self.bias = bias


class Generic:
    """transformers' dynamic cache, with the model's own attention and padding on the left.

    Decoding is exact for every causal language model of transformers with such a cache: with sliding windows, chunks,
    linear attention, capped or scaled logits. It is slower, because each step copies the cache.

    Args:
        module: any transformers causal language model.
        recording: of the module's routers, switched on; None: no recording.

    Raises:
        ModelError: its forward pass takes no attention mask or no cache of this kind.
    """

    def __init__(self, module: Any, recording: Recording | None = None) -> None:
        from transformers import DynamicCache

        takes = inspect.signature(module.forward).parameters
        for name in ("input_ids", "attention_mask", "past_key_values"):
            if name not in takes:
                raise ModelError(
                    f"decode: the forward pass of {type(module).__name__} takes no {name}, so it cannot decode a batch "
                    "of prompts; use a causal language model with attention, or another sampler"
                )
        self.module, self.recording, self.routes = module, recording, dict[int, Tensor]()
        self.options: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self.numbered = "position_ids" in takes
        self.keys_values: Any = DynamicCache(config=module.config)
        self.mask = torch.empty(0)

    def prefill(self, prompts: Sequence[Sequence[int]], origin: np.ndarray) -> Tensor:
        """See `Cache`."""
        device = self.module.device
        ids, mask = _pad_prompts(prompts, pad_left=True)
        self.mask = mask.to(device)
        logits = self._forward(ids.to(device), (self.mask.cumsum(1) - 1).clamp_(min=0))
        if self.recording is not None:
            routes = self.recording.take_routes().unflatten(0, (len(prompts), -1))
            self.routes = {j: row[-len(prompts[j]) :] for j, row in enumerate(routes)}
        rows = _index(origin, device)
        self._select(rows)
        return logits[rows]

    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """See `Cache`."""
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], 1)
        return self._forward(tokens[:, None], positions[:, None])

    def compact(self, rows: np.ndarray) -> None:
        """See `Cache`."""
        self._select(_index(rows, self.module.device))

    def _select(self, rows: Tensor) -> None:
        self.keys_values.reorder_cache(rows)
        self.mask = self.mask[rows]

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        options = {**self.options, "position_ids": positions} if self.numbered else self.options
        out = self.module(
            input_ids=ids, attention_mask=self.mask, past_key_values=self.keys_values, use_cache=True, **options
        )
        logits: Tensor = out.logits[:, -1]
        return logits


def _index(rows: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(rows).to(device)


def _pad_prompts(prompts: Sequence[Sequence[int]], *, pad_left: bool) -> tuple[Tensor, Tensor]:
    """Return prompts as int64 ``[P, T]``, and a mask that is 1 at tokens."""
    lengths = np.array([len(prompt) for prompt in prompts])
    T = int(lengths.max())
    columns = np.arange(T)[None]
    mask = columns >= T - lengths[:, None] if pad_left else columns < lengths[:, None]
    ids = np.zeros((len(prompts), T), dtype=np.int64)
    ids[mask] = np.concatenate([np.asarray(prompt, dtype=np.int64) for prompt in prompts])
    return torch.from_numpy(ids), torch.from_numpy(mask.astype(np.int64))


def _blocks(lengths: np.ndarray) -> list[np.ndarray]:
    """Return blocks of prompts of similar length, the longest last, of at most `_PREFILL` tokens or one prompt each."""
    blocks: list[list[int]] = [[]]
    for j in np.argsort(lengths, kind="stable"):
        if blocks[-1] and lengths[j] * (len(blocks[-1]) + 1) > _PREFILL:
            blocks.append([])
        blocks[-1].append(int(j))
    return [np.array(block) for block in blocks]
