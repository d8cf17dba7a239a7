"""What an evaluation says of each task: `tasks.jsonl`, and the page."""

import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import pytest
from playwright.sync_api import Browser

from nrl import tiny
from nrl.cli.cli import main
from nrl.cli.evaluation_folder import MARK
from nrl.cli.evaluation_report import report, summarize_tasks, write_tasks
from nrl.log import JsonLines
from nrl.rollout.evaluate import Graded
from tests.jsonlines import lines
from tests.run.test_reporting import browser

__all__ = ["browser"]


def graded(*rewards: float | None) -> Graded:
    count = len(rewards)
    return Graded("1+1=", "2", ["2"] * count, rewards, None, [1] * count, [False] * count)


def write_evaluation(out: Path, results: Sequence[Graded], passing: float = 1.0) -> None:
    """The folder of an evaluation that has ended."""
    out.mkdir()
    (out / "config.yaml").write_text(f"{MARK}: x\npassing: {passing}\n")
    with JsonLines(out / "results.jsonl") as written:
        for number, result in enumerate(results):
            written.write({"task": number} | attrs.asdict(result))
    write_tasks(out, results, passing)
    (out / "metrics.json").write_text(json.dumps({"tasks": len(results), "metrics": {"eval/reward": 0.5}, "over": {}}))


@pytest.fixture
def evaluation(tmp_path: Path) -> Path:
    """One task with a verifier, and one that an environment played."""
    prompt = [{"role": "user", "content": "1+1= <b>"}]
    talk: list[Mapping[str, Any]] = [
        {"role": "prompt", "text": "guess", "tokens": [0, 2]},
        {"role": "policy", "text": "12", "reward": 0.25, "tokens": [2, 4], "calls": [{"name": "f", "arguments": {}}]},
        {"role": "environment", "text": "higher", "tokens": [4, 5]},
        {"role": "policy", "text": "15", "reward": 0.5, "tokens": [5, 6]},
    ]
    failed: list[Mapping[str, str] | None] = [None, None, {"status": "timeout", "error": "slow"}]
    plain = Graded(
        prompt, "2", ["It is 2", "3</script>", "no"], [1.0, 0.25, None], ["2", "3", None], [3, 4, 5],
        [False, True, False], {"reward/form": [0.5, None, None]}, failures=failed,
    )  # fmt: skip
    played = Graded(
        "guess", {"low": 1}, ["15"], [0.75], None, [3], [False], turns=[2], statuses=["ok"], conversations=[talk]
    )
    write_evaluation(tmp_path / "out", [plain, played], passing=0.75)
    return tmp_path / "out"


def test_a_page_shows_the_answers_to_each_task(evaluation: Path, browser: Browser) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(report(evaluation).as_uri())
        assert page.locator("h4").all_inner_texts() == ["Task 0", "Task 1"]
        heads = [" ".join(head.inner_text().split()) for head in page.locator(".head").all()]
        assert heads == [
            "task 0 passed 1 of 2 prompt user1+1= <b> reference 2",
            'task 1 passed 1 of 1 prompt guess reference {"low": 1}',
        ]
        facts = [" ".join(line.inner_text().split()) for line in page.locator(".row:not(.head) .facts").all()]
        assert facts == [
            "sample 0 reward 1 answer 2 tokens 3 reward/form 0.5 right",
            "sample 1 reward 0.25 answer 3 tokens 4 wrong truncated",
            "sample 2 reward undefined tokens 5 error slow invalid unanswered",
            "sample 0 reward 0.75 tokens 3 turns 2 right",
        ]
        answers = page.locator(".row:not(.head) .policy .text")
        assert answers.all_inner_texts() == ["It is 2", "3</script>", "no", "12\ncallf()", "15"]
        assert page.locator(".part.answered .text").inner_text() == "higher"
        assert page.locator(".legend").count() == 0
        show, search = page.get_by_label("show"), page.get_by_label("search")
        options = ["all", "right", "wrong", "truncated", "invalid", "unanswered", "valid", "not truncated"]
        assert show.locator("option").all_inner_texts() == options
        show.select_option("wrong")
        assert answers.all_inner_texts() == ["3</script>"]
        assert page.locator(".head").count() == 1  # the task stays above its answer
        show.select_option("right")
        search.fill("GUESS")  # in the prompt
        assert answers.all_inner_texts() == ["12\ncallf()", "15"]


