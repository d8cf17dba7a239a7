"""Run two programs in turns: workers that obey lines, and the statistics of pairs. Needs the standard library alone.

A shared machine is never equally fast for two minutes. So both sides are alive from the start, and one step of one
follows one step of the other. The order alternates, and the result is the ratio within each pair.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = [
    "Clock",
    "Times",
    "Worker",
    "disagreement",
    "in_units",
    "lengths_of",
    "pair",
    "percentile",
    "ratios",
    "replies",
    "spread",
    "table",
]

type Times = Mapping[str, float]
"""Seconds by ``wall/<phase>`` and ``cpu/<phase>``."""


class Clock:
    """Seconds by phase, wall-clock and of this process's CPU time (all of its threads).

    >>> clock = Clock()
    >>> with clock("a"):
    ...     with clock("a"):  # the same phase within itself counts once
    ...         pass
    >>> sorted(clock.take()), clock.take()
    (['cpu/a', 'wall/a'], {})
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._open: set[str] = set()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        if phase in self._open:
            yield
            return
        self._open.add(phase)
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self._open.remove(phase)
            self.add(phase, time.perf_counter() - wall, time.process_time() - cpu)

    def add(self, phase: str, wall: float, cpu: float) -> None:
        """Count seconds for a phase."""
        for key, seconds in ((f"wall/{phase}", wall), (f"cpu/{phase}", cpu)):
            self._seconds[key] = self._seconds.get(key, 0.0) + seconds

    def wrap[**P, R](self, phase: str, fn: Callable[P, R]) -> Callable[P, R]:
        """The same function, whose calls are timed."""

        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            with self(phase):
                return fn(*args, **kwargs)

        return timed

    def take(self) -> dict[str, float]:
        """What was counted since the last time; ``wall/<phase>`` and ``cpu/<phase>``."""
        taken, self._seconds = self._seconds, {}
        return taken


def replies() -> Callable[[Mapping[str, Any] | None], None]:
    """The worker's half: a function that answers the last command (None: is ready) and waits for the next one.

    What the program prints goes to standard error from here on, so that nothing is between the answers. When the other
    end says ``quit``, or is gone, the process ends.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr

    def answer(result: Mapping[str, Any] | None) -> None:
        answers.write(json.dumps(result) + "\n")
        if sys.stdin.readline().strip() != "step":
            os._exit(0)  # from within a trainer's loop, which has nothing to finish

    return answer


class Worker:
    """The driver's half: a process that is told ``step`` and answers with its times.

    Args:
        name: how errors speak of it.
        command: what to start.
        log: a file for what it prints.
        env: its environment.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        self.name, self._log = name, log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=dict(env)
            )

    def read(self) -> Any:
        """The answer to what was asked last; the first is None, when it is ready.

        Raises:
            RuntimeError: it is gone.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            end = "\n".join(self._log.read_text().splitlines()[-30:])
            code = self._process.wait()
            raise RuntimeError(f"the worker '{self.name}' ended with exit code {code}; the end of {self._log}:\n{end}")
        return json.loads(line)

    def step(self) -> Any:
        """Have it take a step; waits for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return self.read()

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()  # closes the pipes, too


def pair[A](first: Callable[[], A], second: Callable[[], A], number: int) -> tuple[A, A]:
    """One call of each; the order alternates with ``number``, the result's does not.

    >>> said = []
    >>> pair(lambda: said.append("a"), lambda: said.append("b"), 1), said
    ((None, None), ['b', 'a'])
    """
    if number % 2:
        b = second()
        return first(), b
    a = first()
    return a, second()


