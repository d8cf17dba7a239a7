"""Storage of checkpoints on a disk, where a complete one is renamed, or in an object store, where a manifest ends it.

The package begins, completes, lists, quarantines and removes checkpoints through this module alone, so no other module
distinguishes disks from stores.
"""

import shutil
import socket
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from nrl.errors import CheckpointError
from nrl.files import MANIFEST, Folder, flush, free_room, make, resolve_output, to_folder, write

__all__ = [
    "DAMAGED",
    "DIVERGED",
    "LABELS",
    "REMOTE",
    "Leftover",
    "begin",
    "clean",
    "complete",
    "discard",
    "list_complete",
    "quarantine",
    "remove",
    "resolve",
    "root",
    "settle",
    "step_dir",
]

REMOTE = "elsewhere"
"""The file in the folder of a loop that says where its checkpoints are, if they are not there."""
DAMAGED, DIVERGED = LABELS = ("damaged", "diverged")
"""What follows the name of a checkpoint that is set aside: its files are not what was written; it is not finite."""


def step_dir(root: str | Folder, step: int) -> Folder:
    """Return the folder under ``root`` of the checkpoint after a step.

    >>> step_dir("checkpoints/train", 9).name
    '000010'
    """
    return to_folder(root) / f"{step + 1:06}"


def root(loop_folder: Path, to: str | None) -> Folder:
    """Return the folder for the checkpoints of a loop: its own, or the one of its name under ``to``.

    >>> str(root(Path("runs/qwen/checkpoints/train"), "memory://qwen"))
    'memory://qwen/train'
    """
    return loop_folder if to is None else resolve_output("checkpoints.to", to).absolute() / loop_folder.name


def resolve(loop_folder: str | Folder) -> Folder:
    """Return the folder of a loop's checkpoints, from the note in its own folder if they are elsewhere."""
    folder = to_folder(loop_folder)
    note = folder / REMOTE
    return to_folder(note.read_text().strip()) if isinstance(note, Path) and note.is_file() else folder


def settle(loop_folder: Path, target: Folder, check: Callable[[], object]) -> bool:
    """Make the folder of a loop, check that its checkpoints can be written, and leave a note where they are.

    Args:
        loop_folder: the folder of the loop.
        target: from `root`.
        check: is called in between, and raises if they cannot.

    Returns:
        Whether the loop has had them there before.

    Raises:
        CheckpointError: later ones are elsewhere; or the store cannot be written to.
    """
    make(loop_folder)
    make(target)
    _check_writable(target)
    before = resolve(loop_folder)
    is_known = str(before) == str(target)
    if not is_known and (last := _newest(before)) > (newest_there := _newest(target)):
        consequence = (
            f"the newest is {newest_there:06}, so the run would go back to it"
            if newest_there
            else "none are, so it would begin anew"
        )
        raise CheckpointError(
            f"checkpoints: those of '{loop_folder.name}' are in {before}, up to {last:06}, and checkpoints.to= says "
            f"{target}, where {consequence}; copy them there, or leave checkpoints.to as it was"
        )
    check()
    if target != loop_folder:
        (loop_folder / REMOTE).write_text(f"{target}\n")
    else:
        (loop_folder / REMOTE).unlink(missing_ok=True)
    return is_known


def _check_writable(folder: Folder) -> None:
    """Check that a store can be written to."""
    if isinstance(folder, Path):
        return
    note = folder / f".reached-{uuid.uuid4().hex}"
    try:
        write(note, [])
        note.unlink()
    except Exception as error:  # a store raises all kinds
        raise CheckpointError(
            f"checkpoints: {folder} cannot be written to from host {socket.gethostname()} ({type(error).__name__}: "
            f"{error}); see that checkpoints.to= is right, and that the environment of this program lets it in"
        ) from error


