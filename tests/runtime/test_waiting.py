"""Waits that say what they wait for."""

import time

import pytest

from nrl.runtime.waiting import waited


def test_lines_come_less_and_less_often(capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[float] = []

    def ready(seconds: float) -> bool:
        asked.append(seconds)
        time.sleep(seconds)
        return len(asked) == 4

    assert waited(ready, 10.0, lambda seconds: f"waiting for {seconds:.2f}", silence=0.02)
    assert asked == [0.02, 0.04, 0.08, 0.16]
    said = [float(line.removeprefix("waiting for ")) for line in capsys.readouterr().out.splitlines()]
    assert all(at >= wanted for at, wanted in zip(said, (0.02, 0.06, 0.14), strict=True))


def test_a_wait_is_silent_where_it_is_short_and_ends_with_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[float] = []

    def ready(seconds: float) -> bool:
        asked.append(seconds)
        return False

    assert not waited(ready, 5.0, lambda seconds: "waiting", silence=10.0)
    assert len(asked) == 1
    assert 4.9 < asked[0] <= 5.0
    assert not waited(ready, 0.0, lambda seconds: "waiting")
    assert asked[1] == 0.0
    assert capsys.readouterr().out == ""
