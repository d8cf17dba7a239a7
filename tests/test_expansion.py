"""Environment variables and home folders in the texts of a configuration."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from nrl.config import dump, load
from nrl.errors import ConfigError


@attrs.frozen
class Inner:
    folder: Path = Path("x")
    texts: tuple[str, ...] = ()


@attrs.frozen
class Config:
    out: str | None = None
    data: str | dict[str, Any] | None = None
    steps: int = 3
    inner: Inner = Inner()


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/h/me")
    monkeypatch.setenv("DATA", "/data")
    monkeypatch.setenv("STEPS", "7")
    monkeypatch.delenv("UNSET", raising=False)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["out=~/run"], Config(out="/h/me/run")),
        (["out=~"], Config(out=None)),
        (["out=${oc.env:DATA}/run"], Config(out="/data/run")),
        (["out=${oc.env:UNSET,runs}/a"], Config(out="runs/a")),
        (["out=${oc.env:UNSET,~/runs}/a"], Config(out="/h/me/runs/a")),
        (["out=${oc.env:UNSET,${oc.env:DATA}}/a"], Config(out="/data/a")),
        (["out=${oc.env:UNSET,${oc.env:NOR_THIS,x}}"], Config(out="x")),
        (["out=${oc.env:DATA,${oc.env:UNSET}}"], Config(out="/data")),
        (["out=./~/a"], Config(out="./~/a")),
        (["steps=${oc.env:STEPS}"], Config(steps=7)),
        (["steps=${oc.env:UNSET,${oc.env:STEPS}}"], Config(steps=7)),
        (["steps=${oc.env:UNSET, 9}"], Config(steps=9)),
        (["inner.folder=~/deep"], Config(inner=Inner(folder=Path("/h/me/deep")))),
        (["inner.texts=[~/a, b, '${oc.env:DATA}']"], Config(inner=Inner(texts=("/h/me/a", "b", "/data")))),
        (["data={number: ~/a.jsonl, exact: {source: '${oc.env:DATA}/b'}}"],
         Config(data={"number": "/h/me/a.jsonl", "exact": {"source": "/data/b"}})),
        (["data.number=~/a.jsonl"], Config(data={"number": "/h/me/a.jsonl"})),
        (["out=runs/~/a"], Config(out="runs/~/a")),
        (["out=~/a b"], Config(out="/h/me/a b")),
        (["data=https://x.example/~me/a"], Config(data="https://x.example/~me/a")),
        (["data=a $DATA ${b} costs ~ 3"], Config(data="a $DATA ${b} costs ~ 3")),
    ],
)  # fmt: skip
def test_texts_on_the_command_line_and_in_files_mean_the_same(
    args: Sequence[str], expected: Config, tmp_path: Path
) -> None:
    assert load(Config, args) == expected
    if args[0] != "out=~" and "[" not in args[0] and "{n" not in args[0]:  # which are YAML already
        key, _, text = args[0].partition("=")
        lines = [f"{'  ' * depth}{part}:" for depth, part in enumerate(key.split("."))]
        (tmp_path / "a.yaml").write_text("\n".join(lines) + f' "{text}"\n')
        assert load(Config, [str(tmp_path / "a.yaml")]) == expected
    (tmp_path / "dumped.yaml").write_text(dump(expected))
    assert load(Config, [str(tmp_path / "dumped.yaml")]) == expected


def test_a_variable_that_is_not_set_is_named_with_its_key_and_place(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text('inner:\n  texts: ["a", "${oc.env:UNSET}/b"]\n')
    with pytest.raises(ConfigError) as error:
        load(Config, [str(tmp_path / "a.yaml"), "out=${oc.env:UNSET}"])
    said = str(error.value)
    assert "load(Config): 2 problems" in said
    assert "inner.texts.1: ${oc.env:UNSET}: there is no environment variable UNSET; set it; from" in said
    assert "a.yaml, line 2" in said
    assert "out: ${oc.env:UNSET}: there is no environment variable UNSET; set it; from the command line" in said
    assert "UNSET" not in os.environ


def test_a_variable_of_the_wrong_type_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="steps: expected int, found '/data'"):
        load(Config, ["steps=${oc.env:DATA}"])
