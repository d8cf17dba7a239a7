"""Files that are hashed while they are written, so that nobody reads them back for their checksum.

All that was written into a folder, and into those within it, stands in one manifest, which is written last. A folder
lies on a disk, and is a `pathlib.Path`; or in a store of objects, and is an `upath.UPath`, which has the same methods.
"""

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast
from urllib.parse import unquote

from nrl.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from upath import UPath

__all__ = [
    "MANIFEST",
    "NOT_FINITE",
    "Buffer",
    "Folder",
    "Saved",
    "Written",
    "check_parts",
    "check_sizes",
    "check_sums",
    "files_of",
    "flush",
    "free_room",
    "make",
    "on_disk",
    "part_name",
    "read_manifest",
    "read_saved",
    "resolve_output",
    "to_folder",
    "without_file_scheme",
    "write",
    "write_manifest",
]

MANIFEST = "manifest.json"
NOT_FINITE = "not_finite"
"""The field of a value's record in the manifest with the names of its tensors that have NaN or infinite numbers."""

type Buffer = bytes | bytearray | memoryview
type Folder = Path | UPath
"""A folder, or a file, on a disk or in a store of objects. There it has no parts that could be locked or renamed."""

_FEW_INODES = 16  # fewer than a checkpoint may take
_NAME = 255  # bytes that a name may have on the disks of Linux
_BLOCK = 1 << 24  # bytes that are asked of a store at once, where a whole file is read


def to_folder(where: str | Folder) -> Folder:
    """Return the folder of a path or URL, such as ``s3://bucket/runs/qwen``. ``~/`` begins one in the home folder.

    Raises:
        ConfigError: the protocol does not exist, or its package is not installed.

    >>> to_folder("runs/qwen"), str(to_folder("memory://runs/qwen") / "train")
    (PosixPath('runs/qwen'), 'memory://runs/qwen/train')
    """
    if not isinstance(where, str):
        return where
    protocol, url, _ = where.partition("://")
    if not url:
        path = Path(where).expanduser() if where.startswith("~") else Path(where)
        return path.absolute() if str(path).startswith("~") else path  # A Path drops the dot of "./~/runs".
    from upath import UPath  # Only stores need it.

    local: dict[str, Any] = {"auto_mkdir": True} if protocol in ("file", "local") else {}
    try:  # Listings are not cached, since they must show files that others wrote.
        folder = UPath(where, use_listings_cache=False, **local)
        _ = folder.fs
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{where}: this store cannot be reached ({error}). Each protocol is a package of fsspec, such as s3fs for "
            "s3:// and gcsfs for gs://: install it here and where trainers run, or give the path of a folder"
        ) from error
    return cast("UPath", folder)


def resolve_output(option: str, name: str | Folder) -> Folder:
    """Return the folder or file that an option names for writing: ``~/`` is expanded, and what is not meant refused.

    Args:
        option: how errors begin, such as ``"run: out"``.
        name: its value.

    Raises:
        ConfigError: the name is empty, has a variable such as ``$HOME`` or a NUL character, or is the root of the file
            system; or as `to_folder` does.

    >>> resolve_output("run: out", "runs/qwen")
    PosixPath('runs/qwen')
    """
    if not str(name).strip():
        raise ConfigError(f"{option}={str(name)!r} is empty; give a folder")
    if "\0" in str(name):
        raise ConfigError(f"{option}={str(name)!r} holds a NUL character, which no path may have; leave it out")
    if variable := re.search(r"\$([A-Za-z_]\w*|\{[^}]*\}?)", str(name)):
        # Shells write ${NAME:-default}, and other configurations ${env:NAME}.
        key = re.sub(r"^(oc\.)?env[:.]", "", variable[1].strip("{}"), flags=re.IGNORECASE)
        key = re.sub(r":-|[:?]", ",", key, count=1) or "NAME"
        raise ConfigError(
            f"{option}={name} holds {variable[0]}, which is not expanded here; write ${{oc.env:{key}}} in a file or on "
            "the command line for an environment variable, or give the path itself"
        )
    try:
        path = to_folder(str(name)) if isinstance(name, Path) else to_folder(name)
        is_root = isinstance(path, Path) and path.resolve() == Path(path.resolve().anchor)
    except RuntimeError as error:  # The user or the home folder does not exist.
        raise ConfigError(f"{option}={name}: {error}; give the path itself") from error
    if isinstance(path, Path) and any(len(os.fsencode(part)) > _NAME for part in path.parts):
        raise ConfigError(f"{option}={str(name)[:60]}... has a name of more than {_NAME} bytes; give a shorter one")
    if is_root:
        raise ConfigError(f"{option}={name} is the root of the file system; give a folder of its own")
    return path


