"""Environments: the recipe that one is built from, and the inventory that lies in its folder.

`nrl.runtime.venvs.recipes` makes recipes, and `nrl.runtime.venvs.building` environments of them.
"""

import contextlib
import fcntl
import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    "DISTRIBUTION",
    "INVENTORY",
    "Recipe",
    "current_platform",
    "default_folder",
    "describe_difference",
    "is_in_use",
    "is_usable",
    "list_inventories",
    "list_sources",
    "lock_env",
    "mark_used",
    "measure_similarity",
    "parse_package",
    "read_inventory",
]

DISTRIBUTION = "nrl-torch"
"""The name of nrl in locks, wheels and metadata; PyPI's ``nrl`` is another project, with a module of that name."""

INVENTORY = "nrl-venv.json"
"""The file in an environment that lists its packages. It is written last, so an environment that has it is complete."""

_locks: list[int] = []  # open files; their locks end with this process


@dataclass(frozen=True)
class Recipe:
    """All that a node needs to build an environment, apart from packages that an index or a git server has.

    Args:
        name: ``<executable>-<hash>``, the hash over the inventory.
        executable: the name of the executable.
        interpreter: a path, where no environment is needed (``system``).
        python: the version to build with, such as ``"3.12.1"``.
        platform: `current_platform` on nodes that can use it.
        requirements: lines of pinned requirements with their hashes.
        wheels: content by file name, of packages that no index has and that have to be installed.
        sources: wheels of packages that work on any path (nrl, the project, and folders that it depends on), by the
            name of the folder that each is unpacked into. They are no part of the environment, nor of its name.
        indexes: of locked packages, apart from the default one.
        inventory: python, platform, and each package's version, source and digest.
        settings: variables for uv where the node has no value of its own, such as ``UV_DEFAULT_INDEX``.
        force: build anew unless the environment was built for this very value; empty: use an existing one.
    """

    name: str
    executable: str
    interpreter: str | None = None
    python: str = ""
    platform: str = ""
    requirements: tuple[str, ...] = ()
    wheels: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    sources: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    indexes: tuple[str, ...] = ()
    inventory: Mapping[str, Any] = field(default_factory=dict, repr=False)
    settings: Mapping[str, str] = field(default_factory=dict, repr=False)  # may hold credentials
    force: str = ""


def current_platform() -> str:
    """Return the platform of this node, such as ``linux-x86_64``."""
    return f"{sys.platform}-{platform.machine()}"


