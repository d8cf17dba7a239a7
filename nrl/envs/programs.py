"""`code`: a verifier that runs the program of an answer against a task's tests, in a sandbox."""

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

from nrl.envs.contract import Score, Task, Trace, Verifier
from nrl.envs.sandbox import Channel, Limits, Sandbox, bubblewrap
from nrl.errors import EnvError

__all__ = ["all_passed", "code", "last_block", "same_lines"]

_CALLS = Path(__file__).parent / "inside" / "calls.py"
_SLOTS = threading.BoundedSemaphore(os.cpu_count() or 1)  # more at once would take each other's time
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})([^`]*)")
_GRACE = 10.0  # seconds for the interpreter of a test to start
_LINE = 16 << 20  # bytes of a call or an answer, unless limits.output is more


def last_block(text: str) -> str | None:
    """The last fenced block of a text; None, if there is none that is closed.

    >>> last_block("First\\n```python\\nx = 1\\n```\\nand then\\n```\\nx = 2\\n```\\n")
    'x = 2\\n'
    """
    found, opened, block = None, "", list[str]()
    for line in text.splitlines(keepends=True):
        fence = _FENCE.fullmatch(line.rstrip())
        if not opened:
            if fence:
                opened, block = fence[1], []
        elif fence and fence[1].startswith(opened) and not fence[2].strip():
            found, opened = "".join(block), ""
        else:
            block.append(line)
    return found


def all_passed(passed: Sequence[bool]) -> float:
    """1, if every test passed, else 0.

    >>> all_passed([True, False])
    0.0
    """
    return float(all(passed))


def same_lines(found: str, wanted: str) -> bool:
    """Whether two outputs have the same lines, apart from spaces at their ends and empty lines at the end of all.

    >>> same_lines("1 2 \\n\\n", "1 2")
    True
    """

    def lines(text: str) -> list[str]:
        return [line.rstrip() for line in text.rstrip().split("\n")]

    return lines(found) == lines(wanted)


def code(
    sandbox: Sandbox | None = None,
    *,
    limits: Limits | None = None,
    reward: Callable[[Sequence[bool]], float] = all_passed,
    same: Callable[[str, str], bool] = same_lines,
) -> Verifier:
    """A verifier that runs the last fenced block of an answer, as Python, against the tests of its task.

    ``task["tests"]`` is a list of tests of two kinds. ``{"stdin": ..., "stdout": ...}``: the program is run with this
    input, ends with status 0, and writes this output. A text is Python that calls functions of the program and raises
    unless it likes what they return, such as ``"assert add(1, 2) == 3"``. It runs in a sandbox of its own; arguments
    and results are data (numbers, texts, bytes, lists, tuples, sets, dictionaries, None) and travel as such. So what is
    expected is nowhere that the program could read it, and what compares is nowhere that the program could change it.

    A program that takes too long, ends early or crashes fails that test, and so does one whose answer to a call, with
    the arguments, has more than 16 MiB as JSON (``limits.output``, where that is more). This never makes the row
    invalid.

    Args:
        sandbox: runs programs and tests; None: `nrl.envs.bubblewrap`.
        limits: of each test; None: those of `nrl.envs.Limits`.
        reward: from whether each test passed to the reward.
        same: ``(found, wanted)``, whether an output is right.

    Returns:
        A verifier, whose `nrl.envs.Score` has the component ``passed``, the share of tests that passed. Its status is
        ``"parse_fail"`` where the answer has no block of code. It has no timeout of its own (``timeout=None``), since
        each test has one. As many answers as there are processors are verified at once, and the others wait.

    Raises:
        EnvError: there is no sandbox; when called, it failed, or the task has no tests, or one that is no test.

    >>> verify = code()
    >>> answer = "```python\\ndef add(a, b):\\n    return a + b\\n```"
    >>> verify({"tests": ["assert add(1, 2) == 3", "assert add([1], []) == [2]"]}, Trace("Add.", [answer]))
    Score(reward=0.0, status='ok', components={'passed': 0.5})
    """
    where, most = sandbox or bubblewrap(), limits or Limits()

    def verify(task: Task, trace: Trace) -> Score:
        return _verified(task, trace, where, most, reward, same)

    verify.timeout = None  # type: ignore[attr-defined]
    return verify


def _verified(
    task: Task,
    trace: Trace,
    sandbox: Sandbox,
    limits: Limits,
    reward: Callable[[Sequence[bool]], float],
    same: Callable[[str, str], bool],
) -> Score:
    tests = _tests(task)
    program = last_block(trace.answer)
    if program is None or not program.strip():
        return Score(0.0, "parse_fail", {"passed": 0.0})
    calling = [each for each in tests if isinstance(each, str)]
    with _SLOTS:
        called = iter(_calls(sandbox, program, calling, limits))
        passed = [
            next(called) if isinstance(each, str) else _prints(sandbox, program, each, limits, same) for each in tests
        ]
    return Score(reward(passed), components={"passed": sum(passed) / len(passed)})


def _tests(task: Task) -> Sequence[str | Mapping[str, str]]:
    tests = task.get("tests")
    if not isinstance(tests, Sequence) or isinstance(tests, str) or not tests:
        raise EnvError(f"code: the task's 'tests' are {tests!r}; give a list with a test at least")
    for place, each in enumerate(tests):
        pair = isinstance(each, Mapping) and all(isinstance(each.get(key), str) for key in ("stdin", "stdout"))
        if not pair and not isinstance(each, str):
            raise EnvError(
                f"code: test {place} of the task is {each!r}; give {{'stdin': text, 'stdout': text}}, or Python that "
                "calls the program, such as 'assert add(1, 2) == 3'"
            )
    return tests


def _prints(
    sandbox: Sandbox, program: str, test: Mapping[str, str], limits: Limits, same: Callable[[str, str], bool]
) -> bool:
    """Whether a program writes what it should."""
    files = {"main.py": program.encode(errors="replace")}
    done = sandbox(["python", "main.py"], test["stdin"].encode(), files, limits)
    return (done.status, done.code) == ("exited", 0) and same(done.stdout.decode(errors="replace"), test["stdout"])


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


def _calls(sandbox: Sandbox, program: str, tests: Sequence[str], limits: Limits) -> list[bool]:
    """Whether each test passes that calls the program's functions."""
    progress, files = _Progress(tests), {"calls.py": _CALLS.read_bytes()}
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
                    ["python", "calls.py", "serve"],
                    lambda other: _run(checker, _Lines(other, most), program, progress, limits.seconds),
                    files,
                    share,
                )
                if progress.asked:  # it has ended, or took too long
                    checker.send("gone", "")
                    _follow(checker, None, progress, limits.seconds)

    while progress.left and not progress.hopeless:
        before = len(progress.passed)
        done = sandbox(["python", "calls.py", "check"], with_tests, files, share)
        if progress.left and not progress.hopeless:
            if progress.called:  # the test ended by what the program returned
                progress.told(False)
            elif len(progress.passed) == before:
                raise EnvError(
                    f"code: test {before} of those that call ended before it called the program ({done.status}): "
                    f"{tests[before][:200]!r}; mend it, or give it more with limits="
                )
    return progress.passed + [False] * (len(tests) - len(progress.passed))


def _run(checker: _Lines, program: _Lines, source: str, progress: _Progress, seconds: float) -> None:
    """Run tests until one of them is the program's end."""
    program.send(source)
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
            raise EnvError(f"code: test {place} of those that call is none: {more[0]}; it is {progress.tests[place]!r}")
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
