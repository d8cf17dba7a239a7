"""Folders that are gone, that may not be read, or take no more files: a message with the path and what to do."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

import nrl
from nrl.data import counting
from nrl.errors import CheckpointError
from nrl.run.checkpoint import Checkpoints, checkpoints, save
from nrl.run.exit_codes import exit_status
from tests.disks import small_disk_at
from tests.processes import settled

ROOT = Path(__file__).parents[2]


@attrs.frozen
class Config:
    out: str
    steps: int = 3
    checkpoints: Checkpoints = Checkpoints(every=1)


def program(cfg: Config, at: Callable[[str, int], Any]) -> None:
    with nrl.run(cfg) as run:
        total, stream = run.restore(total=0, stream=counting())
        for i, number in run.steps(stream):
            total += number
            at("log", i)
            run.log(i, {})
            at("save", i)
            run.save(i, total=total, stream=stream)
        at("report", cfg.steps)


def ended(cfg: Config, at: Callable[[str, int], Any], capfd: pytest.CaptureFixture[str]) -> str:
    """What a program says that has to end with a mistake."""
    assert exit_status(lambda: program(cfg, at), "program.py") == 2
    err = capfd.readouterr().err
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize(("place", "caller"), [("log", "run.log"), ("save", "run.save"), ("report", "run")])
def test_a_folder_that_is_removed_under_a_run(
    place: str, caller: str, replaced: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"

    def remove(where: str, step: int) -> None:
        if where == place and step >= 1:
            shutil.rmtree(out, ignore_errors=True)
            if replaced:
                out.mkdir(exist_ok=True)  # a checkpoint that is written beside may have made it again

    err = ended(Config(str(out)), remove, capfd)
    assert f"{caller}: out={out} was removed or replaced while the run was going, and its files are lost; start" in err
    shutil.rmtree(out, ignore_errors=True)
    program(Config(str(out)), lambda place, step: None)  # and it begins anew


def test_a_folder_whose_inode_changes_is_the_same_folder(tmp_path: Path) -> None:
    """As on a network file system that makes up its inodes."""
    out = tmp_path / "run"

    def change(place: str, step: int) -> None:
        before = out.stat().st_ino
        # A checkpoint that is being written beside the steps would be copied in part.
        assert not settled(lambda: list(out.rglob("*.writing")), 60)
        shutil.copytree(out, tmp_path / "copy")
        out.rename(tmp_path / f"{place} {step}")
        (tmp_path / "copy").rename(out)
        assert out.stat().st_ino != before

    program(Config(str(out)), change)
    assert [found.step for found in checkpoints(out / "checkpoints" / "train")][-1:] == [2]


@pytest.mark.filterwarnings("ignore:run. .*report.html could not be written")
@pytest.mark.parametrize("place", ["mkdir", "log", "save"])
def test_a_disk_without_inodes(place: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with small_disk_at(tmp_path / "disk", megabytes=8, inodes=64) as disk:

        def fill(where: str, step: int) -> None:
            if where == place and step == 0:
                for number in range(100):
                    try:
                        (disk / f"small{number}").touch()
                    except OSError:
                        break

        if place == "mkdir":
            fill("mkdir", 0)
        err = ended(Config(str(disk / "run")), fill, capfd)
        assert "No space left on device" in err
        assert f"MB, but only 0 inodes are free in {disk}" in err
        assert "remove files, each of which takes one" in err


def test_a_checkpoint_without_inodes(tmp_path: Path) -> None:
    with small_disk_at(tmp_path / "disk", megabytes=8, inodes=10) as disk:
        for number in range(9):
            (disk / f"small{number}").touch()
        with pytest.raises(CheckpointError, match=r"No space left on device; .* MB, but only \d inodes are free in"):
            save(disk / "000001", 0, {"x": 1})


def python(code: str, **variables: str | None) -> "subprocess.CompletedProcess[str]":
    """A program of a user who is not root, so that modes of folders count; root's own interpreter runs it."""
    environment = {**os.environ, **{name: value for name, value in variables.items() if value is not None}}
    for name in (name for name, value in variables.items() if value is None):
        environment.pop(name, None)
    weak = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all"]
    prefix = weak if os.getuid() == 0 else []
    command = [*prefix, sys.executable, "-c", code]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("home", ["locked", "missing", "file", None])
def test_a_home_that_cannot_be_used(home: str | None, tmp_path: Path) -> None:
    """A run needs none."""
    locked = tmp_path / "locked"
    locked.mkdir(mode=0)
    if os.getuid() == 0:
        os.chown(locked, 65534, 65534)  # root without capabilities is a stranger there
    (tmp_path / "file").touch()
    code = (
        "import nrl; from examples import sft; from pathlib import Path; "
        f"nrl.launch(sft.main, sft.Config, ['steps=1', 'rows=2', 'evaluate_rows=2', 'out={tmp_path}/run'])"
    )
    done = python(code, HOME=str(tmp_path / home) if home else None)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "model" / "config.json").exists()


def test_a_user_without_a_home(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody's number, as in a container: neither the environment nor the list of users has a home."""
    import pwd

    def unknown(uid: int) -> Any:
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)

    def needs_home() -> None:
        Path("~/.cache").expanduser()

    assert exit_status(needs_home, "nrl") == 2
    assert f"user {os.getuid()} has no home folder, and HOME is not set; set HOME to a" in capfd.readouterr().err
