"""A program that loses processes goes on by itself, and ends as if it had lost none."""

import sys
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

import nrl
from nrl import data, tiny
from nrl.algos import sft_loss
from nrl.backends import adamw, fsdp, load_tokenizer
from nrl.batch.metrics import Sum
from nrl.data import counting
from nrl.errors import ClosedCluster, ConfigError, LostActor
from nrl.run.checkpoint import Checkpoints
from nrl.runtime.restart_state import is_restart
from tests.jsonlines import untimed
from tests.weights import assert_equal


@attrs.frozen
class Config:
    out: str | None = None
    steps: int = 6
    seed: int = 3
    checkpoints: Checkpoints = Checkpoints(every=2)


def gone(where: str = "train_step(sft_loss)", log: str = "") -> LostActor:
    return LostActor(where, "trainer", 1, "10.0.0.3", "killed by signal 9", log)


def losing(*places: tuple[str, int]) -> Callable[[str, int], None]:
    """Raises where a program passes these places, once each, in this order."""
    left = list(places)

    def at(place: str, step: int) -> None:
        if left and left[0] == (place, step):
            left.pop(0)
            raise gone(f"{place} {step}")

    return at


def train(cfg: Config, at: Callable[[str, int], None] = lambda place, step: None) -> dict[str, Tensor]:
    """Supervised steps on the tiny model, with randomness of its own; returns the weights."""
    with nrl.run(cfg) as run, nrl.cluster("local") as cluster:
        model = tiny.model()
        trainer = fsdp.trainer(cluster.reserve(2), model, adamw(lr=1e-3))
        at("built", 0)
        step = trainer.train_step(sft_loss)
        collate = partial(data.supervised, tokenizer=load_tokenizer(model))
        stream = nrl.batched(data.tasks("arithmetic", seed=cfg.seed), 8, collate=collate)
        state, stream = run.restore(policy=trainer, stream=stream)
        for i, batch in run.steps(stream):
            at("pulled", i)
            state, metrics = step(state, batch)
            at("stepped", i)
            run.log(i, metrics, {"noise": Sum(torch.rand(()))})
            at("logged", i)
            run.save(i, policy=state, stream=stream)
            at("saved", i)
        at("finished", 0)
        return dict(state.params.tensors("test"))


EVERYWHERE = [("built", 0), ("pulled", 1), ("stepped", 3), ("logged", 4), ("saved", 5), ("finished", 0)]


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    pauses: list[float] = []
    monkeypatch.setattr(sys.modules["nrl.run.retries"], "time", SimpleNamespace(sleep=pauses.append))
    return pauses


# --- as if nothing had been lost


def test_lost_anywhere_the_metrics_and_weights_are_those_of_an_uninterrupted_run(
    tmp_path: Path, slept: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    expected = train(Config(str(tmp_path / "whole")))
    found = nrl.retrying(partial(train, at=losing(*EVERYWHERE)), times=2)(Config(str(tmp_path / "lost")))
    assert_equal(found, expected)
    assert untimed(tmp_path / "lost")["metrics.jsonl"] == untimed(tmp_path / "whole")["metrics.jsonl"]
    assert len(untimed(tmp_path / "lost")["metrics.jsonl"]) == 6
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("retrying: attempt")]
    start, after = "from the beginning", f"after step {{}} of 'train' in {tmp_path / 'lost'}"
    assert said == [
        f"retrying: attempt {number} begins in {wait} s, {where}; retry {count} of 2 since the last new checkpoint"
        for number, wait, where, count in [
            (2, 1, start, 1),
            (3, 2, start, 2),
            (4, 1, after.format(2), 1),
            (5, 1, after.format(4), 1),
            (6, 1, after.format(6), 1),
            (7, 2, after.format(6), 2),
        ]
    ]
    assert slept == [1, 2, 1, 1, 1, 2]


