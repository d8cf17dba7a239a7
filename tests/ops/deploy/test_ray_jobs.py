"""The job of `nrl deploy kubernetes` on a head of Ray, as the operator has it: by ``ray job submit``, with a token."""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from tests.jsonlines import lines, untimed
from tests.ops.deploy.test_kubernetes import pods, written
from tests.ops.deploy.test_slurm import undisturbed
from tests.processes import settled

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[3]
BIN = Path(sys.executable).parent
STEPS = 60
PROGRAM = (f"steps={STEPS}", "warmup=4", "prompts=4", "group_size=4", "eval_data=null", "checkpoints.every=1000")


@attrs.frozen
class Head:
    """A head of Ray, in a process of its own.

    Args:
        env: of its processes, and of whoever sends it jobs.
        jobs: where it takes them.
        shared: the folder that stands for the volume.
    """

    env: dict[str, str]
    jobs: str
    shared: Path

    def job(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """What ``ray job`` says."""
        command = [str(BIN / "ray"), "job", words[0], "--address", self.jobs, *words[1:]]
        return subprocess.run(command, env=self.env, capture_output=True, text=True, check=False)

    def submit(self, name: str) -> None:
        """Send the job's script, and do not wait for it; the head's agent may still be starting."""
        script = ["--", "bash", str(self.shared / "start.sh")]
        for _ in range(60):
            done = self.job("submit", "--no-wait", "--submission-id", name, *script)
            if "No available agent to submit job" not in done.stderr:
                break
            time.sleep(1)
        assert done.returncode == 0, done.stdout + done.stderr


def free() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.fixture
def head() -> Iterator[Head]:
    shared = Path(tempfile.mkdtemp(prefix="nrl-jobs-"))  # short: Ray's sockets are in it
    found = written(f"mount={shared}", f"folder={ROOT}", f"arguments={json.dumps(PROGRAM)}", "name=train", "grace=100")
    for name, text in found["scripts.yaml"]["data"].items():
        (shared / name).write_text(text)
    of_the_pod = {each["name"]: each["value"] for each in pods(found)[0]["containers"][0]["env"] if "value" in each}
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | of_the_pod
    env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # which the operator makes
    env |= {"PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "TMPDIR": str(shared)}
    port, dashboard, agent = free(), free(), free()
    words = [f"--port={port}", f"--dashboard-port={dashboard}", f"--temp-dir={shared}/ray", "--num-cpus=4"]
    words.append(f"--dashboard-agent-listen-port={agent}")  # another Ray of this machine may have its default
    with (shared / "ray.log").open("w") as log:
        start = [str(BIN / "ray"), "start", "--head", "--block", "--dashboard-host=127.0.0.1", *words]
        running = subprocess.Popen(start, env=env, stdout=log, stderr=log)
    made = Head(env, f"http://127.0.0.1:{dashboard}", shared)
    try:
        assert not settled(lambda: made.job("list").returncode, 120), (shared / "ray.log").read_text()
        yield made
    finally:
        running.send_signal(signal.SIGTERM)
        running.wait(60)
        shutil.rmtree(shared, ignore_errors=True)


def test_a_job_that_is_stopped_saves_and_the_next_one_ends_with_the_numbers_of_one_that_is_not(head: Head) -> None:
    out = head.shared / "runs" / "train"
    metrics = out / "metrics.jsonl"

    def done() -> int:
        return len(lines(metrics)) if metrics.exists() else 0

    def became(name: str) -> str:
        """How a job has ended; empty while it runs."""
        said = head.job("status", name).stdout
        return next((how for how in ("succeeded", "failed", "was stopped") if f"Job '{name}' {how}" in said), "")

    head.submit("first")
    assert not settled(lambda: done() < 3 and not became("first"), 300), head.job("logs", "first").stdout
    assert head.job("stop", "first").returncode == 0
    said = head.job("logs", "first").stdout
    assert "run: SIGTERM; " in said, said
    first = done()
    assert 3 <= first < STEPS
    head.submit("second")
    assert became("first") == "was stopped"
    assert not settled(lambda: not became("second"), 300), head.job("logs", "second").stdout
    assert became("second") == "succeeded", head.job("logs", "second").stdout
    undisturbed(head.shared / "undisturbed", *PROGRAM)
    found, expected = untimed(out), untimed(head.shared / "undisturbed")
    assert len(expected["metrics.jsonl"]) == STEPS
    assert found == expected
