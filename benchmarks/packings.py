"""Compare the two forms of packed rows, `nrl.Sequences` and `nrl.Rectangles`, on rows of GRPO, in turns.

    python benchmarks/packings.py              # some minutes on a CPU core
    python benchmarks/packings.py --quick      # does it run?

A step of each of two trainers that differ in ``packing=`` alone, on the same batches: 32 prompts, 8 answers each. In
the regime ``short`` every answer has 8 tokens. In ``skewed`` they are geometric draws with mean 38, at most 256. In
``prompts`` the prompts are long (128 tokens), the answers skewed. In ``alone`` the rows are those of ``skewed``, but
each has a prompt of its own. Every step compares the losses. ``tokens`` is how many go through the model's layers,
`nrl.Sequences` over `nrl.Rectangles`.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

import nrl
from benchmarks._machine import described, watched
from benchmarks._paired import Clock, Times, pair, ratios, spread
from benchmarks.vs_trl import SIZES
from nrl import tiny
from nrl.algos import grpo_loss
from nrl.backends import Trainer, adamw, fsdp
from nrl.batch import Batch
from nrl.runtime.intraop import set_threads

__all__ = ["FORMS", "REGIMES", "Regime", "compare", "main", "make_batch", "options", "stepper", "tokens"]


class Regime(NamedTuple):
    """The tokens of prompts, the most and the mean of answers (None: all have the most); whether groups have a prompt.

    >>> Regime(8, 8, None, True).prompt
    8
    """

    prompt: int
    most: int
    mean: float | None
    alike: bool


REGIMES = {
    "short": Regime(8, 8, None, True),
    "skewed": Regime(8, 256, 38.0, True),
    "prompts": Regime(128, 256, 38.0, True),
    "alone": Regime(8, 256, 38.0, False),
}

FORMS = (nrl.Sequences, nrl.Rectangles)


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line.

    >>> options([]).prompts
    32
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["0.8M"])
    parser.add_argument("--regimes", nargs="+", choices=list(REGIMES), default=list(REGIMES))
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=8, help="answers a prompt")
    parser.add_argument("--steps", type=int, default=6, help="pairs of steps, after two that do not count")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None, help="write every pair as JSON")
    parser.add_argument("--quick", action="store_true", help="tiny, two steps: shows that it runs, measures nothing")
    args = parser.parse_args(words)
    if args.quick:
        args.sizes, args.prompts, args.group, args.steps = ["tiny"], 2, 4, 2
    return args


def main() -> None:
    """Compare the forms for every size and regime, and print one table."""
    args = options()
    set_threads(args.threads)
    found = []
    print(f"Sequences / Rectangles; {args.prompts} prompts x {args.group} answers, {args.threads} threads\n")
    print("| parameters | regime | tokens | CPU: median (range) | wall: median (range) |")
    print("|---|---|---|---|---|")
    with watched() as machine:
        for size in args.sizes:
            for name in args.regimes:
                pairs = compare(args, size, REGIMES[name])
                cells = " | ".join(spread(ratios(pairs, f"{kind}/step")) for kind in ("cpu", "wall"))
                ratio = tokens(make_batch(args, REGIMES[name], 0))
                print(f"| {size} | {name} | {ratio:.2f} | {cells} |", flush=True)
                found.append({"size": size, "regime": name, "tokens": ratio, "pairs": pairs})
    print(f"\nAll cores meanwhile: {described(machine)}.")
    if args.out:
        args.out.write_text(json.dumps({"settings": vars(args), "results": found}, default=str, indent=1))


def make_batch(args: argparse.Namespace, regime: Regime, seed: int) -> Batch:
    """Random rows, with what GRPO's loss reads."""
    generator = torch.Generator().manual_seed(seed)
    rows, words = args.prompts * args.group, len(tiny.ALPHABET)
    answers = torch.full((rows,), regime.most)
    if regime.mean is not None:
        drawn = torch.empty(rows).geometric_(1 / regime.mean, generator=generator).long()
        answers = drawn.clamp(max=regime.most)
    width = regime.prompt + int(answers.max())
    at = torch.arange(width).expand(rows, width)
    real = at < regime.prompt + answers[:, None]
    ids = torch.randint(4, words, (rows, width), generator=generator)
    if regime.alike:
        ids[:, : regime.prompt] = ids[:: args.group, : regime.prompt].repeat_interleave(args.group, 0)
    return nrl.assign(
        Batch({}, batch_size=[rows]),
        input_ids=ids * real,
        attention_mask=real,
        loss_mask=real & (at >= regime.prompt),
        old_logprobs=torch.full((rows, width), -4.6),
        advantages=torch.randn(rows, 1, generator=generator).expand(rows, width).contiguous(),
        temperature=torch.ones(rows),
    )


def tokens(batch: Batch) -> float:
    """How many tokens `nrl.Sequences` lay out for one of `nrl.Rectangles`, each with what it shares by itself."""
    counts = [len(nrl.pack(batch, packing=packing, share=None).input_ids) for packing in FORMS]
    return counts[0] / counts[1]


def compare(args: argparse.Namespace, size: str, regime: Regime) -> list[tuple[Times, Times]]:
    """Times of pairs of steps, of sequences and of rectangles.

    Raises:
        RuntimeError: their losses differ, so they do not do the same.
    """
    width, layers = SIZES[size]
    model = tiny.model(hidden_size=width, num_hidden_layers=layers, intermediate_size=3 * width, head_dim=width // 4)
    with nrl.cluster("local") as cluster:
        slots = cluster.reserve(1)
        first, second = (stepper(fsdp.trainer(slots, model, adamw(lr=1e-4), packing=form)) for form in FORMS)
        pairs: list[tuple[Times, Times]] = []
        for number in range(args.steps + 2):
            batch = make_batch(args, regime, number)
            one, other = pair(partial(first, batch), partial(second, batch), number)
            if abs(one[0] - other[0]) > 1e-4 * max(1, abs(other[0])):
                raise RuntimeError(f"packings: in step {number} the losses are {one[0]} and {other[0]}; look for why")
            pairs.append((one[1], other[1]))
    return pairs[2:]


def stepper(trainer: Trainer) -> Callable[[Batch], tuple[float, Times]]:
    """A function that takes one step more, and returns the loss and the times."""
    train, state = trainer.train_step(grpo_loss), trainer.init()

    def step(batch: Batch) -> tuple[float, Times]:
        nonlocal state
        clock = Clock()
        with clock("step"):
            state, metrics = train(state, batch)
            loss = nrl.finalize(metrics.result())["loss"]
        return loss, clock.take()

    return step


if __name__ == "__main__":
    main()
