from pathlib import Path
from typing import Any

import attrs
import pytest

import nrl
import nrl.config
from examples import grpo
from nrl.errors import ConfigError
from nrl.run import config_file, run
from nrl.run.reporting import report
from tests.jsonlines import lines
from tests.run.programs import Config, Optimizer, Resumable, walk


def test_another_configuration_is_refused(tmp_path: Path) -> None:
    cfg = Resumable(tmp_path)
    walk(cfg)
    before = (tmp_path / "config.yaml").read_text()
    with pytest.raises(
        ConfigError, match=r"holds a run with another lr \(lr: .* -> 0.25\), so it would not be the run whose"
    ):
        walk(attrs.evolve(cfg, lr=0.25))
    assert (tmp_path / "config.yaml").read_text() == before
    assert not (tmp_path / "config.1.yaml").exists()
    (tmp_path / "config.yaml").unlink()
    walk(attrs.evolve(cfg, lr=0.25))


def test_the_folder_of_another_program(tmp_path: Path) -> None:
    walk(Resumable(tmp_path))
    with pytest.raises(ConfigError, match="holds a run with another .*lr"), run(Config(out=tmp_path)):
        pass


def test_another_configuration_is_told_by_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = {f"option{i}": "x" * 40 for i in range(40)} | {"deep": {"er": 1, "same": 2}}
    texts = [nrl.config.dump(Engine(each)) for each in (engine, engine | {"deep": {"er": "y" * 500, "same": 2}})]
    config_file.write(tmp_path, texts[0])
    config_file.write(tmp_path, texts[1])
    said = capsys.readouterr().out
    assert said == f"run: going on with another configuration: engine.deep.er: 1 -> {'y' * 80}...\n"
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match=r"with another engine.deep.er \(engine.deep.er: y+... -> 1\), so"):
        config_file.write(tmp_path, texts[0])


@attrs.frozen
class Engine:
    engine: dict[str, Any]


@attrs.frozen
class Placed:
    """The keys of examples that say where and in what parts a step is computed, and others."""

    cluster: str = "local"
    trainer: str | dict[str, Any] = "fsdp"
    dp: int = 1
    layout: nrl.Layout = nrl.Layout()
    critic_layout: nrl.Layout = nrl.Layout()
    samplers: int = 1
    verifiers: int = 0
    max_tokens: int = 16_384
    checkpointing: bool | str = False
    deadline: float = 3600.0
    optimizer: Optimizer = Optimizer()
    warmup_optimizer: Optimizer = Optimizer()
    sampler: str = "hf"
    dtype: str = "float32"
    prompts: int = 8
    seed: int = 0
    max_length: int = 64


MOVED: list[dict[str, Any]] = [
    {"cluster": "ray"},
    {"trainer": "megatron"},
    {"dp": 2, "layout": nrl.Layout(2)},
    {"layout": nrl.Layout(tp=2, pp=2)},
    {"critic_layout": nrl.Layout(4, shard=2)},
    {"samplers": 3},
    {"verifiers": 1},
    {"max_tokens": 4096},
    {"checkpointing": "selective"},
    {"deadline": 60.0},
    {"optimizer": Optimizer(0.1)},
    {"warmup_optimizer": Optimizer(0.1)},
]
COMPUTED: list[dict[str, Any]] = [
    {"sampler": "vllm"},
    {"dtype": "bfloat16"},
    {"prompts": 9},
    {"seed": 1},
    {"max_length": 65},
    {"trainer": {"lr": 0.2}},
]


def test_where_a_step_is_computed_may_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "checkpoints").mkdir()
    for number, changes in enumerate(MOVED, 1):
        old, new = nrl.config.dump(Placed()), nrl.config.dump(attrs.evolve(Placed(), **changes))
        config_file.replace(tmp_path / "config.yaml", old)
        config_file.write(tmp_path, new)
        config_file.check_same(new, old, "s3://bucket")
        assert (tmp_path / "config.yaml").read_text() == new
        assert (tmp_path / f"config.{number}.yaml").read_text() == old
        assert f"run: going on with another configuration: {next(iter(changes))}" in capsys.readouterr().out
    for changes in COMPUTED:
        before = Placed(trainer={"lr": 0.1})
        old, new = nrl.config.dump(before), nrl.config.dump(attrs.evolve(before, **changes))
        config_file.replace(tmp_path / "config.yaml", old)
        with pytest.raises(ConfigError, match=rf"holds a run with another {next(iter(changes))}"):
            config_file.write(tmp_path, new)
        with pytest.raises(ConfigError, match=rf"checkpoints of a run with another {next(iter(changes))}"):
            config_file.check_same(new, old, "s3://bucket")


def test_a_run_goes_on_in_another_layout(tmp_path: Path) -> None:
    """The example, by its options: as with one shard, to rounding."""
    shared = ["steps=4", "checkpoints.every=2", "prompts=4", "group_size=4", "warmup=2", "eval_data=null"]

    def losses(out: Path) -> list[float]:
        return [record["loss"] for record in lines(out / "metrics.jsonl")]

    def go(*options: str) -> None:
        grpo.main(nrl.config.load(grpo.Config, [*shared, *options]))

    go(f"out={tmp_path / 'whole'}")
    go(f"out={tmp_path / 'moved'}", "steps=2")
    go(f"out={tmp_path / 'moved'}", "dp=2", "max_tokens=64")
    assert losses(tmp_path / "moved") == pytest.approx(losses(tmp_path / "whole"), abs=1e-5)
    assert losses(tmp_path / "moved")[:2] == losses(tmp_path / "whole")[:2]
    assert (tmp_path / "moved" / "config.1.yaml").exists()


@pytest.mark.parametrize("content", [b"", b"\n", b"- 1\n", b"note: ***\n", b"lr: [0.1", b"\xff\xfe\x00", b"a: b: c"])
def test_a_configuration_that_cannot_be_read(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody knows what the checkpoints are of; where there are none, nothing is lost but a text."""
    cfg, damaged = Resumable(tmp_path / "run"), tmp_path / "run" / "config.yaml"
    walk(cfg)
    damaged.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"run: {damaged} is empty or damaged, .*another folder.* remove that file"):
        walk(cfg)
    assert damaged.read_bytes() == content
    assert report(tmp_path / "run").stat().st_size > 1000
    damaged.unlink()
    walk(cfg)
    new = tmp_path / "new"
    new.mkdir()
    (new / "config.yaml").write_bytes(content)
    with run(Config(out=new)):
        pass
    assert f"run: {new / 'config.yaml'} is empty or damaged; it is config.1.yaml now" in capsys.readouterr().out
    assert (new / "config.1.yaml").read_bytes() == content
    assert nrl.config.load(Config, [str(new / "config.yaml")]).steps == 3
