"""What ``nrl plan`` prints."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nrl.log import format_number
from nrl.ops.plan.gpus import Gpu, estimate
from nrl.runtime import Layout

__all__ = ["GIB", "nearest_line", "report", "search_lines"]

GIB = 2**30


def report(found: Mapping[str, Any], step: Any, layout: Layout, gpu: Gpu, allowance: float, driven: bool) -> None:
    """Print what a step needs, of one process.

    Args:
        found: by a drive, or closed forms.
        step: of the process.
        layout: of all processes.
        gpu: the device.
        allowance: bytes for what a plan leaves out.
        driven: whether it was a drive.
    """
    if not driven:
        whose = "this process" if "stage" in found else "a model"
        print(f"closed forms, not driven: {format_number(found['count'])} parameters of {whose}")
    for line in (*_memory(found, gpu, allowance), *_step(found), *_life(found)):
        print(line)
    from nrl.ops.plan.analytic import rows_of

    speed = estimate(found, gpu, rows_of(step).tokens, layout.slots)
    each = speed["tokens_per_second"] * layout.dp / layout.slots
    host = f"{gpu.host / 1e9:g} GB/s to the host, " if step.offload else ""
    print(
        f"estimate, not measured: {format_number(each)} tokens/s a device, HFU {speed['hfu']:.0%}, "
        f"MFU {speed['mfu']:.0%}; from "
        f"{gpu.flops / 1e12:.0f} TFLOP/s bfloat16, {gpu.float32 / 1e12:g} float32, "
        f"{gpu.bandwidth / 1e12:g} TB/s of memory, {gpu.link / 1e9:.0f} GB/s of NVLink, "
        f"{gpu.network / 1e9:g} GB/s of network a device beyond 8, {host}half of attention's squares, nothing at once"
    )


def _memory(found: Mapping[str, Any], gpu: Gpu, allowance: float) -> Iterator[str]:
    from nrl.ops.plan.search import highest, over

    there = found["at_peak"]
    at_peak = ", {:.2f} of them at the peak".format
    more = {
        "gradients": at_peak(there["gradients"] / GIB),
        "activations": " at the peak",
        "log-probabilities": f" at the peak, {found['logprobs'] / GIB:.2f} at most",
        "peak": f" at {found['peak_at']}",
    }
    sizes = {**found, "log-probabilities": there["log-probabilities"]}
    for name in ("parameters", "gradients", "moments", "activations", "log-probabilities", "peak"):
        yield f"{name:<22}{sizes[name] / GIB:10.2f} GiB{more.get(name, '')}"
    if found.get("host"):
        yield f"{'on the host':<22}{found['host'] / GIB:10.2f} GiB, parameters, gradients and moments"
    stage, _ = highest(found)
    unsure, much = found.get("unsure", 0.0), over(found, gpu, allowance)
    fits = "fits" if much <= 0 else f"does not fit, by {much / GIB:.1f} GiB,"
    twice = f" and {unsure / GIB:.1f} GiB of activations, which may be twice as many," if unsure else ""
    yield f"{'':<22}with {allowance / GIB:g} GiB{twice} more it {fits} in {gpu.memory / GIB:.1f} GiB"
    every = found.get("stages", {})
    for name, each in every.items():
        much = over(each, gpu, allowance)
        if much > 0:
            yield f"{'':<22}{name} does not fit, by {much / GIB:.1f} GiB: peak {each['peak'] / GIB:.2f} GiB"
    if every and stage != "train":
        yield f"{'':<22}the most is held in {stage}, at {every[stage]['peak_at']}"


def _step(found: Mapping[str, Any]) -> Iterator[str]:
    for name, size in found["collectives"].items():
        yield f"{'collective':<22}{size / GIB:10.2f} GiB {name}"
    for name, flops in found["flops"].items():
        yield f"{'products':<22}{flops / 1e12:10.2f} TFLOP {name}"
    for line, flops in found.get("float32_products", {}).items():
        yield f"{'  of float32':<22}{flops / 1e12:10.2f} TFLOP {line}"
    for kernel, count in found.get("attention", {}).items():
        yield f"{'attention':<22}{count:10d} calls {kernel}"
    for kind, line, count in found.get("waits", ()):
        yield f"{'wait or copy':<22}{count:10d} {kind}, {line}"
    for name, flops in found.get("recomputed", {}).items():
        yield f"{'computed again':<22}{flops / 1e12:10.2f} TFLOP {name}"
    if found.get("bubble"):
        yield f"{'bubble':<22}{found['bubble']:10.0%} of the time"


def _life(found: Mapping[str, Any]) -> Iterator[str]:
    for name, stage in found.get("stages", {}).items():
        copied = "".join(f", {size / GIB:.2f} GiB copied {way}" for way, size in stage["copied"].items())
        waits = sum(count for _, _, count in stage["waits"])
        yield (
            f"{'peak of ' + name:<22}{stage['peak'] / GIB:10.2f} GiB, then {stage['held'] / GIB:.2f}; "
            f"{waits} waits and copies{copied}"
        )
        for kind, line, count in stage["waits"] if name != "train" else ():  # those of the step have been told
            yield f"{'  wait or copy':<22}{count:10d} {kind}, {line}"


def nearest_line(near: Any, most: int) -> str:
    """The last line of what does not fit; up to ``most`` GPUs were looked at."""
    if near is None:
        return f"no layout of either trainer fits on up to {most} GPUs"
    gib = near.peak / GIB, -near.over / GIB
    return (
        f"the nearest that fits, by closed forms: {near.settings}  (peak {gib[0]:.1f} GiB, {gib[1]:.1f} GiB to spare)"
    )


def search_lines(
    what: str,
    every: Sequence[Any],
    best: Sequence[Any],
    driven: Mapping[int, Any],
    held: Mapping[str, Any],
    gpu: Gpu,
    allowance: float,
) -> Iterator[str]:
    """The table of a search.

    Args:
        what: was ranked.
        every: candidates, ranked.
        best: those that were to be driven.
        driven: what drives say of them, by identity.
        held: what was not searched.
        gpu: the device.
        allowance: GiB for what a plan leaves out.
    """
    fitting, rest = [each for each in every if each.fits], [each for each in every if not each.fits]
    yield (
        f"{what}; {len(fitting)} fit in {gpu.memory / GIB:.1f} GiB with {allowance:g} GiB to spare. By closed forms, "
        "and driven where that is said; tokens/s of a device are estimated, not measured"
    )
    if held:
        yield "held: " + ", ".join(f"{name}={value}" for name, value in held.items())
    yield f"{'peak GiB':>9} {'over GiB':>9} {'tokens/s':>9}  layout"
    chosen = {id(each) for each in (*fitting[:8], *best)}  # the fastest ones, and those that were driven
    for each in [*(each for each in fitting if id(each) in chosen), *rest[:4]]:
        yield _line(each, "")
        if id(each) in driven:
            yield _line(driven[id(each)], "  driven")


def _line(each: Any, how: str) -> str:
    over = "" if each.fits else f"{each.over / GIB:.1f}"
    where = "" if each.fits or each.stage == "train" else f", in {each.stage}"
    return f"{each.peak / GIB:9.1f} {over:>9} {format_number(each.tokens_per_second):>9}  {each.settings}{how}{where}"
