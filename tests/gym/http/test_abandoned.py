"""Episodes that their clients leave behind, over HTTP: none is open after its lease, and memory does not grow."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from benchmarks._http_load import NUMBER, Load
from benchmarks._machine import resident

ROOT = Path(__file__).parents[3]
LEASE, TOKEN = 1.0, "a-token-of-32-characters-or-more"
HEADERS = {"authorization": f"Bearer {TOKEN}"}


@contextmanager
def served() -> Iterator[tuple[str, int]]:
    """A server's address and process."""
    order = {"environment": "benchmarks/_served.py:adding", "token": TOKEN, "lease": LEASE, "most": 200_000}
    command = [sys.executable, "-m", "nrl.gym.http.process"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdin is not None
        assert started.stdout is not None
        started.stdin.write(json.dumps(order) + "\n")
        started.stdin.flush()
        yield json.loads(started.stdout.readline())["url"], started.pid
        started.terminate()


def numbers(url: str) -> dict[str, float]:
    lines = httpx2.get(f"{url}/metrics", headers=HEADERS, trust_env=False, timeout=60).text.splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


@pytest.mark.parametrize("count", [1_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_episodes_that_are_left_behind_are_closed_and_forgotten(count: int) -> None:
    load, own = Load(), list[float]()
    try:
        with served() as (url, process):
            reset = json.dumps({"session": NUMBER, "task": {"prompt": "", "start": 1}}).encode()
            for time_of in (1, 2):
                load(f"{url}/reset", reset, requests=count, headers=HEADERS, expected='"prompt"')
                until = time.monotonic() + 60
                while (found := numbers(url))["nrl_gym_sessions"]:
                    assert time.monotonic() < until, found
                    time.sleep(0.1)
                assert found["nrl_gym_evicted_total"] == time_of * count
                own.append(resident(process)["own"])
    finally:
        load.close()
    # 20,000 closed episodes are remembered, so fewer make it grow
    assert count < 20_000 or own[1] < own[0] + 8, own  # MiB