def test_results_that_cannot_be_read_are_counted(evaluation: Path) -> None:
    with (evaluation / "results.jsonl").open("a") as results:
        results.write('{"task": 2}\nnothing\n')
    assert "2 lines could not be read" in report(evaluation).read_text()
    (evaluation / "results.jsonl").unlink()
    assert 'class="samples"' not in report(evaluation).read_text()


def test_numbers_of_a_task_are_over_its_valid_samples() -> None:
    first, second, third = summarize_tasks([graded(0.5, None, 2.0, 0.5), graded(None), graded(1.0)], passing=2.0)
    assert (first["mean"], first["smallest"], first["largest"]) == (1.0, 0.5, 2.0)
    assert first["deviation"] == pytest.approx(0.75**0.5)  # (0.25 + 1 + 0.25) / 2
    assert (first["pass_rate"], first["valid"], first["invalid"]) == (pytest.approx(1 / 3), 3, 1)
    names = ("mean", "deviation", "smallest", "largest", "pass_rate")
    assert [second[name] for name in names] == [None] * 5
    assert (second["valid"], second["invalid"]) == (0, 1)
    assert [third[name] for name in names] == [1.0, None, 1.0, 1.0, 0.0]


def test_the_page_of_an_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny.save(tiny.model(), "model")
    rows: list[dict[str, Any]] = [{"prompt": "<b>1+1="}, {"prompt": "2+3="}]
    Path("tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("same.py").write_text("def judge(task, trace):\n    return float(task['prompt'] == '2+3=')\n")
    settings = ["chat=false", "max_new_tokens=2", "n=2", "k=1,2", "env=same.py:judge", "out=out"]
    assert main(["eval", "tasks.jsonl", "model=model", *settings]) == 0
    assert [(line["task"], line["pass_rate"]) for line in lines(tmp_path / "out" / "tasks.jsonl")] == [(0, 0), (1, 1)]
    page = Path("out/report.html")
    written = page.read_text()
    page.unlink()
    capsys.readouterr()
    assert main(["report", "out"]) == 0
    assert capsys.readouterr().out.strip() == "out/report.html"
    assert page.read_text() == written
    assert "<td>&lt;b&gt;1+1=</td>" in written
    assert "pass@k, by k" in written
    (bars,) = re.findall(r'<path class="area1" d="([^"]*)"', written)
    assert bars.count("M") == 2  # a task in the first bin, and one in the last
    assert 'data-series="1 0 0 0 0 0 0 0 0 1"' in written
    Path("out/tasks.jsonl").unlink()
    assert main(["report", "out"]) == 2
    assert (
        "report: the evaluation in out=out has not ended; let it end, by the same nrl eval" in capsys.readouterr().err
    )


def test_a_browser_shows_it_on_a_phone_and_on_a_desk(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without errors of scripts, and no wider than the window, however long the words of a prompt are."""
    monkeypatch.chdir(tmp_path)
    old: list[dict[str, Any]] = [
        {
            "task": task, "prompt": f"{task}+1= {'x' * 300 if task == 3 else ''}", "answer": f"{task + 1}",
            "samples": [f"{task + 1}", "no idea " * 30], "rewards": [0.0, 0.0], "answers": None, "lengths": [1, 60],
            "truncated": [False, True], "numbers": {},
        }
        for task in range(20)
    ]  # fmt: skip
    Path("old.jsonl").write_text("".join(json.dumps(each) + "\n" for each in old))
    with ThreadPoolExecutor(1) as apart:  # the browser's event loop runs in this thread
        assert apart.submit(main, ["eval", "rescore=old.jsonl", "env=number", "out=out", "k=1,2"]).result() == 0
    wrong = list[str]()
    with browser.new_context() as context:
        page = context.new_page()
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto((tmp_path / "out" / "report.html").as_uri())
        assert page.locator("figure").count() == 2
        for width in (1280, 390):
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth") == width
            name = page.locator(".table").first.locator("td:last-child").first
            assert name.inner_text() == "eval/reward"
            assert name.evaluate("each => getComputedStyle(each).textAlign") == "left"
    assert wrong == []
