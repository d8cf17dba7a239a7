"""The command `nrl`."""

import subprocess
import sys
from pathlib import Path

import pytest

from nrl.cli.cli import main


def test_a_report_is_written_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": 1.5}\n')
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/report.html\n"
    assert "1.5" in (tmp_path / "report.html").read_text()


def test_a_folder_that_is_no_run_is_one_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        f"nrl: report: out={tmp_path} has neither a config.yaml nor a metrics.jsonl; give the folder of a run\n"
    )


def test_a_page_that_cannot_be_written_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": 1.5}\n')
    (tmp_path / "report.html").mkdir()
    assert main(["report", str(tmp_path)]) == 2
    assert "report.html" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["report"], ["nonsense"]])
def test_other_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage: nrl" in capsys.readouterr().err


@pytest.mark.parametrize("group", ["deploy", "gym", "venvs"])
def test_a_command_that_needs_another_says_which_there_are(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([group])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    for each in {"deploy": ("slurm", "kubernetes"), "gym": ("test", "run"), "venvs": ("build", "check")}[group]:
        assert f"\n    {each}" in said
    assert said.endswith(f"nrl {group}: error: the following arguments are required: COMMAND\n")


def test_the_module_is_the_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nrl", "report", str(tmp_path / "gone")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert done.stderr.startswith("nrl: report: out=")
    assert done.stderr.count("\n") == 1
