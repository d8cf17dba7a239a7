import contextlib
import math
import re
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

import nrl
import nrl.config
from nrl import ahead
from nrl.batch.metrics import Max, Metrics, Sum
from nrl.data import counting
from nrl.errors import ArgumentError, CheckpointError, ConfigError
from nrl.run import checkpoint, run
from nrl.run.checkpoint import Checkpoints
from nrl.runtime import done
from nrl.runtime.trace import measured, timeline
from tests.children import child
from tests.disks import small_disk_at
from tests.jsonlines import lines, untimed
from tests.run.programs import Config, Resumable, batches, mean, names, walk

ALWAYS = {"step", "loss", "grad_norm", "tokens_per_second", "time/rollout", "time/train", "time/total"}


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
            assert len(lines(tmp_path / "metrics.jsonl")) == i + 1
    found = lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in found] == [0, 1, 2]
    assert [line["loss"] for line in found] == [0.5, 1.0, 1.5]
    assert all(line.keys() == ALWAYS and line["grad_norm"] == 0.5 for line in found)
    assert all(isinstance(line["step"], int) for line in found)


def test_a_line_has_what_devices_took_since_the_one_before(tmp_path: Path) -> None:
    measured.add({"device/idle": mean(0.25)})  # before the run
    with run(Config(out=tmp_path, steps=2)) as entered:
        for i, _ in entered.steps(batches()):
            for idle in (0.5, 1.0) if i == 0 else ():
                measured.add({"device/idle": mean(idle)})
            entered.log(i, {"loss": mean(0.5)})
    first, second = lines(tmp_path / "metrics.jsonl")
    assert first["device/idle"] == 0.75
    assert second.keys() == ALWAYS


def test_a_line_has_all_metrics_and_what_it_took(tmp_path: Path) -> None:
    with run(Config(out=tmp_path, steps=1)) as entered:
        for i, _ in entered.steps(batches()):
            logged = entered.log(i, {"tokens": Sum(torch.tensor(50)), "env/score": mean(3.0)})
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert line.keys() == {*ALWAYS, "tokens", "env/score"}
    assert line == {key: None if math.isnan(value) else value for key, value in logged.items()}
    assert line["env/score"] == 3
    assert line["time/rollout"] >= 0
    assert line["time/train"] >= 0
    assert line["time/rollout"] + line["time/train"] == pytest.approx(line["time/total"])
    assert line["tokens_per_second"] == pytest.approx(50 / line["time/total"])


def test_a_metric_may_be_a_plain_number(tmp_path: Path) -> None:
    with run(Config(out=tmp_path, steps=1)) as entered:
        for i, _ in entered.steps(batches()):
            entered.log(i, {"a": 1, "b": 2.5, "c": torch.tensor(3.0), "loss": mean(0.5)}, {"d": float("nan")})
            with pytest.raises(ArgumentError, match="run.log: the metric 'a' is given twice") as raised:
                entered.log(i, {"a": 1.0}, {"a": 2.0})
            assert raised.value.argument == "metrics"
            with pytest.raises(ArgumentError, match=r"run.log: metrics is 1.0; give a mapping from names to"):
                entered.log(i, 1.0)  # type: ignore[arg-type]
            with pytest.raises(ArgumentError, match="metric 'e' is a str"):
                entered.log(i, {"e": "text"})  # type: ignore[dict-item]
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert [line[name] for name in ("a", "b", "c", "d", "loss")] == [1.0, 2.5, 3.0, None, 0.5]


def test_what_is_restored_has_a_name(tmp_path: Path) -> None:
    with run(Config(out=tmp_path)) as entered:
        loop: Any = counting()
        with pytest.raises(ArgumentError, match=r"give it by the name that run.save uses") as raised:
            entered.restore(loop)
        assert raised.value.argument == "loop"


def test_a_step_that_publishes_says_what_it_took(tmp_path: Path) -> None:
    with timeline.span("publish"):
        time.sleep(0.05)  # before the first step
    with run(Config(out=tmp_path, steps=2)) as entered:
        for i, _ in entered.steps(batches()):
            for _ in range(2 if i == 0 else 0):
                with timeline.span("publish"):
                    time.sleep(0.01)
            entered.log(i, {"loss": mean(0.5)})
    first, second = lines(tmp_path / "metrics.jsonl")
    assert 0.02 <= first["time/publish"] <= first["time/train"]
    assert second.keys() == ALWAYS


