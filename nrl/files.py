"""Files that are hashed while they are written, so that nobody reads them back for their checksum.

All that was written into a folder, and into those within it, stands in one manifest, which is written last.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from nrl.errors import CheckpointError

__all__ = [
    "MANIFEST",
    "Buffer",
    "Saved",
    "Written",
    "check_sizes",
    "check_sums",
    "files_of",
    "flush",
    "read_manifest",
    "saved_in",
    "write",
    "write_manifest",
]

MANIFEST = "manifest.json"

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


class Saved(NamedTuple):
    """What was written into a folder, as its writer knows it.

    Args:
        files: by their names in the folder.
        record: JSON, what is to be remembered besides.

    >>> Saved({"letters": Written(3, "ba78")}, {"step": 9}).record
    {'step': 9}
    """

    files: Mapping[str, Written]
    record: Mapping[str, Any]


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


def write_manifest(folder: Path, files: Mapping[str, Written], values: Mapping[str, Any], **about: Any) -> Written:
    """Write the manifest of a folder, with a checksum of itself; the names in the folder are on the disk, too.

    Args:
        folder: where to.
        files: all of them, by their paths from here.
        values: what is to be remembered of the folders within this one, by name, and of this one as ``"."``; None of
            what is no folder.
        about: JSON, what there is to say besides.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = write_manifest(folder, {}, {"count": None}, step=9)
    >>> read_manifest(folder)
    {'step': 9, 'values': {'count': None}, 'files': {}}
    """
    manifest = json.loads(json.dumps({**about, "values": values, "files": files}))
    written = write(folder / MANIFEST, [json.dumps(manifest | {"sha256": _seal(manifest)}, indent=1).encode()])
    flush(folder)
    return written


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder. None: it cannot be read, or is not what was written.

    >>> read_manifest(Path("there/is/none"))
    """
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        return manifest if manifest.pop("sha256") == _seal(manifest) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def saved_in(folder: Path) -> Saved | None:
    """What the manifest of a folder, or of the one above it, says of it. None: there is none that does.

    Raises:
        CheckpointError: the manifest was altered.

    >>> saved_in(Path("there/is/none"))
    """
    for place, name in ((folder, "."), (folder.parent, folder.name)):
        if (place / MANIFEST).exists():
            manifest = read_manifest(place)
            if manifest is None:
                raise CheckpointError(f"{place}: its {MANIFEST} was altered")
            if record := manifest.get("values", {}).get(name):
                return Saved(files_of(manifest, name), record)
    return None


def files_of(manifest: Mapping[str, Any], name: str = ".") -> dict[str, Written]:
    """The files of a manifest that lie in a folder within its own, by their names there.

    >>> list(files_of({"files": {"a": [1, "ca97"], "policy/b": [1, "3e23"]}}, "policy"))
    ['b']
    """
    start = "" if name == "." else f"{name}/"
    told = {file.removeprefix(start): x for file, x in manifest["files"].items() if file.startswith(start)}
    return {file: Written(*x) for file, x in told.items()}


def _seal(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
