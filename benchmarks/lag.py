"""Measure what GRPO with truncated importance sampling (TIS) learns from rollouts 0, 1 and 4 publishes old.

    python benchmarks/lag.py            # about a quarter of an hour on one CPU core
    python benchmarks/lag.py --quick    # does it run?

The task, the model, the warm-up and every setting are those of ``examples/grpo.py``, on the local cluster. There, step
k with a lag of n gets rollouts that are exactly min(k, n) publishes old. The variants of a seed start from the same
weights and see the same prompts; seeds differ in their prompts. A variant is a lag, a loss and a choice of
``old_logprobs``:

- TIS: ``policy_loss(clip(0.2), correction=truncate(2.0), aggregate=seq_mean)``. The old log-probabilities are the
  trainer's, of the policy that the step starts from. The correction's weight is min(old/rollout, 2), and the clip has
  nothing to do, since there is one update a batch. With the sampler's log-probabilities as old ones it would be the
  other way round: every weight would be 1, and the clip alone would see how old the rollouts are. One variant has a
  smaller learning rate than the example.
- uncorrected: the same without the correction. It trains on rollouts as if they had just been sampled.
- clip: ``grpo_loss`` with the sampler's log-probabilities as old ones, as in the example.

``reward`` is the mean over the samples of a step, which come from weights as old as the lag. ``greedy`` is that of the
most probable answers of the last weights, on another draw of the same 400 sums. ``mismatch/kl`` measures the distance
of the policy of the step from that of the rollouts.
"""

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import torch

import nrl
from benchmarks._figure import curves
from benchmarks._machine import Machine, described, watched
from benchmarks._paired import spread
from examples import grpo
from nrl import data, tiny
from nrl.algos import Loss, advantages, clip, grpo_loss, policy_loss, seq_mean, sft_loss, truncate
from nrl.backends import Params, fsdp, hf
from nrl.batch.metrics import finalize
from nrl.runtime import Cluster, Mesh
from nrl.runtime.intraop import set_threads

__all__ = ["VARIANTS", "Variant", "main", "measure", "options", "reaches", "report", "train"]

LAST, REACHED = 20, 0.8  # the steps that a reward is the mean of, and how high they are to be
COLUMNS = ("lag", "reward", "eval/reward", "mismatch/kl", "mismatch/ess", "correction", "clip_fraction")


class Variant(NamedTuple):
    """A lag, a loss, whether ``old_logprobs`` are the sampler's or the trainer's, and the learning rate."""

    lag: int
    loss: Loss
    of_sampler: bool
    lr: float = grpo.EMBEDDED.lr


tis = policy_loss(clip(0.2), correction=truncate(2.0), aggregate=seq_mean)
VARIANTS = {
    "lag 0, TIS": Variant(0, tis, False),
    "lag 1, TIS": Variant(1, tis, False),
    "lag 4, TIS": Variant(4, tis, False),
    "lag 4, TIS, lr 2.5e-4": Variant(4, tis, False, 2.5e-4),
    "lag 4, uncorrected": Variant(4, grpo_loss, False),
    "lag 4, clip": Variant(4, grpo_loss, True),
    "lag 2, TIS": Variant(2, tis, False),
}
"""What is compared; all but the last, unless that is asked for.

>>> [variant.lag for variant in VARIANTS.values()]
[0, 1, 4, 4, 4, 4, 2]
"""


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line.

    >>> options(["--quick"]).steps
    6
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS)[:-1], choices=list(VARIANTS))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300, help="of GRPO, the example's default")
    parser.add_argument("--prompts", type=int, default=32, help="of a step, the example's default")
    parser.add_argument("--warmup", type=int, default=40, help="supervised steps, the example's default")
    parser.add_argument("--lr", type=float, default=None, help="of every variant; none: the example's, or as named")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--figure", type=Path, default=None, help="draw the curves as SVG")
    parser.add_argument("--out", type=Path, default=None, help="write every step as JSON")
    parser.add_argument("--quick", action="store_true", help="few steps: shows that it runs, measures nothing")
    args = parser.parse_args(words)
    if args.quick:
        args.seeds, args.steps, args.prompts, args.warmup = 1, 6, 4, 2
    return args


def main() -> None:
    """Train, print the table, draw the figure."""
    args = options()
    set_threads(args.threads)
    with watched() as machine:
        settings = {"steps": args.steps, "prompts": args.prompts, "warmup": args.warmup}
        found = measure(args.variants, args.seeds, args.lr, **settings)
    print(report(found, machine))
    if args.figure:
        rewards = {name: [each["reward"] for each in seeds] for name, seeds in found.items()}
        args.figure.write_text(curves(rewards, "reward"))
    if args.out:
        args.out.write_text(json.dumps({"settings": vars(args), "found": found, "machine": machine}, default=str))


