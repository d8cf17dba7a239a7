"""`nrl eval rescore=FILE`: the same samples, judged again."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

import nrl
from nrl.errors import EnvError
from nrl.rollout.rescore import regrade
from tests.children import child
from tests.cli.test_evaluation import GUESS, attempt, said, write
from tests.jsonlines import lines

JUDGES = """
from nrl.envs import Environment, Step, judged, of_group
digits = lambda task, trace: float(any(map(str.isdigit, trace.text)))
length = lambda task, trace: {"long": float(len(trace.text)), "prompt": float(len(task["prompt"]))}
seeded = lambda task, trace: task["seed"] % 97 / 97
field = lambda task, trace: float(task["level"])
longest = of_group(lambda task, traces: [float(len(x.text) == max(len(y.text) for y in traces)) for x in traces])
few = of_group(lambda task, traces: [1.0])
talk = judged(
    Environment(lambda task: (0, task["prompt"]), lambda at, turn: Step(at + 1, 0.0, at == 1, " so? ")),
    lambda task, trace: float(len(trace.turns[0]) + 10 * len(trace.observations[0])),
)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judges.py").write_text(JUDGES)
    (tmp_path / "guess.py").write_text(GUESS)
    (tmp_path / "old").mkdir()
    write(tmp_path / "tasks.jsonl", [{"prompt": "a", "level": 2}, {"prompt": "bcd", "level": 4}])
    write(tmp_path / "old" / "results.jsonl", [line(0, "a", ["1", "xy"]), line(1, "bcd", ["", "four"])])
    return tmp_path


def line(task: int, prompt: str, samples: list[str], **more: Any) -> dict[str, Any]:
    return {
        "task": task, "prompt": prompt, "answer": None, "samples": samples, "rewards": [0.0, None], "answers": None,
        "lengths": [1, 1], "truncated": [False, True], "numbers": {"reward/old": [1.0, None]}, **more,
    }  # fmt: skip


def metrics(folder: Path) -> Any:
    return json.loads((folder / "metrics.json").read_text())["metrics"]


def test_another_verifier_gives_other_numbers(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "rescore=old", "env=judges.py:length", "out=out", "k=1,2", "passing=4")
    found = lines(here / "out" / "results.jsonl")
    assert [each["rewards"] for each in found] == [[2.0, 3.0], [3.0, 7.0]]
    assert found[1]["numbers"] == {"reward/long": [0.0, 4.0], "reward/prompt": [3.0, 3.0]}
    assert metrics(here / "out") == {
        "eval/reward": 3.75, "eval/pass@1": 0.25, "eval/pass@2": 0.5, "eval/reward/long": 1.75,
        "eval/reward/prompt": 2.0, "eval/length": 1.0, "eval/truncated": 0.5, "eval/invalid": 0.0,
    }  # fmt: skip
    assert [each["mean"] for each in lines(here / "out" / "tasks.jsonl")] == [2.5, 5.0]
    # It goes on where it was
    results = (here / "out" / "results.jsonl").read_text()
    (here / "out" / "results.jsonl").write_text(results.splitlines(keepends=True)[0])
    arguments = ["rescore=old/results.jsonl", "env=judges.py:length", "out=new", "rows=2"]
    said(capsys, *arguments)
    (here / "new" / "results.jsonl").write_text(results.splitlines(keepends=True)[0] + '{"ta')
    assert "1 of 2 tasks are done" in said(capsys, *arguments)
    assert (here / "new" / "results.jsonl").read_text() == results


def test_a_verifier_of_groups_has_all_samples_of_a_task(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "rescore=old", "env=judges.py:longest", "out=out")
    assert [each["rewards"] for each in lines(here / "out" / "results.jsonl")] == [[0.0, 1.0], [0.0, 1.0]]
    shown = said(capsys, "rescore=old", "env=judges.py:few", "out=few", status=2)
    assert "all 4 samples failed, 4 of them with: EnvError: " in shown
    assert "gave 1 verdicts for 2 episodes" in lines(here / "few" / "failures.jsonl")[0]["error"]


