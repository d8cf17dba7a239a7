"""A node without the run's disk: its part of a model would be written where nobody looks, and a run would not know."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

import nrl
from nrl import tiny
from nrl.algos import sft_loss
from nrl.backends import Model, adamw, fsdp
from nrl.batch import Batch
from nrl.data import counting
from nrl.errors import CheckpointError, ModelError
from nrl.run import checkpoint
from nrl.run.checkpoint import Checkpoints
from tests.children import server
from tests.processes import settled

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]

FAR = "far-away"  # the host without the disk

START = f"""
set -eu
mount --make-rprivate /
mount -t tmpfs tmpfs "$1"
hostname {FAR}
shift
exec "$@" >/dev/null
"""


@contextmanager
def two_nodes(private: Path) -> Iterator[str]:
    """A cluster of two nodes with a slot each, of which the other one has an empty disk of its own at a folder."""
    from ray.cluster_utils import Cluster

    alone = ["unshare", "--mount", "--uts", "sh", "-c", START, "sh", str(private)]
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("a node with a disk of its own needs root: `unshare --mount --uts`, and mount and hostname within")
    cluster = Cluster(initialize_head=True, connect=False, head_node_args={"num_cpus": 1})
    ray = [str(Path(sys.executable).with_name("ray")), "start", f"--address={cluster.address}", "--num-cpus=1"]
    other = subprocess.Popen([*alone, *ray, "--block"])
    try:
        yield cluster.address
    finally:
        other.terminate()
        other.wait(60)
        cluster.shutdown()


def run_on(address: str, program: Callable[..., Any], *args: Any) -> list[Any]:
    """What ``program(address, a function that says something, *args)`` says in a process of its own."""
    said = Path(args[0]) / "said.jsonl"
    said.touch()
    child = server().Process(target=_main, args=(program, address, said, args))
    child.start()
    child.join(500)
    assert child.exitcode == 0, said.read_text()
    return [json.loads(line) for line in said.read_text().splitlines()]


def _main(program: Callable[..., Any], address: str, said: Path, args: tuple[Any, ...]) -> None:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    with said.open("a") as file:
        program(address, lambda word: print(json.dumps(word), file=file, flush=True), *args)


@attrs.frozen
class Config:
    out: str
    steps: int = 3
    checkpoints: Checkpoints = Checkpoints(every=2)


def rows(index: int) -> Batch:
    ids = torch.randint(3, 20, (4, 6), generator=torch.Generator().manual_seed(index))
    mask = torch.ones(4, 6, dtype=torch.bool)
    return Batch({"input_ids": ids, "attention_mask": mask, "loss_mask": mask}, batch_size=[4])


def refusal(call: Callable[..., Any], *args: Any, **named: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        call(*args, **named)
    return str(caught.value)


def tries_everything(address: str, say: Callable[[Any], None], shared: Path, private: Path) -> None:
    """A program whose trainer has a process on each node: all ways to write and read, on the one disk and the other."""
    with nrl.cluster(address, deadline=200) as cluster:
        assert not settled(lambda: sum(alive(cluster)) < 2, 60)
        slots = cluster.reserve(2, strategy="STRICT_SPREAD", deadline=60)
        trainer = fsdp.trainer(slots.mesh(dp=2, executable="system", name="policy"), tiny.model(), adamw(lr=1e-3))
        state, _ = trainer.train_step(sft_loss)(trainer.init(), rows(0))
        whole = checkpoint.save(shared / "000001", 0, {"policy": state})
        checkpoint.verify(whole.folder, {"policy": trainer})
        say(sorted(path.name for path in (whole.folder / "policy").iterdir()))

        with nrl.run(Config(str(private / "restores"))) as run:
            say(refusal(run.restore, policy=trainer, stream=counting()))
        steps = []
        with nrl.run(Config(str(private / "saves"))) as run:
            for i, _ in run.steps(counting(rows)):
                steps.append(i)
                say(refusal(run.save, i, policy=state))
                break
        say(steps)
        say(refusal(checkpoint.save, private / "000001", 0, {"policy": state}))
        say([path.name for path in private.iterdir() if path.name.endswith("000001")])
        shutil.copytree(str(whole.folder), private / "copied")
        say(refusal(checkpoint.load, private / "copied", policy=trainer))
        (again,) = checkpoint.load(whole.folder, policy=trainer)
        say(again.step)
        del trainer, state, again

        found = []
        for number in range(2):
            mesh = slots[number : number + 1].mesh(executable="system", name=f"alone{number}")
            alone = fsdp.trainer(mesh, tiny.model(), adamw(lr=1e-3))
            alone.export(alone.load(), private / f"model{number}")
            files = sorted((private / f"model{number}").iterdir())
            found.append([(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files])
        say(found)
        missing = []
        for number in range(2):  # only one of the two has the model
            mesh = slots[number : number + 1].mesh(executable="system", name=f"reader{number}")
            try:
                reader = fsdp.trainer(mesh, Model(str(private / "model0")), adamw(lr=1e-3))
                reader.train_step(sft_loss)(reader.init(), rows(0))[1].result()
            except ModelError as error:
                missing.append(str(error))
        say(missing)


def alive(cluster: Any) -> list[bool]:
    import ray

    return [node["Alive"] for node in ray.nodes()]


def test_a_node_without_the_disk_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    shared, private = tmp_path / "shared", tmp_path / "private"
    shared.mkdir()
    private.mkdir()
    with two_nodes(private) as address:
        written, restored, saved, steps, raw, left, halved, step, exports, missing = run_on(
            address, tries_everything, shared, private
        )
    assert written == ["00001-of-00002.safetensors", "00002-of-00002.safetensors", "model"]
    for who, message in (("run.restore", restored), ("run.save", saved), ("save", raw)):
        assert message.startswith(f"{who}: {private}")
        assert f", on host {FAR}, has " in message
        assert "give a folder (out=) on a disk that all nodes share by the same path, or a store that they" in message
    assert steps == [0]  # the first one, and not that at which a checkpoint is due
    assert left == []
    assert f"{private}/copied/policy: the file 0000" in halved
    assert f"on host {FAR} sees it; put the checkpoint on a disk that all nodes share" in halved
    assert step == 1
    near, far = exports  # that of the other host is written here, too
    assert near == far
    assert len(near) > 1
    assert len(missing) == 1
    assert f"model0'): there is no such folder on host {FAR}; give a folder" in missing[0]
