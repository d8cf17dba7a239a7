"""Checks that the program and all processes of a trainer see the same folder.

A path does not tell whether two nodes have the same disk behind it. So the program leaves a note in the folder, each
process that finds it leaves an answer, and the program looks for the answers.
"""

import socket
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from nrl.errors import CheckpointError
from nrl.files import Folder, Written, check_sizes, check_sums, to_folder, write
from nrl.runtime.mesh.current_process import process
from nrl.runtime.mesh.placement import Mesh
from nrl.runtime.mesh.rpc import from_all
from nrl.runtime.node import shared_fs_probe

__all__ = ["Stranger", "answer", "apart", "arrived", "check", "check_shared", "lies_there", "see", "stranger"]


class Stranger(NamedTuple):
    """A process that has another folder than the program, and why that is known."""

    rank: int
    host: str
    why: str

    def __str__(self) -> str:
        return f"rank {self.rank}, on host {self.host}, {self.why}"


def stranger(folder: Folder, ask: Callable[[Folder, str], Sequence[tuple[str, str]]]) -> Stranger | None:
    """The first process that does not have the program's folder; None: all have it.

    Args:
        folder: exists, and the program can write there.
        ask: calls `answer` with these arguments in each process, and returns all answers by rank.

    Raises:
        OSError: the program itself cannot write there; a store may raise errors of its own.
    """
    note = f".shared-{uuid.uuid4().hex}"
    _leave(folder / note)
    try:
        for rank, (host, why) in enumerate(ask(folder, note)):
            if not why and not shared_fs_probe.arrives(folder / f"{note}.{rank}"):
                why = "writes what does not arrive there"
            if why:
                return Stranger(rank, host, why)
    finally:
        for path in folder.glob(f"{note}*"):
            path.unlink(missing_ok=True)
    return None


def check_shared(mesh: Mesh, name: str, folder: str | Folder, who: str) -> None:
    """Check that the program and all processes of a trainer have the same folder.

    Raises:
        CheckpointError: a process has another one.
    """
    place, here = to_folder(folder).absolute(), socket.gethostname()
    found = _stranger_of(mesh, who, place)
    if found is not None:
        instead = (
            "give a folder (out=) on a disk that all nodes share by the same path, or a store that they reach, such as "
            "checkpoints.to=s3://bucket/run, or reserve the trainer's slots on the node of this program"
            if isinstance(place, Path)
            else "give a store (checkpoints.to=) that all nodes reach, and see that its package is installed there and "
            "the environment of their processes lets them in"
        )
        raise CheckpointError(
            f"{who}: {folder} is not the same folder for this program, on host {here}, and for all "
            f"of {name}: {found}. A checkpoint would be without what it writes; {instead}"
        )


def apart(mesh: Mesh, folder: Path) -> Stranger | None:
    """The first process, which is the one that exports, if it does not have the program's folder."""
    found = _stranger_of(mesh, "export", folder)
    return found if found is not None and found.rank == 0 else None


def lies_there(folder: Path, found: Stranger) -> CheckpointError:
    """What a program is told whose export another host has."""
    return CheckpointError(
        f"export: the model lies in {folder} on host {found.host}, and this program, on host "
        f"{socket.gethostname()}, does not see it: {found}. Copy it from there, or give a folder on a disk "
        "that both share by the same path"
    )


def _stranger_of(mesh: Mesh, who: str, folder: Folder) -> Stranger | None:
    return stranger(folder, partial(from_all, mesh, who, answer, turn=False))


def arrived(name: str, folder: Folder, each: Iterable[Mapping[str, Written]]) -> dict[str, Written]:
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


def answer(folder: Folder, note: str) -> tuple[str, str]:
    """In a process: answer the program's note; the name of this host, and why it has another folder, or ""."""
    return socket.gethostname(), shared_fs_probe.answer(folder, note, str(process().rank), _leave)


def see(folder: Folder, files: Mapping[str, Written]) -> None:
    """In a process: check that all files are there, with the sizes with which they were written.

    Raises:
        CheckpointError: one is not, although the program sees it.
    """
    try:
        check_sizes(folder, files)
    except CheckpointError as error:
        raise CheckpointError(
            f"restore: {error}, as rank {process().rank} on host {socket.gethostname()} sees it; put the checkpoint on "
            "a disk that all nodes share by the same path, or into a store that they reach"
        ) from None


def check(folder: Folder, files: Mapping[str, Written]) -> None:
    """In a process: compare its share of the files with their checksums. Together the processes read each file once.

    Raises:
        CheckpointError: one was altered.
    """
    here = process()
    check_sums(folder, {name: files[name] for name in sorted(files)[here.rank :: here.size]})


def _leave(path: Folder) -> None:
    if isinstance(path, Path):
        path.write_bytes(b"")
    else:
        write(path, [])
