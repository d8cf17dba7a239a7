import io
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from nrl.log import JsonLines, Progress, duration, terminal


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
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


# --- JsonLines


def test_one_object_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with JsonLines(path) as lines:
        lines.write({"step": 0, "loss": 1.5})
        lines.write({"step": 1, "loss": -2.0, "name": "ü"})
    assert [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] == [
        {"step": 0, "loss": 1.5},
        {"step": 1, "loss": -2.0, "name": "ü"},
    ]


def test_each_line_is_in_the_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with JsonLines(path) as lines:
        for step in range(3):
            lines.write({"step": step})
            assert path.read_text().count("\n") == step + 1


@pytest.mark.parametrize("undefined", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_null(tmp_path: Path, undefined: float) -> None:
    path = tmp_path / "metrics.jsonl"
    with JsonLines(path) as lines:
        lines.write({"loss": undefined, "step": 0})
    assert path.read_text() == '{"loss": null, "step": 0}\n'


@pytest.mark.parametrize("undefined", [math.nan, math.inf, -math.inf])
def test_nor_is_it_inside_of_lists_and_objects(tmp_path: Path, undefined: float) -> None:
    path = tmp_path / "metrics.jsonl"
    with JsonLines(path) as lines:
        lines.write({"rewards": [1.0, undefined], "by": {"task": undefined}})
    assert path.read_text() == '{"rewards": [1.0, null], "by": {"task": null}}\n'


def test_a_file_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in range(2):
        with JsonLines(path) as lines:
            lines.write({"step": step})
    assert path.read_text() == '{"step": 0}\n{"step": 1}\n'


def test_what_was_written_stays_as_it_was(tmp_path: Path) -> None:
    record = {"loss": math.nan}
    with JsonLines(tmp_path / "metrics.jsonl") as lines:
        lines.write(record)
    assert math.isnan(record["loss"])


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


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_one_live_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    with Progress() as progress:
        for step in range(3):
            progress.show("train", step, 3, {"reward": 0.25})
            clock.now += 1
    written = terminal.getvalue()
    assert all(f"train {step}/3" in written for step in (1, 2, 3))
    assert "reward 0.25" in written
    assert "\x1b[" in written  # it moves back to write over the line
    assert " | " not in written


def test_nothing_shown_is_nothing_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress():
        pass
    assert capsys.readouterr().out == ""
