"""``nrl plan``: what a training step needs on a GPU, found out without one."""

import json
from pathlib import Path
from typing import Any, Literal

import attrs

from nrl.errors import ConfigError
from nrl.plan.gpus import GPUS, closed_parameters, estimate

__all__ = ["Planning", "main"]

_GIB = 2**30
_positive = attrs.validators.ge(1)


@attrs.frozen(kw_only=True)
class Planning:
    """What ``nrl plan`` reads.

    Args:
        model: a folder with ``config.json``, or such a file.
        gpu: the kind of device.
        dp: the number of processes that the model is sharded over.
        rows: of one process's batch.
        width: tokens of its longest row.
        shared: tokens of the prompt that all rows begin with.
        max_tokens: of a micro-batch.
        loss: of the step.
        dtype: in which the model computes.
        checkpointing: recompute activations.
        driven: drive the engine on fake tensors; false: closed forms alone, of dense models of the form of Qwen3.
        allowance: GiB for what a plan leaves out: fragmentation, and the buffers of NCCL and of libraries.
    """

    model: str
    gpu: Literal["a100", "h100", "h200", "b200"] = "h100"
    dp: int = attrs.field(default=1, validator=_positive)
    rows: int = attrs.field(default=2, validator=_positive)
    width: int = attrs.field(default=8192, validator=attrs.validators.ge(2))
    shared: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    max_tokens: int = attrs.field(default=16384, validator=_positive)
    loss: Literal["grpo", "sft"] = "grpo"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    checkpointing: bool | Literal["selective"] = False
    driven: bool = True
    allowance: float = 6.0


def main(cfg: Planning) -> None:
    """Print the plan.

    Raises:
        ConfigError: there is no such config, or this torch was not tested, or the step fails.
    """
    config, gpu = _config(cfg.model), GPUS[cfg.gpu]
    if not cfg.driven:
        count = closed_parameters(config)
        print(f"closed forms alone, which leave out activations: a model of {count / 1e9:.2f}e9 parameters")
        for name, size in (("parameters", 4), ("gradients", 4), ("moments", 8)):
            print(f"{name:<22}{count * size / cfg.dp / _GIB:10.2f} GiB a process")
        return
    from nrl.plan.driven import Step, drive

    names = ("dp", "rows", "width", "shared", "max_tokens", "loss", "dtype", "checkpointing")
    step = Step(config, capability=gpu.capability, **{name: getattr(cfg, name) for name in names})
    found = drive(step)
    for name in ("parameters", "gradients", "moments", "activations", "peak"):
        print(f"{name:<22}{found[name] / _GIB:10.2f} GiB" + (f" at {found['peak_at']}" if name == "peak" else ""))
    fits = found["peak"] + cfg.allowance * _GIB <= gpu.memory
    print(
        f"{'':<22}with {cfg.allowance:g} GiB more it {'fits' if fits else 'does not fit'} in {gpu.memory / 1e9:.0f} GB"
    )
    for name, size in found["collectives"].items():
        print(f"{'collective':<22}{size / _GIB:10.2f} GiB {name}")
    for name, flops in found["flops"].items():
        print(f"{'products':<22}{flops / 1e12:10.2f} TFLOP {name}")
    for line, flops in found["float32_products"].items():
        print(f"{'  of float32':<22}{flops / 1e12:10.2f} TFLOP {line}")
    for kernel, count in found["attention"].items():
        print(f"{'attention':<22}{count:10d} calls {kernel}")
    for kind, line, count in found["waits"]:
        print(f"{'wait or copy':<22}{count:10d} {kind}, {line}")
    speed = estimate(found, gpu, cfg.rows * cfg.width)
    print(
        f"estimate, not measured: {speed['tokens_per_second']:.0f} tokens/s a device, MFU {speed['mfu']:.0%}; from "
        f"{gpu.flops / 1e12:.0f} TFLOP/s bfloat16, {gpu.float32 / 1e12:g} float32, {gpu.bandwidth / 1e12:g} TB/s of "
        f"memory, {gpu.link / 1e9:.0f} GB/s of NVLink, nothing at once"
    )


def _config(model: str) -> dict[str, Any]:
    path = Path(model).expanduser()
    path = path / "config.json" if path.is_dir() else path
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"plan: model={model} has no config.json that can be read: {error}") from error
    return found
