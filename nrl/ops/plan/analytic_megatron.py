"""Closed forms of a step on Megatron Core: a process of the stage that holds the most.

Weights are in bfloat16, sums of gradients in float32, and the optimizer's weights and moments in float32, which copies
share. Activations of a layer are those of nrl's layers on Megatron (`nrl.backends.megatron.packed_layers`), split over
tp with sequence parallelism, and over cp. A pipeline is 1F1B: the first stage keeps as many micro-batches as there are
stages. With ``vp`` it is interleaved, which keeps more of them, and waits less.
"""

from collections.abc import Iterable
from typing import Any

from nrl.backends.megatron.families import check_split
from nrl.errors import ConfigError
from nrl.ops.plan.analytic import RowStats, count_head_flops, count_model_flops, logits_bytes, row_stats
from nrl.ops.plan.optimizer_cost import is_megatrons
from nrl.ops.plan.shapes import Shape, read_shape
from nrl.ops.plan.simulate import Step
from nrl.runtime import Layout

__all__ = ["bubble_share", "count_stage_parameters", "estimate_megatron", "estimate_stages", "saved_layer_bytes"]


def bubble_share(stages: int, microbatches: int, virtual: int = 1) -> float:
    """Return the share of a step's time in which a stage waits: ``(p - 1) / (v m + p - 1)``.

    Source: Narayanan et al., 2021 (2104.04473), section 2.2, with time as the whole of work and bubble.

    >>> bubble_share(4, 12)
    0.2
    """
    return (stages - 1) / (virtual * microbatches + stages - 1)


