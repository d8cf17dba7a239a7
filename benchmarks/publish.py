"""Measure the cost of giving a sampler new weights, against one copy of them in memory.

    python benchmarks/publish.py            # a quarter of an hour; 16 GB of memory
    python benchmarks/publish.py --quick    # does it run?

A trainer and a sampler have a process each on a Ray cluster of this machine. `nrl.publish` takes turns with a copy of
as many bytes from one place in the memory of this process to another, by one thread. The first result is the ratio of
their wall-clock times; meanwhile the sampler decodes nothing. Then the loop runs some steps of GRPO, with a trivial
reward. The last result is the share of a step that it spends in publishing. In between stands `trainer.init(params)`,
which builds a second model on the same processes, fills it with these weights and computes one row with it.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import nrl
from benchmarks._machine import Machine, described, watched
from benchmarks._paired import spread
from nrl import data, tiny
from nrl.algos import advantages, grpo_loss
from nrl.backends import Model, Sampling, adamw, fsdp, hf, vllm
from nrl.envs import Environment, Step
from nrl.runtime import Cluster

__all__ = ["SHAPES", "main", "model", "options", "publishes", "report", "shares"]

SHAPES = {  # hidden size, layers, intermediate size, vocabulary
    "1M": (128, 2, 384, 100),
    "100M": (768, 12, 2048, 32_000),
    "500M": (1280, 24, 3456, 32_000),
}
"""Of the models that are measured.

