"""Ctrl-C in a process of its own: the first saves the last step and says how to go on, the second stops at once."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import attrs
import pytest

import nrl
from nrl.data import counting
from nrl.run.checkpoint import Checkpoints, checkpoints
from nrl.run.exit_codes import exit_status
from tests.children import child, server
from tests.jsonlines import untimed
from tests.processes import settled

pytestmark = pytest.mark.slow


@attrs.frozen
class Config:
    out: str
    steps: int = 6
    checkpoints: Checkpoints = Checkpoints(every=2, grace=10.0)


def run_it(cfg: Config, sleeps: dict[str, float], saves: bool) -> None:
    """A program that reports some of the places that it passes, and sleeps there."""

    def pass_by(place: str) -> None:
        if seconds := sleeps.get(place, 0.0):
            print("at", place, flush=True)
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                time.sleep(0.05)

    def item(index: int) -> int:
        if index == 3:
            pass_by("batch")
        return index

    with nrl.run(cfg) as run:
        try:
            pass_by("before")
            total, stream = run.restore(total=0, stream=counting(item)) if saves else (0, counting(item))
            for i, number in run.steps(stream):
                if i == 3:
                    pass_by("step")
                total += number
                run.log(i, {})
                if saves:
                    run.save(i, total=total, stream=stream)
        finally:
            pass_by("closing")
    print("total", total, flush=True)


def main(folder: Path, cfg: Config, sleeps: dict[str, float], saves: bool) -> None:
    for descriptor in (1, 2):
        os.dup2(os.open(folder / f"{descriptor}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it

    def program(cfg: Config) -> None:
        run_it(cfg, sleeps, saves)

    os._exit(exit_status(lambda: nrl.retrying(program)(cfg), "program.py"))


def reached(folder: Path, place: str, sleeps: dict[str, float], *, saves: bool = True) -> Any:
    """The process of the program, once it is at a place."""
    folder.mkdir(exist_ok=True)
    process = server().Process(target=main, args=(folder, Config(str(folder / "run")), sleeps, saves))
    process.start()
    out = folder / "1.txt"
    settled(lambda: process.is_alive() and not (out.exists() and f"at {place}\n" in out.read_text()), 100)
    return process


def end(process: Any, number: int) -> float:
    """The seconds in which a process ends after a signal."""
    began = time.monotonic()
    os.kill(process.pid, number)
    process.join(60)
    return time.monotonic() - began


def said(folder: Path) -> list[str]:
    return (folder / "2.txt").read_text().splitlines()


def saved(folder: Path) -> list[int]:
    return [found.step for found in checkpoints(folder / "run/checkpoints/train")]


def go_on(folder: Path) -> str:
    """What the same program says that goes on, and is not disturbed."""
    assert child(main, folder, Config(str(folder / "run")), {}, True) == 0
    return (folder / "1.txt").read_text()


def test_the_first_one_saves_and_says_how_to_go_on(tmp_path: Path) -> None:
    """In the middle of a step, the step is finished; a batch that the program waits for is not waited for."""
    first, other = tmp_path / "step", tmp_path / "batch"
    process = reached(first, "step", {"step": 1.0})
    end(process, signal.SIGINT)
    run = first / "run"
    assert (process.exitcode, saved(first)) == (130, [1, 3])
    assert said(first) == [
        "run: Ctrl-C; going on to the end of this step; press it again to stop at once",
        f"run: step 3 of 'train' is saved in {run}/checkpoints/train/000004",
        f"run: the same command with out={run} goes on after step 3 of 'train'",
        "program.py: interrupted",
    ]
    text = go_on(first)
    assert "train: 4 of 6 steps were done" in text
    assert "total 15" in text
    process = reached(other, "batch", {"batch": 100.0})
    end(process, signal.SIGINT)
    assert (process.exitcode, saved(other)) == (130, [1, 2])
    assert said(other)[0] == "run: Ctrl-C; ending; press it again to stop at once"
    assert "total 15" in go_on(other)
    assert untimed(other / "run") == untimed(run)


def test_the_second_one_stops_at_once(tmp_path: Path) -> None:
    process = reached(tmp_path, "step", {"step": 100.0, "closing": 100.0})
    os.kill(process.pid, signal.SIGINT)
    os.kill(process.pid, signal.SIGINT)  # as by a launcher, which forwards what the terminal has sent to all
    time.sleep(0.6)
    assert process.is_alive()
    assert end(process, signal.SIGINT) < 10
    assert (process.exitcode, saved(tmp_path)) == (130, [1])
    assert said(tmp_path)[-1] == "run: stopped after a second Ctrl-C; no checkpoint could be saved"
    assert "total 15" in go_on(tmp_path)


@pytest.mark.parametrize("place", ["before", "step"])
def test_without_a_checkpoint_the_end_is_clear(place: str, tmp_path: Path) -> None:
    """Before the first step, and in a program that saves nothing."""
    process = reached(tmp_path, place, {place: 100.0}, saves=place == "before")
    end(process, signal.SIGINT)
    assert process.exitcode == 130
    assert said(tmp_path) == [
        "run: Ctrl-C; ending; press it again to stop at once",
        f"run: {tmp_path / 'run'} has no checkpoint, so the same command begins anew",
        "program.py: interrupted",
    ]


@pytest.mark.parametrize(("place", "least", "most"), [("before", 4.9, 8.0), ("step", 9.4, 12.0)])
def test_sigterm_before_the_first_step_waits_for_no_checkpoint(
    place: str, least: float, most: float, tmp_path: Path
) -> None:
    """What hangs while it closes has 5 s; once a step has begun, a run has all of its time."""
    process = reached(tmp_path, place, {"closing": 100.0, place: 1.0 if place == "step" else 100.0})
    assert least < end(process, signal.SIGTERM) < most
    assert process.exitcode == 143
    assert saved(tmp_path) == ([1, 3] if place == "step" else [])


def test_sigterm_after_ctrl_c_sets_a_limit(tmp_path: Path) -> None:
    process = reached(tmp_path, "before", {"before": 100.0, "closing": 100.0})
    os.kill(process.pid, signal.SIGINT)
    assert end(process, signal.SIGTERM) < 8.0
    assert process.exitcode == 143
