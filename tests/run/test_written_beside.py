"""Checkpoints that are written beside the steps: what is on the disk, and when, is as if each step had waited."""

import contextlib
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import attrs
import pytest
import torch

import nrl
from nrl import files, tiny
from nrl.algos import sft_loss
from nrl.backends import adamw, fsdp
from nrl.data import counting
from nrl.errors import CheckpointError, LostActor
from nrl.files import Written, read_manifest
from nrl.log import wait_for
from nrl.run.checkpoint import Checkpoints, checkpoints, newest, verify
from nrl.runtime import Cluster
from tests.children import server
from tests.clocks import MINUTE
from tests.disks import small_disk_at
from tests.jsonlines import untimed

STEPS = 6


@attrs.frozen
class Config:
    out: str
    steps: int = STEPS
    cluster: str = "local"
    processes: int = 1
    wait: Literal["copy", "disk"] = "copy"
    checkpoints: Checkpoints = attrs.field(
        default=attrs.Factory(lambda self: Checkpoints(every=2, keep=9, wait=self.wait), takes_self=True)
    )


def train(cfg: Config, at: Callable[[int], object] = lambda step: None) -> dict[str, torch.Tensor]:
    """Supervised steps with random draws of the program; ``at`` is called when a step has been given to `save`."""
    with nrl.run(cfg) as run, nrl.cluster(cfg.cluster, deadline=200) as cluster:
        mesh = cluster.reserve(cfg.processes).mesh(executable="system", name="trainer")
        trainer = fsdp.trainer(mesh, tiny.model(hidden_size=64), adamw(lr=1e-2))
        step = trainer.train_step(sft_loss)
        state, seen, stream = run.restore(policy=trainer, seen=torch.zeros(3), stream=tiny.sums(4))
        for i, batch in run.steps(stream):
            state, metrics = step(state, batch)
            seen += torch.rand(3)  # in place
            run.log(i, metrics, {"seen": nrl.batch.metrics.Sum(seen.sum())})
            run.save(i, policy=state, seen=seen, stream=stream)
            at(i)
        return dict(state.params.tensors())


