"""A process that has another disk at the same path as the program: everything that writes or reads there says so."""

import os
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from torch import Tensor

import nrl
from nrl.backends import Params, Trainer, TrainState
from nrl.backends.training.saving import shared_fs
from nrl.backends.training.saving.save_plan import SavePlan
from nrl.backends.training.saving.shared_fs import (
    HostWithoutFolder,
    answer,
    check,
    check_visible,
    find_host_without_folder,
)
from nrl.backends.training.trainer import make_trainer
from nrl.data import counting
from nrl.errors import CheckpointError
from nrl.files import Folder, Saved, Written, write
from nrl.run import checkpoint
from nrl.run.checkpoint import Checkpoints
from nrl.runtime import Cluster
from nrl.runtime.mesh.current_process import Process, enter_process
from nrl.runtime.node import shared_fs_probe
from tests.backends.bigram import Bigram, BigramState

HERE = socket.gethostname()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_fs_probe, "_PATIENCE", 0.1)


def second(function: Callable[..., Any], *args: Any) -> Any:
    """What it returns in the second of two processes."""
    with enter_process(Process(1, 2)):
        return function(*args)


@pytest.mark.parametrize(
    ("prepare", "why"),
    [
        (lambda other, note: None, "has no such folder"),
        (lambda other, note: other.mkdir(), "has another folder there"),
        (
            lambda other, note: [(other / f"{note}.1").mkdir(parents=True), (other / note).touch()],
            "cannot write there (Is a directory)",
        ),
        (lambda other, note: [other.mkdir(), (other / note).touch()], "writes what does not arrive there"),
    ],
)
def test_a_folder_that_is_not_in_common(prepare: Callable[[Path, str], object], why: str, tmp_path: Path) -> None:
    folder, other = tmp_path / "here", tmp_path / "there"
    folder.mkdir()

    def ask(given: Folder, note: str) -> list[tuple[str, str]]:
        assert given == folder
        prepare(other, note)
        return [answer(given, note), second(answer, other, note)]

    assert find_host_without_folder(folder, ask) == HostWithoutFolder(1, HERE, why)
    assert list(folder.iterdir()) == []


def test_a_folder_in_common(tmp_path: Path) -> None:
    assert find_host_without_folder(tmp_path, lambda *given: [answer(*given), second(answer, *given)]) is None
    assert list(tmp_path.iterdir()) == []


def test_each_process_reads_its_share(tmp_path: Path) -> None:
    files = {name: write(tmp_path / name, [name.encode()]) for name in "abcd"}
    for name in "bd":
        (tmp_path / name).write_text("?")
    check_visible(tmp_path, files)
    check(tmp_path, {name: files[name] for name in "ac"})
    with enter_process(Process(0, 2)):
        check(tmp_path, files)
    with pytest.raises(CheckpointError, match="the file b was altered; its checksum is not what was written"):
        second(check, tmp_path, files)
    with pytest.raises(CheckpointError, match="the file b was altered"):
        check(tmp_path, files)
    (tmp_path / "b").unlink()
    message = (
        f"restore: {tmp_path}: the file b is missing, as rank 1 on host {HERE} sees it; put the checkpoint on a disk"
    )
    with pytest.raises(CheckpointError, match=message):
        second(check_visible, tmp_path, files)


# a trainer


@pytest.fixture
def trainer(local: Cluster) -> Trainer:
    return trainer_of(local)


def trainer_of(cluster: Any, engine: Any = Bigram) -> Trainer:
    return make_trainer(cluster.reserve(1).mesh(), engine, name="policy", max_tokens=100)


@attrs.frozen
class Config:
    out: Path
    steps: int = 3
    checkpoints: Checkpoints = Checkpoints(every=3)


