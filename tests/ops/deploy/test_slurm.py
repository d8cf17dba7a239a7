"""`nrl deploy slurm` on a real Slurm of two nodes: programs over both of them are stopped, and go on."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from nrl.cli.cli import main
from tests.hosts import FIRST, SECOND
from tests.jsonlines import lines, untimed
from tests.ops.deploy import on_slurm
from tests.slurm import Slurm, slurm

ROOT = Path(__file__).parents[3]
STEPS = 200
"""Slurm looks at time limits each 30 s; this takes longer."""
PROGRAM = [
    *(f"steps={STEPS}", "warmup=4", "prompts=4", "group_size=4", "eval_data=null"),
    *("checkpoints.every=1000", "checkpoints.grace=50"),
]


def script(up: Slurm, name: str, program: str, settings: Sequence[str], arguments: Sequence[str] = ()) -> str:
    """Where on the nodes the script of a job is."""
    given = [f"folder={ROOT}", f"name={name}", f"out=/mnt/{name}", "logs=/mnt/logs", "object_store=200M", *settings]
    target = up.shared / f"{name}.sbatch"
    assert main(["deploy", "slurm", program, f"to={target}", *given, "--", *arguments]) == 0
    (up.shared / "logs").mkdir(exist_ok=True)
    return f"/mnt/{target.name}"


def submitted(up: Slurm, path: str) -> str:
    """The number of a job."""
    return up("sbatch", "--parsable", path)


def said(up: Slurm, job: str) -> str:
    path = up.shared / "logs" / f"{job}.log"
    return path.read_text() if path.exists() else ""


def state(up: Slurm, job: str) -> str:
    return str(re.findall(r"JobState=(\w+)", up("scontrol", "show", "job", job))[0])


def wait(up: Slurm, job: str, look: Callable[[], bool], seconds: float = 1500) -> None:
    until = time.monotonic() + seconds
    while not look():
        assert state(up, job) not in ("FAILED", "TIMEOUT", "NODE_FAIL", "CANCELLED"), said(up, job)
        assert time.monotonic() < until, said(up, job)
        time.sleep(0.5)


def assert_as_alone(out: Path, steps: int, tmp_path: Path) -> None:
    """The losses in a folder of `on_slurm` are those of one process."""
    on_slurm.main(on_slurm.Config(out=str(tmp_path / "alone"), steps=steps))
    found, expected = lines(out / "metrics.jsonl"), lines(tmp_path / "alone" / "metrics.jsonl")
    assert [each["step"] for each in found] == [each["step"] for each in expected] == [*range(steps)]
    assert [each["loss"] for each in found] == pytest.approx([each["loss"] for each in expected], abs=1e-5)


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_job_runs_a_trainer_over_both_nodes_to_its_end(tmp_path: Path) -> None:
    with slurm(tmp_path / "slurm") as up:
        settings = ["nodes=2", "executables=[]", "time=20"]
        job = submitted(up, script(up, "short", "tests/ops/deploy/on_slurm.py", settings, ["steps=4"]))
        wait(up, job, lambda: state(up, job) == "COMPLETED", 500)
        assert f"slots on {FIRST} {SECOND}\n" in said(up, job)
        assert_as_alone(up.shared / "short", 4, tmp_path)


@pytest.mark.ray
@pytest.mark.slow  # Ray starts twice
@pytest.mark.timeout(900)
def test_a_job_that_is_told_to_end_saves_and_the_next_one_goes_on_to_the_end(tmp_path: Path) -> None:
    with slurm(tmp_path / "slurm") as up:
        settings, steps = ["nodes=2", "executables=[]", "time=20", "grace=40", "doctor=true"], 20
        path = script(up, "told", "tests/ops/deploy/on_slurm.py", settings, [f"steps={steps}"])
        first, metrics = submitted(up, path), up.shared / "told" / "metrics.jsonl"
        wait(up, first, lambda: metrics.exists() and len(lines(metrics)) >= 2, 400)
        up("scancel", "--batch", "--signal=TERM", first)
        wait(up, first, lambda: "is saved in" in said(up, first), 60)
        second = submitted(up, path)  # it waits for the nodes
        wait(up, second, lambda: state(up, second) == "COMPLETED", 400)
        assert "ExitCode=143:0" in up("scontrol", "show", "job", first)
        assert re.search(r"^OK +shared .*\n(.*\n)*doctor: nothing failed", said(up, first), re.MULTILINE)
        (saved,) = re.findall(r"step (\d+) of 'train' is saved in", said(up, first))
        done = int(saved) + 1
        assert 2 <= done < steps
        assert f"train: {done} of {steps} steps were done" in said(up, second)
        assert_as_alone(up.shared / "told", steps, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_that_is_told_while_environments_are_built_is_requeued(tmp_path: Path) -> None:
    """The build is broken off, and Ray is not started."""
    with slurm(tmp_path / "slurm") as up:
        settings = ["executables=[base]", "venvs=/mnt/venvs", "time=20"]
        job = submitted(up, script(up, "early", "tests/ops/deploy/on_slurm.py", settings, ["steps=4"]))
        logs = up.shared / "logs" / job / "start-0"
        wait(up, job, lambda: any((up.shared / "venvs").glob("base-*")), 200)
        up("scancel", "--batch", "--signal=USR1", job)
        wait(up, job, lambda: "job: requeued, to go on from the last checkpoint" in said(up, job), 60)
        assert not (logs / "ready").exists()
        assert "an environment cannot be built" not in said(up, job)
        up("scancel", job)


def undisturbed(out: Path, *program: str) -> None:
    """A run without Slurm and Ray, whose bits are the same."""
    words = [sys.executable, "examples/grpo.py", *program, "cluster=local", f"out={out}"]
    subprocess.run(words, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, capture_output=True)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_seeds_run_at_once_each_on_a_node_of_its_own_and_one_is_requeued_alone(tmp_path: Path) -> None:
    """The last one, whose number is that of the whole array."""
    program = ["steps=40", "warmup=4", "prompts=4", "group_size=4", "eval_data=null", "samplers=0"]
    with slurm(tmp_path / "slurm") as up:
        array = submitted(up, script(up, "seeds", "examples/grpo.py", ["seeds=2", "time=20"], program))
        jobs = [f"{array}_{seed}" for seed in range(2)]
        metrics = [up.shared / "seeds" / f"seed-{seed}" / "metrics.jsonl" for seed in range(2)]
        for job, path in zip(jobs, metrics, strict=True):
            wait(up, job, lambda path=path: path.exists() and len(lines(path)) >= 2, 600)  # type: ignore[misc]
        hosts = [re.findall(r"BatchHost=(\S+)", up("scontrol", "show", "job", job)) for job in jobs]
        assert sorted(hosts) == [["node-a"], ["node-b"]]
        assert f"JobId={array} ArrayJobId={array} ArrayTaskId=1 " in up("scontrol", "show", "job", jobs[1])
        up("scancel", "--batch", "--signal=USR1", jobs[1])
        wait(up, jobs[1], lambda: "job: requeued, to go on" in said(up, array), 100)
        for job in jobs:
            wait(up, job, lambda job=job: state(up, job) == "COMPLETED", 1000)  # type: ignore[misc]
        starts = [re.findall(r"Restarts=(\d)", up("scontrol", "show", "job", job)) for job in jobs]
        assert starts == [["0"], ["1"]]
        losses = []
        for seed in range(2):
            undisturbed(up.shared / f"alone-{seed}", *program, f"seed={seed}")
            found, expected = untimed(up.shared / "seeds" / f"seed-{seed}"), untimed(up.shared / f"alone-{seed}")
            assert found == expected
            losses.append([step["loss"] for step in found["metrics.jsonl"]])
        assert losses[0] != losses[1]


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_job_that_is_stopped_at_its_time_limit_ends_with_the_numbers_of_one_that_is_not(tmp_path: Path) -> None:
    """Its time limit becomes short once it has done some steps, so that it is over in the midst of them.

    The trainer and the sampler have a node each, since a node has one processor.
    """
    with slurm(tmp_path / "slurm") as up:
        job = submitted(up, script(up, "stopped", "examples/grpo.py", ["nodes=2", "time=50", "grace=119"], PROGRAM))
        metrics = up.shared / "stopped" / "metrics.jsonl"
        wait(up, job, lambda: metrics.exists() and len(lines(metrics)) >= 3)
        (elapsed,) = re.findall(r"RunTime=00:(\d\d):", up("scontrol", "show", "job", job))
        up("scontrol", "update", f"JobId={job}", f"TimeLimit={int(elapsed) + 2}")
        wait(up, job, lambda: "job: requeued, to go on from the last checkpoint" in said(up, job))
        done = len(lines(metrics))
        assert 3 <= done < STEPS
        assert "run: SIGTERM; " in said(up, job)
        up("scontrol", "update", f"JobId={job}", "TimeLimit=50")
        wait(up, job, lambda: state(up, job) == "COMPLETED")
        assert "Restarts=1" in up("scontrol", "show", "job", job)
        first, second = (up.shared / "logs" / job / f"start-{i}" for i in (0, 1))
        for start in (first, second):
            ranks = [{each.name for each in (start / f"node-{i}").glob("*[[]0[]].out")} for i in (0, 1)]
            assert sorted(map(sorted, ranks)) == [["sampler[0].out"], ["trainer[0].out"]]
        undisturbed(up.shared / "undisturbed", *PROGRAM)
        found, expected = (untimed(up.shared / each) for each in ("stopped", "undisturbed"))
        assert len(expected["metrics.jsonl"]) == STEPS
        assert sum(step["grad_norm"] > 0 for step in expected["metrics.jsonl"]) >= 5  # there were weights to lose
        assert found == expected
