"""Search of layouts for a number of GPUs, ranked by closed forms, and of the nearest layout that fits.

What is held is a constraint: a trainer, axes of the layout, checkpointing, tokens of a micro-batch. The rest is
searched.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from nrl.errors import ConfigError
from nrl.ops.plan.analytic import estimate_step, row_stats
from nrl.ops.plan.analytic_megatron import estimate_megatron
from nrl.ops.plan.gpus import Gpu, estimate
from nrl.ops.plan.optimizer_cost import is_megatrons
from nrl.ops.plan.shapes import read_shape
from nrl.ops.plan.simulate import Step
from nrl.runtime import Layout

__all__ = [
    "AXES",
    "MAX_GPUS",
    "Candidate",
    "excess_bytes",
    "find_highest_stage",
    "find_nearest",
    "fsdp_candidates",
    "list_layouts",
    "make_candidate",
    "megatron_candidates",
    "rank",
]

AXES = ("dp", "shard", "tp", "cp", "pp", "ep", "vp")
MAX_GPUS = 1024
"""The most GPUs for which a fitting layout is searched, unless more were requested."""
_NODE = 8
"""GPUs that NVLink joins: tp x cp and ep, which send the most, are not larger unless they are held."""


@attrs.frozen(kw_only=True)
class Candidate:
    """A layout with its step, and its estimate by closed forms or a simulation.

    Args:
        trainer: of `nrl.backends.TRAINERS`.
        layout: of all GPUs.
        step: of one process.
        peak: bytes at once, without the allowance, in the part of a process's life that has the most.
        stage: which part that is; closed forms know ``train`` alone.
        over: bytes by which it does not fit; at most 0 where it fits.
        tokens_per_second: of a device, estimated.
    """

    trainer: str
    layout: Layout
    step: Step
    peak: float
    stage: str
    over: float
    tokens_per_second: float

    @property
    def fits(self) -> bool:
        """True if the layout fits."""
        return self.over <= 0

    @property
    def settings(self) -> str:
        """Arguments of ``nrl plan``, and of programs."""
        axes = {name: getattr(self.layout, name) for name in AXES if name != "dp"}
        axis_settings = [f"layout.{name}={size}" for name, size in axes.items() if size is not None and size != 1]
        settings = [f"trainer={self.trainer}", f"dp={self.layout.dp}", *axis_settings]
        settings += [f"rows={self.step.rows}", f"max_tokens={self.step.max_tokens}"]
        settings += [f"checkpointing={str(self.step.checkpointing).lower()}"]
        return " ".join(settings + ([f"offload={self.step.offload}"] if self.step.offload else []))


def find_highest_stage(counted: Mapping[str, Any]) -> tuple[str, float]:
    """Return the stage that needs the most memory, and its bytes.

    Args:
        counted: by a drive; of closed forms, which know ``train`` alone.
    """
    stages = counted.get("stages") or {"train": counted}
    name = max(stages, key=lambda each: stages[each]["peak"])
    return name, stages[name]["peak"]


def excess_bytes(counted: Mapping[str, Any], gpu: Gpu, allowance: float) -> float:
    """Return the bytes by which the peak does not fit, with its uncertainty and the allowance."""
    return float(find_highest_stage(counted)[1] + counted.get("unsure", 0.0) + allowance - gpu.memory)


def make_candidate(
    step: Step, gpu: Gpu, allowance: float, layout: Layout | None = None, counted: dict[str, Any] | None = None
) -> Candidate:
    """Estimate one layout.

    Args:
        step: of one process.
        gpu: the device.
        allowance: bytes for what a plan leaves out.
        layout: of Megatron's trainer; None: of the torch trainer, of ``step.dp`` processes.
        counted: by a drive; None: closed forms.
    """
    estimated = counted
    if estimated is None:
        estimated = estimate_step(step) if layout is None else estimate_megatron(step, layout)
    tokens = row_stats(step).tokens / (1 if layout is None else layout.tp * layout.pp * layout.cp)
    speed = estimate(estimated, gpu, tokens, step.dp if layout is None else layout.slots)
    stage, peak = find_highest_stage(estimated)
    return Candidate(
        trainer="fsdp" if layout is None else "megatron",
        layout=layout or Layout(dp=step.dp),
        step=step,
        peak=peak,
        stage=stage,
        over=excess_bytes(estimated, gpu, allowance),
        tokens_per_second=speed["tokens_per_second"],
    )


def list_layouts(
    step: Step, gpu: Gpu, allowance: float, gpus: int, held: Mapping[str, Any] | None = None
) -> list[Candidate]:
    """Return all layouts of ``gpus`` GPUs, of both trainers, with ``step.rows * step.dp`` rows in all.

    Args:
        step: of one process; what is not searched is as it has it.
        gpu: the device.
        allowance: bytes for what a plan leaves out.
        gpus: how many there are.
        held: what is not searched: ``trainer``, `AXES`, ``checkpointing``, ``max_tokens``, with their values.

    Raises:
        ConfigError: there is none.
    """
    constraints = held or {}
    generators = {"fsdp": fsdp_candidates, "megatron": megatron_candidates}
    results = [
        item
        for trainer, generate in generators.items()
        if constraints.get("trainer", trainer) == trainer
        for item in generate(step, gpu, allowance, gpus, constraints)
    ]
    if not results:
        constraint_texts = ", ".join(f"{name}={value}" for name, value in constraints.items())
        raise ConfigError(
            f"plan: found no layout of gpus={gpus} for {step.rows * step.dp} rows (rows={step.rows} of each of "
            f"dp={step.dp}) that has {constraint_texts or 'both trainers to choose from'}; each process gets as many "
            "rows. Give another number of rows or GPUs, or leave out one of these settings"
        )
    return results


def fsdp_candidates(
    step: Step, gpu: Gpu, allowance: float, gpus: int, held: Mapping[str, Any] | None = None
) -> Iterator[Candidate]:
    """Yield candidates of the torch trainer; none, if rows cannot be divided evenly.

    It shards over all of dp, so what is left are checkpointing and the rows of a micro-batch: of all numbers of
    micro-batches, the one with the fewest rows in each.
    """
    constraints = held or {}
    rows, rest = divmod(step.rows * step.dp, gpus)
    axes = _axes(Layout(dp=gpus, shard=gpus)).items()
    if rest or any((constraints.get(axis) or size) != size for axis, size in axes):  # shard=None: all of dp
        return
    token_limits = (
        [constraints["max_tokens"]] if "max_tokens" in constraints else [n * step.width for n in _shares(rows)]
    )
    for max_tokens in token_limits:
        for checkpointing in _choose(constraints, "checkpointing", (False, "selective", True)):
            new_step = attrs.evolve(step, dp=gpus, rows=rows, max_tokens=max_tokens, checkpointing=checkpointing)
            yield make_candidate(new_step, gpu, allowance)


def megatron_candidates(
    step: Step, gpu: Gpu, allowance: float, gpus: int, held: Mapping[str, Any] | None = None
) -> Iterator[Candidate]:
    """Yield candidates of Megatron's trainer, with one row in a micro-batch; none, if it does not support the step."""
    constraints, total = held or {}, step.rows * step.dp
    if step.offload or step.moments not in (None, 8) or not is_megatrons(step.optimizer):
        return
    for layout in _megatron_layouts(read_shape(step.model), gpus, constraints):
        rows, rest = divmod(total, layout.dp)
        if rest:
            continue
        for checkpointing in _choose(constraints, "checkpointing", (False, True)):
            new_step = attrs.evolve(
                step, dp=layout.dp, rows=rows, max_tokens=constraints.get("max_tokens", step.width),
                checkpointing=checkpointing,
            )  # fmt: skip
            yield make_candidate(new_step, gpu, allowance, layout)