def test_what_would_be_lost_is_said_before_it_is_written(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    state = trainer.init()
    with nrl.run(Config(here / "shared")) as run:
        assert isinstance(run.restore(policy=trainer), TrainState)
    away = lambda folder, note: answer(there / folder.relative_to(here), note)  # noqa: E731  as on another node
    monkeypatch.setattr(shared_fs, "answer", away)
    why = f"is not the same folder for this program, on host {HERE}, and for all of policy: rank 0, on host {HERE}, has"
    what = "A checkpoint would be without what it writes; give a folder (out=) on a disk that all nodes share"
    uses: dict[str, Callable[[], Any]] = {
        "save": lambda: trainer.save(state, here / "saved"),
        "check_folder": lambda: trainer.check_folder(here / "saved"),
    }
    for who, use in uses.items():
        with pytest.raises(CheckpointError, match=f"^{who}: {here}/saved {re.escape(why)}.*{re.escape(what)}"):
            use()
    with nrl.run(Config(here / "restores")) as run:
        for value in (trainer, state, trainer.load()):
            with pytest.raises(
                CheckpointError, match=rf"^run.restore: {here}/restores/checkpoints/train is not the same"
            ):
                run.restore(policy=value, count=0)
    steps = []
    with nrl.run(Config(here / "saves")) as run:
        for i, _ in run.steps(counting()):
            steps.append(i)
            with pytest.raises(CheckpointError, match=r"^run.save: .*/saves/checkpoints/train is not the same"):
                run.save(i, policy=state)
            break
    assert steps == [0]
    assert not (there / "saved").exists()
    with pytest.raises(CheckpointError, match="^save: "):
        checkpoint.save(here / "000001", 0, {"policy": state})
    assert checkpoint.checkpoints(here) == []
    assert list(here.glob(".0*")) == []


def test_a_run_looks_once(trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def counts(folder: Path, note: str) -> tuple[str, str]:
        asked.append(folder)
        return answer(folder, note)

    monkeypatch.setattr(shared_fs, "answer", counts)
    with nrl.run(Config(tmp_path)) as run:
        state, frozen = run.restore(policy=trainer, reference=trainer.load())
        assert asked == [tmp_path / "checkpoints" / "train"]
        for i, _ in run.steps(counting()):
            run.save(i, policy=state, reference=frozen)
            assert len(asked) == (1 if i < 2 else 3)  # each value that is written looks for itself
        assert asked[1:] == [tmp_path / f"checkpoints/train/.000003.writing/{x}" for x in ("policy", "reference")]


def test_a_model_on_another_disk_is_not_lost_silently(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "there"
    there.mkdir()
    monkeypatch.setattr(shared_fs, "answer", lambda folder, note: answer(there, note))
    message = (
        f"export: the model lies in {tmp_path}/model on host {HERE}, and this program, on host {HERE}, does not see it"
        f": rank 0, on host {HERE}, has another folder there. Copy it from there, or give a folder on a disk"
    )
    with pytest.raises(CheckpointError, match=re.escape(message)):
        trainer.export(trainer.load(), tmp_path / "model")
    monkeypatch.undo()
    trainer.export(trainer.load(), tmp_path / "model")
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["table.pt"]


@attrs.frozen
class _Lost(SavePlan):
    left: bytes | None

    def write(self, folder: Folder) -> Saved:
        written = super().write(folder)
        if self.left is None:
            (folder / "table.pt").unlink()
        else:
            (folder / "table.pt").write_bytes(self.left)
        return written


@attrs.frozen
class Loses(Bigram):
    """Its file is another one where the program looks."""

    left: bytes | None = None

    def save(self, state: BigramState, params: Tensor) -> SavePlan:
        made = super().save(state, params)
        return _Lost(made.files, made.record, self.left)


@pytest.mark.parametrize(("left", "message"), [(None, "is missing"), (b"half", r"has 4 bytes, and had \d+")])
def test_files_that_do_not_arrive_make_no_checkpoint(left: bytes | None, message: str, tmp_path: Path) -> None:
    with nrl.cluster("local") as cluster:
        trainer = trainer_of(cluster, lambda: Loses(left=left))
        with pytest.raises(
            CheckpointError, match=f"save: .*: the file table.pt {message}, when rank 0 of policy wrote it"
        ):
            checkpoint.save(tmp_path / "000001", 0, {"policy": trainer.init()})
    assert list(tmp_path.iterdir()) == []


def test_what_another_number_of_processes_left_is_gone_after_a_save(trainer: Trainer, tmp_path: Path) -> None:
    for name in ("00002-of-00003.safetensors", "notes.txt"):
        (tmp_path / name).write_bytes(b"left")
    trainer.save(trainer.init(), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", "notes.txt", "table.pt"]


def test_half_of_what_was_saved_is_not_restored(trainer: Trainer, tmp_path: Path) -> None:
    """Without a checkpoint around it, too."""
    written = trainer.save(trainer.init(), tmp_path)
    assert sorted(written) == sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", "table.pt"]
    trainer.verify(tmp_path, written)
    content = (tmp_path / "table.pt").read_bytes()
    (tmp_path / "table.pt").write_bytes(content[:-3] + b"???")
    with pytest.raises(CheckpointError, match="the file table.pt was altered"):
        trainer.verify(tmp_path, written)
    (tmp_path / "table.pt").write_bytes(content[:-1])
    for use in (lambda: trainer.restore(tmp_path), lambda: trainer.verify(tmp_path, written)):
        with pytest.raises(CheckpointError, match=r"the file table.pt has \d+ bytes, and had \d+"):
            use()
    (tmp_path / "table.pt").unlink()
    with pytest.raises(CheckpointError, match=f"^{tmp_path}: the file table.pt is missing$"):  # the program sees it
        trainer.restore(tmp_path)


def test_the_processes_see_for_themselves_before_they_restore(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.save(trainer.init(), tmp_path)
    asked: list[tuple[Path, list[str]]] = []
    monkeypatch.setattr(shared_fs, "check_visible", lambda folder, files: asked.append((folder, sorted(files))))
    trainer.restore(tmp_path)
    assert asked == [(tmp_path, ["table.pt"])]


def test_the_processes_of_a_trainer_read_what_it_wrote(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (0, 1):
        checkpoint.save(tmp_path / f"{step + 1:06}", step, {"policy": trainer.init(), "count": step})
    readers, said, read = {"policy": trainer}, list[str](), list[Path]()

    def checks(folder: Path, files: Any) -> None:
        read.extend(folder / name for name in files)
        check(folder, files)

    with monkeypatch.context() as patched:
        patched.setattr(shared_fs, "check", checks)
        checkpoint.verify(tmp_path / "000002", {"policy": trainer})
    assert read == [tmp_path / "000002/policy" / name for name in ("table.pt",)]
    table = tmp_path / "000002/policy/table.pt"
    table.write_bytes(table.read_bytes()[:-3] + b"???")
    for verify in (checkpoint.verify, lambda folder: checkpoint.verify(folder, readers)):
        with pytest.raises(CheckpointError, match=r"000002.*: the file (policy/)?table.pt was altered"):
            verify(tmp_path / "000002")
    shutil.copytree(tmp_path / "000002", tmp_path / "000003")
    found = checkpoint.newest(tmp_path, said.append, readers)
    assert found is not None
    assert found.step == 0
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["000001", "000002.damaged", "000003.damaged"]
    state, count = checkpoint.load(found.folder, policy=trainer, count=9)
    assert (state.step, count) == (0, 0)
    assert checkpoint.trainers({"a": trainer, "b": state, "c": trainer.load(), "d": 3}) == dict.fromkeys("abc", trainer)
    assert isinstance(trainer.load(), Params)


def test_a_run_has_them_read_it(trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []

    def reads(folder: Path, files: dict[str, Written]) -> None:
        read.extend(folder / name for name in files)
        check(folder, files)

    monkeypatch.setattr(shared_fs, "check", reads)
    cfg = Config(tmp_path, checkpoints=Checkpoints(every=1))
    with nrl.run(cfg) as run:
        state = run.restore(policy=trainer)
        for i, _ in run.steps(counting()):
            run.save(i, policy=state)
    assert read == []
    root = tmp_path / "checkpoints" / "train"
    table = root / "000003" / "policy" / "table.pt"
    table.write_bytes(table.read_bytes()[:-3] + b"???")
    with nrl.run(cfg) as run:
        run.restore(policy=trainer)
        assert [i for i, _ in run.steps(counting())] == [2]
    assert {path.parent for path in read} == {root / "000003" / "policy", root / "000002" / "policy"}
    assert sorted(path.name for path in root.iterdir()) == ["000002", "000003.damaged"]


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[Path] = []
    fsync, rename = os.fsync, Path.rename

    def flushes(descriptor: int) -> None:
        fsync(descriptor)
        flushed.append(Path(f"/proc/self/fd/{descriptor}").readlink())

    def renames(path: Path, target: Path) -> Path:
        assert set(flushed) == {path, *path.rglob("*")}
        flushed.clear()
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", flushes)
    monkeypatch.setattr(Path, "rename", renames)
    made = checkpoint.save(tmp_path / "000001", 0, {"policy": trainer.init(), "count": 1})
    assert flushed == [tmp_path]
    checkpoint.verify(made.folder)