def measure(
    variants: Sequence[str], seeds: int, lr: float | None = None, **settings: Any
) -> dict[str, list[dict[str, list[float]]]]:
    """For each variant and seed what was measured at each step, by its name."""
    found: dict[str, list[dict[str, list[float]]]] = {name: [] for name in variants}
    for seed in range(seeds):
        cfg = grpo.Config(seed=seed, evaluate_every=10**9, **settings)
        with nrl.cluster("local") as cluster:
            mesh = cluster.reserve(1).mesh(name="trainer")
            warm = fsdp.trainer(mesh, tiny.model(), cfg.warmup_optimizer, max_tokens=cfg.max_tokens)
            state, step = warm.init(), warm.train_step(sft_loss)
            envs = nrl.environments(cfg.env, cfg.data)
            rows = envs.tasks(cfg.seed + 1)
            made = nrl.batched(rows, cfg.warmup_rows, collate=lambda rows: data.supervised(rows, tiny.tokenizer()))
            for _ in range(cfg.warmup):
                state, _ = step(state, made.take(1)[0])
            for name in variants:
                chosen = VARIANTS[name] if lr is None else VARIANTS[name]._replace(lr=lr)
                found[name].append(train(cluster, mesh, state.params, cfg, chosen))
                print(f"seed {seed}, {name}: {statistics.fmean(found[name][-1]['reward'][-LAST:]):.3f}", flush=True)
    return found


def train(cluster: Cluster, mesh: Mesh, start: Params, cfg: grpo.Config, variant: Variant) -> dict[str, list[float]]:
    """The loop of the example; what was measured at each step."""
    optimizer = attrs.evolve(cfg.optimizer, lr=variant.lr)
    trainer = fsdp.trainer(mesh, tiny.model(), optimizer, max_tokens=cfg.max_tokens)
    sampler = hf.sampler(cluster.reserve(1), tiny.model(), cfg.sampling)
    envs = nrl.environments(cfg.env, cfg.data)
    groups = nrl.rollouts(sampler, envs.env, envs.tasks(cfg.seed), n=cfg.group_size, seed=cfg.seed)
    stream = nrl.ahead(nrl.batched(groups, cfg.prompts), variant.lag)
    state, step = trainer.init(start), trainer.train_step(variant.loss)
    nrl.publish(state.params, sampler)
    found: dict[str, list[float]] = {}
    for i in range(cfg.steps):
        (batch,) = stream.take(1)
        old = batch["rollout_logprobs"] if variant.of_sampler else trainer.logprobs(state.params, batch)
        state, metrics = step(state, nrl.assign(advantages(batch), old_logprobs=old))
        nrl.publish(state.params, sampler)
        numbers = finalize(metrics.result() | nrl.summary(batch) | grpo.evaluate(cfg, envs, sampler, i))
        for key in numbers.keys() & set(COLUMNS):
            found.setdefault(key, []).append(numbers[key])
    return found


def smooth(values: Sequence[float], width: int) -> list[float]:
    """The mean of each value and those within ``width // 2`` steps of it.

    >>> smooth([0.0, 3.0, 0.0, 3.0], 3)
    [1.5, 1.0, 2.0, 1.5]
    """
    half = width // 2
    return [statistics.fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def reaches(rewards: Sequence[float]) -> int | None:
    """After how many steps the mean of the last 20 rewards is 0.8 for the first time; None: it never is.

    >>> reaches([0.0] * 10 + [1.0] * 20), reaches([0.5] * 30)
    (26, None)
    """
    for end in range(LAST, len(rewards) + 1):
        if statistics.fmean(rewards[end - LAST : end]) >= REACHED:
            return end
    return None


def report(found: Mapping[str, Sequence[Mapping[str, Sequence[float]]]], machine: Machine) -> str:
    """Medians over seeds (and ranges), over the steps of all seeds for mismatch, means for weights, as Markdown.

    >>> seed = {"reward": [0.0] * 4 + [1.0] * 20, "eval/reward": [0.5], "lag": [0, 1], "mismatch/kl": [0.1, 0.3]}
    >>> print(report({"lag 1": [seed]}, {}).splitlines()[2])
    | lag 1 | 1.00 (1.00-1.00) | 0.50 (0.50-0.50) | 20 | 0.200 | 0.300 | - | - |
    """
    lines = [
        f"| | reward, last {LAST} steps | greedy | steps to {REACHED} | mismatch/kl | largest | weight | smallest |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, seeds in found.items():
        kl = [value for seed in seeds for value in seed["mismatch/kl"]]
        weights = [value for seed in seeds for value in seed.get("correction", [])]
        steps = [reaches(seed["reward"]) or "never" for seed in seeds]
        columns = [
            spread([statistics.fmean(seed["reward"][-LAST:]) for seed in seeds]),
            spread([seed["eval/reward"][-1] for seed in seeds]),
            ", ".join(map(str, steps)),
            f"{statistics.median(kl):.3f}",
            f"{max(kl):.3f}",
            *([f"{statistics.fmean(weights):.2f}", f"{min(weights):.2f}"] if weights else ["-", "-"]),
        ]
        lines.append(f"| {name} | {' | '.join(columns)} |")
    lines.append(f"\ntorch threads: {torch.get_num_threads()}. All cores meanwhile: {described(machine)}.")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
