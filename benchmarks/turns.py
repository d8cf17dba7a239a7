"""Draw what `examples/guess.py` and `examples/tools.py` learn, with their defaults and several seeds.

    python benchmarks/turns.py guess --figure docs/images/guess.svg    # two minutes on one CPU core
    python benchmarks/turns.py tools --figure docs/images/tools.svg    # six minutes
    python benchmarks/turns.py guess --quick                           # does it run?

The lines are means over the episodes of a step: ``reward`` of what was sampled, and what else the example reports.
``greedy`` are the most probable answers to other tasks, after the last step.
"""

import argparse
import importlib
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks._figure import curves
from benchmarks._machine import described, watched
from benchmarks._paired import spread

__all__ = ["LINES", "main", "measure", "options", "report", "series"]

LAST = 10  # the steps that a reward is the mean of
LINES = {
    "guess": {"reward": "found the number", "env/turns_left": "turns left"},
    "tools": {
        "reward": "right answer",
        "reward/found": "a call has found it",
        "env/tools/malformed": "malformed calls",
    },
}
"""For each example, what is drawn of ``metrics.jsonl``, and the words for it.

>>> list(LINES)
['guess', 'tools']
"""


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line.

    >>> options(["guess", "--quick"]).seeds
    1
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", choices=list(LINES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--figure", type=Path, default=None, help="draw the curves as SVG")
    parser.add_argument("--out", type=Path, default=None, help="write every step as JSON")
    parser.add_argument("--quick", action="store_true", help="few steps: shows that it runs, measures nothing")
    args = parser.parse_args(words)
    args.settings = {}
    if args.quick:
        args.seeds, args.settings = 1, {"steps": 3, "warmup": 2, "prompts": 2, "evaluate_every": 3}
    return args


def main() -> None:
    """Train, print the table, draw the figure."""
    args = options()
    torch.set_num_threads(args.threads)
    with watched() as machine:
        found = measure(args.example, args.seeds, **args.settings)
    print(report(args.example, found))
    print(f"\ntorch threads: {args.threads}. All cores meanwhile: {described(machine)}.")
    if args.figure:
        drawn = {words: [series(seed, key) for seed in found] for key, words in LINES[args.example].items()}
        args.figure.write_text(curves(drawn, "means over episodes", width=5))
    if args.out:
        args.out.write_text(json.dumps({"found": found, "machine": machine}, default=str))


def measure(example: str, seeds: int, **settings: Any) -> list[list[dict[str, Any]]]:
    """The lines of ``metrics.jsonl`` of a run with each seed."""
    module = importlib.import_module(f"examples.{example}")
    found = []
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            module.main(module.Config(seed=seed, out=folder, **settings))
            found.append([json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()])
    return found


def series(lines: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """A metric over steps; where no episode reported it, the value before, at first 0, and never more than 1.

    >>> series([{}, {"a": 0.5}, {"a": None}], "a")
    [0.0, 0.5, 0.5]
    """
    found = [0.0]
    for line in lines:
        found.append(found[-1] if line.get(key) is None else min(1.0, line[key]))
    return found[1:]


def report(example: str, found: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """Medians over seeds (and ranges), as Markdown.

    >>> print(report("guess", [[{"reward": 0.25, "eval/reward": 0.5}]]).splitlines()[2])
    | guess | 0.25 (0.25-0.25) | 0.25 (0.25-0.25) | 0.50 (0.50-0.50) | 0.0 |
    """
    rewards = [[line["reward"] for line in seed] for seed in found]
    seconds = [sum(line.get("time/total", 0.0) for line in seed) / 60 for seed in found]
    columns = [
        spread([statistics.fmean(seed[:LAST]) for seed in rewards]),
        spread([statistics.fmean(seed[-LAST:]) for seed in rewards]),
        spread([seed[-1]["eval/reward"] for seed in found]),
        f"{statistics.median(seconds):.1f}",
    ]
    return (
        f"| | reward, first {LAST} steps | last {LAST} | greedy | minutes |\n|---|---|---|---|---|\n"
        f"| {example} | {' | '.join(columns)} |"
    )


if __name__ == "__main__":
    main()
