"""`code`: a verifier that runs the program of an answer against a task's tests, in a sandbox."""

import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs

from nrl.envs.inside.assertions import plain_classes
from nrl.envs.library.code_blocks import parsed, program_of
from nrl.envs.library.code_tests import (
    Test,
    fault_of_imports,
    fault_of_names,
    fault_of_reach,
    fault_of_solutions,
    fault_of_text,
    names_of,
    read_tests,
    same_lines,
    shown,
    solutions_of,
)
from nrl.envs.sandbox import Channel, Limits, Sandbox, bubblewrap
from nrl.envs.types import Score, Task, Trace, Verifier
from nrl.errors import EnvError

__all__ = ["all_passed", "code"]

_INSIDE = {  # what runs in the sandbox, in packages that have nothing else of nrl
    **dict.fromkeys(("nrl/__init__.py", "nrl/envs/__init__.py", "nrl/envs/inside/__init__.py"), b""),
    **{
        f"nrl/envs/inside/{name}.py": (Path(__file__).parents[1] / "inside" / f"{name}.py").read_bytes()
        for name in ("assertions", "calls", "contrasts", "peers", "proxies", "values")
    },
}
_SLOTS = threading.BoundedSemaphore(os.cpu_count() or 1)  # more at once would take each other's time
_GRACE = 10.0  # seconds for the interpreter of a test to start
_KEPT = 10_000  # tasks whose solutions are known to pass, or not to
_LINE = 16 << 20  # bytes of a call or an answer, unless limits.output is more


def all_passed(passed: Sequence[bool]) -> float:
    """1, if every test passed, else 0.

    >>> all_passed([True, False])
    0.0
    """
    return float(all(passed))


def code(
    sandbox: Sandbox | None = None,
    *,
    limits: Limits | None = None,
    reward: Callable[[Sequence[bool]], float] = all_passed,
    same: Callable[[str, str], bool] = same_lines,
) -> Verifier:
    """A verifier that runs the program of an answer, its last block of Python, against the tests of its task.

    ``task["tests"]`` is a list of tests of two kinds, also as JSON. ``{"stdin": ..., "stdout": ...}``: the program is
    run with this input, ends with status 0, and writes this output. ``input`` and ``output`` are other names for these;
    numbers and lists of lines will do, and without an input it is empty; ``{"inputs": [...], "outputs": [...]}``, as in
    APPS, are such tests. A text is Python that calls functions of the program and
    raises unless it likes what they return, such as ``"assert add(1, 2) == 3"``; also ``def test_...()``, and classes
    of unittest. The program may be a ``class Solution`` with these functions as methods, and need not import
    ``typing``.

    It runs in a sandbox of its own; arguments and results are data (numbers, texts, bytes, containers, dates, None) and
    travel as such, and the test calls methods of other objects from afar. So what is expected is nowhere that the
    program could read it, and what compares is nowhere that the program could change it. In what a test asserts,
    ``found == expected`` holds for floats with nine equal digits, for two NaN, and for a tuple where a list is
    expected. Where the program's own class compares objects that the test has made, an object made with other
    arguments has to compare differently, or the test is not passed.

    A program that takes too long, ends early or crashes fails that test, and so does one whose answer to a call, with
    the arguments, has more than 16 MiB as JSON (``limits.output``, where that is more). This never makes the row
    invalid. A test that no program can pass does: one with a mistake, one that imports what the sandbox does not have
    or needs the program's own process (`docs/sandbox.md`), and, where the task has a ``"solution"`` or, as in
    HumanEval, a ``"canonical_solution"`` that continues its prompt, one that this does not pass. ``check_task`` finds
    it before the run.

    Args:
        sandbox: runs programs and tests; None: `nrl.envs.bubblewrap`.
        limits: of each test; None: those of `nrl.envs.Limits`.
        reward: from whether each test passed to the reward.
        same: ``(found, wanted)``, whether an output is right.

    Returns:
        A verifier, whose `nrl.envs.Score` has the component ``passed``, the share of tests that passed. Its status is
        ``"parse_fail"`` where the answer has no block of code. It has no timeout of its own (``timeout=None``), since
        each test has one. As many answers as there are processors are verified at once, and the others wait. Its
        ``check_task(task)`` returns why a task cannot be used, or None.

    Raises:
        EnvError: there is no sandbox; when called, it failed, or the task has no tests, or one that no program can
            pass.

    >>> verify = code()
    >>> answer = "```python\\ndef add(a, b):\\n    return a + b\\n```"
    >>> verify({"tests": ["assert add(1, 2) == 3", "assert add([1], []) == [2]"]}, Trace("Add.", [answer]))
    Score(reward=0.0, status='ok', components={'passed': 0.5})
    """
    where, most, faults = sandbox or bubblewrap(), limits or Limits(), dict[str, str]()
    modules = dict[str, bool]()

    def fault_of_solution(task: Task, tests: Sequence[Test]) -> str:
        """Which test the task's own solution does not pass; empty: it passes all, or there is none."""
        solutions = solutions_of(task)
        if not solutions:
            fault = fault_of_solutions(task)
            return fault and f"{fault}; mend the solution, or leave it out"
        key = hashlib.sha256(repr((solutions, tests)).encode(errors="replace")).hexdigest()
        if key not in faults:
            passed = [_passed(program, tests, where, most, same) for program in solutions]
            failed = [number for number, each in enumerate(zip(*passed, strict=True)) if not any(each)]
            named = f"test {failed[0]} of the task, {shown(tests[failed[0]])}, is not passed by" if failed else ""
            if len(faults) >= _KEPT:
                faults.pop(next(iter(faults)), None)
            faults[key] = named and f"{named} the task's own solution; mend the test or the solution, or leave it out"
        return faults[key]

    def has_module(name: str) -> bool:
        """Whether the sandbox's Python finds a module."""
        if name not in modules:
            program = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
            modules[name] = where(["python", "-c", program], b"", {}, most).code == 0
        return modules[name]

    def check_task(task: Task) -> str | None:
        """Return why no program can pass the task's tests, or None."""
        try:
            tests = read_tests(task)
            for number, test in enumerate(tests):
                if isinstance(test, str):
                    missing = fault_of_imports(test, has_module)
                    check_test(number, test, missing or fault_of_names(test, task) or reach(task, test))
            unmet = fault_of_solution(task, tests)
            return f"code: {unmet}" if unmet else None
        except EnvError as error:
            return str(error)

    def check_test(number: int, test: Test, fault: str = "") -> None:
        if isinstance(test, str) and (fault := fault_of_text(test) or fault):
            raise EnvError(_unusable(number, test, fault))

    def reach(task: Task, test: str) -> str:
        """What a test needs of the program's process; empty: nothing, or there is a solution to try it with."""
        return "" if solutions_of(task) else fault_of_reach(test)

    def verify(task: Task, trace: Trace) -> Score:
        tests = read_tests(task)
        for number, test in enumerate(tests):
            check_test(number, test, reach(task, test) if isinstance(test, str) else "")
        names = {name for test in tests if isinstance(test, str) for name in names_of(test)}
        program = program_of(trace.answer, names, truncated=trace.truncated)
        if program is None or not program.strip():
            return Score(0.0, "parse_fail", {"passed": 0.0})
        passed = _passed(program, tests, where, most, same)
        if not all(passed):
            if fault := fault_of_solution(task, tests):
                raise EnvError(f"code: {fault}")
            for number, test in enumerate(tests):
                if isinstance(test, str) and not passed[number]:
                    check_test(number, test, fault_of_names(test, task, program))
        return Score(reward(passed), components={"passed": sum(passed) / len(passed)})

    verify.timeout = None  # type: ignore[attr-defined]
    verify.check_task = check_task  # type: ignore[attr-defined]
    return verify


