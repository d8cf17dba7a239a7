"""Checkpoints in a store that all hosts reach, where they have no folder in common: whole, or not there."""

import contextlib
import json
import os
import shutil
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import nrl
from nrl import files, tiny
from nrl.algos import sft_loss
from nrl.backends import adamw, fsdp
from nrl.backends.models import safetensors
from nrl.cli.export import Export
from nrl.cli.export import main as export
from nrl.data import counting
from nrl.errors import CheckpointError, ConfigError, LostActor
from nrl.files import Folder, Written, to_folder
from nrl.run.checkpoint import Checkpoints, checkpoints, load, newest, save, store, verify
from tests.children import server
from tests.jsonlines import untimed

STEPS = 6


@pytest.fixture(params=["memory", "file"])
def bucket(request: Any, tmp_path: Path) -> Iterator[str]:
    """The URL of a store."""
    made = f"memory://{uuid.uuid4().hex}" if request.param == "memory" else f"file://{tmp_path}/bucket"
    yield made
    found: Any = to_folder(made)
    if found.exists():
        found.fs.rm(found.path, recursive=True)


@attrs.frozen
class Config:
    out: str
    checkpoints: Checkpoints = Checkpoints(every=2, keep=2)
    steps: int = STEPS


class Stop(Exception):
    pass


def train(cfg: Config, at_step: Callable[[int], object] = lambda step: None) -> dict[str, Tensor]:
    """Supervised steps with random draws of the program; ``at_step`` is called when a step has been given to `save`."""
    with nrl.run(cfg) as run, nrl.cluster("local") as cluster:
        trainer = fsdp.trainer(cluster.reserve(1), tiny.model(), adamw(lr=1e-2))
        step = trainer.train_step(sft_loss)
        state, seen, stream = run.restore(policy=trainer, seen=torch.zeros(3), stream=tiny.sums(4))
        for i, batch in run.steps(stream):
            state, metrics = step(state, batch)
            seen += torch.rand(3)
            run.log(i, metrics, {"seen": nrl.batch.metrics.Sum(seen.sum())})
            run.save(i, policy=state, seen=seen, stream=stream)
            at_step(i)
        trainer.export(state.params, Path(cfg.out) / "own")
        return dict(state.params.tensors())


def stops_after(step: int) -> Callable[[int], None]:
    def at_step(now: int) -> None:
        if now == step:
            raise Stop

    return at_step


