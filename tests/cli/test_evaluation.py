"""The command `nrl eval`: what it measures, what it leaves behind, how it goes on, and what it refuses."""

import importlib.util
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import nrl
from nrl import tiny
from nrl.backends import Sampling, hf
from nrl.cli import evaluation
from nrl.cli.cli import main
from nrl.cli.evaluation import find_model
from nrl.cli.evaluation_settings import Evaluation
from nrl.errors import ModelError
from nrl.log import format_number
from nrl.run import checkpoint
from nrl.run.checkpoint import Checkpoints
from nrl.run.folder import claim
from tests.backends.openai.test_openai import Served, serving
from tests.backends.sampling.test_samplers import model as served_model
from tests.children import child
from tests.jsonlines import lines

ROOT = Path(__file__).parents[2]
ROWS: list[dict[str, Any]] = [
    {"question": "1+1=", "answer": "2"},
    {"question": "2+3=", "answer": 5},
    {"question": "7+12=", "answer": "7+12=19\n#### 19"},
]
GUESS = """
import random
from nrl.envs import Environment, Step

def reset(task):
    if task["prompt"] == "broken":
        raise OSError("away")
    return (random.Random(task["seed"]).randint(1, 9), 3), "Guess: "

def step(state, turn):
    number, left = state
    guess = next((int(x) for x in turn.text if x.isdigit()), None)
    reward = {"right": float(guess == number), "digit": 0.5 * (guess is not None)}
    if guess == number or left == 1:
        return Step(state, reward, info={"left": left})
    hint = "what? " if guess is None else "higher " if guess < number else "lower "
    return Step((number, left - 1), reward, False, hint, {"left": left})

env = Environment(reset, step)
make = lambda: env
needy = lambda task: env
other = lambda: 3
class Made:
    reset = staticmethod(reset)
    step = staticmethod(step)
"""
DIGITS = "def judge(task, trace):\n    return float(any(map(str.isdigit, trace.text)))\n"


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny.save(tiny.model(), folder)
    return str(folder)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with tasks and a verifier that random weights pass now and then, which programs run in."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "tasks.jsonl", ROWS)
    (tmp_path / "digits.py").write_text(DIGITS)
    (tmp_path / "guess.py").write_text(GUESS)
    return tmp_path


SMALL = ["chat=false", "max_new_tokens=4", "out=out"]


