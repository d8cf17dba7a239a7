"""Families of models, and the options with which Megatron Core computes the same as transformers."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nrl.errors import ModelError
from nrl.runtime.mesh.layout import Layout

__all__ = ["Architecture", "ExpertNames", "architecture", "check_split"]


class ExpertNames(NamedTuple):
    """The names in files of the weights of a layer of experts; ``{}`` stands for an expert's number."""

    router: str
    gate: str
    up: str
    down: str


class _Family(NamedTuple):
    """The differences of a family from Llama.

    Args:
        fields: of Megatron's ``TransformerConfig``.
        experts: the names of their weights; None: it has none.
    """

    fields: Mapping[str, Any] = {}
    experts: ExpertNames | None = None


_FAMILIES = {
    "llama": _Family(),
    "mistral": _Family(),
    "mixtral": _Family(
        experts=ExpertNames(
            "block_sparse_moe.gate.weight",
            "block_sparse_moe.experts.{}.w1.weight",
            "block_sparse_moe.experts.{}.w3.weight",
            "block_sparse_moe.experts.{}.w2.weight",
        )
    ),
    "qwen2": _Family({"add_qkv_bias": True}),
    "qwen3": _Family({"qk_layernorm": True}),
    "qwen3_moe": _Family(
        {"qk_layernorm": True},
        ExpertNames(
            "mlp.gate.weight",
            "mlp.experts.{}.gate_proj.weight",
            "mlp.experts.{}.up_proj.weight",
            "mlp.experts.{}.down_proj.weight",
        ),
    ),
}
"""By ``model_type``."""

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
        padding_idx: the token whose input embedding gets no gradient, as in ``nn.Embedding``; None: each gets one.
        experts: what files call the weights of experts; None: there are none.
    """

    fields: Mapping[str, Any]
    windows: tuple[int | None, ...]
    frequencies: Tensor
    tied: bool
    words: int
    padding_idx: int | None
    experts: ExpertNames | None


def architecture(module: Any, layout: Layout) -> Architecture:
    """Return the architecture of a transformers model, whose weights may take no memory.

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
    family = _FAMILIES[kind]
    of_experts = {} if family.experts is None else _experts(kind, config)
    experts = of_experts.get("num_moe_experts", 1)
    check_split(layout, groups=config.num_key_value_heads, layers=config.num_hidden_layers, experts=experts)
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
    windows = tuple(None if layer_type == "full_attention" else window for layer_type in kinds)
    frequencies = _rotary(module).inv_freq.detach().float()
    fields |= {**family.fields, **of_experts}
    padding_idx = module.get_input_embeddings().padding_idx
    return Architecture(
        fields, windows, frequencies, config.tie_word_embeddings, config.vocab_size, padding_idx, family.experts
    )


def check_split(layout: Layout, *, groups: int, layers: int, experts: int) -> None:
    """Check that a model can be split as a layout says.

    Args:
        layout: of all processes.
        groups: heads of keys and values.
        layers: of the model.
        experts: of a layer; 1, where there are none.

    Raises:
        ModelError: an axis does not divide what it splits.
    """
    for axes, size, name, count in (
        ("tp", layout.tp, "num_key_value_heads", groups),
        ("pp x vp", layout.pp * layout.vp, "num_hidden_layers", layers),
        ("ep", layout.ep, "num_experts", experts),
    ):
        if count % size:
            raise ModelError(f"megatron.trainer: {axes} = {size} does not divide {name}={count}; take another layout")


def _experts(kind: str, config: Any) -> dict[str, Any]:
    """Return the fields for experts: softmax over all or, with the same result, over the chosen; no auxiliary loss."""
    mixtral = kind == "mixtral"
    layers = range(config.num_hidden_layers)
    dense = (
        set() if mixtral else {*config.mlp_only_layers, *(i for i in layers if (i + 1) % config.decoder_sparse_step)}
    )
    return {
        "num_moe_experts": config.num_local_experts if mixtral else config.num_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": config.intermediate_size if mixtral else config.moe_intermediate_size,
        "moe_layer_freq": [int(layer not in dense) for layer in layers],
        "moe_router_pre_softmax": not (mixtral or config.norm_topk_prob),
        "moe_router_load_balancing_type": "none",
    }


def _check(kind: str, config: Any, module: Any) -> None:
    rotation = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    odd = {
        "hidden_act": config.hidden_act not in ("silu", "swish"),
        "attention_bias": kind != "qwen2" and getattr(config, "attention_bias", False),
        "mlp_bias": getattr(config, "mlp_bias", False),
        "router_jitter_noise": bool(getattr(config, "router_jitter_noise", 0)),
        "rope_type": rotation not in _ROTATIONS or getattr(_rotary(module), "attention_scaling", 1.0) != 1.0,
    }
    for name, wrong in odd.items():
        if wrong:
            value = rotation if name == "rope_type" else getattr(config, name)
            raise ModelError(
                f"megatron.trainer: the config of this {kind} model has {name}={value!r}, which it does not compute; "
                "fsdp.trainer does"
            )


def _rotary(module: Any) -> Any:
    return module.base_model.rotary_emb
