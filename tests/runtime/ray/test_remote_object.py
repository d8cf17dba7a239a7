"""Tests that join a cluster of Ray other than the session's: a process is on one at a time, so they have their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ray
ROOT = Path(__file__).parents[3]


def passes(file: str, marked: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n0",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        marked,
        str(ROOT / "tests" / file),
    ]
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}  # the session's cluster's
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(900)
@pytest.mark.parametrize("file", ["ops/doctor/joining.py", "runtime/ray/sigterm_while_joining.py"])
def test_of_a_process_that_has_joined_none(file: str) -> None:
    passes(file, "ray and not slow")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_long_ones_of_a_process_that_has_joined_none() -> None:
    passes("ops/doctor/joining.py", "ray and slow")
