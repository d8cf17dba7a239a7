"""The folder of a run: choosing it, locking it, and undoing a start that fails.

One process at a time is in a folder. A start that fails in the first step or before leaves no folder, or the old one as
it was.
"""

import contextlib
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from typing import Any

import attrs
import filelock

from nrl.errors import ConfigError
from nrl.files import resolve_output, without_file_scheme
from nrl.run.checkpoint import REMOTE

__all__ = ["Folders", "choose", "claim", "enter", "is_dead_end", "location", "mark_begun", "reuse_folders"]

_KEPT_BY_NRL = frozenset(  # written whatever becomes of the run
    {
        ".lock",
        "config.yaml",
        "mlflow-run",
        "mlflow.db",
        "report.html",
        "report_samples",
        "tensorboard",
        "timeline.json",
        "wandb",
        "wandb-run",
    }
)


def choose(cfg: Any) -> Path:
    """Return the folder that a run's configuration names, or a new one; its content stays as it is.

    Raises:
        ConfigError: the folder is a file, or holds a run without checkpoints; or ``steps`` is negative.
    """
    if getattr(cfg, "steps", 0) < 0:
        raise ConfigError(f"run: steps={cfg.steps}; give 0 or more")
    out = location(cfg, "run")
    if attempt := _attempt.get():
        attempt.folders.used[out] = None
    if is_dead_end(out):
        raise ConfigError(
            f"run: out={out} holds a run already, which has no checkpoints to go on from; give another folder, or "
            "remove that one"
        )
    return out


def location(cfg: Any, caller: str) -> Path:
    """Return the folder that a configuration names as ``out``, or a new one under ``runs/``.

    Within `reuse_folders` a later attempt gets the new folder of the earlier one.

    Raises:
        ConfigError: ``out`` is a file, the root of the file system, in a store, or has a variable; ``caller`` begins
            the message.
    """
    out = _read_out(cfg, caller) or (_attempt.get() or _Attempt(Folders())).next_new()
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{caller}: out={out} is a file; give a folder, or leave it out to make a new one")
    return out


def _read_out(cfg: Any, caller: str) -> Path | None:
    """Return the folder that ``cfg.out`` means; None: no folder is named."""
    if not getattr(cfg, "out", None):
        return None
    name = without_file_scheme(f"{caller}: out", cfg.out)
    # A Path has one slash of an URL's two.
    in_store = re.match(r"[A-Za-z][\w+.-]+:/", str(name))
    if not in_store and isinstance(out := resolve_output(f"{caller}: out", name), Path):
        return out
    raise ConfigError(
        f"{caller}: out={cfg.out} is in a store, where no run can append to its files; give a folder on a disk as "
        f"out=, and, for the checkpoints, checkpoints.to={cfg.out}"
    )


@contextmanager
def enter(cfg: Any, choose: Callable[[Any], Path] = choose) -> Iterator[Path]:
    """Choose the folder of a configuration, and lock it for this process.

    An error in the first step or before, while the folder holds nothing worth keeping, such as a model, undoes the
    start: a new folder is removed, and an old one gets its ``config.yaml`` back.

    Args:
        cfg: may have an ``out``.
        choose: from it to the folder.

    Raises:
        ConfigError: as ``choose`` does; or another process is in the folder.
    """
    above = Path("runs")
    missing = [path for path in (above, *above.parents) if not path.exists()]
    out = choose(cfg)
    if getattr(cfg, "out", None):  # it is made below; a folder without a name is there already
        created = [path for path in (out, *out.parents) if not path.exists()]
    else:
        created = [out, *missing]
    with ExitStack() as stack:
        claim(out, stack)
        stack.enter_context(_undo_on_error(out, created))
        yield out


def mark_begun(out: Path) -> None:
    """Keep the folder from now on, whatever happens: its first step is done, so all actors have started."""
    _begun.add(out)


_begun: set[Path] = set()  # folders that this process is in, after their first step


