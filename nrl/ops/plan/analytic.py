"""Closed forms of a training step on the torch backend: bytes, products, and what collectives carry.

They have the keys of `nrl.ops.plan.simulate.drive`, and hold for bfloat16 on a device that has the varlen kernel. A
term is an allocation that a drive finds at its peak; `tests/ops/plan/test_analytic.py` says how close the sums come to
drives.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs

from nrl.backends.training.outputs.fused_logprobs import KEEP_BYTES
from nrl.backends.training.outputs.head_chunks import of_device
from nrl.errors import ConfigError
from nrl.ops.plan.optimizer_cost import kept_bytes, orthogonalised, orthogonalising
from nrl.ops.plan.shapes import Shape, shape
from nrl.ops.plan.simulate import Step

__all__ = [
    "Rows",
    "closed",
    "closed_flops",
    "closed_head",
    "closed_logits",
    "closed_model",
    "closed_parameters",
    "rows_of",
    "saved_bytes",
]


def closed_parameters(config: Mapping[str, Any]) -> int:
    """The parameters of a model, dense or with experts: those of `Shape`.

    >>> closed_parameters(
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
    return shape(config).parameters


def closed_flops(config: Mapping[str, Any], tokens: int, outputs: int) -> float:
    """The products of a step's forward and backward without attention's scores, and without recomputation.

    ``6 (tokens x weights that a token meets in layers + V d outputs)``: 2 forward and 4 backward for each weight.

    Args:
        config: as for `nrl.ops.plan.shapes.shape`.
        tokens: that the layers compute, padding counted.
        outputs: whose log-probabilities are computed.
    """
    found = shape(config)
    return 6.0 * (found.used * tokens + found.words * found.hidden * outputs)


@attrs.frozen
class Rows:
    """The rows of one process, as layers see them.

    Args:
        tokens: of all micro-batches; the last one of a row predicts nothing and is left out.
        largest: tokens of the largest micro-batch.
        each: tokens whose log-probabilities are computed, of each micro-batch.
        scores: numbers of scores in an attention head, over all micro-batches, as a drive counts them: all tokens of a
            micro-batch times its longest row.
        microbatches: how many there are.
    """

    tokens: int
    largest: int
    each: tuple[int, ...]
    scores: int
    microbatches: int

    @property
    def outputs(self) -> int:
        """Of the micro-batch that has the most."""
        return max(self.each)


def rows_of(step: Step) -> Rows:
    """The rows of `nrl.ops.plan.simulate.rows`, without making them.

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
    each = step.max_tokens // step.width
    parts = [sizes[i : i + each] for i in range(0, len(sizes), each)]
    shared = min(step.shared, min(sizes))
    tokens = [sum(part) - shared * (len(part) - 1) for part in parts]
    outputs = [sum(part) - max(step.shared - 1, 0) * len(part) for part in parts]
    scores = sum(n * part[0] for n, part in zip(tokens, parts, strict=True))
    return Rows(sum(tokens), max(tokens), tuple(outputs), scores, len(parts))


def saved_bytes(model: Shape, checkpointing: bool | Literal["selective"], *, sparse: bool) -> float:
    """What one layer keeps of one token for the backward pass, in bytes.

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
        found = 2.0 * d + 2 * q + 4 * model.heads  # input, attention's output and its sums
        found += 2 * q * (q <= d) + 4 * k + 2 * d * (d <= q)  # q, k, v; the projection after attention
        if not sparse:
            return found + 2 * d * (d <= model.intermediate)
        into, out = 4 * model.expert * (2 * model.expert <= d), 2 * d * (d <= model.expert)
        return found + model.chosen * (into + out) + 2 * model.experts * (model.experts <= d)
    found = 16.0 * d + 4 * (q + k) + 4 * model.heads + 8
    if model.norms:
        found += 6 * (q + k) + 4 * (model.heads + model.groups)
    if not sparse:
        return found + 8 * model.intermediate
    return found + model.chosen * (4 * d + 8 * model.expert + 28) + 8 * model.experts


def _recomputed(model: Shape, checkpointing: bool | Literal["selective"]) -> float:
    """Products of one token that are made once more in the backward pass, over all layers."""
    d, q = model.hidden, model.queries
    plain = model.layers - model.sparse
    if checkpointing is True:  # but for the last product of a dense layer, of which the backward pass needs nothing
        return 2.0 * (model.used - plain * d * model.intermediate)
    if not checkpointing:
        return 0.0
    widen = d * q * ((q > d) + (d > q))
    experts = model.chosen * d * model.expert * (2 * (2 * model.expert > d) + (d > model.expert))
    router = d * model.experts * (model.experts > d)
    return 2.0 * (model.layers * widen + plain * 2 * d * model.intermediate + model.sparse * (experts + router))


def closed(step: Step) -> dict[str, Any]:
    """What `nrl.ops.plan.simulate.drive` would count of a step, by formulas.

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
    model, rows, dp = shape(step.model), rows_of(step), step.dp
    share = model.parameters / dp
    kept = kept_bytes(model, step.optimizer) / dp if step.moments is None else step.moments * share
    here = 0.0 if step.offload else 1.0  # of parameters, gradients and moments
    held, moments = 4.0 * share * here, kept * here
    peak = max(_places(model, rows, step, held + moments), key=lambda each: each.bytes)
    flops = {
        "bfloat16": 6.0 * model.used * rows.tokens + _recomputed(model, step.checkpointing) * rows.tokens,
        "attention": 2.0 * (9 if step.checkpointing is True else 7) * model.layers * model.queries * rows.scores,
    }
    flops["bfloat16"] += closed_head(model, rows.each)
    for name, count in orthogonalising(model, step.optimizer).items():
        flops[name] = flops.get(name, 0.0) + count / dp
    times = rows.microbatches
    # Layers are gathered twice, the rest once, in bfloat16; gradients are reduced in float32
    gathered = times * (4.0 * model.in_layers + 2.0 * model.outside)
    collectives = {"_allgather_base_": gathered, "_reduce_scatter_base_": times * 4.0 * model.parameters}
    if moved := orthogonalised(model, step.optimizer):  # there and back
        collectives["alltoall_base_"] = 2.0 * moved / dp
    return {
        "parameters": held,
        "moments": moments,
        "gradients": held,
        "host": (2 * 4.0 * share + kept) * (1.0 - here),
        "peak": peak.bytes,
        "peak_at": peak.name,
        "at_peak": {"gradients": peak.gradients, "log-probabilities": peak.head},
        "logprobs": closed_logits(model, rows.each, step.memory) + 4.0 * model.words * model.hidden,
        "activations": peak.bytes - held - moments - peak.gradients - peak.head,
        "collectives": collectives if dp > 1 else {},
        # Parts of the parameters come in float32 as often as they are gathered, and those of the gradient go
        "copied": {"to the device": 2.0 * gathered / dp, "to the host": times * 4.0 * share} if step.offload else {},
        "flops": flops,
        "model": closed_model(model, rows),
        "microbatches": rows.microbatches,
        "count": model.parameters,
    }


def closed_head(model: Shape, outputs: Sequence[float], tp: int = 1) -> float:
    """Products of the head: the forward pass and two gradients, and logits again where they are not kept.

    Args:
        model: with its vocabulary.
        outputs: whose log-probabilities are computed, of each micro-batch.
        tp: processes that share the vocabulary.
    """
    words = model.words / tp
    return sum(2.0 * words * model.hidden * n * (3 if 4 * words * n <= KEEP_BYTES else 4) for n in outputs)


def closed_model(model: Shape, rows: Rows, pp: int = 1, *, last: bool = True) -> float:
    """Products that the model needs, as a log's MFU counts them: none again, and of attention's squares half.

    Args:
        model: of all stages.
        rows: of one process.
        pp: stages, of which this is one.
        last: whether it has the head.
    """
    of_layers = model.used * rows.tokens + model.layers * model.queries * rows.scores
    return 6.0 * (of_layers / pp + model.words * model.hidden * sum(rows.each) * last)


def closed_logits(model: Shape, outputs: Sequence[float], memory: float, tp: int = 1) -> float:
    """Bytes of a chunk of logits: two such in float32, and one in bfloat16.

    Args:
        model: with its vocabulary.
        outputs: whose log-probabilities are computed, of each micro-batch; chunks of one are as even as can be, so that
            a smaller one may have the largest chunk.
        memory: of the device, of which a chunk takes a part.
        tp: processes that share the vocabulary.
    """
    logits = 4.0 * model.words / tp  # of one token
    most = max(1, of_device(memory) // logits)
    return 2.5 * logits * max(math.ceil(each / max(1, math.ceil(each / most))) for each in outputs)


@attrs.frozen
class _Place:
    """Where the peak can be.

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


def _places(model: Shape, rows: Rows, step: Step, static: float) -> list[_Place]:
    """The bytes at the few places of a step where the peak can be."""
    d, f, n, dp, layers = model.hidden, model.intermediate, rows.largest, step.dp, model.layers
    several = dp > 1 or step.offload is not None  # sharded over several, or as if it were
    weight, layer, outside = (
        model.words * d,
        model.largest,
        2.0 * (model.outside if several else model.words * model.hidden),
    )
    sparse, again = model.sparse > 0, step.checkpointing is not False
    one = saved_bytes(model, step.checkpointing, sparse=sparse)
    kept = saved_bytes(model, step.checkpointing, sparse=False) * (layers - model.sparse)
    kept += saved_bytes(model, step.checkpointing, sparse=True) * model.sparse
    here = 0.0 if step.offload else 1.0 / dp  # the part of the gradient that stays
    all_of_it = 4.0 * model.parameters * here
    before = all_of_it if rows.microbatches > 1 else 0.0  # of the micro-batches before
    base = static + outside
    copies = 2.0 * model.in_layers if not several and not again else 0.0  # of weights, which the backward pass needs
    # The last norm's input in float32, and normalised; the states that predict, and their gradient
    logits = 4.0 * weight + closed_logits(model, rows.each, step.memory)
    of_head = 6.0 * d * n + 4.0 * d * rows.outputs + logits
    # A layer's backward, while the next one is gathered and the gradient of the one before is reduced
    working = (2.0 * d + (8.0 * d * model.chosen if sparse else 4.0 * f)) * n
    working += 8.0 * layer + 2.0 * d * f * (not sparse) if several else 4.0 * layer
    if again:
        working += (saved_bytes(model, False, sparse=sparse) - one) * n
    if step.checkpointing == "selective":  # what is kept is not made again
        working -= (2.0 * model.queries + 2 * model.keys) * n
    each = 4.0 * model.in_layers * here if rows.microbatches == 1 else 0.0  # of the gradient, at the end
    layered = base + 2.0 * weight + working

    def place(name: str, size: float, gradients: float, head: float = 0.0) -> _Place:
        return _Place(name, size + gradients, gradients, head)

    forward = base + copies + n * kept + of_head + (2.0 * layer if several else 0.0)
    return [
        place("log-probabilities", forward, before, logits),
        place("backward of a layer", layered + copies + n * (kept if again else kept - one), before),
        # At the end nothing more is gathered; gradients of nearly all layers are there
        place("backward of the second layer", layered + n * 2 * one, before + each * (layers - 2) / layers),
        place(
            "backward of the first layer",
            layered - 2.0 * layer * several + n * one,
            before + each * (layers - 1) / layers,
        ),
        place(
            "the gradient of the embedding",
            base + (2.0 * outside if several else outside + 2.0 * weight),
            before + each,
        ),
        place("the optimizer's updates", static + orthogonalised(model, step.optimizer) * here, all_of_it),
    ]
