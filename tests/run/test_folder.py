import contextlib
import os
import re
import shutil
from pathlib import Path
from typing import Any

import attrs
import pytest

import nrl
import nrl.config
from nrl.errors import ConfigError, LostActor
from nrl.run import Run, run
from nrl.run.checkpoint import Checkpoints
from tests.children import child
from tests.run.programs import Config, Resumable, batches, names, walk


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
    message = r"run: out=.* holds a run already, which has no checkpoints to go on from; give another folder, or remove"
    with pytest.raises(ConfigError, match=message):  # noqa: SIM117
        with run(Config(out=tmp_path, steps=2)):
            pass
    assert (tmp_path / "config.yaml").read_text() == before


def test_a_config_that_cannot_be_written_leaves_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run: cfg is a dict; give an instance of a class of @attrs.frozen"):  # noqa: SIM117
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


def test_a_folder_that_is_in_use(tmp_path: Path) -> None:
    cfg = Resumable(tmp_path)
    message = r"run: another process is running in out=.*; wait for it, or give another folder"
    with run(cfg):
        assert child(refused, cfg, message) == 0
        with pytest.raises(ConfigError, match=message):
            walk(cfg)
    walk(cfg)


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    assert child(leaves_at_once, Resumable(tmp_path)) == 7
    walk(Resumable(tmp_path))


def leaves_at_once(cfg: Resumable) -> None:
    walk(cfg, lambda place, step: os._exit(7) if (place, step) == ("logged", 4) else None)


def refused(cfg: Resumable, message: str) -> None:
    before = (cfg.out / "config.yaml").read_text()
    with pytest.raises(ConfigError, match=message):
        walk(attrs.evolve(cfg, lr=9.0))
    assert (cfg.out / "config.yaml").read_text() == before


def failing(cfg: Any, error: type[BaseException] = ConfigError) -> None:
    """A program that finds its model wrong, after it has restored."""
    with pytest.raises(error), run(cfg) as entered:  # noqa: PT012
        entered.restore(stream=batches())
        raise error


def everything(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() if path.is_file() else b"" for path in root.rglob("*")}


