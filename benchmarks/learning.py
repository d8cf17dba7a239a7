"""Draw what the tiny model of an example learns, with several seeds.

    python benchmarks/learning.py guess --figure docs/images/guess.svg    # two minutes on one CPU core
    python benchmarks/learning.py tools --figure docs/images/tools.svg    # six minutes
    python benchmarks/learning.py reasoning --figure docs/images/reasoning.svg
    python benchmarks/learning.py constraints --figure docs/images/constraints.svg
    python benchmarks/learning.py guess --quick                           # does it run?

``guess`` and ``tools`` are these examples with their defaults. ``reasoning`` is ``examples/grpo.py`` on one dataset of
reasoning-gym, and ``constraints`` on instructions that a program checks. The model has random weights; supervised steps
teach it the form, and from there GRPO has the reward alone.

The lines are means over the episodes of a step: ``reward`` of what was sampled, and what else the example reports.
``greedy`` are the most probable answers to tasks of another seed, after the last step.
"""

import argparse
import importlib
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._figure import curves
from benchmarks._machine import described, watched
from benchmarks._paired import spread
from nrl.backends import Sampling, adamw
from nrl.envs import Task
from nrl.envs.library.reasoning.tasks import ReasoningVerifier, reasoning_gym
from nrl.runtime.intraop import set_threads

__all__ = ["CASES", "Case", "chain_sum", "main", "measure", "options", "report", "series"]

LAST = 10  # the steps that a reward is the mean of
QUICK = {"steps": 3, "warmup": 2, "prompts": 2, "evaluate_every": 3}


class Case(NamedTuple):
    """An example, its settings, and what is drawn of ``metrics.jsonl``, with the words for it."""

    example: str
    settings: Mapping[str, Any]
    lines: Mapping[str, str]


def chain_sum() -> ReasoningVerifier:
    """Sums of two digits, as reasoning-gym asks for them, with their answers as responses."""
    config = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    verify = reasoning_gym("chain_sum", config, workers=1)
    tasks = verify.tasks

    def lessons(seed: int, index: int) -> Task:
        task = tasks(seed, index)
        return {**task, "response": task["answer"]}

    verify.tasks = lessons
    return verify


CASES = {
    "guess": Case("guess", {}, {"reward": "found the number", "env/turns_left": "turns left"}),
    "tools": Case(
        "tools",
        {},
        {"reward": "right answer", "reward/found": "a call has found it", "env/tools/malformed": "malformed calls"},
    ),
    "reasoning": Case(
        "grpo",
        {
            "env": "benchmarks.learning:chain_sum",
            "chat": False,
            "steps": 100,
            "warmup": 150,
            "warmup_rows": 64,
            "optimizer": adamw(lr=1e-3, betas=(0.9, 0.95)),
            "evaluate_every": 100,
            "evaluate_prompts": 128,
        },
        {"reward": "reward, chain_sum"},
    ),
    "constraints": Case(
        "grpo",
        {"env": "constraints", "sampling": Sampling(max_new_tokens=28), "steps": 150, "warmup": 40},
        {"reward": "conditions that are kept", "reward/all": "texts that keep to all"},
    ),
}
"""What is measured, by name.

>>> list(CASES)
['guess', 'tools', 'reasoning', 'constraints']
"""


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line.

    >>> options(["guess", "--quick"]).seeds
    1
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=list(CASES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--figure", type=Path, default=None, help="draw the curves as SVG")
    parser.add_argument("--out", type=Path, default=None, help="write every step as JSON")
    parser.add_argument("--quick", action="store_true", help="few steps: shows that it runs, measures nothing")
    args = parser.parse_args(words)
    args.settings = {}
    if args.quick:
        args.seeds, args.settings = 1, QUICK
    return args


def main() -> None:
    """Train, print the table, draw the figure."""
    args = options()
    set_threads(args.threads)
    with watched() as machine:
        found = measure(args.case, args.seeds, **args.settings)
    print(report(args.case, found))
    print(f"\ntorch threads: {args.threads}. All cores meanwhile: {described(machine)}.")
    if args.figure:
        drawn = {words: [series(seed, key) for seed in found] for key, words in CASES[args.case].lines.items()}
        args.figure.write_text(curves(drawn, "means over episodes", width=5))
    if args.out:
        args.out.write_text(json.dumps({"found": found, "machine": machine}, default=str))


def measure(name: str, seeds: int, **settings: Any) -> list[list[dict[str, Any]]]:
    """The lines of ``metrics.jsonl`` of a case with each seed; settings come before its own."""
    case = CASES[name]
    module = importlib.import_module(f"examples.{case.example}")
    found = []
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            module.main(module.Config(seed=seed, out=folder, **{**case.settings, **settings}))
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


def report(name: str, found: Sequence[Sequence[Mapping[str, Any]]]) -> str:
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
        f"| {name} | {' | '.join(columns)} |"
    )


if __name__ == "__main__":
    main()