@contextmanager
def _undo_on_error(out: Path, created: Sequence[Path]) -> Iterator[None]:
    _begun.discard(out)
    before, configs = _worth_keeping(out), {path: path.read_bytes() for path in _configs(out)}
    try:
        yield
    except BaseException:
        if out not in _begun:
            with contextlib.suppress(OSError):  # A second error would hide the first.
                _undo(out, created, before, configs)
        raise
    finally:
        _begun.discard(out)


def _undo(out: Path, created: Sequence[Path], before: dict[str, int], configs: dict[Path, bytes]) -> None:
    if (after := _worth_keeping(out)) and (created or after != before):
        return
    if created:
        shutil.rmtree(out, ignore_errors=True)
        for path in created[1:]:
            path.rmdir()  # The folder may have got other files.
        return
    for folder in sorted(out.glob("checkpoints/**/"), reverse=True):
        with contextlib.suppress(OSError):
            folder.rmdir()  # if it is empty
    for path in _configs(out):
        if path not in configs:
            path.unlink()
        elif path.read_bytes() != configs[path]:
            path.write_bytes(configs[path])


def _configs(out: Path) -> list[Path]:
    return [*out.glob("config.yaml"), *out.glob("config.*.yaml")]


def _worth_keeping(out: Path) -> dict[str, int]:
    """Return times of change of the folder's content, without empty files and files that nrl always writes."""
    files = {}
    for path in set(out.iterdir()) - set(_configs(out)):
        with contextlib.suppress(OSError):  # gone, or not readable
            about = path.stat()
            if path.name == "checkpoints":
                holds = any(file.is_file() and file.name != REMOTE for file in path.rglob("*"))
            else:
                holds = any(path.iterdir()) if path.is_dir() else about.st_size > 0
            if path.name not in _KEPT_BY_NRL and holds:
                files[path.name] = 0 if path.name == "checkpoints" else about.st_mtime_ns
    return files


def is_dead_end(out: Path) -> bool:
    """Return whether the folder has logged steps, but no checkpoints to go on from."""
    return any(path.stat().st_size for path in out.glob("[!.]*.jsonl")) and not (out / "checkpoints").exists()


@attrs.define(eq=False)
class Folders:
    """The folders of one program's runs, over all attempts."""

    new: list[Path] = attrs.field(factory=list)  # folders without a name in a configuration, in order
    used: dict[Path, None] = attrs.field(factory=dict)  # all, in order


@contextmanager
def reuse_folders(folders: Folders) -> Iterator[None]:
    """Attempt a program once more: its n-th run without an ``out`` goes on in the folder of the n-th one before.

    Args:
        folders: of the earlier attempts; this one's are added.
    """
    token = _attempt.set(_Attempt(folders))
    try:
        yield
    finally:
        _attempt.reset(token)


def claim(out: Path, stack: ExitStack) -> None:
    """Lock the folder until the stack is left. The system unlocks it however this process ends.

    Raises:
        ConfigError: another process is in it.
    """
    out.mkdir(parents=True, exist_ok=True)
    try:
        stack.enter_context(filelock.FileLock(out / ".lock", timeout=0))
    except filelock.Timeout:
        raise ConfigError(
            f"run: another process is running in out={out}; wait for it, or give another folder"
        ) from None


@attrs.define(eq=False)
class _Attempt:
    folders: Folders
    entered: int = 0  # runs without a folder of their own

    def next_new(self) -> Path:
        new = self.folders.new
        if self.entered == len(new):
            new.append(_new_folder())
        self.entered += 1
        return new[self.entered - 1]


_attempt: ContextVar[_Attempt | None] = ContextVar("_attempt", default=None)


def _new_folder() -> Path:
    """Make a folder that no other run has, also when two start in the same second."""
    stamp = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    out, attempt = Path("runs") / stamp, 0
    while True:
        try:
            out.mkdir(parents=True)
        except FileExistsError:
            attempt += 1
            out = out.with_name(f"{stamp}-{attempt}")
        else:
            return out
