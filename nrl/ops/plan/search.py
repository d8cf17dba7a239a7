"""Layouts of a number of GPUs, ranked by closed forms; and, of one that does not fit, the nearest that does.

What is held is a constraint: a trainer, axes of the layout, checkpointing, tokens of a micro-batch. The rest is
searched.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from nrl.errors import ConfigError
from nrl.ops.plan.analytic import closed, rows_of
from nrl.ops.plan.analytic_megatron import closed_megatron
from nrl.ops.plan.gpus import Gpu, estimate
from nrl.ops.plan.optimizer_cost import of_megatron
from nrl.ops.plan.shapes import shape
from nrl.ops.plan.simulate import Step
from nrl.runtime import Layout

__all__ = [
    "AXES",
    "MOST",
    "Candidate",
    "candidate",
    "candidates",
    "highest",
    "layouts",
    "megatron_candidates",
    "nearest",
    "over",
    "ranked",
]

AXES = ("dp", "shard", "tp", "cp", "pp", "ep", "vp")
MOST = 1024
"""GPUs up to which a layout that fits is looked for, if not more were asked for."""
_NODE = 8
"""GPUs that NVLink joins: tp x cp and ep, which send the most, are not larger unless they are held."""


@attrs.frozen(kw_only=True)
class Candidate:
    """A layout with its step, and what closed forms or a drive say of it.

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
        """Whether it fits."""
        return self.over <= 0

    @property
    def settings(self) -> str:
        """As arguments of ``nrl plan``, and of programs."""
        axes = {name: getattr(self.layout, name) for name in AXES if name != "dp"}
        said = [f"layout.{name}={size}" for name, size in axes.items() if size is not None and size != 1]
        more = [f"trainer={self.trainer}", f"dp={self.layout.dp}", *said]
        more += [f"rows={self.step.rows}", f"max_tokens={self.step.max_tokens}"]
        more += [f"checkpointing={str(self.step.checkpointing).lower()}"]
        return " ".join(more + ([f"offload={self.step.offload}"] if self.step.offload else []))


def highest(counted: Mapping[str, Any]) -> tuple[str, float]:
    """The part of a process's life that needs the most memory, and the bytes that it needs.

    Args:
        counted: by a drive; of closed forms, which know ``train`` alone.
    """
    stages = counted.get("stages") or {"train": counted}
    name = max(stages, key=lambda each: stages[each]["peak"])
    return name, stages[name]["peak"]


def over(counted: Mapping[str, Any], gpu: Gpu, allowance: float) -> float:
    """The bytes by which the most that is held does not fit, with what is unsure of it and what a plan leaves out."""
    return float(highest(counted)[1] + counted.get("unsure", 0.0) + allowance - gpu.memory)


def candidate(
    step: Step, gpu: Gpu, allowance: float, layout: Layout | None = None, counted: dict[str, Any] | None = None
) -> Candidate:
    """What is known of one layout.

    Args:
        step: of one process.
        gpu: the device.
        allowance: bytes for what a plan leaves out.
        layout: of Megatron's trainer; None: of the torch trainer, of ``step.dp`` processes.
        counted: by a drive; None: closed forms.
    """
    found = counted
    if found is None:
        found = closed(step) if layout is None else closed_megatron(step, layout)
    tokens = rows_of(step).tokens / (1 if layout is None else layout.tp * layout.pp * layout.cp)
    speed = estimate(found, gpu, tokens, step.dp if layout is None else layout.slots)
    stage, peak = highest(found)
    return Candidate(
        trainer="fsdp" if layout is None else "megatron",
        layout=layout or Layout(dp=step.dp),
        step=step,
        peak=peak,
        stage=stage,
        over=over(found, gpu, allowance),
        tokens_per_second=speed["tokens_per_second"],
    )


def layouts(
    step: Step, gpu: Gpu, allowance: float, gpus: int, held: Mapping[str, Any] | None = None
) -> list[Candidate]:
    """All layouts of so many GPUs, of both trainers, with the rows of ``step.rows`` and ``step.dp`` in all.

    Args:
        step: of one process; what is not searched is as it has it.
        gpu: the device.
        allowance: bytes for what a plan leaves out.
        gpus: how many there are.
        held: what is not searched: ``trainer``, `AXES`, ``checkpointing``, ``max_tokens``, with their values.

    Raises:
        ConfigError: there is none.
    """
    given = held or {}
    both = {"fsdp": candidates, "megatron": megatron_candidates}
    found = [
        each
        for trainer, every in both.items()
        if given.get("trainer", trainer) == trainer
        for each in every(step, gpu, allowance, gpus, given)
    ]
    if not found:
        said = ", ".join(f"{name}={value}" for name, value in given.items())
        raise ConfigError(
            f"plan: found no layout of gpus={gpus} for {step.rows * step.dp} rows (rows={step.rows} of each of "
            f"dp={step.dp}) that has {said or 'both trainers to choose from'}; each process gets as many rows. Give "
            "another number of rows or GPUs, or leave out one of these settings"
        )
    return found


