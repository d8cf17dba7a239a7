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

__all__ = [
    "HostWithoutFolder",
    "answer",
    "check",
    "check_shared",
    "check_visible",
    "collect_written",
    "find_host_without_folder",
    "find_separate_exporter",
    "local_only_error",
]


class HostWithoutFolder(NamedTuple):
    """A host whose process does not have the program's folder, with the reason."""

    rank: int
    host: str
    reason: str

    def __str__(self) -> str:
        return f"rank {self.rank}, on host {self.host}, {self.reason}"


def find_host_without_folder(
    folder: Folder, ask: Callable[[Folder, str], Sequence[tuple[str, str]]]
) -> HostWithoutFolder | None:
    """Return the first process that does not have the program's folder; None: all have it.

    Args:
        folder: exists, and the program can write there.
        ask: calls `answer_note` with these arguments in each process, and returns all answers by rank.

    Raises:
        OSError: the program itself cannot write there; a store may raise errors of its own.
    """
    note = f".shared-{uuid.uuid4().hex}"
    _leave(folder / note)
    try:
        for rank, (host, reason) in enumerate(ask(folder, note)):
            if not reason and not shared_fs_probe.wait_for_file(folder / f"{note}.{rank}"):
                reason = "writes what does not arrive there"
            if reason:
                return HostWithoutFolder(rank, host, reason)
    finally:
        for path in folder.glob(f"{note}*"):
            path.unlink(missing_ok=True)
    return None


def check_shared(mesh: Mesh, name: str, folder: str | Folder, caller: str) -> None:
    """Check that the program and all processes of a trainer have the same folder.

    Raises:
        CheckpointError: a process has another one.
    """
    path, hostname = to_folder(folder).absolute(), socket.gethostname()
    stranger = _find_host_of_mesh(mesh, caller, path)
    if stranger is not None:
        instead = (
            "give a folder (out=) on a disk that all nodes share by the same path, or a store that they reach, such as "
            "checkpoints.to=s3://bucket/run, or reserve the trainer's slots on the node of this program"
            if isinstance(path, Path)
            else "give a store (checkpoints.to=) that all nodes reach, and see that its package is installed there and "
            "the environment of their processes lets them in"
        )
        raise CheckpointError(
            f"{caller}: {folder} is not the same folder for this program, on host {hostname}, and for all "
            f"of {name}: {stranger}. A checkpoint would be without what it writes; {instead}"
        )


def find_separate_exporter(mesh: Mesh, folder: Path) -> HostWithoutFolder | None:
    """Return the first process, which exports, if it does not have the program's folder; None: it has it."""
    stranger = _find_host_of_mesh(mesh, "export", folder)
    return stranger if stranger is not None and stranger.rank == 0 else None


def local_only_error(folder: Path, exporter: HostWithoutFolder) -> CheckpointError:
    """Return the error of a program whose export lies on another host."""
    return CheckpointError(
        f"export: the model lies in {folder} on host {exporter.host}, and this program, on host "
        f"{socket.gethostname()}, does not see it: {exporter}. Copy it from there, or give a folder on a disk "
        "that both share by the same path"
    )


def _find_host_of_mesh(mesh: Mesh, caller: str, folder: Folder) -> HostWithoutFolder | None:
    return find_host_without_folder(folder, partial(from_all, mesh, caller, answer, turn=False))


def collect_written(name: str, folder: Folder, files_by_rank: Iterable[Mapping[str, Written]]) -> dict[str, Written]:
    """Collect the files that the processes of a trainer wrote, and check that the program sees them.

    Args:
        name: of the trainer.
        folder: of the files.
        files_by_rank: the files of each process, by rank.

    Raises:
        CheckpointError: the program does not see one of them, or sees it with another size.
    """
    written: dict[str, Written] = {}
    for rank, files in enumerate(files_by_rank):
        try:
            check_sizes(folder, files)
        except CheckpointError as error:
            raise CheckpointError(
                f"save: {error}, when rank {rank} of {name} wrote it; this program does not see the same"
            ) from None
        written |= files
    return written


def answer(folder: Folder, note: str) -> tuple[str, str]:
    """Answer the program's note in a process: the name of this host, and why it has another folder, or ""."""
    return socket.gethostname(), shared_fs_probe.answer_note(folder, note, str(process().rank), _leave)


def check_visible(folder: Folder, files: Mapping[str, Written]) -> None:
    """Check in a process that all files are there, with the sizes with which they were written.

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
    """Compare a process's share of the files with their checksums. Together the processes read each file once.

    Raises:
        CheckpointError: one was altered.
    """
    local = process()
    check_sums(folder, {name: files[name] for name in sorted(files)[local.rank :: local.size]})


def _leave(path: Folder) -> None:
    if isinstance(path, Path):
        path.write_bytes(b"")
    else:
        write(path, [])
