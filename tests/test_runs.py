import json
import math
import re
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

import nrl.config
from nrl.batch import Batch
from nrl.errors import ConfigError
from nrl.reduce import Max, Mean, Metrics, Sum
from nrl.runs import Run, run
from nrl.runtime import done
from nrl.stream import Source, counting

ALWAYS = {"step", "loss", "grad_norm", "tokens_per_second", "time/rollout", "time/train", "time/total"}


@attrs.frozen
class Optimizer:
    lr: float = 1e-3


@attrs.frozen
class Config:
    steps: int = 3
    out: Path | None = None
    optimizer: Optimizer = Optimizer()


@pytest.fixture(autouse=True)
def not_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


def batches() -> Source[Batch]:
    return counting(lambda index: Batch({"rewards": torch.tensor([float(index)])}, batch_size=[1]))


def mean(total: float, weight: float = 1.0) -> Mean:
    return Mean(torch.tensor(total), torch.tensor(weight))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def names(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir())


# --- the folder


def test_a_run_writes_down_what_was_asked_for(tmp_path: Path) -> None:
    cfg = Config(steps=7, out=tmp_path / "deep" / "run")
    with run(cfg) as entered:
        assert isinstance(entered, Run)
        assert entered.total == 7
        assert entered.out == tmp_path / "deep" / "run"
        written = entered.out / "config.yaml"
        assert nrl.config.load(Config, [str(written)]) == cfg
    assert names(tmp_path / "deep" / "run") == ["config.yaml"]


def test_the_folder_may_be_there_and_hold_other_things(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with run(Config(out=tmp_path)):
        pass
    assert names(tmp_path) == ["config.yaml", "notes.txt"]
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_every_run_without_a_folder_has_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen = []
    for _ in range(3):
        with run(Config()) as entered:
            seen.append(entered.out.resolve())
    assert len(set(seen)) == 3
    assert all(out.parent == (tmp_path / "runs").resolve() for out in seen)
    assert all(re.fullmatch(r"\d{8}-\d{6}(-\d+)?", out.name) for out in seen)


def test_no_new_folder_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(*_: object, **__: object) -> None:
        raise FileExistsError

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "mkdir", taken)
    with pytest.raises(ConfigError, match="run: no new folder could be made under .*runs"):  # noqa: SIM117
        with run(Config()):
            pass


def test_a_config_needs_no_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @attrs.frozen
    class Small:
        steps: int = 1

    monkeypatch.chdir(tmp_path)
    with run(Small()) as entered:
        assert entered.out.parent.name == "runs"


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(ConfigError, match=r"run: out=.*file is a file; give a folder, or leave it out"):  # noqa: SIM117
        with run(Config(out=path)):
            pass
    assert path.read_text() == "mine"


def test_a_folder_that_holds_a_run(tmp_path: Path) -> None:
    with run(Config(out=tmp_path, steps=1)):
        pass
    (tmp_path / "metrics.jsonl").write_text("{}\n")  # a start that failed before its first step leaves none
    before = (tmp_path / "config.yaml").read_text()
    message = r"run: out=.* holds a run already; give another folder, or remove that one"
    with pytest.raises(ConfigError, match=message):  # noqa: SIM117
        with run(Config(out=tmp_path, steps=2)):
            pass
    assert (tmp_path / "config.yaml").read_text() == before


def test_a_config_that_cannot_be_written_leaves_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dump: expected an instance of an attrs class"):  # noqa: SIM117
        with run({"out": tmp_path / "run"}):
            pass

    @attrs.frozen
    class Odd:
        out: Path
        what: object

    odd = Odd(tmp_path / "odd", object())
    with pytest.raises(ConfigError, match="dump"):  # noqa: SIM117
        with run(odd):
            pass
    assert not (tmp_path / "odd" / "config.yaml").exists()


def test_a_run_says_where_its_metrics_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with run(Config(out=tmp_path)):
        pass
    assert re.fullmatch(rf"done in 0:0\d; metrics are in {re.escape(str(tmp_path))}\n", capsys.readouterr().out)


# --- the steps


def test_a_step_pulls_one_batch(tmp_path: Path) -> None:
    stream = batches()
    with run(Config(out=tmp_path)) as entered:
        for i, batch in entered.steps(stream):
            assert batch["rewards"].tolist() == [i]
            assert stream.state() == {"cursor": i + 1}
    assert stream.state() == {"cursor": 3}


def test_a_loop_may_say_how_many_steps_it_has(tmp_path: Path) -> None:
    with run(Config(out=tmp_path, steps=9)) as entered:
        assert [i for i, _ in entered.steps(batches(), 2)] == [0, 1]
        assert [i for i, _ in entered.steps(batches(), 0)] == []


# --- metrics.jsonl


