"""Peak throughput of devices by name, from the makers' data sheets."""

import re
from collections.abc import Mapping

__all__ = ["PEAKS", "peak", "product"]

PEAKS: Mapping[str, float] = {
    "A10": 125e12, "A100": 312e12, "B200": 2250e12, "GB200": 2250e12, "GH200": 989e12, "H100 NVL": 835e12,
    "H100 PCIe": 756e12, "H100": 989e12, "H20": 148e12, "H200": 989e12, "L4": 121e12, "L40S": 362e12,
    "MI300X": 1307e12,
}  # fmt: skip
"""Dense products in bfloat16 a second."""


def product(device: str) -> str | None:
    """Return the key of `PEAKS` for a device of this name, or None.

    >>> product("NVIDIA H100 80GB HBM3"), product("NVIDIA H100 PCIe"), product("NVIDIA GH200 480GB"), product("cpu")
    ('H100', 'H100 PCIe', 'GH200', None)
    """
    names = sorted(PEAKS, key=len, reverse=True)
    return next((name for name in names if re.search(rf"(?<!\w){name}(?!\w)", device)), None)


def peak(device: str) -> float | None:
    """Return the dense bfloat16 products a second of a device of this name, or None if it is not known.

    >>> peak("NVIDIA H100 80GB HBM3"), peak("NVIDIA H100 PCIe"), peak("NVIDIA A100-SXM4-80GB"), peak("cpu")
    (989000000000000.0, 756000000000000.0, 312000000000000.0, None)
    """
    name = product(device)
    return None if name is None else PEAKS[name]