def without_file_scheme(option: str, name: str | Path) -> str | Path:
    """Return the path that a ``file://`` URL names; any other name as it is.

    Args:
        option: how errors begin, such as ``"run: out"``.
        name: its value.

    Raises:
        ConfigError: the URL names another host.

    >>> without_file_scheme("run: out", "file:///data/runs/qwen")
    '/data/runs/qwen'
    """
    url = re.fullmatch(r"(?:file|local):(?P<host>//[^/]*)?(?P<path>/.*)?", str(name), re.DOTALL)  # a Path has one slash
    if not url:
        return name
    if url["host"] not in (None, "//", "//localhost") or not url["path"]:
        raise ConfigError(f"{option}={name} names no absolute path of this host; give the path itself")
    return unquote(url["path"])


def make(folder: Folder) -> None:
    """Make a folder, and those above it. A store has none that could be made.

    >>> make(to_folder("memory://runs/qwen"))
    """
    if isinstance(folder, Path):
        folder.mkdir(parents=True, exist_ok=True)


@contextmanager
def on_disk(folder: Folder, names: Iterable[str]) -> Iterator[Path]:
    """Copy small files of a folder into one on the disk, which holds nothing else, for as long as the block lasts.

    >>> _ = write(to_folder("memory://letters") / "abc", [b"abc"])
    >>> with on_disk(to_folder("memory://letters"), ["abc"]) as here:
    ...     print((here / "abc").read_text())
    abc
    """
    with TemporaryDirectory() as copies:
        for name in names:
            (Path(copies) / name).write_bytes((folder / name).read_bytes())
        yield Path(copies)


def _open(path: Folder, mode: str) -> IO[bytes]:
    if isinstance(path, Path):
        return cast("IO[bytes]", path.open(mode))
    return cast("IO[bytes]", path.fs.open(path.path, mode, block_size=_BLOCK))


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
    """The files that a writer has written into a folder, and its record.

    Args:
        files: by their names in the folder.
        record: JSON, what is to be remembered besides.

    >>> Saved({"letters": Written(3, "ba78")}, {"step": 9}).record
    {'step': 9}
    """

    files: Mapping[str, Written]
    record: Mapping[str, Any]


