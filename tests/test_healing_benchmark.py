"""What `benchmarks/healing.py` finds: a run goes on from its last checkpoint, on what is left or has joined."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.healing import EVERY, KILLED_AFTER

ROOT = Path(__file__).parents[1]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_what_dies_costs_the_steps_since_the_last_checkpoint() -> None:
    words = [sys.executable, "benchmarks/healing.py", "--only", "rank", "host", "spare"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()[1:]}
    assert {name: int(engines) for name, (_, _, engines, _) in rows.items()} == {"rank": 2, "host": 1, "spare": 2}
    since = (KILLED_AFTER + 1) % EVERY
    assert all(since <= int(again) <= since + 1 for _, again, _, _ in rows.values()), done.stdout
