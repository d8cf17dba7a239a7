"""Checks that the program and all processes of a trainer see the same folder.

A path does not tell whether two nodes have the same disk behind it. So the program leaves a note in the folder, each
process that finds it leaves an answer, and the program looks for the answers.
"""

import socket
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from nrl.errors import CheckpointError
from nrl.files import Written, check_sizes, check_sums
from nrl.runtime.mesh.calling import from_all
from nrl.runtime.mesh.current_process import process
from nrl.runtime.mesh.placement import Mesh

__all__ = ["Stranger", "answer", "arrived", "check", "check_exported", "check_shared", "see", "stranger"]

_PATIENCE = 3.0
"""Seconds for a file to arrive: a network disk does not show it to everybody at once."""


class Stranger(NamedTuple):
    """A process that has another folder than the program, and why that is known."""

    rank: int
    host: str
    why: str

    def __str__(self) -> str:
        return f"rank {self.rank}, on host {self.host}, {self.why}"


def stranger(folder: Path, ask: Callable[[Path, str], Sequence[tuple[str, str]]]) -> Stranger | None:
    """The first process that does not have the program's folder; None: all have it.

    Args:
        folder: exists, and the program can write there.
        ask: calls `answer` with these arguments in each process, and returns all answers by rank.

    Raises:
        OSError: the program itself cannot write there.
    """
    note = f".shared-{uuid.uuid4().hex}"
    (folder / note).write_bytes(b"")
    try:
        for rank, (host, why) in enumerate(ask(folder, note)):
            if not why and not _arrives(folder / f"{note}.{rank}"):
                why = "writes what does not arrive there"
            if why:
                return Stranger(rank, host, why)
    finally:
        for path in folder.glob(f"{note}*"):
            path.unlink(missing_ok=True)
    return None


def check_shared(mesh: Mesh, name: str, folder: str | Path, who: str) -> None:
    """Check that the program and all processes of a trainer have the same folder.

    Raises:
        CheckpointError: a process has another one.
    """
    found = _stranger_of(mesh, who, Path(folder).absolute())
    if found is not None:
        raise CheckpointError(
            f"{who}: {folder} is not the same folder for this program, on host {socket.gethostname()}, and for all "
            f"of {name}: {found}. A checkpoint would be without what it writes; give a folder (out=) on a disk "
            "that all nodes share by the same path, or reserve the trainer's slots on the node of this program"
        )


def check_exported(mesh: Mesh, folder: Path) -> None:
    """Check that the program sees the files that the first process has exported.

    Raises:
        CheckpointError: it does not.
    """
    found = _stranger_of(mesh, "export", folder)
    if found is not None and found.rank == 0:
        raise CheckpointError(
            f"export: the model lies in {folder} on host {found.host}, and this program, on host "
            f"{socket.gethostname()}, does not see it: {found}. Copy it from there, or give a folder on a disk "
            "that both share by the same path"
        )


def _stranger_of(mesh: Mesh, who: str, folder: Path) -> Stranger | None:
    return stranger(folder, partial(from_all, mesh, who, answer, turn=False))


def arrived(name: str, folder: Path, each: Iterable[Mapping[str, Written]]) -> dict[str, Written]:
    """All files that the processes of a trainer wrote, if the program sees them as they were written.

    Args:
        name: of the trainer.
        folder: of the files.
        each: the files of each process, by rank.

    Raises:
        CheckpointError: the program does not see one of them, or sees it with another size.
    """
    found: dict[str, Written] = {}
    for rank, files in enumerate(each):
        try:
            check_sizes(folder, files)
        except CheckpointError as error:
            raise CheckpointError(
                f"save: {error}, when rank {rank} of {name} wrote it; this program does not see the same"
            ) from None
        found |= files
    return found


def answer(folder: Path, note: str) -> tuple[str, str]:
    """In a process: answer the program's note; the name of this host, and why it has another folder, or ""."""
    host = socket.gethostname()
    if not _arrives(folder / note):
        return host, "has another folder there" if folder.exists() else "has no such folder"
    try:
        (folder / f"{note}.{process().rank}").write_bytes(b"")
    except OSError as error:
        return host, f"cannot write there ({error.strerror})"
    return host, ""


def see(folder: Path, files: Mapping[str, Written]) -> None:
    """In a process: check that all files are there, with the sizes with which they were written.

    Raises:
        CheckpointError: one is not, although the program sees it.
    """
    try:
        check_sizes(folder, files)
    except CheckpointError as error:
        raise CheckpointError(
            f"restore: {error}, as rank {process().rank} on host {socket.gethostname()} sees it; put the checkpoint on "
            "a disk that all nodes share by the same path"
        ) from None


def check(folder: Path, files: Mapping[str, Written]) -> None:
    """In a process: compare its share of the files with their checksums. Together the processes read each file once.

    Raises:
        CheckpointError: one was altered.
    """
    here = process()
    check_sums(folder, {name: files[name] for name in sorted(files)[here.rank :: here.size]})


def _arrives(path: Path) -> bool:
    until = time.monotonic() + _PATIENCE
    while not path.exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True
