"""Profiles of single steps by torch's profiler and Nsight Systems, selected by environment variables.

``NRL_PROFILE=trainer:3`` writes what the processes of the mesh ``trainer`` do in the calls of step 3, each process its
own trace, into the run's folder. ``NRL_NSIGHT=trainer`` starts those processes under ``nsys``.
"""

import contextlib
import os
import re
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from nrl.errors import ConfigError
from nrl.runtime.trace import timeline

__all__ = ["asked", "nsight", "parsed", "tracing", "wanted"]

_GRAMMAR = (
    "give <mesh>:<steps>, where steps are numbers and ranges with commas, such as NRL_PROFILE=trainer:3, "
    "trainer:3-5 or sampler:0,10-12; several meshes with ';'"
)
_RANK = "{rank}"
_NSYS = ("nsys", "profile", "--trace=cuda,cudnn,cublas,nvtx", "--stop-on-exit=true")

_busy = threading.Lock()  # torch has one profiler in a process


@attrs.define(eq=False)
class _Profiling:
    """What is asked for in a run."""

    folder: Path
    steps: Mapping[str, list[range]]
    seen: set[str] = attrs.field(factory=set)  # meshes that had a call
    traced: dict[str, int] = attrs.field(factory=dict)  # calls


_open: list[_Profiling] = []  # of the runs that are entered; the last one counts


def parsed(text: str) -> dict[str, list[range]]:
    """The steps that ``NRL_PROFILE`` asks for, by mesh.

    Raises:
        ConfigError: it does not follow the grammar.

    >>> parsed("trainer:3-5; sampler:0,10")
    {'trainer': [range(3, 6)], 'sampler': [range(0, 1), range(10, 11)]}
    """
    found: dict[str, list[range]] = {}
    for part in filter(None, map(str.strip, text.split(";"))):
        mesh, _, steps = (each.strip() for each in part.rpartition(":"))
        ranges = [re.fullmatch(r"(\d+)(?:\s*-\s*(\d+))?", each.strip()) for each in steps.split(",")]
        for each in ranges:
            if not mesh or each is None or int(each[2] or each[1]) < int(each[1]):
                raise ConfigError(f"NRL_PROFILE: '{part}' cannot be read; {_GRAMMAR}")
            found.setdefault(mesh, []).append(range(int(each[1]), int(each[2] or each[1]) + 1))
    return found


