"""Measure how often a small reward model is right about pairs of real answers that it has not seen.

    python benchmarks/real_pairs.py pairs.jsonl --texts questions.jsonl    # a quarter of an hour on one CPU core
    python benchmarks/real_pairs.py pairs.jsonl --texts questions.jsonl --quick    # does it run?

This uses no pretrained model. It makes a tokenizer of 2,000 byte pairs and a Qwen3 of about two million parameters, and
trains them on ``--texts`` (rows with "question" and "answer") as a language model. From there
`examples/reward_model.py` learns on all pairs but a hundred, which are those of other prompts, and ranks these. A seed
is another choice of the hundred. The results are the share of them that it ranks as they are labelled, and the same
share of the pairs that it was trained on. With 100 pairs one standard error is 0.05.
"""

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import nrl
from examples import reward_model
from nrl import data, tiny
from nrl.algos import sft_loss
from nrl.backends import adamw, fsdp
from nrl.run.checkpoint import Checkpoints

__all__ = ["Figure", "main", "options", "pretrained", "ranked", "split"]

EVAL_PAIRS = 100


class Figure(NamedTuple):
    """Shares of pairs that are ranked as labelled."""

    evaluated: float
    trained: float


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line.

    >>> options(["pairs.jsonl", "--texts", "texts.jsonl"]).seeds
    3
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", help='JSON lines with "prompt", "chosen" and "rejected"')
    parser.add_argument("--texts", required=True, help='JSON lines with "question" and "answer"')
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pretraining", type=int, default=300, help="steps of 32 texts")
    parser.add_argument("--steps", type=int, default=60, help="of 32 pairs")
    parser.add_argument("--quick", action="store_true", help="few steps: shows that it runs, measures nothing")
    args = parser.parse_args(words)
    if args.quick:
        args.seeds, args.pretraining, args.steps = 1, 2, 2
    return args


def main() -> None:
    """Measure and print."""
    args = options()
    with tempfile.TemporaryDirectory() as scratch:
        model = pretrained(args.texts, Path(scratch) / "model", args.pretraining)
        found = [ranked(model, args.pairs, Path(scratch) / f"{seed}", args.steps, seed) for seed in range(args.seeds)]
    for seed, figure in enumerate(found):
        print(f"seed {seed}: {figure.evaluated:.2f} of {EVAL_PAIRS} held out, {figure.trained:.2f} of those trained on")
    print(f"mean: {statistics.fmean(figure.evaluated for figure in found):.2f} held out")


def pretrained(texts: str, folder: Path, steps: int) -> Path:
    """A folder with a small language model of these texts, and its tokenizer."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    rows = [json.loads(line) for line in Path(texts).read_text(encoding="utf-8").splitlines()]
    pieces: Any = ByteLevelBPETokenizer()
    pieces.train_from_iterator(
        (row[key] for row in rows for key in ("question", "answer")),
        2000,
        special_tokens=["<end>"],
        show_progress=False,
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pieces._tokenizer, eos_token="<end>", pad_token="<end>")
    model = tiny.model(tokenizer=tokenizer, hidden_size=192, num_hidden_layers=4, intermediate_size=512)
    with nrl.cluster("local") as cluster:
        trainer = fsdp.trainer(cluster.reserve(1), model, adamw(lr=2e-3))
        step, state = trainer.train_step(sft_loss), trainer.init()
        tasks = data.tasks(texts, chat=False, format="gsm8k", collate=data.supervised)
        stream = nrl.batched(tasks, 32, collate=partial(data.supervised, tokenizer=tokenizer))
        for i in range(steps):
            state, metrics = step(state, stream.take(1)[0])
            if (i + 1) % 100 == 0:
                print(f"pretraining: step {i + 1} of {steps}, loss {nrl.finalize(metrics.result())['loss']:.2f}")
        trainer.export(state.params, folder)
    return folder


def split(pairs: Sequence[dict[str, Any]], seed: int, count: int = EVAL_PAIRS) -> tuple[list[Any], list[Any]]:
    """Pairs to train on and pairs that are held out, no prompt of which is in both.

    >>> [len(part) for part in split([{"prompt": str(i // 2)} for i in range(10)], 0, 3)]
    [6, 4]
    """
    prompts = list(dict.fromkeys(pair["prompt"] for pair in pairs))
    random.Random(seed).shuffle(prompts)
    left, kept = list(pairs), list[Any]()
    while len(kept) < count:
        prompt = prompts.pop()
        kept += [pair for pair in left if pair["prompt"] == prompt]
        left = [pair for pair in left if pair["prompt"] != prompt]
    return left, kept


def ranked(model: Path, pairs: str, folder: Path, steps: int, seed: int) -> Figure:
    """What the example reaches."""
    rows = [json.loads(line) for line in Path(pairs).read_text(encoding="utf-8").splitlines()]
    folder.mkdir()
    for name, part in zip(("train", "eval"), split(rows, seed), strict=True):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    cfg = reward_model.Config(
        model=str(model),
        data=str(folder / "train.jsonl"),
        eval_data=str(folder / "eval.jsonl"),
        chat=False,
        steps=steps,
        seed=seed,
        out=str(folder / "run"),
        pairs=32,
        max_length=512,
        evaluate_every=steps,
        evaluate_pairs=EVAL_PAIRS,
        optimizer=adamw(lr=3e-4),
        checkpoints=Checkpoints(),
    )
    reward_model.main(cfg)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    last = lines[-max(1, len(lines) // 6) :]
    return Figure(lines[-1]["eval/accuracy"], statistics.fmean(line["accuracy"] for line in last))


if __name__ == "__main__":
    main()