def test_without_a_folder_it_goes_on_in_the_one_that_was_made_first(
    tmp_path: Path, slept: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    expected = train(Config())
    (whole,) = Path("runs").iterdir()
    found = nrl.retrying(partial(train, at=losing(*EVERYWHERE)))(Config())
    (lost,) = set(Path("runs").iterdir()) - {whole}
    assert_equal(found, expected)
    assert untimed(lost)["metrics.jsonl"] == untimed(whole)["metrics.jsonl"]
    assert (lost / "config.yaml").read_text() == (whole / "config.yaml").read_text()
    assert not (lost / "config.1.yaml").exists()
    nrl.retrying(train)(Config())
    assert len(list(Path("runs").iterdir())) == 3  # another call is another run


def test_several_runs_in_a_program_keep_their_folders(
    tmp_path: Path, slept: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    at = losing(("first", 1), ("second", 1), ("second", 3))
    folders: list[tuple[str, Path]] = []

    def main(cfg: Config) -> None:
        for name in ("first", "given", "second"):
            with nrl.run(attrs.evolve(cfg, out="given") if name == "given" else cfg) as run:
                folders.append((name, run.out))
                total, stream = run.restore(total=0, stream=counting())
                for i, number in run.steps(stream):
                    at(name, i)
                    total += number
                    run.log(i, {"total": Sum(torch.tensor(total))})
                    run.save(i, total=total, stream=stream)
                assert total == 15

    nrl.retrying(main)(Config())
    assert [name for name, _ in folders] == ["first", *["first", "given", "second"] * 3]
    assert {name: len({out for each, out in folders if each == name}) for name in ("first", "given", "second")} == {
        "first": 1,
        "given": 1,
        "second": 1,
    }
    assert len(list(Path("runs").iterdir())) == 2


def test_it_returns_what_the_program_returns_and_keeps_its_name(slept: list[float]) -> None:
    def main(cfg: int) -> int:
        """Double it."""
        return 2 * cfg

    assert nrl.retrying(main)(21) == 42
    assert nrl.retrying(main).__name__ == "main"
    assert nrl.retrying(main).__doc__ == "Double it."
    assert slept == []


def test_with_blocks_are_left_and_what_they_held_is_let_go(tmp_path: Path, slept: list[float]) -> None:
    held: list[weakref.ref[Any]] = []
    left: list[Any] = []

    class Weights:
        pass

    def main(cfg: Config) -> int:
        with nrl.run(cfg), nrl.cluster("local") as cluster:
            if held:
                assert held[-1]() is None
                with pytest.raises(ClosedCluster):
                    left[-1].reserve(1)
            weights = Weights()
            weights.itself = weights  # type: ignore[attr-defined]
            held.append(weakref.ref(weights))
            left.append(cluster)
            if len(held) < 4:
                raise gone()
            return len(held)

    assert nrl.retrying(main)(Config(str(tmp_path))) == 4


# --- how often


def test_retries_without_a_new_checkpoint_are_counted(tmp_path: Path, slept: list[float]) -> None:
    attempts: list[int] = []

    def main(cfg: Config) -> None:
        attempts.append(0)
        train(cfg, losing(("pulled", 3)))

    with pytest.raises(LostActor, match="pulled 3: rank 1 of mesh 'trainer'") as caught:
        nrl.retrying(main, times=4, pause=0.5)(Config(str(tmp_path)))
    assert caught.value.__notes__ == ["retrying: 4 retries in a row came to no new checkpoint"]
    assert len(attempts) == 1 + 4
    assert slept == [0.5, 1, 2, 4]
    assert [line["step"] for line in untimed(tmp_path)["metrics.jsonl"]] == [0, 1, 2]


def test_a_new_checkpoint_starts_the_count_anew(tmp_path: Path, slept: list[float]) -> None:
    cfg = Config(str(tmp_path), checkpoints=Checkpoints(every=1))
    nrl.retrying(partial(train, at=losing(*(("saved", i) for i in range(6)))), times=1)(cfg)
    assert slept == [1] * 6


def test_pauses_end_at_a_minute(slept: list[float]) -> None:
    def main(cfg: None) -> None:
        raise gone()

    with pytest.raises(LostActor):
        nrl.retrying(main, times=9)(None)
    assert slept == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_none_at_all(slept: list[float]) -> None:
    def main(cfg: None) -> None:
        raise gone()

    with pytest.raises(LostActor) as caught:
        nrl.retrying(main, times=0)(None)
    assert caught.value.__notes__ == ["retrying: times=0, so it is not tried again"]
    assert slept == []


@pytest.mark.parametrize("wrong", [{"times": -1}, {"pause": -0.5}])
def test_a_negative_number_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"retrying: times=.*, pause=.*; give 0 or more"):
        nrl.retrying(train, **wrong)


def test_a_run_without_checkpoints_is_told_so(tmp_path: Path, slept: list[float]) -> None:
    attempts: list[int] = []

    def main(cfg: Config) -> None:
        attempts.append(0)
        with nrl.run(cfg) as run:
            for i, _ in run.steps(counting()):
                run.log(i, {"x": Sum(torch.tensor(1.0))})
                if i == 2:
                    raise gone()

    with pytest.raises(LostActor) as caught:
        nrl.retrying(main)(Config(str(tmp_path)))
    (note,) = caught.value.__notes__
    assert note == (
        f"retrying: the run in {tmp_path} makes no checkpoints, so there is nothing to go on from; call run.restore "
        "before its loop and run.save in it"
    )
    assert attempts == [0]
    assert slept == []


def test_what_is_lost_before_the_first_step_needs_no_checkpoint(tmp_path: Path, slept: list[float]) -> None:
    attempts: list[int] = []

    def main(cfg: Config) -> int:
        attempts.append(0)
        with nrl.run(cfg) as run:
            if len(attempts) < 3:
                raise gone()
            return sum(i for i, _ in run.steps(counting()))

    assert nrl.retrying(main)(Config(str(tmp_path))) == 15


# --- which errors


def raised_from(cause: Exception) -> Exception:
    error = RuntimeError("the step failed")
    error.__cause__ = cause
    return error


def in_the_context_of(context: Exception) -> Exception:
    error = KeyError("a mistake in what cleans up")
    error.__context__ = context
    return error


@pytest.mark.parametrize(
    "error",
    [
        gone(),
        raised_from(gone()),
        raised_from(raised_from(gone())),
        ExceptionGroup("tasks", [gone(), gone()]),
        ExceptionGroup("tasks", [ExceptionGroup("more", [gone()]), raised_from(gone())]),
    ],
)
def test_a_lost_actor_in_whatever_it_comes(error: Exception, slept: list[float]) -> None:
    errors = [error]

    def main(cfg: None) -> str:
        if errors:
            raise errors.pop()
        return "went on"

    assert nrl.retrying(main)(None) == "went on"


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("lr: wrong"),
        KeyboardInterrupt(),
        SystemExit(3),
        in_the_context_of(gone()),
        ExceptionGroup("tasks", [gone(), ValueError("a bug")]),
        BaseExceptionGroup("tasks", [gone(), KeyboardInterrupt()]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_whatever_else_is_raised_ends_the_program(error: BaseException, slept: list[float]) -> None:
    attempts: list[int] = []

    def main(cfg: None) -> None:
        attempts.append(0)
        raise error

    with pytest.raises(type(error)) as caught:
        nrl.retrying(main)(None)
    assert caught.value is error
    assert attempts == [0]
    assert slept == []


def test_ctrl_c_in_the_pause_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    def main(cfg: None) -> None:
        raise gone()

    monkeypatch.setattr("time.sleep", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        nrl.retrying(main)(None)
    assert caught.value.__context__ is None


def test_what_was_lost_is_said_with_its_last_lines(slept: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    errors = [gone("generate", log="loading\nout of memory\n")]

    def main(cfg: None) -> None:
        if errors:
            raise errors.pop()

    nrl.retrying(main)(None)
    what, *lines, again = capsys.readouterr().out.splitlines()
    assert what.startswith("retrying: generate: rank 1 of mesh 'trainer' on node 10.0.0.3 is lost: killed by signal 9.")
    assert lines == ["    loading", "    out of memory"]
    assert again.startswith("retrying: attempt 2 begins in 1 s, from the beginning; retry 1 of 3")


def test_a_program_that_begins_again_may_do_with_less(tmp_path: Path) -> None:
    again: list[bool] = []

    def main(cfg: Config) -> None:
        again.append(is_restart())
        if len(again) < 3:
            raise gone()

    nrl.retrying(main, pause=0)(Config(out=str(tmp_path)))
    assert again == [False, True, True]
    assert not is_restart()
