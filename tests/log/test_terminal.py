import fcntl
import math
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pyte
import pytest

from nrl.log import Progress, duration, terminal


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=clock))
    return clock


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


# --- duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (0.4, "0:00"), (9, "0:09"), (59.6, "1:00"), (75, "1:15"), (3599.7, "1:00:00"), (36061, "10:01:01")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# --- Progress


def test_plain_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    with Progress() as progress:
        for step in range(3):
            progress.show("train", step, 3, {"reward": 0.25, "loss": 1.23456789})
            clock.now += 10
    assert capsys.readouterr().out == (
        "train 1/3 | reward 0.25 | loss 1.235 | ? left\n"
        "train 2/3 | reward 0.25 | loss 1.235 | 0:10 left\n"
        "train 3/3 | reward 0.25 | loss 1.235 | 0:00 left\n"
    )


def test_a_line_every_so_many_seconds_and_for_the_first_and_the_last_step(
    capsys: pytest.CaptureFixture[str], clock: Clock
) -> None:
    with Progress(interval=5.0) as progress:
        for step in range(14):
            progress.show("train", step, 14, {})
            clock.now += 1
    shown = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["1/14", "6/14", "11/14", "14/14"]


def test_each_loop_has_its_first_line_and_its_own_time(capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    with Progress(interval=1000.0) as progress:
        for step in range(3):
            progress.show("warmup", step, 3, {})
            clock.now += 100
        for step in range(3):
            progress.show("train", step, 3, {})
            clock.now += 1
    assert capsys.readouterr().out.splitlines() == [
        "warmup 1/3 | ? left",
        "warmup 3/3 | 0:00 left",
        "train 1/3 | ? left",
        "train 3/3 | 0:00 left",
    ]


def test_the_time_left_is_counted_from_the_step_that_came_first(
    capsys: pytest.CaptureFixture[str], clock: Clock
) -> None:
    with Progress(interval=0.0) as progress:
        progress.show("train", 10, 20, {})
        clock.now += 4
        progress.show("train", 12, 20, {})
    assert capsys.readouterr().out.splitlines() == ["train 11/20 | ? left", "train 13/20 | 0:14 left"]


# --- the plain line chooses what to show


def test_the_numbers_that_say_most_in_a_fixed_order(capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    numbers = {"step": 0, "mine": 9.0, "tokens_per_second": 1234.5, "loss": 0.5, "reward": 0.25, "time/total": 1.0}
    with Progress() as progress:
        progress.show("train", 0, 2, numbers)
    assert capsys.readouterr().out == "train 1/2 | reward 0.25 | loss 0.5 | tokens_per_second 1234 | ? left\n"


def test_trouble_only_where_there_is_some(capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    with Progress(interval=0) as progress:
        progress.show("train", 0, 2, {"lag": 0.0, "invalid": 0.0, "skipped": 0.0, "loss": 0.0})
        progress.show("train", 1, 2, {"lag": 1.0, "invalid": 2.0, "skipped": 3.0, "loss": math.nan})
    assert capsys.readouterr().out == (
        "train 1/2 | loss 0 | ? left\ntrain 2/2 | loss nan | lag 1 | invalid 2 | skipped 3 | 0:00 left\n"
    )


def test_a_loop_within_a_step_leaves_the_outer_one_its_time(capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    with Progress(interval=0) as progress:
        for step in range(3):
            for inner in range(2):
                progress.show("eval", inner, 2, {})
                clock.now += 1
            progress.show("train", step, 3, {})
            clock.now += 8
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("train")] == [
        "train 1/3 | ? left",
        "train 2/3 | 0:10 left",
        "train 3/3 | 0:00 left",
    ]


def test_nothing_shown_is_nothing_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress():
        pass
    assert capsys.readouterr().out == ""


# --- the panel, on a real pseudo-terminal


class Terminal:
    """A pseudo-terminal that stands in for the standard streams, and a screen that shows what arrives there."""

    def __init__(self, columns: int, rows: int) -> None:
        self.screen = pyte.Screen(columns, rows)
        self.received = b""
        self.master, self.slave = pty.openpty()
        self._feed = pyte.ByteStream(self.screen)
        self._tell(columns, rows)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _tell(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _read(self) -> None:
        while data := self._some():
            self._feed.feed(data)
            self.received += data

    def _some(self) -> bytes:
        try:
            return os.read(self.master, 65536)
        except OSError:  # the other side has been closed
            return b""

    def resize(self, columns: int, rows: int) -> None:
        self.settle()
        self.screen.resize(rows, columns)
        self._tell(columns, rows)

    def settle(self) -> None:
        """Wait until all that was written is on the screen: until the terminal has answered a mark."""
        mark = f"\x1b]0;mark {time.perf_counter_ns()}\x07".encode()
        os.write(self.slave, mark)
        deadline = time.monotonic() + 10
        while mark not in self.received:
            assert time.monotonic() < deadline, "the terminal does not read"
            time.sleep(0.002)

    def lines(self) -> list[str]:
        """What is on the screen, without what is empty below."""
        self.settle()
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip().split("\n")

    def panels(self) -> list[list[str]]:
        """The lines of each panel, from its title to its lower edge, and nothing else in between."""
        found: list[list[str]] = []
        for line in self.lines():
            if line.startswith("╭"):
                found.append([line])
            elif found and not found[-1][-1].startswith("╰"):
                found[-1].append(line)
        return found

    def close(self) -> None:
        os.close(self.slave)
        self._reader.join(10)
        os.close(self.master)


@contextmanager
def opened(capfd: pytest.CaptureFixture[str], columns: int, rows: int = 24) -> Iterator[Terminal]:
    with capfd.disabled():
        terminal = Terminal(columns, rows)
        saved = [os.dup(number) for number in range(3)]
        streams = sys.stdout, sys.stderr
        for number in range(3):
            os.dup2(terminal.slave, number)
        sys.stdout = os.fdopen(os.dup(terminal.slave), "w", buffering=1, encoding="utf-8")
        sys.stderr = os.fdopen(os.dup(terminal.slave), "w", buffering=1, encoding="utf-8")
        try:
            yield terminal
        finally:
            sys.stdout.close()
            sys.stderr.close()
            sys.stdout, sys.stderr = streams
            for number, before in enumerate(saved):
                os.dup2(before, number)
                os.close(before)
            terminal.close()


def numbers(step: int) -> dict[str, float]:
    """As a real run has them: many, of which the panel shows some."""
    return {
        "step": step,
        "loss": 1 / (step + 1),
        "grad_norm": 0.5,
        "kl": 0.001,
        "mismatch/kl": 1.48e-13,
        "mismatch/ess": 0.99,
        "reward": step / 10,
        "length": 12.3,
        "invalid": 0.0,
        "tokens": 12345.0,
        "tokens_per_second": 12345.6,
        "time/rollout": 0.5,
        "time/train": 0.4,
        "time/total": 1.0,
        **{f"env/a_rather_long_name_of_a_number_that_an_environment_reports/{place}": 1.0 for place in range(60)},
    }


def is_whole(panel: list[str], columns: int) -> bool:
    return len(panel[0]) == columns and all(
        len(line) == columns and line[0] + line[-1] == edges
        for line, edges in zip(panel, ["╭╮", *["││"] * (len(panel) - 2), "╰╯"], strict=True)
    )


@pytest.mark.parametrize("columns", [80, 40, 200])
def test_one_panel_with_what_says_most(capfd: pytest.CaptureFixture[str], clock: Clock, columns: int) -> None:
    with opened(capfd, columns) as seen, Progress() as progress:
        for step in range(11):
            progress.show("train", step, 40, numbers(step))
            clock.now += 2
        (panel,) = seen.panels()
        assert is_whole(panel, columns)
        assert seen.lines() == panel
    text = "\n".join(panel)
    assert panel[0].startswith("╭─ train 11/40 ─")
    assert "0:20 · 0:58 left" in text  # 20 seconds for ten steps, 29 to go
    for expected in (
        "reward +1 ",
        "loss +0.09091 ",
        "kl +0.001 ",
        "mismatch/kl +1.48e-13 ",
        "grad norm +0.5 ",
        "length +12.3 ",
        "tokens/s +12,346 ",
    ):
        assert re.search(expected, text), expected
    times = re.sub(r"[\s│]+", " ", text[text.index("rollout") :])  # a narrow terminal breaks the line
    assert times.startswith("rollout 0.50 s 50% · train 0.40 s 40% · other 0.10 s 10% ")
    assert "env/" not in text
    assert "invalid" not in text
    sparklines = re.findall("[▁-█]+", text)
    assert [line for line in sparklines if len(line) > 3][:2] == (["▁▂▂▃▄▅▅▆▇▇█", "█▄▃▂▂▂▁▁▁▁▁"]), sparklines


def test_a_resized_terminal_has_one_panel_of_the_new_width(capfd: pytest.CaptureFixture[str], clock: Clock) -> None:
    with opened(capfd, 80) as seen, Progress() as progress:
        for step, columns in enumerate([80, 80, 40, 40, 100, 60, 80]):
            seen.resize(columns, 24)
            progress.show("train", step, 40, numbers(step))
            clock.now += 1
            (panel,) = seen.panels()
            assert is_whole(panel, columns), "\n".join(seen.lines())
            assert seen.lines() == panel


def test_what_is_printed_goes_above(capfd: pytest.CaptureFixture[str], clock: Clock) -> None:
    with opened(capfd, 80) as seen, Progress() as progress:
        for step in range(5):
            progress.show("train", step, 40, numbers(step))
            clock.now += 1
            if step == 2:
                print("a line of the user's own")
                print("an error", file=sys.stderr)
        lines = seen.lines()
        (panel,) = seen.panels()
    assert lines == ["a line of the user's own", "an error", *panel]
    assert panel[0].startswith("╭─ train 5/40 ─")
    assert is_whole(panel, 80)


def test_another_loop_has_a_panel_of_its_own(capfd: pytest.CaptureFixture[str], clock: Clock) -> None:
    with opened(capfd, 80) as seen, Progress() as progress:
        for step in range(3):
            progress.show("warmup", step, 3, {"loss": 3.0 - step})
            clock.now += 1
        for step in range(4):
            progress.show("train", step, 9, numbers(step))
            clock.now += 1
        assert [panel[0].split("─")[1] for panel in seen.panels()] == [" warmup 3/3 ", " train 4/9 "]
        assert all(is_whole(panel, 80) for panel in seen.panels())


def test_a_loop_within_a_step_takes_the_panels_place_and_gives_it_back(
    capfd: pytest.CaptureFixture[str], clock: Clock
) -> None:
    titles = []
    with opened(capfd, 80) as seen, Progress() as progress:
        for step in range(3):
            progress.show("train", step, 9, numbers(step))
            clock.now += 1
            for inner in range(2):
                progress.show("eval", inner, 2, {"reward": 0.5})
                clock.now += 1
                titles.append([panel[0].split("─")[1] for panel in seen.panels()])
        progress.show("train", 3, 9, numbers(3))
        titles.append([panel[0].split("─")[1] for panel in seen.panels()])
    assert titles == [[" eval 1/2 "], [" eval 2/2 "]] * 3 + [[" train 4/9 "]]


def test_the_panel_is_drawn_ten_times_a_second_at_most_and_at_the_end(
    capfd: pytest.CaptureFixture[str], clock: Clock
) -> None:
    with opened(capfd, 80) as seen, Progress() as progress:
        for step in range(100):
            progress.show("train", step, 100, {"loss": 1.0})
            clock.now += 0.011
        seen.settle()
        drawn = re.findall(rb"train\x1b\[0m\x1b\[34m (\d+)/100", seen.received)
    assert 10 <= len(drawn) <= 12
    assert drawn[-1] == b"100"


def test_a_small_terminal_loses_lines_and_nothing_else(capfd: pytest.CaptureFixture[str], clock: Clock) -> None:
    with opened(capfd, 30, rows=6) as seen, Progress() as progress:
        for step in range(4):
            progress.show("train", step, 9, numbers(step))
            clock.now += 1
        assert seen.lines()[0].startswith("╭─ train 4/9 ─")
        assert len(seen.lines()) <= 6


@pytest.mark.parametrize(("variable", "value"), [("TERM", "dumb"), ("TERM", "unknown")])
def test_a_terminal_that_cannot_move_its_cursor_has_plain_lines(
    capfd: pytest.CaptureFixture[str], clock: Clock, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with opened(capfd, 80) as seen, Progress() as progress:
        progress.show("train", 0, 9, {"reward": 0.25})
        assert seen.lines() == ["train 1/9 | reward 0.25 | ? left"]


def test_so_has_one_that_knows_no_unicode(capfd: pytest.CaptureFixture[str], clock: Clock) -> None:
    with opened(capfd, 80) as seen:
        sys.stdout.reconfigure(encoding="ascii")  # type: ignore[union-attr]
        with Progress() as progress:
            progress.show("train", 0, 9, {"reward": 0.25})
        assert seen.lines() == ["train 1/9 | reward 0.25 | ? left"]


def test_what_was_sent_to_a_file_stays_there(
    capfd: pytest.CaptureFixture[str], clock: Clock, tmp_path: os.PathLike[str]
) -> None:
    path = os.path.join(tmp_path, "errors")  # noqa: PTH118
    with opened(capfd, 80) as seen, open(path, "w", encoding="utf-8") as file:  # noqa: PTH123
        before, sys.stderr = sys.stderr, file
        with Progress() as progress:
            progress.show("train", 0, 9, numbers(0))
            print("this is an error", file=sys.stderr)
            progress.show("train", 8, 9, numbers(8))
        sys.stderr = before
        assert not any("this is an error" in line for line in seen.lines())
    with open(path, encoding="utf-8") as file:  # noqa: PTH123
        assert file.read() == "this is an error\n"


PROGRAM = """
import warnings
from nrl.log import Progress
with Progress() as progress:
    progress.show("train", 0, 9, {"reward": 0.25})
    warnings.warn("something is odd")
    progress.show("train", 1, 9, {"reward": 0.5})
    raise RuntimeError("it ends here")
"""


def test_a_warning_goes_above_and_an_error_leaves_the_terminal_as_it_was() -> None:
    seen = Terminal(80, 24)
    before = termios.tcgetattr(seen.slave)
    streams: Any = dict.fromkeys(("stdin", "stdout", "stderr"), seen.slave)
    done = subprocess.run([sys.executable, "-c", PROGRAM], **streams, check=False, timeout=120)
    lines = seen.lines()
    assert done.returncode == 1
    assert termios.tcgetattr(seen.slave) == before
    assert not seen.screen.cursor.hidden
    (panel,) = seen.panels()
    assert is_whole(panel, 80)
    top, below = lines.index(panel[0]), lines.index(panel[-1])
    assert "UserWarning: something is odd" in "\n".join(lines[:top])
    assert lines[below + 1] == "Traceback (most recent call last):"
    assert lines[-1] == "RuntimeError: it ends here"
    seen.close()
