"""The output of ``nrl plan``."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nrl.log import format_number
from nrl.ops.plan.gpus import Gpu, estimate
from nrl.runtime import Layout

__all__ = ["GIB", "describe_nearest", "describe_search", "print_report"]

GIB = 2**30


def print_report(
    estimated: Mapping[str, Any], step: Any, layout: Layout, gpu: Gpu, allowance: float, driven: bool
) -> None:
    """Print the memory and the time of one process's step.

    Args:
        estimated: by a drive, or closed forms.
        step: of the process.
        layout: of all processes.
        gpu: the device.
        allowance: bytes for what a plan leaves out.
        driven: whether it was a drive.
    """
    if not driven:
        owner = "this process" if "stage" in estimated else "a model"
        print(f"closed forms, not driven: {format_number(estimated['count'])} parameters of {owner}")
    for line in (
        *_describe_memory(estimated, gpu, allowance),
        *_describe_step(estimated),
        *_describe_stages(estimated),
    ):
        print(line)
    from nrl.ops.plan.analytic import row_stats

    speed = estimate(estimated, gpu, row_stats(step).tokens, layout.slots)
    rate = speed["tokens_per_second"] * layout.dp / layout.slots
    host = f"{gpu.host / 1e9:g} GB/s to the host, " if step.offload else ""
    print(
        f"estimate, not measured: {format_number(rate)} tokens/s a device, HFU {speed['hfu']:.0%}, "
        f"MFU {speed['mfu']:.0%}; from "
        f"{gpu.flops / 1e12:.0f} TFLOP/s bfloat16, {gpu.float32 / 1e12:g} float32, "
        f"{gpu.bandwidth / 1e12:g} TB/s of memory, {gpu.link / 1e9:.0f} GB/s of NVLink, "
        f"{gpu.network / 1e9:g} GB/s of network a device beyond 8, {host}half of attention's squares, nothing at once"
    )


def _describe_memory(estimated: Mapping[str, Any], gpu: Gpu, allowance: float) -> Iterator[str]:
    from nrl.ops.plan.search import excess_bytes, find_highest_stage

    peak_parts = estimated["at_peak"]
    at_peak = ", {:.2f} of them at the peak".format
    notes = {
        "gradients": at_peak(peak_parts["gradients"] / GIB),
        "activations": " at the peak",
        "log-probabilities": f" at the peak, {estimated['logprobs'] / GIB:.2f} at most",
        "peak": f" at {estimated['peak_at']}",
    }
    sizes = {**estimated, "log-probabilities": peak_parts["log-probabilities"]}
    for name in ("parameters", "gradients", "moments", "activations", "log-probabilities", "peak"):
        yield f"{name:<22}{sizes[name] / GIB:10.2f} GiB{notes.get(name, '')}"
    if estimated.get("host"):
        yield f"{'on the host':<22}{estimated['host'] / GIB:10.2f} GiB, parameters, gradients and moments"
    stage, _ = find_highest_stage(estimated)
    unsure, excess = estimated.get("unsure", 0.0), excess_bytes(estimated, gpu, allowance)
    fits = "fits" if excess <= 0 else f"does not fit, by {excess / GIB:.1f} GiB,"
    twice = f" and {unsure / GIB:.1f} GiB of activations, which may be twice as many," if unsure else ""
    yield f"{'':<22}with {allowance / GIB:g} GiB{twice} more it {fits} in {gpu.memory / GIB:.1f} GiB"
    stages = estimated.get("stages", {})
    for name, stage_sizes in stages.items():
        excess = excess_bytes(stage_sizes, gpu, allowance)
        if excess > 0:
            yield f"{'':<22}{name} does not fit, by {excess / GIB:.1f} GiB: peak {stage_sizes['peak'] / GIB:.2f} GiB"
    if stages and stage != "train":
        yield f"{'':<22}the most is held in {stage}, at {stages[stage]['peak_at']}"


def _describe_step(estimated: Mapping[str, Any]) -> Iterator[str]:
    for name, size in estimated["collectives"].items():
        yield f"{'collective':<22}{size / GIB:10.2f} GiB {name}"
    for name, flops in estimated["flops"].items():
        yield f"{'products':<22}{flops / 1e12:10.2f} TFLOP {name}"
    for line, flops in estimated.get("float32_products", {}).items():
        yield f"{'  of float32':<22}{flops / 1e12:10.2f} TFLOP {line}"
    for kernel, count in estimated.get("attention", {}).items():
        yield f"{'attention':<22}{count:10d} calls {kernel}"
    for kind, line, count in estimated.get("waits", ()):
        yield f"{'wait or copy':<22}{count:10d} {kind}, {line}"
    for name, flops in estimated.get("recomputed", {}).items():
        yield f"{'computed again':<22}{flops / 1e12:10.2f} TFLOP {name}"
    if estimated.get("bubble"):
        yield f"{'bubble':<22}{estimated['bubble']:10.0%} of the time"


def _describe_stages(estimated: Mapping[str, Any]) -> Iterator[str]:
    for name, stage in estimated.get("stages", {}).items():
        copied = "".join(f", {size / GIB:.2f} GiB copied {direction}" for direction, size in stage["copied"].items())
        waits = sum(count for _, _, count in stage["waits"])
        yield (
            f"{'peak of ' + name:<22}{stage['peak'] / GIB:10.2f} GiB, then {stage['held'] / GIB:.2f}; "
            f"{waits} waits and copies{copied}"
        )
        for kind, line, count in stage["waits"] if name != "train" else ():  # The waits of the step are printed above.
            yield f"{'  wait or copy':<22}{count:10d} {kind}, {line}"


def describe_nearest(fitting: Any, limit: int) -> str:
    """Describe the nearest layout that fits on up to ``limit`` GPUs."""
    if fitting is None:
        return f"no layout of either trainer fits on up to {limit} GPUs"
    gib = fitting.peak / GIB, -fitting.over / GIB
    sizes = f"peak {gib[0]:.1f} GiB, {gib[1]:.1f} GiB to spare"
    return f"the nearest that fits, by closed forms: {fitting.settings}  ({sizes})"


def describe_search(
    subject: str,
    ranked: Sequence[Any],
    best: Sequence[Any],
    driven: Mapping[int, Any],
    held: Mapping[str, Any],
    gpu: Gpu,
    allowance: float,
) -> Iterator[str]:
    """Yield the lines of a search's table.

    Args:
        subject: was ranked.
        ranked: candidates, ranked.
        best: those that were to be driven.
        driven: what drives say of them, by identity.
        held: what was not searched.
        gpu: the device.
        allowance: GiB for what a plan leaves out.
    """
    fitting, rest = [item for item in ranked if item.fits], [item for item in ranked if not item.fits]
    yield (
        f"{subject}; {len(fitting)} fit in {gpu.memory / GIB:.1f} GiB with {allowance:g} GiB to spare. By closed "
        "forms, and driven where that is said; tokens/s of a device are estimated, not measured"
    )
    if held:
        yield "held: " + ", ".join(f"{name}={value}" for name, value in held.items())
    yield f"{'peak GiB':>9} {'over GiB':>9} {'tokens/s':>9}  layout"
    chosen = {id(item) for item in (*fitting[:8], *best)}  # the fastest and the simulated layouts
    for item in [*(item for item in fitting if id(item) in chosen), *rest[:4]]:
        yield _format_candidate(item, "")
        if id(item) in driven:
            yield _format_candidate(driven[id(item)], "  driven")


def _format_candidate(item: Any, suffix: str) -> str:
    over = "" if item.fits else f"{item.over / GIB:.1f}"
    stage = "" if item.fits or item.stage == "train" else f", in {item.stage}"
    return (
        f"{item.peak / GIB:9.1f} {over:>9} {format_number(item.tokens_per_second):>9}  {item.settings}{suffix}{stage}"
    )
