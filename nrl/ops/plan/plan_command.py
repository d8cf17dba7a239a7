"""``nrl plan``: estimate the memory and the time of a training step without a GPU."""

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

from nrl import config
from nrl.arguments import checked
from nrl.backends.training.optim.optimizers import Optimizer
from nrl.errors import ConfigError, ModelError
from nrl.ops.plan.gpus import GPUS, Gpu
from nrl.ops.plan.report import GIB, describe_nearest, describe_search, print_report
from nrl.runtime import Layout

__all__ = ["Planning", "main", "strip_dashes"]

_DRIVEN = 3
"""Number of the best layouts of a search that are simulated."""
_UNABLE = ("fake CUDA tensors are tested with", "does not let a process change its tables")
"""Parts of errors for a version of torch, or a system, that cannot be simulated."""
_MOMENTS: Mapping[float, Literal["bfloat16"] | None] = {8.0: None, 4.0: "bfloat16"}
"""The moments of AdamW, by bytes for a parameter."""
_positive = attrs.validators.ge(1)


@checked("plan")
@attrs.frozen(kw_only=True)
class Planning:
    """Settings of ``nrl plan``.

    Args:
        model: a folder with ``config.json``, such a file, a name on the Hugging Face hub, or a config itself.
        gpu: the kind of device.
        trainer: of `nrl.backends.TRAINERS`; of Megatron's there are closed forms alone.
        dp: the number of processes that the model is sharded over.
        layout: all axes; dp is the short form.
        rank: of the process that is driven, from 0.
        rows: of one process's batch.
        width: tokens of its longest row.
        shared: tokens of the prompt that all rows begin with.
        max_tokens: of a micro-batch.
        loss: of the step.
        dtype: in which the model computes.
        checkpointing: recompute activations.
        offload: "cpu": parameters, gradients and moments are on the host.
        optimizer: which one; its rate and its schedule do not matter.
        moments: bytes that the optimizer keeps for a parameter; None: what is known of it. Of AdamW 8 are float32 and 4
            bfloat16; other numbers than these have closed forms alone.
        driven: drive the engine on fake tensors; false: closed forms alone.
        search: rank layouts of as many GPUs, of both trainers, for as many rows in all; the best are driven. What is
            set is held: trainer, axes of the layout but for dp, checkpointing, max_tokens, offload, the optimizer.
        gpus: how many GPUs a search is over; with it, dp is held, too.
        allowance: GiB for what a plan leaves out: fragmentation, and the buffers of NCCL and of libraries.
    """

    model: str | dict[str, Any]
    gpu: Literal["a100", "h100", "h200", "b200"] = "h100"
    trainer: Literal["fsdp", "megatron"] = "fsdp"
    dp: int = attrs.field(default=1, validator=_positive)
    layout: Layout = config.derived(lambda cfg: Layout(cfg.dp))
    rank: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    rows: int = attrs.field(default=2, validator=_positive)
    width: int = attrs.field(default=8192, validator=attrs.validators.ge(2))
    shared: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    max_tokens: int = attrs.field(default=16384, validator=_positive)
    loss: Literal["grpo", "sft"] = "grpo"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    checkpointing: bool | Literal["selective"] = False
    offload: Literal["cpu"] | None = None
    optimizer: Optimizer = Optimizer()
    moments: float | None = attrs.field(default=None, validator=attrs.validators.optional(attrs.validators.ge(0)))
    driven: bool = True
    search: bool = False
    gpus: int = config.derived(lambda cfg: cfg.layout.slots, validator=_positive)
    allowance: float = attrs.field(default=6.0, validator=attrs.validators.ge(0))


def strip_dashes(settings: Sequence[str]) -> list[str]:
    """Rewrite ``--gpu h100`` and ``--gpu=h100`` as ``gpu=h100``, and ``--search`` as ``search=true``.

    This applies to keys of `Planning`. Other options stay as they are, for `nrl.config.load` to explain.

    Raises:
        ConfigError: a value is missing.

    >>> strip_dashes(["FOLDER", "--gpu", "h100", "--search", "--layout.tp=2"])
    ['FOLDER', 'gpu=h100', 'search=true', 'layout.tp=2']
    """
    kinds = {field.alias: field.type for field in attrs.fields(Planning)}
    settings_found, remaining = list[str](), list(settings)
    while remaining:
        key, equals, value = remaining.pop(0).partition("=")
        name = key.removeprefix("--")
        if not key.startswith("--") or name.partition(".")[0] not in kinds:
            settings_found.append(key + equals + value)
            continue
        if not equals and kinds[name.partition(".")[0]] is bool:
            value = "true"
        elif not equals:
            if not remaining or remaining[0].startswith("-") or "=" in remaining[0]:
                raise ConfigError(f"plan: {key} has no value; write {name}=VALUE, or {key} VALUE")
            value = remaining.pop(0)
        settings_found.append(f"{name}={value}")
    return settings_found


