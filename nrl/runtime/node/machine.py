"""Facts of a machine, as plain values: of this one, or of a cluster's node without nrl, by a task there."""

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import resource
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from nrl.runtime.node.cgroups import allowed_cores, cpu_quota, memory_limit, usable_cores
from nrl.runtime.node.gpus import inspect_gpus
from nrl.runtime.venvs.environments import DISTRIBUTION, default_folder, list_inventories

__all__ = ["PACKAGES", "Facts", "collect_facts", "find_python_with_torch", "list_folders"]

Facts = dict[str, Any]  # A `type` statement would travel by its name alone.
"""The values of `collect_facts`, which JSON can hold."""

PACKAGES = (DISTRIBUTION, "ray", "tensordict", "torch", "transformers")
"""Packages whose versions have to agree on all hosts."""


def collect_facts(root: Path = Path("/")) -> Facts:
    """Collect the facts of this machine.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    host = socket.gethostname()
    return {
        "host": host,
        "addresses": _resolve(host),
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": f"{sys.platform}-{platform.machine()}",
        "packages": {name: _find_version(name) for name in PACKAGES},
        "lock": _find_lock(),
        "cores": _describe_cores(root),
        "memory": _describe_memory(root),
        "link_mode": os.environ.get("UV_LINK_MODE"),
        "folders": {name: _describe_folder(path) for name, path in list_folders().items()},
        "open_files": list(resource.getrlimit(resource.RLIMIT_NOFILE)),
        "gpus": inspect_gpus(),
    }


def list_folders() -> dict[str, Path]:
    """Return the folders that nrl, uv, Ray and the Hugging Face libraries fill on this machine, by purpose."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return {
        "environments": default_folder(),
        "uv_cache": Path(os.environ.get("UV_CACHE_DIR") or cache / "uv").expanduser().absolute(),
        "hub": Path(os.environ.get("HF_HOME") or cache / "huggingface").expanduser().absolute(),
        "temporary": Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()).absolute(),
        "shared_memory": Path("/dev/shm"),
    }


def find_python_with_torch(ray: str) -> str | None:
    """Find an interpreter of this machine with torch and this version of Ray, or None.

    It is this process's own, or that of the environment used last.
    """
    if importlib.util.find_spec("torch") is not None:
        return sys.executable

    def has(packages: Any, name: str, version: str | None = None) -> bool:
        return name in packages and version in (None, packages[name]["version"])

    by_env = list_inventories(default_folder())
    fitting = [
        env
        for env, inventory in by_env.items()
        if has(inventory["packages"], "torch") and has(inventory["packages"], "ray", ray)
    ]
    latest = max(fitting, key=lambda env: (env / "nrl-venv.json").stat().st_mtime, default=None)
    return None if latest is None else str(latest / "bin" / "python")


def _find_version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _resolve(host: str) -> list[str]:
    """Resolve the name of this host, by /etc/hosts or DNS; programs take the first address that they can."""
    with contextlib.suppress(OSError):
        return list(dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(host, None)))
    return []


def _find_lock() -> dict[str, str] | None:
    """Find the lock file beside this process's environment, else beside nrl, else the locks in an installed nrl."""
    starts = [Path(sys.prefix).parent]
    spec = importlib.util.find_spec("nrl")
    if spec is not None and spec.origin:
        starts.append(Path(spec.origin).parents[1])
    for start in starts:
        for folder in (start, *start.parents):
            if (folder / "uv.lock").is_file() and (folder / "pyproject.toml").is_file():
                return {"path": str(folder / "uv.lock"), "digest": _hash_files(folder / "uv.lock")}
    if spec is not None and spec.origin and (carried := sorted(Path(spec.origin).parent.glob("pylocks/*.toml"))):
        return {"path": str(carried[0].parent), "digest": _hash_files(*carried)}
    return None


def _hash_files(*files: Path) -> str:
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:12]


def _describe_cores(root: Path) -> dict[str, Any]:
    limits = {"allowed": allowed_cores(), "quota": cpu_quota(root), "usable": usable_cores(root)}
    return {"machine": os.cpu_count(), **limits}


def _describe_memory(root: Path) -> dict[str, Any]:
    lines = dict[str, int]()
    with contextlib.suppress(OSError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            name, _, number = line.partition(":")
            lines[name] = int(number.split()[0]) << 10
    limit, remaining = memory_limit(root)
    free = [number for number in (lines.get("MemAvailable"), remaining) if number is not None]
    return {"total": lines.get("MemTotal"), "available": min(free, default=None), "limit": limit}


def _describe_folder(path: Path) -> dict[str, Any]:
    """Describe a folder, or its nearest parent that exists."""
    nearest = next((candidate for candidate in (path, *path.parents) if candidate.is_dir()), Path("/"))
    facts: dict[str, Any] = {"path": str(path), "exists": nearest == path}
    try:
        disk = os.statvfs(nearest)
        device = nearest.stat().st_dev
    except OSError as error:
        return {**facts, "error": str(error.strerror)}
    writable = os.access(nearest, os.W_OK | os.X_OK) and not disk.f_flag & os.ST_RDONLY
    size, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    return {**facts, "total": size, "free": free, "device": device, "writable": writable}