def _unusable(number: int, test: str, fault: str) -> str:
    return f"code: test {number} of the task, {shown(test)}, cannot be used: {fault}; mend it, or leave it out"


def _passed(
    program: str, tests: Sequence[Test], sandbox: Sandbox, limits: Limits, same: Callable[[str, str], bool]
) -> list[bool]:
    """Whether a program passes each test."""
    with _SLOTS:
        numbered = {number: test for number, test in enumerate(tests) if isinstance(test, str)}
        called = iter(_calls(sandbox, program, numbered, limits))
        return [
            next(called) if isinstance(test, str) else _prints(sandbox, program, *test, limits, same) for test in tests
        ]


def _prints(
    sandbox: Sandbox, program: str, stdin: str, wanted: str, limits: Limits, same: Callable[[str, str], bool]
) -> bool:
    """Whether a program writes what it should."""
    files = {"main.py": program.encode(errors="replace"), **_INSIDE}
    done = sandbox(["python", "-m", "nrl.envs.inside.calls", "run"], stdin.encode(), files, limits)
    return (done.status, done.code) == ("exited", 0) and same(done.stdout.decode(errors="replace"), wanted)


# --- Tests that call: between a program and its tests, which are two processes.


class _Ended(Exception):
    """The process of the tests has ended, or does not answer."""


