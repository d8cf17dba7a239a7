"""Real file systems of a few MB, which tests fill, and how much goes to files and comes from them."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["small_disk_at", "transferred"]


@contextmanager
def small_disk_at(disk: Path, *, megabytes: int, inodes: int = 0) -> Iterator[Path]:
    """A file system of so many MB and inodes (0: many) in a new folder; skips the test where none can be mounted."""
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,nr_inodes={inodes}", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a file system can be mounted only with the rights to")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def transferred() -> tuple[int, int]:
    """The bytes that this process has read and written by now, whether they came from a disk or from a cache."""
    told = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(told["rchar"]), int(told["wchar"])