def candidates(
    step: Step, gpu: Gpu, allowance: float, gpus: int, held: Mapping[str, Any] | None = None
) -> Iterator[Candidate]:
    """Those of the torch trainer; none, where rows cannot be dealt evenly.

    It shards over all of dp, so what is left are checkpointing and the rows of a micro-batch: of all numbers of
    micro-batches, the one with the fewest rows in each.
    """
    given = held or {}
    rows, rest = divmod(step.rows * step.dp, gpus)
    axes = _axes(Layout(dp=gpus, shard=gpus)).items()
    if rest or any((given.get(axis) or size) != size for axis, size in axes):  # shard=None: all of dp
        return
    each = [given["max_tokens"]] if "max_tokens" in given else [n * step.width for n in _shares(rows)]
    for max_tokens in each:
        for checkpointing in _choice(given, "checkpointing", (False, "selective", True)):
            made = attrs.evolve(step, dp=gpus, rows=rows, max_tokens=max_tokens, checkpointing=checkpointing)
            yield candidate(made, gpu, allowance)


def megatron_candidates(
    step: Step, gpu: Gpu, allowance: float, gpus: int, held: Mapping[str, Any] | None = None
) -> Iterator[Candidate]:
    """Those of Megatron's trainer that it takes, with one row in a micro-batch; none, where it takes no such step."""
    given, total = held or {}, step.rows * step.dp
    if step.offload or step.moments not in (None, 8) or not of_megatron(step.optimizer):
        return
    for layout in _layouts(shape(step.model), gpus, given):
        rows, rest = divmod(total, layout.dp)
        if rest:
            continue
        for checkpointing in _choice(given, "checkpointing", (False, True)):
            made = attrs.evolve(
                step, dp=layout.dp, rows=rows, max_tokens=given.get("max_tokens", step.width),
                checkpointing=checkpointing,
            )  # fmt: skip
            yield candidate(made, gpu, allowance, layout)


def _layouts(model: Any, gpus: int, given: Mapping[str, Any]) -> Iterator[Layout]:
    """Of Megatron, which splits heads of keys, MLPs, layers and experts into equal parts."""
    split = math.gcd(model.groups, model.expert if model.sparse == model.layers else model.intermediate)
    for tp in _choice(given, "tp", [n for n in _divisors(split) if n <= _NODE]):
        for cp in _choice(given, "cp", range(1, _NODE // min(tp, _NODE) + 1)):
            for pp in _choice(given, "pp", _divisors(model.layers)):
                dp, rest = divmod(gpus, tp * cp * pp)
                if rest or not dp or given.get("dp", dp) != dp or split % tp or model.layers % pp:
                    continue
                near = _NODE // min(tp * cp, _NODE)  # copies of the model within a machine
                shards = [None] + [near] * (1 < near < dp and dp % near == 0)
                experts = [n for n in _divisors(model.experts or 1) if n <= _NODE]
                for shard in _choice(given, "shard", shards):
                    for ep in _choice(given, "ep", experts):
                        for vp in _choice(given, "vp", _divisors(model.layers // pp) if pp > 1 else [1]):
                            if _possible(model, dp, shard, tp * cp * dp, ep, pp, vp):
                                yield Layout(dp=dp, shard=shard, tp=tp, cp=cp, pp=pp, ep=ep, vp=vp)


def _possible(model: Any, dp: int, shard: int | None, around: int, ep: int, pp: int, vp: int) -> bool:
    """Whether axes fit one another, and the model."""
    if dp % (shard or 1) or around % ep or (model.experts or 1) % ep:
        return False
    return vp == 1 or (pp > 1 and model.layers % (pp * vp) == 0)


def _choice(given: Mapping[str, Any], name: str, others: Sequence[Any]) -> Sequence[Any]:
    return [given[name]] if name in given else others


def _axes(layout: Layout) -> dict[str, int | None]:
    return {name: getattr(layout, name) for name in AXES}


def _divisors(n: int) -> list[int]:
    return [each for each in range(1, n + 1) if n % each == 0]


def _shares(rows: int) -> list[int]:
    """For each number of micro-batches that there can be, the fewest rows that one has to take."""
    return sorted({-(-rows // times) for times in range(1, rows + 1)})


def ranked(found: Sequence[Candidate]) -> list[Candidate]:
    """Those that fit, the fastest first; then the others, by how much they do not fit."""
    return sorted(
        found, key=lambda each: (not each.fits, -each.tokens_per_second if each.fits else each.over, each.peak)
    )


def nearest(asked: Candidate, gpu: Gpu, allowance: float, most: int = MOST) -> Candidate | None:
    """The layout that fits and is nearest to one that does not.

    Nearest has the trainer that was asked for, and else the other one; with the fewest changes of axes, of
    checkpointing and of the micro-batch; and of these it is the fastest. Only where nothing fits on as many GPUs, twice
    as many are looked at, up to ``most``, with as many rows for each of dp. As many as were asked for are always
    looked at.

    Returns:
        None: none fits.
    """
    gpus, grown = asked.layout.slots, asked.step
    most = max(most, gpus)
    every = {"fsdp": candidates, "megatron": megatron_candidates}
    while gpus <= most:
        for trainer in sorted(every, key=lambda each: each != asked.trainer):
            found = every[trainer](grown, gpu, allowance, gpus)
            if fitting := [each for each in found if each.fits]:
                return min(fitting, key=lambda each: (_changes(asked, each), -each.tokens_per_second))
        gpus, grown = 2 * gpus, attrs.evolve(grown, dp=2 * grown.dp)
    return None


def _changes(one: Candidate, other: Candidate) -> int:
    """In how many settings they differ; dp is what other axes leave, and as many rows in a micro-batch are the same."""
    axes, others = _axes(one.layout), _axes(other.layout)
    steps = one.step, other.step
    rows = [min(each.rows, each.max_tokens // each.width) for each in steps]
    again = steps[0].checkpointing != steps[1].checkpointing
    return sum(axes[name] != others[name] for name in AXES if name != "dp") + again + (rows[0] != rows[1])
