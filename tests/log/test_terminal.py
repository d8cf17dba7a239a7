import io
import math
import os
import pty
import re
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from types import SimpleNamespace

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


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (0.4, "0:00"), (9, "0:09"), (59.6, "1:00"), (75, "1:15"), (3599.7, "1:00:00"), (36061, "10:01:01")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# --- plain lines, where there is no terminal


def test_the_numbers_that_say_most_and_trouble_where_there_is_some(
    capsys: pytest.CaptureFixture[str], clock: Clock
) -> None:
    with Progress(interval=0.0) as progress:
        progress.show("train", 10, 20, {"mine": 9, "tokens_per_second": 1234.5, "loss": 1.23456789, "reward": 0.0})
        clock.now += 4
        progress.show("train", 12, 20, {"lag": 0.0, "invalid": 0.0, "skipped": 0.0, "time/total": 1.0})
        progress.show("train", 19, 20, {"lag": 1.0, "invalid": 2.0, "skipped": 3.0, "loss": math.nan})
    assert capsys.readouterr().out.splitlines() == [
        "train 11/20 | reward 0 | loss 1.235 | tokens_per_second 1,234 | ? left",
        "train 13/20 | 0:14 left",
        "train 20/20 | loss nan | lag 1 | invalid 2 | skipped 3 | 0:00 left",
    ]


def test_a_line_every_so_many_seconds_and_for_the_first_and_last_step_of_a_loop(
    capsys: pytest.CaptureFixture[str], clock: Clock
) -> None:
    with Progress(interval=5.0) as progress:
        assert capsys.readouterr().out == ""
        for loop in ("warmup", "train"):
            for step in range(14):
                progress.show(loop, step, 14, {})
                clock.now += 1
    steps = ["1/14 | ? left", "6/14 | 0:08 left", "11/14 | 0:03 left", "14/14 | 0:00 left"]
    assert capsys.readouterr().out.splitlines() == [f"{loop} {step}" for loop in ("warmup", "train") for step in steps]


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


# --- the panel


class Terminal(io.StringIO):
    """A standard stream that is a terminal, with a screen that shows what is written to it."""

    encoding = "utf-8"

    def __init__(self) -> None:
        super().__init__()
        self.screen = pyte.Screen(80, 24)
        self.screen.set_mode(pyte.modes.LNM)  # as the system does: a new line begins on the left
        self._stream = pyte.Stream(self.screen)

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._stream.feed(text)
        return super().write(text)

    @contextmanager
    def progress(self) -> Iterator[Progress]:
        with redirect_stdout(self), redirect_stderr(self), Progress() as progress:
            yield progress

    def resize(self, columns: int, rows: int = 24) -> None:
        self.screen.resize(rows, columns)

    def lines(self) -> list[str]:
        """What is on the screen, without what is empty below."""
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip().split("\n")

    def panels(self) -> list[list[str]]:
        """The lines of each panel, from its title to its lower edge, and nothing else in between."""
        found: list[list[str]] = []
        for line in self.lines():
            if line.startswith("╭"):
                found.append([line])
            elif found and not found[-1][-1].startswith("╰"):
                found[-1].append(line)
        assert all(is_whole(panel, self.screen.columns) for panel in found), "\n".join(self.lines())
        return found

    def titles(self) -> list[str]:
        return [panel[0].split("─")[1].strip() for panel in self.panels()]


def is_whole(panel: list[str], columns: int) -> bool:
    return len(panel[0]) == columns and all(
        len(line) == columns and line[0] + line[-1] == edges
        for line, edges in zip(panel, ["╭╮", *["││"] * (len(panel) - 2), "╰╯"], strict=True)
    )


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Terminal:
    seen = Terminal()
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((seen.screen.columns, seen.screen.lines)))
    return seen


@pytest.fixture
def show(clock: Clock) -> Callable[..., None]:
    """A step as a real run has it, of many numbers of which the panel shows some, and a second after it."""

    def one(progress: Progress, loop: str, step: int, steps: int = 40) -> None:
        numbers = {
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
            **{f"env/a_rather_long_name_of_a_number_that_an_environment_reports/{at}": 1.0 for at in range(60)},
        }
        progress.show(loop, step, steps, numbers)
        clock.now += 1

    return one


