"""Measure the mismatch of trainer and sampler in cases whose cause is known: examples of `mismatch/*`.

    python benchmarks/mismatch.py            # two minutes on one CPU core
    python benchmarks/mismatch.py --quick    # does it run?

The tiny model of the examples, after their 40 supervised steps, answers sums on the local cluster. A step of GRPO on
the answers reports the metrics, over all sampled tokens. Each row changes one thing. The row of a lag is
`examples/grpo.py lag=1` itself: medians of its first 10 steps and of the others.
"""

import argparse
import json
import statistics
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

import nrl
from examples import grpo
from nrl import data, tiny
from nrl.algos import advantages, grpo_loss, sft_loss
from nrl.backends import Sampling, adamw, fsdp, hf
from nrl.envs import number, single_turn

__all__ = ["KINDS", "lagging", "main", "measure", "options", "table"]

type Numbers = Mapping[str, float]

PLAIN = Sampling(max_new_tokens=4)
KINDS: dict[str, Any] = {
    "same weights, float32": {},
    "same weights, bfloat16": {"dtype": "bfloat16"},
    "`top_p=0.9`": {"sampling": attrs.evolve(PLAIN, top_p=0.9)},
    "sampled at temperature 1.5, column says 1": {"sampling": attrs.evolve(PLAIN, temperature=1.5)},
    "20 updates of the trainer not published": {"updates": 20},
}
"""What differs; arguments of `measure`."""


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line.

    >>> options(["--quick"]).steps
    4
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=128, help="of 8 samples each")
    parser.add_argument("--steps", type=int, default=60, help="with a lag")
    parser.add_argument("--quick", action="store_true", help="small and few: shows that it runs, measures nothing")
    args = parser.parse_args(words)
    if args.quick:
        args.prompts, args.steps = 4, 4
    return args


def main() -> None:
    """Measure and print the table."""
    args = options()
    warnings.filterwarnings("ignore", ".*truncated distribution")
    found = {kind: measure(args.prompts, **differs) for kind, differs in KINDS.items()}
    print(table(found | lagging(args.steps)))


def measure(prompts: int, *, dtype: Any = "float32", sampling: Sampling = PLAIN, updates: int = 0) -> Numbers:
    """What a step says of answers to so many prompts.

    Args:
        prompts: how many, of 8 samples each.
        dtype: of trainer and sampler.
        sampling: how answers are drawn; the trainer takes their temperature to be 1.
        updates: supervised steps between the last publish and the answers.

    >>> measure(1)["mismatch/max_abs"] < 1e-4
    True
    """
    with nrl.cluster("local") as cluster:
        model = tiny.model(dtype=dtype)
        trainer = fsdp.trainer(cluster.reserve(1), model, adamw(lr=1e-3))
        sampler = hf.sampler(cluster.reserve(1), model, sampling)
        state, rows, step = trainer.init(), tiny.sums(128, seed=1), trainer.train_step(sft_loss)
        for _ in range(40):
            state, _ = step(state, rows.take(1)[0])
        nrl.publish(state.params, sampler)
        for _ in range(updates):
            state, _ = step(state, rows.take(1)[0])
        batch = nrl.rollout(sampler, single_turn(number), data.tasks("arithmetic", seed=2).take(prompts), n=8)
        batch = nrl.assign(batch, temperature=batch["rewards"] * 0 + 1)
        batch = nrl.assign(advantages(batch), old_logprobs=batch["rollout_logprobs"])
        _, metrics = trainer.train_step(grpo_loss)(state, batch)
        return nrl.finalize(metrics.result())


def lagging(steps: int) -> dict[str, Numbers]:
    """Medians of the example's steps with a lag of 1: of the first ten, and of the others."""
    with tempfile.TemporaryDirectory() as folder:
        grpo.main(grpo.Config(lag=1, steps=steps, out=str(Path(folder) / "run"), eval_data=None))
        text = (Path(folder) / "run" / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()][1:]  # the first one has no lag
    parts = {"`lag=1`, the first 10 steps": lines[:10], "`lag=1`, later": lines[10:] or lines}
    keys = [key for key in lines[0] if key.startswith("mismatch/")]
    return {name: {key: statistics.median(line[key] for line in part) for key in keys} for name, part in parts.items()}


def table(found: Mapping[str, Numbers]) -> str:
    """As Markdown.

    >>> print(table({"a": {"mismatch/kl": 0.5, "mismatch/ess": 0.125, "mismatch/max_abs": 2}}).splitlines()[2])
    | a | 0.5 | 0.12 | 2 |
    """
    lines = ["| | kl | ess | max_abs |", "|---|---|---|---|"]
    for kind, numbers in found.items():
        shown = " | ".join(f"{numbers[f'mismatch/{name}']:.2g}" for name in ("kl", "ess", "max_abs"))
        lines.append(f"| {kind} | {shown} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
