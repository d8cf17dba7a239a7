"""Closed forms of a training step on the torch backend: bytes, products, and the bytes of collectives.

They have the keys of `nrl.ops.plan.simulate.simulate_step`, and hold for bfloat16 on a device with the varlen kernel. A
term is an allocation at the peak of a simulation; `tests/ops/plan/test_analytic.py` compares the sums with simulations.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs

from nrl.backends.training.outputs.fused_logprobs import KEEP_BYTES
from nrl.backends.training.outputs.head_chunks import of_device
from nrl.errors import ConfigError
from nrl.ops.plan.optimizer_cost import muon_flops, muon_update_bytes, state_bytes
from nrl.ops.plan.shapes import Shape, read_shape
from nrl.ops.plan.simulate import Step

__all__ = [
    "RowStats",
    "count_flops",
    "count_head_flops",
    "count_model_flops",
    "count_parameters",
    "estimate_step",
    "logits_bytes",
    "row_stats",
    "saved_bytes",
]


def count_parameters(config: Mapping[str, Any]) -> int:
    """The parameters of a model, dense or with experts: those of `Shape`.

    >>> count_parameters(
    ...     dict(
    ...         model_type="qwen3",
    ...         hidden_size=4,
    ...         num_hidden_layers=1,
    ...         num_attention_heads=2,
    ...         num_key_value_heads=1,
    ...         head_dim=2,
    ...         intermediate_size=8,
    ...         vocab_size=10,
    ...         tie_word_embeddings=True,
    ...     )
    ... )
    200
    """
    return read_shape(config).parameters


def count_flops(config: Mapping[str, Any], tokens: int, outputs: int) -> float:
    """The products of a step's forward and backward without attention's scores, and without recomputation.

    ``6 (tokens x weights that a token meets in layers + V d outputs)``: 2 forward and 4 backward for each weight.

    Args:
        config: as for `nrl.ops.plan.shapes.read_shape`.
        tokens: that the layers compute, padding counted.
        outputs: whose log-probabilities are computed.
    """
    model_shape = read_shape(config)
    return 6.0 * (model_shape.active_weights * tokens + model_shape.words * model_shape.hidden * outputs)


@attrs.frozen
class RowStats:
    """The rows of one process, as layers see them.

    Args:
        tokens: of all micro-batches; the last one of a row predicts nothing and is left out.
        largest: tokens of the largest micro-batch.
        outputs_each: tokens whose log-probabilities are computed, of each micro-batch.
        scores: numbers of scores in an attention head, over all micro-batches, as a drive counts them: all tokens of a
            micro-batch times its longest row.
        microbatches: how many there are.
    """

    tokens: int
    largest: int
    outputs_each: tuple[int, ...]
    scores: int
    microbatches: int

    @property
    def outputs(self) -> int:
        """Outputs of the micro-batch with the most."""
        return max(self.outputs_each)


def row_stats(step: Step) -> RowStats:
    """The rows of `nrl.ops.plan.simulate.make_rows`, without making them.

    Raises:
        ConfigError: a row is longer than a micro-batch may be, or the shared prompt is as long as the shortest row.
    """
    if step.width > step.max_tokens:
        raise ConfigError(f"plan: rows of width={step.width} do not fit in max_tokens={step.max_tokens}; raise it")
    sizes = sorted((max(step.width - 37 * (i % 8), 2) - 1 for i in range(step.rows)), reverse=True)
    if step.shared > sizes[-1]:
        raise ConfigError(
            f"plan: found shared={step.shared}, and the shortest of {step.rows} rows of width={step.width} has "
            f"{sizes[-1] + 1} tokens, since each of eight has 37 fewer than the one before; a prompt has to be shorter"
        )
    per_microbatch = step.max_tokens // step.width
    parts = [sizes[i : i + per_microbatch] for i in range(0, len(sizes), per_microbatch)]
    shared = min(step.shared, min(sizes))
    tokens = [sum(part) - shared * (len(part) - 1) for part in parts]
    outputs = [sum(part) - max(step.shared - 1, 0) * len(part) for part in parts]
    scores = sum(n * part[0] for n, part in zip(tokens, parts, strict=True))
    return RowStats(sum(tokens), max(tokens), tuple(outputs), scores, len(parts))


def saved_bytes(model: Shape, checkpointing: bool | Literal["selective"], *, sparse: bool) -> float:
    """Return the bytes that one layer saves of one token for the backward pass.

    Without checkpointing, in bfloat16 where nothing else is said (all are numbers of a token)::

        norms        2 inputs in float32, normalised in bfloat16, and times their weights            16 d
        attention    packed q, its output; packed k; v                                           4 HD + 4 hD
        their norms  q and k in float32, and normalised                                          6 HD + 6 hD
        MLP          gate, up, silu(gate), and the product                                              8 f
        experts      of each chosen one: input, output; gate and up, silu(gate), product      k (4 d + 8 m)

    and few bytes for the norms' factors, the log of the scores' sums, and a router's probabilities and choices. With
    ``True`` it is the layer's input, ``2 d``. ``"selective"`` adds attention's output and the products that widen
    nothing (`nrl.backends.training.activation_checkpoint`).

    Args:
        model: of which a layer is.
        checkpointing: of activations.
        sparse: whether the layer has experts.
    """
    d, q, k = model.hidden, model.queries, model.keys
    if checkpointing is True:
        return 2.0 * d
    if checkpointing == "selective":
        total = 2.0 * d + 2 * q + 4 * model.heads  # input, attention's output and its sums
        total += 2 * q * (q <= d) + 4 * k + 2 * d * (d <= q)  # q, k, v; the projection after attention
        if not sparse:
            return total + 2 * d * (d <= model.intermediate)
        into, out = 4 * model.expert * (2 * model.expert <= d), 2 * d * (d <= model.expert)
        return total + model.chosen * (into + out) + 2 * model.experts * (model.experts <= d)
    total = 16.0 * d + 4 * (q + k) + 4 * model.heads + 8
    if model.norms:
        total += 6 * (q + k) + 4 * (model.heads + model.groups)
    if not sparse:
        return total + 8 * model.intermediate
    return total + model.chosen * (4 * d + 8 * model.expert + 28) + 8 * model.experts


def _recomputed_flops(model: Shape, checkpointing: bool | Literal["selective"]) -> float:
    """Return the products of one token that the backward pass recomputes, over all layers."""
    d, q = model.hidden, model.queries
    plain = model.layers - model.sparse
    if checkpointing is True:  # All but the last product of a dense layer, which the backward pass does not need.
        return 2.0 * (model.active_weights - plain * d * model.intermediate)
    if not checkpointing:
        return 0.0
    widen = d * q * ((q > d) + (d > q))
    experts = model.chosen * d * model.expert * (2 * (2 * model.expert > d) + (d > model.expert))
    router = d * model.experts * (model.experts > d)
    return 2.0 * (model.layers * widen + plain * 2 * d * model.intermediate + model.sparse * (experts + router))


def estimate_step(step: Step) -> dict[str, Any]:
    """Estimate the counts of `nrl.ops.plan.simulate.simulate_step` by formulas.

    Args:
        step: of one process; its dtype is bfloat16. Its ``moments``, if there are some, are believed.

    Returns:
        Its keys, but for ``stages``, ``waits``, ``float32_products``, ``attention`` and ``recomputed``.

    Raises:
        ConfigError: another dtype, or a row is longer than a micro-batch; or it is not known what the optimizer keeps.
        ModelError: a model of another family.
    """
    if step.dtype != "bfloat16":
        raise ConfigError(f"plan: closed forms are of bfloat16, found dtype={step.dtype}; drive it (driven=true)")
    model, rows, dp = read_shape(step.model), row_stats(step), step.dp
    share = model.parameters / dp
    state = state_bytes(model, step.optimizer) / dp if step.moments is None else step.moments * share
    on_device = 0.0 if step.offload else 1.0  # share of parameters, gradients and moments
    held, moments = 4.0 * share * on_device, state * on_device
    peak = max(_peak_candidates(model, rows, step, held + moments), key=lambda each: each.bytes)
    flops = {
        "bfloat16": 6.0 * model.active_weights * rows.tokens
        + _recomputed_flops(model, step.checkpointing) * rows.tokens,
        "attention": 2.0 * (9 if step.checkpointing is True else 7) * model.layers * model.queries * rows.scores,
    }
    flops["bfloat16"] += count_head_flops(model, rows.outputs_each)
    for name, count in muon_flops(model, step.optimizer).items():
        flops[name] = flops.get(name, 0.0) + count / dp
    times = rows.microbatches
    # Layers are gathered twice, the rest once, in bfloat16; gradients are reduced in float32
    gathered_bytes = times * (4.0 * model.in_layers + 2.0 * model.outside)
    collectives = {"_allgather_base_": gathered_bytes, "_reduce_scatter_base_": times * 4.0 * model.parameters}
    # Newton-Schulz needs the full matrix: it is gathered, then scattered.
    if exchanged := muon_update_bytes(model, step.optimizer):
        collectives["alltoall_base_"] = 2.0 * exchanged / dp
    # Parts of the parameters come in float32 as often as they are gathered, and those of the gradient go.
    copied = {"to the device": 2.0 * gathered_bytes / dp, "to the host": times * 4.0 * share}
    return {
        "parameters": held,
        "moments": moments,
        "gradients": held,
        "host": (2 * 4.0 * share + state) * (1.0 - on_device),
        "peak": peak.bytes,
        "peak_at": peak.name,
        "at_peak": {"gradients": peak.gradients, "log-probabilities": peak.head},
        "logprobs": logits_bytes(model, rows.outputs_each, step.memory) + 4.0 * model.words * model.hidden,
        "activations": peak.bytes - held - moments - peak.gradients - peak.head,
        "collectives": collectives if dp > 1 else {},
        "copied": copied if step.offload else {},
        "flops": flops,
        "model": count_model_flops(model, rows),
        "microbatches": rows.microbatches,
        "count": model.parameters,
    }


def count_head_flops(model: Shape, outputs: Sequence[float], tp: int = 1) -> float:
    """Count the products of the head: the forward pass, two gradients, and logits again if they are not kept.

    Args:
        model: with its vocabulary.
        outputs: whose log-probabilities are computed, of each micro-batch.
        tp: processes that share the vocabulary.
    """
    words = model.words / tp
    return sum(2.0 * words * model.hidden * n * (3 if 4 * words * n <= KEEP_BYTES else 4) for n in outputs)


def count_model_flops(model: Shape, rows: RowStats, pp: int = 1, *, last: bool = True) -> float:
    """Count the model's products as a log's MFU does: no recomputation, and half of attention's squares.

    Args:
        model: of all stages.
        rows: of one process.
        pp: stages, of which this is one.
        last: whether it has the head.
    """
    of_layers = model.active_weights * rows.tokens + model.layers * model.queries * rows.scores
    return 6.0 * (of_layers / pp + model.words * model.hidden * sum(rows.outputs_each) * last)


def logits_bytes(model: Shape, outputs: Sequence[float], memory: float, tp: int = 1) -> float:
    """Return the bytes of a chunk of logits: two copies in float32, and one in bfloat16.

    Args:
        model: with its vocabulary.
        outputs: whose log-probabilities are computed, of each micro-batch; chunks of one are as even as can be, so that
            a smaller one may have the largest chunk.
        memory: of the device, of which a chunk takes a part.
        tp: processes that share the vocabulary.
    """
    logits = 4.0 * model.words / tp  # bytes of one token
    limit = max(1, of_device(memory) // logits)
    return 2.5 * logits * max(math.ceil(count / max(1, math.ceil(count / limit))) for count in outputs)


@attrs.frozen
class _PeakCandidate:
    """A place in a step where the peak of memory can be.

    Args:
        name: of what is done there.
        bytes: that are there, with all that the process holds.
        gradients: of these, of its own part of the gradient.
        head: of these, of log-probabilities.
    """

    name: str
    bytes: float
    gradients: float = 0.0
    head: float = 0.0


def _peak_candidates(model: Shape, rows: RowStats, step: Step, static: float) -> list[_PeakCandidate]:
    """Return the bytes at the few places of a step where the peak can be."""
    d, f, n, dp, layers = model.hidden, model.intermediate, rows.largest, step.dp, model.layers
    sharded = dp > 1 or step.offload is not None  # sharded over several, or as if it were
    weight, layer, outside = (
        model.words * d,
        model.largest,
        2.0 * (model.outside if sharded else model.words * model.hidden),
    )
    sparse, checkpointed = model.sparse > 0, step.checkpointing is not False
    saved = saved_bytes(model, step.checkpointing, sparse=sparse)
    saved_all = saved_bytes(model, step.checkpointing, sparse=False) * (layers - model.sparse)
    saved_all += saved_bytes(model, step.checkpointing, sparse=True) * model.sparse
    share = 0.0 if step.offload else 1.0 / dp  # the part of the gradient that stays
    all_gradients = 4.0 * model.parameters * share
    before = all_gradients if rows.microbatches > 1 else 0.0  # gradients of earlier micro-batches
    base = static + outside
    # Copies of weights for the backward pass.
    copies = 2.0 * model.in_layers if not sharded and not checkpointed else 0.0
    # The last norm's input in float32, and normalised; the states that predict, and their gradient
    logits = 4.0 * weight + logits_bytes(model, rows.outputs_each, step.memory)
    of_head = 6.0 * d * n + 4.0 * d * rows.outputs + logits
    # A layer's backward, while the next one is gathered and the gradient of the one before is reduced
    working = (2.0 * d + (8.0 * d * model.chosen if sparse else 4.0 * f)) * n
    working += 8.0 * layer + 2.0 * d * f * (not sparse) if sharded else 4.0 * layer
    if checkpointed:
        working += (saved_bytes(model, False, sparse=sparse) - saved) * n
    if step.checkpointing == "selective":  # Saved activations are not recomputed.
        working -= (2.0 * model.queries + 2 * model.keys) * n
    last_gradients = 4.0 * model.in_layers * share if rows.microbatches == 1 else 0.0  # gradients at the end
    layered = base + 2.0 * weight + working

    def place(name: str, size: float, gradients: float, head: float = 0.0) -> _PeakCandidate:
        return _PeakCandidate(name, size + gradients, gradients, head)

    forward = base + copies + n * saved_all + of_head + (2.0 * layer if sharded else 0.0)
    return [
        place("log-probabilities", forward, before, logits),
        place("backward of a layer", layered + copies + n * (saved_all if checkpointed else saved_all - saved), before),
        # At the end nothing more is gathered; gradients of nearly all layers are there
        place("backward of the second layer", layered + n * 2 * saved, before + last_gradients * (layers - 2) / layers),
        place(
            "backward of the first layer",
            layered - 2.0 * layer * sharded + n * saved,
            before + last_gradients * (layers - 1) / layers,
        ),
        place(
            "the gradient of the embedding",
            base + (2.0 * outside if sharded else outside + 2.0 * weight),
            before + last_gradients,
        ),
        place("the optimizer's updates", static + muon_update_bytes(model, step.optimizer) * share, all_gradients),
    ]
