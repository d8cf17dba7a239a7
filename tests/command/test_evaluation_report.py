"""What an evaluation says of each task: `tasks.jsonl`, and the page."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from nrl import tiny
from nrl.command.cli import main
from nrl.command.evaluation_report import of_tasks
from nrl.episodes.grades import Graded
from tests.jsonlines import lines
from tests.runs.test_reporting import browser

__all__ = ["browser"]


def graded(*rewards: float | None) -> Graded:
    count = len(rewards)
    return Graded("1+1=", "2", ["2"] * count, rewards, None, [1] * count, [False] * count)


def test_numbers_of_a_task_are_over_its_valid_samples() -> None:
    first, second, third = of_tasks([graded(0.5, None, 2.0, 0.5), graded(None), graded(1.0)], passing=2.0)
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
