"""One decoding step through the layers of a plain transformer, without the modules around them.

A small model spends most of a step in the Python of its modules. This is the same arithmetic on the same parameters, in
a few calls a layer: rotary positions, grouped attention over a cache, a gated feed-forward network.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention

__all__ = ["DecoderLayer", "DecoderStack", "stack", "step"]

type _Linear = tuple[Tensor, Tensor | None]


class DecoderLayer(NamedTuple):
    """The parameters of one layer."""

    before_attention: Any
    query: _Linear
    key: _Linear
    value: _Linear
    norms: tuple[Any, Any] | None
    out: _Linear
    before_mlp: Any
    mlp: Callable[[Tensor], Tensor]
    scaling: float


class DecoderStack(NamedTuple):
    """The parts of a model that a step needs; the parameters are the model's own."""

    embed: Any
    layers: tuple[DecoderLayer, ...]
    norm: Any
    rotary: Any
    head_dim: int


def stack(module: Any) -> DecoderStack:
    """Find the layers of a transformers causal language model of the Llama family.

    Raises:
        AttributeError: it is built in another way.
    """
    base = module.base_model
    layers = tuple(_layer(layer) for layer in base.layers)
    return DecoderStack(base.embed_tokens, layers, base.norm, base.rotary_emb, base.layers[0].self_attn.head_dim)


def _layer(layer: Any) -> DecoderLayer:
    attention = layer.self_attn
    norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None
    return DecoderLayer(
        layer.input_layernorm,
        _linear(attention.q_proj),
        _linear(attention.k_proj),
        _linear(attention.v_proj),
        norms,
        _linear(attention.o_proj),
        layer.post_attention_layernorm,
        _mlp(layer.mlp),
        attention.scaling,
    )


def _linear(module: Any) -> _Linear:
    if hasattr(module, "base_layer"):
        raise AttributeError("the layer has an adapter, so its weight alone is not what it computes with")
    return module.weight, module.bias


def _mlp(mlp: Any) -> Callable[[Tensor], Tensor]:
    if not hasattr(mlp, "gate_proj"):
        return lambda x: mlp(x[:, None])[:, 0]  # a mixture of experts wants a time axis
    gate, up, down, activation = _linear(mlp.gate_proj), _linear(mlp.up_proj), _linear(mlp.down_proj), mlp.act_fn
    return lambda x: linear(activation(linear(x, *gate)) * linear(x, *up), *down)


def _norm(module: Any, x: Tensor) -> Tensor:
    if x.dtype != torch.float32:  # modules round other dtypes in places of their own
        normed: Tensor = module(x)
        return normed
    return rms_norm(x, x.shape[-1:], module.weight, module.variance_epsilon)


def step(
    model: DecoderStack, tokens: Tensor, positions: Tensor, caches: list[Tensor], column: int, bias: Tensor | None
) -> Tensor:
    """Read one token a row, at the end of its cache.

    Args:
        model: from `stack`.
        tokens: ``[n]`` int64.
        positions: ``[n]`` int64.
        caches: ``[2, at least n, h, more than column, D]`` for each layer, keys and values; written to at ``column``.
        column: how many columns have been written.
        bias: ``[n, 1, 1, column + 1]``, added to the scores; None: every column is seen.

    Returns:
        ``[n, H]``, the last hidden states.
    """
    n, dim = len(tokens), model.head_dim
    x: Tensor = model.embed(tokens[:, None])[:, 0]
    cos, sin = (y.view(n, 1, dim) for y in model.rotary(x, positions[:, None]))
    sin = torch.cat([-sin[..., : dim // 2], sin[..., dim // 2 :]], -1)  # the halves change places below
    for layer, cache in zip(model.layers, caches, strict=True):
        y = _norm(layer.before_attention, x)
        q, k, v = (linear(y, *w).view(n, -1, dim) for w in (layer.query, layer.key, layer.value))
        if layer.norms is not None:
            q, k = _norm(layer.norms[0], q), _norm(layer.norms[1], k)
        heads, shared = q.shape[1], k.shape[1]
        query_and_key = torch.cat([q, k], 1)
        q, k = (query_and_key * cos + query_and_key.roll(dim // 2, -1) * sin).split([heads, shared], 1)
        keys, values = cache[:, :n, :, : column + 1]
        keys[:, :, column] = k
        values[:, :, column] = v
        # The query heads that share a key-value head become queries of it, so that keys and values are never repeated
        grouped = q.reshape(n, shared, heads // shared, dim)
        y = scaled_dot_product_attention(grouped, keys, values, attn_mask=bias, scale=layer.scaling)
        x = x + linear(y.reshape(n, heads * dim), *layer.out)
        x = x + layer.mlp(_norm(layer.before_mlp, x))
    return _norm(model.norm, x)