def test_what_was_not_measured_is_null(tmp_path: Path) -> None:
    with run(Config(out=tmp_path, steps=1)) as entered:
        for i, _ in entered.steps(batches()):
            logged = entered.log(i, {"kl": mean(0.0, 0.0), "ratio": Max(torch.tensor(-math.inf))})
            assert all(math.isnan(logged[key]) for key in ("loss", "grad_norm", "kl"))
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert (line["loss"], line["grad_norm"], line["kl"], line["ratio"]) == (None, None, None, None)
    assert line["tokens_per_second"] == 0


def test_futures_are_waited_for_and_several_metrics_are_merged(tmp_path: Path) -> None:
    of_the_step: Metrics = {"loss": mean(1.0), "both": Sum(torch.tensor(1.0))}
    with run(Config(out=tmp_path, steps=1)) as entered:
        for i, _ in entered.steps(batches()):
            entered.log(i, done(of_the_step), {"reward": mean(3.0, 4.0), "both": Sum(torch.tensor(2.0))})
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert (line["loss"], line["reward"], line["both"]) == (1.0, 0.75, 3.0)
    assert of_the_step.keys() == {"loss", "both"}


def test_other_loops_have_files_of_their_own(tmp_path: Path) -> None:
    with run(Config(out=tmp_path, steps=2)) as entered:
        for i, _ in entered.steps(batches(), 3, name="warmup"):
            entered.log(i, {"loss": mean(10.0)})
            assert names(tmp_path) == ["config.yaml", "timeline.json", "warmup.jsonl"]
        for i, _ in entered.steps(batches()):
            entered.log(i, {"loss": mean(20.0)})
    assert [(line["step"], line["loss"]) for line in lines(tmp_path / "warmup.jsonl")] == [(0, 10), (1, 10), (2, 10)]
    assert [(line["step"], line["loss"]) for line in lines(tmp_path / "metrics.jsonl")] == [(0, 20), (1, 20)]


def test_a_loop_within_a_step_leaves_that_step_its_own_file(tmp_path: Path) -> None:
    with run(Config(out=tmp_path, steps=2)) as entered:
        for i, _ in entered.steps(batches()):
            for j, _ in entered.steps(batches(), 3, name="eval"):
                entered.log(j, {"loss": mean(10.0)})
            entered.log(i, {"loss": mean(20.0)})
    assert [(line["step"], line["loss"]) for line in lines(tmp_path / "metrics.jsonl")] == [(0, 20), (1, 20)]
    assert [(line["step"], line["loss"]) for line in lines(tmp_path / "eval.jsonl")] == [(0, 10), (1, 10), (2, 10)] * 2


def test_what_was_logged_before_an_error_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def program() -> None:
        with run(Config(out=tmp_path)) as entered:
            for i, _ in entered.steps(batches()):
                entered.log(i, {"loss": mean(1.0)})
                if i == 1:
                    raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        program()
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [0, 1]
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
    assert all(line.keys() >= {"invalid", "skipped", "lag"} for line in lines(tmp_path / "metrics.jsonl"))


# --- going on


class Killed(BaseException):
    """Ends a program where it is raised."""


def killed(cfg: Resumable, place: str, step: int) -> None:
    def at(here: str, now: int) -> None:
        if (here, now) == (place, step):
            raise Killed

    with pytest.raises(Killed):
        walk(cfg, at)


def places() -> list[tuple[str, int]]:
    """The places of a whole run, the first visit of each."""
    found: list[tuple[str, int]] = []
    with tempfile.TemporaryDirectory() as out:
        walk(Resumable(Path(out)), lambda place, step: found.append((place, step)))
    return list(dict.fromkeys(found))


def test_killed_anywhere_and_started_again_it_is_as_if_nothing_had_been(tmp_path: Path) -> None:
    expected = walk(Resumable(tmp_path / "whole"))
    logs = untimed(tmp_path / "whole")
    assert {name: len(found) for name, found in logs.items()} == {
        "metrics.jsonl": 7,
        "rollouts.jsonl": 7,
        "eval.jsonl": 6,
        "warmup.jsonl": 4,
        "warmup.rollouts.jsonl": 4,
        "warmup.eval.jsonl": 8,
    }
    everywhere = places()
    assert len(everywhere) == 1 + 4 * 3 + 1 + 7 * 3 + 3
    for place, step in everywhere:
        cfg = Resumable(tmp_path / f"{place} {step}")
        killed(cfg, place, step)
        for path in cfg.out.glob("*.jsonl"):
            with path.open("a") as file:
                file.write('{"step": 9, "lo')  # a line that was cut short
        total, kl = walk(cfg)
        assert (total, kl.mean) == (expected[0], expected[1].mean), (place, step)
        assert torch.equal(kl.seen, expected[1].seen)
        assert untimed(cfg.out) == logs, (place, step)


