"""The folder of a run before its first step: which one, and whose it is.

One process at a time is in a folder. A start that fails before there is anything worth keeping leaves no folder, or the
one that was there as it was.
"""

import contextlib
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

__all__ = ["Folders", "begun", "choose", "claim", "dead_end", "entered", "reusing"]

_KEPT_BY_NRL = frozenset(  # of itself, whatever becomes of the run
    {
        ".lock",
        "config.yaml",
        "mlflow-run",
        "mlflow.db",
        "report.html",
        "tensorboard",
        "timeline.json",
        "wandb",
        "wandb-run",
    }
)


def choose(cfg: Any) -> Path:
    """The folder that a configuration asks for, or a new one; nothing in it is changed.

    Within `reusing`, what was new in an earlier attempt is not made anew.

    Raises:
        ConfigError: it is a file, or holds a run that nothing can go on from; or ``steps`` is negative.

    >>> import attrs
    >>> @attrs.frozen
    ... class Config:
    ...     out: str = "runs/mine"
    >>> choose(Config()).name
    'mine'
    """
    if getattr(cfg, "steps", 0) < 0:
        raise ConfigError(f"run: steps={cfg.steps}; give 0 or more")
    attempt = _attempt.get() or _Attempt(Folders())
    out = Path(cfg.out) if getattr(cfg, "out", None) else attempt.next_new()
    attempt.folders.used[out] = None
    if out.exists() and not out.is_dir():
        raise ConfigError(f"run: out={out} is a file; give a folder, or leave it out to make a new one")
    if dead_end(out):
        raise ConfigError(
            f"run: out={out} holds a run already, which has no checkpoints to go on from; give another folder, or "
            "remove that one"
        )
    return out


@contextmanager
def entered(cfg: Any, choose: Callable[[Any], Path] = choose) -> Iterator[Path]:
    """Be alone in the folder that a configuration asks for.

    An error that comes in the first step or before, while there is nothing worth keeping, such as a model, leaves no
    folder where there was none, and else no other ``config.yaml`` than there was.

    Args:
        cfg: what has an ``out``, or has not.
        choose: from it to the folder.

    Raises:
        ConfigError: as ``choose`` does; or another process is in the folder.

    >>> import attrs, tempfile
    >>> @attrs.frozen
    ... class Config:
    ...     out: str = f"{tempfile.mkdtemp()}/new"
    >>> try:
    ...     with entered(Config()) as out:
    ...         _ = (out / "config.yaml").write_text("model: there-is-none")
    ...         raise ConfigError("no such model")
    ... except ConfigError:
    ...     out.exists()
    False
    """
    named = Path(cfg.out) if getattr(cfg, "out", None) else None
    above = Path("runs") if named is None else named
    made = [path for path in (above, *above.parents) if not path.exists()]
    out = choose(cfg)
    with ExitStack() as stack:
        claim(out, stack)
        stack.enter_context(_undone(out, made if named else [out, *made]))
        yield out


def begun(out: Path) -> None:
    """A step is done, not only asked of actors that may not start: from now on all stays, whatever comes.

    >>> begun(Path("there/is/none"))
    """
    _begun.add(out)


_begun: set[Path] = set()  # folders that this process is in


@contextmanager
def _undone(out: Path, made: Sequence[Path]) -> Iterator[None]:
    _begun.discard(out)
    before, configs = _worth_keeping(out), {path: path.read_bytes() for path in _configs(out)}
    try:
        yield
    except BaseException:
        if out not in _begun:
            with contextlib.suppress(OSError):  # which would hide the error
                _undo(out, made, before, configs)
        raise
    finally:
        _begun.discard(out)


def _undo(out: Path, made: Sequence[Path], before: dict[str, int], configs: dict[Path, bytes]) -> None:
    if (after := _worth_keeping(out)) and (made or after != before):
        return
    if made:
        shutil.rmtree(out, ignore_errors=True)
        for path in made[1:]:
            path.rmdir()  # others may have come to be in it
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
    """What lies in the folder, besides what nrl writes of itself, and when it was changed; not what is empty."""
    found = {}
    for path in set(out.iterdir()) - set(_configs(out)):
        with contextlib.suppress(OSError):  # it is gone, or not ours to read
            about = path.stat()
            if path.name == "checkpoints":
                holds = any(each.is_file() for each in path.rglob("*"))
            else:
                holds = any(path.iterdir()) if path.is_dir() else about.st_size > 0
            if path.name not in _KEPT_BY_NRL and holds:
                found[path.name] = 0 if path.name == "checkpoints" else about.st_mtime_ns
    return found


def dead_end(out: Path) -> bool:
    """Whether steps were logged here by a program that makes no checkpoints, so that nothing can go on from them.

    >>> dead_end(Path("there/is/none"))
    False
    """
    return any(path.stat().st_size for path in out.glob("*.jsonl")) and not (out / "checkpoints").exists()


@attrs.define(eq=False)
class Folders:
    """The folders of the runs of one program, over all attempts at it.

    >>> list(Folders().used)
    []
    """

    new: list[Path] = attrs.field(factory=list)  # those that no configuration named, in the order of their runs
    used: dict[Path, None] = attrs.field(factory=dict)  # all, in that order


@contextmanager
def reusing(folders: Folders) -> Iterator[None]:
    """Attempt a program: its runs that name no folder go on in those which they had before, the first in the first.

    Args:
        folders: of the earlier attempts; what this one makes is added.

    >>> with reusing(Folders(new=[Path("runs/a")])):
    ...     choose(None).name
    'a'
    """
    token = _attempt.set(_Attempt(folders))
    try:
        yield
    finally:
        _attempt.reset(token)


def claim(out: Path, stack: ExitStack) -> None:
    """Keep other processes out until the stack is left; the system lets go too, however this process ends.

    Raises:
        ConfigError: another process is in it.

    >>> import tempfile
    >>> with ExitStack() as stack:
    ...     claim(Path(tempfile.mkdtemp()), stack)
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
    """A folder that no other run has, also when two start in the same second."""
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