def all_in(root: str | Folder) -> list[str]:
    """The files under a root, by their names from there."""
    folder: Any = to_folder(root)
    here = folder.path if not isinstance(folder, Path) else str(folder)
    found = [] if isinstance(folder, Path) or not folder.exists() else folder.fs.find(folder.path)
    return sorted(path.removeprefix(here).lstrip("/") for path in found)


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], x) for name, x in expected.items())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A run whose checkpoints are in its own folder, and that nothing interrupts."""
    out = tmp_path_factory.mktemp("whole")
    return out, train(Config(str(out)))


def test_a_run_goes_on_to_the_bit(bucket: str, tmp_path: Path, whole: tuple[Path, dict[str, Tensor]]) -> None:
    """In its own folder, and on another host, where there is no such folder; exports are those of the trainer."""
    out, expected = whole
    keep = Checkpoints(every=2, keep=2, to=f"{bucket}/run")
    with pytest.raises(Stop):
        train(Config(f"{tmp_path}/here", keep), stops_after(4))
    assert [x.folder.name for x in checkpoints(tmp_path / "here/checkpoints/train")] == ["000002", "000004"]
    copied = to_folder(f"{bucket}/copy")
    for name in all_in(f"{bucket}/run"):
        files.write(copied / name, [(to_folder(f"{bucket}/run") / name).read_bytes()])
    assert same(train(Config(f"{tmp_path}/here", keep)), expected)
    assert untimed(tmp_path / "here") == untimed(out)
    assert [x.folder.name for x in checkpoints(f"{bucket}/run/train")] == ["000004", "000006"]
    assert not [name for name in all_in(f"{bucket}/run") if name.startswith(("train/.", "train/000002"))]
    assert [x.name for x in (tmp_path / "here/checkpoints/train").iterdir()] == ["elsewhere"]

    elsewhere = Config(f"{tmp_path}/there", Checkpoints(every=2, keep=2, to=f"{bucket}/copy"))
    assert same(train(elsewhere), expected)
    assert len((tmp_path / "there/metrics.jsonl").read_text().splitlines()) == 2

    here = tmp_path / "here"
    of_run = export(Export(str(here)))
    of_checkpoint = export(Export(f"{bucket}/run/train/000006", to=f"{tmp_path}/alone"))
    for folder in (of_run, of_checkpoint, here / "own"):
        assert {x.name: x.read_bytes() for x in folder.iterdir()} == {
            x.name: x.read_bytes() for x in (out / "own").iterdir()
        }
    for wrong, to in ((f"{bucket}/run/train", "x"), (f"{bucket}/run/train/000006", None)):
        with pytest.raises(CheckpointError, match="export: .* is (no checkpoint|in a store)"):
            export(Export(wrong, to=to))


def test_the_newest_and_the_best_are_kept(bucket: str) -> None:
    keep = Checkpoints(keep=1, best="reward")
    for step, reward in enumerate([0.2, 0.7, 0.4, 0.5]):
        store(f"{bucket}/train", step, {"count": step}, keep, {"metrics": {"reward": reward}})
    assert [x.folder.name for x in checkpoints(f"{bucket}/train")] == ["000002", "000004"]
    assert {name.partition("/")[0] for name in all_in(f"{bucket}/train")} == {"000002", "000004"}


DAMAGES: list[tuple[str, Callable[[bytes], bytes | None]]] = [
    ("count.pt", lambda content: content[:-1] + b"?"),
    ("policy/00001-of-00001.safetensors", lambda content: content[:-3] + b"???"),
    ("policy/00001-of-00001.safetensors", lambda content: content[:-3]),
    ("policy/00001-of-00001.safetensors", lambda content: None),
    ("manifest.json", lambda content: content[:-3]),
]


def test_what_is_damaged_is_set_aside_and_the_one_before_is_used(bucket: str) -> None:
    """Altered, cut, missing, or its manifest is; whichever file."""
    root, said = f"{bucket}/train", list[str]()
    with nrl.cluster("local") as cluster:
        trainer = fsdp.trainer(cluster.reserve(1), tiny.model(), adamw(lr=1e-2))
        state = trainer.init()
        save(f"{root}/000001", 0, {"policy": state, "count": 0})
        for number, (name, change) in enumerate(DAMAGES, 2):
            made = save(f"{root}/{number:06}", number - 1, {"policy": state, "count": number})
            verify(made.folder)
            path: Any = made.folder / name
            content = change(path.read_bytes())
            path.unlink()
            if content is not None:
                files.write(path, [content])
        for readers in ({}, {"policy": trainer}):
            found = newest(root, said.append, readers)
            assert found is not None
            assert found.step == 0
            assert len(said) == 5  # each once
        assert all("its manifest.json is now manifest.json.damaged, and 000001 is used" in each for each in said)
        assert [x.folder.name for x in checkpoints(root)] == ["000001"]
        assert f"000003/{'policy/00001-of-00001.safetensors'}" in all_in(root)
        save(f"{root}/000003", 2, {"policy": state, "count": 3})  # the run comes there again
        verify(f"{root}/000003", {"policy": trainer})
        restored, count = load(f"{root}/000003", policy=trainer, count=0)
        assert count == 3
        assert same(dict(restored.params.tensors()), dict(state.params.tensors()))
        assert "000003/manifest.json.damaged" not in all_in(root)


def test_without_its_manifest_it_is_not_there(bucket: str) -> None:
    made = save(f"{bucket}/train/000002", 1, {"count": 1})
    save(f"{bucket}/train/000001", 0, {"count": 0})
    (made.folder / "manifest.json").unlink()
    assert [x.step for x in checkpoints(f"{bucket}/train")] == [0]
    found = newest(f"{bucket}/train", pytest.fail)
    assert found is not None
    assert found.step == 0
    assert {name.partition("/")[0] for name in all_in(f"{bucket}/train")} == {"000001"}


def test_a_removed_one_is_never_half_there(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder: Any = save(f"{bucket}/train/000001", 0, {"count": 0}).folder
    removes = folder.fs.rm

    def dies(path: str, recursive: bool) -> None:
        if path.endswith("000001"):
            raise KeyboardInterrupt
        removes(path, recursive=recursive)

    monkeypatch.setattr(folder.fs, "rm", dies)
    with pytest.raises(KeyboardInterrupt):
        store(f"{bucket}/train", 1, {"count": 1}, Checkpoints(keep=1), {})
    monkeypatch.undo()
    assert [x.folder.name for x in checkpoints(f"{bucket}/train")] == ["000002"]
    assert "000001/count.pt" in all_in(f"{bucket}/train")
    assert newest(f"{bucket}/train") is not None
    assert "000001/count.pt" not in all_in(f"{bucket}/train")


class Gate:
    """Writers of trainers stop at the beginning of a file while it is closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.reached = threading.Event(), threading.Event()
        write = files.write

        def writes(path: Folder, parts: Any) -> Written:
            if not self.open.is_set():
                write(path, [b"beginning"])
                self.reached.set()
                assert self.open.wait(60)
            return write(path, parts)

        monkeypatch.setattr("nrl.backends.training.saving.save_plan.write_file", writes)