>>> SHAPES["1M"][0]
128
"""


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line.

    >>> options(["--quick"]).sizes
    ['1M']
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", default=["100M", "500M"], choices=list(SHAPES))
    parser.add_argument("--samplers", nargs="*", default=["hf", "vllm-cpu"], choices=["hf", "vllm-cpu", "vllm"])
    parser.add_argument("--dp", type=int, default=1, help="processes of the trainer, which share its model")
    parser.add_argument("--rounds", type=int, default=5, help="after one that does not count")
    parser.add_argument("--steps", type=int, default=3, help="of GRPO, after one that does not count")
    parser.add_argument("--rows", type=int, default=32, help="of a step")
    parser.add_argument("--tokens", type=int, default=64, help="of a row, at most")
    parser.add_argument("--out", type=Path, default=None, help="write every measurement as JSON")
    parser.add_argument("--quick", action="store_true", help="small and few: shows that it runs, measures nothing")
    args = parser.parse_args(words)
    if args.quick:
        args.sizes, args.samplers, args.rounds, args.steps, args.rows, args.tokens = ["1M"], ["hf"], 1, 1, 4, 4
    return args


def main() -> None:
    """Measure and print the table."""
    args = options()
    found: dict[str, Any] = {}
    with watched() as machine:
        for size in args.sizes:
            for kind in args.samplers:
                with nrl.cluster("ray") as cluster:
                    found[f"{size}, {kind}"] = _one(cluster, size, kind, args)
    print(report(found, machine))
    if args.out:
        args.out.write_text(json.dumps({"settings": vars(args), "found": found, "machine": machine}, default=str))


def model(size: str) -> Model:
    """A Qwen3 of that size, with tied embeddings, from a config.

    >>> model("1M").source["num_hidden_layers"]
    2
    """
    hidden, layers, intermediate, vocabulary = SHAPES[size]
    heads = hidden // 64
    return tiny.model(
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=intermediate,
        vocab_size=vocabulary,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=64,
        initializer_range=0.02,
    )


def _one(cluster: Cluster, size: str, kind: str, args: argparse.Namespace) -> dict[str, Any]:
    slots = cluster.reserve(args.dp + 1)
    trainer = fsdp.trainer(slots[: args.dp].mesh(executable="system", name="trainer"), model(size), adamw(lr=1e-6))
    sampling = Sampling(max_new_tokens=args.tokens)
    sampler: Any = (
        hf.sampler(slots[args.dp :].mesh(executable="system", name="sampler"), model(size), sampling)
        if kind == "hf"
        else vllm.sampler(slots[args.dp :], model(size), sampling, executable=kind)
    )
    bytes_, pairs = publishes(trainer, sampler, args.rounds)
    return {"bytes": bytes_, "pairs": pairs, "shares": shares(trainer, sampler, args.steps, args.rows)}


def publishes(trainer: Any, sampler: Any, rounds: int) -> tuple[int, list[tuple[float, float, float]]]:
    """How many bytes the weights have; and for each round, seconds of a publish, of a copy and of an init.

    >>> with nrl.cluster("local") as here:
    ...     trainer = fsdp.trainer(here.reserve(1), tiny.model(), adamw(lr=1e-3))
    ...     publishes(trainer, hf.sampler(here.reserve(1), tiny.model()), 1)[0]
    1627136
    """
    params = trainer.load()
    size = sum(tensor.nbytes for _, tensor in params.tensors())
    row = data.supervised([{"prompt": "1+1=", "response": "2"}], tiny.tokenizer())
    source = np.ones(size, dtype=np.uint8)
    target = np.ones_like(source)
    found = []
    for _ in range(rounds + 1):
        times = []
        for act in (
            lambda: nrl.publish(params, sampler),
            lambda: np.copyto(target, source),
            lambda: trainer.logprobs(trainer.init(params).params, row).result(),  # when it has its weights
        ):
            start = time.perf_counter()
            act()
            times.append(time.perf_counter() - start)
        found.append((times[0], times[1], times[2]))
    return size, found[1:]


def shares(trainer: Any, sampler: Any, steps: int, rows: int) -> list[float]:
    """For each step of GRPO, which share of it was spent in publishing.

    >>> with nrl.cluster("local") as here:
    ...     trainer = fsdp.trainer(here.reserve(1), tiny.model(), adamw(lr=1e-3))
    ...     0 < shares(trainer, hf.sampler(here.reserve(1), tiny.model(), Sampling(max_new_tokens=2)), 1, 8)[0] < 1
    True
    """
    env = Environment(lambda task: (task, task["prompt"]), lambda state, text: Step(state, len(text) % 2, done=True))
    stream = nrl.batched(nrl.rollouts(sampler, env, data.tasks("arithmetic", seed=0), n=4), rows // 4)
    step, state, found = trainer.train_step(grpo_loss), trainer.init(), []
    nrl.publish(state.params, sampler)
    for _ in range(steps + 1):
        start = time.perf_counter()
        (batch,) = stream.take(1)
        state, metrics = step(state, nrl.assign(advantages(batch), old_logprobs=batch["rollout_logprobs"]))
        metrics.result()
        trained = time.perf_counter()
        nrl.publish(state.params, sampler)
        end = time.perf_counter()
        found.append((end - trained) / (end - start))
    return found[1:]


def report(found: dict[str, Any], machine: Machine) -> str:
    """Medians and ranges, as Markdown.

    >>> print(report({"1M, hf": {"bytes": 2e9, "pairs": [(2.0, 1.0, 8.0)], "shares": [0.1]}}, {}).splitlines()[2])
    | 1M, hf | 2.00 GB | 1.00 (1.00-1.00) | 2.00 (2.00-2.00) | 2.00 (2.00-2.00) | 8.00 (8.00-8.00) | 0.10 (0.10-0.10) |
    """
    lines = [
        "| model, sampler | weights | publish, GB/s | copy, GB/s | publish, copies | init, copies | share of a step |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, each in found.items():
        gigabytes, pairs = each["bytes"] / 1e9, each["pairs"]
        columns = [
            f"{gigabytes:.2f} GB",
            spread([gigabytes / mine for mine, _, _ in pairs]),
            spread([gigabytes / copy for _, copy, _ in pairs]),
            spread([mine / copy for mine, copy, _ in pairs]),
            spread([init / copy for _, copy, init in pairs]),
            spread(each["shares"]),
        ]
        lines.append(f"| {name} | {' | '.join(columns)} |")
    lines.append(f"\ntorch threads here: {torch.get_num_threads()}. All cores meanwhile: {described(machine)}.")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