def test_one_flushed_line_a_step(tmp_path: Path) -> None:
    with run(Config(out=tmp_path)) as entered:
        for i, _ in entered.steps(batches()):
            entered.log(i, {"loss": mean(i + 1.0, 2.0), "grad_norm": Max(torch.tensor(0.5))})
            assert len(read(tmp_path / "metrics.jsonl")) == i + 1
    lines = read(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert [line["loss"] for line in lines] == [0.5, 1.0, 1.5]
    assert all(line.keys() == ALWAYS and line["grad_norm"] == 0.5 for line in lines)
    assert all(isinstance(line["step"], int) for line in lines)


def test_a_line_has_all_metrics_and_what_it_took(tmp_path: Path) -> None:
    with run(Config(out=tmp_path, steps=1)) as entered:
        for i, _ in entered.steps(batches()):
            logged = entered.log(i, {"tokens": Sum(torch.tensor(50)), "env/score": mean(3.0)})
    (line,) = read(tmp_path / "metrics.jsonl")
    assert line.keys() == {*ALWAYS, "tokens", "env/score"}
    assert line == {key: None if math.isnan(value) else value for key, value in logged.items()}
    assert line["env/score"] == 3
    assert line["time/rollout"] >= 0
    assert line["time/train"] >= 0
    assert line["time/rollout"] + line["time/train"] == pytest.approx(line["time/total"])
    assert line["tokens_per_second"] == pytest.approx(50 / line["time/total"])


def test_what_was_not_measured_is_null(tmp_path: Path) -> None:
    with run(Config(out=tmp_path, steps=1)) as entered:
        for i, _ in entered.steps(batches()):
            logged = entered.log(i, {"kl": mean(0.0, 0.0), "ratio": Max(torch.tensor(-math.inf))})
            assert all(math.isnan(logged[key]) for key in ("loss", "grad_norm", "kl"))
    (line,) = read(tmp_path / "metrics.jsonl")
    assert (line["loss"], line["grad_norm"], line["kl"], line["ratio"]) == (None, None, None, None)
    assert line["tokens_per_second"] == 0


def test_futures_are_waited_for_and_several_metrics_are_merged(tmp_path: Path) -> None:
    of_the_step: Metrics = {"loss": mean(1.0), "both": Sum(torch.tensor(1.0))}
    with run(Config(out=tmp_path, steps=1)) as entered:
        for i, _ in entered.steps(batches()):
            entered.log(i, done(of_the_step), {"reward": mean(3.0, 4.0), "both": Sum(torch.tensor(2.0))})
    (line,) = read(tmp_path / "metrics.jsonl")
    assert (line["loss"], line["reward"], line["both"]) == (1.0, 0.75, 3.0)
    assert of_the_step.keys() == {"loss", "both"}


def test_other_loops_have_files_of_their_own(tmp_path: Path) -> None:
    with run(Config(out=tmp_path, steps=2)) as entered:
        for i, _ in entered.steps(batches(), 3, name="warmup"):
            entered.log(i, {"loss": mean(10.0)})
        assert names(tmp_path) == ["config.yaml", "warmup.jsonl"]
        for i, _ in entered.steps(batches()):
            entered.log(i, {"loss": mean(20.0)})
    assert [(line["step"], line["loss"]) for line in read(tmp_path / "warmup.jsonl")] == [(0, 10), (1, 10), (2, 10)]
    assert [(line["step"], line["loss"]) for line in read(tmp_path / "metrics.jsonl")] == [(0, 20), (1, 20)]


def test_a_loop_within_a_step_leaves_that_step_its_own_file(tmp_path: Path) -> None:
    with run(Config(out=tmp_path, steps=2)) as entered:
        for i, _ in entered.steps(batches()):
            for j, _ in entered.steps(batches(), 3, name="eval"):
                entered.log(j, {"loss": mean(10.0)})
            entered.log(i, {"loss": mean(20.0)})
    assert [(line["step"], line["loss"]) for line in read(tmp_path / "metrics.jsonl")] == [(0, 20), (1, 20)]
    assert [(line["step"], line["loss"]) for line in read(tmp_path / "eval.jsonl")] == [(0, 10), (1, 10), (2, 10)] * 2


def test_what_was_logged_before_an_error_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def program() -> None:
        with run(Config(out=tmp_path)) as entered:
            for i, _ in entered.steps(batches()):
                entered.log(i, {"loss": mean(1.0)})
                if i == 1:
                    raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        program()
    assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == [0, 1]
    assert "done in" not in capsys.readouterr().out


# --- progress


def test_progress_is_shown_in_plain_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with run(Config(out=tmp_path, steps=2)) as entered:
        for i, _ in entered.steps(batches(), 1, name="warmup"):
            entered.log(i, {"loss": mean(2.0)})
        for i, _ in entered.steps(batches()):
            entered.log(i, {"loss": mean(0.5), "reward": mean(0.25), "mine": mean(9.0), "lag": mean(1.0)})
    warmup, first, last, _ = capsys.readouterr().out.splitlines()
    assert warmup.startswith("warmup 1/1 | loss 2 | ")
    assert first.startswith("train 1/2 | reward 0.25 | loss 0.5 | ")
    assert last.startswith("train 2/2 | reward 0.25 | loss 0.5 | ")
    assert " | lag 1 | " in first
    assert "mine" not in first


def test_trouble_is_shown_only_where_there_is_some(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts: Metrics = {"invalid": Sum(torch.tensor(0)), "skipped": Sum(torch.tensor(0)), "lag": mean(0.0)}
    with run(Config(out=tmp_path, steps=2)) as entered:
        for i, _ in entered.steps(batches()):
            entered.log(i, {**counts, "invalid": Sum(torch.tensor(3 * i))})
    first, last, _ = capsys.readouterr().out.splitlines()
    assert not any(word in first for word in ("invalid", "skipped", "lag"))
    assert "invalid 3" in last
    assert "skipped" not in last
    assert all(line.keys() >= {"invalid", "skipped", "lag"} for line in read(tmp_path / "metrics.jsonl"))
