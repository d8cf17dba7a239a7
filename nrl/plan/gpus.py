"""The numbers of devices, closed forms of a step, and an estimate of its speed, which nobody has measured.

Numbers are those of the makers' data sheets: NVIDIA A100 80GB SXM (2021), H100 SXM and H200 (2024), and B200 in the
HGX data sheet (2025). Products are dense, in bfloat16.
"""

from collections.abc import Mapping
from typing import Any

import attrs

__all__ = ["GPUS", "Gpu", "closed_flops", "closed_parameters", "estimate"]


@attrs.frozen
class Gpu:
    """A device.

    Args:
        memory: bytes.
        flops: dense products in bfloat16, a second.
        float32: products in float32 on the general cores, a second.
        bandwidth: of its memory, bytes a second.
        link: NVLink, bytes a second in one direction.
        capability: of CUDA.
    """

    memory: float
    flops: float
    float32: float
    bandwidth: float
    link: float
    capability: tuple[int, int]


GPUS: Mapping[str, Gpu] = {
    "a100": Gpu(80e9, 312e12, 19.5e12, 2.039e12, 300e9, (8, 0)),
    "h100": Gpu(80e9, 989e12, 67e12, 3.35e12, 450e9, (9, 0)),
    "h200": Gpu(141e9, 989e12, 67e12, 4.8e12, 450e9, (9, 0)),
    "b200": Gpu(180e9, 2250e12, 75e12, 7.7e12, 900e9, (10, 0)),
}


def closed_parameters(config: Mapping[str, Any]) -> int:
    """The parameters of a dense model of the form of Qwen3.

    With hidden size d, L layers, H heads and h key-value heads of size D, intermediate size f and V words:
    ``V d (2, or 1 if tied) + L (2 d D (H + h) + 3 d f + 2 d + 2 D) + d``.

    >>> closed_parameters(
    ...     dict(
    ...         hidden_size=4,
    ...         num_hidden_layers=1,
    ...         num_attention_heads=2,
    ...         num_key_value_heads=1,
    ...         head_dim=2,
    ...         intermediate_size=8,
    ...         vocab_size=10,
    ...         tie_word_embeddings=True,
    ...     )
    ... )
    200
    """
    d, size = config["hidden_size"], config["head_dim"]
    heads = config["num_attention_heads"] + config["num_key_value_heads"]
    layer = 2 * d * size * heads + 3 * d * config["intermediate_size"] + 2 * d + 2 * size
    words = config["vocab_size"] * d * (1 if config["tie_word_embeddings"] else 2)
    total: int = words + config["num_hidden_layers"] * layer + d
    return total


def closed_flops(config: Mapping[str, Any], tokens: int, outputs: int) -> float:
    """The products of a step's forward and backward without attention's scores, and without recomputation.

    ``6 (L (2 d D (H + h) + 3 d f) tokens + V d outputs)``: 2 forward and 4 backward for each weight of a matrix.

    Args:
        config: as for `closed_parameters`.
        tokens: that the layers compute, padding counted.
        outputs: whose log-probabilities are computed.
    """
    d, heads = config["hidden_size"], config["num_attention_heads"] + config["num_key_value_heads"]
    layer = 2 * d * config["head_dim"] * heads + 3 * d * config["intermediate_size"]
    found: float = 6.0 * (config["num_hidden_layers"] * layer * tokens + config["vocab_size"] * d * outputs)
    return found


def estimate(counted: Mapping[str, Any], gpu: Gpu, tokens: int) -> dict[str, float]:
    """A roofline of a step: its products, its collectives and its moments, none of them at once with another.

    Args:
        counted: of `nrl.plan.driven.drive`.
        gpu: the device.
        tokens: of the process's batch.

    Returns:
        ``seconds``, ``tokens_per_second`` of a device, and ``mfu``, the part of the dense bfloat16 products that
        bfloat16 products and attention use.
    """
    flops: Mapping[str, float] = counted["flops"]
    slow = flops.get("float32", 0.0)
    fast = sum(flops.values()) - slow
    moved = 2 * (counted["parameters"] + counted["moments"]) + counted["gradients"]  # read and written; gradients read
    sent = sum(counted["collectives"].values())
    seconds = fast / gpu.flops + slow / gpu.float32 + sent / gpu.link + moved / gpu.bandwidth
    return {"seconds": seconds, "tokens_per_second": tokens / seconds, "mfu": fast / gpu.flops / seconds}