def main(cfg: Planning, keys_set: Collection[str] = ()) -> None:
    """Print the plan, or the results of a search.

    Args:
        cfg: of what.
        keys_set: the keys that somebody has set, as `nrl.config.given_keys` has them; a search holds what they say.

    Raises:
        ConfigError: there is no such config, or the step fails.
        ModelError: a closed form was asked for of a model of another family.
    """
    gpu, allowance = GPUS[cfg.gpu], cfg.allowance * GIB
    if cfg.rank >= cfg.layout.dp:
        raise ConfigError(f"plan: found rank={cfg.rank} of dp={cfg.layout.dp} processes; give one from 0 to the last")
    from nrl.ops.plan.analytic import row_stats
    from nrl.ops.plan.simulate import Step

    optimizer, moments = _optimizer(cfg)
    if cfg.rank and (cfg.search or not cfg.driven or cfg.trainer == "megatron" or moments is not None):
        raise ConfigError(
            f"plan: found rank={cfg.rank}, and closed forms are of any process; leave rank= out, or drive the torch "
            "trainer without search=true (driven=true)"
        )
    names = ("rank", "rows", "width", "shared", "max_tokens", "loss", "dtype", "checkpointing", "offload")
    step = Step(
        _read_config(cfg.model), dp=cfg.layout.dp, capability=gpu.capability, memory=int(gpu.memory),
        optimizer=optimizer, moments=moments, **{name: getattr(cfg, name) for name in names},
    )  # fmt: skip
    row_stats(step)  # Refuse impossible rows before the simulation.
    if cfg.search:
        _search(cfg, step, gpu, allowance, frozenset(keys_set))
        return
    layout = cfg.layout if cfg.trainer == "megatron" else None
    if layout is None and cfg.layout not in (Layout(cfg.layout.dp), Layout(cfg.layout.dp, shard=cfg.layout.dp)):
        raise ConfigError(
            f"plan: found {cfg.layout}; trainer=fsdp shards over dp alone, and all of it. Give trainer=megatron"
        )
    estimate, driven = _estimate(cfg, step, layout)
    print_report(estimate, step, cfg.layout, gpu, allowance, driven)
    from nrl.ops.plan.search import MAX_GPUS, find_nearest, make_candidate

    requested = make_candidate(step, gpu, allowance, layout, estimate)
    if requested.fits:
        return
    try:
        fitting = find_nearest(requested, gpu, allowance)
    except (ConfigError, ModelError) as error:
        print(f"the nearest layout that fits is not known: {error}")
    else:
        print(describe_nearest(fitting, max(MAX_GPUS, cfg.layout.slots)))


def _optimizer(cfg: Planning) -> tuple[Optimizer, float | None]:
    """Return the optimizer to simulate, and its bytes for a parameter, if they are all that is known."""
    if cfg.moments is not None and cfg.moments in _MOMENTS and cfg.optimizer.kind == "adamw":
        return attrs.evolve(cfg.optimizer, moments=_MOMENTS[cfg.moments]), None
    return cfg.optimizer, cfg.moments


def _estimate(cfg: Planning, step: Any, layout: Layout | None) -> tuple[dict[str, Any], bool]:
    """Estimate a step, and return whether it was simulated; closed forms stand in if this torch cannot be."""
    from nrl.ops.plan import fake_cuda
    from nrl.ops.plan.analytic import estimate_step
    from nrl.ops.plan.analytic_megatron import estimate_megatron
    from nrl.ops.plan.simulate import simulate_step

    if layout is not None:
        print("closed forms of Megatron's trainer, which is not driven")
        return estimate_megatron(step, layout), False
    if not cfg.driven or step.moments is not None:
        return estimate_step(step), False
    try:
        fake_cuda.check_torch()
        print("plan: driving two steps on fake tensors; ten seconds to minutes", file=sys.stderr, flush=True)
        return simulate_step(step), True
    except ConfigError as error:
        if not any(text in str(error) for text in _UNABLE):
            raise
        print(f"{str(error).splitlines()[-1].strip()}\nso these are closed forms", *["of any process"] * (cfg.rank > 0))
    return estimate_step(step), False


def _search(cfg: Planning, step: Any, gpu: Gpu, allowance: float, keys_set: frozenset[str]) -> None:
    from nrl.ops.plan.search import AXES, list_layouts, make_candidate, rank

    of_dp = not keys_set.isdisjoint(("dp", "layout.dp"))
    if "gpus" in keys_set and not of_dp:  # The rows are per GPU.
        step = attrs.evolve(step, dp=cfg.gpus)
    names = [axis for axis in AXES if f"layout.{axis}" in keys_set and axis != "dp"]
    held = {axis: getattr(cfg.layout, axis) for axis in (["dp"] if "gpus" in keys_set and of_dp else []) + names}
    held |= {name: getattr(cfg, name) for name in ("trainer", "checkpointing", "max_tokens") if name in keys_set}
    ranked_candidates = rank(list_layouts(step, gpu, allowance, cfg.gpus, held))
    best = [item for item in ranked_candidates if item.fits and item.trainer == "fsdp"][:_DRIVEN]
    driven = dict[int, Any]()
    for item in best if cfg.driven else ():
        estimate, is_driven = _estimate(cfg, item.step, None)
        if is_driven:
            driven[id(item)] = make_candidate(item.step, gpu, allowance, counted=estimate)
    subject = (
        f"{len(ranked_candidates)} layouts of {cfg.gpus} GPUs for {step.rows * step.dp} rows of {cfg.width} tokens"
    )
    for line in describe_search(subject, ranked_candidates, best, driven, held, gpu, cfg.allowance):
        print(line)


def _read_config(model: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return all fields of a config; no weights are read."""
    from nrl.backends import Model
    from nrl.backends.models.loading import load_config

    source: Any = model
    if isinstance(model, str) and (path := Path(model).expanduser()).exists():
        path = path / "config.json" if path.is_dir() else path
        try:
            source = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"plan: model={model} has no config.json that can be read: {error}") from error
    fields: dict[str, Any] = load_config(Model(source))[0].to_dict()
    return {name: value for name, value in fields.items() if name not in ("dtype", "torch_dtype")}
