"""The stages of a model on Megatron Core, and passes through all of them with Megatron's own schedules."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from nrl.backends.megatron.cp_slice import Tokens
from nrl.backends.megatron.families import Architecture
from nrl.backends.megatron.groups import Groups, instances
from nrl.backends.megatron.packed_layers import MegatronRows, PackedGPT, block
from nrl.backends.training.layout.h2d import copy_to_device
from nrl.backends.training.layout.microbatch_plan import Outputs, Plan
from nrl.backends.training.outputs.output_heads import numbers, predictions, states
from nrl.backends.training.outputs.vocab_parallel import VocabularyShard
from nrl.runtime.mesh.layout import Layout

__all__ = ["Stages", "build", "compute_outputs", "make_optimizer", "make_replicas", "run_passes"]

type Stages = list[PackedGPT]
"""This process's stages of a model: one, or several of an interleaved pipeline."""


def build(
    arch: Architecture, head: str, fields: Mapping[str, Any], dtype: torch.dtype, groups: Groups, device: torch.device
) -> Stages:
    """Build the stages of this process, with weights that are not initialised."""
    layout = groups.layout
    config = TransformerConfig(
        **{
            **arch.fields,
            "tensor_model_parallel_size": layout.tp,
            "pipeline_model_parallel_size": layout.pp,
            "virtual_pipeline_model_parallel_size": layout.vp if layout.vp > 1 else None,
            "context_parallel_size": layout.cp,
            "expert_model_parallel_size": layout.ep,
            "expert_tensor_parallel_size": 1,
            "params_dtype": dtype,
            "pipeline_dtype": dtype,
            "moe_token_dispatcher_type": "alltoall",
            "bf16": dtype == torch.bfloat16,
            "variable_seq_lengths": layout.vp == 1,  # Megatron's interleaved schedule mixes shapes up
            "batch_p2p_comm": _batches_p2p(device, layout),
            "calculate_per_token_loss": True,  # gradients are sums: nothing divides by micro-batches or processes
            "use_cpu_initialization": device.type == "cpu",
            "perform_initialization": False,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "sequence_parallel": layout.tp > 1,
            "bias_activation_fusion": False,
            "bias_dropout_fusion": False,
            "masked_softmax_fusion": False,
            "apply_rope_fusion": False,
            "gradient_accumulation_fusion": False,
            "persist_layer_norm": False,
            **fields,
        }
    )
    config.finalize_model_grads_func = _sum_up
    model_parallel_cuda_manual_seed(0)
    count = layout.pp * layout.vp
    pp = int(groups.collection.pp.rank())
    stages = []
    for stage in range(layout.vp):
        number, virtual = stage * layout.pp + pp, stage if layout.vp > 1 else None
        module = PackedGPT(
            config,
            block(config, arch.windows, virtual),
            -(-arch.words // layout.tp) * layout.tp,
            1,
            pre_process=number == 0,
            post_process=number == count - 1,
            share_embeddings_and_output_weights=arch.tied and head == "lm",
            pg_collection=groups.collection,
            vp_stage=virtual,
            frequencies=arch.frequencies.to(device),
            padding_idx=arch.padding_idx,
        )
        module.words, module.experts = arch.words, arch.experts
        _fill_up(module, groups.tp)
        if module.post_process and head != "lm":
            module.output_layer = nn.Linear(config.hidden_size, 1, bias=head == "value", dtype=dtype)
        stages.append(module.to(device))
    return stages


def _batches_p2p(device: torch.device, layout: Layout) -> bool:
    """Return whether a pipeline sends and receives in one call, which gives wrong gradients where stages interleave.

    >>> both = Layout(pp=2), Layout(pp=2, vp=2)
    >>> [_batches_p2p(torch.device("cuda"), layout) for layout in both]
    [True, False]
    """
    return device.type != "cpu" and layout.vp == 1


def _fill_up(module: Any, rank: int) -> None:
    """Zero the rows that make the vocabulary divide; nobody reads them, and memory may hold anything."""
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                weight[max(0, module.words - rank * len(weight)) :] = 0


def _sum_up(model: Any, tokens: Any, **options: Any) -> None:
    """Add gradients up over processes, without dividing them by a number of tokens."""
    finalize_model_grads(model, None, **options)


def make_replicas(stages: Stages, groups: Groups, fields: Mapping[str, Any]) -> list[Any]:
    """Give stages room for gradients, which are added up over copies."""
    config = DistributedDataParallelConfig(
        **{
            "grad_reduce_in_fp32": stages[0].config.params_dtype == torch.bfloat16,
            "use_distributed_optimizer": _shares_optimizer(groups, stages[0].config.params_dtype),
            "num_distributed_optimizer_instances": instances(groups.layout),
            "overlap_grad_reduce": groups.layout.dp * groups.layout.cp > 1,
            **fields,
        }
    )
    copies = [
        DistributedDataParallel(
            stage.config, config, stage, disable_bucketing=number > 0, pg_collection=groups.collection
        )
        for number, stage in enumerate(stages)
    ]
    # Else each micro-batch would pass for the last one, and gradients would be added up before all of them are there
    syncs = [copy.no_sync for copy in copies]
    stages[0].config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
    return copies


def _shares_optimizer(groups: Groups, dtype: torch.dtype) -> bool:
    """Return whether copies share the optimizer; Megatron's shared one would round gradients of float64."""
    return groups.layout.dp > 1 and groups.layout.shard != 1 and dtype != torch.float64


def make_optimizer(spec: Any, copies: Sequence[Any], groups: Groups, fields: Mapping[str, Any]) -> Any:
    """Make Megatron's AdamW for the stages."""
    dtype = copies[0].config.params_dtype
    config = OptimizerConfig(
        **{
            "optimizer": "adam",
            "lr": spec.lr,
            "adam_beta1": spec.betas[0],
            "adam_beta2": spec.betas[1],
            "adam_eps": spec.eps,
            "weight_decay": spec.weight_decay,
            "clip_grad": spec.clip,
            "bf16": dtype == torch.bfloat16,
            "params_dtype": dtype,
            "use_distributed_optimizer": _shares_optimizer(groups, dtype),
            **fields,
        }
    )
    optimizer = get_megatron_optimizer(
        config, list(copies), use_gloo_process_groups=False, pg_collection=groups.collection
    )
    for group in optimizer.param_groups:  # Megatron's own scheduler would set this.
        group["weight_decay"] = spec.weight_decay * group.get("wd_mult", 1.0)
    return optimizer


def run_passes(
    model: Sequence[Any],
    works: Sequence[Tokens],
    last: Callable[[int, Tensor], Tensor],
    groups: Groups,
    *,
    backward: bool,
) -> None:
    """Send micro-batches through all stages, and, if wanted, their gradients back.

    Args:
        model: `make_replicas`, or for passes forward alone stages.
        works: the tokens of each micro-batch.
        last: called on the last stage, with the number of a micro-batch and hidden states ``[n, 1, H]``; returns the
            scalar whose gradient is wanted.
        groups: the groups.
        backward: whether gradients are wanted.
    """

    def step(numbers: Iterator[int], module: Any) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, ...]]]:
        number = next(numbers)
        work = works[number]
        hidden = module(
            work.input_ids,
            work.position_ids,
            None,
            packed_seq_params=MegatronRows(work.attention, work.reads, work.routes),
            output_processor=lambda hidden_states, **_: hidden_states,
        )

        def loss(hidden: Tensor) -> tuple[Any, ...]:
            return last(number, hidden), torch.ones((), dtype=torch.int), {}

        return hidden, loss

    numbers_of_stages: list[Iterator[int]] = [iter(range(len(works))) for _ in model]
    get_forward_backward_func(groups.layout.pp, groups.layout.vp if groups.layout.vp > 1 else None)(
        forward_step_func=step,
        data_iterator=numbers_of_stages if len(numbers_of_stages) > 1 else numbers_of_stages[0],
        model=list(model) if len(model) > 1 else model[0],
        num_microbatches=len(works),
        seq_length=works[0].input_ids.shape[1] * groups.layout.cp,  # unless shapes travel with the tokens
        micro_batch_size=1,
        forward_only=not backward,
    )


