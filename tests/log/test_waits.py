"""What is said of a block that takes long."""

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
    monkeypatch.setattr("nrl.log.waits._FIRST", 0.2)
    monkeypatch.setattr("nrl.log.waits._EVERY", 0.3)
    with pytest.raises(ValueError, match="no"), waiting("reading rows") as far:  # noqa: PT012
        time.sleep(0.35)
        far(3, 1000)
        time.sleep(0.3)
        raise ValueError("no")
    assert capsys.readouterr().out == "reading rows, 0:00 so far\nreading rows, 3 of 1000, 0:00 so far\n"
    time.sleep(0.35)
    assert capsys.readouterr().out == ""
