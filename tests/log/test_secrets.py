"""A secret in a prompt, in an answer and in the configuration, and every file that a run leaves behind."""

from pathlib import Path

import attrs
import pytest
import torch

import nrl
from nrl import tiny
from nrl.reduce import Mean
from nrl.stream import counting

SECRET = "correct horse battery"


@attrs.frozen
class Config:
    out: Path
    steps: int = 2
    note: str = f"it is {SECRET}!"
    sinks: tuple[str, ...] = ("tensorboard",)  # the others are given the same masked configuration


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
