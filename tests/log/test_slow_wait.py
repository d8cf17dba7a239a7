"""What is said of a block that takes long, and of a wait."""

import io
import re
import threading
import time
from types import SimpleNamespace

import pytest

from nrl.log import wait_until, waiting


def test_a_short_block_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with waiting("reading rows") as far:
        far(1, 2)
    assert capsys.readouterr() == ("", "")
    assert not [thread for thread in threading.enumerate() if thread.name == "waiting"]


def test_a_long_block_says_what_it_does_and_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nrl.log.slow_wait.SILENCE", 0.01)
    said = io.StringIO()
    monkeypatch.setattr("sys.stderr", said)  # reading capsys while a thread writes may lose what it writes

    def until(line: str) -> None:
        while not re.search(line, said.getvalue(), re.MULTILINE):  # or the time limit of a test
            time.sleep(0.001)

    with pytest.raises(ValueError, match="no"), waiting("reading rows") as far:  # noqa: PT012
        until(r"^reading rows, \d+:\d\d so far$")
        far(3, 1000)
        until(r"^reading rows, 3 of 1000, \d+:\d\d so far$")
        raise ValueError("no")
    before = said.getvalue()
    time.sleep(0.05)
    assert said.getvalue() == before


def test_lines_come_less_and_less_often(capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[float] = []

    def ready(seconds: float) -> bool:
        asked.append(seconds)
        time.sleep(seconds)
        return len(asked) == 4

    assert wait_until(ready, 10.0, lambda seconds: f"waiting for {seconds:.2f}", silence=0.02)
    assert asked == [0.02, 0.04, 0.08, 0.16]
    said = [float(line.removeprefix("waiting for ")) for line in capsys.readouterr().err.splitlines()]
    assert all(at >= wanted for at, wanted in zip(said, (0.02, 0.06, 0.14), strict=True))


def test_a_wait_looks_as_often_as_asked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines come when they would; before each of them, and before the end, what is left is less."""
    asked, now = list[float](), [0.0]

    def ready(seconds: float) -> bool:
        asked.append(seconds)
        now[0] += seconds
        return False

    monkeypatch.setattr("nrl.log.slow_wait.time", SimpleNamespace(monotonic=lambda: now[0]))
    assert not wait_until(ready, 6.0, "{:g} s".format, silence=2.5, poll_seconds=1.0)
    assert asked == [1.0, 1.0, 0.5, 1.0, 1.0, 1.0, 0.5]
    assert capsys.readouterr().err == "2.5 s\n"
    now[0] = 0.0
    assert wait_until(
        lambda seconds: bool(ready(seconds)) or now[0] > 3, 6.0, "{:g} s".format, silence=9.0, poll_seconds=1.0
    )
    assert now[0] == 4.0


def test_a_wait_is_silent_where_it_is_short_and_ends_with_its_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[float] = []

    def ready(seconds: float) -> bool:
        asked.append(seconds)
        return False

    monkeypatch.setattr("nrl.log.slow_wait.time", SimpleNamespace(monotonic=lambda: 7.0))
    assert not wait_until(ready, 5.0, lambda seconds: "waiting", silence=10.0)
    assert not wait_until(ready, 0.0, lambda seconds: "waiting")
    assert asked == [5.0, 0.0]
    assert capsys.readouterr() == ("", "")
