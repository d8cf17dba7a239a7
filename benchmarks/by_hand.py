"""Compare nrl's train step with the same loop written by hand in plain torch, in turns.

    python benchmarks/by_hand.py              # two minutes on a CPU core
    python benchmarks/by_hand.py --quick      # does it run?

The ratio shows the cost of nrl's step above its arithmetic: the weights of the loss, micro-batches, packing, checks,
metrics. So both sides do the same work: rows have different prompts (nothing can be shared) and nearly equal lengths
(there is no padding to leave out), and every step compares the two losses. ``--spread`` is how far lengths differ, in
tokens.

With a spread of 0 the loop by hand has the best possible layout, a rectangle without a mask. nrl uses the same layout
for such rows, so the ratio is what nrl adds. With a spread, the loop by hand sorts rows by length and gives
transformers a padding mask, as anybody would. That switches the causal kernel off; nrl keeps it, so the ratio is
smaller.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

import nrl
from benchmarks._paired import Clock, Times, pair, ratios, spread
from benchmarks.vs_trl import SIZES
from nrl import tiny
from nrl.algos import grpo_loss, sft_loss
from nrl.backends import Model, adamw, fsdp
from nrl.backends.models.loading import build
from nrl.batch import Batch
from nrl.runtime.intraop import set_threads

__all__ = ["by_hand", "compare", "main", "make_batch", "options"]

LR, CLIP, RANGE = 1e-4, 1.0, 0.2
LOSSES = {"supervised": sft_loss, "GRPO": grpo_loss}


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line.

    >>> options([]).rows
    256
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["0.8M"])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=48, help="of the longest row")
    parser.add_argument("--prompt", type=int, default=8, help="of them, tokens of the prompt")
    parser.add_argument("--spread", type=int, nargs="+", default=[0, 4])
    parser.add_argument("--steps", type=int, default=10, help="pairs of steps, after two that do not count")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None, help="write every pair as JSON")
    parser.add_argument("--quick", action="store_true", help="tiny, two steps: shows that it runs, measures nothing")
    args = parser.parse_args(words)
    if args.quick:
        args.sizes, args.rows, args.tokens, args.steps = ["tiny"], 8, 16, 2
    return args


def main() -> None:
    """Compare both losses for every size and spread, and print one table."""
    args = options()
    set_threads(args.threads)
    found = []
    print(f"nrl / by hand; {args.rows} rows of up to {args.tokens} tokens, {args.threads} threads\n")
    print("| parameters | step | lengths differ by | CPU: median (range) | wall: median (range) |")
    print("|---|---|---|---|---|")
    for size in args.sizes:
        for differ in args.spread:
            for name in LOSSES:
                pairs = compare(args, size, name, differ)
                cells = " | ".join(spread(ratios(pairs, f"{kind}/step")) for kind in ("cpu", "wall"))
                print(f"| {size} | {name} | {differ} | {cells} |", flush=True)
                found.append({"size": size, "loss": name, "spread": differ, "pairs": pairs})
    if args.out:
        args.out.write_text(json.dumps({"settings": vars(args), "results": found}, default=str, indent=1))


def make_batch(args: argparse.Namespace, vocabulary: int, differ: int, seed: int) -> Batch:
    """Random rows of ``tokens - differ`` to ``tokens`` tokens, with what both losses read."""
    generator = torch.Generator().manual_seed(seed)
    size, width = args.rows, args.tokens
    sizes = width - torch.randint(differ + 1, (size,), generator=generator)
    sizes[0] = width
    at = torch.arange(width).expand(size, width)
    real = at < sizes[:, None]
    columns = {
        "input_ids": torch.randint(4, vocabulary, (size, width), generator=generator) * real,
        "attention_mask": real,
        "loss_mask": real & (at >= args.prompt),
        "old_logprobs": torch.full((size, width), -4.6),
        "advantages": torch.randn(size, 1, generator=generator).expand(size, width).contiguous(),
        "temperature": torch.ones(size),
    }
    return nrl.assign(Batch({}, batch_size=[size]), **columns)


def by_hand(model: Model, loss: str) -> Callable[[Batch], float]:
    """The loop that a competent person writes: one function, which takes a step and returns the loss."""
    module: Any = build(model)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, weight_decay=0.0, fused=True)

    def logprobs(batch: Batch) -> Tensor:
        ids, mask = batch["input_ids"], batch["attention_mask"]
        logits = module(input_ids=ids, attention_mask=None if mask.all() else mask.long(), use_cache=False).logits
        picked: Tensor = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        return picked

    def step(batch: Batch) -> float:
        if not batch["attention_mask"].all():
            batch = batch[batch["attention_mask"].sum(-1).argsort()]
        module.train()
        found, mask = logprobs(batch), batch["loss_mask"][:, 1:]
        if loss == "supervised":
            value = -(found * mask).sum() / mask.sum()
        else:
            ratio, advantages = (found - batch["old_logprobs"][:, 1:]).exp(), batch["advantages"][:, 1:]
            surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - RANGE, 1 + RANGE) * advantages)
            value = -((surrogate * mask).sum(-1) / mask.sum(-1)).mean()
        value.backward()
        clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(value.detach())

    return step


def compare(args: argparse.Namespace, size: str, loss: str, differ: int) -> list[tuple[Times, Times]]:
    """Times of pairs of steps, of nrl and by hand.

    Raises:
        RuntimeError: their losses differ, so they do not do the same.
    """
    width, layers = SIZES[size]
    model = tiny.model(hidden_size=width, num_hidden_layers=layers, intermediate_size=3 * width, head_dim=width // 4)
    batches = [make_batch(args, len(tiny.ALPHABET), differ, seed) for seed in range(args.steps + 2)]
    with nrl.cluster("local") as cluster:
        trainer = fsdp.trainer(cluster.reserve(1), model, adamw(lr=LR, clip=CLIP))
        train, state = trainer.train_step(LOSSES[loss]), trainer.init()
        plain = by_hand(model, loss)

        def ours(batch: Batch) -> float:
            nonlocal state
            state, metrics = train(state, batch)
            return nrl.finalize(metrics.result())["loss"]

        pairs: list[tuple[Times, Times]] = []
        for number, batch in enumerate(batches):
            one, other = pair(partial(_timed, ours, batch), partial(_timed, plain, batch), number)
            if abs(one[0] - other[0]) > 1e-4 * max(1, abs(other[0])):
                raise RuntimeError(f"by_hand: in step {number} the losses are {one[0]} and {other[0]}; look for why")
            pairs.append((one[1], other[1]))
    return pairs[2:]


def _timed(step: Callable[[Batch], float], batch: Batch) -> tuple[float, Times]:
    clock = Clock()
    with clock("step"):
        loss = step(batch)
    return loss, clock.take()


if __name__ == "__main__":
    main()
