"""Measure what a lag of 1 saves when rollouts and training are real work, in a process of one thread each.

    python benchmarks/overlap.py            # some minutes; two CPU cores that are otherwise idle
    python benchmarks/overlap.py --sampler vllm-cpu
    python benchmarks/overlap.py --quick    # does it run?

A trainer and a sampler, plain PyTorch's or vLLM's, have a process each on a Ray cluster of this machine. The loop is
that of GRPO: a rollout, a step that is waited for, a publish. First the benchmark chooses the number of rows so that
rollout and training take about equally long, from a few steps of each candidate with a lag of 0. Then rounds of some
steps with a lag of 0 and with a lag of 1 take turns, from the same weights and with the same prompts. The first step of
each, in which nothing can overlap, does not count. The numbers, over the rounds:

- lag 1 / lag 0: the ratio of the wall-clock times of a step.
- longer / step: the longer of rollout and training, as it is with a lag of 0. Over a step with a lag of 0 it is the
  best possible value of the first column, about 0.5 with equal halves. Over a step with a lag of 1, a value of 1 means
  that the shorter one is hidden entirely. The rest is publishing, the work of the program in between, and the cores:
  the program is a third process, and two processes that work at once have less cache, and less of a core that others
  want.
- rollout / training: with a lag of 0. The sampler draws the lengths, so the ratio of tokens is shown, too.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import nrl
from benchmarks._machine import Machine, described, watched
from benchmarks._paired import pair, spread
from nrl import data, tiny
from nrl.algos import advantages, grpo_loss
from nrl.backends import SAMPLERS, Model, Sampling, adamw, fsdp
from nrl.envs import Environment, Step

__all__ = ["calibrate", "main", "model", "options", "report", "steps"]

type Times = dict[str, float]
"""Seconds of a step: ``step``, and of it ``rollout`` and ``train``, for which the program waited; its ``tokens``."""


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line.

    >>> options(["--quick"]).rounds
    1
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="after one that does not count")
    parser.add_argument("--steps", type=int, default=6, help="of a round and a lag, after one that does not count")
    parser.add_argument("--rows", type=int, nargs="*", default=[16, 32, 64, 128, 256], help="candidates")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, at most")
    parser.add_argument("--sampler", default="hf", choices=["hf", "vllm-cpu"])
    parser.add_argument("--hidden", type=int, default=256, help="width of the model")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--out", type=Path, default=None, help="write every step as JSON")
    parser.add_argument("--quick", action="store_true", help="small and few: shows that it runs, measures nothing")
    args = parser.parse_args(words)
    if args.quick:
        args.rounds, args.steps, args.rows, args.tokens, args.hidden, args.layers = 1, 2, [8], 4, 64, 2
    return args


def main() -> None:
    """Calibrate, measure and print the table."""
    args = options()
    os.environ["OMP_NUM_THREADS"] = "1"  # of the actors
    torch.set_num_threads(1)
    with nrl.cluster("ray") as cluster:
        slots, shape = cluster.reserve(2), model(args.hidden, args.layers)
        trainer = fsdp.trainer(slots[:1].mesh(executable="system", name="trainer"), shape, adamw(lr=1e-4))
        on = slots[1:].mesh(executable="system" if args.sampler == "hf" else args.sampler, name="sampler")
        parts = (trainer, SAMPLERS[args.sampler](on, shape, Sampling(max_new_tokens=args.tokens)))
        tried = calibrate(parts, args.rows)
        rows = min(tried, key=lambda rows: abs(1 - tried[rows]["rollout"] / tried[rows]["train"]))
        with watched() as machine:
            found = [
                pair(lambda: steps(parts, 0, rows, args.steps), lambda: steps(parts, 1, rows, args.steps), number)
                for number in range(args.rounds + 1)
            ][1:]
    print(report(tried, rows, found, machine))
    if args.out:
        made = {"settings": vars(args), "tried": tried, "rows": rows, "rounds": found, "machine": machine}
        args.out.write_text(json.dumps(made, default=str))


def model(hidden: int, layers: int) -> Model:
    """A Qwen3 of that size with the characters of `nrl.tiny`.

    >>> model(256, 4).source["intermediate_size"]
    768
    """
    return tiny.model(
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=3 * hidden,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        initializer_range=0.04,
    )


def digits(state: Any, text: str) -> Step:
    """The reward of the benchmark: which share of an answer are digits."""
    return Step(state, sum(map(str.isdigit, text)) / max(1, len(text)), done=True)


def steps(parts: tuple[Any, Any], lag: int, rows: int, count: int) -> list[Times]:
    """Times of so many steps of GRPO, after one that does not count.

    >>> from nrl.backends import hf
    >>> with nrl.cluster("local") as here:
    ...     trainer = fsdp.trainer(here.reserve(1), tiny.model(), adamw(lr=1e-3))
    ...     sampler = hf.sampler(here.reserve(1), tiny.model(), Sampling(max_new_tokens=2))
    ...     [times] = steps((trainer, sampler), 0, 8, 1)
    >>> 0 < times["rollout"] + times["train"] < times["step"]
    True
    """
    trainer, sampler = parts
    env = Environment(lambda task: (task, task["prompt"]), digits)
    groups = nrl.rollouts(sampler, env, data.tasks("arithmetic", seed=0), n=4, seed=0)
    stream = nrl.ahead(nrl.batched(groups, rows // 4), lag)
    state, step = trainer.init(), trainer.train_step(grpo_loss)
    nrl.publish(state.params, sampler)
    found: list[Times] = []
    for _ in range(count + 1):
        start = time.perf_counter()
        (batch,) = stream.take(1)
        pulled = time.perf_counter()
        batch = nrl.assign(advantages(batch), old_logprobs=batch["rollout_logprobs"])
        asked = time.perf_counter()
        state, metrics = step(state, batch)
        metrics.result()
        trained = time.perf_counter()
        nrl.publish(state.params, sampler)
        times = {"step": time.perf_counter() - start, "rollout": pulled - start, "train": trained - asked}
        found.append(times | {"tokens": float(batch["loss_mask"].sum())})
    stream.state()  # waits for what is pending
    return found[1:]


def calibrate(parts: tuple[Any, Any], candidates: Sequence[int]) -> dict[int, Times]:
    """For each number of rows, means of two steps with a lag of 0; those of the first are measured twice."""
    steps(parts, 0, candidates[0], 2)  # what is slow only once
    return {rows: _means(steps(parts, 0, rows, 2)) for rows in candidates}


def _means(found: Sequence[Times]) -> Times:
    return {key: statistics.fmean(times[key] for times in found) for key in found[0]}


def report(
    tried: dict[int, Times], rows: int, found: Sequence[tuple[Sequence[Times], Sequence[Times]]], machine: Machine
) -> str:
    """Medians over rounds and ranges, as Markdown.

    >>> zero = {"step": 2.0, "rollout": 1.0, "train": 0.8, "tokens": 100.0}
    >>> one = {"step": 1.25, "rollout": 0.2, "train": 1.0, "tokens": 110.0}
    >>> print(report({16: zero}, 16, [([zero], [one])], {}).splitlines()[4])
    | 1 | 0.62 (0.62-0.62) | 0.50 (0.50-0.50) | 0.80 (0.80-0.80) | 1.25 (1.25-1.25) | 1.10 (1.10-1.10) |
    """
    means = [(_means(zero), _means(one)) for zero, one in found]
    longer = [max(zero["rollout"], zero["train"]) for zero, _ in means]
    columns = [
        [one["step"] / zero["step"] for zero, one in means],
        [long / zero["step"] for long, (zero, _) in zip(longer, means, strict=True)],
        [long / one["step"] for long, (_, one) in zip(longer, means, strict=True)],
        [zero["rollout"] / zero["train"] for zero, _ in means],
        [one["tokens"] / zero["tokens"] for zero, one in means],
    ]
    chosen = ", ".join(f"{n}: {times['rollout'] / times['train']:.2f}" for n, times in tried.items())
    rollout, train = (statistics.median(zero[key] for zero, _ in means) for key in ("rollout", "train"))
    return "\n".join(
        [
            f"rollout / training by rows: {chosen}; taken: {rows} rows, {rollout:.2f} s and {train:.2f} s.\n",
            "| rounds | lag 1 / lag 0 | longer / step, lag 0 | longer / step, lag 1 | rollout / training | tokens |",
            "|---|---|---|---|---|---|",
            f"| {len(found)} | {' | '.join(map(spread, columns))} |",
            f"\nAll cores meanwhile: {described(machine)}.",
        ]
    )


if __name__ == "__main__":
    main()