def compute_outputs(
    stage: PackedGPT,
    hidden: Tensor,
    work: Plan,
    part: Tokens,
    needs: frozenset[str],
    head: str,
    groups: Groups,
    guard: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Outputs:
    """Compute the outputs of the head from hidden states, at the tokens of this process.

    Args:
        stage: the last one.
        hidden: ``[n, 1, H]``; with sequence parallelism a part of the tokens.
        work: the plan of the micro-batch.
        part: the tokens of this process.
        needs: the names of the outputs.
        head: of `nrl.backends.Model`.
        groups: the groups.
        guard: what calls of functions of logits happen in; it may hold their errors back.
    """
    hidden, tp = hidden[:, 0], groups.collection.tp
    shared = head == "lm"  # each process of tp has some of the words, and so a part of the gradient
    if stage.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, shared, group=tp)
    elif shared:
        hidden = copy_to_tensor_model_parallel_region(hidden, group=tp)
    hidden = hidden.index_select(0, part.places)
    if not shared:
        layer: Any = stage.output_layer
        values = {"values" if head == "value" else "rewards": numbers(hidden, layer.weight, layer.bias)}
        if "hidden_states" in needs:
            values["hidden_states"] = states(hidden)
    else:
        weight = stage.shared_embedding_or_output_weight() if stage.share_embeddings_and_output_weights else None
        weight = stage.output_layer.weight if weight is None else weight
        first = groups.tp * len(weight)
        shard = VocabularyShard(first, len(weight), tp, stage.words) if groups.layout.tp > 1 else None
        temperature = None if work.temperature is None else work.temperature[part.read]
        targets, columns = ({name: x[part.read] for name, x in xs.items()} for xs in (work.targets, work.columns))
        targets, columns, temperature = copy_to_device((targets, columns, temperature), hidden.device)
        real_words = weight[: max(0, stage.words - first)]
        values = predictions(hidden, real_words, None, targets, columns, temperature, needs, shard, guard)
    return Outputs(values, work.source[part.read].to(hidden.device), work.shape)
