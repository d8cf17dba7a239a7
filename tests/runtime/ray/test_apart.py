"""Tests that join a cluster of Ray other than the session's: a process is on one at a time, so they have their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ray
RUNTIME = Path(__file__).parents[1]


def passes(file: str, marked: str) -> None:
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "-p", "no:cacheprovider", "-m", marked, str(RUNTIME / file)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}  # the session's cluster's
    done = subprocess.run(command, cwd=RUNTIME.parents[1], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(900)
@pytest.mark.parametrize("file", ["doctor/joining.py", "ray/sigterm_while_joining.py"])
def test_of_a_process_that_has_joined_none(file: str) -> None:
    passes(file, "ray and not slow")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_long_ones_of_a_process_that_has_joined_none() -> None:
    passes("doctor/joining.py", "ray and slow")
