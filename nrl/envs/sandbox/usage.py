"""What a process and all that it has started use, as ``/proc`` says."""

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

__all__ = ["Usage", "usage"]

_TICK, _PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
_ROLLUP = "Pss:"


class Usage(NamedTuple):
    """Bytes of memory, and seconds of processors, those of children that have ended included."""

    memory: int
    cpu_seconds: float


def usage(pid: int, enough: int) -> Usage:
    """What a process and its descendants use.

    Args:
        pid: of the first of them.
        enough: bytes. Where the resident sizes add up to more, pages that several processes share are divided among
            them, which takes the kernel longer.
    """
    pages = ticks = 0
    found = [pid]
    for each in found:  # which grows
        here = Path(f"/proc/{each}")
        with suppress(OSError, ValueError):  # it has ended
            fields = (here / "stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime
            pages += int(fields[21])
            for thread in (here / "task").iterdir():
                found += map(int, (thread / "children").read_text().split())
    memory = pages * _PAGE
    if memory > enough:
        memory = sum(map(_proportional, found))
    return Usage(memory, ticks / _TICK)


def _proportional(pid: int) -> int:
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(_ROLLUP):
                return int(line.split()[1]) << 10
    return 0
