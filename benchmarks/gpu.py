"""Ten minutes on one GPU: are its numbers right, which kernels run, how fast, in how much memory, and with vLLM?

    python benchmarks/gpu.py                       # each part in a process of its own; it goes on when one fails
    python benchmarks/gpu.py parts=[speed] seconds=300
    python benchmarks/gpu.py fake=true layers=2    # without a GPU, on fake tensors: does it run?

Parts: `machine`; `plan`, which counts steps on fake tensors; `equality` with the CPU; `kernels` of a step, `memory`
against the plan; `speed` beside plain transformers, in turns; kernels of `attention`; `rests`, wakes and saves of a
state; `options`, what each costs and saves at the widths of 8B; `vllm` on the trainer's GPU, and on another where there
is one. Each prints lines for an issue and writes them to a folder, `out`. See docs/first_hour_on_a_gpu.md.
"""

import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import attrs
import torch

import nrl
from benchmarks import _gpu, _gpu_calls
from benchmarks._gpu import Device, Report
from benchmarks._gpu_steps import Steps, differences, exchanged, plain, training_flops
from benchmarks.fits import MODELS
from nrl import tiny
from nrl.backends import Sampling, adamw, fsdp, vllm
from nrl.batch import Batch, lengths
from nrl.ops.plan.analytic import count_flops
from nrl.ops.plan.gpus import estimate
from nrl.ops.plan.simulate import Step, make_rows, simulate_step
from nrl.runtime.device_specs import peak
from nrl.runtime.venvs.environments import DISTRIBUTION

__all__ = ["CASES", "OPTIONS", "PARTS", "SMALL", "TINY", "Config", "beside_vllm", "judged", "main", "step_of"]

GIB = 2**30
TINY = {
    "model_type": "qwen3", "hidden_size": 256, "num_hidden_layers": 4, "head_dim": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 768, "vocab_size": 1024, "tie_word_embeddings": True,
    "initializer_range": 0.06,
}  # fmt: skip
SMALL: dict[str, Any] = {"model": TINY, "rows": 6, "width": 160, "max_tokens": 512}
CASES: dict[str, dict[str, Any]] = {
    "packed rows": {},
    "a shared prompt": {"shared": 48},
    "windows": {"model": TINY | {"model_type": "mistral", "sliding_window": 32}},
    "checkpointing": {"checkpointing": True},
    "selective checkpointing": {"checkpointing": "selective", "shared": 48},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "checkpointing=true": {},
    "checkpointing=selective": {"checkpointing": "selective"},
    "checkpointing=false": {"checkpointing": False},
    "moments=bfloat16": {"optimizer": adamw(lr=1e-6, moments="bfloat16")},
    "offload=cpu": {"offload": "cpu"},
    "compile=true": {},  # the last: torch keeps what it has compiled, and what that holds
}
FLOAT32 = 1e-4  # of sums in another order; a wrong mask or a lost row is above 0.01
ROUNDED = 2.0  # an error in bfloat16 over that of a CPU in bfloat16, both from float32
BESIDE = 0.1  # by which a peak may differ from the plan


@attrs.frozen
class Config:
    parts: tuple[str, ...] = attrs.field(factory=lambda: tuple(PARTS))
    fake: bool = False  # on fake tensors, in this process, without vLLM
    out: str = "gpu"  # a folder
    seconds: float = 600.0  # after which no part goes on
    widths: tuple[int, ...] = (8192, 16384)  # tokens of a row
    max_tokens: int = 16384  # of a step, in one micro-batch
    layers: int = 28  # of Qwen3-0.6B
    wide_layers: int = 6  # with the widths of Qwen3-8B, in the part `options`
    checkpointing: bool = True  # of nrl and of plain transformers alike
    pairs: int = 5  # of steps, after one that does not count


