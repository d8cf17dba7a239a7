"""Metrics of devices in a step: tokens a second, MFU, peak memory, and idle time.

Each process measures its own half, as sums; the driver merges them (`nrl.batch.metrics`), over processes and over the
parts of a batch. The clock is the host's. A step ends where the engine has read its numbers from the device, for which
it waits anyway, so nothing here waits.
"""

import time
from collections.abc import Callable

import torch

from nrl.batch.metrics import Max, Mean, Metrics
from nrl.errors import ArgumentError
from nrl.runtime.device_specs import peak
from nrl.runtime.mesh.current_process import measure_idle, process

__all__ = ["FLOPS", "PREFIX", "begin_measuring", "device_of"]

PREFIX = "device/"
"""The prefix of the names of metrics of a device."""

FLOPS = "flops"
"""The metric by which an engine reports floating-point operations of its model, as a `nrl.batch.metrics.Sum`."""
_GIB = 2**30


def device_of(caller: str, name: str | torch.device | None) -> torch.device:
    """Return the device of a name; None: a GPU if there is one.

    Raises:
        ArgumentError: torch knows no such device.

    >>> device_of("fsdp.trainer", "cpu")
    device(type='cpu')
    """
    try:
        return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ArgumentError(f"{caller}: device is {name!r}; give 'cpu' or 'cuda', or leave it out", "device") from None


def begin_measuring() -> Callable[[Metrics], Metrics]:
    """Begin to measure a step; call what this returns with the engine's metrics when the step has ended.

    Returns:
        A function from the engine's metrics to those that this process reports to the driver: the engine's, in the
        first process alone, since they are of all processes, and the metrics ``device/...`` of `docs/logs.md`. Memory
        is that of torch's allocator on a GPU; without a GPU there is none.
    """
    cuda = torch.cuda.is_initialized()  # a trainer on the CPU leaves a GPU alone
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()

    def finish(engine_metrics: Metrics) -> Metrics:
        end = time.perf_counter()
        flops = engine_metrics.get(FLOPS)
        metrics: Metrics = {key: x for key, x in engine_metrics.items() if key != FLOPS} if process().first else {}
        speeds = {"device/tokens_per_second": (engine_metrics.get("tokens"), 1.0), "device/tflops": (flops, 1e12)}
        if cuda and (peak_flops := peak(torch.cuda.get_device_name())) is not None:
            speeds["device/mfu"] = flops, peak_flops
        for name, (done, unit) in speeds.items():
            if done is not None:  # it is of all processes, so one of them counts it
                mine = done[0].double() if process().first else torch.zeros((), dtype=torch.float64)
                metrics[name] = Mean(mine / unit, _number(end - began))
        waited, since = measure_idle(began, end)
        metrics["device/idle"] = Mean(_number(waited), _number(since))
        if cuda:
            metrics["device/max_memory_allocated"] = Max(_number(torch.cuda.max_memory_allocated() / _GIB))
            metrics["device/max_memory_reserved"] = Max(_number(torch.cuda.max_memory_reserved() / _GIB))
        return metrics

    return finish


def _number(x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64)
