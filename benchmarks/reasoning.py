"""Draw what the tiny model learns of one dataset of reasoning-gym, with several seeds.

    python benchmarks/reasoning.py --figure docs/images/reasoning.svg  # some minutes on one CPU core
    python benchmarks/reasoning.py --quick                             # does it run?

The model has random weights. Supervised steps on the tasks' own answers let it begin where half of what it samples is
right; from there GRPO has the verifier's reward alone. ``greedy`` are the most probable answers to tasks of another
seed, after the last step. Two digits make few sums, so most of these are known.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch

import nrl
from benchmarks._figure import curves
from benchmarks._machine import described, watched
from benchmarks._paired import spread
from nrl import data, tiny
from nrl.algos import advantages, grpo_loss, sft_loss
from nrl.backends import adamw, fsdp, hf
from nrl.envs import Task, single_turn
from nrl.envs.reasoning_tasks import reasoning_gym

__all__ = ["Config", "learn", "lessons", "main", "options", "report"]

LAST = 10  # the steps that a reward is the mean of
DATASET = "chain_sum"
OPTIONS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


@attrs.frozen
class Config:
    """A run.

    >>> Config().steps
    100
    """

    seed: int = 0
    out: str = ""
    steps: int = 100
    warmup: int = 150  # supervised steps
    prompts: int = 32  # a step
    group_size: int = 8


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line.

    >>> options(["--quick"]).seeds
    1
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--figure", type=Path, default=None, help="draw the curves as SVG")
    parser.add_argument("--out", type=Path, default=None, help="write every step as JSON")
    parser.add_argument("--quick", action="store_true", help="few steps: shows that it runs, measures nothing")
    args = parser.parse_args(words)
    args.settings = {}
    if args.quick:
        args.seeds, args.settings = 1, {"steps": 2, "warmup": 2, "prompts": 4, "group_size": 4}
    return args


def main() -> None:
    """Train, print the table, draw the figure."""
    args = options()
    torch.set_num_threads(args.threads)
    with watched() as machine:
        found = [learn(seed, **args.settings) for seed in range(args.seeds)]
    print(report(found))
    print(f"\ntorch threads: {args.threads}. All cores meanwhile: {described(machine)}.")
    if args.figure:
        rewards = [[line["reward"] for line in seed] for seed in found]
        args.figure.write_text(curves({f"reward, {DATASET}": rewards}, "means over episodes", width=5))
    if args.out:
        args.out.write_text(json.dumps({"found": found, "machine": machine}, default=str))


def lessons(tasks: Sequence[Task]) -> list[Task]:
    """Tasks with their answers as responses.

    >>> lessons([{"prompt": "1 + 1 =", "answer": "2"}])
    [{'prompt': '1 + 1 =', 'response': '2'}]
    """
    return [{"prompt": each["prompt"], "response": each["answer"]} for each in tasks]


def learn(seed: int, **settings: Any) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl`` of a run with a seed; the last one has what was found greedily."""
    verify = reasoning_gym(DATASET, OPTIONS, workers=1)
    tasks, others = ([verify.tasks(each, index) for index in range(2048)] for each in (seed, 10**6 + seed))
    env = single_turn(verify)
    with tempfile.TemporaryDirectory() as folder:
        cfg = Config(seed=seed, out=folder, **settings)
        with nrl.run(cfg) as run, nrl.cluster("local") as cluster:
            slots, model = cluster.reserve(2), tiny.model(seed=seed)
            trainer = fsdp.trainer(slots[:1], model, adamw(lr=1e-3, betas=(0.9, 0.95)))
            sampler = hf.sampler(slots[1:], model, nrl.Sampling(max_new_tokens=4))
            collate = partial(data.supervised, tokenizer=sampler.tokenizer)
            taught = nrl.batched(data.tasks(lessons(tasks), seed=seed, chat=False), 64, collate=collate)
            warm = fsdp.trainer(trainer.mesh, model, adamw(lr=1e-3))
            policy = trainer.init(nrl.fit(run, "warmup", warm, sft_loss, taught, cfg.warmup).params)
            groups = nrl.rollouts(sampler, env, data.tasks(tasks, seed=seed, chat=False), n=cfg.group_size, seed=seed)
            train = trainer.train_step(grpo_loss)
            state, stream = run.restore(policy=policy, stream=nrl.batched(groups, cfg.prompts))
            nrl.publish(state.params, sampler)
            for i, batch in run.steps(stream):
                batch = nrl.assign(advantages(batch), old_logprobs=batch["rollout_logprobs"])
                state, metrics = train(state, batch)
                nrl.publish(state.params, sampler)
                found = nrl.summary(batch)
                if i + 1 == cfg.steps:
                    greedy = nrl.Sampling(max_new_tokens=4, temperature=0.0)
                    asked = data.tasks(others, seed=seed, chat=False).take(128)
                    found |= nrl.measure(nrl.grade(sampler, env, asked, sampling=greedy, seed=10**6))
                run.log(i, metrics, found, samples=nrl.samples(batch, sampler.tokenizer))
        return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def report(found: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """Medians over seeds (and ranges), as Markdown.

    >>> print(report([[{"reward": 0.25, "eval/reward": 0.5}]]).splitlines()[2])
    | `chain_sum`, two terms of one digit | 0.25 (0.25-0.25) | 0.25 (0.25-0.25) | 0.50 (0.50-0.50) | 0.0 |
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
        f"| `{DATASET}`, two terms of one digit | {' | '.join(columns)} |"
    )


if __name__ == "__main__":
    main()
