"""A run whose checkpoints are in S3, as a program with its own server of that API: `python -m tests.checkpoint.on_s3`.

`test_s3` starts it in an environment that has moto and s3fs, which nrl's own has not.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import nrl
from nrl import tiny
from nrl.backends import adamw, fsdp
from nrl.cli.export import Export
from nrl.cli.export import main as export
from nrl.errors import CheckpointError
from nrl.files import part_name, to_folder
from nrl.run.checkpoint import Checkpoints, begin_storing, checkpoints, load, newest
from tests.run.checkpoint.test_stores import Config, Stop, all_in, same, stops_after, train


@contextmanager
def server(address: str = "127.0.0.1") -> Iterator[None]:
    """A server with a bucket, which the environment of this process and its children names."""
    made: Any = import_module("moto.server").ThreadedMotoServer(ip_address=address, port=0, verbose=False)
    made.start()
    host, port = made.get_host_and_port()
    about = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
    os.environ |= {**about, "AWS_DEFAULT_REGION": "us-east-1"}
    import_module("boto3").client("s3").create_bucket(Bucket="bucket")
    yield
    made.stop()


def alone(folder: Path) -> None:
    """Resumed elsewhere, pruned, exported; a damaged part, and a wrong bucket."""
    whole = train(Config(f"{folder}/whole"))
    keep = Checkpoints(every=2, keep=2, to="s3://bucket/run")
    with pytest.raises(Stop):
        train(Config(f"{folder}/cut", keep), stops_after(4))
    assert [x.folder.name for x in checkpoints(f"{folder}/cut/checkpoints/train")] == ["000002", "000004"]
    assert same(train(Config(f"{folder}/new", keep)), whole)
    assert [x.folder.name for x in checkpoints("s3://bucket/run/train")] == ["000004", "000006"]
    assert {name.split("/")[1] for name in all_in("s3://bucket/run")} == {"000004", "000006"}
    exported = export(Export(f"{folder}/new"))
    assert {x.name: x.read_bytes() for x in exported.iterdir()} == {
        x.name: x.read_bytes() for x in (folder / "whole/own").iterdir()
    }

    damaged: Any = to_folder("s3://bucket/run/train/000006/policy/00001-of-00001.safetensors")
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    said = list[str]()
    found = newest("s3://bucket/run/train", said.append)
    assert found is not None
    assert (found.folder.name, len(said)) == ("000004", 1)
    assert same(train(Config(f"{folder}/again", keep)), whole)

    with pytest.raises(CheckpointError, match="cannot be written to from .*bucket does not exist"):
        train(Config(f"{folder}/wrong", Checkpoints(to="s3://nowhere/run")))


def on_ray(folder: Path) -> None:
    """Two processes, of which each writes its part and reads it."""
    with nrl.cluster("ray", deadline=300) as cluster:
        mesh = cluster.reserve(2).mesh(executable="system", name="trainer")
        trainer = fsdp.trainer(mesh, tiny.model(), adamw(lr=1e-2))
        state = trainer.init()
        made = begin_storing("s3://bucket/two", 0, {"policy": state}, Checkpoints(), {}).result()
        assert sorted(x.name for x in made.glob("policy/0*")) == [part_name(0, 2), part_name(1, 2)]
        assert newest("s3://bucket/two", readers={"policy": trainer}) is not None
        (again,) = load(made, policy=trainer)
        assert same(dict(again.params.tensors()), dict(state.params.tensors()))


def main(folder: Path, *parts: str) -> None:
    with server():
        for each in parts:
            {"alone": alone, "on_ray": on_ray}[each](folder)
    with pytest.raises(CheckpointError, match="cannot be written to from .*Could not connect"):
        train(Config(f"{folder}/gone", Checkpoints(to="s3://bucket/run")))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
