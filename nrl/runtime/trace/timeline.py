"""The timeline of all calls on all meshes: ``timeline.json``, in Chrome's trace format.

The file is an array with an event a line. It only grows. Its format allows the closing bracket to be missing, so
viewers open it while the run goes on, and after the run was killed: https://ui.perfetto.dev and chrome://tracing. Each
mesh has a group of rows, with a row for each rank, and the driver has one.
"""

import bisect
import functools
import json
import os
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from nrl.log import redact

__all__ = [
    "DRIVER",
    "are_calls_shown",
    "busy_shares",
    "current",
    "hide_calls",
    "record",
    "recording",
    "seconds_in_steps",
    "seconds_spent",
    "span",
    "step",
    "stopwatch",
]

DRIVER = "driver"
"""The name of the driver's own rows."""

_DRIVER_NUMBER = 1  # the number of its process in a file
_LIMIT = 64_000_000  # bytes of a file that a browser opens at once
_TAIL = 65_536  # bytes, more than any event has
_ROWS = 64  # The most rows of a rank; it has more than one if its calls overlap.

_open: list["_Recorder"] = []  # Recorders of entered runs; the last one records.
_step: int | None = None
_spent: dict[str, float] = defaultdict(float)
_shown: ContextVar[bool] = ContextVar("shown", default=True)


def stopwatch() -> tuple[float, Callable[[], float]]:
    """The time of day in seconds since the epoch, and a function for it later, which never runs backwards.

    The start is comparable between processes, and a clock that is set meanwhile does not change the seconds since then.
    """
    start, began = time.time(), time.perf_counter()
    return start, lambda: start + (time.perf_counter() - began)


def record(mesh: str, rank: int, name: str, start: float, end: float, loop: str | None = None) -> None:
    """Write down that a call has ended; from any thread, and free where nobody records.

    Args:
        mesh: its name.
        rank: in the mesh.
        name: of the call, as a user would name it.
        start: when it began to run, in seconds since the epoch.
        end: when it ended.
        loop: of a loop's step, which the driver records, the name of the loop.
    """
    if _open:
        _open[-1].add(mesh, rank, name, start, end, loop)


@contextmanager
def hide_calls() -> Iterator[None]:
    """Record no call of the block by itself: a caller of many small calls records them together.

    >>> with hide_calls():
    ...     are_calls_shown()
    False
    """
    token = _shown.set(False)
    try:
        yield
    finally:
        _shown.reset(token)


def are_calls_shown() -> bool:
    """Return whether a call that begins now is recorded; see `hide_calls`."""
    return _shown.get()


@contextmanager
def span(name: str, loop: str | None = None) -> Iterator[None]:
    """Record the time of the block in the driver's row, also if it raises. It decorates functions as well.

    Args:
        name: of the work.
        loop: of a loop's step, the name of the loop.
    """
    recorder, (start, clock) = _open[-1] if _open else None, stopwatch()
    try:
        yield
    finally:
        end = clock()
        _spent[name] += end - start
        if recorder is not None:  # it may be closed by now, where the block ends when it is collected
            recorder.add(DRIVER, 0, name, start, end, loop)


def seconds_spent(name: str) -> float:
    """Seconds that this process has spent so far in spans of this name; overlapping ones all count."""
    return _spent[name]


def step(i: int | None) -> None:
    """Say which step of the main loop begins; None: there is none.

    >>> step(7)
    >>> current()
    7
    >>> step(None)
    """
    global _step
    _step = i


def current() -> int | None:
    """The current step of the main loop; None: there is none."""
    return _step


@contextmanager
def recording(folder: Path, limit: int = _LIMIT) -> Iterator[Path]:
    """Record into ``folder/timeline.json``; earlier events stay, and a mark shows where the new ones begin.

    The first event makes the file. A full disk ends the recording, not the run.

    Args:
        folder: of the run.
        limit: bytes; when the file is as large, a line says so, and recording ends.

    Yields:
        The file.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> for _ in range(2):
    ...     with recording(folder) as path:
    ...         record("sampler", 0, "generate", 1.0, 2.0)
    >>> [event["name"] for event in json.loads(path.read_text()) if event["ph"] != "M"]
    ['generate', 'resumed', 'generate']
    """
    recorder = _Recorder(folder / "timeline.json", limit)
    _open.append(recorder)
    try:
        yield recorder.path
    finally:
        _open.remove(recorder)
        step(None)
        recorder.close()


