"""A long run needs no more memory than a short one."""

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples import grpo
from nrl.run import Run

ROOT = Path(__file__).parents[1]
LEAST = 2.0  # MB a 100 steps that count as growth
WATCHED = """
import json, os, sys
from examples import grpo
from nrl.run import Run

log, samples = Run.log, []

def watched(self, step, *metrics, **others):
    numbers = log(self, step, *metrics, **others)
    if step % 25 == 0:
        pages = int(open("/proc/self/statm").read().split()[1])
        samples.append((step, pages * os.sysconf("SC_PAGE_SIZE") / 1e6))
    return numbers

Run.log = watched
steps, out = int(sys.argv[1]), sys.argv[2]
grpo.main(grpo.Config(steps=steps, warmup=0, out=out))
print(json.dumps(samples))
"""


def growth(samples: list[tuple[int, float]], after: int) -> float:
    """MB a 100 steps: the slope of a line through the samples (step, MB) from step ``after`` on."""
    steps, megabytes = np.array([sample for sample in samples if sample[0] >= after]).T
    return float(100 * np.polyfit(steps, megabytes, 1)[0])


def test_growth_is_the_slope_after_the_start() -> None:
    samples = [(0, 7.0), (100, 500.0), (200, 503.0), (300, 506.0)]
    assert growth(samples, after=100) == pytest.approx(3.0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads resident memory from /proc")
def test_resident_memory_is_flat_over_500_steps(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, "500", str(tmp_path / "run")],
        cwd=ROOT, capture_output=True, text=True, timeout=1700,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    samples = json.loads(done.stdout.splitlines()[-1])
    print(samples)
    assert len(samples) == 20
    assert growth(samples, after=100) < LEAST, samples


def test_the_number_of_live_tensors_is_the_same_after_10_and_after_40_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: dict[int, int] = {}
    log = Run.log

    def counting(self: Run, step: int, *metrics: Any, **others: Any) -> dict[str, float]:
        numbers = log(self, step, *metrics, **others)
        if step in (10, 20, 30, 40):
            gc.collect()
            counts[step] = sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())
        return numbers

    monkeypatch.setattr(Run, "log", counting)
    grpo.main(grpo.Config(steps=42, warmup=0, prompts=2, group_size=2, out=str(tmp_path / "run")))
    assert len(counts) == 4
    assert len(set(counts.values())) == 1, counts
