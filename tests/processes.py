"""Processes of this machine, as tests find them: by a mark in their environment, which children inherit."""

import time
from collections.abc import Callable
from pathlib import Path
from time import monotonic

__all__ = ["alive", "descendants", "marked", "settled", "titles"]


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def descendants(pid: int) -> list[int]:
    """The living processes that a process started, and those that they did."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return [each for each in found[1:] if alive(each)]


def marked(mark: str) -> list[int]:
    """The living processes that were started with ``mark`` in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes() and alive(int(path.parent.name)):
                found.append(int(path.parent.name))
        except OSError:  # it ended, or is another user's
            continue
    return sorted(found)


def titles(pids: list[int]) -> dict[int, str]:
    """What processes call themselves."""
    found = {}
    for pid in pids:
        try:
            found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
    return found


def settled[T](look: Callable[[], T], seconds: float) -> T:
    """What ``look`` returns in the end: as soon as that is falsy, or when the time is over."""
    until = monotonic() + seconds
    while (found := look()) and monotonic() < until:
        time.sleep(0.05)
    return found
