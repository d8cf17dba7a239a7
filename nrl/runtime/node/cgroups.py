"""Limits of the kernel for this process: processors, by its mask and its cgroups, and memory.

The module travels by value, and needs the standard library alone.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["allowed_cores", "cpu_quota", "memory_limit", "usable_cores"]

_UNLIMITED = 1 << 60  # bytes: what version 1 of cgroups says where there is no limit is near 2 ** 63


def usable_cores(root: Path = Path("/")) -> int:
    """Return the number of processors that this process may use: the smaller of mask and cgroup quota, at least 1.

    Args:
        root: where ``proc`` and ``sys`` are.

    >>> usable_cores() > 0
    True
    """
    share = cpu_quota(root)
    return allowed_cores() if share is None else max(1, min(allowed_cores(), int(share)))


def allowed_cores() -> int:
    """Return the number of processors that this process may run on, by its mask alone."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the cgroups' limit of processor time, in processors; None: there is no limit.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    texts = [_read_text(folder / "cpu.max") for folder in _iter_cgroups(root)]
    old = root / "sys/fs/cgroup/cpu"  # version 1 of cgroups
    texts.append(f"{_read_text(old / 'cpu.cfs_quota_us')} {_read_text(old / 'cpu.cfs_period_us')}")
    quotas = list[float]()
    for text in texts:
        with contextlib.suppress(ValueError, ZeroDivisionError):  # "max 100000"
            limit, period = map(int, text.split())
            if limit > 0:
                quotas.append(limit / period)
    return min(quotas, default=None)


def memory_limit(root: Path = Path("/")) -> tuple[int | None, int | None]:
    """Return the cgroups' limit of memory in bytes, and the bytes left; None: no limit, or not known.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    sources = [(folder, "memory.max", "memory.current", "inactive_file") for folder in _iter_cgroups(root)]
    old = root / "sys/fs/cgroup/memory"  # version 1 of cgroups
    sources.append((old, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"))
    limits, remaining = list[int](), list[int]()
    for folder, limit_file, used, cached in sources:
        with contextlib.suppress(ValueError):  # "max"
            limit = int(_read_text(folder / limit_file))
            if limit < _UNLIMITED:
                limits.append(limit)
                # The kernel drops cached files without recent reads before it kills a process.
                usage = int(_read_text(folder / used)) - _read_number(_read_text(folder / "memory.stat"), cached)
                remaining.append(max(0, limit - max(0, usage)))
    return min(limits, default=None), min(remaining, default=None)


def _iter_cgroups(root: Path) -> Iterator[Path]:
    """Yield this process's cgroup and its parents; in a container its own may appear as the top.

    Only version 2 of cgroups has them in one tree.
    """
    top = root / "sys/fs/cgroup"
    lines = _read_text(root / "proc/self/cgroup").splitlines()
    within = next((line[3:] for line in lines if line.startswith("0::")), "").strip("/")
    for folder in (top / within, *(top / within).parents):
        yield folder
        if folder == top:
            return


def _read_text(path: Path) -> str:
    """Return the text of a file; empty if it does not exist."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _read_number(table: str, name: str) -> int:
    """Return a number of a table with a name and a number in each line; 0 if the name is missing."""
    rows = dict(line.split(maxsplit=1) for line in table.splitlines())
    return int(rows.get(name, 0))
