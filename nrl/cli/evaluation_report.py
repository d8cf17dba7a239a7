"""The numbers of each task of an evaluation, ``tasks.jsonl``, and its page, ``report.html``."""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nrl.cli.evaluation_folder import MARK, read_config
from nrl.envs.types import text_of
from nrl.errors import DataError
from nrl.log import redact, redacted
from nrl.rollout.evaluate import Graded
from nrl.run import charts, config_file, sample_pages
from nrl.run.report_rows import answer_row, text_part
from nrl.run.reporting import write_page
from nrl.run.sample_pages import Sample, SampleWriter

__all__ = ["is_evaluation", "report", "summarize_tasks", "write_tasks"]

_NUMBERS = ("mean", "deviation", "smallest", "largest", "pass_rate")
_ROWS, _TEXT = 1000, 200  # rows of the table and characters of a prompt, at most


def summarize_tasks(graded: Sequence[Graded], passing: float = 1.0) -> list[dict[str, Any]]:
    """Summarize the rewards of each task over its valid samples; None: there are too few samples.

    >>> summarize_tasks([Graded("1+1=", "2", ["2", "3", "?"], [1.0, 0.0, None], None, [1, 1, 1], [False] * 3)])
    [{'task': 0, 'valid': 2, 'invalid': 1, 'mean': 0.5, 'deviation': 0.7071067811865476, 'smallest': 0.0,
      'largest': 1.0, 'pass_rate': 0.5, 'prompt': '1+1='}]
    """
    records = []
    for number, result in enumerate(graded):
        rewards = [reward for reward in result.rewards if reward is not None]
        numbers: dict[str, float | None] = dict.fromkeys(_NUMBERS)
        if rewards:
            numbers["mean"] = statistics.fmean(rewards)
            numbers["smallest"], numbers["largest"] = min(rewards), max(rewards)
            numbers["pass_rate"] = sum(reward >= passing for reward in rewards) / len(rewards)
        if len(rewards) > 1:
            numbers["deviation"] = statistics.stdev(rewards)
        counts = {"task": number, "valid": len(rewards), "invalid": len(result.rewards) - len(rewards)}
        records.append(counts | numbers | {"prompt": result.prompt})
    return records


def write_tasks(out: Path, graded: Sequence[Graded], passing: float) -> None:
    """Write ``tasks.jsonl``, of results that were read, whose texts are masked."""
    text = "".join(json.dumps(record) + "\n" for record in summarize_tasks(graded, passing))
    config_file.replace(out / "tasks.jsonl", text)


def is_evaluation(folder: Path) -> bool:
    """Return whether a folder is that of an evaluation."""
    return folder.is_dir() and MARK in read_config(folder)


def report(folder: Path) -> Path:
    """Write ``report.html`` into the folder of an evaluation that has ended.

    Raises:
        DataError: the evaluation has not ended.
    """
    paths = [folder / "metrics.json", folder / "tasks.jsonl"]
    if not all(path.is_file() for path in paths):
        raise DataError(
            f"report: the evaluation in out={folder} has not ended; let it end, by the same nrl eval with out={folder}"
        )
    metrics = json.loads(paths[0].read_text(encoding="utf-8"))
    tasks = [json.loads(line) for line in paths[1].read_text(encoding="utf-8").splitlines()]
    token = sample_pages.token_of([*paths, *folder.glob("results.jsonl")])
    part = _make_part(metrics, tasks)
    part["samples"], part["unread"] = _write_answers(folder, metrics, SampleWriter(folder, f"{token}-0"))
    return write_page(folder, [part], max(path.stat().st_mtime for path in paths), token=token)


def _write_answers(folder: Path, metrics: Mapping[str, Any], writer: SampleWriter) -> tuple[dict[str, Any] | None, int]:
    """Write the answers, and return the page's data of them and the number of unreadable lines of results.

    The writer gets the answers to all tasks, or to an even selection where there are very many.
    """
    path = folder / "results.jsonl"
    if not path.is_file():
        return None, 0
    passing = float(read_config(folder).get("passing", 1.0))
    names = [redact(key.removesuffix("/eval/invalid")) for key in metrics["metrics"] if key.endswith("/eval/invalid")]
    stride, unread = sample_pages.stride_of(path.stat().st_size), 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines):
            if number % stride:
                continue
            try:
                record = json.loads(line)
                task = record.pop("task")
                graded = Graded(**redacted(record))
                samples = _make_samples(task, graded, passing, names)
            except (ValueError, TypeError, AttributeError, LookupError):
                unread += 1
                continue
            for sample in samples:
                writer.add(sample)
    page_data = writer.finish()
    if not page_data["total"]:
        return None, unread
    return {"unit": "task", "file": "results.jsonl", "peak": 0.0, "stride": stride} | page_data, unread