def _megatron_layouts(model: Any, gpus: int, constraints: Mapping[str, Any]) -> Iterator[Layout]:
    """Yield layouts of Megatron, which splits heads of keys, MLPs, layers and experts into equal parts."""
    split = math.gcd(model.groups, model.expert if model.sparse == model.layers else model.intermediate)
    for tp in _choose(constraints, "tp", [n for n in _divisors(split) if n <= _NODE]):
        for cp in _choose(constraints, "cp", range(1, _NODE // min(tp, _NODE) + 1)):
            for pp in _choose(constraints, "pp", _divisors(model.layers)):
                dp, rest = divmod(gpus, tp * cp * pp)
                if rest or not dp or constraints.get("dp", dp) != dp or split % tp or model.layers % pp:
                    continue
                near = _NODE // min(tp * cp, _NODE)  # copies of the model within a machine
                shards = [None] + [near] * (1 < near < dp and dp % near == 0)
                experts = [n for n in _divisors(model.experts or 1) if n <= _NODE]
                for shard in _choose(constraints, "shard", shards):
                    for ep in _choose(constraints, "ep", experts):
                        for vp in _choose(constraints, "vp", _divisors(model.layers // pp) if pp > 1 else [1]):
                            if _is_possible(model, dp, shard, tp * cp * dp, ep, pp, vp):
                                yield Layout(dp=dp, shard=shard, tp=tp, cp=cp, pp=pp, ep=ep, vp=vp)


def _is_possible(model: Any, dp: int, shard: int | None, around: int, ep: int, pp: int, vp: int) -> bool:
    """Return whether axes fit one another, and the model."""
    if dp % (shard or 1) or around % ep or (model.experts or 1) % ep:
        return False
    return vp == 1 or (pp > 1 and model.layers % (pp * vp) == 0)


def _choose(constraints: Mapping[str, Any], name: str, options: Sequence[Any]) -> Sequence[Any]:
    return [constraints[name]] if name in constraints else options


def _axes(layout: Layout) -> dict[str, int | None]:
    return {name: getattr(layout, name) for name in AXES}


def _divisors(n: int) -> list[int]:
    return [divisor for divisor in range(1, n + 1) if n % divisor == 0]


def _shares(rows: int) -> list[int]:
    """Return, for each possible number of micro-batches, the fewest rows of a micro-batch."""
    return sorted({-(-rows // times) for times in range(1, rows + 1)})


def rank(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Sort candidates: layouts that fit by speed, then the others by the bytes that do not fit."""
    return sorted(
        candidates, key=lambda each: (not each.fits, -each.tokens_per_second if each.fits else each.over, each.peak)
    )


def find_nearest(requested: Candidate, gpu: Gpu, allowance: float, limit: int = MAX_GPUS) -> Candidate | None:
    """Find the fitting layout that is nearest to one that does not fit.

    Nearest has the trainer that was asked for, and else the other one; with the fewest changes of axes, of
    checkpointing and of the micro-batch; and of these it is the fastest. Only where nothing fits on as many GPUs, twice
    as many are looked at, up to ``limit``, with as many rows for each of dp. As many as were asked for are always
    looked at.

    Returns:
        None: none fits.
    """
    gpus, grown = requested.layout.slots, requested.step
    limit = max(limit, gpus)
    generators = {"fsdp": fsdp_candidates, "megatron": megatron_candidates}
    while gpus <= limit:
        for trainer in sorted(generators, key=lambda each: each != requested.trainer):
            results = generators[trainer](grown, gpu, allowance, gpus)
            if fitting := [item for item in results if item.fits]:
                return min(fitting, key=lambda each: (_count_changes(requested, each), -each.tokens_per_second))
        gpus, grown = 2 * gpus, attrs.evolve(grown, dp=2 * grown.dp)
    return None


def _count_changes(first: Candidate, other: Candidate) -> int:
    """Count the settings that differ; dp follows from other axes, and equal rows in a micro-batch are no change."""
    axes, other_axes = _axes(first.layout), _axes(other.layout)
    steps = first.step, other.step
    rows = [min(step.rows, step.max_tokens // step.width) for step in steps]
    checkpointing_differs = steps[0].checkpointing != steps[1].checkpointing
    return (
        sum(axes[name] != other_axes[name] for name in AXES if name != "dp")
        + checkpointing_differs
        + (rows[0] != rows[1])
    )
