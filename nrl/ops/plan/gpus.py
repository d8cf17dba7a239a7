"""Data of devices, and an estimate of a step's speed, which was not measured.

Numbers are those of the makers' data sheets: NVIDIA A100 80GB SXM (2021), H100 SXM and H200 (2024), and B200 in the
HGX data sheet (2025). Products are dense, in bfloat16. The network is that of NVIDIA's DGX user guides: eight adapters
for eight GPUs, of 200 Gb/s in a DGX A100, and of 400 Gb/s in a DGX H100, H200 and B200. The host is reached by PCIe, 16
lanes of generation 4 at an A100, and of 5 at the others.

Memory is no data sheet's: it is what CUDA says a program can have, which torch names in its errors ("GPU 0 has a total
capacity of 79.18 GiB"), as users quote them in public. Of a kind it differs by 0.1 GiB from driver to driver. It is
less than the card has by NVML (an H100 80GB HBM3: 81,559 MiB, or 79.65 GiB), as ECC and the driver keep some of it.
"""

import math
from collections.abc import Mapping
from typing import Any

import attrs

from nrl.arguments import checked
from nrl.runtime.device_specs import PEAKS

__all__ = ["GPUS", "Gpu", "estimate"]


@checked("Gpu")
@attrs.frozen
class Gpu:
    """A device.

    Args:
        memory: bytes that a program can have.
        flops: dense products in bfloat16, a second.
        float32: products in float32 on the general cores, a second.
        bandwidth: of its memory, bytes a second.
        link: NVLink, bytes a second in one direction.
        network: of one GPU's adapter, bytes a second in one direction.
        host: to and from the host, bytes a second in one direction.
        capability: of CUDA.
    """

    memory: float
    flops: float
    float32: float
    bandwidth: float
    link: float
    network: float
    host: float
    capability: tuple[int, int]


_GIB = 2**30

GPUS: Mapping[str, Gpu] = {
    "a100": Gpu(79.15 * _GIB, PEAKS["A100"], 19.5e12, 2.039e12, 300e9, 25e9, 32e9, (8, 0)),
    "h100": Gpu(79.18 * _GIB, PEAKS["H100"], 67e12, 3.35e12, 450e9, 50e9, 64e9, (9, 0)),
    "h200": Gpu(139.80 * _GIB, PEAKS["H200"], 67e12, 4.8e12, 450e9, 50e9, 64e9, (9, 0)),
    "b200": Gpu(178.35 * _GIB, PEAKS["B200"], 75e12, 7.7e12, 900e9, 50e9, 64e9, (10, 0)),
}


_MACHINE = 8
"""GPUs that NVLink joins."""


def estimate(counted: Mapping[str, Any], gpu: Gpu, tokens: float, devices: int = 8) -> dict[str, float]:
    """Estimate a step by a roofline of its products, its collectives and its moments, without overlap.

    Of attention's squares it takes half, as a causal kernel does. A collective of N bytes takes ``N / link`` within a
    machine. Beyond it is a ring through as many adapters as it has ranks in each machine, ``N / min(link, ranks
    network)``; an all-reduce takes twice that. What stages of a pipeline send each other has one adapter. A pipeline is
    as slow as its slowest stage, and waits for its ``bubble``. What is copied from and to the host takes ``N / host``;
    the time of an optimizer there is left out.

    Args:
        counted: the result of `nrl.ops.plan.simulate.simulate_step`, or of closed forms. ``pipeline`` has it for each
            kind of stage, with the number of such stages; ``rings`` has the number of ranks of each collective, and
            the distance between them.
        gpu: the device.
        tokens: of the process's batch.
        devices: among which collectives are whose ring is not given.

    Returns:
        ``seconds``; ``tokens_per_second`` of a device; ``hfu``, hardware FLOPs utilization: the part of the dense
        bfloat16 products that bfloat16 products and attention use; and ``mfu``, that of the ``model`` alone, without
        what is computed again.
    """
    stages = counted.get("pipeline", [(1, counted)])
    seconds = max(_estimate_seconds(stage, gpu, devices) for _, stage in stages)
    capacity = gpu.flops * seconds * sum(times for times, _ in stages)
    return {
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "hfu": sum(times * _split_products(stage["flops"])[0] for times, stage in stages) / capacity,
        "mfu": sum(times * stage["model"] for times, stage in stages) / capacity,
    }


def _estimate_seconds(counted: Mapping[str, Any], gpu: Gpu, devices: int) -> float:
    fast, slow = _split_products(counted["flops"])
    moved = 2 * (counted["parameters"] + counted["moments"]) + counted["gradients"]  # read and written; gradients read
    rings: Mapping[str, tuple[int, int]] = counted.get("rings", {})
    # To add numbers up everywhere is to scatter sums, and to gather them
    sent = sum(
        size * (1 + (name == "all_reduce")) / _ring_rate(gpu, *rings.get(name, (devices, 1)))
        for name, size in counted["collectives"].items()
    )
    working = (fast / gpu.flops + slow / gpu.float32) / (1 - counted.get("bubble", 0.0))
    copied = sum(counted.get("copied", {}).values())
    seconds: float = working + sent + moved / gpu.bandwidth + copied / gpu.host
    return seconds


def _split_products(flops: Mapping[str, float]) -> tuple[float, float]:
    """Return the products in bfloat16, with half of attention's squares, and the products in float32."""
    slow = flops.get("float32", 0.0)
    return sum(flops.values()) - slow - flops.get("attention", 0.0) / 2, slow


def _ring_rate(gpu: Gpu, span: int, stride: int) -> float:
    """Return the bytes a second of a ring over ``span`` ranks at a distance of ``stride``.

    >>> h100 = GPUS["h100"]
    >>> [_ring_rate(h100, *ring) / 1e9 for ring in ((8, 1), (8, 4), (64, 1), (64, 4), (64, 8))]
    [450.0, 450.0, 400.0, 100.0, 50.0]
    """
    in_machine = math.gcd(span, _MACHINE)  # ranks in the machine with the fewest
    return gpu.link if in_machine == span else min(gpu.link, max(1, in_machine // stride) * gpu.network)