@pytest.mark.parametrize("columns", [80, 40, 200])
def test_one_panel_with_what_says_most(seen: Terminal, show: Callable[..., None], columns: int) -> None:
    seen.resize(columns)
    with seen.progress() as progress:
        for step in range(11):
            show(progress, "train", step)
        (panel,) = seen.panels()
        assert seen.lines() == panel
    text = "\n".join(panel)
    assert panel[0].startswith("╭─ train 11/40 ─")
    assert "0:10 · 0:29 left" in text
    for expected in (
        "reward +1 ",
        "loss +0.09091 ",
        "kl +0.001 ",
        "mismatch/kl +0 ",
        "grad norm +0.5 ",
        "length +12.3 ",
        "tokens/s +12,346 ",
    ):
        assert re.search(expected, text), expected
    times = re.sub(r"[\s│]+", " ", text[text.index("rollout") :])  # a narrow terminal breaks the line
    assert times.startswith("rollout 0.5 s 50% · train 0.4 s 40% · other 0.1 s 10% ")
    assert "env/" not in text
    assert "invalid" not in text
    sparklines = re.findall("[▁-█]+", text)
    assert [line for line in sparklines if len(line) > 3][:2] == (["▁▂▂▃▄▅▅▆▇▇█", "█▄▃▂▂▂▁▁▁▁▁"]), sparklines


def test_a_resized_terminal_has_one_panel_of_the_new_width(seen: Terminal, show: Callable[..., None]) -> None:
    with seen.progress() as progress:
        for step, columns in enumerate([80, 80, 40, 40, 100, 60, 80]):
            seen.resize(columns)
            show(progress, "train", step)
            (panel,) = seen.panels()
            assert seen.lines() == panel


def test_a_small_terminal_loses_lines_and_nothing_else(seen: Terminal, show: Callable[..., None]) -> None:
    seen.resize(30, rows=6)
    with seen.progress() as progress:
        for step in range(4):
            show(progress, "train", step)
        assert seen.lines()[0].startswith("╭─ train 4/40 ─")


def test_what_is_printed_goes_above(seen: Terminal, show: Callable[..., None]) -> None:
    with seen.progress() as progress:
        show(progress, "train", 0)
        print("a line of the user's own")
        print("an error", file=sys.stderr)
        show(progress, "train", 1)
        (panel,) = seen.panels()
    assert seen.lines() == ["a line of the user's own", "an error", *panel]


def test_what_is_sent_to_a_file_stays_there(seen: Terminal, show: Callable[..., None]) -> None:
    with redirect_stdout(seen), redirect_stderr(io.StringIO()) as file, Progress() as progress:
        show(progress, "train", 0)
        print("this is an error", file=sys.stderr)
    assert file.getvalue() == "this is an error\n"
    assert not any("this is an error" in line for line in seen.lines())


def test_each_loop_has_a_panel_of_its_own_and_one_within_a_step_gives_its_place_back(
    seen: Terminal, show: Callable[..., None]
) -> None:
    with seen.progress() as progress:
        for step in range(3):
            show(progress, "warmup", step, 3)
        for step in range(2):
            show(progress, "train", step)
            for inner in range(2):
                show(progress, "eval", inner, 2)
                assert seen.titles() == ["warmup 3/3", f"eval {inner + 1}/2"]
        show(progress, "train", 2)
        assert seen.titles() == ["warmup 3/3", "train 3/40"]


def test_the_panel_is_drawn_ten_times_a_second_at_most_and_at_the_end(seen: Terminal, clock: Clock) -> None:
    with seen.progress() as progress:
        for step in range(100):
            progress.show("train", step, 100, {"loss": 1.0})
            clock.now += 0.011
    drawn = re.findall(r"train\x1b\[0m\x1b\[34m (\d+)/100", seen.getvalue())
    assert 10 <= len(drawn) <= 12
    assert drawn[-1] == "100"


@pytest.mark.parametrize("cannot", ["move its cursor", "write unicode"])
def test_a_terminal_that_cannot_has_plain_lines(seen: Terminal, monkeypatch: pytest.MonkeyPatch, cannot: str) -> None:
    if cannot == "write unicode":
        monkeypatch.setattr(seen, "encoding", "ascii")
    else:
        monkeypatch.setenv("TERM", "dumb")
    with seen.progress() as progress:
        progress.show("train", 0, 9, {"reward": 0.25})
    assert seen.lines() == ["train 1/9 | reward 0.25 | ? left"]


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
    """On a real pseudo-terminal."""
    seen, (ours, theirs) = Terminal(), pty.openpty()
    termios.tcsetwinsize(ours, (24, 80))
    before = termios.tcgetattr(ours)
    done = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    with open(ours, encoding="utf-8", newline="", closefd=False) as file:
        try:
            for line in file:
                seen.write(line)
        except OSError:  # the program has ended
            pass
    assert done.wait(60) == 1
    assert termios.tcgetattr(ours) == before
    os.close(ours)
    assert not seen.screen.cursor.hidden
    lines, (panel,) = seen.lines(), seen.panels()
    top, below = lines.index(panel[0]), lines.index(panel[-1])
    assert "UserWarning: something is odd" in "\n".join(lines[:top])
    assert lines[below + 1] == "Traceback (most recent call last):"
    assert lines[-1] == "RuntimeError: it ends here"
