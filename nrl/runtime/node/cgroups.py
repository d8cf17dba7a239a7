"""What the kernel lets this process use: processors, by its mask and its cgroups, and memory.

It travels by value, and needs the standard library alone.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["cores", "mask", "memory", "quota"]

_UNLIMITED = 1 << 60  # bytes: what version 1 of cgroups says where there is no limit is near 2 ** 63


def cores(root: Path = Path("/")) -> int:
    """How many processors this process may use: its mask's, or its cgroups' quota if that is less; 1 at least.

    Args:
        root: where ``proc`` and ``sys`` are.

    >>> cores() > 0
    True
    """
    most = quota(root)
    return mask() if most is None else max(1, min(mask(), int(most)))


def mask() -> int:
    """How many processors this process may run on, by its mask alone."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def quota(root: Path = Path("/")) -> float | None:
    """Processors whose time the cgroups of this process may use; None: there is no limit.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    said = [_text(folder / "cpu.max") for folder in _folders(root)]
    old = root / "sys/fs/cgroup/cpu"  # of version 1
    said.append(f"{_text(old / 'cpu.cfs_quota_us')} {_text(old / 'cpu.cfs_period_us')}")
    found = list[float]()
    for text in said:
        with contextlib.suppress(ValueError, ZeroDivisionError):  # "max 100000"
            most, period = map(int, text.split())
            if most > 0:
                found.append(most / period)
    return min(found, default=None)


def memory(root: Path = Path("/")) -> tuple[int | None, int | None]:
    """Bytes that the cgroups of this process may have, and how many of them are left; None: no limit, or not known.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    places = [(folder, "memory.max", "memory.current", "inactive_file") for folder in _folders(root)]
    old = root / "sys/fs/cgroup/memory"  # of version 1
    places.append((old, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"))
    limits, left = list[int](), list[int]()
    for folder, most, used, cached in places:
        with contextlib.suppress(ValueError):  # "max"
            limit = int(_text(folder / most))
            if limit < _UNLIMITED:
                limits.append(limit)
                # what the kernel drops before it kills anybody: files that nobody has read of late
                usage = int(_text(folder / used)) - _row(_text(folder / "memory.stat"), cached)
                left.append(max(0, limit - max(0, usage)))
    return min(limits, default=None), min(left, default=None)


def _folders(root: Path) -> Iterator[Path]:
    """This process's cgroup and those around it; in a container it may see its own as the top.

    Only version 2 of cgroups has them in one tree.
    """
    top = root / "sys/fs/cgroup"
    lines = _text(root / "proc/self/cgroup").splitlines()
    within = next((line[3:] for line in lines if line.startswith("0::")), "").strip("/")
    for folder in (top / within, *(top / within).parents):
        yield folder
        if folder == top:
            return


def _text(path: Path) -> str:
    """What a file says; nothing where there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _row(table: str, name: str) -> int:
    """A number of a table that has a name and a number in each line; 0 where it has none."""
    rows = dict(line.split(maxsplit=1) for line in table.splitlines())
    return int(rows.get(name, 0))