def test_killed_again_and_again(tmp_path: Path) -> None:
    expected = walk(Resumable(tmp_path / "whole"))
    cfg = Resumable(tmp_path / "broken")
    for place, step in [
        ("warmup eval", 2),
        ("warmup saved", 2),
        ("between", 0),
        ("train eval", 1),
        ("logged", 3),
        ("saved", 5),
    ]:
        killed(cfg, place, step)
    assert walk(cfg)[0] == expected[0]
    assert untimed(cfg.out) == untimed(tmp_path / "whole")


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = Resumable(tmp_path)
    expected = walk(cfg)
    follow = ("report.html", "timeline.json")  # what is done now is added to them
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name not in follow}
    passed: list[str] = []
    capsys.readouterr()
    again = walk(cfg, lambda place, step: passed.append(place))
    assert (again[0], again[1].mean) == (expected[0], expected[1].mean)
    assert passed == ["entered", "between"]
    assert {path: path.read_bytes() for path in before} == before
    said = capsys.readouterr().out
    assert "warmup: 4 of 4 steps were done; going on after them" in said
    assert "train: 7 of 7 steps were done; going on after them" in said


def test_more_steps_may_be_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = walk(Resumable(tmp_path / "whole", steps=9))
    cfg = Resumable(tmp_path / "more", steps=4)
    walk(cfg)
    before = (cfg.out / "config.yaml").read_text()
    capsys.readouterr()
    assert walk(attrs.evolve(cfg, steps=9))[0] == expected[0]
    assert untimed(cfg.out) == untimed(tmp_path / "whole")
    assert "run: going on with another configuration: steps: 4 -> 9" in capsys.readouterr().out
    assert (cfg.out / "config.1.yaml").read_text() == before
    assert nrl.config.load(Resumable, [str(cfg.out / "config.yaml")]).steps == 9


def test_a_best_metric_that_was_never_logged_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    @attrs.frozen
    class Best:
        out: Path
        steps: int = 2
        checkpoints: Checkpoints = Checkpoints(best="eval/typo")

    with run(Best(tmp_path)) as entered:
        for i, _ in entered.steps(batches()):
            entered.log(i, {"loss": mean(1.0)})
            entered.save(i, total=i)
    assert "train: no step logged 'eval/typo', so no checkpoint was kept for it" in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["x = b''", "flip", "gone", "manifest"])
