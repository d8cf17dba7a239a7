"""The layers of a model on Megatron Core: its own, but for norms and attention, which know packed rows.

Megatron's norms and attention for packed rows need Transformer Engine, which needs CUDA. These run anywhere.
"""

from functools import partial
from typing import Any

import attrs
import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor

from nrl.backends.megatron.experts import experts
from nrl.backends.training.layout.packed_attention import RectangleAttention, SequenceAttention

__all__ = ["MegatronRows", "PackedGPT", "block"]


@attrs.frozen
class MegatronRows:
    """The rows of a micro-batch, in the place of Megatron's ``PackedSeqParams``, which knows no common prefixes.

    Args:
        attention: over the tokens of this process.
        reads: ``[n]``, how many outputs are read at each of them.
        routes: ``[n, layers, k]`` int16, the experts of each of them; None: routers choose.
    """

    attention: RectangleAttention | SequenceAttention
    reads: Tensor
    routes: Tensor | None = None
    qkv_format: str = "nrl"  # neither of Megatron's, so that it leaves tokens and rotations as they are
    cp_group: Any = None


class _Norm(torch.nn.RMSNorm):
    """Root mean square norm, whose gradient is added up over the processes that have parts of a row."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class _PackedAttention(MegatronModule):  # type: ignore[misc]  # Megatron has no types
    """Attention over packed rows. Along cp, each process has some queries, and gathers all keys and values.

    Args:
        windows: for each layer of the model, as in `nrl.backends.training.layout.packed_attention`.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        windows: tuple[int | None, ...],
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.window, self.scale, self.group = windows[layer_number - 1], softmax_scale, pg_collection.cp

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, /, *, packed_seq_params: MegatronRows, **_: Any
    ) -> Tensor:
        """``query`` ``[n, 1, H, D]``, ``key`` and ``value`` ``[n, 1, h, D]``; returns ``[n, 1, H * D]``."""
        if self.group.size() > 1:
            key, value = (gather_from_sequence_parallel_region(x, True, group=self.group) for x in (key, value))
        q, k, v = (x[:, 0].transpose(0, 1) for x in (query, key, value))
        return packed_seq_params.attention(q, k, v, self.window, self.scale).flatten(1)[:, None]


class _Layer(TransformerLayer):  # type: ignore[misc]
    """A layer that hands the rows on to its experts."""

    def _forward_mlp(
        self, hidden_states: Tensor, inference_context: Any, padding_mask: Any, packed_seq_params: MegatronRows
    ) -> Any:
        return super()._forward_mlp(hidden_states, inference_context, packed_seq_params, packed_seq_params)


def block(config: Any, windows: tuple[int | None, ...], stage: int | None) -> TransformerBlockSubmodules:
    """Return the layers of a stage of this process, by its number there; None: the process has one stage."""
    norm: Any = _Norm
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=ModuleSpec(module=_PackedAttention, params={"windows": windows}),
        linear_proj=RowParallelLinear,
        q_layernorm=norm if config.qk_layernorm else None,
        k_layernorm=norm if config.qk_layernorm else None,
    )
    linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)

    def layer(with_experts: bool) -> ModuleSpec:
        parts = TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(
                module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=experts() if with_experts else partial(MLP.as_mlp_submodule, submodules=linear),
            mlp_bda=get_bias_dropout_add,
        )
        return ModuleSpec(module=_Layer, submodules=parts)

    first, count = get_transformer_layer_offset(config, stage), get_num_layers_to_build(config, stage)
    sparse = config.moe_layer_freq if config.num_moe_experts else [0] * config.num_layers
    return TransformerBlockSubmodules(
        [layer(bool(is_sparse)) for is_sparse in sparse[first : first + count]], layer_norm=norm
    )


class PackedGPT(GPTModel):  # type: ignore[misc]
    """A stage of a model, over flat tokens whose positions are given.

    Args:
        frequencies: ``[D / 2]`` float32, of the rotations.
        padding_idx: the token whose input embedding gets no gradient, as in ``nn.Embedding``; None: each gets one.
    """

    def __init__(self, *args: Any, frequencies: Tensor, padding_idx: int | None, **options: Any) -> None:
        super().__init__(*args, position_embedding_type="none", **options)
        self.frequencies, self.padding_idx = frequencies, padding_idx

    def _preprocess(self, input_ids: Tensor, position_ids: Tensor, *_: Any, **__: Any) -> tuple[Any, ...]:
        hidden = self.embedding(input_ids=input_ids, position_ids=position_ids) if self.pre_process else None
        if hidden is not None and hidden.requires_grad and self.padding_idx is not None:
            padding = input_ids[0] == self.padding_idx
            if self.config.sequence_parallel:  # each process along tp has some of the tokens
                padding = padding.chunk(self.pg_collection.tp.size())[self.pg_collection.tp.rank()]
            # The gradient of the lookup alone is masked here: a tied head adds its own to the same weight.
            hidden.register_hook(lambda gradient: gradient.masked_fill(padding[:, None, None], 0))
        angles = position_ids[0, :, None].to(self.frequencies.dtype) * self.frequencies
        return hidden, torch.cat([angles, angles], -1)[:, None, None], None, None, None, None
