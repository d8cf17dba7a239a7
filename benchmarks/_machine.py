"""Measure the load of the machine and the memory of a process. Needs the standard library alone."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["Machine", "described", "resident", "watched"]

type Machine = dict[str, float]
"""Shares of the time of all cores, between 0 and 1, by ``busy``, ``stolen`` and ``idle``; empty where not known."""

_STAT = Path("/proc/stat")


@contextmanager
def watched() -> Iterator[Machine]:
    """What became of the time of all cores inside of the block; filled in when it is left.

    ``stolen`` is what a hypervisor gave to other machines, as ``st`` of ``vmstat``.

    >>> with watched() as machine:
    ...     pass
    >>> sorted(machine) in ([], ["busy", "idle", "stolen"])
    True
    """
    machine: Machine = {}
    before = _ticks()
    yield machine
    machine |= shares(before, _ticks())


def shares(before: list[int], after: list[int]) -> Machine:
    """Of two readings of the first line of ``/proc/stat``.

    >>> shares([10, 0, 10, 100, 0, 0, 0, 0], [40, 0, 20, 140, 10, 0, 0, 10])
    {'busy': 0.4, 'stolen': 0.1, 'idle': 0.5}
    """
    if not before or not after:
        return {}
    user, nice, system, idle, waiting, hard, soft, stolen = (b - a for a, b in zip(before, after, strict=True))
    whole = max(1, user + nice + system + idle + waiting + hard + soft + stolen)
    busy = user + nice + system + hard + soft
    return {"busy": busy / whole, "stolen": stolen / whole, "idle": (idle + waiting) / whole}


def described(machine: Machine) -> str:
    """What `watched` found, as words.

    >>> described({"busy": 0.5, "idle": 0.5}), described({})
    ('50% busy, 50% idle', 'not known')
    """
    return ", ".join(f"{share:.0%} {name}" for name, share in machine.items()) or "not known"


def _ticks() -> list[int]:
    if not _STAT.exists():
        return []
    return [int(word) for word in _STAT.read_text().split("\n", 1)[0].split()[1:9]]


def resident(process: int | None = None) -> dict[str, float]:
    """The resident memory of a process, in MiB: its ``own``, and ``shared``: of mapped files and shared memory.

    >>> resident()["own"] > 1
    True
    """
    status = Path(f"/proc/{process or os.getpid()}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines() if line.startswith("Rss"))
    mib = {name: int(value.split()[0]) / 1024 for name, value in fields.items()}
    return {"own": mib["RssAnon"], "shared": mib["RssFile"] + mib["RssShmem"]}
