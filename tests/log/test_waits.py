"""What is said of a block that takes long."""

import re
import threading
import time

import pytest

from nrl.log import waiting


def test_a_short_block_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with waiting("reading rows") as far:
        far(1, 2)
    assert capsys.readouterr() == ("", "")
    assert not [thread for thread in threading.enumerate() if thread.name == "waiting"]


def test_a_long_block_says_what_it_does_and_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("nrl.log.waits._FIRST", 0.01)
    monkeypatch.setattr("nrl.log.waits._EVERY", 0.01)
    said = ""

    def until(line: str) -> None:
        nonlocal said
        while not re.search(line, said, re.MULTILINE):  # or the time limit of a test
            said += capsys.readouterr().out
            time.sleep(0.001)

    with pytest.raises(ValueError, match="no"), waiting("reading rows") as far:  # noqa: PT012
        until(r"^reading rows, \d+:\d\d so far$")
        far(3, 1000)
        until(r"^reading rows, 3 of 1000, \d+:\d\d so far$")
        raise ValueError("no")
    capsys.readouterr()
    time.sleep(0.05)
    assert capsys.readouterr().out == ""
