"""Two processes that see another disk than the program, and than each other, where the folder of the run is.

Each has a mount of its own there, as on hosts that share no folder.
"""

import ctypes
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import torch
from torch import Tensor

import nrl
from nrl import tiny
from nrl.algos import sft_loss
from nrl.backends import Trainer, adamw, fsdp
from nrl.cli.export import Export
from nrl.cli.export import main as export
from nrl.errors import CheckpointError
from nrl.run.checkpoint import Checkpoints, checkpoints
from nrl.runtime import Cluster, Mesh
from nrl.runtime.mesh.rpc import from_all
from tests.jsonlines import untimed
from tests.meshes import end

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

STEPS, STOP = 6, 5


@attrs.frozen
class Config:
    out: str
    checkpoints: Checkpoints = Checkpoints(every=2)
    steps: int = STEPS


def moved(folder: str) -> str:
    """Give this process a disk of its own; what prevents that, or ""."""
    if ctypes.CDLL(None, use_errno=True).unshare(0x00020000):  # CLONE_NEWNS
        return os.strerror(ctypes.get_errno())
    for words in (["--make-rprivate", "/"], ["-t", "tmpfs", "tmpfs", folder]):
        if (done := subprocess.run(["mount", *words], capture_output=True, text=True, check=False)).returncode:
            return done.stderr
    return ""


@pytest.fixture(scope="module")
def away(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("apart")


@pytest.fixture(scope="module")
def mesh(on_ray: Cluster, away: Path) -> Iterator[Mesh]:
    made = on_ray.reserve(2).mesh(executable="system", name="trainer")
    if why := max(from_all(made, "test", moved, str(away))):
        pytest.skip(f"a process cannot have mounts of its own here: {why}")
    (away / "here").touch()
    assert from_all(made, "test", os.listdir, str(away)) == [[], []]
    yield made
    end(made)


def made(mesh: Mesh) -> Trainer:
    return fsdp.trainer(mesh, tiny.model(tokenizer=tiny.bpe(["user 1+1=2"])), adamw(lr=1e-2))


def train(cfg: Config, mesh: Mesh, stop: int | None = None) -> dict[str, Tensor]:
    with nrl.run(cfg) as run:
        trainer = made(mesh)
        step = trainer.train_step(sft_loss)
        state, seen, stream = run.restore(policy=trainer, seen=torch.zeros(3), stream=tiny.sums(4))
        for i, batch in run.steps(stream):
            if i == stop:
                break
            state, metrics = step(state, batch)
            seen += torch.rand(3)
            run.log(i, metrics, {"seen": nrl.batch.metrics.Sum(seen.sum())})
            run.save(i, policy=state, seen=seen, stream=stream)
        trainer.export(state.params, run.out / "own")
        return dict(state.params.tensors())


def test_it_is_said_before_the_first_step(mesh: Mesh, away: Path) -> None:
    message = (
        f"^run.restore: {away}/none/checkpoints/train is not the same folder for this program, on host .*, and for all "
        "of .*: rank 0, on host .*, has no such folder. A checkpoint would be without what it writes; "
        "give .*, or a store that they reach, such as checkpoints.to=s3://bucket/run"
    )
    with pytest.raises(CheckpointError, match=message):
        train(Config(f"{away}/none"), mesh)
    assert not (away / "none").exists()


def test_a_run_goes_on_by_a_store(mesh: Mesh, away: Path, tmp_path: Path) -> None:
    """To the bit, in its folder and where there is none; and all that is exported lies on the program's host."""
    to = {name: Checkpoints(every=2, to=f"file://{tmp_path}/{name}") for name in ("whole", "cut")}
    whole = train(Config(f"{away}/whole", to["whole"]), mesh)
    train(Config(f"{away}/cut", to["cut"]), mesh, stop=STOP)
    parts = [f"0000{rank}-of-00002.safetensors" for rank in (1, 2)]
    assert sorted(path.name for path in (tmp_path / "cut/train/000004/policy").glob("0*")) == parts
    for out in ("cut", "new"):  # the second one finds the end
        found = train(Config(f"{away}/{out}", to["cut"]), mesh)
        assert all(torch.equal(found[name], x) for name, x in whole.items())
    assert untimed(away / "cut") == untimed(away / "whole")
    assert [x.step for x in checkpoints(away / "cut/checkpoints/train")] == [3, 5]
    assert from_all(mesh, "test", os.listdir, str(away)) == [[], []]
    exported = export(Export(f"{away}/cut"))
    for own in ("cut", "new", "whole"):
        theirs = {path.name: path.read_bytes() for path in (away / own / "own").iterdir()}
        assert theirs == {path.name: path.read_bytes() for path in exported.iterdir()}


@pytest.mark.parametrize("part", [1, 2])
def test_a_missing_part_is_named(mesh: Mesh, tmp_path: Path, part: int) -> None:
    trainer, store = made(mesh), f"file://{tmp_path}/bucket"
    trainer.save(trainer.init(), store)
    gone = tmp_path / f"bucket/0000{part}-of-00002.safetensors"
    gone.unlink()
    with pytest.raises(CheckpointError, match=f"^{re.escape(store)}: the file {gone.name} is missing"):
        trainer.restore(store)


def test_a_store_that_the_processes_do_not_reach(mesh: Mesh, away: Path) -> None:
    to = f"file://{away}/bucket"  # each has its own there
    message = (
        f"run.restore: {to}/train is not the same folder for this program, on host .*rank 0, on host .*, has .*folder.*"
        "give a store \\(checkpoints.to=\\) that all nodes reach, and see that its package is installed there"
    )
    with pytest.raises(CheckpointError, match=message):
        train(Config(f"{away}/out", Checkpoints(to=to)), mesh)
