"""What `benchmarks/gpu.py` is made of: a device that may be fake, a report, and a profiler's trace."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from nrl.ops.plan import fake_cuda
from nrl.ops.plan.gpus import GPUS, Gpu
from nrl.ops.plan.op_counter import OpCounter
from nrl.runtime.device_specs import product

__all__ = [
    "Device",
    "Report",
    "Traced",
    "data_sheet",
    "first_device",
    "read_trace",
    "traced",
]

_STEP = "gpu.py: a step"
_PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::_grouped_mm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Where the first of the two matrices is among the arguments."""
_SINGLE = {"float", "double"}
_WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")


@attrs.frozen
class Device:
    """Where steps run.

    Args:
        name: of the product; of a fake one, "no device: fake tensors".
        capability: of CUDA.
        memory: bytes.
        fake: counts what fake tensors take; None: there is a GPU.
    """

    name: str
    capability: tuple[int, int]
    memory: int
    fake: OpCounter | None = None

    @property
    def torch(self) -> torch.device:
        """As torch names it."""
        return torch.device("cuda:0")

    @contextmanager
    def used(self) -> Iterator[None]:
        """Tensors of CUDA are this device's in the block."""
        if self.fake is None:
            yield
        else:
            with self.fake:
                yield

    def forget(self) -> None:
        """Look for peaks from here on."""
        if self.fake is None:
            torch.cuda.reset_peak_memory_stats()
        else:
            self.fake.forget()

    def peak(self) -> int:
        """The most bytes of live tensors since then; on a GPU, with what rounding to blocks of 512 bytes adds."""
        return torch.cuda.max_memory_allocated() if self.fake is None else self.fake.peak

    def timed[T](self, act: Callable[[], T]) -> tuple[T, float | None]:
        """What it returns, and seconds until the device is done with it; None: a fake one takes no time."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        found = act()
        torch.cuda.synchronize()
        return found, time.perf_counter() - start if self.fake is None else None


def first_device(fake: bool) -> Device:
    """The first GPU, or one of fake tensors, which takes this process for good."""
    if not fake:
        found = torch.cuda.get_device_properties(0)
        return Device(found.name, (found.major, found.minor), found.total_memory)
    counting, capability, memory = OpCounter(), GPUS["h100"].capability, int(GPUS["h100"].memory)
    fake_cuda.install(capability, memory, counting.count_wait)
    fake_cuda.choose_attention(capability, Counter())
    return Device("no device: fake tensors", capability, memory, counting)


def data_sheet(name: str) -> Gpu | None:
    """What the data sheet says of a device; None: nrl has none of it.

    >>> data_sheet("NVIDIA H100 80GB HBM3").flops, data_sheet("NVIDIA H100 PCIe"), data_sheet("NVIDIA GH200 480GB")
    (989000000000000.0, None, None)
    """
    return GPUS.get((product(name) or "").lower())


@attrs.frozen
class Report:
    """What a part found: printed at once, and written as JSON at its end.

    Args:
        part: its name.
    """

    part: str
    lines: list[str] = attrs.field(factory=list)
    checks: list[dict[str, Any]] = attrs.field(factory=list)
    numbers: dict[str, Any] = attrs.field(factory=dict)

    def tell(self, line: str, **numbers: Any) -> None:
        """Print a line, and keep numbers."""
        self.lines.append(f"{self.part}: {line}")
        self.numbers.update(numbers)
        print(self.lines[-1], flush=True)

    def check(self, what: str, found: float | None, most: float, least: float = 0.0) -> None:
        """Print whether ``least <= found <= most``; None: it was not measured."""
        kept = None if found is None else least <= found <= most
        said = {None: "not measured", True: "ok", False: "FAILED"}[kept]
        bounds = f"at most {most:.3g}" if least == 0 else f"from {least:.3g} to {most:.3g}"
        self.checks.append({"what": what, "found": found, "least": least, "most": most, "kept": kept})
        self.tell(f"[{said}] {what}: {'-' if found is None else f'{found:.3g}'}, {bounds}")


@attrs.frozen
class Traced:
    """A step, as a profiler saw it.

    Args:
        varlen: calls of torch's varlen kernel, forward.
        float32: shapes of products of matrices in float32 or float64, with how many there are.
        waits: how often the program waited for the device.
        copied: copies, by direction, as CUDA names it ("HtoD", "DtoH").
        kernels: seconds by kernel, the most first.
        busy: seconds in which at least one kernel ran.
    """

    varlen: int
    float32: Mapping[str, int]
    waits: int
    copied: Mapping[str, int]
    kernels: Mapping[str, float]
    busy: float


def traced(device: Device, act: Callable[[], object], path: Path) -> Traced:
    """Take a step under torch's profiler, which writes its trace."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.fake is None else [])
    with profile(activities=activities, record_shapes=True) as profiled:
        with record_function(_STEP):
            act()
        torch.cuda.synchronize()
    profiled.export_chrome_trace(str(path))
    return read_trace(json.loads(path.read_text())["traceEvents"])


def read_trace(events: Iterable[Mapping[str, Any]]) -> Traced:
    """What a trace in Chrome's format says of the step in it; its times are in microseconds.

    Waits are those inside of the step: the profiler itself waits at its end.
    """
    events = [event for event in events if event.get("ph") == "X"]
    step = next(event for event in events if event["name"] == _STEP and event.get("cat") == "user_annotation")
    begin, end = step["ts"], step["ts"] + step["dur"]
    float32, copied, kernels, spans = Counter[str](), Counter[str](), Counter[str](), list[tuple[float, float]]()
    varlen = waits = 0
    ends: dict[tuple[str, Any], float] = {}  # fake tensors have an operator call itself, which is one call
    for event in sorted(events, key=lambda event: event["ts"]):
        name, kind, args = event["name"], event.get("cat"), event.get("args", {})
        if kind == "cpu_op" and event["ts"] >= ends.get((name, event["tid"]), 0.0):
            ends[name, event["tid"]] = event["ts"] + event["dur"]
            varlen += name == "torch_attn::_varlen_attn"
            at = _PRODUCTS.get(name)
            if at is not None and _SINGLE & set(args.get("Input type", [])[at : at + 2]):
                float32[f"{name} {args['Input Dims'][at : at + 2]}"] += 1
        elif kind == "cuda_runtime":
            waits += name in _WAITS and begin <= event["ts"] <= end
        elif kind == "gpu_memcpy":
            copied[name.split()[1]] += 1
        elif kind == "kernel":
            kernels[name] += event["dur"] / 1e6
            spans.append((event["ts"], event["ts"] + event["dur"]))
    busy, until = 0.0, 0.0
    for start, stop in sorted(spans):
        busy += max(0.0, stop - max(start, until))
        until = max(until, stop)
    return Traced(varlen, dict(float32), waits, dict(copied), dict(kernels.most_common()), busy / 1e6)
