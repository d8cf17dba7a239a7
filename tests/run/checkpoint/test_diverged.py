"""A checkpoint with NaN or infinite weights is never the one that a run goes on from, nor the best, nor exported."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import attrs
import pytest
import torch

import nrl
from nrl import Layout, tiny
from nrl.algos import sft_loss
from nrl.backends import TRAINERS, Trainer, TrainState, adamw, fsdp
from nrl.backends.training.collectives import ProcessGroup
from nrl.backends.training.saving import storage
from nrl.backends.types import Piece
from nrl.batch import Batch
from nrl.cli.evaluation import find_model
from nrl.cli.export import Export
from nrl.cli.export import main as export
from nrl.data import counting
from nrl.errors import CheckpointError, ModelError
from nrl.files import to_folder
from nrl.run.checkpoint import Checkpoints, best, checkpoints, load, newest, save, store
from nrl.runtime import Cluster
from tests.weights import assert_equal, weights

LARGE = adamw(lr=1e20, weight_decay=1e20)  # one step multiplies each weight by -1e40


def rows(seed: int) -> Batch:
    ids = torch.randint(3, 20, (2, 5), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(2, 5, dtype=torch.bool)
    return Batch({"input_ids": ids, "attention_mask": mask, "loss_mask": mask}, batch_size=[2])


@pytest.fixture(scope="module")
def trainer() -> Iterator[Trainer]:
    with nrl.cluster("local") as cluster:
        yield fsdp.trainer(cluster.reserve(1), tiny.model(), adamw(lr=1e-3))


@pytest.fixture(scope="module")
def diverging() -> Iterator[Trainer]:
    with nrl.cluster("local") as cluster:
        yield fsdp.trainer(cluster.reserve(1), tiny.model(), LARGE)


def stepped(trainer: Trainer) -> TrainState:
    state, metrics = trainer.train_step(sft_loss)(trainer.init(), rows(0))
    metrics.result()
    return state


def names(root: Any) -> list[str]:
    return [found.folder.name for found in checkpoints(root)]


@pytest.mark.parametrize("where", ["disk", "store"])
def test_the_one_before_is_used(where: str, trainer: Trainer, diverging: Trainer, tmp_path: Path) -> None:
    root = str(tmp_path) if where == "disk" else f"memory://{tmp_path.name}"
    good, bad = trainer.init(), stepped(diverging)
    for step, state in enumerate([good, good, bad, bad]):
        save(to_folder(root) / f"{step + 1:06}", step, {"policy": state, "count": step})
    manifest = json.loads((to_folder(root) / "000003" / "manifest.json").read_text())
    assert "model.model.embed_tokens.weight" in manifest["values"]["policy"]["not_finite"]
    assert (
        json.loads((to_folder(root) / "000002" / "manifest.json").read_text())["values"]["policy"]["not_finite"] == []
    )
    said: list[str] = []
    found = newest(root, said.append)
    assert found is not None
    assert (found.folder.name, found.not_finite) == ("000002", ())
    assert [line.partition(": weights or optimizer states in it are NaN")[0] for line in said] == [
        f"checkpoint: {to_folder(root) / name}" for name in ("000004", "000003")
    ]
    assert all("diverged, and 000002 is used" in line for line in said)
    assert names(root) == ["000001", "000002"]
    assert newest(root, said.append) == found
    assert len(said) == 2
    (again, count) = load(found.folder, policy=trainer, count=0)
    assert count == 1
    assert_equal(weights(again), weights(good))
    save(to_folder(root) / "000003", 2, {"policy": again, "count": 2})  # its name is free again
    assert names(root) == ["000001", "000002", "000003"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_each_number_of_weights_and_optimizer_states_counts(dtype: torch.dtype) -> None:
    def found(tensors: dict[str, torch.Tensor]) -> list[str]:
        pieces = [Piece(name, tuple(x.shape), tuple(slice(0, n) for n in x.shape), x) for name, x in tensors.items()]
        names: list[str] = storage.plan_save(lambda: pieces, ProcessGroup(None), {}).record["not_finite"]
        return names

    largest, smallest = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    good = torch.tensor([[largest, -largest, 0.0], [-0.0, smallest, -smallest]], dtype=dtype)
    counts = {"count": torch.tensor(3), "empty": torch.zeros(0, 3, dtype=dtype)}
    assert found({"model.a": good, "optimizer.a.exp_avg": good.T, **counts}) == []
    for number in (math.nan, math.inf, -math.inf):
        for place in range(good.numel()):
            bad = good.clone()
            bad.view(-1)[place] = number
            assert found({"model.a": good, "optimizer.a.exp_avg": bad, **counts}) == ["optimizer.a.exp_avg"]
            assert found({"model.a": bad.T, "optimizer.a.exp_avg": good, **counts}) == ["model.a"]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
def test_each_process_checks_its_own_part(engine: Literal["fsdp", "megatron"], on_ray: Cluster, tmp_path: Path) -> None:
    """And a run goes on in another layout, of either engine, from the one before."""
    layout = Layout(dp=2) if engine == "fsdp" else Layout(tp=2)
    mesh = on_ray.reserve(2).mesh(layout=layout, executable="system")
    large = TRAINERS[engine](mesh, tiny.model(), LARGE)
    good = save(tmp_path / "000001", 0, {"policy": large.init()})
    bad = save(tmp_path / "000002", 1, {"policy": stepped(large)})
    assert good.not_finite == ()
    assert "policy: model.model.embed_tokens.weight" in bad.not_finite
    (tmp_path / "000001" / "policy" / "copy.safetensors").write_bytes(b"somebody's")
    said: list[str] = []
    found = newest(tmp_path, said.append, {"policy": large})
    assert found == good
    assert "it is now 000002.diverged, and 000001 is used" in said[0]
    (again,) = load(good.folder, policy=large)
    with nrl.cluster("local") as cluster:
        (alone,) = load(good.folder, policy=fsdp.trainer(cluster.reserve(1), tiny.model(), LARGE))
        assert_equal(weights(again), weights(alone))


def test_where_none_is_finite_they_keep_their_names(diverging: Trainer, tmp_path: Path) -> None:
    save(tmp_path / "000001", 0, {"policy": stepped(diverging)})
    with pytest.raises(CheckpointError, match=r"none of its 1 checkpoints is finite .*; lower the learning rate, and"):
        newest(tmp_path)
    assert names(tmp_path) == ["000001"]


def test_what_is_kept_and_what_is_best(trainer: Trainer, diverging: Trainer, tmp_path: Path) -> None:
    good, bad, keep = trainer.init(), stepped(diverging), Checkpoints(keep=1, best="reward")
    kept = []
    for step, (state, reward) in enumerate([(good, 0.5), (good, 0.2), (bad, 0.9), (bad, 0.8)]):
        store(tmp_path, step, {"policy": state}, keep, {"metrics": {"reward": reward}})
        kept.append(names(tmp_path))
    assert kept == [["000001"], ["000001", "000002"], ["000001", "000002", "000003"], ["000001", "000002", "000004"]]
    champion = best(checkpoints(tmp_path), keep)
    assert champion is not None
    assert champion.folder.name == "000001"


def test_it_is_not_exported(trainer: Trainer, diverging: Trainer, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints" / "train"
    bad = stepped(diverging)
    for step, state in enumerate([trainer.init(), bad]):
        save(root / f"{step + 1:06}", step, {"policy": state})
    first = export(Export(str(tmp_path), str(tmp_path / "first"), checkpoint="000001"))
    for which in ("newest", "best"):
        folder = export(Export(str(tmp_path), str(tmp_path / f"of {which}"), checkpoint=which))
        assert (folder / "model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes()
    for refused in (Export(str(tmp_path), checkpoint="2"), Export(str(root / "000002"))):
        with pytest.raises(
            CheckpointError, match=r"export: .*000002/policy has NaN or infinite numbers \(model\."
        ) as caught:
            export(refused)
        assert "give an earlier checkpoint=" in str(caught.value)
    assert not (tmp_path / "model").exists()
    with pytest.raises(ModelError, match=r"its checkpoints are 000001, 000002 \(NaN or infinite\)\. Let it run"):
        find_model(str(tmp_path))


@attrs.frozen
class Config:
    out: str
    steps: int
    optimizer: Any
    checkpoints: Checkpoints = Checkpoints(every=1, keep=1)


def run_once(cfg: Config) -> dict[str, torch.Tensor]:
    with nrl.run(cfg) as run, nrl.cluster("local") as cluster:
        trainer = fsdp.trainer(cluster.reserve(1), tiny.model(), cfg.optimizer)
        step = trainer.train_step(sft_loss)
        state: TrainState
        state, stream = run.restore(policy=trainer, stream=counting(rows))
        for i, batch in run.steps(stream):
            state, metrics = step(state, batch)
            run.log(i, metrics)
            run.save(i, policy=state, stream=stream)
        return weights(state)


def test_a_run_that_diverged_goes_on_before_that_with_another_optimizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calm = adamw(lr=1e-3)
    whole = run_once(Config(str(tmp_path / "whole"), 3, calm))
    run_once(Config(str(tmp_path / "run"), 2, calm))
    run_once(Config(str(tmp_path / "run"), 3, LARGE))
    assert "000003: weights or optimizer states in it are NaN or infinite (policy: model." in capsys.readouterr().out
    again = run_once(Config(str(tmp_path / "run"), 3, calm))
    text = capsys.readouterr().out
    assert "it is now 000003.diverged, and 000002 is used" in text
    assert "train: 2 of 2 steps were done; going on after them" in text
    assert_equal(again, whole)
    assert names(tmp_path / "run/checkpoints/train") == ["000003"]


# --- files that nrl did not write


STRAY = [".DS_Store", "notes.txt", "manifest.json~", "0001.safetensors", "00001-of-00001.safetensors.bak"]


def test_files_that_the_manifest_does_not_list_are_not_read(trainer: Trainer, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints" / "train"
    state = trainer.init()
    made = save(root / "000001", 0, {"policy": state, "count": 1})
    expected = files = export(Export(str(tmp_path), str(tmp_path / "before")))
    part = Path(str(made.folder)) / "policy" / "00001-of-00001.safetensors"
    folders = [tmp_path, tmp_path / "checkpoints", root, *(path for path in root.rglob("*") if path.is_dir())]
    for folder in folders:
        for name in [*STRAY, "._00001-of-00001.safetensors", "00001-of-00004.safetensors", "x.safetensors", "a.pt"]:
            (folder / name).write_bytes(b"\0\5\x16\7")
        (folder / "copy.safetensors").write_bytes(part.read_bytes())
    (root / "000009").write_text("a file of somebody's")
    (root / "000001" / "policy" / "model" / "chat_template.jinja").write_text("{{ not ours }}")
    said: list[str] = []
    found = newest(root, said.append, {"policy": trainer})
    assert found is not None
    assert (found.folder, said) == (made.folder, [])
    again, count = load(found.folder, policy=trainer, count=0)
    assert count == 1
    assert_equal(weights(again), weights(state))
    assert_equal(weights(trainer.restore(found.folder / "policy")), weights(state))
    files = export(Export(str(tmp_path), str(tmp_path / "after")))
    assert sorted(path.name for path in files.iterdir()) == sorted(path.name for path in expected.iterdir())
    store(root, 1, {"policy": again, "count": 2}, Checkpoints(keep=1), {})
    assert names(root) == ["000002"]
    assert (root / "notes.txt").exists()


def test_a_run_ignores_what_lies_beside_its_checkpoints(trainer: Trainer, tmp_path: Path) -> None:
    cfg = Config(str(tmp_path / "run"), 1, adamw(lr=1e-3))
    run_once(cfg)
    for folder in (tmp_path / "run", tmp_path / "run/checkpoints", tmp_path / "run/checkpoints/train"):
        for name in (*STRAY, "._train", "._metrics.jsonl", "notes"):
            (folder / name).write_text("somebody's")
    run_once(attrs.evolve(cfg, steps=2))
    assert names(tmp_path / "run/checkpoints/train") == ["000002"]
    assert (tmp_path / "run/._metrics.jsonl").read_text() == "somebody's"
    trainer.save(trainer.init(), tmp_path / "run/checkpoints")  # into a folder that has such files
    assert (tmp_path / "run/checkpoints/0001.safetensors").exists()
