"""How a program ends: what is exit_status in a few lines, and what keeps its traceback."""

import errno
import os
import pty
import sys
import sysconfig
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

import nrl
from nrl.errors import ConfigError, DataError, LostActor, ModelError
from nrl.run.exit_codes import exit_status


@attrs.frozen
class Config:
    steps: int = 3


def raising(error: BaseException) -> Callable[[], None]:
    def program() -> None:
        raise error

    return program


def noted(error: Exception, *notes: str) -> Exception:
    for note in notes:
        error.add_note(note)
    return error


@pytest.fixture(autouse=True)
def without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NRL_TRACEBACK", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        (ModelError("no such model; give another"), ["no such model; give another"]),
        (
            ConfigError("load(Config): 1 problem\n  stps: no such key"),
            ["load(Config): 1 problem", "  stps: no such key"],
        ),
        (FileNotFoundError(errno.ENOENT, "No such file", "rows"), ["[Errno 2] No such file: 'rows'"]),
        (OSError(errno.ENOSPC, "run.log: the disk is full"), ["[Errno 28] run.log: the disk is full"]),
        (
            noted(DataError("bad"), "raised in rank 0 of mesh 'a':\nTraceback"),
            ["bad", "  raised in rank 0 of mesh 'a'"],
        ),
        (ExceptionGroup("several", [DataError("bad"), DataError("bad"), DataError("worse")]), ["bad", "worse"]),
        (LostActor("step", "trainer", 0, "n", "killed"), ["step: rank 0 of mesh 'trainer' on node n is lost: killed."]),
        (ModelError("at http://me:hunter2@gpu7"), ["at http://***@gpu7"]),
    ],
)
def test_a_mistake_is_told_in_a_few_lines(
    error: Exception, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_status(raising(error), "it.py") == 2
    said = capsys.readouterr()
    *first, place = said.err.splitlines()
    assert (said.out, first) == ("", [f"it.py: {lines[0]}", *lines[1:]])
    assert f"{Path('tests', 'run', 'test_exit_codes.py')}, line " in place
    assert place.endswith("in program; NRL_TRACEBACK=1 shows the traceback")


@pytest.mark.parametrize(
    "error",
    [
        AssertionError("a bug"),
        TypeError("another"),
        ValueError("a third"),
        ConnectionRefusedError(errno.ECONNREFUSED, "nobody is there"),  # of the user's own code: whose, nobody knows
        OSError("without a number"),
        ExceptionGroup("several", [DataError("bad"), TypeError("a bug")]),
        SystemExit(3),
    ],
)
def test_a_bug_keeps_its_traceback(error: BaseException, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(type(error)) as caught:
        exit_status(raising(error), "it.py")
    assert caught.value is error
    assert capsys.readouterr() == ("", "")


def test_an_interrupt_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(raising(KeyboardInterrupt()), "it.py") == 130
    assert capsys.readouterr().err == "it.py: interrupted\n"


@pytest.mark.parametrize(
    ("file", "told"),
    [
        (sysconfig.get_path("scripts") + "/nrl", "nrl: UserWarning: 3 failed, with a key ***\n"),
        (nrl.__file__, "nrl: UserWarning: 3 failed, with a key ***\n"),
        ("<frozen runpy>", "nrl: UserWarning: 3 failed, with a key ***\n"),
        ("/srv/guess.py", "/srv/guess.py:10: UserWarning: 3 failed, with a key hf_abcdefghijklmnopqrst\n  x\n"),
    ],
)
def test_a_warning_names_a_line_of_the_user_s_or_none(file: str, told: str) -> None:
    found: list[str] = []

    def program() -> None:
        said = "3 failed, with a key hf_abcdefghijklmnopqrst"
        found.append(warnings.formatwarning(said, UserWarning, file, 10, "x"))

    before = warnings.formatwarning
    assert exit_status(program, "nrl") == 0
    assert warnings.formatwarning is before
    assert found == [told]


def test_the_traceback_is_shown_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NRL_TRACEBACK", "1")
    assert exit_status(raising(ModelError("no such model")), "it.py") == 2
    said = capsys.readouterr().err
    assert said.startswith("Traceback (most recent call last):\n")
    assert said.endswith("\nit.py: no such model\n")


def test_a_program_is_called_with_its_configuration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    got: list[Any] = []
    nrl.launch(got.append, Config, ["steps=5"])
    monkeypatch.setattr(sys, "argv", ["/somewhere/it.py", "steps=6"])
    nrl.launch(nrl.retrying(got.append), Config)
    assert got == [Config(5), Config(6)]
    monkeypatch.setattr(sys, "argv", ["/somewhere/it.py", "steps=six"])
    with pytest.raises(SystemExit) as ended:
        nrl.launch(got.append, Config)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("it.py: load(Config): 1 problem\n  steps: expected int, found 'six'")
    assert len(got) == 2


@pytest.mark.parametrize(("variables", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_it_is_in_colour_on_a_terminal(
    variables: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    above, below = pty.openpty()
    for name, value in {"TERM": "xterm", **variables}.items():
        monkeypatch.setenv(name, value)
    with os.fdopen(below, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        assert exit_status(raising(DataError("no")), "it") == 2
        said = os.read(above, 1000).decode()
    os.close(above)
    assert said.startswith("\x1b[1;31mit:\x1b[0m no" if coloured else "it: no")
