"""Secrets in nested keys, in a start that succeeds, one that resumes with others, and every file that is left."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.slow

PROGRAM = """
from typing import Any

import attrs

import nrl
from nrl import data, tiny
from nrl.algos import sft_loss
from nrl.backends import adamw, fsdp
from nrl.checkpoint import Checkpoints


@attrs.frozen
class Service:
    url: str
    password: str


@attrs.frozen
class Config:
    out: str
    steps: int = 2
    token: str = ""
    engine: dict[str, Any] = attrs.field(factory=dict)
    services: tuple[Service, ...] = ()
    pad_token: str = "<pad>"
    checkpoints: Checkpoints = Checkpoints(every=1)
    sinks: tuple[str, ...] = ("tensorboard", "wandb")


def main(cfg):
    with nrl.run(cfg) as run, nrl.cluster("local") as cluster:
        trainer = fsdp.trainer(cluster.reserve(1), tiny.model(), adamw(lr=1e-3))
        step = trainer.train_step(sft_loss)
        state, stream = run.restore(policy=trainer, stream=tiny.sums(4, 0))
        for i, batch in run.steps(stream):
            state, metrics = step(state, batch)
            run.log(i, metrics, samples={"password": cfg.engine["api_key"], "rows": []})
            run.save(i, policy=state, stream=stream)
        trainer.export(state.params, run.out / "model")


nrl.launch(main, Config)
"""


def test_no_file_of_a_run_has_one_and_it_goes_on_with_others(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    secrets = []
    for steps in (1, 2, 3):
        new = [f"s3cr-{steps}-{name}" for name in "abcd"]
        secrets += new
        (tmp_path / "asked.yaml").write_text(
            yaml.safe_dump(
                {
                    "out": "run",
                    "steps": steps,
                    "token": new[0],
                    "engine": {"api_key": new[1], "servers": [{"headers": {"Authorization": new[2]}}], "max_tokens": 3},
                    "services": [{"url": f"http://me:{new[3]}@gpu7:80/v1", "password": new[3]}],
                }
            )
        )
        environment = os.environ | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
        done = subprocess.run(
            [sys.executable, "program.py", "asked.yaml"],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert not [secret for secret in secrets if secret in done.stdout + done.stderr]
        assert steps == 1 or f"train: {steps - 1} of {steps - 1} steps were done" in done.stdout
    subprocess.run([sys.executable, "-m", "nrl", "report", "run"], cwd=tmp_path, check=True, timeout=120)
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"metrics.jsonl", "rollouts.jsonl", "report.html", "config.1.yaml"} <= {path.name for path in files}
    assert any("wandb" in path.parts for path in files)
    assert any("tensorboard" in path.parts for path in files)
    assert not [str(path) for path in files for secret in secrets if secret.encode() in path.read_bytes()]
    asked = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (asked["token"], asked["engine"]["max_tokens"], asked["pad_token"]) == ("***", 3, "<pad>")
    assert asked["services"] == [{"url": "http://***@gpu7:80/v1", "password": "***"}]