def default_folder() -> Path:
    """Return the folder of this node's environments: ``NRL_VENV_DIR``, else a folder in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("NRL_VENV_DIR") or f"{cache}/nrl/venvs").expanduser().absolute()


def list_sources(recipe: Recipe, python: Path) -> list[str]:
    """Return the folders with the sources of a recipe, which go onto the path of its processes.

    >>> list_sources(Recipe("base-01", "base", sources={"nrl-torch-0.1.0-23": b""}), Path("/venvs/base-01/bin/python"))
    ['/venvs/.sources/nrl-torch-0.1.0-23']
    """
    return [str(python.parents[2] / ".sources" / name) for name in recipe.sources]


def parse_package(wheel: str) -> str:
    """Return the normalised name of the package in a wheel's file name.

    >>> parse_package("Tiny_Lib-1.0-py3-none-any.whl")
    'tiny-lib'
    """
    return wheel.split("-")[0].lower().replace("_", "-").replace(".", "-")


def mark_used(path: Path) -> None:
    """Set the time of last use, which `nrl venvs prune` reads; an image may be read-only."""
    with contextlib.suppress(OSError):
        os.utime(path)


def is_usable(env: Path, force: str = "") -> bool:
    """Return whether an environment is complete, has its interpreter, and was built for a given ``force``."""
    inventory = read_inventory(env)
    return (
        inventory is not None and (env / "bin" / "python").exists() and (not force or inventory.get("force") == force)
    )


def lock_env(env: Path) -> None:
    """Lock an environment against replacement and removal until this process ends; do nothing if it is missing."""
    with contextlib.suppress(OSError):  # also where the file system has no locks
        _locks.append(os.open(env / INVENTORY, os.O_RDONLY | os.O_CLOEXEC))
        fcntl.flock(_locks[-1], fcntl.LOCK_SH | fcntl.LOCK_NB)


def is_in_use(env: Path) -> bool:
    """Return whether a process locks an environment, on this node or on one that shares the file system's locks."""
    try:
        file = os.open(env / INVENTORY, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(file)
    return False


def read_inventory(folder: Path) -> dict[str, Any] | None:
    """Read the inventory of an environment, or of a source's folder; None: it is not complete, or was renamed."""
    try:
        inventory = json.loads((folder / INVENTORY).read_text())
    except (OSError, ValueError):
        return None
    return inventory if isinstance(inventory, dict) and inventory.get("name") == folder.name else None


def list_inventories(folder: Path) -> dict[Path, dict[str, Any]]:
    """Return the usable environments of a folder with their inventories; empty if there is no such folder."""
    if not folder.is_dir():
        return {}
    envs = [env for env in sorted(folder.iterdir()) if not env.name.startswith(".") and is_usable(env)]
    return {env: inventory for env in envs if (inventory := read_inventory(env)) is not None}


def measure_similarity(inventory: Mapping[str, Any], target: Mapping[str, Any]) -> tuple[int, int, str]:
    """Measure the similarity of two inventories: equal packages, then packages of one name, then time of build.

    Without the second, which of two environments is near would be a matter of their names, where both have all packages
    but one, and one of them has that in another version.

    >>> new = {"packages": {"numpy": "2.3", "cowsay": "6.1"}}
    >>> without = {"packages": {"numpy": "2.3"}, "built": "2026-11-22T08:09:49Z"}
    >>> older = {"packages": {"numpy": "2.3", "cowsay": "5.0"}, "built": "2026-11-21T08:09:49Z"}
    >>> measure_similarity(without, new), measure_similarity(older, new)
    ((1, 1, '2026-11-22T08:09:49Z'), (1, 2, '2026-11-21T08:09:49Z'))
    """
    packages_present, packages = inventory["packages"], target["packages"]
    equal = sum(packages_present.get(name) == package for name, package in packages.items())
    return equal, len(packages_present.keys() & packages.keys()), str(inventory.get("built", ""))


def describe_difference(old: Mapping[str, Any], new: Mapping[str, Any], limit: int = 6) -> str:
    """Describe the first ``limit`` differences between two inventories; empty if there are none.

    >>> a = {"python": "3.12.1", "packages": {"numpy": {"version": "2.3.4", "source": "index", "digest": "a"}}}
    >>> b = {"python": "3.12.1", "packages": {"numpy": {"version": "2.3.5", "source": "index", "digest": "b"}}}
    >>> describe_difference(a, b)
    'numpy 2.3.4 -> 2.3.5'
    """
    differences = [
        f"{key} {old.get(key)} -> {new.get(key)}" for key in ("python", "platform") if old.get(key) != new.get(key)
    ]
    before, after = old.get("packages", {}), new.get("packages", {})
    changed = [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
    for name in sorted(changed, key=lambda name: (after.get(name, before.get(name))["source"] != "local", name)):
        a, b = before.get(name), after.get(name)
        if a is None or b is None:
            differences.append(f"{name} {b['version']} is added" if b else f"{name} {a['version']} is gone")
        elif a["version"] != b["version"]:
            differences.append(f"{name} {a['version']} -> {b['version']}")
        else:
            differences.append(
                f"the source of {name} {b['version']}" if b["source"] == "local" else f"the files of {name}"
            )
    num_hidden = len(differences) - limit
    return ", ".join([*differences[:limit], *([f"and {num_hidden} more"] if num_hidden > 0 else [])])
