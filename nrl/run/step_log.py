"""The loops of a run and their files: one line a step, cut back to the checkpoint on resuming."""

import errno
import gc
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import attrs

from nrl.files import Folder, free_room
from nrl.log import JsonLines
from nrl.run import checkpoint

__all__ = ["Loop", "LoopFiles", "RunningStep", "StepInput", "describe_resume", "gc_paused"]


@attrs.define(eq=False)
class RunningStep:
    """The step that is running."""

    requested: float = 0.0  # when its batch was asked for
    pulled: float = 0.0  # when it came
    published: float = 0.0  # seconds that publishing had taken before
    numbers: dict[str, float] = attrs.field(factory=dict)  # once it is logged
    saved: bool = False


@attrs.define(eq=False)
class StepInput:
    """The values that the program gave to `Run.save` at the end of a step."""

    step: int
    named: Mapping[str, Any]
    numbers: Mapping[str, float]  # logged by the step
    folder: Folder | None = None  # folder of the checkpoint, if one was due


@attrs.define(eq=False)
class Loop:
    """A loop of a run: where its checkpoints are, and how far it is."""

    name: str
    folder: Path  # its folder in that of the run
    checkpoints: Folder
    begins: int | None = None  # the step at which it goes on; None: it was not restored, or has gone on since
    names: frozenset[str] | None = None  # names of the values that it restores and saves
    best: float = -math.inf  # the score of its best checkpoint
    # Each time it runs:
    steps: int = 0
    file: str = ""  # without its suffix; inside another loop than the main one it begins with that loop's name
    checked: bool = False  # whether its values can be saved
    step: RunningStep = attrs.field(factory=RunningStep)
    last_input: StepInput | None = (
        None  # Input of the previous step, until the next batch arrives, since the next step may consume it.
    )


class LoopFiles:
    """The JSONL files in a run's folder.

    A loop that has checkpoints owns ``<name>.jsonl`` and all files that begin with ``<name>.``. The main loop,
    ``train``, owns all others; its metrics are in ``metrics.jsonl``.

    Args:
        out: the folder.
        stack: closes the files.
    """

    def __init__(self, out: Path, stack: ExitStack) -> None:
        self._out, self._stack = out, stack
        self._open: dict[str, JsonLines] = {}

    def check_folder(self, caller: str) -> None:
        """Check that the folder still holds the ``config.yaml`` that the run has written.

        The folder's inode is not looked at, since some network file systems give it another one at any time.

        Raises:
            FileNotFoundError: the folder was removed, with all files of the run.
        """
        if not (self._out / "config.yaml").exists():
            raise FileNotFoundError(
                errno.ENOENT,
                f"{caller}: out={self._out} was removed or replaced while the run was going, and its files are lost; "
                "start the same command again to begin anew, and leave the folder until the run has ended",
            )

    def write(self, name: str, record: Mapping[str, Any]) -> None:
        """Write a line.

        Raises:
            OSError: the disk is full, or the folder is gone.
        """
        self.check_folder("run.log")
        path = self._path(name)
        try:
            if name not in self._open:
                self._open[name] = self._stack.enter_context(JsonLines(path))
            self._open[name].write(record)
        except OSError as error:
            room = f"; {free_room(path)}" if error.errno == errno.ENOSPC else ""
            raise OSError(
                error.errno,
                f"run.log: {path} could not be written ({error.strerror}{room}); make room, and start the same command "
                "again",
            ) from error

    def has_old_lines(self, name: str) -> bool:
        """Return whether a file holds lines, none of them of this process."""
        path = self._path(name)
        return name not in self._open and path.exists() and path.stat().st_size > 0

    def sizes(self, loop: str) -> dict[str, int]:
        """The size of each file of a loop, flushed to the disk: if power fails, no checkpoint outlives its lines."""
        return {path.name: _synced_size(path) for path in self._of(loop)}

    def truncate(self, loop: str, sizes: Mapping[str, int]) -> None:
        """Cut the files of a loop back to earlier sizes, and report those that are shorter by now."""
        for path in self._of(loop):
            if path.stem not in self._open and path.stat().st_size > sizes.get(path.name, 0):
                os.truncate(path, sizes.get(path.name, 0))
        for name, size in sizes.items():
            path = self._out / name
            if not path.exists() or path.stat().st_size < size:
                print(f"{loop}: {name} is shorter than at the checkpoint; lines that were in it are lost", flush=True)

    def _path(self, name: str) -> Path:
        return self._out / f"{name}.jsonl"

    def _of(self, loop: str) -> list[Path]:
        """The files of a loop and of those within it, which begin with its name."""
        loops = {loop, *(path.name for path in self._out.glob("checkpoints/*/"))} - {"train"}

        def owner(path: Path) -> str:
            return next((name for name in loops if path.name.startswith(f"{name}.")), "train")

        return [path for path in sorted(self._out.glob("[!.]*.jsonl")) if owner(path) == loop]


def _synced_size(path: Path) -> int:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size


def describe_resume(out: Path) -> str:
    """Return how a run that is ended by a signal can be resumed.

    >>> describe_resume(Path("runs/qwen"))
    'runs/qwen has no checkpoint, so the same command begins anew'
    """
    newest = {root.name: checkpoint.finite(checkpoint.checkpoints(root))[-1:] for root in out.glob("checkpoints/*/")}
    steps = [f"step {saved.step} of '{name}'" for name, last in sorted(newest.items()) for saved in last]
    if not steps:
        return f"{out} has no checkpoint, so the same command begins anew"
    return f"the same command with out={out} goes on after {' and '.join(steps)}"


_gc_is_paused = False  # already, by a loop around this one: counting what is frozen takes 0.1 s


@contextmanager
def gc_paused() -> Iterator[None]:
    """Exclude all present objects from garbage collection: modules alone have some 400,000."""
    global _gc_is_paused
    # It does so already, for somebody who will undo it.
    if _gc_is_paused or gc.get_freeze_count() > len(gc.get_objects()):
        yield
        return
    gc.collect()
    gc.freeze()
    _gc_is_paused = True
    try:
        yield
    finally:
        _gc_is_paused = False
        gc.unfreeze()
