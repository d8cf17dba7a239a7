"""Megatron's own options by name, for what nrl does not decide itself."""

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from nrl.errors import ConfigError

__all__ = ["Options", "options"]

_OWN = {
    "layout=": (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "use_distributed_optimizer",
        "num_distributed_optimizer_instances",
    ),
    "Model(dtype=)": ("params_dtype", "pipeline_dtype", "bf16", "fp16"),
    "adamw(...)": ("optimizer", "lr", "min_lr", "adam_beta1", "adam_beta2", "adam_eps", "weight_decay", "clip_grad"),
    "the loss, whose sums are not divided": ("calculate_per_token_loss", "average_in_collective", "grad_scale_func"),
    "the model": (
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "kv_channels",
        "normalization",
        "layernorm_epsilon",
        "gated_linear_unit",
        "activation_func",
        "add_bias_linear",
        "add_qkv_bias",
        "qk_layernorm",
        "attention_dropout",
        "hidden_dropout",
    ),
}
"""What says it here, for the options that cannot be given."""


class Options(NamedTuple):
    """Megatron's options by the configuration that they are fields of.

    Args:
        model: of ``TransformerConfig``.
        copies: of ``DistributedDataParallelConfig``.
        optimizer: of ``OptimizerConfig``.
    """

    model: dict[str, Any]
    copies: dict[str, Any]
    optimizer: dict[str, Any]


def options(given: Mapping[str, Any]) -> Options:
    """Sort options by where they belong.

    Raises:
        ConfigError: Megatron has no such option, or nrl decides it.
    """
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    known = [
        {field.name for field in fields(kind)}
        for kind in (TransformerConfig, DistributedDataParallelConfig, OptimizerConfig)
    ]
    for name in given:
        for instead, own in _OWN.items():
            if name in own:
                raise ConfigError(f"megatron.trainer: the option '{name}' follows from {instead}; leave it out")
        if not any(name in names for names in known):
            near = difflib.get_close_matches(name, set().union(*known), 1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise ConfigError(f"megatron.trainer: Megatron Core has no option '{name}'{hint}")
    return Options(*({name: value for name, value in given.items() if name in names} for names in known))
