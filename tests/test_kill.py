"""Killed at any moment and started again, a run ends with the numbers and weights of one that was never killed."""

import contextlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nrl import config
from tests.children import server
from tests.jsonlines import untimed
from tests.processes import settled

STEPS, WARMUP = 8, 4
SUMS = [{"prompt": f"{a}+{b}=", "answer": f"{a + b}", "response": f"{a + b}"} for a in range(5) for b in range(5)]
"""So easy that after the warm-up some answers are right and others wrong, and every step has a gradient."""
CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "shutil.rmtree"}


@pytest.fixture(autouse=True)
def source(tmp_path: Path) -> None:
    (tmp_path / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in SUMS))


def program(out: str, lag: int, log: str, crash: tuple[str, int]) -> None:
    """One attempt at the whole of examples/grpo.py. It kills itself at the n-th change of a path with a text in it."""
    from examples import grpo

    with Path(log).open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    where, left = crash

    def count(event: str, args: tuple[Any, ...]) -> None:
        nonlocal left
        if event in CHANGES or (event == "open" and isinstance(args[1], str) and args[1][0] in "wax"):
            left -= where in str(args[0])
            if left == 0 and where in str(args[0]):
                os.kill(os.getpid(), signal.SIGKILL)

    if left:
        sys.addaudithook(count)
    settings = [
        f"out={out}",
        f"data={Path(out).parent / 'sums.jsonl'}",
        "chat=false",
        f"lag={lag}",
        f"steps={STEPS}",
        f"warmup={WARMUP}",
        "warmup_rows=25",
        "prompts=4",
        "group_size=8",
        "sampling.max_new_tokens=2",
        "checkpoints.every=3",
    ]
    grpo.main(config.load(grpo.Config, settings))


def attempt(
    out: Path,
    lag: int,
    log: Path,
    *,
    seconds: float | None = None,
    since: str = "",
    crash: tuple[str, int] = ("", 0),
) -> float | None:
    """Run the program to its end, or kill it so many seconds after it has written such a file, or after its start.

    Returns:
        What it took; None if it was killed.
    """
    context, before = server(), written(out, since)
    started = time.monotonic()
    child = context.Process(target=program, args=(str(out), lag, str(log), crash))
    child.start()
    if since:
        settled(lambda: child.is_alive() and written(out, since) == before, 300)
    child.join(seconds)
    if child.is_alive():
        child.kill()
        child.join()
    if child.exitcode == 0:
        return time.monotonic() - started
    assert child.exitcode == -signal.SIGKILL, log.read_text()
    return None


def written(out: Path, pattern: str) -> int:
    """When the newest file of a pattern was written, in nanoseconds; 0: there is none."""
    found = [0]
    for each in out.glob(pattern) if pattern else ():
        with contextlib.suppress(FileNotFoundError):  # an old checkpoint that was just removed
            found.append(each.stat().st_mtime_ns)
    return max(found)


def undisturbed(out: Path, lag: int, log: Path) -> tuple[float, dict[str, list[dict[str, Any]]]]:
    """What a run that nobody kills took, and its numbers; it learns in every step, so one lost or done twice shows."""
    took = attempt(out, lag, log)
    assert took is not None
    expected = untimed(out)
    assert [len(expected[name]) for name in ("metrics.jsonl", "warmup.jsonl")] == [STEPS, WARMUP]
    assert min(line["grad_norm"] for lines in expected.values() for line in lines if "grad_norm" in line) > 0.1
    return took, expected


def phase(out: Path) -> str:
    """How far an attempt had come when it was killed."""
    train = len(list(out.glob("checkpoints/train/[0-9]*")))
    return f"{train} checkpoints" if train else "warmup" if (out / "warmup.jsonl").exists() else "start"


SINCE = ("", "warmup.jsonl", "checkpoints/train/[0-9]*")
"""From when a kill's moment is counted, in turn: so that phases which are short beside a start are hit, too."""


def check(tmp_path: Path, lag: int, kills: int, seed: int) -> set[str]:
    """Returns the phases that kills have hit."""
    draw = random.Random(seed)
    whole, broken, log = tmp_path / "whole", tmp_path / "broken", tmp_path / "log"
    took, expected = undisturbed(whole, lag, log)
    phases: list[str] = []
    while len(phases) < kills:
        since = SINCE[len(phases) % len(SINCE)]
        if attempt(broken, lag, log, seconds=draw.uniform(0, took / 20 if since else took), since=since) is None:
            phases.append(phase(broken))
        else:  # it came through: begin again
            assert_same(whole, broken, expected)
            broken = tmp_path / f"broken {len(phases)}"
    attempt(broken, lag, log)
    assert_same(whole, broken, expected)
    print(f"took {took:.1f} s; killed in the phases {', '.join(phases)}")
    return set(phases)


def assert_same(whole: Path, broken: Path, expected: dict[str, list[dict[str, Any]]]) -> None:
    assert untimed(broken) == expected
    assert (broken / "model/model.safetensors").read_bytes() == (whole / "model/model.safetensors").read_bytes()
    here, there = (out / f"checkpoints/train/{STEPS:06}/policy/00001-of-00001.safetensors" for out in (broken, whole))
    assert here.read_bytes() == there.read_bytes()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("lag", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_killed_at_random_moments(tmp_path: Path, lag: int) -> None:
    check(tmp_path, lag, kills=3, seed=lag)


WRITTEN = [  # in this order, each found by the one attempt after the other
    ("config.yaml", 1),
    ("warmup/.000003.writing", 3),
    ("warmup/.000004.writing", 6),
    ("warmup.jsonl", 1),
    ("metrics.jsonl", 1),
    ("train/.000003.writing", 4),
    ("train/.000006.writing", 1),
    ("train/.000008.writing", 7),
    ("train/000003", 1),
    ("model", 1),
]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_while_files_are_written(tmp_path: Path) -> None:
    whole, broken, log = tmp_path / "whole", tmp_path / "broken", tmp_path / "log"
    _, expected = undisturbed(whole, 2, log)
    for crash in WRITTEN:
        assert attempt(broken, 2, log, crash=crash) is None, crash
    assert attempt(broken, 2, log) is not None
    assert_same(whole, broken, expected)
    assert not list(broken.glob("checkpoints/*/.*"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("lag", [0, 2])
def test_killed_at_twenty_random_moments(tmp_path: Path, lag: int) -> None:
    phases = check(tmp_path, lag, kills=20, seed=100 + lag)
    assert "warmup" in phases
    assert phases & {"1 checkpoints", "2 checkpoints"}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_at_every_change_of_a_file(tmp_path: Path) -> None:
    whole, log = tmp_path / "whole", tmp_path / "log"
    _, expected = undisturbed(whole, 2, log)
    for crash_at in range(1, 1000, 7):
        broken = tmp_path / f"broken {crash_at}"
        if attempt(broken, 2, log, crash=("", crash_at)) is not None:
            break
        assert attempt(broken, 2, log) is not None
        assert_same(whole, broken, expected)
    else:
        pytest.fail("there were more changes than expected")
    assert crash_at > 50
