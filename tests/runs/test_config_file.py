from pathlib import Path
from typing import Any

import attrs
import pytest

import nrl
import nrl.config
from nrl.errors import ConfigError
from nrl.runs import config_file, run
from nrl.runs.reporting import report
from tests.runs.programs import Config, Resumable, walk


def test_another_configuration_is_refused(tmp_path: Path) -> None:
    cfg = Resumable(tmp_path)
    walk(cfg)
    before = (tmp_path / "config.yaml").read_text()
    with pytest.raises(
        ConfigError, match=r"holds a run with another lr \(lr: .* -> 0.25\), so its state and its streams"
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