def write(path: Folder, parts: Iterable[Buffer]) -> Written:
    """Write a file from its parts and hash them on the way; the file is on the disk when this returns.

    Its folder is not: see `flush`. A store has the file when it is complete.

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
    with _open(path, "wb") as file:
        for part in parts:
            digest.update(part)
            size += file.write(part)
        if isinstance(path, Path):
            file.flush()
            os.fsync(file.fileno())
    return Written(size, digest.hexdigest())


def flush(folder: Folder) -> None:
    """Flush the names in a folder to the disk; a store needs no such thing.

    >>> import tempfile
    >>> flush(Path(tempfile.mkdtemp()))
    """
    if not isinstance(folder, Path):
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_room(path: Path) -> str:
    """Return how much room there is at a path, in bytes and, where few are left, in inodes.

    >>> import re
    >>> bool(re.fullmatch(r"[0-9.]+ MB are free in /tmp", free_room(Path("/tmp/there/is/none"))))
    True
    """
    folder = next(above for above in (path.absolute(), *path.absolute().parents) if above.exists())
    system = os.statvfs(folder)
    megabytes = f"{system.f_bavail * system.f_frsize / 1e6:.1f} MB"
    if system.f_files and system.f_favail < _FEW_INODES:  # a file system that counts none reports 0 of them
        inodes = f"{system.f_favail} inodes are free in {folder}: remove files, each of which takes one"
        return f"{megabytes}, but only {inodes}"
    return f"{megabytes} are free in {folder}"


def part_name(rank: int, count: int) -> str:
    """Return the file name of one process of ``count``.

    >>> part_name(0, 2)
    '00001-of-00002.safetensors'
    """
    return f"{rank + 1:05}-of-{count:05}.safetensors"


def check_parts(folder: Folder, names: Collection[str]) -> None:
    """Check that of the files of processes, which `part` names, there are those of all; and any that lies right there.

    Raises:
        CheckpointError: one is missing.

    >>> check_parts(Path("there/is/half"), ["00001-of-00002.safetensors"])
    Traceback (most recent call last):
    nrl.errors.CheckpointError: there/is/half: of what 2 processes wrote, 00002-of-00002.safetensors is missing
    """
    if all("/" in name for name in names):
        raise CheckpointError(f"{folder}: nothing is there of what processes wrote")
    for count in sorted({int(match[1]) for name in names if (match := _PART.fullmatch(name))}):
        if lost := sorted({part_name(rank, count) for rank in range(count)} - set(names)):
            further = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            raise CheckpointError(f"{folder}: of what {count} processes wrote, {lost[0]}{further} is missing")


_PART = re.compile(r"\d+-of-(\d+)\.safetensors")


def check_sizes(folder: Folder, files: Mapping[str, Written]) -> None:
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
        if (actual := path.stat().st_size) != size:
            raise CheckpointError(f"{folder}: the file {name} has {actual} bytes, and had {size}")


def check_sums(folder: Folder, files: Mapping[str, Written]) -> None:
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


def _sha256(path: Folder) -> str:
    with _open(path, "rb") as file:
        return hashlib.file_digest(cast("Any", file), "sha256").hexdigest()


def write_manifest(folder: Folder, files: Mapping[str, Written], values: Mapping[str, Any], **about: Any) -> Written:
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


def read_manifest(folder: Folder) -> dict[str, Any] | None:
    """Read the manifest of a folder. None: it cannot be read, or was altered.

    Raises:
        OSError: a store does not answer.

    >>> read_manifest(Path("there/is/none"))
    """
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        return manifest if manifest.pop("sha256") == _seal(manifest) else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    except OSError as error:
        if isinstance(folder, Path) or isinstance(error, FileNotFoundError):
            return None
        raise  # An unreachable file may exist.


def read_saved(folder: Folder) -> Saved | None:
    """Read the record of a folder from its manifest, or from the manifest of its parent. None: there is no record.

    Raises:
        CheckpointError: the manifest was altered.

    >>> read_saved(Path("there/is/none"))
    """
    for parent, name in ((folder, "."), (folder.parent, folder.name)):
        if (parent / MANIFEST).exists():
            manifest = read_manifest(parent)
            if manifest is None:
                raise CheckpointError(f"{parent}: its {MANIFEST} was altered")
            if record := manifest.get("values", {}).get(name):
                return Saved(files_of(manifest, name), record)
    return None


def files_of(manifest: Mapping[str, Any], name: str = ".") -> dict[str, Written]:
    """Return the files of a manifest in a subfolder, by their names there.

    >>> list(files_of({"files": {"a": [1, "ca97"], "policy/b": [1, "3e23"]}}, "policy"))
    ['b']
    """
    start = "" if name == "." else f"{name}/"
    records = {file.removeprefix(start): x for file, x in manifest["files"].items() if file.startswith(start)}
    return {file: Written(*x) for file, x in records.items()}


def _seal(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
