"""What a process uses: memory, open files, threads, processes below it; and what of it is never given back."""

import ctypes
import gc
import os
import resource
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs

from nrl.envs.inprocess.threads import NAME, stuck

__all__ = ["Growth", "Meter", "Usage", "growth", "usage"]

_PROC = Path("/proc/self")
_SPARE = 4  # files, threads and processes that may be there at one moment and not at another
_SPARE_BYTES = 8 << 20  # of memory, which is not given back to the byte


@attrs.frozen
class Usage:
    """What this process uses.

    Args:
        memory: bytes that are resident, of this process and of all below it; where the system does not say, the most
            that this process ever had.
        files: open ones.
        threads: of Python. Of those in which nrl makes calls of user code, only those in calls that were given up: of
            the others there are more where calls are slow, and never fewer.
        processes: below this one; 0 where the system does not say.
    """

    memory: int
    files: int
    threads: int
    processes: int


def usage() -> Usage:
    """What this process uses now.

    >>> usage().files > 0 and usage().memory > 0
    True
    """
    below = _below(os.getpid())
    memory = sum(filter(None, (_resident(pid) for pid in (os.getpid(), *below)))) or _most()
    listed = next((path for path in (_PROC / "fd", Path("/dev/fd")) if path.is_dir()), None)
    threads = stuck() + sum(not each.name.startswith(NAME) for each in threading.enumerate())
    return Usage(memory, len(list(listed.iterdir())) if listed else 0, threads, len(below))


def _below(root: int) -> list[int]:
    """The processes that this one started, and those that they did, unless they have ended."""
    parents = dict[int, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(path.parent.name)] = int(parent)
    found, new = list[int](), [root]
    while new:
        new = [pid for pid, parent in parents.items() if parent in new]
        found += new
    return found


def _resident(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return None


def _most() -> int:
    found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found if sys.platform == "darwin" else found * 1024


def _trim() -> None:
    """Give back to the system what is free, where the C library would keep it: fragments would look like a leak."""
    with suppress(AttributeError, OSError):  # another library has no such function
        ctypes.CDLL(None).malloc_trim(0)


class Meter:
    """Measures one call after the other: its seconds, and the bytes by which the process was larger meanwhile.

    ``seconds`` and ``memory`` are of the last call that ended.

    >>> meter = Meter()
    >>> with meter:
    ...     some = bytearray(1 << 25)
    >>> meter.seconds < 10
    True
    """

    def __init__(self) -> None:
        self.seconds, self.memory = 0.0, 0
        self._began, self._before = 0.0, 0

    def __enter__(self) -> None:
        with suppress(OSError):
            (_PROC / "clear_refs").write_text("5")  # the peak begins anew
        self._before = _peak()
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._began
        self.memory = max(0, _peak() - self._before)


def _peak() -> int:
    with suppress(OSError, ValueError):
        for line in (_PROC / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return _most()


@attrs.frozen
class Growth:
    """What was used before, halfway and after many sessions."""

    sessions: int
    before: Usage
    halfway: Usage
    after: Usage

    def leaks(self) -> dict[str, str]:
        """What has grown all the way: what it is, and from where to where.

        >>> before, after = Usage(0, 3, 1, 0), Usage(0, 103, 1, 0)
        >>> Growth(100, before, attrs.evolve(before, files=53), after).leaks()
        {'files': '3 -> 103'}
        """
        found = dict[str, str]()
        for name in ("files", "threads", "processes"):
            a, b, c = (getattr(each, name) for each in (self.before, self.halfway, self.after))
            if c - a > _SPARE and c > b:
                found[name] = f"{a} -> {c}"
        a, b, c = (each.memory for each in (self.before, self.halfway, self.after))
        if c - a > _SPARE_BYTES and c - b > (b - a) / 4:  # what fills a cache grows once
            found["memory"] = f"{a / 2**20:.0f} -> {c / 2**20:.0f} MiB"
        return found


async def growth(session: Callable[[int], Awaitable[Any]], sessions: int) -> Growth:
    """Run many sessions, one after the other, and see what grows.

    Args:
        session: from its number.
        sessions: how many; a tenth of them comes before the first look, so that caches are full.
    """
    first = max(1, sessions // 10)
    ends, seen, done = (first, first + (sessions - first) // 2, sessions), list[Usage](), 0
    for end in ends:
        while done < end:
            await session(done)
            done += 1
        gc.collect()
        _trim()
        seen.append(usage())
    return Growth(sessions, *seen)
