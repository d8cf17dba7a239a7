"""A run on Ray heals: it goes on from its last checkpoint, on what is left or has joined."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.healing import EVERY, KILLED_AFTER
from tests.jsonlines import lines
from tests.processes import settled

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[1]


def test_what_dies_costs_the_steps_since_the_last_checkpoint() -> None:
    words = [sys.executable, "benchmarks/healing.py", "--only", "rank", "host", "spare"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()[1:]}
    assert {name: int(engines) for name, (_, _, engines, _) in rows.items()} == {"rank": 2, "host": 1, "spare": 2}
    since = (KILLED_AFTER + 1) % EVERY
    assert all(since <= int(again) <= since + 1 for _, again, _, _ in rows.values()), done.stdout


HOSTS = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, connect=False, head_node_args={"num_cpus": 0})
nodes = [cluster.add_node(num_cpus=2) for _ in range(2)]
print(cluster.address, flush=True)
for line in sys.stdin:
    cluster.remove_node(nodes.pop(), allow_graceful=False)
cluster.shutdown()
"""
"""A cluster of three nodes in a process of its own; for each line that it reads, one of them is lost."""


def apart() -> dict[str, str]:
    """The environment of a program on such a cluster: the session's own has left variables in this process."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return kept | {"RAY_AUTH_MODE": "disabled"}


@pytest.fixture
def hosts() -> "Iterator[subprocess.Popen[str]]":
    words = [sys.executable, "-c", HOSTS]
    with subprocess.Popen(words, env=apart(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as made:
        yield made
        made.communicate(timeout=60)


def test_the_example_goes_on_with_what_is_left_of_its_hosts(hosts: Any, tmp_path: Path) -> None:
    """A trainer of two processes and a sampler on two hosts of two slots: one is lost, and the sampler moves in."""
    address, out = hosts.stdout.readline().strip(), tmp_path / "run"
    words = ["steps=10", "warmup=2", "prompts=4", "group_size=4", "eval_data=null", "checkpoints.every=2"]
    settings = [*words, f"cluster={address}", "layout.dp=2", "samplers=1", f"out={out}"]
    command = [sys.executable, "examples/grpo.py", *settings]
    with (tmp_path / "log").open("w") as log:
        program = subprocess.Popen(command, cwd=ROOT, env=apart(), stdout=log, stderr=log)
    metrics = out / "metrics.jsonl"
    try:
        settled(lambda: program.poll() is None and (not metrics.exists() or len(lines(metrics)) < 4), 300)
        hosts.stdin.write("lose\n")
        hosts.stdin.flush()
        assert program.wait(600) == 0, (tmp_path / "log").read_text()
    finally:
        program.send_signal(signal.SIGKILL)
    said = (tmp_path / "log").read_text()
    assert "retrying: attempt 2 begins in 1 s, after step " in said
    assert "reserve: 3 slots of 1 CPU each, PACK, are not to be had within 60 s; 2 will do" in said
    assert [each["step"] for each in lines(metrics)] == [*range(10)]
