"""Sinks, each for real: written, read back with its own reader, continued, failed."""

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nrl.errors import ConfigError
from nrl.log import open_sinks, sinks

CONFIG: Mapping[str, Any] = {"steps": 3, "optimizer": {"lr": 0.5}, "note": "hf_" + "a" * 34}


def test_an_unknown_sink(tmp_path: Path) -> None:
    message = "open_sinks: there is no sink 'wandbb'; the sinks are wandb, tensorboard, mlflow"
    with pytest.raises(ConfigError, match=message), open_sinks(["wandbb"], tmp_path, {}, name="x"):
        pass


def test_a_package_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    message = (
        r"open_sinks: 'tensorboard' needs a package that is not installed .*; install it with "
        r"`uv pip install 'nrl-torch\[tensorboard\]'`"
    )
    with pytest.raises(ConfigError, match=message), open_sinks(["tensorboard"], tmp_path, {}, name="x"):
        pass


def test_a_sink_that_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://host")
    with (
        pytest.raises(ConfigError, match="open_sinks: 'mlflow' could not start: "),
        open_sinks(["mlflow"], tmp_path, {}, name="x"),
    ):
        pass


def test_a_sink_that_fails_is_said_once_and_the_others_go_on(tmp_path: Path) -> None:
    seen: list[int] = []

    def broken(loop: str, step: int, numbers: Mapping[str, float]) -> None:
        raise ConnectionError("gone")

    both = sinks._Sinks({"broken": broken, "whole": lambda loop, step, numbers: seen.append(step)})
    with pytest.warns(UserWarning, match=r"run.log: 'broken' did not take step 0 \(ConnectionError: gone\)") as warned:
        both.write("train", 0, {})
    both.write("train", 1, {})  # a second warning would be an error here
    assert len(warned) == 1
    assert seen == [0, 1]


def write(kind: str, out: Path, steps: range) -> None:
    with open_sinks([kind], out, CONFIG, name="mine") as sink:
        for step in steps:
            sink.write("warmup", step, {"step": step, "loss": 10.0 + step})
            sink.write("train", step, {"step": step, "loss": float(step), "eval/kl": math.nan})


def test_tensorboard_and_its_steps_that_are_written_again(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write("tensorboard", tmp_path, range(4))
    write("tensorboard", tmp_path, range(2, 5))  # as after a kill at step 3 and a checkpoint after step 1
    for loop, first in (("train", 0.0), ("warmup", 10.0)):
        found = EventAccumulator(str(tmp_path / "tensorboard" / loop))
        found.Reload()
        assert found.Tags()["scalars"] == [f"{loop}/loss"]
        values = [(event.step, event.value) for event in found.Scalars(f"{loop}/loss")]
        assert values == [(step, first + step) for step in range(5)]
    text = found.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "| optimizer.lr | 0.5 |" in text
    assert "hf_" not in text


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of MLflow's use of SQLAlchemy
def test_mlflow_and_its_run_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    write("mlflow", tmp_path, range(2))
    write("mlflow", tmp_path, range(2, 4))
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("nrl")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "mine"
    assert run.data.params == {"steps": "3", "optimizer.lr": "0.5", "note": "***"}
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(point.step, point.value) for point in history] == [(step, float(step)) for step in range(4)]
    with pytest.raises(ZeroDivisionError), open_sinks(["mlflow"], tmp_path, CONFIG, name="mine"):
        raise ZeroDivisionError
    assert client.get_run(run.info.run_id).info.status == "FAILED"


PROGRAM = """
import sys
from pathlib import Path
from tests.log.test_sinks import write
write("wandb", Path(sys.argv[1]), range(3))
write("wandb", Path(sys.argv[1]), range(2, 4))
"""


def test_wandb_offline_and_its_run_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, since wandb leaves a service behind in the one that it is used in."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    subprocess.run(command, check=True, timeout=200, cwd=Path(__file__).parents[2])
    first, second = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    number = (tmp_path / "wandb-run").read_text()
    assert first.name == second.name == f"run-{number}.wandb"
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if CONFIG["note"].encode() in path.read_bytes()]
    for file, steps in ((first, range(3)), (second, range(2, 4))):
        config, history = read_wandb(file)
        assert config["optimizer.lr"] == "0.5"
        assert config["note"] == "***"
        assert [(row["train/step"], row["train/loss"]) for row in history if "train/step" in row] == [
            (step, float(step)) for step in steps
        ]
        assert [row["warmup/loss"] for row in history if "warmup/loss" in row] == [10.0 + step for step in steps]
        assert not any("eval/kl" in key for row in history for key in row)


def read_wandb(file: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What wandb's own files hold, as `wandb sync` would read them."""
    from wandb.proto import wandb_internal_pb2  # type: ignore[attr-defined,unused-ignore]

    config: dict[str, Any] = {}
    history = []
    for data in records(file.read_bytes()):
        record: Any = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
        record.ParseFromString(data)
        if record.HasField("history"):
            items = record.history.item
            history.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
        for item in record.run.config.update:
            config[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
    return config, history


def records(content: bytes) -> list[bytes]:
    """LevelDB's log format after 7 bytes: blocks of 32 KiB with parts of records, each after a header of 7 bytes."""
    found, part, at = [], b"", 7
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        part += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found.append(part)
            part = b""
    return found
