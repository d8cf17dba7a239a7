"""Single calls that `benchmarks/gpu.py` times: kernels of attention, and the rest, wake and save of a state."""

import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks._gpu import Device, Report
from benchmarks._gpu_steps import Steps

__all__ = ["attention", "rests"]

BACKENDS = {"FlashAttention 2": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}


def _milliseconds(device: Device, act: Callable[[], Any], times: int = 10) -> float:
    found = [device.timed(act)[1] or 0.0 for _ in range(times + 2)][2:]
    return 1000 * statistics.median(found)


def attention(width: int, device: Device, report: Report) -> None:
    """Time the kernels of `sdpa` for a layer of Qwen3-0.6B, 2 rows: the first calls of a shape, and others.

    torch's varlen kernel is the first of them. Batches have other shapes each time, so that first calls count; that of
    the first width also loads a library.
    """
    if device.fake is not None:
        report.tell("skipped: fake tensors take no time")
        return
    for size in (width, width - 8, width - 37):
        for name, backend in BACKENDS.items():
            with sdpa_kernel(backend):
                _kernel(name, size, device, report)


def _kernel(name: str, width: int, device: Device, report: Report) -> None:
    shapes = [(2, heads, width, 128) for heads in (16, 8, 8)]
    q, k, v = (torch.randn(shape, device=device.torch, dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
    forward = partial(scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
    out, first = device.timed(forward)
    backward = partial(torch.autograd.grad, out, (q, k, v), torch.randn_like(q), retain_graph=True)
    _, back = device.timed(backward)
    firsts = f"first calls {1000 * (first or 0):.0f} and {1000 * (back or 0):.0f} ms"
    found = [_milliseconds(device, each) for each in (forward, backward)]
    report.tell(
        f"width {width}: {name}: {found[0]:.2f} ms, backward {found[1]:.2f} ms; {firsts}",
        **{f"{name} {width}": [*found, first, back]},
    )


def rests(steps: Steps, device: Device, report: Report) -> None:
    """Time what a colocated trainer does between steps, and how long a save holds a step up, first and later."""
    steps()
    steps()
    size = sum(x.nbytes for each in steps.state.optimizer.state.values() for x in each.values())
    size += sum(x.nbytes for x in steps.state.module.parameters())
    calls: dict[str, Callable[[], Any]] = {
        "rest": steps.state.offload,
        "wake": steps.state.onload,
        "save": lambda: saved.append(steps.engine.save(steps.state, steps.state.module).copy_to_host()),
    }
    saved: list[Any] = []
    for number in range(3):
        for name, call in calls.items():
            _, seconds = device.timed(call)
            order = "first" if number == 0 else "then"
            if seconds is None:
                report.tell(f"{name}: not measured; {size / 1e9:.1f} GB")
            else:
                report.tell(f"{name}, {order}: {seconds:.3f} s, {size / seconds / 1e9:.1f} GB/s of {size / 1e9:.1f} GB")
                report.numbers.setdefault(name, []).append(seconds)
        copy = saved.pop()
        if device.fake is None:
            with tempfile.TemporaryDirectory() as folder:
                copy.write(Path(folder))  # so that its memory is used again