def busy_shares(path: Path) -> dict[str, dict[str, float]]:
    """Return, for each loop, the share of its steps' time in which a mesh ran calls, as a mean over the mesh's ranks.

    Args:
        path: a ``timeline.json``, complete or not.

    Returns:
        Shares between 0 and 1, by the loop's and the mesh's name.

    >>> import tempfile
    >>> with recording(Path(tempfile.mkdtemp())) as path:
    ...     record("trainer", 0, "train_step", 10.0, 13.0)
    ...     record("trainer", 1, "train_step", 10.0, 12.0)
    ...     record(DRIVER, 0, "train 0", 10.0, 20.0, loop="train")
    >>> busy_shares(path)
    {'train': {'trainer': 0.25}}
    """
    meshes: dict[int, str] = {}
    calls: dict[int, dict[int, list[tuple[int, int]]]] = {}
    steps: dict[str, list[tuple[int, int]]] = {}
    for event in _read_events(path):
        if event["ph"] == "M" and event["name"] == "process_name":
            meshes[event["pid"]] = event["args"]["name"]
        elif event["ph"] == "X" and event.keys() >= {"ts", "dur"}:
            interval = event["ts"], event["ts"] + event["dur"]
            if "cat" in event:
                steps.setdefault(event["cat"], []).append(interval)
            else:
                calls.setdefault(event["pid"], {}).setdefault(event["tid"] // _ROWS, []).append(interval)
    shares: dict[str, dict[str, float]] = {}
    for loop, times in steps.items():
        total = _covered_length(times)
        shares[loop] = {
            meshes[number]: sum(
                _covered_length(times_of_rank) + total - _covered_length(times_of_rank + times)
                for times_of_rank in ranks.values()
            )
            / (max(total, 1) * len(ranks))
            for number, ranks in sorted(calls.items())
            if meshes.get(number, DRIVER) != DRIVER
        }
    return shares


def seconds_in_steps(path: Path, name: str) -> dict[str, dict[int, float]]:
    """Return, for each loop, the seconds that the driver's spans of a name took within each step.

    Args:
        path: a ``timeline.json``, complete or not.
        name: the name of the spans, such as ``"save"``.

    Returns:
        By the loop's name and the step; steps without such a span are left out.

    >>> import tempfile
    >>> with recording(Path(tempfile.mkdtemp())) as path:
    ...     record(DRIVER, 0, "save", 12.0, 12.5)
    ...     record(DRIVER, 0, "train 7", 10.0, 20.0, loop="train")
    >>> seconds_in_steps(path, "save")
    {'train': {7: 0.5}}
    """
    spans: list[tuple[int, int]] = []
    steps: list[tuple[int, int, str, int]] = []
    for event in _read_events(path, b'"cat":', json.dumps(name).encode()):
        if event["ph"] == "X" and event.keys() >= {"ts", "dur"}:
            start, end = event["ts"], event["ts"] + event["dur"]
            _, _, number = str(event["name"]).rpartition(" ")
            if "cat" in event and number.isdecimal():
                steps.append((start, end, event["cat"], int(number)))
            elif event["name"] == name and event["pid"] == _DRIVER_NUMBER:
                spans.append((start, end))
    steps.sort()
    by_loop: dict[str, dict[int, float]] = {}
    for start, end in spans:
        index = bisect.bisect_right(steps, start, key=lambda step: step[0]) - 1
        while index >= 0 and steps[index][1] < end:  # a step that has ended, within the one around both
            index -= 1
        if index >= 0:
            seconds = by_loop.setdefault(steps[index][2], {})
            seconds[steps[index][3]] = seconds.get(steps[index][3], 0.0) + (end - start) / 1e6
    return by_loop


def _covered_length(times: Sequence[tuple[int, int]]) -> int:
    """Return the length of the union of intervals."""
    total, until = 0, 0
    for start, end in sorted(times):
        total += max(end - max(start, until), 0)
        until = max(until, end)
    return total


def _read_events(path: Path, *parts: bytes) -> Iterator[dict[str, Any]]:
    """Yield the complete events of a file, which may be cut off; with parts, only events that contain one of them."""
    with path.open("rb") as file:
        for line in file:
            if parts and not any(part in line for part in parts):
                continue
            try:
                event = json.loads(line.rstrip(b",\n"))
            except ValueError:
                continue  # a bracket, or a part of an event
            if isinstance(event, dict) and event.keys() >= {"ph", "name", "pid", "tid"}:
                yield event


class _Recorder:
    """The open end of a file."""

    def __init__(self, path: Path, limit: int) -> None:
        self.path, self._limit, self._entered = path, limit, time.time()
        self._lock = threading.Lock()  # calls end in any thread
        self._file: int | None = None
        self._size = 0
        self._over = False
        self._numbers = {DRIVER: _DRIVER_NUMBER}  # Numbers by mesh, with meshes already in the file.
        self._described: set[str] = set()
        self._rows: dict[tuple[str, int], list[_Row]] = {}

    def add(self, mesh: str, rank: int, name: str, start: float, end: float, loop: str | None) -> None:
        with self._lock:
            if self._over:
                return
            try:
                if self._file is None:
                    self._begin()
                first = round(start * 1e6)
                last = max(round(end * 1e6), first)
                row = self._place_event(mesh, rank, first, last)
                category = {"cat": loop} if loop else {}
                self._write(
                    {"ph": "X", "name": _redact_name(name)} | category | row | {"ts": first, "dur": last - first}
                )
                if self._size >= self._limit:
                    self._mark(f"the timeline ends here: {self._limit:,} bytes", end)
                    self._over = True
                    print(f"run: {self.path} has {self._size:,} bytes, so no more is written", flush=True)  # noqa: T201
            except OSError as error:
                self._over = True
                warnings.warn(
                    f"run: {self.path} could not be written ({error.strerror}); the run goes on without a timeline",
                    stacklevel=3,
                )

    def close(self) -> None:
        with self._lock:
            self._over = True
            if self._file is not None:
                try:
                    os.ftruncate(self._file, self._size)  # a full disk may have taken a part of an event
                    os.write(self._file, b"\n]\n" if self._size else b"")
                except OSError:
                    pass  # viewers do without the bracket
                os.close(self._file)
                self._file = None

    def _begin(self) -> None:
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._size = _complete_length(self._file)
        os.ftruncate(self._file, self._size)
        if self._size:
            for event in _read_events(self.path):
                if event["name"] == "process_name":
                    self._numbers[event["args"]["name"]] = event["pid"]
            self._mark("resumed", self._entered)

    def _mark(self, name: str, time_of_day: float) -> None:
        microseconds = round(time_of_day * 1e6)
        self._write(
            {"ph": "i", "name": name, "s": "t"}
            | self._place_event(DRIVER, 0, microseconds, microseconds)
            | {"ts": microseconds}
        )

    def _place_event(self, mesh: str, rank: int, start: int, end: int) -> dict[str, int]:
        number = self._mesh(mesh)
        rows = self._rows.setdefault((mesh, rank), [])
        index = next((index for index, row in enumerate(rows) if row.takes(start, end)), len(rows))
        thread = (rank + 1) * _ROWS + min(index, _ROWS - 1)  # Viewers show rows in this order.
        if index == len(rows):
            rows.append(_Row())
            called = "driver" if mesh == DRIVER else f"rank {rank}"
            self._describe("thread_name", number, thread, name=f"{called} ({index + 1})" if index else called)
            self._describe("thread_sort_index", number, thread, sort_index=thread)
        rows[index].add(start, end)
        return {"pid": number, "tid": thread}

    def _mesh(self, name: str) -> int:
        number = self._numbers.setdefault(name, len(self._numbers) + 1)
        if name not in self._described:
            self._described.add(name)
            self._describe("process_name", number, 0, name=redact(name))
            self._describe("process_sort_index", number, 0, sort_index=number)
        return number

    def _describe(self, kind: str, mesh: int, thread: int, **args: str | int) -> None:
        self._write({"ph": "M", "name": kind, "pid": mesh, "tid": thread, "args": args})

    def _write(self, event: Mapping[str, Any]) -> None:
        assert self._file is not None
        line = (("[\n" if self._size == 0 else ",\n") + json.dumps(event, separators=(",", ":"))).encode()
        size = self._size + len(line)
        while line:  # a disk that is nearly full takes a part
            line = line[os.write(self._file, line) :]
        self._size = size


@functools.lru_cache(maxsize=4096)
def _redact_name(name: str) -> str:
    """Return the name without secrets. Names repeat, and looking for secrets takes 100 microseconds."""
    return redact(name)


class _Row:
    """A row of events, each within another or apart from it, since viewers drop events that overlap in part.

    It remembers the latest outermost events in the order of time. Calls arrive late where nobody waited for them.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def takes(self, start: int, end: int) -> bool:
        met = self._met(start, end)  # inner events are forgotten, so a new one has to lie around all that it meets
        return not self._starts[met] or (start <= self._starts[met][0] and self._ends[met][-1] <= end)

    def add(self, start: int, end: int) -> None:
        met = self._met(start, end)
        self._starts[met], self._ends[met] = [start], [end]
        if len(self._starts) > 4096:
            del self._starts[:2048], self._ends[:2048]

    def _met(self, start: int, end: int) -> slice:
        first = bisect.bisect_right(self._ends, start)
        return slice(first, max(bisect.bisect_left(self._starts, end), first))


def _complete_length(file: int) -> int:
    """Return the bytes up to the end of the last complete event: a killed process may leave a part of one."""
    size = os.fstat(file).st_size
    begin = max(size - _TAIL, 0)
    tail = os.pread(file, _TAIL, begin)
    while tail:
        rest, _, line = tail.rpartition(b"\n")
        text = line.rstrip(b",")
        try:
            if isinstance(json.loads(text), dict):
                return begin + len(tail) - len(line) + len(text)
        except ValueError:
            pass
        tail = rest
    return 0
