"""Executables: the Python environments that meshes run in.

On the local cluster every mesh runs in this process, so an executable is usable exactly if this process can import what
the executable is for.
"""

import importlib.util
from difflib import get_close_matches

from nrl.errors import PlacementError

__all__ = ["EXECUTABLES", "check_importable"]

EXECUTABLES: dict[str, str | None] = {
    "system": None,
    "base": "transformers",
    "vllm": "vllm",
    "vllm-cpu": "vllm",
    "mcore": "megatron",
}
"""The executables and the package that each of them is for; ``system`` is the driver's own interpreter.

>>> "base" in EXECUTABLES
True
"""


def check_importable(name: str) -> None:
    """Say whether this process can stand in for an executable.

    Raises:
        PlacementError: no executable has this name, or its package is not installed here.

    >>> check_importable("system")
    """
    if name not in EXECUTABLES:
        near = get_close_matches(name, EXECUTABLES, n=1)
        raise PlacementError(
            f"mesh: there is no executable '{name}'"
            + (f"; did you mean '{near[0]}'?" if near else f"; there are {', '.join(EXECUTABLES)}")
        )
    package = EXECUTABLES[name]
    if package is not None and importlib.util.find_spec(package) is None:
        raise PlacementError(
            f"mesh: executable '{name}' needs the package '{package}', which this process cannot import, and the local "
            f"cluster runs everything in this process; install it with `uv sync --extra {name}`"
        )
