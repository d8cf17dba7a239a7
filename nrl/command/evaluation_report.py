"""The numbers of each task of an evaluation, ``tasks.jsonl``, and its page, ``report.html``."""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nrl.command.evaluation_folder import MARK, config_of
from nrl.envs.contract import text_of
from nrl.episodes.grades import Graded
from nrl.errors import DataError
from nrl.log import redact
from nrl.runs import charts, config_file
from nrl.runs.reporting import write_page

__all__ = ["is_evaluation", "of_tasks", "report", "write_tasks"]

_NUMBERS = ("mean", "deviation", "smallest", "largest", "pass_rate")
_ROWS, _TEXT = 1000, 200  # of the table, at most


def of_tasks(graded: Sequence[Graded], passing: float = 1.0) -> list[dict[str, Any]]:
    """For each task the numbers of its rewards, over its valid samples; None: there are too few of these.

    >>> of_tasks([Graded("1+1=", "2", ["2", "3", "?"], [1.0, 0.0, None], None, [1, 1, 1], [False] * 3)])
    [{'task': 0, 'valid': 2, 'invalid': 1, 'mean': 0.5, 'deviation': 0.7071067811865476, 'smallest': 0.0,
      'largest': 1.0, 'pass_rate': 0.5, 'prompt': '1+1='}]
    """
    found = []
    for number, each in enumerate(graded):
        rewards = [reward for reward in each.rewards if reward is not None]
        numbers: dict[str, float | None] = dict.fromkeys(_NUMBERS)
        if rewards:
            numbers["mean"] = statistics.fmean(rewards)
            numbers["smallest"], numbers["largest"] = min(rewards), max(rewards)
            numbers["pass_rate"] = sum(reward >= passing for reward in rewards) / len(rewards)
        if len(rewards) > 1:
            numbers["deviation"] = statistics.stdev(rewards)
        counts = {"task": number, "valid": len(rewards), "invalid": len(each.rewards) - len(rewards)}
        found.append(counts | numbers | {"prompt": each.prompt})
    return found


def write_tasks(out: Path, graded: Sequence[Graded], passing: float) -> None:
    """Write ``tasks.jsonl``, of results that were read, whose texts are masked."""
    text = "".join(json.dumps(record) + "\n" for record in of_tasks(graded, passing))
    config_file.replace(out / "tasks.jsonl", text)


def is_evaluation(folder: Path) -> bool:
    """Whether a folder is that of an evaluation."""
    return folder.is_dir() and MARK in config_of(folder)


def report(folder: Path) -> Path:
    """Write ``report.html`` into the folder of an evaluation that has ended.

    Raises:
        DataError: it has not ended.
    """
    paths = [folder / "metrics.json", folder / "tasks.jsonl"]
    if not all(path.is_file() for path in paths):
        raise DataError(
            f"report: the evaluation in out={folder} has not ended; let it end, by the same nrl eval with out={folder}"
        )
    metrics = json.loads(paths[0].read_text(encoding="utf-8"))
    tasks = [json.loads(line) for line in paths[1].read_text(encoding="utf-8").splitlines()]
    return write_page(folder, [_part(metrics, tasks)], max(path.stat().st_mtime for path in paths))


def _part(metrics: Mapping[str, Any], tasks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    numbers, over = metrics["metrics"], metrics["over"]
    first = []
    rates = np.array([each["pass_rate"] for each in tasks if each["pass_rate"] is not None])
    if len(rates):
        counts, edges = np.histogram(rates, bins=10, range=(0.0, 1.0))
        x = charts.Axis(0.0, 1.0, charts.BOX["left"], charts.BOX["right"])
        first.append(charts.bars("pass rates of tasks", edges, counts.astype(float), x))
    for name in dict.fromkeys(key.partition("eval/pass@")[0] for key in numbers if "eval/pass@" in key):
        begin = f"{name}eval/pass@"
        some = sorted(
            (int(key.removeprefix(begin)), value)
            for key, value in numbers.items()
            if key.startswith(begin) and value is not None
        )
        if len(some) > 1:
            ks, values = np.array(some, dtype=float).T
            x = charts.Axis(ks[0], ks[-1], charts.BOX["left"], charts.BOX["right"])
            first.append(charts.curve(redact(f"{name}pass@k, by k"), ks, values, x))
    rows = [
        [str(each["task"]), *(_shown(each[key]) for key in _NUMBERS), str(each["invalid"]), _short(each["prompt"])]
        for each in tasks[:_ROWS]
    ]
    title = f"Tasks, the first {_ROWS} of {len(tasks)}" if len(tasks) > _ROWS else "Tasks"
    every = [[_shown(value), str(over.get(key, "")), redact(key)] for key, value in numbers.items()]
    tiles = [("tasks", f"{metrics['tasks']:,}", "")]
    tiles += [
        (key, _shown(numbers[key]), "") for key in ("eval/reward", "eval/pass@1", "eval/invalid") if key in numbers
    ]
    header = ["task", *(key.replace("_", " ") for key in _NUMBERS), "invalid", "prompt"]
    return {
        "name": "evaluation",
        "tiles": tiles,
        "first": first,
        "heatmaps": [],
        "times": [],
        "tables": [("Metrics", ["value", "over", "metric"], every), (title, header, rows)],
    }


def _shown(value: float | None) -> str:
    return "-" if value is None else charts.number(value)


def _short(prompt: Any) -> str:
    text = redact(text_of(prompt))
    return text if len(text) <= _TEXT else text[:_TEXT] + " ..."