class _Lines:
    """What comes through a channel, line by line; a line has some number of bytes, at most."""

    def __init__(self, channel: Channel, most: int) -> None:
        self._channel, self._most, self._got = channel, most, bytearray()

    def send(self, *said: Any) -> None:
        self._channel.send(json.dumps(said[0] if len(said) == 1 else said).encode() + b"\n")

    def forward(self, line: bytes) -> None:
        self._channel.send(line + b"\n")

    def line(self, until: float) -> bytes:
        """The next one; raises EOFError behind the last and where it is too long, TimeoutError where it is too late."""
        searched = 0
        while (end := self._got.find(b"\n", searched)) < 0:
            searched = len(self._got)
            if searched > self._most:
                raise EOFError
            left = until - time.monotonic()
            if left <= 0:  # a channel that always has something never finds that out
                raise TimeoutError
            more = self._channel.receive(left)
            if not more:
                raise EOFError
            self._got += more
        if end > self._most:
            raise EOFError
        line = bytes(self._got[:end])
        del self._got[: end + 1]
        return line


@attrs.define
class _Progress:
    """How far the tests are."""

    tests: Sequence[str]
    numbers: Sequence[int]
    """Of the tests, among all of the task."""
    passed: list[bool] = attrs.field(factory=list)
    asked: bool = False
    """Whether the test that runs waits for the program."""
    called: bool = False
    """Whether it has asked it anything yet."""
    hopeless: bool = False
    """Whether the program does not even start."""

    @property
    def left(self) -> bool:
        return len(self.passed) < len(self.tests)

    def told(self, passed: bool) -> None:
        self.passed.append(passed)
        self.asked = self.called = False


def _calls(sandbox: Sandbox, program: str, numbered: Mapping[int, str], limits: Limits) -> list[bool]:
    """Whether each test passes that calls the program's functions; the tests come with their numbers in the task."""
    tests = list(numbered.values())
    progress = _Progress(tests, list(numbered))
    words = set(re.findall(r"\w+", program))
    trees = [tree for test in tests if "class" in test and (tree := parsed(test)) is not None]
    test_classes = sorted({name for tree in trees for name in plain_classes(tree)} & words)
    most = max(_LINE, limits.output)
    share = attrs.evolve(
        limits,
        seconds=(2 * limits.seconds + _GRACE) * (len(tests) + 1),
        cpu_seconds=limits.cpu_seconds * (len(tests) + 1),
    )

    def with_tests(channel: Channel) -> None:
        checker = _Lines(channel, most)
        with suppress(_Ended):
            while progress.left and not progress.hopeless:
                sandbox(
                    ["python", "-m", "nrl.envs.inside.calls", "serve"],
                    lambda other: _run(checker, _Lines(other, most), program, test_classes, progress, limits.seconds),
                    _INSIDE,
                    share,
                )
                if progress.asked:  # it has ended, or took too long
                    checker.send("gone", "")
                    _follow(checker, None, progress, limits.seconds)

    while progress.left and not progress.hopeless:
        before = len(progress.passed)
        done = sandbox(["python", "-m", "nrl.envs.inside.calls", "check"], with_tests, _INSIDE, share)
        if progress.left and not progress.hopeless:
            if progress.called:  # the test ended by what the program returned
                progress.told(False)
            elif len(progress.passed) == before:
                raise EnvError(
                    f"code: test {progress.numbers[before]} of the task ended before it called the program "
                    f"({done.status}): {shown(tests[before])}; mend it, or give it more with limits="
                )
    return progress.passed + [False] * (len(tests) - len(progress.passed))


def _run(
    checker: _Lines, program: _Lines, source: str, test_classes: list[str], progress: _Progress, seconds: float
) -> None:
    """Run tests until one of them is the program's end."""
    program.send(source, test_classes)
    try:
        ready = program.line(time.monotonic() + seconds)
    except (EOFError, TimeoutError):
        ready = b""
    if ready != b'["ready"]':
        progress.hopeless = True
        return
    while progress.left:
        checker.send(progress.tests[len(progress.passed)])
        if not _follow(checker, program, progress, seconds):
            return


def _follow(checker: _Lines, program: _Lines | None, progress: _Progress, seconds: float) -> bool:
    """Carry calls and answers until the test is over; whether it came so far.

    The time of the program is counted from the beginning of the test. The test itself has as much between two calls.
    """
    place, until = len(progress.passed), time.monotonic() + seconds
    while True:
        progress.asked = False
        try:
            said = checker.line(time.monotonic() + seconds + _GRACE)
        except (EOFError, TimeoutError):
            raise _Ended from None
        what, *more = json.loads(said)
        if what in ("passed", "failed"):
            progress.told(what == "passed")
            return True
        if what == "unusable":
            number, test = progress.numbers[place], progress.tests[place]
            raise EnvError(_unusable(number, test, more[0]))
        progress.asked = progress.called = True
        if program is None:
            if time.monotonic() > until:
                raise _Ended
            checker.send("gone", "")
            continue
        program.forward(json.dumps(more[0]).encode())
        try:
            checker.forward(program.line(until))
        except (EOFError, TimeoutError):
            return False
