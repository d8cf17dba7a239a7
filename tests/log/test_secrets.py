"""A secret in a prompt, in an answer and in the configuration, and every file that a run leaves behind."""

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import yaml

import nrl
from nrl import tiny
from nrl.batch.metrics import Mean
from nrl.cli.cli import main
from nrl.data import counting

SECRET = "correct horse battery"


@attrs.frozen
class Config:
    out: Path
    steps: int = 2
    note: str = f"it is {SECRET}!"
    sinks: tuple[str, ...] = ("tensorboard",)  # the others are given the same masked configuration
    engine: dict[str, Any] = attrs.field(factory=dict)


def test_no_file_has_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", SECRET)
    tokenizer = tiny.tokenizer()
    prompt, response = f"say {SECRET}: ", f"{SECRET}!"
    ids = torch.tensor([tokenizer.encode(prompt + response)])
    mask = torch.arange(ids.shape[1])[None] >= len(prompt)
    columns = {"input_ids": ids, "loss_mask": mask, "rewards": torch.ones(1), "advantages": mask.float()}
    rows = counting(lambda index: nrl.Batch(columns, batch_size=[1]))
    one = Mean(torch.tensor(1.0), torch.tensor(1.0))
    with nrl.run(Config(tmp_path)) as run:
        for i, batch in run.steps(nrl.batched(rows, 1)):
            run.log(i, {"loss": one, f"env/{SECRET}": one}, samples=nrl.samples(batch, tokenizer))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"metrics.jsonl", "rollouts.jsonl", "report.html"} <= {path.name for path in files}
    assert any(path.name.startswith("events.out.tfevents") for path in files)
    assert "say ***: " in (tmp_path / "rollouts.jsonl").read_text()
    assert not [path.name for path in files if SECRET.encode() in path.read_bytes()]


@attrs.frozen
class Service:
    url: str
    password: str


@attrs.frozen
class Nested(Config):
    token: str = ""
    services: tuple[Service, ...] = ()
    pad_token: str = "<pad>"


def test_a_secret_by_its_key_is_in_no_file_and_the_run_goes_on_with_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The configuration of what is resumed reads as it was written: a bare mask would be an alias of YAML."""
    secrets = ("pw1", "pw-2", "pw~3")
    for steps, secret in enumerate(secrets, 1):
        monkeypatch.setenv("MY_API_KEY", f"it is {secret}")
        url = f"http://me:{secret}@gpu7"
        servers = [{"url": url, "hf_token": secret, "headers": {"Authorization": secret}}]
        engine = {"api_key": secret, "servers": servers, "max_tokens": 3}
        asked = Nested(
            tmp_path, steps, f"it is {secret}", engine=engine, token=secret, services=(Service(url, secret),)
        )
        with nrl.run(asked) as run:
            (stream,) = (run.restore(stream=counting()),)
            for i, _ in run.steps(nrl.batched(stream, 1, collate=lambda _: nrl.Batch({}, batch_size=[1]))):
                run.log(i, samples={"password": secret, "rows": []})
                run.save(i, stream=stream)
    assert main(["report", str(tmp_path)]) == 0
    written = yaml.safe_load((tmp_path / "config.yaml").read_text())
    url = "http://***@gpu7"
    servers = [{"url": url, "hf_token": "***", "headers": {"Authorization": "***"}}]
    assert written["engine"] == {"api_key": "***", "servers": servers, "max_tokens": 3}
    assert written["services"] == [{"url": url, "password": "***"}]
    assert (written["note"], written["token"], written["pad_token"]) == ("***", "***", "<pad>")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"metrics.jsonl", "rollouts.jsonl", "report.html", "config.1.yaml"} <= {path.name for path in files}
    assert any(path.name.startswith("events.out.tfevents") for path in files)
    assert not [path for path in files for secret in secrets if secret.encode() in path.read_bytes()]
    assert not [secret for secret in secrets if secret in "".join(capfd.readouterr())]