@contextmanager
def asked(folder: Path, environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """While entered, calls may be profiled into ``folder/profile``; `nrl.run` enters it.

    On leaving, it prints where the traces are, and which of the requested meshes had none.

    Args:
        folder: of the run.
        environ: where ``NRL_PROFILE`` is looked up.

    Raises:
        ConfigError: ``NRL_PROFILE`` does not follow its grammar.

    >>> with asked(Path("runs/mine"), {}):
    ...     wanted("trainer", "train_step") is None
    True
    """
    entered = _Profiling(folder.absolute(), parsed(environ.get("NRL_PROFILE", "")))
    _open.append(entered)
    try:
        yield
    finally:
        _open.remove(entered)
        for line in _told(entered):
            print(f"NRL_PROFILE: {line}", flush=True)  # noqa: T201


def _told(entered: _Profiling) -> Iterator[str]:
    if entered.traced:
        calls = ", ".join(f"{mesh} {count}" for mesh, count in sorted(entered.traced.items()))
        yield f"traces are in {entered.folder / 'profile'}, of so many calls: {calls}; see https://ui.perfetto.dev"
    for mesh in entered.steps:
        if mesh not in entered.seen:
            yield f"no mesh is named '{mesh}'; there were {', '.join(sorted(entered.seen)) or 'none'}"
        elif mesh not in entered.traced:
            yield f"mesh '{mesh}' had no call in these steps of the main loop"


def wanted(mesh: str, name: str) -> str | None:
    """Where to write the trace of a call that begins now, if it is to be profiled; ask once a call, on the driver.

    Args:
        mesh: its name.
        name: of the call.

    Returns:
        An absolute path, for `tracing`, which puts the rank in place of ``{rank}``; or None.

    >>> from nrl.runtime.trace import timeline
    >>> with asked(Path("run"), {"NRL_PROFILE": "trainer:0"}):
    ...     timeline.step(0)
    ...     Path(wanted("trainer", "train_step(grpo_loss)")).name, wanted("sampler", "generate")
    ('step0-trainer-rank{rank}-0-train_step(grpo_loss).json', None)
    NRL_PROFILE: traces are in ...
    >>> timeline.step(None)
    """
    if not _open or not _open[-1].steps:
        return None
    run, step = _open[-1], timeline.current()
    run.seen.add(mesh)
    if step is None or not any(step in each for each in run.steps.get(mesh, ())):
        return None
    number = run.traced.get(mesh, 0)  # several calls of a step keep their order
    run.traced[mesh] = number + 1
    file = "-".join((f"step{step}", _plain(mesh), f"rank{_RANK}", str(number), _plain(name)))
    return str(run.folder / "profile" / f"{file}.json")


def _plain(name: str) -> str:
    return re.sub(r"[^\w().,=-]", "_", name)[:80]


@contextmanager
def tracing(path: str | None, rank: int = 0) -> Iterator[None]:
    """Profile the block with torch's profiler, and write a Chrome trace; in the process that does the work.

    CPU operators are recorded, and CUDA's where there is a GPU. A call within a call that is being profiled is in that
    one's trace. If the file cannot be written, it says so, and the call goes on.

    Args:
        path: from `wanted`; None: nothing is done.
        rank: of this process, which replaces ``{rank}`` in the path.

    >>> import json, tempfile, torch
    >>> path = f"{tempfile.mkdtemp()}/rank{{rank}}.json"
    >>> with tracing(path, rank=2):
    ...     _ = torch.ones(4) + 1
    >>> events = json.loads(Path(path.replace("{rank}", "2")).read_text())["traceEvents"]
    >>> any(event.get("name") == "aten::add" for event in events)
    True
    """
    if path is None or not _busy.acquire(blocking=False):
        yield
        return
    try:
        from torch.cuda import is_available
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_available() else [])]
        if not is_available():
            os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # to it, a machine without a GPU is an error
        profiler = profile(activities=activities)
        try:
            with profiler:
                yield
        finally:
            _export(profiler, Path(path.replace(_RANK, str(rank))))
    finally:
        _busy.release()


def _export(profiler: Any, path: Path) -> None:
    """Whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(temporary))
        temporary.replace(path)
    except Exception as error:  # torch says a disk that is full in many ways
        warnings.warn(f"NRL_PROFILE: {path} could not be written: {type(error).__name__}: {error}", stacklevel=3)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def nsight(mesh: str, environ: Mapping[str, str] = os.environ) -> list[str]:
    """The command in front of the interpreter of a mesh's processes, so that Nsight Systems watches those asked for.

    ``NRL_NSIGHT`` names meshes, with commas. Ray's own option ``nsight`` would start ``python`` as it is found on the
    node's PATH, whatever ``py_executable`` says, so the command is put in front of the interpreter here.

    Args:
        mesh: its name.
        environ: where ``NRL_NSIGHT`` is looked up.

    Returns:
        The command's arguments; empty if the mesh is not asked for. The reports are
        ``<run folder>/profile/nsight-<mesh>.<process>.nsys-rep``.

    >>> nsight("trainer", {})
    []
    >>> nsight("trainer", {"NRL_NSIGHT": "trainer"})[:2]
    ['nsys', 'profile']
    """
    if mesh not in map(str.strip, environ.get("NRL_NSIGHT", "").split(",")):
        return []
    folder = (_open[-1].folder if _open else Path.cwd()) / "profile"
    folder.mkdir(parents=True, exist_ok=True)
    return [*_NSYS, f"--output={folder / f'nsight-{_plain(mesh)}.%p'}"]  # nsys puts the process there
