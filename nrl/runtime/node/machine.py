"""What a machine is, as plain values: looked up here, or by a task on a node of a cluster, where nrl need not be."""

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

from nrl.runtime.node.cgroups import cores, mask, memory, quota
from nrl.runtime.node.gpus import gpus
from nrl.runtime.venvs.environments import DISTRIBUTION, default_folder, inventories

__all__ = ["PACKAGES", "Facts", "facts", "folders", "python_with_torch"]

Facts = dict[str, Any]  # not `type Facts`, which would travel by its name alone
"""The values of `facts`, which JSON can hold."""

PACKAGES = (DISTRIBUTION, "ray", "tensordict", "torch", "transformers")
"""The packages whose versions have to agree on all hosts."""


def facts(root: Path = Path("/")) -> Facts:
    """What this machine is.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    host = socket.gethostname()
    return {
        "host": host,
        "addresses": _addresses(host),
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": f"{sys.platform}-{platform.machine()}",
        "packages": {name: _version(name) for name in PACKAGES},
        "lock": _lock(),
        "cores": _cores(root),
        "memory": _memory(root),
        "link_mode": os.environ.get("UV_LINK_MODE"),
        "folders": {name: _folder(path) for name, path in folders().items()},
        "open_files": list(resource.getrlimit(resource.RLIMIT_NOFILE)),
        "gpus": gpus(),
    }


def folders() -> dict[str, Path]:
    """The folders that nrl, uv, Ray and the Hugging Face libraries fill on this machine, by what they are for."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return {
        "environments": default_folder(),
        "uv_cache": Path(os.environ.get("UV_CACHE_DIR") or cache / "uv").expanduser().absolute(),
        "hub": Path(os.environ.get("HF_HOME") or cache / "huggingface").expanduser().absolute(),
        "temporary": Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()).absolute(),
        "shared_memory": Path("/dev/shm"),
    }


def python_with_torch(ray: str) -> str | None:
    """An interpreter of this machine that has torch and this version of Ray; None: there is none.

    It is this process's own, or that of the environment which was used last.
    """
    if importlib.util.find_spec("torch") is not None:
        return sys.executable

    def has(packages: Any, name: str, version: str | None = None) -> bool:
        return name in packages and version in (None, packages[name]["version"])

    found = inventories(default_folder())
    fitting = [
        env for env, each in found.items() if has(each["packages"], "torch") and has(each["packages"], "ray", ray)
    ]
    latest = max(fitting, key=lambda env: (env / "nrl-venv.json").stat().st_mtime, default=None)
    return None if latest is None else str(latest / "bin" / "python")


def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _addresses(host: str) -> list[str]:
    """What the name of this host stands for, in /etc/hosts or by DNS; programs take the first that they can."""
    with contextlib.suppress(OSError):
        return list(dict.fromkeys(str(each[4][0]) for each in socket.getaddrinfo(host, None)))
    return []


def _lock() -> dict[str, str] | None:
    """The lock file beside this process's environment, else beside nrl, else those that an installed nrl carries."""
    starts = [Path(sys.prefix).parent]
    spec = importlib.util.find_spec("nrl")
    if spec is not None and spec.origin:
        starts.append(Path(spec.origin).parents[1])
    for start in starts:
        for folder in (start, *start.parents):
            if (folder / "uv.lock").is_file() and (folder / "pyproject.toml").is_file():
                return {"path": str(folder / "uv.lock"), "digest": _digest(folder / "uv.lock")}
    if spec is not None and spec.origin and (carried := sorted(Path(spec.origin).parent.glob("pylocks/*.toml"))):
        return {"path": str(carried[0].parent), "digest": _digest(*carried)}
    return None


def _digest(*files: Path) -> str:
    return hashlib.sha256(b"\0".join(each.read_bytes() for each in files)).hexdigest()[:12]


def _cores(root: Path) -> dict[str, Any]:
    limits = {"allowed": mask(), "quota": quota(root), "usable": cores(root)}
    return {"machine": os.cpu_count(), **limits}


def _memory(root: Path) -> dict[str, Any]:
    lines = dict[str, int]()
    with contextlib.suppress(OSError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            name, _, number = line.partition(":")
            lines[name] = int(number.split()[0]) << 10
    limit, left = memory(root)
    free = [each for each in (lines.get("MemAvailable"), left) if each is not None]
    return {"total": lines.get("MemTotal"), "available": min(free, default=None), "limit": limit}


def _folder(path: Path) -> dict[str, Any]:
    """Of a folder, or of the nearest one around it that there is."""
    there = next((each for each in (path, *path.parents) if each.is_dir()), Path("/"))
    found: dict[str, Any] = {"path": str(path), "exists": there == path}
    try:
        disk = os.statvfs(there)
        device = there.stat().st_dev
    except OSError as error:
        return {**found, "error": str(error.strerror)}
    writable = os.access(there, os.W_OK | os.X_OK) and not disk.f_flag & os.ST_RDONLY
    size, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    return {**found, "total": size, "free": free, "device": device, "writable": writable}