def _make_samples(task: int, graded: Graded, passing: float, names: Sequence[str]) -> list[Sample]:
    """The answers to a task, below its prompt and the right answer."""
    valid = [reward for reward in graded.rewards if reward is not None]
    passed = sum(reward >= passing for reward in valid)
    parts = [("prompt", text_part("prompt", text_of(graded.prompt), graded.prompt))]
    if graded.answer is not None:
        text = graded.answer if isinstance(graded.answer, str) else json.dumps(graded.answer, ensure_ascii=False)
        parts.append(("reference", text_part("prompt", text)))
    source = graded.fields.get("source")
    if isinstance(source, int) and 0 <= source < len(names):
        source = names[source]
    head = {"facts": [("task", str(task)), ("passed", f"{passed} of {len(valid)}")], "parts": parts}
    return [
        Sample(
            step=float(task),
            group="",
            source="" if source is None else str(source),
            reward=reward,
            flags=_flags(graded, index, passing),
            rows=[_row(graded, index, passing)],
            head=head,
        )
        for index, reward in enumerate(graded.rewards)
    ]


def _flags(graded: Graded, index: int, passing: float) -> list[str]:
    reward = graded.rewards[index]
    verdict = "invalid" if reward is None else "right" if reward >= passing else "wrong"
    unanswered = graded.answers is not None and graded.answers[index] is None
    status = graded.statuses[index] if graded.statuses else "ok"
    flags = {"truncated": graded.truncated[index], "unanswered": unanswered, status: status != "ok"}
    return [verdict, *(flag for flag, raised in flags.items() if raised)]


def _row(graded: Graded, index: int, passing: float) -> dict[str, Any]:
    facts: list[tuple[str, Any]] = [("sample", index), ("reward", graded.rewards[index])]
    if graded.answers is not None and graded.answers[index] is not None:
        facts.append(("answer", graded.answers[index]))
    facts.append(("tokens", graded.lengths[index]))
    if graded.turns is not None:
        facts.append(("turns", graded.turns[index]))
    numbers = {name: values[index] for name, values in graded.numbers.items()}
    facts += [(name, value) for name, value in numbers.items() if value is not None]
    failure = graded.failures[index] if graded.failures else None
    if failure:
        facts.append(("error", failure.get("error")))
    conversation = graded.conversations[index] if graded.conversations else None
    return answer_row(graded.samples[index], conversation, facts, _flags(graded, index, passing))


def _make_part(metrics: Mapping[str, Any], tasks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    numbers, over = metrics["metrics"], metrics["over"]
    first = []
    rates = np.array([task["pass_rate"] for task in tasks if task["pass_rate"] is not None])
    if len(rates):
        counts, edges = np.histogram(rates, bins=10, range=(0.0, 1.0))
        x = charts.Axis(0.0, 1.0, charts.BOX["left"], charts.BOX["right"])
        first.append(charts.bars("pass rates of tasks", edges, counts.astype(float), x))
    for name in dict.fromkeys(key.partition("eval/pass@")[0] for key in numbers if "eval/pass@" in key):
        begin = f"{name}eval/pass@"
        points = sorted(
            (int(key.removeprefix(begin)), value)
            for key, value in numbers.items()
            if key.startswith(begin) and value is not None
        )
        if len(points) > 1:
            ks, values = np.array(points, dtype=float).T
            x = charts.Axis(ks[0], ks[-1], charts.BOX["left"], charts.BOX["right"])
            first.append(charts.curve(redact(f"{name}pass@k, by k"), ks, values, x))
    rows = [
        [f"{task['task']:,}", *(_format(task[key]) for key in _NUMBERS), str(task["invalid"]), _shorten(task["prompt"])]
        for task in tasks[:_ROWS]
    ]
    title = f"Tasks, the first {_ROWS} of {len(tasks)}" if len(tasks) > _ROWS else "Tasks"
    metric_rows = [
        [_format(value), f"{over[key]:,}" if key in over else "", redact(key)] for key, value in numbers.items()
    ]
    tiles = [("tasks", f"{metrics['tasks']:,}", "")]
    tiles += [
        (key, _format(numbers[key]), "") for key in ("eval/reward", "eval/pass@1", "eval/invalid") if key in numbers
    ]
    header = ["task", *(key.replace("_", " ") for key in _NUMBERS), "invalid", "prompt"]
    return {
        "name": "evaluation",
        "tiles": tiles,
        "first": first,
        "times": [],
        "tables": [("Metrics", ["value", "over", "metric"], metric_rows), (title, header, rows)],
    }


def _format(value: float | None) -> str:
    return "-" if value is None else charts.number(value)


def _shorten(prompt: Any) -> str:
    text = redact(text_of(prompt))
    return text if len(text) <= _TEXT else text[:_TEXT] + " ..."