@pytest.mark.parametrize("error", [ConfigError, TypeError, KeyboardInterrupt, SystemExit])
def test_a_start_that_failed_leaves_no_folder(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    failing(Config(), error)
    failing(Config(out=Path("a/b/c")), error)
    assert everything(tmp_path) == {}
    (tmp_path / "runs").mkdir()
    (tmp_path / "a").mkdir()
    failing(Config(), error)
    failing(Config(out=Path("a/b/c")), error)
    assert everything(tmp_path) == {"runs": b"", "a": b""}
    with pytest.raises(ConfigError, match="steps=-1"), run(Config(steps=-1)):
        pass
    assert everything(tmp_path) == {"runs": b"", "a": b""}


def test_a_start_that_failed_leaves_a_folder_as_it_was(tmp_path: Path) -> None:
    failing(Config(out=tmp_path))
    assert set(everything(tmp_path)) <= {".lock", "timeline.json"}
    cfg = Resumable(tmp_path / "run")
    walk(cfg)
    (cfg.out / "timeline.json").unlink()
    before = everything(cfg.out)
    with pytest.raises(ConfigError, match="no such model"), run(attrs.evolve(cfg, steps=9)):  # as `steps` may change
        raise ConfigError("no such model")
    after = everything(cfg.out)
    for made_anew in ("timeline.json", "report.html"):
        after.pop(made_anew, None), before.pop(made_anew, None)
    assert after == before


def test_what_is_worth_keeping_stays(tmp_path: Path) -> None:
    for name, keep in (("metrics", "metrics.jsonl"), ("model", "model/config.json"), ("notes", "notes.txt")):
        with pytest.raises(ConfigError), run(Config(out=tmp_path / name)):  # noqa: PT012
            path = tmp_path / name / keep
            path.parent.mkdir(exist_ok=True)
            path.write_text("{}")
            raise ConfigError
        assert (tmp_path / name / keep).read_text() == "{}"
        assert (tmp_path / name / "config.yaml").is_file()


def test_what_others_wrote_about_a_run_that_began_stays(tmp_path: Path) -> None:
    for attempt in range(2):
        out = tmp_path / f"a{attempt}" / "run"
        with pytest.raises(MemoryError), run(Config(out=out)) as entered:  # noqa: PT012
            for name in ("wandb", "tensorboard", "profile") if attempt == 0 else ("profile",):
                (out / name).mkdir()
                (out / name / "events").write_bytes(b"x")
            if attempt == 0:
                next(steps := entered.steps(batches()))
                next(steps)
                (out / "profile" / "events").unlink()
            raise MemoryError  # which is just what one wants to look at a profile for
        assert {path.name for path in out.iterdir()} >= {"config.yaml", "profile"}, attempt
    assert {"wandb", "tensorboard"} <= {path.name for path in (tmp_path / "a0" / "run").iterdir()}
    with pytest.raises(MemoryError), run(Config(out=tmp_path / "new")):  # noqa: PT012
        (tmp_path / "new" / "wandb").mkdir()
        (tmp_path / "new" / "wandb" / "header").write_bytes(b"x")  # a tracker that has been started, and no more
        raise MemoryError
    assert not (tmp_path / "new").exists()
    with pytest.raises(MemoryError), run(Config(out=tmp_path / "new")) as entered:  # noqa: PT012
        entered.restore(stream=batches())
        for _ in entered.steps(batches()):
            raise MemoryError  # as an actor that cannot start raises where its first result is asked for
    assert not (tmp_path / "new").exists()


def test_a_run_that_fails_before_its_first_checkpoint_can_be_started_again(tmp_path: Path) -> None:
    cfg = Config(out=tmp_path / "run", steps=2)
    for attempt in range(2):
        with contextlib.suppress(MemoryError), run(cfg) as entered:
            entered.restore(stream=batches())
            for i, _ in entered.steps(batches()):
                entered.log(i, {})
                if attempt == 0:
                    raise MemoryError
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_folder_is_not_searched_through(tmp_path: Path) -> None:
    """It may be a home: what is in folders within it is not looked at, and what goes meanwhile hides no error."""
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    (tmp_path / "deep" / "er").chmod(0)
    try:
        with pytest.raises(MemoryError), run(Config(out=tmp_path)):
            raise MemoryError
        with pytest.raises(MemoryError), run(Config(out=tmp_path / "new")):  # noqa: PT012
            shutil.rmtree(tmp_path / "new")
            raise MemoryError
    finally:
        (tmp_path / "deep" / "er").chmod(0o700)
    assert not (tmp_path / "config.yaml").exists()


def test_a_folder_that_is_gone_is_made_again_by_a_retry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outs: list[Path] = []

    def main(cfg: Config) -> None:
        with run(cfg) as entered:
            outs.append(entered.out)
            if len(outs) < 3:
                raise LostActor("step", "trainer", 0, "here", "killed")

    nrl.retrying(main, pause=0)(Config())
    assert len(outs) == 3
    assert len(set(outs)) == 1
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [outs[0].name]


def test_a_negative_number_of_steps(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run: steps=-3; give 0 or more"), run(Config(steps=-3, out=tmp_path)):
        pass


@attrs.frozen
class Texts:
    out: str | Path
    checkpoints: Checkpoints = Checkpoints()


@pytest.mark.parametrize(
    ("out", "match"),
    [
        ("s3://bucket/run", r"out=s3://bucket/run is in a store.* checkpoints\.to=s3://bucket/run"),
        (Path("gs://bucket/run"), "is in a store"),
        ("file://host/run", "out=file://host/run names no absolute path of this host; give the path itself"),
        ("  ", "out='  ' is empty; give a folder"),
        ("a\0b", r"out='a\\x00b' holds a NUL character"),
        ("a" * 5000, "out=aaa.* has a name of more than 255 bytes; give a shorter one"),
        ("${env:RUNS}/a", r"holds \$\{env:RUNS\}, .*; write \$\{oc\.env:RUNS\}"),
        ("${RUNS:-x}/a", r"holds \$\{RUNS:-x\}, .*; write \$\{oc\.env:RUNS,x\}"),
        ("/", "out=/ is the root of the file system"),
        ("//", "is the root of the file system"),
        ("/tmp/..", "is the root of the file system"),
        ("$RUNS/a", r"holds \$RUNS, which is not expanded here; write \$\{oc\.env:RUNS\}"),
        ("${RUNS}/a", r"holds \$\{RUNS\}, which is not expanded here; write \$\{oc\.env:RUNS\}"),
        ("runs/${seed}", r"holds \$\{seed\}"),
        ("${oc.env:RUNS}/a", r"write \$\{oc\.env:RUNS\}"),
        ("~nobody-of-this-name/a", "out=~nobody-of-this-name/a: .*; give the path itself"),
    ],
)
def test_an_out_that_is_no_folder_is_refused(
    out: str | Path, match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=match), nrl.run(Texts(out=out)):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("out", ["~/a/b", "~//a/b", "~/a/../a/b"])
def test_an_out_in_the_home_folder(out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    with nrl.run(Texts(out=out)) as run:
        assert run.out.resolve() == tmp_path / "home" / "a" / "b"
    assert (tmp_path / "home" / "a" / "b" / "config.yaml").is_file()
    assert not (tmp_path / "~").exists()


@pytest.mark.parametrize("out", ["cost $5", "a$(b)", "it's", "~", "a~/b", "run.", "./~/a"])
def test_odd_names_of_folders_stay(out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    with nrl.run(Texts(out=out)) as run:
        assert run.out.resolve() == tmp_path / ("home" if out == "~" else out)


@pytest.mark.parametrize("scheme", ["file://", "file:", "file://localhost"])
def test_an_out_may_be_the_url_of_a_folder(scheme: str, tmp_path: Path) -> None:
    with nrl.run(Texts(out=f"{scheme}{tmp_path}/a%20run")) as run:
        assert run.out == tmp_path / "a run"


@pytest.mark.parametrize(("to", "match"), [("/", "root of the file system"), ("$RUNS/a", r"holds \$RUNS")])
def test_the_place_of_checkpoints_is_resolved_as_out_is(to: str, match: str, tmp_path: Path) -> None:
    cfg = Texts(out=str(tmp_path / "run"), checkpoints=Checkpoints(to=to))
    with run(cfg) as entered, pytest.raises(ConfigError, match=match):
        entered.restore(total=0)