def said(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    """What the command says, on one line."""
    assert main(["eval", *arguments]) == status
    found = capsys.readouterr()
    return " ".join((found.err if status else found.out).split())


# --- what it measures and leaves behind


def test_a_line_a_task_and_the_numbers_of_them(here: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys, "tasks.jsonl", f"model={model}", "n=4", "k=1,2", "env=digits.py:judge", *SMALL)
    found = lines(here / "out" / "results.jsonl")
    assert [(line["task"], line["prompt"], line["answer"]) for line in found] == [
        (number, row["question"], row["answer"]) for number, row in enumerate(ROWS)
    ]
    rewards = [[float(any(map(str.isdigit, text))) for text in line["samples"]] for line in found]
    assert [line["rewards"] for line in found] == rewards
    right = [sum(each) for each in rewards]
    assert 0 < sum(right) < 12  # or nothing below is a test
    pairs = [1 - (4 - c) * (3 - c) / 12 for c in right]
    written = json.loads((here / "out" / "metrics.json").read_text())
    assert written["tasks"] == 3
    assert written["metrics"] == {
        "eval/reward": pytest.approx(sum(right) / 12),
        "eval/pass@1": pytest.approx(sum(right) / 12),
        "eval/pass@2": pytest.approx(sum(pairs) / 3),
        "eval/length": pytest.approx(sum(map(sum, (line["lengths"] for line in found))) / 12),
        "eval/truncated": pytest.approx(sum(map(sum, (line["truncated"] for line in found))) / 12),
        "eval/invalid": 0.0,
    }
    assert written["over"]["eval/reward"] == 12
    assert written["over"]["eval/pass@2"] == 3
    assert f"eval/pass@2 │ {format_number(sum(pairs) / 3)} │ 3 tasks" in shown
    assert f"eval/reward │ {format_number(sum(right) / 12)} │ 12 samples" in shown
    assert "0 of 3 tasks are done in out; the same command with out=out goes on there" in shown
    assert "eval 1/1 | eval/reward" in shown
    assert yaml.safe_load((here / "out" / "config.yaml").read_text())["max_new_tokens"] == 4


def test_votes_are_of_extracted_answers(here: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "eval/majority" in said(capsys, "tasks.jsonl", f"model={model}", "n=16", *SMALL)
    for line in lines(here / "out" / "results.jsonl"):
        assert line["answers"] == [nrl.envs.final_number(text) for text in line["samples"]]
    written = json.loads((here / "out" / "metrics.json").read_text())["metrics"]
    assert 0 < written["eval/unanswered"] < 1


def test_one_sample_is_greedy_and_several_are_not(here: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "tasks.jsonl", f"model={model}", "env=exact", *SMALL)
    assert yaml.safe_load((here / "out" / "config.yaml").read_text())["temperature"] == 0
    with nrl.cluster("local") as cluster:
        sampler = hf.sampler(cluster.reserve(1), nrl.Model(model), Sampling(0, max_new_tokens=4))
        tasks = nrl.data.rows("tasks.jsonl", chat=False)
        expected = [each.samples for each in nrl.grade(sampler, nrl.envs.exact, tasks)]
    assert [line["samples"] for line in lines(here / "out" / "results.jsonl")] == expected
    said(capsys, "tasks.jsonl", f"model={model}", "n=2", *SMALL[:2], "out=two")
    assert yaml.safe_load((here / "two" / "config.yaml").read_text())["temperature"] == 1


def test_some_of_the_tasks_in_another_order(here: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "tasks.jsonl", f"model={model}", "limit=2", "shuffle=true", "seed=3", *SMALL)
    found = [line["prompt"] for line in lines(here / "out" / "results.jsonl")]
    assert found == [task["prompt"] for task in nrl.data.tasks("tasks.jsonl", seed=3, chat=False).take(2)]
    assert found != [row["question"] for row in ROWS[:2]]


def test_passing_is_a_bound_on_the_reward(here: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "half.py").write_text("def judge(task, trace):\n    return 0.5\n")
    arguments = ["tasks.jsonl", f"model={model}", "env=half.py:judge", *SMALL]
    assert "eval/pass@1 │ 0 │" in said(capsys, *arguments)
    shown = said(capsys, *arguments, "passing=0.5")
    assert "eval/reward │ 0.5 │" in shown
    assert "eval/pass@1 │ 1 │" in shown


def test_the_options_of_an_environment_are_not_in_the_title() -> None:
    """They may be secrets, such as a judge's api_key."""
    options = {"judge": {"url": "http://127.0.0.1:1/v1", "api_key": "hunter2"}, "exact": 1}
    asked = Evaluation(env=options, model="m", n=2)
    assert evaluation._table({}, asked).title == "m on judge, exact, n=2, temperature=1"
    again = Evaluation(env="exact", rescore="results.jsonl")
    assert evaluation._table({}, again).title == "results.jsonl on exact, verified again"


def test_how_tokens_are_drawn() -> None:
    asked = Evaluation("t", "m", n=2, temperature=0.7, top_k=3, top_p=0.9, max_new_tokens=7, stop=("END",))
    assert evaluation._sampling(asked) == Sampling(0.7, top_k=3, top_p=0.9, max_new_tokens=7, stop=("END",))


def test_rows_go_through_a_format(here: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    write(here / "gsm8k.jsonl", [{"question": "7+12=", "answer": "7+12=19\n#### 19"}])
    said(capsys, "gsm8k.jsonl", "format=gsm8k", f"model={model}", *SMALL)
    assert [line["answer"] for line in lines(here / "out" / "results.jsonl")] == ["19"]


def test_a_sample_does_not_depend_on_what_it_is_drawn_with(
    here: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for rows in (4, 8, 256):
        said(capsys, "tasks.jsonl", f"model={model}", "n=4", f"rows={rows}", *SMALL[:2], f"out={rows}")
    found = [lines(here / rows / "results.jsonl") for rows in ("4", "8", "256")]
    assert found[0] == found[1] == found[2]
    said(capsys, "tasks.jsonl", f"model={model}", "n=4", "seed=1", *SMALL)
    assert lines(here / "out" / "results.jsonl") != found[0]


def test_settings_in_a_file(here: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "settings.yaml").write_text(f"{{model: {model}, n: 4, k: [1, 4], max_new_tokens: 4, chat: false, out: o}}")
    assert "eval/pass@4" in said(capsys, "tasks.jsonl", "settings.yaml", "temperature=0.5")
    assert yaml.safe_load((here / "o" / "config.yaml").read_text())["temperature"] == 0.5


def test_without_out_there_is_a_new_folder(here: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "tasks.jsonl", f"model={model}", *SMALL[:2])
    (folder,) = (here / "runs").iterdir()
    assert (folder / "metrics.json").exists()


@contextmanager
def server() -> Iterator[str]:
    with (
        nrl.cluster("local") as cluster,
        serving(Served(hf.sampler(cluster.reserve(1), served_model(), Sampling(max_new_tokens=4)))) as url,
    ):
        yield url


# The sampler behind the server warns once, when it is probed
@pytest.mark.filterwarnings("ignore:.*truncated distribution")
@pytest.mark.parametrize("urls", ["{0}", "{0},{0}/v1"])
def test_a_server_gives_what_the_same_model_here_gives(
    urls: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.save(served_model(), here / "model")
    with server() as url:
        at = f"url={urls.format(url)}"
        said(capsys, "tasks.jsonl", "model=model", "n=4", "sampler=openai", at, "engine.in_flight=4", *SMALL)
    said(capsys, "tasks.jsonl", "model=model", "n=4", *SMALL[:2], "out=local")
    results = [lines(here / name / "results.jsonl") for name in ("out", "local")]
    assert results[0] == results[1]
    assert results[0][0]["samples"][0]


# --- environments


def test_an_environment_is_played(here: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys, "tasks.jsonl", f"model={model}", "n=8", "k=1,2", "env=guess.py:env", *SMALL)
    found = lines(here / "out" / "results.jsonl")
    rewards, turns, left, right, digit, lengths = [], [], [], [], [], []
    for line, row in zip(found, ROWS, strict=True):
        assert (line["prompt"], line["answer"], line["answers"]) == (row["question"], row["answer"], None)
        for place, parts in enumerate(line["conversations"]):
            said_by_policy = [part for part in parts if part["role"] == "policy"]
            assert parts[0] == {"role": "prompt", "tokens": [0, 7], "text": "Guess: "}
            assert {part["text"] for part in parts[2::2]} <= {"higher ", "lower ", "what? "}
            assert [part["role"] for part in parts[1:]] == ["policy", "environment"] * (len(said_by_policy) - 1) + [
                "policy"
            ]
            assert line["rewards"][place] == sum(part["reward"] for part in said_by_policy)
            assert re.sub("<(pad|bos|eos|unk)>", "", said_by_policy[-1]["text"]) == line["samples"][place]
            assert line["turns"][place] == len(said_by_policy)
            lengths.append(sum(part["tokens"][1] - part["tokens"][0] for part in said_by_policy))
            assert line["lengths"][place] == lengths[-1]
        rewards += line["rewards"]
        turns += line["turns"]
        left += line["numbers"]["env/left"]
        right += line["numbers"]["reward/right"]
        digit += line["numbers"]["reward/digit"]
        assert line["statuses"] == ["ok"] * 8
    assert len(set(turns)) > 1
    assert 0 < sum(right) < 24
    passed = [sum(reward >= 1 for reward in line["rewards"]) for line in found]
    pairs = [1 - (8 - c) * (7 - c) / 56 for c in passed]
    assert json.loads((here / "out" / "metrics.json").read_text()) == {
        "tasks": 3,
        "metrics": {
            "eval/reward": pytest.approx(sum(rewards) / 24),
            "eval/pass@1": pytest.approx(sum(passed) / 24),
            "eval/pass@2": pytest.approx(sum(pairs) / 3),
            "eval/env/left": pytest.approx(sum(left) / 24),
            "eval/reward/digit": pytest.approx(sum(digit) / 24),
            "eval/reward/right": pytest.approx(sum(right) / 24),
            "eval/turns": pytest.approx(sum(turns) / 24),
            "eval/length": pytest.approx(sum(lengths) / 24),
            "eval/truncated": pytest.approx(sum(sum(line["truncated"]) for line in found) / 24),
            "eval/status/parse_fail": 0,
            "eval/status/timeout": 0,
            "eval/status/infra_error": 0,
            "eval/status/skipped": 0,
            "eval/invalid": 0,
        },
        "over": {
            **{f"eval/{name}": 24 for name in ("reward", "env/left", "reward/digit", "reward/right", "turns")},
            **dict.fromkeys(("eval/length", "eval/truncated"), 24),
            **dict.fromkeys(("eval/pass@1", "eval/pass@2"), 3),
        },
    }
    assert f"eval/turns │ {format_number(sum(turns) / 24)} │ 24 samples" in shown
    written = yaml.safe_load((here / "out" / "config.yaml").read_text())
    assert written["env"] == "guess.py:env"


@pytest.mark.parametrize("name", ["guess", "tools"])
def test_the_environments_of_the_examples_are_played(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Named as docs/eval.md says, with sums as tasks, by a model whose chat template has tools."""
    tiny.save(tiny.model(tokenizer=tiny.bpe([tiny.CHATML]), num_hidden_layers=1), here / "chatty")
    env = ROOT / "examples" / f"{name}.py"
    shown = said(
        *(capsys, "arithmetic", "limit=2", "n=2", "k=1,2", "model=chatty", f"env={env}:env"),
        *("max_new_tokens=4", "out=out"),
    )
    assert "eval/pass@2" in shown
    found = lines(here / "out" / "results.jsonl")
    statuses = {status for line in found for status in line["statuses"]}
    assert statuses <= {"ok", "parse_fail"}  # a model that knows nothing seldom writes a number
    for line in found:
        for turns, parts in zip(line["turns"], line["conversations"], strict=True):
            assert turns == sum(part["role"] == "policy" for part in parts)
            assert ("calculator" in parts[0]["text"]) == (name == "tools")
            assert line["prompt"] in parts[0]["text"]
    metrics = json.loads((here / "out" / "metrics.json").read_text())["metrics"]
    assert metrics["eval/invalid"] == 0
    assert {"guess": "eval/env/turns_left", "tools": "eval/env/limits/turns"}[name] in metrics


@pytest.mark.parametrize("name", ["guess.py:make", "guess.py:Made", "guess:env"])
def test_an_environment_is_a_value_or_made_by_a_function(
    name: str, here: Path, model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(here)
    for out, env in (("one", name), ("out", "guess.py:env")):
        said(capsys, "tasks.jsonl", f"model={model}", "n=2", f"env={env}", *SMALL[:2], f"out={out}")
    assert lines(here / "one" / "results.jsonl") == lines(here / "out" / "results.jsonl")
    sys.modules.pop("guess", None)


def test_episodes_that_were_played_are_not_played_again(
    here: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["tasks.jsonl", f"model={model}", "n=4", "rows=4", "env=guess.py:env", *SMALL]
    said(capsys, *arguments)
    results, metrics = here / "out" / "results.jsonl", (here / "out" / "metrics.json").read_text()
    whole = results.read_text()
    first, second, third = whole.splitlines(keepends=True)
    for left, done in ((first, 1), (first + second + third[:50], 2), (whole, 3)):
        results.write_text(left)
        assert f"eval: {done} of 3 tasks are done" in said(capsys, *arguments)
        assert results.read_text() == whole
        assert (here / "out" / "metrics.json").read_text() == metrics
    refused = said(capsys, *arguments, "env=guess.py:make", status=2)
    assert "(env: guess.py:env -> guess.py:make); give another folder" in refused


def test_an_environment_that_fails_is_counted(here: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    write(here / "tasks.jsonl", [{"prompt": "broken"}, {"prompt": "whole"}])
    with pytest.warns(UserWarning, match="2 of 4 episodes failed"):
        said(capsys, "tasks.jsonl", f"model={model}", "n=2", "env=guess.py:env", *SMALL)
    first, second = lines(here / "out" / "results.jsonl")
    assert (first["rewards"], first["samples"], first["turns"]) == ([None, None], ["", ""], [0, 0])
    failures = lines(here / "out" / "failures.jsonl")
    assert [(line["task"], line["sample"], line["status"], line["prompt"]) for line in failures] == [
        (0, place, "infra_error", "broken") for place in range(2)
    ]
    assert all(line["error"].startswith("OSError: away") for line in failures)
    assert first["statuses"] == ["infra_error"] * 2
    assert first["numbers"] == {"env/left": [None, None], "reward/digit": [None, None], "reward/right": [None, None]}
    assert None not in second["rewards"]
    written = json.loads((here / "out" / "metrics.json").read_text())
    assert (written["metrics"]["eval/invalid"], written["metrics"]["eval/status/infra_error"]) == (2, 2)
    assert (written["over"]["eval/turns"], written["over"]["eval/pass@1"]) == (2, 1)


def test_what_failed_is_masked_and_what_did_not_leaves_no_file(
    here: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "away.py").write_text(
        "def judge(task, trace):\n    if task['prompt'] == '1+1=':\n"
        "        raise OSError('no AKIA' + 'ABCDEFGHIJKLMNOP')\n    return 1.0\n"
    )
    with pytest.warns(UserWarning, match="1 of 3 episodes failed"):
        said(capsys, "tasks.jsonl", f"model={model}", "env=away.py:judge", *SMALL)
    (line,) = lines(here / "out" / "failures.jsonl")
    assert line["error"].startswith("OSError: no ***")
    for name in ("failures.jsonl", "results.jsonl"):
        assert "AKIAABCDEFGHIJKLMNOP" not in (here / "out" / name).read_text()
    said(capsys, "tasks.jsonl", f"model={model}", *SMALL[:2], "out=whole")
    assert not (here / "whole" / "failures.jsonl").exists()


# --- going on


def attempt(*arguments: str) -> None:
    sys.exit(main(["eval", *arguments]))


def test_killed_and_started_again_it_ends_with_the_same_results(here: Path, model: str) -> None:
    tasks = write(here / "many.jsonl", [{"question": f"{a}+{b}=", "answer": a + b} for a in range(5) for b in range(4)])
    (here / "killing.py").write_text(
        "import os, signal\nfrom pathlib import Path\n"
        "asked, armed = 0, Path(__file__).with_name('armed')\n"
        "def judge(task, trace):\n    global asked\n    asked += 1\n"
        "    if asked == 30 and armed.exists():\n        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return float(any(map(str.isdigit, trace.text)))\n"
    )

    def start(out: str) -> int | None:
        settings = ["n=4", "rows=16", f"env={here}/killing.py:judge", "chat=false", "max_new_tokens=4"]
        return child(attempt, tasks, f"model={model}", *settings, f"out={here / out}")

    assert start("whole") == 0
    (here / "armed").touch()
    assert start("killed") == -signal.SIGKILL
    (here / "armed").unlink()
    whole, killed = (here / name / "results.jsonl" for name in ("whole", "killed"))
    assert killed.read_text() == "".join(whole.read_text().splitlines(keepends=True)[:4])  # 16 samples, drawn together
    with killed.open("a") as file:  # as if it had been killed while it wrote the next four
        file.write(json.dumps(lines(whole)[4] | {"samples": ["of another batch"] * 4}) + '\n{"task": 5, "prom')
    assert start("killed") == 0
    assert killed.read_text() == whole.read_text()
    assert len(lines(whole)) == 20
    assert (here / "killed" / "metrics.json").read_text() == (here / "whole" / "metrics.json").read_text()


def test_what_is_sampled_together_counts_together(here: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["tasks.jsonl", f"model={model}", "n=4", "rows=8", *SMALL]  # two tasks together, then one
    said(capsys, *arguments)
    results = here / "out" / "results.jsonl"
    whole = results.read_text()
    first, second, third = whole.splitlines(keepends=True)
    altered = json.dumps(json.loads(first) | {"samples": ["of another batch"] * 4}) + "\n"
    for left, done in ((altered, 0), (first + second + third[:20], 2), (first + second[:-1], 0), (whole, 3)):
        results.write_text(left)
        assert f"eval: {done} of 3 tasks are done" in said(capsys, *arguments)
        assert results.read_text() == whole


@pytest.mark.ray
@pytest.mark.timeout(600)
@pytest.mark.parametrize("judge", [pytest.param("env=number", marks=pytest.mark.slow), "env={}/guess.py:env"])
def test_on_ray_it_gives_what_it_gives_here(judge: str, here: Path, model: str) -> None:
    results = []
    for cluster in ("local", "ray"):
        settings = [f"model={model}", judge.format(here), "n=4", "chat=false", "max_new_tokens=4", f"cluster={cluster}"]
        assert child(attempt, str(here / "tasks.jsonl"), *settings, f"out={here / cluster}") == 0
        results.append(lines(here / cluster / "results.jsonl"))
    assert results[0] == results[1]


@pytest.mark.parametrize("line", ["{}", "[]", '{"task": 1}', '{"task": 2, "prompt": 1}', "no JSON"])
def test_results_that_were_not_written_so_are_not_thrown_away(
    line: str, here: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said(capsys, "tasks.jsonl", f"model={model}", *SMALL)
    results = here / "out" / "results.jsonl"
    changed = results.read_text().splitlines()
    results.write_text("\n".join([changed[0], line, changed[2], ""]))
    before = results.read_bytes()
    assert "eval: out/results.jsonl, line 2 is not the result of task 1; mend it, or" in said(
        capsys, "tasks.jsonl", f"model={model}", *SMALL, status=2
    )
    assert results.read_bytes() == before


def test_a_verifier_that_fails_is_counted(here: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "away.py").write_text(
        "def judge(task, trace):\n    if '2' in task['answer']:\n        raise OSError('away')\n    return 1.0\n"
    )
    write(here / "tasks.jsonl", [{"question": "1+1=", "answer": "2"}, {"question": "1+2=", "answer": "3"}])
    with pytest.warns(UserWarning, match="2 of 4 episodes failed"):
        said(capsys, "tasks.jsonl", f"model={model}", "n=2", "k=1,2", "env=away.py:judge", *SMALL)
    first, second = lines(here / "out" / "results.jsonl")
    assert (first["rewards"], second["rewards"]) == ([None, None], [1.0, 1.0])
    assert first["answers"] is None
    whole = [
        {"task": 0, "sample": each, "status": "infra_error", "error": "OSError: away", "prompt": "1+1="}
        for each in range(2)
    ]
    failures = here / "out" / "failures.jsonl"
    assert [line | {"error": line["error"][:13]} for line in lines(failures)] == whole
    before = failures.read_text()
    for left in ("", '{"task": 7}\n', before + before):  # as a kill, or a part that is sampled again, would leave it
        failures.write_text(left)
        said(capsys, "tasks.jsonl", f"model={model}", "n=2", "k=1,2", "env=away.py:judge", *SMALL)
        assert failures.read_text() == before
    written = json.loads((here / "out" / "metrics.json").read_text())
    assert (written["metrics"]["eval/invalid"], written["metrics"]["eval/pass@2"]) == (2, 1)
    assert (written["over"]["eval/pass@2"], written["over"]["eval/reward"], written["tasks"]) == (1, 2, 2)


def test_where_nothing_could_be_measured_a_number_is_null(
    here: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "away.py").write_text(
        "async def judge(task, trace):\n    raise (ValueError if task['answer'] == 5 else OSError)('away')\n"
    )
    with pytest.warns(UserWarning, match="3 of 3 episodes failed"):
        shown = said(capsys, "tasks.jsonl", f"model={model}", "env=away.py:judge", *SMALL, status=2)
    assert "eval: all 3 samples failed, 2 of them with: OSError: away. So nothing was measured; mend it; " in shown
    assert "out/failures.jsonl says what each failed with" in shown
    assert json.loads((here / "out" / "metrics.json").read_text())["metrics"]["eval/reward"] is None


def test_what_is_done_is_not_sampled_again(here: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["tasks.jsonl", f"model={model}", "n=4", *SMALL]
    said(capsys, *arguments)
    before = (here / "out" / "results.jsonl").read_bytes()
    # Other measures of the same samples; a sampler that was made would refuse what it is given
    shown = said(capsys, *arguments, "k=1,2,4", "engine.speed=3")
    assert "3 of 3 tasks are done in out" in shown
    assert "eval 1/1" not in shown
    assert "eval/pass@4" in shown
    assert (here / "out" / "results.jsonl").read_bytes() == before


def test_what_was_asked_otherwise_is_refused(here: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["tasks.jsonl", f"model={model}", "n=4", *SMALL]
    said(capsys, *arguments)
    refused = said(capsys, *arguments, "n=2", status=2)
    assert refused == (
        "nrl: eval: out=out holds an evaluation of something else (n: 4 -> 2); give another folder, or remove that one"
    )
    write(here / "tasks.jsonl", [*ROWS[:2], {"question": "1+2=", "answer": "3"}])
    assert "(digest_of_tasks: " in said(capsys, *arguments, status=2)
    write(here / "tasks.jsonl", ROWS)
    said(capsys, *arguments)
    os.utime(Path(model) / "model.safetensors", (1, 1))  # trained on and exported again
    assert "(digest_of_model: " in said(capsys, *arguments, status=2)


def test_two_at_once_are_refused(here: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with ExitStack() as stack:
        claim(here / "out", stack)
        assert "another process is running in out=out" in said(
            capsys, "tasks.jsonl", f"model={model}", *SMALL, status=2
        )


# --- what it refuses


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gone.jsonl"], "nrl: tasks: 'gone.jsonl' is neither a file (looked in "),
        (
            ["unanswered.jsonl"],
            "nrl: tasks: unanswered.jsonl, line 2: number: the task has no 'answer', only 'question'",
        ),
        (["wordy.jsonl"], "wordy.jsonl, line 1: number: task['answer'] is 'many', from which no number can be read"),
        (["unanswered.jsonl", "env=exact"], "unanswered.jsonl, line 2: exact: the task has no 'answer'"),
        (
            ["unanswered.jsonl", "format=gsm8k"],
            "unanswered.jsonl, line 1: gsm8k: 'answer' has no number",
        ),
        (["tasks.jsonl", "format=gsm9k"], "nrl: tasks: there is no format 'gsm9k'; there are gsm8k, "),
        (["tasks.jsonl", "n=4", "k=1,8"], "k: 8 of n=4 samples cannot be drawn; give k from 1 to n, or a larger n"),
        (["tasks.jsonl", "k=0"], "k: 0 of n=1 samples cannot be drawn"),
        (["tasks.jsonl", "k=2.5"], "k.0: expected int, found 2.5"),
        (["tasks.jsonl", "n=0"], "nrl: eval: 1 problem n: 'n' must be >= 1: 0"),
        (["tasks.jsonl", "n=4", "temperature=0"], "temperature: 0 gives the same answer n=4 times; give n=1, or a"),
        (["tasks.jsonl", "top_p=3"], "nrl: eval: 'top_p' must be <= 1: 3.0"),
        (
            ["tasks.jsonl", "env=numbr"],
            "nrl: env=numbr: there is no such environment; did you mean 'number'? Or give one of your own as FILE.py:",
        ),
        (["tasks.jsonl", "env=gone.py:judge"], "nrl: env=gone.py:judge: there is no file gone.py in "),
        (["tasks.jsonl", "env=gone:judge"], "env=gone:judge: gone cannot be imported: ModuleNotFoundError"),
        (
            ["tasks.jsonl", "env=digits.py:jugde"],
            "env=digits.py:jugde: digits.py has no 'jugde'; did you mean 'judge'?",
        ),
        (["tasks.jsonl", "env.number.timeout=0"], "nrl: env=number: timeout is 0; give seconds, or null for no limit"),
        (["tasks.jsonl", "env=:env"], "nrl: env=:env: the module is not named; give one of your own as FILE.py:NAME"),
        (["tasks.jsonl", "env=digits.py:env"], "env=digits.py:env: digits.py has no 'env'; it has judge"),
        (["tasks.jsonl", "env=guess.py:__name__"], "env=guess.py:__name__ is a str; give an Environment, a function"),
        (["tasks.jsonl", "env=guess.py:needy"], "env=guess.py:needy needs task; give env.guess.py:needy.task="),
        (["tasks.jsonl", "env=guess.py:other"], "env=guess.py:other returned an int; let it return an Environment or"),
        (["env=digits.py:judge"], "nrl: env=digits.py:judge brings no tasks; say where they come from, as data=FILE"),
        (["tasks.jsonl", "verifier=number"], "verifier: no such key"),
        (["tasks.jsonl", "sampler=openai"], "sampler=openai needs url=, the address of a server, such as http://"),
        (["tasks.jsonl", "url=http://x/v1"], "url: sampler=hf takes no url; leave it out, or give sampler=openai"),
        (["tasks.jsonl", "sampler=openai", "url=x:1"], "eval: sampler=openai: openai.sampler: the url is 'x:1'; give"),
        (["tasks.jsonl", "engine.speed=3"], "nrl: hf.sampler: it has no engine to set speed of; that is for vllm."),
        (["tasks.jsonl", "sampler=vllm"], "nrl: mesh: executable 'vllm' needs the package 'vllm'"),
        (["tasks.jsonl", "gone.jsonl"], "nrl: eval: found tasks.jsonl and gone.jsonl; give one file of tasks"),
        (["tasks.jsonl", "--n", "4"], "--n: options are written key=value, without dashes"),
        (["tasks.jsonl", "kk=4"], "kk: no such key; did you mean 'k'?"),
        (["arithmetic"], "nrl: eval: arithmetic has no end; say how many tasks, such as limit=256"),
        (["tasks.jsonl", "limit=0"], "limit: 'limit' must be >= 1: 0"),
        (["tasks.jsonl", "out=digits.py"], "nrl: eval: out=digits.py is a file; give a folder, or leave it out"),
        (
            ["tasks.jsonl", "out=."],
            "nrl: eval: out=. holds something else than an evaluation (digits.py, guess.py, tasks",
        ),
        (["tasks.jsonl", "model=./gone"], "nrl: Model: the tokenizer of './gone': there is no such folder on host "),
        (["tasks.jsonl", "model=gone/gone"], "neither a folder here nor a tokenizer that the Hugging Face hub gives"),
        ([], "nrl: eval: number has no end; say how many tasks, such as limit=256"),
    ],
)
def test_what_cannot_be_done_is_one_message_and_leaves_no_results(
    arguments: list[str], message: str, here: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(here / "unanswered.jsonl", [ROWS[0], {"question": "1+1=", "solution": "2"}])
    write(here / "wordy.jsonl", [{"question": "1+1=", "answer": "many"}])
    found = said(capsys, f"model={model}", *SMALL[:2], *arguments, status=2)
    assert message in found
    assert not list(here.glob("**/results.jsonl"))


def test_a_model_that_is_not_there_leaves_no_folder(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "tasks.jsonl", "model=./gone", status=2)
    assert not (here / "runs").exists()


def test_help_lists_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["eval", "--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: nrl eval TASKS [FILE.yaml | FILE.toml | config=FILE ...] [key=value ...]\n")
    assert "  k: tuple[int, ...] = [1]\n      pass@k for these, such as k=1,4,8\n" in shown
    assert "      0, the most probable answer, if n is 1; else 1\n" in shown


# --- runs


def test_which_export_of_a_run_is_taken(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for name in ("best", "model"):
        (run / name).mkdir(parents=True)
        (run / name / "config.json").touch()
        assert find_model(str(run)) == str(run / name)  # the exported one goes before the best
    assert find_model(str(run / "model")) == str(run / "model")
    assert find_model("owner/name") == "owner/name"


def test_a_run_that_has_exported_nothing_says_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("checkpoints: {every: 50, keep: 2, best: eval/reward, mode: max}\n")
    with pytest.raises(ModelError, match=r"has exported no model .*, and has no checkpoints; let it run to its end"):
        find_model(str(tmp_path))
    for step, reward in enumerate([0.1, 0.7, 0.4]):
        checkpoint.store(
            tmp_path / "checkpoints" / "train", step, {}, Checkpoints(best="eval/reward"),
            {"metrics": {"eval/reward": reward}},
        )  # fmt: skip
    with pytest.raises(ModelError, match=r"are 000002, 000003, the best of them 000002\. Let it run .*: nrl export "):
        find_model(str(tmp_path))
    (tmp_path / "config.yaml").unlink()  # a program of another kind
    with pytest.raises(ModelError, match=r"checkpoints are 000002, 000003\. Let it run .*: nrl export "):
        find_model(str(tmp_path))


def test_a_folder_of_something_else_is_said(here: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        ModelError, match=r"is neither the folder of a model, .*; it holds digits.py, guess.py, tasks.jsonl"
    ):
        find_model(str(here))
    said(capsys, "tasks.jsonl", f"model={model}", *SMALL)
    with pytest.raises(ModelError, match=r"nor of a run; it holds .*metrics.json, report.html, results.jsonl"):
        find_model("out")


def grpo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_grpo_evaluated", ROOT / "examples" / "grpo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_it_prints_the_number_that_keep_best_uses(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = grpo()
    cfg = example.Config(steps=2, warmup=30, prompts=4, group_size=4, evaluate_every=1, evaluate_prompts=96, out="run")
    example.main(cfg)
    first, last = (line["eval/reward"] for line in lines(here / "run" / "metrics.jsonl"))
    assert 0 < last < 1
    capsys.readouterr()

    def reward(model: str, out: str) -> float:
        said(capsys, "arithmetic", f"model={model}", "seed=2", "limit=96", "max_new_tokens=4", f"out={out}")
        return float(json.loads((here / out / "metrics.json").read_text())["metrics"]["eval/reward"])

    assert reward("run", "last") == last
    (here / "run" / "model").rename(here / "elsewhere")
    with pytest.raises(ModelError) as raised:
        find_model("run")
    champion = checkpoint.best(checkpoint.checkpoints("run/checkpoints/train"), cfg.checkpoints)
    assert champion is not None
    assert main(shlex.split(str(raised.value).rpartition("or export one: ")[2])[1:]) == 0
    assert reward("run", "best") == champion.meta["metrics"]["eval/reward"] == max(first, last)