def test_steps_go_on_while_it_is_written(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, there = Gate(monkeypatch), list[list[str]]()

    def at_step(step: int) -> None:
        if step in (1, 2):
            assert gate.reached.wait(60)
            there.append([x.folder.name for x in checkpoints(f"{bucket}/train")])
        if step == 2:
            gate.open.set()

    train(Config(f"{tmp_path}/out", Checkpoints(every=2, to=bucket), steps=4), at_step)
    assert there == [[], []]
    assert [x.folder.name for x in checkpoints(f"{bucket}/train")] == ["000002", "000004"]


def killed(out: str, log: str, bucket: str) -> None:
    """In the middle of the checkpoint after step 3."""
    with Path(log).open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    with pytest.MonkeyPatch.context() as patched:
        gate = Gate(patched)
        gate.open.set()

        def at_step(step: int) -> None:
            if step == 2:
                while not checkpoints(f"{bucket}/train"):
                    time.sleep(0.01)
                gate.open.clear()
            if step == 3:
                assert gate.reached.wait(60)
                os.kill(os.getpid(), signal.SIGKILL)

        train(Config(out, Checkpoints(every=2, to=bucket)), at_step)


@pytest.mark.timeout(300)
def test_killed_in_the_middle_the_one_before_is_used(
    tmp_path: Path, whole: tuple[Path, dict[str, Tensor]], capsys: pytest.CaptureFixture[str]
) -> None:
    bucket = f"file://{tmp_path}/bucket"
    process = server().Process(target=killed, args=(f"{tmp_path}/out", f"{tmp_path}/log", bucket))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL, (tmp_path / "log").read_text()
    assert (tmp_path / "bucket/train/000004/policy/00001-of-00001.safetensors").read_bytes() == b"beginning"
    assert not (tmp_path / "bucket/train/000004/manifest.json").exists()
    assert same(train(Config(f"{tmp_path}/out", Checkpoints(every=2, to=bucket))), whole[1])
    assert "train: 2 of 6 steps were done; going on after them" in capsys.readouterr().out
    assert untimed(tmp_path / "out") == untimed(whole[0])


# --- what is wrong with a store


def walk(cfg: Config, count: int = 0) -> int:
    with nrl.run(cfg) as run:
        count, stream = run.restore(count=count, stream=counting())
        for i, _ in run.steps(stream):
            count += 1
            run.log(i)
            run.save(i, count=count, stream=stream)
    return count


@pytest.mark.parametrize(
    ("to", "message"),
    [
        ("nowhere://bucket", r"nowhere://bucket: this store cannot be reached \(.*nowhere.*\). Each protocol is a"),
        ("gs://bucket", r"gs://bucket: this store cannot be reached \(.*install gcsfs.*\). .* install it here and"),
    ],
)
def test_a_protocol_that_nobody_speaks(to: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        walk(Config(f"{tmp_path}/out", Checkpoints(to=to)))
    assert not (tmp_path / "out").exists()


def test_a_store_that_takes_nothing(tmp_path: Path) -> None:
    message = (
        r"^checkpoints: file:///proc/none/train cannot be written to from host \S+ \(\w+Error: .*checkpoints.to= is"
    )
    with pytest.raises(CheckpointError, match=message):
        walk(Config(f"{tmp_path}/out", Checkpoints(to="file:///proc/none")))
    assert not (tmp_path / "out").exists()


def test_a_store_that_is_lost_on_the_way(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(f"{bucket}/train/000001", 0, {"count": 1})

    class Refused(Exception):
        """As of a library that knows no OSError."""

    folder: Any = to_folder(f"{bucket}/train/000002")
    opens = folder.fs.open

    def refuses(path: str, mode: str = "rb", **how: Any) -> Any:
        if mode == "wb":
            raise Refused("no route to it")
        return opens(path, mode, **how)

    monkeypatch.setattr(folder.fs, "open", refuses)
    message = (
        f"save: the checkpoint {folder} could not be written (no route to it). The last good one is 000001. See that "
        "the store can be reached and written to, and start the same command again"
    )
    with pytest.raises(CheckpointError) as caught:
        save(folder, 1, {"count": 2})
    assert str(caught.value) == message


def test_a_store_that_does_not_answer_is_not_an_empty_one(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = save(f"{bucket}/train/000001", 0, {"count": 1})

    def refuses(*_: Any, **how: Any) -> Any:
        raise PermissionError("expired")

    monkeypatch.setattr(type(made.folder), "read_text", refuses)
    with pytest.raises(PermissionError):
        checkpoints(f"{bucket}/train")
    with pytest.raises(PermissionError):
        load(made.folder, count=0)


@pytest.mark.parametrize("failing", ["info", "ls", "exists"])
def test_none_is_removed_by_a_store_that_does_not_answer(
    bucket: str, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most stores say of a file that it is not there, whatever their error is."""
    made: Any = save(f"{bucket}/train/000001", 0, {"count": 1}).folder
    asked, way = list[str](), getattr(type(made.fs), failing)

    def blip(self: Any, path: Any, *more: Any, **how: Any) -> Any:
        if "000001" not in str(getattr(path, "path", path)):
            return way(self, path, *more, **how)
        asked.append(failing)
        if failing == "exists":
            return False
        raise OSError("a blip")

    with monkeypatch.context() as of, contextlib.suppress(OSError):
        of.setattr(type(made.fs), failing, blip)
        newest(f"{bucket}/train")
    assert [found.step for found in checkpoints(f"{bucket}/train")] == [0]
    assert asked or failing == "exists"


def test_another_place_is_no_new_beginning(bucket: str, tmp_path: Path) -> None:
    """Out of the run's folder, and back; unless the checkpoints come along."""
    cfg = Config(f"{tmp_path}/out", Checkpoints(every=2, keep=9))
    moved, more = attrs.evolve(cfg, checkpoints=Checkpoints(every=2, keep=9, to=bucket), steps=8), 8
    assert walk(cfg) == STEPS
    root = tmp_path / "out/checkpoints/train"
    message = f"^checkpoints: those of 'train' are in {root}, up to 000006, and .* says {bucket}/train, where none are"
    with pytest.raises(CheckpointError, match=message):
        walk(moved)
    assert len((tmp_path / "out/metrics.jsonl").read_text().splitlines()) == STEPS
    for path in root.rglob("*.*"):
        files.write(to_folder(f"{bucket}/train/{path.relative_to(root)}"), [path.read_bytes()])
    assert walk(moved) == more
    assert checkpoints(root)[-1].folder == to_folder(f"{bucket}/train/{more:06}")
    back = f"^checkpoints: those of 'train' are in {bucket}/train, up to 000008, and .* {root}, where"
    with pytest.raises(CheckpointError, match=f"{back} the newest is 000006, so the run would go back to it;"):
        walk(attrs.evolve(cfg, steps=9))
    assert len((tmp_path / "out/metrics.jsonl").read_text().splitlines()) == more
    for folder in root.glob("0*"):
        shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match=f"{back} none are, so it would begin anew;"):
        walk(attrs.evolve(cfg, steps=9))


def test_the_checkpoints_of_another_run(bucket: str, tmp_path: Path) -> None:
    """Not of the same one in another folder, which goes on with them."""

    @attrs.frozen
    class Other(Config):
        lr: float = 0.1

    keep = Checkpoints(every=2, to=bucket)
    assert walk(Config(f"{tmp_path}/one", keep)) == STEPS
    message = f"^run.restore: {bucket}/train holds checkpoints of a run with another lr .*a checkpoints.to= of its own$"
    with pytest.raises(ConfigError, match=message):
        walk(Other(f"{tmp_path}/other", keep))
    assert walk(Config(f"{tmp_path}/two", keep, steps=8)) == 8


def test_a_shared_folder_in_place_of_the_runs(tmp_path: Path) -> None:
    cfg = Config(f"{tmp_path}/out", Checkpoints(every=2, keep=1, to=f"{tmp_path}/shared"))
    assert walk(cfg) == STEPS
    assert [path.name for path in (tmp_path / "shared/train").iterdir()] == ["000006"]
    assert [path.name for path in (tmp_path / "out/checkpoints/train").iterdir()] == ["elsewhere"]
    shutil.rmtree(tmp_path / "out")
    assert walk(attrs.evolve(cfg, steps=7)) == 7


def test_a_process_is_lost(bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lost = [LostActor("train_step", "trainer", 1, "10.0.0.3", "killed by signal 9")]

    def main(cfg: Config) -> int:
        with nrl.run(cfg) as run:
            count, stream = run.restore(count=0, stream=counting())
            for i, _ in run.steps(stream):
                if i == 5 and lost:
                    raise lost.pop()
                count += 1
                run.save(i, count=count, stream=stream)
        return int(count)

    assert nrl.retrying(main, pause=0)(Config(f"{tmp_path}/out", Checkpoints(every=2, to=bucket))) == STEPS
    assert f"after step 4 of 'train' in {tmp_path}/out; retry 1 of 3" in capsys.readouterr().out


def test_a_start_that_fails_leaves_nothing(bucket: str, tmp_path: Path) -> None:
    def fails(run: Any) -> None:
        run.restore(count=0)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), nrl.run(Config(f"{tmp_path}/out", Checkpoints(to=bucket))) as run:
        fails(run)
    assert not (tmp_path / "out").exists()
    assert all_in(bucket) == []


# --- reading


def test_a_tensor_in_a_store_is_read_as_one_on_the_disk(bucket: str, tmp_path: Path) -> None:
    tensors = {
        "scalar": torch.tensor(7.0),
        "vector": torch.arange(5, dtype=torch.int64),
        "matrix": torch.arange(12, dtype=torch.bfloat16).view(3, 4),
        "cube": torch.arange(24, dtype=torch.float64).view(2, 3, 4),
        "empty": torch.empty(0, 3),
    }
    save_file(tensors, tmp_path / "file", metadata={"about": "it"})
    content = (tmp_path / "file").read_bytes()
    files.write(to_folder(f"{bucket}/file"), [content])
    indices: dict[str, list[Any]] = {
        "scalar": [(), slice(None)],
        "vector": [slice(None), slice(1, 3), (slice(2, 5),), slice(0, 0)],
        "matrix": [slice(None), slice(1, 2), (slice(0, 3), slice(1, 3)), (slice(2, 3), slice(0, 4))],
        "cube": [slice(None), (slice(1, 2), slice(0, 2), slice(3, 4)), (slice(0, 2), slice(1, 3), slice(0, 4))],
        "empty": [slice(None), (slice(0, 0), slice(0, 3))],
    }
    with safetensors.open_file(to_folder(f"{bucket}/file")) as there, safe_open(tmp_path / "file", "pt") as here:
        assert there.metadata() == here.metadata() == {"about": "it"}
        for name, all_of in indices.items():
            found, expected = there.get_slice(name), here.get_slice(name)
            assert (found.get_shape(), found.get_dtype()) == (expected.get_shape(), expected.get_dtype())
            for index in all_of:
                if name == "scalar":
                    assert found[index].shape == ()
                    assert torch.equal(found[index], tensors[name])
                else:
                    assert found[index].dtype == tensors[name].dtype
                    assert torch.equal(found[index], tensors[name][index])
    for wrong in (b"", content[:9], b"\xff" * 100):
        files.write(to_folder(f"{bucket}/wrong"), [wrong])
        with (
            pytest.raises(ValueError, match="bytes|header|JSON|Expecting|Unterminated"),
            safetensors.open_file(to_folder(f"{bucket}/wrong")),
        ):
            pass


def test_of_a_part_no_more_is_read_than_it_takes(bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    save_file({"w": torch.zeros(1000, 10)}, tmp_path / "file")
    path: Any = to_folder(f"{bucket}/file")
    files.write(path, [(tmp_path / "file").read_bytes()])
    read, cat = list[int](), path.fs.cat_file

    def counts(name: str, start: int, end: int) -> bytes:
        read.append(end - start)
        found: bytes = cat(name, start=start, end=end)
        return found

    monkeypatch.setattr(path.fs, "cat_file", counts)
    with safetensors.open_file(path) as file:
        read.clear()
        file.get_slice("w")[100:102, :5]
    assert read == [80]


def test_the_manifest_of_a_store_is_that_of_a_disk(bucket: str, tmp_path: Path) -> None:
    values = {"count": 1, "text": "x"}
    stored, kept = save(f"{bucket}/000001", 0, values), save(tmp_path / "000001", 0, values)
    assert json.loads((stored.folder / "manifest.json").read_text()) == json.loads(
        (kept.folder / "manifest.json").read_text()
    )