class Gate:
    """Writers of trainers stop at the beginning of a file, before they read any number, while it is closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.reached = threading.Event(), threading.Event()
        self.open.set()
        write = files.write

        def writes(path: Path, parts: Any) -> Written:
            if not self.open.is_set():
                path.write_bytes(b"beginning")
                self.reached.set()
                assert self.open.wait(MINUTE)
            return write(path, parts)

        monkeypatch.setattr("nrl.backends.training.saving.save_plan.write_file", writes)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def content(root: Path) -> dict[str, bytes]:
    return {str(x.relative_to(root)): x.read_bytes() for x in root.rglob("*") if x.is_file() and x.suffix != ".json"}


def same_checkpoints(some: Path, others: Path) -> None:
    some, others = (out / "checkpoints" / "train" for out in (some, others))
    assert len(content(some)) >= 12
    assert content(some) == content(others)
    for found in checkpoints(some):
        here, there = (read_manifest(root / found.folder.name) for root in (some, others))
        assert here is not None
        assert there is not None
        assert [here[key] for key in ("step", "values", "files")] == [there[key] for key in ("step", "values", "files")]
        verify(found.folder)


def test_the_files_are_those_of_a_step_that_waited(tmp_path: Path, gate: Gate) -> None:
    """Each is written when another step has changed all values."""
    missing: list[int] = []

    def at(step: int) -> None:
        if step % 2:
            assert gate.reached.wait(MINUTE)
            if not (tmp_path / f"copy/checkpoints/train/{step + 1:06}").exists():
                missing.append(step)
            if step == STEPS - 1:
                gate.open.set()
            return
        gate.open.set()
        gate.reached.clear()
        if step:
            folder = tmp_path / f"copy/checkpoints/train/{step:06}"
            assert wait_until(folder.exists)
        gate.open.clear()

    found = train(Config(f"{tmp_path}/copy"), at)
    assert missing == [1, 3, 5]
    expected = train(Config(f"{tmp_path}/disk", wait="disk"))
    assert all(torch.equal(found[name], x) for name, x in expected.items())
    same_checkpoints(tmp_path / "copy", tmp_path / "disk")
    assert untimed(tmp_path / "copy") == untimed(tmp_path / "disk")


def wait_until(ready: Callable[[], bool]) -> bool:
    """Within a minute."""
    pause = threading.Event()
    return any(ready() or pause.wait(0.01) for _ in range(6000))


def test_a_step_may_wait_for_the_disk(tmp_path: Path, gate: Gate) -> None:
    there: list[bool] = []

    def at(step: int) -> None:
        there.append((tmp_path / f"checkpoints/train/{step + 1:06}").exists())

    train(Config(f"{tmp_path}", steps=4, wait="disk"), at)
    assert there == [False, True, False, True]


def test_one_is_written_at_a_time(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = []

    def waiting(work: Any, say: Callable[[float], str]) -> None:
        told.append(say(12.0))
        gate.open.set()
        wait_for(work, say)

    monkeypatch.setattr(sys.modules["nrl.run.async_checkpoint"], "wait_for", waiting)
    root = tmp_path / "checkpoints/train"

    def at(step: int) -> None:
        if step == 1:
            assert told == []
            assert checkpoints(root) == []
        if step == 3:
            assert told == [f"save: {root}/000002 is still being written, before 000004 is copied (12 s)"]
            assert checkpoints(root)[0].step == 1

    gate.open.clear()
    train(Config(f"{tmp_path}", steps=5), at)
    assert told[-1] == f"save: {root}/000005 is still being written, before the program goes on (12 s)"
    assert [found.step for found in checkpoints(root)] == [1, 3, 4]


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    @attrs.frozen
    class Walk:
        out: Path = tmp_path
        steps: int = 7
        checkpoints: Checkpoints = Checkpoints(every=1, keep=2, best="height")

    with nrl.run(Walk()) as run:
        for i, _ in run.steps(counting()):
            run.log(i, {"height": nrl.batch.metrics.Sum(torch.tensor([0.0, 1, 5, 2, 3, 4, 1][i]))})
            run.save(i, at=i)
    assert [found.step for found in checkpoints(tmp_path / "checkpoints/train")] == [2, 5, 6]


# --- a disk that takes no more


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk_at(tmp_path / "disk", megabytes=20) as disk:
        yield disk


@pytest.mark.filterwarnings("ignore:run. .*(report.html|timeline.json) could not be written")
@pytest.mark.parametrize(("full_at", "raised_at"), [(0, 2), (4, "end")])
def test_a_full_disk_is_said_by_a_later_step(small_disk: Path, full_at: int, raised_at: Any, gate: Gate) -> None:
    out, root, begun = small_disk / "run", small_disk / "run/checkpoints/train", list[int]()

    def at(step: int) -> None:
        begun.append(step)
        if step == full_at:
            free = shutil.disk_usage(small_disk).free
            with contextlib.suppress(OSError):
                (small_disk / "ballast").write_bytes(bytes(free - 200_000))
        if step == full_at + 1 and step < STEPS - 1:
            wait_until(lambda: not list(root.glob(".*.writing")))

    message = rf"save: the checkpoint {root}/{full_at + 2:06} could not be written after .*\(No space left"
    with pytest.raises(CheckpointError, match=message):
        train(Config(str(out)), at)
    assert begun == [*range(STEPS if raised_at == "end" else raised_at)]
    assert [found.step + 1 for found in checkpoints(root)] == [*range(2, full_at + 2, 2)]
    assert list(root.glob(".*")) == []
    (small_disk / "ballast").unlink()
    train(Config(str(out)))  # the same command again
    assert checkpoints(root)[-1].step == STEPS - 1


def test_an_error_of_a_writer_does_not_hide_that_of_the_program(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(path: Path, parts: Any) -> Written:
        raise OSError(5, "Input/output error")

    def at(step: int) -> None:
        if step == 1:
            raise ZeroDivisionError

    monkeypatch.setattr("nrl.backends.training.saving.save_plan.write_file", fails)
    with pytest.raises(ZeroDivisionError):
        train(Config(f"{tmp_path}"), at)
    said = f"save: {tmp_path}/checkpoints/train/000002 is not complete: save: the checkpoint {tmp_path}/"
    assert said in capsys.readouterr().out


def test_an_error_of_the_program_loses_no_checkpoint(tmp_path: Path, gate: Gate) -> None:
    def at(step: int) -> None:
        if step == 3:
            assert gate.reached.wait(MINUTE)
            threading.Timer(1.0, gate.open.set).start()
            raise KeyboardInterrupt
        if step == 2:
            gate.open.clear()

    with pytest.raises(KeyboardInterrupt):
        train(Config(f"{tmp_path}"), at)
    assert [found.step for found in checkpoints(tmp_path / "checkpoints/train")] == [1, 3]


def test_a_process_that_is_lost_while_it_writes(tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """`retrying` sees why."""
    lost = LostActor("save", "trainer", 0, "10.0.0.3", "killed by signal 9")

    def dies(*_: Any) -> None:
        raise lost

    monkeypatch.setattr("nrl.backends.training.trainer.wait_for_writers", dies)
    with pytest.raises(LostActor) as caught:
        train(Config(f"{tmp_path}"))
    assert caught.value is lost
    assert checkpoints(tmp_path / "checkpoints/train") == []


# --- killed


def killed(out: str, log: str, step: int) -> None:
    """In the middle of the checkpoint after a step, and after ``step`` steps."""
    with Path(log).open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    with pytest.MonkeyPatch.context() as patched:
        gate = Gate(patched)

        def at(now: int) -> None:
            if now == 2:
                gate.open.clear()  # the checkpoint after step 1 is whole or will be
                wait_until((Path(out) / "checkpoints/train/000002").exists)
            if now == step:
                assert gate.reached.wait(MINUTE)
                os.kill(os.getpid(), signal.SIGKILL)

        train(Config(out), at)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("step", [3, 4])
def test_killed_in_the_middle_the_one_before_is_used(
    tmp_path: Path, step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the step that saves, and in the one after it."""
    out, root = tmp_path / "killed", tmp_path / "killed/checkpoints/train"
    process = server().Process(target=killed, args=(str(out), str(tmp_path / "log"), step))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL, (tmp_path / "log").read_text()
    assert (root / ".000004.writing/policy/00001-of-00001.safetensors").read_bytes() == b"beginning"
    assert len((out / "metrics.jsonl").read_text().splitlines()) == step + 1
    found = train(Config(str(out)))
    assert "train: 2 of 6 steps were done; going on after them" in capsys.readouterr().out
    assert list(root.glob(".*")) == []
    expected = train(Config(f"{tmp_path}/whole"))
    assert all(torch.equal(found[name], x) for name, x in expected.items())
    assert untimed(out) == untimed(tmp_path / "whole")
    same_checkpoints(out, tmp_path / "whole")


# --- on Ray


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_processes_on_ray(on_ray: Cluster, tmp_path: Path) -> None:
    made = dict[str, dict[str, torch.Tensor]]()
    for wait in ("copy", "disk"):
        made[wait] = train(Config(f"{tmp_path}/{wait}", cluster="ray", processes=2, wait=wait))
    assert all(torch.equal(made["copy"][name], x) for name, x in made["disk"].items())
    same_checkpoints(tmp_path / "copy", tmp_path / "disk")
    found = newest(tmp_path / "copy/checkpoints/train")
    assert found is not None
    assert found.step == STEPS - 1
    assert len(list(found.folder.glob("policy/*.safetensors"))) == 2