def list_complete(root: Folder) -> list[Folder]:
    """List the folders of complete checkpoints, oldest first."""
    return [
        folder
        for folder in _list_numbered(root)
        if (folder.is_dir() if isinstance(folder, Path) else MANIFEST in _list_names(folder))
    ]


def _newest(root: Folder) -> int:
    """Return the number of the newest checkpoint; 0: there is none."""
    return max((int(folder.name) for folder in list_complete(root)), default=0)


def _list_names(folder: Any) -> set[str]:
    """List the names in a folder of a store, since an unreachable store reports single files as missing."""
    try:
        return {path.name for path in folder.iterdir()}
    except FileNotFoundError:
        return set()


def _list_numbered(root: Folder) -> list[Folder]:
    folders = (folder for folder in root.glob("[0-9]*") if folder.name.isdecimal())
    return sorted(folders, key=lambda folder: (len(folder.name), folder.name))


def begin(folder: Folder) -> Folder:
    """Return the folder to write a checkpoint into, without files of an earlier attempt."""
    if not isinstance(folder, Path):
        remove(folder)
        return folder
    temporary = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def complete(written: Folder, folder: Folder) -> None:
    """Give a checkpoint whose manifest has been written where `begin` said its name. It replaces an earlier one."""
    if not isinstance(folder, Path) or not isinstance(written, Path):
        return
    old = folder.with_name(f".{folder.name}.old")
    if folder.exists():  # killed between the two renames, the old one is found by `clean`
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    written.rename(folder)
    flush(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


class Leftover(NamedTuple):
    """Facts about a checkpoint that could not be written: bytes written, free room, and advice."""

    after: str
    room: str
    advice: str


def discard(folder: Folder) -> Leftover:
    """Remove what has been written of a checkpoint."""
    if not isinstance(folder, Path):
        with suppress(Exception):  # the store may be out of reach; `clean` comes again
            remove(folder)
        return Leftover("", "", "See that the store can be reached and written to")
    temporary = folder.with_name(f".{folder.name}.writing")
    size = sum(path.stat().st_size for path in temporary.rglob("*") if path.is_file())
    shutil.rmtree(temporary, ignore_errors=True)
    return Leftover(f" after {size / 1e6:.1f} MB", f"; {free_room(folder.parent)}", "Make room")


def remove(folder: Folder) -> None:
    """Remove a checkpoint, whole or not; there is never half of one under its name."""
    if not isinstance(folder, Path):
        with suppress(FileNotFoundError):
            (folder / MANIFEST).unlink()
        with suppress(FileNotFoundError):
            folder.fs.rm(folder.path, recursive=True)
        return
    gone = folder.with_name(f".{folder.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    if folder.exists():
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def quarantine(folder: Folder, label: str) -> str:
    """Rename a checkpoint that no run continues from, keep its files, and return a clause with its new name.

    Args:
        folder: of the checkpoint.
        label: follows the old name: one of `LABELS`.
    """
    if not isinstance(folder, Path):
        aside = folder / f"{MANIFEST}.{label}"
        aside.write_bytes((folder / MANIFEST).read_bytes())
        (folder / MANIFEST).unlink()
        return f"its {MANIFEST} is now {aside.name}"
    renamed = folder.with_name(f"{folder.name}.{label}")
    shutil.rmtree(renamed, ignore_errors=True)
    folder.rename(renamed)
    return f"it is now {renamed.name}"


def clean(root: Folder) -> None:
    """Clean up after a killed process: bring a replaced checkpoint back if its replacement is missing."""
    if not isinstance(root, Path):
        for folder in _list_numbered(root):
            if not {MANIFEST, *(f"{MANIFEST}.{label}" for label in LABELS)} & _list_names(folder):
                remove(folder)
        return
    for path in root.glob(".[0-9]*"):
        complete_path = path.with_name(path.stem[1:])
        if path.suffix == ".old" and not complete_path.exists():
            path.rename(complete_path)
        elif path.suffix in (".old", ".writing", ".gone"):
            shutil.rmtree(path, ignore_errors=True)
