"""What a step took of the devices: tokens a second, MFU, the most memory, and how long they had nothing to do.

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

__all__ = ["FLOPS", "PREFIX", "device_of", "measuring"]

PREFIX = "device/"
"""With which names begin."""

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


def measuring() -> Callable[[Metrics], Metrics]:
    """Begin to measure a step; call what this returns with the engine's metrics when the step has ended.

    Returns:
        From the engine's metrics, which are those of all processes, to what this process tells the driver: those, from
        the first process, and the metrics ``device/...`` of `docs/logs.md`. Memory is that of torch's allocator on a
        GPU; without one there is none.
    """
    cuda = torch.cuda.is_initialized()  # a trainer on the CPU leaves a GPU alone
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()

    def ended(found: Metrics) -> Metrics:
        now = time.perf_counter()
        flops = found.get(FLOPS)
        told: Metrics = {key: x for key, x in found.items() if key != FLOPS} if process().first else {}
        speeds = {"device/tokens_per_second": (found.get("tokens"), 1.0), "device/tflops": (flops, 1e12)}
        if cuda and (most := peak(torch.cuda.get_device_name())) is not None:
            speeds["device/mfu"] = flops, most
        for name, (done, unit) in speeds.items():
            if done is not None:  # it is of all processes, so one of them counts it
                mine = done[0].double() if process().first else torch.zeros((), dtype=torch.float64)
                told[name] = Mean(mine / unit, _number(now - began))
        waited, since = measure_idle(began, now)
        told["device/idle"] = Mean(_number(waited), _number(since))
        if cuda:
            told["device/max_memory_allocated"] = Max(_number(torch.cuda.max_memory_allocated() / _GIB))
            told["device/max_memory_reserved"] = Max(_number(torch.cuda.max_memory_reserved() / _GIB))
        return told

    return ended


def _number(x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64)
