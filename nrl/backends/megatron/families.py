"""Families of models: what Megatron Core has to be told to compute what transformers computes."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nrl.errors import ModelError
from nrl.runtime.mesh.layout import Layout

__all__ = ["Architecture", "architecture"]

_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"add_qkv_bias": True},
    "qwen3": {"qk_layernorm": True},
}
"""By ``model_type``, what is different from Llama."""

_ROTATIONS = ("default", "linear", "llama3")
"""Kinds of rotary positions whose frequencies depend on the config alone."""


class Architecture(NamedTuple):
    """An architecture as Megatron has it.

    Args:
        fields: of its ``TransformerConfig``.
        windows: for each layer, how far attention reaches back; None: to the beginning.
        frequencies: ``[D / 2]`` float32, of the rotary positions.
        tied: whether the head has the weight of the embedding.
        words: the size of the vocabulary.
    """

    fields: Mapping[str, Any]
    windows: tuple[int | None, ...]
    frequencies: Tensor
    tied: bool
    words: int


def architecture(module: Any, layout: Layout) -> Architecture:
    """The architecture of a transformers model, whose weights may take no memory.

    Raises:
        ModelError: it is of no family that is known here, or has something that Megatron would compute otherwise; or
            it cannot be split as the layout says.
    """
    config = module.config
    kind = config.model_type
    if kind not in _FAMILIES:
        raise ModelError(
            f"megatron.trainer: found a model of type '{kind}'; it knows {', '.join(sorted(_FAMILIES))}. fsdp.trainer "
            "takes any causal language model of transformers"
        )
    _check(kind, config, module)
    for axes, size, name in (
        ("tp", layout.tp, "num_key_value_heads"),
        ("pp x vp", layout.pp * layout.vp, "num_hidden_layers"),
    ):
        if (count := getattr(config, name)) % size:
            raise ModelError(f"megatron.trainer: {axes} = {size} does not divide {name}={count}; take another layout")
    heads = config.num_attention_heads
    fields = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
    }
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
    windows = tuple(None if each == "full_attention" else window for each in kinds)
    frequencies = _rotary(module).inv_freq.detach().float()
    return Architecture(fields | _FAMILIES[kind], windows, frequencies, config.tie_word_embeddings, config.vocab_size)


def _check(kind: str, config: Any, module: Any) -> None:
    rotation = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    odd = {
        "hidden_act": config.hidden_act not in ("silu", "swish"),
        "attention_bias": kind != "qwen2" and getattr(config, "attention_bias", False),
        "mlp_bias": getattr(config, "mlp_bias", False),
        "rope_type": rotation not in _ROTATIONS or getattr(_rotary(module), "attention_scaling", 1.0) != 1.0,
    }
    for name, wrong in odd.items():
        if wrong:
            found = rotation if name == "rope_type" else getattr(config, name)
            raise ModelError(
                f"megatron.trainer: the config of this {kind} model has {name}={found!r}, which it does not compute; "
                "fsdp.trainer does"
            )


def _rotary(module: Any) -> Any:
    return module.base_model.rotary_emb
