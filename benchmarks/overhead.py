"""Measure the time of a step of ``examples/grpo.py`` outside of rollout and training.

    python benchmarks/overhead.py             # half a minute on one CPU core
    python benchmarks/overhead.py --quick     # does it run?

This runs the example itself, on the tiny model that comes with nrl, with its functions wrapped to be timed. A step lies
between two ends of ``run.log``. The table shows each part in milliseconds of CPU time and of wall-clock time, and the
former as a share of a step of one second. Except for ``publish``, which copies the weights, and longer rows, these
parts cost the same for every model.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import nrl
from benchmarks._paired import Clock
from examples import grpo
from nrl.algos import advantages
from nrl.backends import Trainer
from nrl.data import Source
from nrl.run import Run
from nrl.runtime.intraop import set_threads

__all__ = ["main", "measure", "options", "parts", "wrapped"]

PARTS = ("advantages", "assign", "publish", "summary", "run.log")
TARGET = 0.03  # of a step of one second


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line.

    >>> options(["--quick"]).steps
    3
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50, help="that count; two more do not")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=8, help="samples a prompt")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None, help="write every step as JSON")
    parser.add_argument("--quick", action="store_true", help="three steps: shows that it runs, measures nothing")
    args = parser.parse_args(words)
    if args.quick:
        args.steps, args.prompts, args.group = 3, 2, 2
    return args


def main() -> None:
    """Run the example and print the table."""
    args = options()
    set_threads(args.threads)
    steps = measure(args.steps, args.prompts, args.group)
    print(table(steps))
    if args.out:
        args.out.write_text(json.dumps({"settings": vars(args), "steps": steps}, default=str, indent=1))


def measure(steps: int, prompts: int, group: int) -> list[dict[str, float]]:
    """Times by part of each step but the first two; ``total``, ``rollout`` and ``train`` among them."""
    found: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder, wrapped(found):
        grpo.main(
            grpo.Config(steps=steps + 2, warmup=0, prompts=prompts, group_size=group, out=str(Path(folder) / "run"))
        )
    return [parts(times) for times in found[2:]]


def parts(times: dict[str, float]) -> dict[str, float]:
    """Times with ``outside``, all but rollout and training, and ``the rest`` of it, which has no name of its own.

    >>> found = parts({"cpu/total": 2.0, "cpu/rollout": 1.0, "cpu/train": 0.5, "cpu/assign": 0.1, "wall/total": 0.0})
    >>> found["cpu/outside"], round(found["cpu/the rest"], 3)
    (0.5, 0.4)
    """
    found = dict(times)
    for kind in ("cpu", "wall"):
        named = {part: times.get(f"{kind}/{part}", 0.0) for part in ("rollout", "train", *PARTS)}
        outside = times[f"{kind}/total"] - named.pop("rollout") - named.pop("train")
        found[f"{kind}/outside"] = outside
        found[f"{kind}/the rest"] = outside - sum(named.values())
    return found


@contextmanager
def wrapped(found: list[dict[str, float]]) -> Iterator[None]:
    """The functions that the example calls, timed; the times of each step are appended to ``found``."""
    clock = Clock()
    batched, train_step, log = nrl.batched, Trainer.train_step, clock.wrap("run.log", Run.log)
    step: Any = clock("total")
    step.__enter__()

    def timed_batched(*args: Any, **kwargs: Any) -> Source[Any]:
        stream = batched(*args, **kwargs)
        return stream._replace(take=clock.wrap("rollout", stream.take))

    def timed_train_step(trainer: Trainer, loss: Any) -> Any:
        return clock.wrap("train", train_step(trainer, loss))

    def timed_log(*args: Any, **kwargs: Any) -> Any:
        nonlocal step
        numbers = log(*args, **kwargs)
        step.__exit__(None, None, None)
        found.append(clock.take())
        step = clock("total")
        step.__enter__()
        return numbers

    with (
        mock.patch.multiple(
            nrl, batched=timed_batched, assign=clock.wrap("assign", nrl.assign),
            publish=clock.wrap("publish", nrl.publish), summary=clock.wrap("summary", nrl.summary),
        ),
        mock.patch.object(grpo, "advantages", clock.wrap("advantages", advantages)),
        mock.patch.object(Trainer, "train_step", timed_train_step),
        mock.patch.object(Run, "log", timed_log),
    ):  # fmt: skip
        yield


def table(steps: Sequence[dict[str, float]]) -> str:
    """Medians over steps, as Markdown."""
    medians = {key: statistics.median(step.get(key, 0.0) for step in steps) for key in steps[0]}
    head = (
        f"{len(steps)} steps of {medians['cpu/total']:.3f} s of CPU time: rollout {medians['cpu/rollout']:.3f}, "
        f"training {medians['cpu/train']:.3f}"
    )
    lines = [
        head,
        "",
        "| outside of both | CPU, ms | wall, ms | share of a 1 s step |",
        "|---|---|---|---|",
    ]
    for part in (*PARTS, "the rest", "outside"):
        cpu, wall = (1e3 * medians.get(f"{kind}/{part}", 0.0) for kind in ("cpu", "wall"))
        lines.append(f"| {'together' if part == 'outside' else part} | {cpu:.2f} | {wall:.2f} | {cpu / 1e3:.2%} |")
    met = medians["cpu/outside"] <= TARGET
    lines.append(f"\nThe bound is {TARGET:.0%} of a step of one second: {'met' if met else 'NOT met'}.")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