def in_units(unit: Callable[[], float], rate: Callable[[], float]) -> float:
    """How many units one costs, both measured as how many a second: units before and after, since machines vary.

    >>> in_units(lambda: 300.0, lambda: 100.0)
    3.0
    """
    before, found = unit(), rate()
    return (before + unit()) / 2 / found


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest of the values that at least ``share`` of them do not exceed.

    >>> percentile([4, 1, 3, 2], 0.5), percentile([4, 1, 3, 2], 0.51), percentile([4, 1, 3, 2], 1.0)
    (2, 3, 4)
    """
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def ratios(pairs: Sequence[tuple[Times, Times]], key: str) -> list[float]:
    """First over second, pair by pair; pairs where the second took no time have none.

    >>> ratios([({"a": 1.0}, {"a": 2.0}), ({"a": 3.0}, {"a": 2.0})], "a")
    [0.5, 1.5]
    """
    return [one.get(key, 0.0) / other[key] for one, other in pairs if other.get(key)]


def spread(values: Sequence[float]) -> str:
    """Median, and the smallest and largest.

    >>> spread([0.5, 1.5, 0.6])
    '0.60 (0.50-1.50)'
    """
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})" if values else "-"


def lengths_of(lengths: Sequence[int], limit: int) -> dict[str, float]:
    """Mean, 95th percentile and the share that reached the limit.

    >>> lengths_of([1, 2, 3, 10], 10)
    {'mean': 4.0, 'p95': 10, 'limit': 0.25}
    """
    return {
        "mean": statistics.fmean(lengths),
        "p95": percentile(lengths, 0.95),
        "limit": sum(length >= limit for length in lengths) / len(lengths),
    }


def disagreement(one: Times, other: Times, tolerance: float) -> str | None:
    """Why two distributions of lengths, from `lengths_of`, are not the same work; None: they are.

    Means may differ by ``tolerance`` as a fraction; 95th percentiles, which move more, by twice as much.

    >>> disagreement({"mean": 38.0, "p95": 98}, {"mean": 38.5, "p95": 99}, 0.05)
    >>> disagreement({"mean": 38.0, "p95": 98}, {"mean": 45.0, "p95": 99}, 0.05)
    'mean lengths are 38.0 and 45.0, which differ by 17%; at most 5% is the same work'
    """
    for key, most in (("mean", tolerance), ("p95", 2 * tolerance)):
        differs = abs(one[key] - other[key]) / ((one[key] + other[key]) / 2)
        if differs > most:
            return (
                f"{key} lengths are {one[key]:.1f} and {other[key]:.1f}, which differ by {differs:.0%}; "
                f"at most {most:.0%} is the same work"
            )
    return None


def table(names: tuple[str, str], pairs: Sequence[tuple[Times, Times]], phases: Sequence[str]) -> str:
    """A Markdown table: medians of both sides in CPU seconds, and ratios of CPU and wall-clock time.

    Args:
        names: of the two sides.
        pairs: their times.
        phases: rows; a phase that neither side has is left out.

    >>> times = [({"cpu/total": 1.0, "wall/total": 1.0}, {"cpu/total": 2.0, "wall/total": 4.0})]
    >>> print(table(("nrl", "TRL"), times, ["total", "nothing"]))
    | phase | nrl, CPU s | TRL, CPU s | CPU, nrl / TRL: median (range) | wall, nrl / TRL: median (range) |
    |---|---|---|---|---|
    | total | 1.000 | 2.000 | 0.50 (0.50-0.50) | 0.25 (0.25-0.25) |
    """
    ratio = f"{names[0]} / {names[1]}: median (range)"
    lines = [
        f"| phase | {names[0]}, CPU s | {names[1]}, CPU s | CPU, {ratio} | wall, {ratio} |",
        "|---|---|---|---|---|",
    ]
    for phase in phases:
        key = f"cpu/{phase}"
        if not any(key in times for each in pairs for times in each):
            continue
        medians = [statistics.median(each[side].get(key, 0.0) for each in pairs) for side in (0, 1)]
        columns = [f"{x:.3f}" for x in medians] + [spread(ratios(pairs, f"{kind}/{phase}")) for kind in ("cpu", "wall")]
        lines.append(f"| {phase} | {' | '.join(columns)} |")
    return "\n".join(lines)