def count_stage_parameters(model: Shape, layout: Layout, stage: int) -> tuple[float, float]:
    """Count the parameters that one process of a stage holds: without experts, and of experts.

    Matrices of attention and of dense MLPs, the embedding and the head are split over tp, experts over ep; norms and
    routers are whole. A tied head has a copy in the last stage.

    Args:
        model: of all stages.
        layout: of the processes.
        stage: from 0 to ``layout.pp - 1``.
    """
    share = model.layers // layout.pp
    sparse = model.sparse * share / model.layers
    replicated = 2 * model.hidden + (2 * model.head if model.norms else 0)
    plain = 3 * model.hidden * model.intermediate
    split = share * (model.projections + model.biases) + (share - sparse) * plain
    held = split / layout.tp + share * replicated + sparse * model.hidden * model.experts
    words = -(-model.words // layout.tp) * model.hidden
    first, last = stage == 0, stage == layout.pp - 1
    held += words * (first + (last and not (model.tied and first))) + model.hidden * last
    return held, sparse * 3 * model.hidden * model.expert * model.experts / layout.ep


def saved_layer_bytes(model: Shape, *, sparse: bool, tp: int = 1, cp: int = 1, selective: bool = False) -> float:
    """Return the bytes that one process saves of a layer for the backward pass, of one of its tokens along cp.

    In bfloat16, where nothing else is said (numbers of a token; all but the last line is split over tp)::

        norms        inputs, and what they give to products                                                 8 d
        attention    all of q, k, v as they were computed, which v is a part of; rotated q and k; output
                     6 HD + 6 hD; along cp gathered k and v in their place                4 HD + 4 hD cp
        their norms  inputs of those of q and k, as copies                                        2 HD + 2 hD
        MLP          gate and up, silu(gate), up once more, and the product                                10 f
        experts      of each chosen one: input and output; an MLP's, and the product times its part    4 d + 12 m
        rotations    cosines and sines of q, and of k, for each head alike                                  8 D

    and float32 factors of norms, and sums of scores. `tests/backends/megatron/test_measured.py` compares all but
    experts, which are read from Megatron's code. Where attention is computed again (``selective``), its inputs stay as
    they are along cp, too, and its sums of scores go; its output stays, as an input of the next matrix.
    """
    d, q, k = model.hidden, model.queries, model.keys
    total = 8.0 * d + 8 + (6 * (q + k) if selective or cp == 1 else 4 * q + 4 * k * cp)
    total += 0 if selective else 4 * model.heads
    if model.norms:
        total += 2 * (q + k) + 4 * (model.heads + model.groups)
    if sparse:
        total += model.chosen * (4 * d + 12 * model.expert + 16) + 8 * model.experts
    else:
        total += 10 * model.intermediate
    return total / tp + 8 * model.head


def estimate_megatron(step: Step, layout: Layout) -> dict[str, Any]:
    """Estimate a step of Megatron's trainer, as `nrl.ops.plan.analytic.estimate_step` does for the torch trainer.

    Args:
        step: of the processes of one dp coordinate; ``step.dp`` is ``layout.dp``.
        layout: of all processes.

    Returns:
        As there, of the process with the highest peak, with ``stage``, its stage; ``unsure``, the bytes that may come
        to the peak: activations and log-probabilities once more where layers are computed again, of which up to twice
        as much was measured; ``bubble``; ``rings``, as `nrl.ops.plan.gpus.estimate` has them; and ``pipeline``, the
        same of each kind of stage, with how many there are.

    Raises:
        ConfigError: another dtype or optimizer than Megatron's trainer has, offload, or a row that is longer than a
            micro-batch.
        ModelError: a model of another family, or one that cannot be split as the layout says.
    """
    # Stages between the ends take equal time. They keep less than the first: fewer micro-batches, and no words
    last = layout.pp - 1
    estimates = estimate_stages(step, layout, {0, min(1, last), last})
    pipeline = [(layout.pp - 2 if 0 < estimate["stage"] < last else 1, estimate) for estimate in estimates]
    return max(estimates, key=lambda each: each["peak"] + each["unsure"]) | {"pipeline": pipeline}


def estimate_stages(step: Step, layout: Layout, stages: Iterable[int] | None = None) -> list[dict[str, Any]]:
    """Estimate a process of each stage, as `estimate_megatron` does; or of the given stages, in order."""
    if step.dtype != "bfloat16":
        raise ConfigError(f"plan: closed forms of Megatron are of bfloat16; found dtype={step.dtype}")
    if step.offload or step.moments not in (None, 8) or not is_megatrons(step.optimizer):
        raise ConfigError(
            f"plan: found the optimizer '{step.optimizer.kind}' with moments={step.moments or step.optimizer.moments} "
            f"and {len(step.optimizer.groups)} groups, and offload={step.offload}; Megatron's trainer has adamw with "
            "moments in float32, without groups, and no offload. Leave that out, or take trainer=fsdp"
        )
    model, rows = read_shape(step.model), row_stats(step)
    check_split(layout, groups=model.groups, layers=model.layers, experts=model.experts or 1)
    return [_estimate_stage(model, rows, step, layout, stage) for stage in sorted(stages or range(layout.pp))]


def _microbatches_in_flight(stages: int, stage: int, microbatches: int, virtual: int) -> float:
    """Return how many micro-batches a stage keeps at once, in units of all its layers."""
    if virtual == 1:
        return min(stages - stage, microbatches)
    total = _padded_microbatches(microbatches, stages, virtual) * virtual
    return min(2 * (stages - stage - 1) + (virtual - 1) * stages + 1, total) / virtual


def _padded_microbatches(microbatches: int, stages: int, virtual: int) -> int:
    """Return how many micro-batches are computed; with interleaved stages, a multiple of the stages."""
    return microbatches if virtual == 1 else -(-microbatches // stages) * stages


def _computed_tokens(rows: RowStats, layout: Layout) -> float:
    """Return the tokens of all micro-batches; interleaved stages pad each to the largest."""
    return (
        rows.tokens if layout.vp == 1 else rows.largest * _padded_microbatches(rows.microbatches, layout.pp, layout.vp)
    )


def _ring_sizes(layout: Layout) -> dict[str, tuple[int, int]]:
    """Return the number of ranks of each collective, and the distance between them; pp is the outermost axis."""
    copy = layout.tp * layout.cp
    shared = copy * (layout.dp if layout.shard is None else layout.shard)
    stage, all_ranks = copy * layout.dp, layout.slots
    return {
        "tensor": (layout.tp, 1),
        "context": (copy, layout.tp),
        "experts": (layout.ep, 1),
        "reduce_scatter": (shared, layout.tp),
        "all_gather": (shared, layout.tp),
        "all_reduce": (stage, shared if copy < shared < stage else layout.tp),
        # Of two processes; so there is one adapter on the way
        "pipeline": (all_ranks, all_ranks),
        "words": (all_ranks, all_ranks),
    }


def _collective_bytes(
    model: Shape, rows: RowStats, layout: Layout, stage: int, step: Step, gradients: float, parameters: float
) -> dict[str, float]:
    """Bytes of the largest tensor of each collective of a process, in all micro-batches.

    Along tp, with sequence parallelism, a pair of matrices gathers its input and scatters its output; backward it
    gathers both their gradient and the input, and scatters that of the input: 5 of a pair, and 2 more if all of it is
    computed again. Attention is a pair, and a dense MLP; experts send tokens there and back instead. The first stage
    scatters embeddings, the last one gathers for the head, both backward too. Along cp keys and values are gathered,
    also where only attention is computed again, and their gradients scattered. A stage sends activations on, and
    gradients back.
    """
    tp, pp, cp, vp, d = layout.tp, layout.pp, layout.cp, layout.vp, model.hidden
    share = model.layers / pp
    sparse = model.sparse * share / model.layers
    computed, checkpointed = _computed_tokens(rows, layout), step.checkpointing is True
    tokens = computed / cp * d * 2.0
    sizes = dict[str, float]()
    if layout.dp * cp > 1:
        size = layout.dp if layout.shard is None else layout.shard
        if layout.dp > 1 and size > 1:
            sizes |= {"reduce_scatter": gradients, "all_gather": parameters}
            if layout.dp > size:
                sizes["all_reduce"] = gradients / (size * cp)
        else:
            sizes["all_reduce"] = gradients
    if tp > 1:
        of_layers = (2 * share - sparse) * (7 if checkpointed else 5)
        sizes["tensor"] = tokens * (of_layers + 2 * (stage == 0) + 2 * (stage == pp - 1))
    if pp > 1:
        ends = 4 * vp - 2 * (stage in (0, pp - 1))
        sizes["pipeline"] = ends * tokens / tp
        if model.tied and stage in (0, pp - 1):
            sizes["words"] = 4.0 * model.words * d / tp
    if cp > 1:
        sizes["context"] = share * computed * 2.0 * model.keys / tp * (6 if step.checkpointing else 4)
    if layout.ep > 1:
        sizes["experts"] = sparse * tokens / tp * model.chosen * (6 if checkpointed else 4)
    return sizes


def _estimate_stage(model: Shape, rows: RowStats, step: Step, layout: Layout, stage: int) -> dict[str, Any]:
    tp, pp, cp, d = layout.tp, layout.pp, layout.cp, model.hidden
    held, experts = count_stage_parameters(model, layout, stage)
    copies = layout.dp if layout.shard is None else layout.shard
    sharing = copies * cp if copies > 1 and layout.dp > 1 else 1
    of_experts = max(1, sharing * tp // layout.ep) if sharing > 1 else 1
    parameters, gradients = 2.0 * (held + experts), 4.0 * (held + experts)
    moments = 12.0 * (held / sharing + experts / of_experts)  # The optimizer has its own weights.
    share = model.layers // pp
    sparse = model.sparse * share / model.layers
    n = rows.largest / cp
    selective = step.checkpointing == "selective"
    saved = [
        saved_layer_bytes(model, sparse=is_sparse, tp=tp, cp=cp, selective=selective) for is_sparse in (False, True)
    ]
    all_layers = (share - sparse) * saved[0] + sparse * saved[1]
    under_way = _microbatches_in_flight(pp, stage, rows.microbatches, layout.vp)
    saved_in_stage = under_way * n * (share * 2 * d / tp if step.checkpointing is True else all_layers)
    saved_in_stage += 2.0 * n * d * (tp > 1)  # into which inputs are gathered, which stays
    # The gradients of an MLP; a layer that is computed again
    working = 4.0 * n * d / tp + 4 * n * max(model.intermediate * (share > sparse) / tp, model.chosen * d / tp)
    working += n * (saved[sparse > 0] + 2 * d / tp) * (step.checkpointing is True)  # The output of the layer is added.
    working += n / tp * (4 * model.heads + 4 * model.keys * cp * (cp > 1)) * selective  # attention of a layer
    logits = of_head = 0.0
    if stage == pp - 1:  # the last norm's input and output, gathered, and the states that predict
        of_head = n * d * (4.0 / tp + 2 + 2 * (tp > 1))
        logits = logits_bytes(model, [n / cp for n in rows.outputs_each], step.memory, tp) + 4.0 * d * model.words / tp
    activations, logits = max((saved_in_stage + working, 0.0), (saved_in_stage + of_head, logits), key=sum)
    forward = model.active_weights / pp * _computed_tokens(rows, layout) / (tp * cp)
    products = forward * (8 if step.checkpointing is True else 6)
    if stage == pp - 1:
        products += count_head_flops(model, [n / cp for n in rows.outputs_each], tp)
    scores = model.layers / pp * model.queries * rows.scores / (tp * cp)
    collectives = _collective_bytes(model, rows, layout, stage, step, gradients, parameters)
    peak = parameters + gradients + moments + activations + logits
    return {
        "parameters": parameters, "gradients": gradients, "moments": moments, "activations": activations, "peak": peak,
        "at_peak": {"gradients": gradients, "log-probabilities": logits}, "logprobs": logits,
        "unsure": (activations + logits) * (step.checkpointing is True), "peak_at": f"stage {stage}", "stage": stage,
        "bubble": bubble_share(pp, _padded_microbatches(rows.microbatches, pp, layout.vp), layout.vp),
        "collectives": collectives, "rings": _ring_sizes(layout), "microbatches": rows.microbatches,
        "count": held + experts,
        "flops": {
            "bfloat16": products,
            "attention": 2.0 * (9 if step.checkpointing else 7) * scores,
        },
        "model": count_model_flops(model, rows, pp, last=stage == pp - 1) / (tp * cp),
    }  # fmt: skip