def step_of(cfg: Config, width: int, device: Device) -> Step:
    """A supervised step, which plain transformers can take as well."""
    return Step(
        MODELS["Qwen3-0.6B"] | {"num_hidden_layers": cfg.layers}, rows=max(1, cfg.max_tokens // width), width=width,
        max_tokens=max(width, cfg.max_tokens), loss="sft", checkpointing=cfg.checkpointing,
        capability=device.capability, memory=device.memory,
    )  # fmt: skip


def machine(cfg: Config, device: Device, report: Report) -> None:
    """Which machine and versions these are."""
    for name in (DISTRIBUTION, "torch", "transformers", "triton", "vllm"):
        try:
            found = version(name)
        except PackageNotFoundError:
            found = "not in this environment"
        report.tell(f"{name} {found}", **{name: found})
    asked = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.used,power.limit", "--format=csv"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        said = [f"nvidia-smi: {error}"]
    for line in said:
        report.tell(line)
    about = f"Python {platform.python_version()}, CUDA of torch {torch.version.cuda}, {os.cpu_count()} cores"
    report.tell(f"{device.name}, capability {device.capability}, {device.memory / GIB:.1f} GiB; {about}")


def plan(cfg: Config, device: Device, report: Report) -> None:
    """Drive the steps of the other parts on fake tensors, in processes of their own."""
    steps = [step_of(cfg, width, device) for width in cfg.widths]
    with ThreadPoolExecutor() as pool:
        plans = list(pool.map(simulate_step, steps))
    for width, step, found in zip(cfg.widths, steps, plans, strict=True):
        written = {"step": attrs.asdict(step), "found": found}
        (Path(cfg.out) / f"plan-{width}.json").write_text(json.dumps(written))
        peak, kernels = found["peak"] / GIB, found["attention"]
        report.tell(f"{step.rows} x {width}: peak {peak:.2f} GiB at {found['peak_at']}; kernels {kernels}")
        if (gpu := _gpu.data_sheet(device.name)) is not None:
            speed = estimate(found, gpu, int(lengths(make_rows(step)).sum()), 1)
            report.tell(f"{step.rows} x {width}: a roofline has {speed['tokens_per_second']:,.0f} tokens/s, at best")


def planned(cfg: Config, step: Step) -> dict[str, Any]:
    """What the plan said of a step."""
    path = Path(cfg.out) / f"plan-{step.width}.json"
    written = json.loads(path.read_text()) if path.exists() else {}
    if written.get("step") != json.loads(json.dumps(attrs.asdict(step))):
        found = "is of another step" if written else "is not there"
        raise FileNotFoundError(f"the plan {path} {found}; plan in the same run: parts=[plan,...]")
    plan: dict[str, Any] = written["found"]
    return plan


def judged(report: Report, case: str, there: Mapping[str, Any], cpu: Mapping[str, Any], known: bool) -> None:
    """Check a device's numbers against those of a CPU.

    In float32 they are equal but for the order of sums. In bfloat16 kernels round at other places; so their distance
    from the CPU's numbers in float32 is checked, against the distance that the CPU's own numbers in bfloat16 have.

    Args:
        report: gets the checks.
        case: its name.
        there: outcomes by dtype, of the device.
        cpu: those of the CPU.
        known: whether the device has numbers.
    """
    far = differences(there["float32"], cpu["float32"])
    rounded = differences(there["bfloat16"], cpu["float32"])
    usual = differences(cpu["bfloat16"], cpu["float32"])
    for name in far:
        report.check(f"{case}, float32, {name}", far[name] if known else None, FLOAT32)
        report.check(f"{case}, bfloat16, {name}", rounded[name] if known else None, ROUNDED * usual[name])


def equality(cfg: Config, device: Device, report: Report) -> None:
    """A small model's log-probabilities and gradients, on the device and on the CPU, from the same weights."""
    fake = device.fake is not None
    for case, given in CASES.items():
        there, here = {}, {}
        for dtype in ("float32", "bfloat16"):
            step = Step(**(SMALL | {"dtype": dtype} | given))
            here[dtype] = Steps(step, torch.device("cpu"), False).outcome()
            with device.used():
                there[dtype] = Steps(step, device.torch, fake).outcome()
        judged(report, case, there, here, not fake)


def kernels(cfg: Config, device: Device, report: Report) -> None:
    """What a step runs, by torch's profiler, against what the plan has."""
    width, fake = cfg.widths[0], device.fake is not None
    step = step_of(cfg, width, device)
    counted, path = planned(cfg, step), Path(cfg.out) / "trace.json"
    with device.used():
        steps = Steps(step, device.torch, fake)
        steps()
        _, seconds = device.timed(steps)
        found = _gpu.traced(device, steps, path)
    calls = counted["attention"].get("varlen", 0)
    report.check("calls of the varlen kernel", found.varlen, calls, calls)
    report.check("products of float32 matrices", sum(found.float32.values()), 0)
    for shapes, count in found.float32.items():
        report.tell(f"{count} x float32 {shapes}")
    waits = [(kind, count) for kind, _, count in counted["waits"]]
    for direction, kind in (("DtoH", "copy to the host"), ("HtoD", "copy to the device")):
        most = sum(count for each, count in waits if each.startswith(kind))
        report.check(f"{kind}, in a step", None if fake else found.copied.get(direction, 0), most)
    most = sum(count for kind, count in waits if kind.endswith("blocking") or not kind.startswith("copy"))
    report.check("waits for the device, in a step", None if fake else found.waits, most)
    if seconds is None:
        report.tell("time of kernels: not measured")
        return
    report.tell(f"kernels run for {found.busy:.3f} s; a step without a profiler takes {seconds:.3f} s", step=seconds)
    for name, spent in list(found.kernels.items())[:12]:
        report.tell(f"{spent / found.busy:6.1%} {name[:90]}")
    report.numbers["kernels"] = dict(found.kernels)


def memory(cfg: Config, device: Device, report: Report) -> None:
    """The peak of a step against the plan's."""
    for width in cfg.widths:
        step = step_of(cfg, width, device)
        counted = planned(cfg, step)
        with device.used():
            steps = Steps(step, device.torch, device.fake is not None)
            steps()
            device.forget()
            steps()
            peak = device.peak()
        report.tell(
            f"width {width}: {peak / GIB:.2f} GiB, planned {counted['peak'] / GIB:.2f} GiB", **{f"{width}": peak}
        )
        report.check(f"width {width}: peak over plan", peak / counted["peak"], 1 + BESIDE, 1 - BESIDE)
        if device.fake is None:
            report.tell(f"width {width}: the allocator reserved {torch.cuda.max_memory_reserved() / GIB:.2f} GiB")
        del steps
        torch.cuda.empty_cache()


def speed(cfg: Config, device: Device, report: Report) -> None:
    """Tokens a second and MFU, in turns with plain transformers; MFU counts no recomputation."""
    for width in cfg.widths:
        step = step_of(cfg, width, device)
        with device.used():
            batch, losses, times = _in_turns(cfg, step, device, report)
        torch.cuda.empty_cache()
        known = device.fake is None and len(losses) == 2
        report.check(f"width {width}: losses differ by", abs(losses["nrl"] - losses["plain"]) if known else None, 0.05)
        _tell_speed(report, step, batch, device, times)


def _in_turns(
    cfg: Config, step: Step, device: Device, report: Report
) -> tuple[Batch, dict[str, float], dict[str, list[float]]]:
    """The rows, the last loss of each side, and seconds of its steps; a side that runs out of memory takes no more."""
    ours = Steps(step, device.torch, device.fake is not None)
    theirs = plain(ours.state.module, ours.batch, device.torch, cfg.checkpointing)
    sides: dict[str, Callable[[], Any]] = {"nrl": ours, "plain": theirs}
    losses, times = dict[str, float](), {name: list[float]() for name in sides}
    for number in range(cfg.pairs + 1):
        for name in sorted(sides, reverse=bool(number % 2)):
            try:
                loss, seconds = device.timed(sides[name])
            except torch.cuda.OutOfMemoryError as error:
                report.tell(f"width {step.width}: {name} ran out of memory: {str(error).splitlines()[0][:100]}")
                del sides[name]
                torch.cuda.empty_cache()
                continue
            losses[name] = float(loss)
            if number and seconds is not None:
                times[name].append(seconds)
    return ours.batch, losses, times


def _tell_speed(report: Report, step: Step, batch: Batch, device: Device, times: Mapping[str, Sequence[float]]) -> None:
    sizes, most = lengths(batch).tolist(), peak(device.name)
    outputs = int(batch["loss_mask"].sum())
    weights = count_flops(step.model, sum(sizes) - len(sizes), outputs)
    heads = step.model["num_hidden_layers"] * step.model["num_attention_heads"] * step.model["head_dim"]
    flops = training_flops(weights, heads, [size - 1 for size in sizes])
    for name, found in times.items():
        if not found:
            report.tell(f"width {step.width}: {name}: not measured; {sum(sizes):,} tokens, {flops / 1e12:.1f} TFLOP")
            continue
        middle = statistics.median(found)
        mfu = "not known" if most is None else f"{flops / middle / most:.1%}"
        said = f"{sum(sizes) / middle:,.0f} tokens/s, MFU {mfu}; {middle:.3f} s ({min(found):.3f}-{max(found):.3f})"
        report.tell(f"width {step.width}: {name}: {said}", **{f"{name} {step.width}": found})
    if all(times.values()) and len(times) == 2:
        ratios = [mine / other for mine, other in zip(times["nrl"], times["plain"], strict=False)]
        report.tell(f"width {step.width}: nrl / plain: {statistics.median(ratios):.2f} of the time")


def rests(cfg: Config, device: Device, report: Report) -> None:
    """Rest, wake and save of the step's state."""
    with device.used():
        steps = Steps(step_of(cfg, cfg.widths[0], device), device.torch, device.fake is not None, drawn=False)
        _gpu_calls.rests(steps, device, report)


def options(cfg: Config, device: Device, report: Report) -> None:
    """The peak of a step against the plan's and tokens a second, as options change them, at the widths of Qwen3-8B.

    The device draws the weights: those of a small model with wide layers, which a CPU would draw for minutes.
    """
    model = MODELS["Qwen3-8B"] | {"num_hidden_layers": cfg.wide_layers}
    first = attrs.evolve(step_of(cfg, cfg.widths[0], device), model=model, checkpointing=True, loss="grpo")
    steps = {name: attrs.evolve(first, **change) for name, change in OPTIONS.items()}
    if device.fake is not None:
        for name, why in (("compile=true", "fake tensors are not compiled"), ("offload=cpu", "the group is fake")):
            del steps[name]
            report.tell(f"{name}: not measured: {why}")
    driven = steps.keys() - {"compile=true"}  # which the plan leaves out
    with ThreadPoolExecutor() as pool:
        plans = dict(zip(driven, pool.map(simulate_step, map(steps.__getitem__, driven)), strict=True))
    for name, step in steps.items():
        try:
            batch, most, times = _option(cfg, step, name not in driven, device)
        except (RuntimeError, nrl.errors.NrlError) as error:  # of memory, or of a compiler
            report.tell(f"{name}: FAILED: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
            report.check(f"{name}: it ran", 0, 1, 1)
            continue
        finally:
            torch.cuda.empty_cache()
        report.tell(f"{name}: {most / GIB:.2f} GiB", **{name: most})
        if plan := plans.get(name):
            report.tell(f"{name}: planned {plan['peak'] / GIB:.2f} GiB")
            report.check(f"{name}: peak over plan", most / plan["peak"], 1 + BESIDE, 1 - BESIDE)
        _tell_speed(report, step, batch, device, {name: times})


def _option(cfg: Config, step: Step, compiled: bool, device: Device) -> tuple[Batch, int, list[float]]:
    """The rows, the peak of the second of some steps, and the seconds of those from the third on."""
    times = []
    with device.used():
        steps = Steps(step, device.torch, device.fake is not None, compile=compiled, drawn=False)
        steps()
        device.forget()
        steps()
        most = device.peak()
        for _ in range(2 if step.offload else cfg.pairs):
            _, seconds = device.timed(steps)
            if seconds is not None:
                times.append(seconds)
    return steps.batch, most, times


def beside_vllm(
    cfg: Config, slots: int, rounds: int, prompts: int = 64, tokens: int = 256, **options: Any
) -> dict[str, list[float]]:
    """What `exchanged` finds of a trainer on the first slot and vLLM on the last; options are those of the sampler."""
    fields = {"num_hidden_layers": cfg.layers, "max_position_embeddings": 4096, "initializer_range": 0.02}
    model = tiny.model(dtype="bfloat16", **(MODELS["Qwen3-0.6B"] | fields))
    with nrl.cluster("ray", deadline=300) as cluster:
        place = cluster.reserve(slots)
        trainer = fsdp.trainer(place[:1], model, adamw(lr=1e-6), checkpointing=cfg.checkpointing)
        sampler = vllm.sampler(place[-1:], model, Sampling(max_new_tokens=tokens), max_model_len=2048, **options)
        return exchanged(trainer, sampler, tiny.sums(64).take(1)[0], rounds, prompts)


def with_vllm(cfg: Config, device: Device, report: Report) -> None:
    """Publishes, swaps and tokens a second, with vLLM on the trainer's GPU, and on another."""
    if device.fake is not None:
        report.tell("skipped: vLLM needs a GPU")
        return
    count = torch.cuda.device_count()
    for name, gpus in (("colocated", 1), ("apart", 2)):
        if count < gpus:
            report.tell(f"{name}: skipped: it takes {gpus} GPUs, and here is {count}")
            continue
        found = beside_vllm(cfg, gpus, 3, gpu_memory_utilization=0.5)
        for what in ("publish", "to sample", "to train"):
            each = ", ".join(f"{seconds:.3f}" for seconds in found[what])
            report.tell(f"{name}: {what}: {statistics.median(found[what]):.3f} s of {each}")
        tokens = statistics.median(t / s for t, s in zip(found["tokens"], found["generate"], strict=True))
        report.tell(f"{name}: 64 rows at once: {tokens:,.0f} tokens/s", **{name: found})


PARTS: dict[str, Callable[[Config, Device, Report], None]] = {
    "machine": machine, "plan": plan, "equality": equality, "kernels": kernels, "memory": memory, "speed": speed,
    "attention": lambda cfg, device, report: _gpu_calls.attention(cfg.widths[0], device, report), "rests": rests,
    "options": options, "vllm": with_vllm,
}  # fmt: skip


def here(cfg: Config) -> bool:
    """Run parts in this process; whether all of them came to their end, with all checks kept."""
    device, fine = _gpu.first_device(cfg.fake), True
    for name in cfg.parts:
        report, start, error = Report(name), time.perf_counter(), None
        try:
            PARTS[name](cfg, device, report)
        except Exception as raised:
            error = "".join(traceback.format_exception(raised))
            report.tell(f"FAILED: {type(raised).__name__}: {str(raised)[:400]}")
        kept = error is None and all(check["kept"] is not False for check in report.checks)
        fine &= kept
        report.tell(f"{'done' if kept else 'FAILED'} in {time.perf_counter() - start:.0f} s")
        written = attrs.asdict(report) | {"error": error, "device": device.name}
        (Path(cfg.out) / f"{name}.json").write_text(json.dumps(written, indent=1))
    return fine


def apart(cfg: Config) -> bool:
    """Run each part in a process of its own, since an error of CUDA stays in its process; as `here`."""
    fine, end = True, time.monotonic() + cfg.seconds
    for name in cfg.parts:
        left = end - time.monotonic()
        if left < 10:
            print(f"{name}: not run: no time is left of {cfg.seconds:.0f} s", flush=True)
            fine = False
            continue
        print(f"-- {name}; {left:.0f} s are left", flush=True)
        one = attrs.asdict(attrs.evolve(cfg, parts=(name,)))
        given = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in one.items()]
        child = subprocess.Popen([sys.executable, __file__, *given], start_new_session=True)
        try:
            fine &= child.wait(left) == 0
        except subprocess.TimeoutExpired:
            fine = False
            print(f"{name}: FAILED: stopped after {left:.0f} s", flush=True)
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    return fine


def main(cfg: Config) -> None:
    """Run the parts; it exits with 1 if one failed."""
    if unknown := set(cfg.parts) - set(PARTS):
        raise nrl.errors.ConfigError(f"gpu: no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if not cfg.fake and not torch.cuda.is_available():
        raise nrl.errors.ConfigError("gpu: torch finds no GPU here; fake=true runs all but vLLM on fake tensors")
    Path(cfg.out).mkdir(parents=True, exist_ok=True)
    if not (here if cfg.fake or len(cfg.parts) == 1 else apart)(cfg):
        raise SystemExit(1)


if __name__ == "__main__":
    nrl.launch(main, Config)
