"""Files that are hashed while they are written, so that nobody reads them back for their checksum."""

import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from nrl.errors import CheckpointError

__all__ = ["Buffer", "Written", "check_sizes", "check_sums", "flush", "write"]

type Buffer = bytes | bytearray | memoryview


class Written(NamedTuple):
    """The size and checksum of a written file.

    Args:
        size: in bytes.
        sha256: of the content, as hexadecimal digits.

    >>> Written(3, hashlib.sha256(b"abc").hexdigest()).size
    3
    """

    size: int
    sha256: str


def write(path: Path, parts: Iterable[Buffer]) -> Written:
    """Write a file from its parts and hash them on the way; the file is on the disk when this returns.

    Its folder is not: see `flush`.

    Args:
        path: of the file; one that is there is replaced.
        parts: its bytes, in order. They are made one at a time.

    Raises:
        OSError: the disk does not take it.

    >>> import tempfile
    >>> write(Path(tempfile.mkdtemp()) / "letters", [b"ab", b"c"]) == Written(3, hashlib.sha256(b"abc").hexdigest())
    True
    """
    size, digest = 0, hashlib.sha256()
    with path.open("wb") as file:
        for part in parts:
            digest.update(part)
            size += file.write(part)
        file.flush()
        os.fsync(file.fileno())
    return Written(size, digest.hexdigest())


def flush(folder: Path) -> None:
    """Flush the names in a folder to the disk.

    >>> import tempfile
    >>> flush(Path(tempfile.mkdtemp()))
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_sizes(folder: Path, files: Mapping[str, Written]) -> None:
    """Check that files exist and have the size that was written, without reading them.

    Raises:
        CheckpointError: one is missing, or has another size.

    >>> check_sizes(Path("there/is/none"), {"weights": Written(3, "")})
    Traceback (most recent call last):
    nrl.errors.CheckpointError: there/is/none: the file weights is missing
    """
    for name, (size, _) in files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{folder}: the file {name} is missing")
        if (found := path.stat().st_size) != size:
            raise CheckpointError(f"{folder}: the file {name} has {found} bytes, and had {size}")


def check_sums(folder: Path, files: Mapping[str, Written]) -> None:
    """Read files, several at once, and compare their content with what was written.

    Raises:
        CheckpointError: one was altered.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> check_sums(folder, {"letters": write(folder / "letters", [b"abc"])})
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, sha256 in zip(files, pool.map(lambda name: _sha256(folder / name), files), strict=True):
            if sha256 != files[name].sha256:
                raise CheckpointError(f"{folder}: the file {name} was altered; its checksum is not what was written")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
