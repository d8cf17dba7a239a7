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
        "batch_p2p_comm",
        "variable_seq_lengths",
    ),
    "Model(dtype=)": ("params_dtype", "pipeline_dtype", "bf16", "fp16"),
    "adamw(...)": (
        "optimizer",
        "lr",
        "min_lr",
        "adam_beta1",
        "adam_beta2",
        "adam_eps",
        "weight_decay",
        "clip_grad",
        "decoupled_weight_decay",
    ),
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
        "softmax_scale",
        "rotary_interleaved",
        "window_size",
        "layernorm_zero_centered_gamma",
        "mtp_num_layers",
        "num_moe_experts",
        "moe_ffn_hidden_size",
        "moe_layer_freq",
        "moe_router_topk",
        "moe_router_pre_softmax",
        "moe_router_score_function",
        "moe_router_num_groups",
        "moe_router_group_topk",
        "moe_router_topk_scaling_factor",
        "moe_shared_expert_intermediate_size",
        "moe_shared_expert_gate",
    ),
    "the column 'routes' of a batch": ("moe_enable_routing_replay",),
}
"""The options of Megatron that nrl decides, by the argument that decides them."""

_NOT_SUMS = (
    "moe_aux_loss_coeff",
    "moe_router_load_balancing_type",
    "moe_z_loss_coeff",
    "moe_input_jitter_eps",
    "moe_router_enable_expert_bias",
    "moe_router_bias_update_rate",
    "moe_router_quantile_balancing_ema",
    "moe_router_force_load_balancing",
    "moe_router_force_biased",
    "moe_expert_capacity_factor",
    "moe_expert_rank_capacity_factor",
    "moe_pad_expert_input_to_capacity",
    "moe_token_dropping",
    "moe_token_drop_policy",
)
"""Options with which what a row gives depends on those beside it: Megatron averages over a micro-batch and padding."""

_WITHOUT_EFFECT = ("fp8", "fp4", "fp8_recipe", "fp8_param", "loss_scale", "initial_loss_scale")


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


def options(values: Mapping[str, Any]) -> Options:
    """Sort options by where they belong.

    Raises:
        ConfigError: Megatron has no such option, or nrl decides it.
    """
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    fields_of_configs = [
        {field.name for field in fields(kind)}
        for kind in (TransformerConfig, DistributedDataParallelConfig, OptimizerConfig)
    ]
    for name in values:
        for instead, decided in _OWN.items():
            if name in decided:
                raise ConfigError(f"megatron.trainer: the option '{name}' follows from {instead}; leave it out")
        if name in _WITHOUT_EFFECT:
            raise ConfigError(
                f"megatron.trainer: the option '{name}' would change nothing here, as layers are built without "
                "Transformer Engine; leave it out"
            )
        if name in _NOT_SUMS:
            raise ConfigError(
                f"megatron.trainer: with the option '{name}' the gradient of a row would depend on the rows in its "
                "micro-batch; no token is dropped and no auxiliary loss added here. Leave it out; the metric "
                "experts/max_violation says how balanced experts are"
            )
        if name == "moe_layer_recompute" or (name == "recompute_modules" and "moe" in values[name]):
            raise ConfigError(
                f"megatron.trainer: {name} would compute routers again without the rows that they saw; "
                "take checkpointing=True, which computes whole layers again"
            )
        if not any(name in names for names in fields_of_configs):
            near = difflib.get_close_matches(name, set().union(*fields_of_configs), 1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise ConfigError(f"megatron.trainer: Megatron Core has no option '{name}'{hint}")
    return Options(*({name: value for name, value in values.items() if name in names} for names in fields_of_configs))
