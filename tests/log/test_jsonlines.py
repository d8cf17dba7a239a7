import json
import math
from pathlib import Path

import pytest

from nrl.log import JsonLines


def test_one_object_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with JsonLines(path) as lines:
        lines.write({"step": 0, "loss": 1.5})
        lines.write({"step": 1, "loss": -2.0, "name": "ü"})
    assert [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] == [
        {"step": 0, "loss": 1.5},
        {"step": 1, "loss": -2.0, "name": "ü"},
    ]


def test_each_line_is_in_the_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with JsonLines(path) as lines:
        for step in range(3):
            lines.write({"step": step})
            assert path.read_text().count("\n") == step + 1


@pytest.mark.parametrize("undefined", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_null(tmp_path: Path, undefined: float) -> None:
    path = tmp_path / "metrics.jsonl"
    with JsonLines(path) as lines:
        lines.write({"loss": undefined, "step": 0})
    assert path.read_text() == '{"loss": null, "step": 0}\n'


@pytest.mark.parametrize("undefined", [math.nan, math.inf, -math.inf])
def test_nor_is_it_inside_of_lists_and_objects(tmp_path: Path, undefined: float) -> None:
    path = tmp_path / "metrics.jsonl"
    with JsonLines(path) as lines:
        lines.write({"rewards": [1.0, undefined], "by": {"task": undefined}})
    assert path.read_text() == '{"rewards": [1.0, null], "by": {"task": null}}\n'


def test_a_file_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in range(2):
        with JsonLines(path) as lines:
            lines.write({"step": step})
    assert path.read_text() == '{"step": 0}\n{"step": 1}\n'


def test_what_was_written_stays_as_it_was(tmp_path: Path) -> None:
    record = {"loss": math.nan}
    with JsonLines(tmp_path / "metrics.jsonl") as lines:
        lines.write(record)
    assert math.isnan(record["loss"])


def test_no_secret_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", 'quo"ted\\and ünusual')
    path = tmp_path / "rollouts.jsonl"
    with JsonLines(path) as lines:
        lines.write({"prompt": 'the key is quo"ted\\and ünusual.', "tokens": ["a quo", '"ted\\and', " ünusual", "!"]})
    assert json.loads(path.read_text()) == {"prompt": "the key is ***.", "tokens": ["a ***", "", "", "!"]}
