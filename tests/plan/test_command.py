"""The command `nrl plan`."""

import json
from pathlib import Path

import pytest

from nrl.command.cli import main
from tests.plan.test_gpus import TINY


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"tie_word_embeddings": True}))
    return str(tmp_path)


def test_closed_forms_alone(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", folder, "driven=false", "dp=2"]) == 0
    said = capsys.readouterr().out
    assert "leave out activations: a model of 0.00e9 parameters" in said
    assert [line.split()[0] for line in said.splitlines()[1:]] == ["parameters", "gradients", "moments"]


@pytest.mark.timeout(300)
def test_of_one_process(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", folder, "width=64", "gpu=a100", "loss=sft"]) == 0
    said = capsys.readouterr().out
    for part in ("peak", "with 6 GiB more it fits in 80 GB", "TFLOP bfloat16", "2 calls varlen", "wait or copy"):
        assert part in said
    assert "estimate, not measured:" in said
    assert "from 312 TFLOP/s bfloat16, 19.5 float32, 2.039 TB/s of memory, 300 GB/s of NVLink" in said
    assert "collective" not in said


def test_no_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tmp_path)]) == 2
    assert f"plan: model={tmp_path} has no config.json that can be read" in capsys.readouterr().err