def test_tasks_give_what_lines_lack(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys, "rescore=old", "env=judges.py:field", "out=out", status=2)
    assert "the verifier reads 'level' of the task, which old/results.jsonl does not have; give the tasks" in shown
    said(capsys, "tasks.jsonl", "chat=false", "rescore=old", "env=judges.py:field", "out=given")
    found = lines(here / "given" / "results.jsonl")
    assert [each["rewards"] for each in found] == [[2.0, 2.0], [4.0, 4.0]]
    assert [each["fields"] for each in found] == [{"level": 2}, {"level": 4}]
    said(capsys, "rescore=given", "env=judges.py:field", "out=again")  # now the lines have it
    assert metrics(here / "again") == metrics(here / "given")
    shown = said(
        capsys, "tasks.jsonl", "limit=1", "chat=false", "rescore=old", "env=judges.py:field", "out=x", status=2
    )
    assert "old/results.jsonl, line 2 is of another task than the tasks that are given" in shown


def test_a_verifier_elsewhere_lacks_the_same(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a server, or in a process of a pool. Where tasks are given, its KeyErrors are failures of rows."""

    def field(task: Any, trace: Any) -> float:
        return float(task["level"]) if task["prompt"] == "a" else {"prompt": 1.0}["missing"]

    with nrl.serve(field) as server:
        shown = said(capsys, "rescore=old", f"env={server.url}", "rows=2", "out=out", status=2)
        assert "the verifier reads 'level' of the task, which old/results.jsonl does not have; give the" in shown
        said(capsys, "tasks.jsonl", "chat=false", "rescore=old", f"env={server.url}", "out=given")
    assert [each["rewards"] for each in lines(here / "given" / "results.jsonl")] == [[2.0, 2.0], [None, None]]
    (here / "pools.py").write_text("import judges, nrl\npooled = nrl.pooled(judges.field, workers=1)\n")
    shown = said(capsys, "rescore=old", "env=pools.py:pooled", "out=pooled", status=2)
    assert "the verifier reads 'level' of the task" in shown


def test_what_failed_before_it_was_verified_says_nothing_of_fields(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failures = [None, {"status": "infra_error", "error": "KeyError: 'level'"}]
    trace = {"prompt": "a", "turns": ["xyz", "q"], "observations": ["??", ""]}
    record = line(0, "a", ["q", ""], traces=[trace] * 2, statuses=["ok", "infra_error"], failures=failures)
    write(here / "results.jsonl", [record])
    said(capsys, "rescore=results.jsonl", "env=judges.py:talk", "out=out")
    assert [each["rewards"] for each in lines(here / "out" / "results.jsonl")] == [[23.0, None]]


def test_episodes_are_judged_by_what_was_said(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = {"prompt": "a", "turns": ["xyz", "q"], "observations": ["??", ""]}
    failures = [None, {"status": "timeout", "error": "late"}]
    record = line(0, "a", ["q", ""], traces=[trace] * 2, statuses=["ok", "timeout"], failures=failures, turns=[2, 0])
    write(here / "results.jsonl", [record])
    said(capsys, "rescore=results.jsonl", "env=judges.py:talk", "out=out")
    (found,) = lines(here / "out" / "results.jsonl")
    assert (found["rewards"], found["statuses"]) == ([23.0, None], ["ok", "timeout"])
    (failure,) = lines(here / "out" / "failures.jsonl")
    assert (failure["sample"], failure["status"], failure["error"]) == (1, "timeout", "late")


@pytest.mark.parametrize("env", ["number", "judges.py:talk", "judges.py:longest", "judges.py:seeded"])
def test_the_same_verifier_gives_the_same(env: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from nrl import tiny

    tiny.save(tiny.model(), here / "model")
    write(here / "sums.jsonl", [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+3=", "answer": "5"}])
    said(capsys, "sums.jsonl", "model=model", "chat=false", "n=4", "max_new_tokens=4", f"env={env}", "out=first")
    said(capsys, "rescore=first", f"env={env}", "out=second")
    assert lines(here / "second" / "results.jsonl") == lines(here / "first" / "results.jsonl")
    assert (here / "second" / "metrics.json").read_text() == (here / "first" / "metrics.json").read_text()
    written = yaml.safe_load((here / "second" / "config.yaml").read_text())
    assert written["rescore"] == "first"
    assert not {"model", "n", "temperature", "max_new_tokens", "sampler", "dtype"} & written.keys()  # had no part in it


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["env=exact"],
            "nrl: eval: 1 problem eval: give a folder, a hub name or a run as model=; only rescore=FILE",
        ),
        (["rescore=old", "model=m", "n=2"], "rescore: nothing is sampled, so model, n would not be read; leave that"),
        (["rescore=old", "model=m"], "rescore: nothing is sampled, so model would not be read; leave that"),
        (["rescore=old", "temperature=1"], "nothing is sampled, so temperature would not be read"),
        (["rescore=gone"], "eval: rescore=gone: there is no gone; give results.jsonl of an evaluation"),
        (["rescore=empty.jsonl"], "eval: rescore=empty.jsonl: empty.jsonl has no results; give those of an evaluation"),
        (["rescore=old", "env=guess.py:env"], "env=guess.py:env has no verifier: its steps give the reward, so stored"),
        (["rescore=old", "env=judges.py:digits", "k=3"], "measure: k is 3, and there are 2 samples a task"),
    ],
)
def test_what_cannot_be_judged_again(
    arguments: list[str], message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "empty.jsonl").touch()
    assert message in said(capsys, *arguments, "out=out", status=2)


def test_an_environment_without_a_verifier_is_refused_from_python() -> None:
    from nrl.envs import Environment

    with pytest.raises(EnvError, match="rescore: the environment has no verifier, its steps give the reward"):
        regrade([Environment(lambda task: (0, ""), lambda state, turn: state)], [], [])


def test_each_source_has_its_own_verifier(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sources = [line(place, "a", ["1", "xy"], fields={"source": place}) for place in (0, 1)]
    write(here / "mixed.jsonl", sources)
    said(capsys, "rescore=mixed.jsonl", "env.judges.py:digits=1", "env.judges.py:longest=1", "out=out")
    assert [each["rewards"] for each in lines(here / "out" / "results.jsonl")] == [[1.0, 0.0], [0.0, 1.0]]
    assert metrics(here / "out")["judges.digits/eval/reward"] == 0.5


def test_killed_and_started_again_it_ends_with_the_same_results(here: Path) -> None:
    """One sample in three fails, which is told once for each."""
    many = [line(number, f"{number}?", [f"{number}", f"{number + 1}"]) for number in range(20)]
    write(here / "old" / "results.jsonl", many)
    (here / "killing.py").write_text(
        "import os, signal\nfrom pathlib import Path\n"
        "asked, armed = 0, Path(__file__).with_name('armed')\n"
        "def judge(task, trace):\n    global asked\n    asked += 1\n"
        "    if asked == 27 and armed.exists():\n        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    if int(trace.text) % 3 == 0:\n        raise OSError('away')\n    return float(trace.text)\n"
    )

    def start(out: str) -> int | None:
        return child(attempt, f"rescore={here / 'old'}", "rows=8", f"env={here}/killing.py:judge", f"out={here / out}")

    assert start("whole") == 0
    (here / "armed").touch()
    assert start("killed") == -signal.SIGKILL
    whole, killed = here / "whole", here / "killed"
    assert 0 < len(lines(killed / "results.jsonl")) < 20
    (here / "armed").unlink()
    assert start("killed") == 0
    for name in ("results.jsonl", "failures.jsonl", "tasks.jsonl", "metrics.json"):
        assert (killed / name).read_text() == (whole / name).read_text(), name
    assert len(lines(whole / "failures.jsonl")) == 13


@pytest.mark.parametrize("argument", ["samplers=2", "cluster=auto"])
def test_what_only_sampling_reads_is_refused(here: Path, argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys, "rescore=old", "env=judges.py:length", argument, status=2)
    assert f"nothing is sampled, so {argument.partition('=')[0]} would not be read; leave that out" in shown
