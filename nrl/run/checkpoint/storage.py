"""Where checkpoints lie: on a disk a whole one gets its name; in a store its manifest, written last, makes it whole.

All of this package goes through here to begin, complete, list, set aside and remove one, so it knows no other
difference between the two.
"""

import shutil
import socket
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from nrl.errors import CheckpointError
from nrl.files import MANIFEST, Folder, at, flush, free_room, make, resolve_output, write

__all__ = [
    "DAMAGED",
    "DIVERGED",
    "ELSEWHERE",
    "LABELS",
    "Left",
    "abandon",
    "begin",
    "complete",
    "listed",
    "located",
    "place",
    "remove",
    "root",
    "set_aside",
    "settle",
    "tidy",
]

ELSEWHERE = "elsewhere"
"""The file in the folder of a loop that says where its checkpoints are, if they are not there."""
DAMAGED, DIVERGED = LABELS = ("damaged", "diverged")
"""What follows the name of a checkpoint that is set aside: its files are not what was written; it is not finite."""


def place(root: str | Folder, step: int) -> Folder:
    """The folder under ``root`` of the checkpoint after a step.

    >>> place("checkpoints/train", 9).name
    '000010'
    """
    return at(root) / f"{step + 1:06}"


def root(own: Path, to: str | None) -> Folder:
    """Where the checkpoints of a loop are written: in its own folder, or in the one of its name under ``to``.

    >>> str(root(Path("runs/qwen/checkpoints/train"), "memory://qwen"))
    'memory://qwen/train'
    """
    return own if to is None else resolve_output("checkpoints.to", to).absolute() / own.name


def located(own: str | Folder) -> Folder:
    """Where the checkpoints of a loop are, which its own folder says if they are not there."""
    folder = at(own)
    told = folder / ELSEWHERE
    return at(told.read_text().strip()) if isinstance(told, Path) and told.is_file() else folder


def settle(own: Path, there: Folder, check: Callable[[], object]) -> bool:
    """Make the folder of a loop, check that its checkpoints can be written, and leave a note where they are.

    Args:
        own: the folder of the loop.
        there: from `root`.
        check: is called in between, and raises if they cannot.

    Returns:
        Whether the loop has had them there before.

    Raises:
        CheckpointError: later ones are elsewhere; or the store cannot be written to.
    """
    make(own)
    make(there)
    _reach(there)
    before = located(own)
    known = str(before) == str(there)
    if not known and (last := _newest(before)) > (here := _newest(there)):
        why = f"the newest is {here:06}, so the run would go back to it" if here else "none are, so it would begin anew"
        raise CheckpointError(
            f"checkpoints: those of '{own.name}' are in {before}, up to {last:06}, and checkpoints.to= says {there}, "
            f"where {why}; copy them there, or leave checkpoints.to as it was"
        )
    check()
    if there != own:
        (own / ELSEWHERE).write_text(f"{there}\n")
    else:
        (own / ELSEWHERE).unlink(missing_ok=True)
    return known


def _reach(folder: Folder) -> None:
    """See that a store can be written to."""
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


def listed(root: Folder) -> list[Folder]:
    """The folders of complete checkpoints, oldest first."""
    return [
        folder
        for folder in _named(root)
        if (folder.is_dir() if isinstance(folder, Path) else MANIFEST in _held(folder))
    ]


def _newest(root: Folder) -> int:
    """The number of the newest checkpoint; 0: there is none."""
    return max((int(folder.name) for folder in listed(root)), default=0)


def _held(folder: Any) -> set[str]:
    """The names in a folder of a store. Of one file it would say that it is not there where it does not answer."""
    try:
        return {each.name for each in folder.iterdir()}
    except FileNotFoundError:
        return set()


def _named(root: Folder) -> list[Folder]:
    found = (folder for folder in root.glob("[0-9]*") if folder.name.isdecimal())
    return sorted(found, key=lambda folder: (len(folder.name), folder.name))


def begin(folder: Folder) -> Folder:
    """Where to write a checkpoint; what is left there of an earlier one goes."""
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
    if folder.exists():  # killed between the two renames, the old one is found by `tidy`
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    written.rename(folder)
    flush(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


class Left(NamedTuple):
    """What can be said when a checkpoint could not be written: how far it came, how much room there is, what to do."""

    after: str
    room: str
    advice: str


def abandon(folder: Folder) -> Left:
    """Remove what has been written of a checkpoint."""
    if not isinstance(folder, Path):
        with suppress(Exception):  # the store may be out of reach; `tidy` comes again
            remove(folder)
        return Left("", "", "See that the store can be reached and written to")
    temporary = folder.with_name(f".{folder.name}.writing")
    size = sum(path.stat().st_size for path in temporary.rglob("*") if path.is_file())
    shutil.rmtree(temporary, ignore_errors=True)
    return Left(f" after {size / 1e6:.1f} MB", f"; {free_room(folder.parent)}", "Make room")


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


def set_aside(folder: Folder, label: str) -> str:
    """Take the name of a checkpoint from what nothing goes on from, and leave its files; what has another name now.

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


def tidy(root: Folder) -> None:
    """Clean up after a killed process: bring a replaced checkpoint back if its replacement is missing."""
    if not isinstance(root, Path):
        for folder in _named(root):
            if not {MANIFEST, *(f"{MANIFEST}.{label}" for label in LABELS)} & _held(folder):
                remove(folder)
        return
    for path in root.glob(".[0-9]*"):
        whole = path.with_name(path.stem[1:])
        if path.suffix == ".old" and not whole.exists():
            path.rename(whole)
        elif path.suffix in (".old", ".writing", ".gone"):
            shutil.rmtree(path, ignore_errors=True)