def test_a_damaged_checkpoint_is_passed_over(damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = walk(Resumable(tmp_path / "whole"))
    cfg = Resumable(tmp_path / "broken")
    killed(cfg, "pulled", 6)
    newest = cfg.out / "checkpoints" / "train" / "000006"
    file = newest / ("manifest.json" if damage == "manifest" else "total.pt")
    data = file.read_bytes()
    file.unlink()
    if damage != "gone":
        file.write_bytes(b"" if damage == "x = b''" else data[:200] + bytes([data[200] ^ 4]) + data[201:])
    assert walk(cfg)[0] == expected[0]
    assert untimed(cfg.out) == untimed(tmp_path / "whole")
    said = capsys.readouterr().out
    assert f"checkpoint: {newest}: " in said
    assert "it is now 000006.damaged, and 000003 is used" in said
    assert "train: 3 of 7 steps were done" in said
    assert (cfg.out / "checkpoints" / "train" / "000006.damaged").is_dir()


def test_all_checkpoints_damaged_is_an_error_and_nothing_is_cut(tmp_path: Path) -> None:
    cfg = Resumable(tmp_path)
    killed(cfg, "pulled", 6)
    for file in tmp_path.glob("checkpoints/train/*/total.pt"):
        file.write_bytes(b"")
    before = untimed(tmp_path)
    root = tmp_path / "checkpoints" / "train"
    for _ in range(2):
        with pytest.raises(CheckpointError, match=f"none of its 2 checkpoints .* remove {root} to start from the beg"):
            walk(cfg)
        assert untimed(tmp_path) == before


def test_the_best_outlives_others_and_is_known_after_a_resume(tmp_path: Path) -> None:
    def found(out: Path) -> list[int]:
        return [x.step for x in checkpoint.checkpoints(out / "checkpoints" / "train")]

    keep = Checkpoints(every=100, keep=1, best="eval/loss", mode="min")  # 9, 1, 1, 9 at steps 1, 3, 5, 7
    cfg = Resumable(tmp_path / "whole", steps=9, checkpoints=keep)
    walk(cfg)
    assert found(cfg.out) == [3, 8]
    broken = attrs.evolve(cfg, out=tmp_path / "broken")
    killed(broken, "saved", 4)
    assert found(broken.out) == [3]

    def at(place: str, step: int) -> None:
        if (place, step) == ("saved", 5):
            assert found(broken.out) == [3]  # as good is not better, and the best is known

    walk(broken, at)
    assert found(broken.out) == [3, 8]
    highest = Resumable(tmp_path / "max", steps=9, checkpoints=attrs.evolve(keep, mode="max"))
    walk(highest)
    assert found(highest.out) == [1, 8]


@pytest.mark.parametrize("worst", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_not_finite_is_no_best(worst: float, tmp_path: Path) -> None:
    keep = Checkpoints(every=100, keep=1, best="eval/score")
    with run(Resumable(tmp_path, steps=5, checkpoints=keep)) as entered:
        stream = entered.restore(stream=counting())
        made = []
        for i, _ in entered.steps(stream):
            entered.log(i, {"eval/score": mean([worst, 1.0, worst, 2.0, 0.0][i])})
            made.append(entered.save(i, stream=stream) is not None)
    assert made == [False, True, False, True, True]


def test_a_best_needs_to_be_measured(tmp_path: Path) -> None:
    with run(Resumable(tmp_path, checkpoints=Checkpoints(every=100, best="eval/score"))) as entered:
        for i, _ in entered.steps(counting()):
            entered.log(i, {"loss": mean(1.0)})
            assert (entered.save(i, x=1) is None) == (i < 6)


# --- what is refused


def never_restores(cfg: Resumable) -> None:
    with run(cfg) as entered:
        for i, _ in entered.steps(counting()):
            entered.log(i, {"loss": mean(1.0)})
            entered.save(i, x=1)


def test_a_program_that_never_restores_is_refused_in_a_used_folder(tmp_path: Path) -> None:
    cfg = Resumable(tmp_path)
    never_restores(cfg)
    before = untimed(tmp_path)
    message = (
        r"run.steps: out=.* holds steps of the loop 'train', which this run did not restore; call "
        r"run.restore\('train', ...\) before the loop, or give another folder"
    )
    with pytest.raises(ConfigError, match=message):
        never_restores(cfg)
    assert untimed(tmp_path) == before


def test_a_loop_may_come_twice_in_one_run(tmp_path: Path) -> None:
    with run(Resumable(tmp_path)) as entered:
        for name in ("train", "probe", "probe", "train"):
            for i, _ in entered.steps(counting(), 2, name=name):
                entered.log(i, {"loss": mean(1.0)})
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [0, 1, 0, 1]
    assert [line["step"] for line in lines(tmp_path / "probe.jsonl")] == [0, 1, 0, 1]


def test_what_this_run_wrote_before_it_restores_is_not_cut(tmp_path: Path) -> None:
    with run(Resumable(tmp_path)) as entered:
        for i, _ in entered.steps(counting(), 2, name="baseline"):
            entered.log(i, {"loss": mean(1.0)})
        entered.restore(x=1)
        assert len(lines(tmp_path / "baseline.jsonl")) == 2


def test_names_are_compared_at_the_first_step(tmp_path: Path) -> None:
    with run(Resumable(tmp_path)) as entered:
        entered.restore(kl=1.0, stream=counting())
        entered.restore("warmup")
        for i, _ in entered.steps(counting()):
            message = "run.save: the loop 'train' restores kl, stream and saves policy, stream; give the same names"
            with pytest.raises(CheckpointError, match=message):
                entered.save(i, policy=1, stream=counting())
            with pytest.raises(CheckpointError, match="restores kl, stream and saves nothing; "):
                entered.save(i)
            entered.save(i, stream=counting(), kl=2.0)  # in any order
        for i, _ in entered.steps(counting(), 1, name="warmup"):
            with pytest.raises(CheckpointError, match="the loop 'warmup' restores nothing and saves x; "):
                entered.save(i, x=1)
            entered.save(i)


def test_what_cannot_be_held_is_said_at_the_first_step(tmp_path: Path) -> None:
    with run(Resumable(tmp_path)) as entered:
        for i, _ in entered.steps(counting()):
            with pytest.raises(CheckpointError, match="save: 'seen' is a set, which a checkpoint cannot hold"):
                entered.save(i, seen={1})
            break


def test_other_names_than_the_checkpoint_has(tmp_path: Path) -> None:
    walk(Resumable(tmp_path))
    before = untimed(tmp_path)
    with run(Resumable(tmp_path)) as entered:
        with pytest.raises(CheckpointError, match="load: .*7 holds kl, stream, total, and the program asks for x;"):
            entered.restore(x=1)
        with pytest.raises(CheckpointError, match="'kl' was saved as a Controller with the fields mean, seen"):
            entered.restore(kl={"mean": 0.0}, stream=ahead(counting(), 2), total=0.0)
    assert untimed(tmp_path) == before


def test_what_is_logged_after_the_save_would_be_lost(tmp_path: Path) -> None:
    message = r"run.log: step 0 of the loop '{}' comes after run.save, so its line would be cut off when .*; save last"
    with run(Resumable(tmp_path)) as entered:
        for i, _ in entered.steps(counting(), 2):
            if i:
                entered.log(i, {"loss": mean(1.0)})  # another step
                break
            entered.save(i, x=1)
            with pytest.raises(ConfigError, match=message.format("train")):
                entered.log(i, {"loss": mean(1.0)})
            for j, _ in entered.steps(counting(), 1, name="eval"):
                with pytest.raises(ConfigError, match=message.format("eval")):
                    entered.log(j, {"loss": mean(1.0)})


@pytest.mark.parametrize("verb", ["save", "log"])
def test_outside_of_a_loop(verb: str, tmp_path: Path) -> None:
    message = rf"run.{verb}: no loop is running; call it inside of `for step, batch in run.steps\(stream\)`"
    with run(Resumable(tmp_path)) as entered, pytest.raises(ConfigError, match=message):
        getattr(entered, verb)(0)


@pytest.mark.parametrize("gone", [True, False])
def test_lines_that_somebody_took_away_are_missed(
    gone: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    walk(Resumable(tmp_path))
    path = tmp_path / "metrics.jsonl"
    text = path.read_text()
    path.unlink()
    if not gone:
        path.write_text(text[: len(text) // 2])
    capsys.readouterr()
    walk(Resumable(tmp_path))
    said = capsys.readouterr().out
    assert "train: metrics.jsonl is shorter than at the checkpoint; lines that were in it are lost" in said
    assert "eval.jsonl is shorter" not in said


# --- full disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk_at(tmp_path / "disk", megabytes=2) as disk:
        yield disk


@pytest.mark.filterwarnings("ignore:run. .*(report.html|timeline.json) could not be written")
@pytest.mark.parametrize("place", ["entered", "warmup logged", "between", "pulled", "logged", "saved"])
def test_a_full_disk_anywhere_and_then_room_again(place: str, small_disk: Path, tmp_path: Path) -> None:
    expected = walk(Resumable(tmp_path / "whole"))
    cfg, heavy = Resumable(small_disk / "run"), small_disk / "ballast"

    def fill(here: str, step: int) -> None:
        if here == place and step >= 3 * (place in ("pulled", "logged", "saved")):
            with contextlib.suppress(OSError), heavy.open("ab", buffering=0) as file:
                while file.write(b"\0" * 4096):
                    pass

    with pytest.raises((CheckpointError, OSError)) as caught:
        walk(cfg, fill)
    assert "ake room" in str(caught.value)
    assert "and start the same command again" in str(caught.value)
    assert not list(cfg.out.glob("checkpoints/*/.*"))
    heavy.unlink()
    assert walk(cfg)[0] == expected[0]
    assert untimed(cfg.out) == untimed(tmp_path / "whole")


def writes_until_it_may_not(cfg: Resumable) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, resource.RLIM_INFINITY))
    message = r"run.log: .*metrics.jsonl could not be written \(File too large\); make room, and start the same command"
    with pytest.raises(OSError, match=message):
        never_restores(cfg)
    assert (cfg.out / "metrics.jsonl").stat().st_size == 1500  # to the last byte


@pytest.mark.filterwarnings("ignore:run. .*(report.html|timeline.json) could not be written")
def test_a_line_that_cannot_be_written(tmp_path: Path) -> None:
    assert child(writes_until_it_may_not, Resumable(tmp_path, steps=100, checkpoints=Checkpoints(every=100))) == 0
