"""Profiles of single steps by torch's profiler and Nsight Systems, selected by environment variables.

``NRL_PROFILE=trainer:3`` writes a trace of each process of the mesh ``trainer`` for each call of step 3 into the run's
folder. ``NRL_NSIGHT=trainer`` starts those processes under ``nsys``.
"""

import contextlib
import os
import re
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import attrs

from nrl.errors import ConfigError
from nrl.runtime.trace import timeline

__all__ = ["nsight", "parse_steps", "profiling", "trace_path", "tracing", "without_profiling"]

_GRAMMAR = (
    "give <mesh>:<steps>, where steps are numbers and ranges with commas, such as NRL_PROFILE=trainer:3, "
    "trainer:3-5 or sampler:0,10-12; several meshes with ';'"
)
_RANK = "{rank}"
_NSYS = ("nsys", "profile", "--trace=cuda,cudnn,cublas,nvtx", "--stop-on-exit=true")

_traced: ContextVar[bool] = ContextVar("traced", default=True)
_busy = threading.Lock()  # torch has one profiler in a process


@attrs.define(eq=False)
class _Profiling:
    """The steps that a run profiles, and the calls so far."""

    folder: Path
    steps: Mapping[str, list[range]]
    seen: set[str] = attrs.field(factory=set)  # meshes that had a call
    traced: dict[str, int] = attrs.field(factory=dict)  # calls


_open: list[_Profiling] = []  # Entered runs; the last one counts.


def parse_steps(text: str) -> dict[str, list[range]]:
    """Parse ``NRL_PROFILE`` into ranges of steps, by mesh.

    Raises:
        ConfigError: it does not follow the grammar.

    >>> parse_steps("trainer:3-5; sampler:0,10")
    {'trainer': [range(3, 6)], 'sampler': [range(0, 1), range(10, 11)]}
    """
    ranges_by_mesh: dict[str, list[range]] = {}
    for part in filter(None, map(str.strip, text.split(";"))):
        mesh, _, steps = (match.strip() for match in part.rpartition(":"))
        ranges = [re.fullmatch(r"(\d+)(?:\s*-\s*(\d+))?", match.strip()) for match in steps.split(",")]
        for match in ranges:
            if not mesh or match is None or int(match[2] or match[1]) < int(match[1]):
                raise ConfigError(f"NRL_PROFILE: '{part}' cannot be read; {_GRAMMAR}")
            ranges_by_mesh.setdefault(mesh, []).append(range(int(match[1]), int(match[2] or match[1]) + 1))
    return ranges_by_mesh


@contextmanager
def profiling(folder: Path, environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Profile into ``folder/profile`` the calls in the block that ``NRL_PROFILE`` names; `nrl.run` enters it.

    At its end it prints where the traces are, and which of the named meshes had none.

    Args:
        folder: of the run.
        environ: has ``NRL_PROFILE``.

    Raises:
        ConfigError: ``NRL_PROFILE`` does not follow its grammar.
    """
    run = _Profiling(folder.absolute(), parse_steps(environ.get("NRL_PROFILE", "")))
    _open.append(run)
    try:
        yield
    finally:
        _open.remove(run)
        for line in _outcome(run):
            print(f"NRL_PROFILE: {line}", flush=True)  # noqa: T201


def _outcome(run: _Profiling) -> Iterator[str]:
    if run.traced:
        calls = ", ".join(f"{mesh} {count}" for mesh, count in sorted(run.traced.items()))
        yield f"traces are in {run.folder / 'profile'}, of so many calls: {calls}; see https://ui.perfetto.dev"
    for mesh in run.steps:
        if mesh not in run.seen:
            yield f"no mesh is named '{mesh}'; there were {', '.join(sorted(run.seen)) or 'none'}"
        elif mesh not in run.traced:
            yield f"mesh '{mesh}' had no call in these steps of the main loop"


@contextmanager
def without_profiling() -> Iterator[None]:
    """Profile no call of the block, such as polls of progress in a background thread.

    >>> with profiling(Path("run"), {"NRL_PROFILE": "trainer:0"}), without_profiling():
    ...     timeline.step(0)
    ...     print(trace_path("trainer", "save"))
    None
    NRL_PROFILE: no mesh is named 'trainer'; there were none
    >>> timeline.step(None)
    """
    token = _traced.set(False)
    try:
        yield
    finally:
        _traced.reset(token)


def trace_path(mesh: str, name: str) -> str | None:
    """Return the path for the trace of a call that begins now, if it is to be profiled. Once per call, on the driver.

    Args:
        mesh: its name.
        name: of the call.

    Returns:
        An absolute path for `tracing`, which replaces ``{rank}`` in it; or None.

    >>> from nrl.runtime.trace import timeline
    >>> with profiling(Path("run"), {"NRL_PROFILE": "trainer:0"}):
    ...     timeline.step(0)
    ...     Path(trace_path("trainer", "train_step(grpo_loss)")).name, trace_path("sampler", "generate")
    ('step0-trainer-rank{rank}-0-train_step(grpo_loss).json', None)
    NRL_PROFILE: traces are in ...
    >>> timeline.step(None)
    """
    if not _open or not _open[-1].steps or not _traced.get():
        return None
    run, step = _open[-1], timeline.current()
    run.seen.add(mesh)
    if step is None or not any(step in steps for steps in run.steps.get(mesh, ())):
        return None
    number = run.traced.get(mesh, 0)  # several calls of a step keep their order
    run.traced[mesh] = number + 1
    file = "-".join((f"step{step}", _file_name(mesh), f"rank{_RANK}", str(number), _file_name(name)))
    return str(run.folder / "profile" / f"{file}.json")


def _file_name(name: str) -> str:
    return re.sub(r"[^\w().,=-]", "_", name)[:80]


@contextmanager
def tracing(path: str | None, rank: int = 0) -> Iterator[None]:
    """Profile the block with torch's profiler, and write a Chrome trace; in the process that does the work.

    It records CPU operators, and CUDA's where there is a GPU. A call within a profiled call is part of that one's
    trace. If the file cannot be written, it warns, and the call goes on.

    Args:
        path: from `trace_path`; None: do nothing.
        rank: of this process, which replaces ``{rank}`` in the path.
    """
    if path is None or not _busy.acquire(blocking=False):
        yield
        return
    try:
        from torch.cuda import is_available
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_available() else [])]
        if not is_available():
            os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # For kineto, a machine without a GPU is an error.
        profiler = profile(activities=activities)
        try:
            with profiler:
                yield
        finally:
            _export(profiler, Path(path.replace(_RANK, str(rank))))
    finally:
        _busy.release()


def _export(profiler: Any, path: Path) -> None:
    """Write the full trace, or nothing."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(temporary))
        temporary.replace(path)
    except Exception as error:  # torch reports a full disk in many ways
        warnings.warn(f"NRL_PROFILE: {path} could not be written: {type(error).__name__}: {error}", stacklevel=3)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def nsight(mesh: str, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the command before a mesh's interpreter that lets Nsight Systems watch its processes.

    ``NRL_NSIGHT`` names meshes, with commas. Ray's own option ``nsight`` would start the ``python`` on the node's PATH,
    whatever ``py_executable`` is.

    Args:
        mesh: its name.
        environ: has ``NRL_NSIGHT``.

    Returns:
        The command's arguments; empty if ``NRL_NSIGHT`` does not name the mesh. The reports are
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
    return [*_NSYS, f"--output={folder / f'nsight-{_file_name(mesh)}.%p'}"]  # nsys puts the process there
