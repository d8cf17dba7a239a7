"""Measure how long a step waits at a checkpoint: for the copy of its values, and for the disk.

    python benchmarks/saving.py             # two minutes, 8 GB of memory, 10 GB of disk
    python benchmarks/saving.py --folder /mnt/checkpoints    # the disk that counts
    python benchmarks/saving.py --quick     # does it run?

A trainer of some hundred million parameters on the local cluster has taken a step, so that it has moments. Then it is
saved again and again, in turns with ``Checkpoints(wait="copy")`` and with ``wait="disk"``, whose order alternates. The
numbers, over the pairs:

- copy / disk: the ratio of the seconds for which the program waits.
- written / disk: the seconds until the checkpoint of the first is complete while nothing else runs, over those of the
  second. Above 1 is what the copy costs.

The first pair does not count: the memory of a copy is new there, and later it is used again. This is memory of the
host that is copied to memory of the host. From a GPU it goes over its bus into page-locked memory, which is not
measured here; the disk is the same.
"""

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import nrl
from benchmarks._machine import described, watched
from benchmarks._paired import spread
from benchmarks.publish import model
from nrl import tiny
from nrl.algos import sft_loss
from nrl.backends import adamw, fsdp
from nrl.run import checkpoint
from nrl.run.checkpoint import Checkpoints

__all__ = ["main", "measured", "options"]

KEEP = Checkpoints(keep=1)


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line.

    >>> options(["--quick"]).pairs
    1
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="after one that does not count")
    parser.add_argument("--size", default="100M", help="of the model, as benchmarks/publish.py has them")
    parser.add_argument("--folder", type=Path, default=None, help="where to; none: the system's for temporary files")
    parser.add_argument("--out", type=Path, default=None, help="write every measurement as JSON")
    parser.add_argument("--quick", action="store_true", help="small and few: shows that it runs, measures nothing")
    args = parser.parse_args(words)
    if args.quick:
        args.pairs, args.size = 1, "quick"
    return args


def measured(root: Path, state: Any, step: int, wait: str) -> dict[str, float]:
    """Seconds of a save: ``waited``, by the program, and ``written``, until the checkpoint is complete."""
    began = time.perf_counter()
    if wait == "disk":
        checkpoint.store(root, step, {"policy": state}, KEEP, {})
        waited = written = time.perf_counter() - began
    else:
        complete = checkpoint.begin_storing(root, step, {"policy": state}, KEEP, {})
        waited = time.perf_counter() - began
        complete.result()
        written = time.perf_counter() - began
    return {"waited": waited, "written": written}


def main() -> None:
    """Measure, and print the ratios."""
    args = options()
    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp(dir=args.folder))
    pairs: list[dict[str, dict[str, float]]] = []
    try:
        with nrl.cluster("local") as cluster, watched() as machine:
            shape = tiny.model() if args.size == "quick" else model(args.size)
            trainer = fsdp.trainer(cluster.reserve(1), shape, adamw(lr=1e-5))
            state, _ = trainer.train_step(sft_loss)(trainer.init(), tiny.sums(4).take(1)[0])
            for number in range(args.pairs + 1):
                order = ("copy", "disk") if number % 2 else ("disk", "copy")
                pairs.append({wait: measured(root, state, 2 * number + i, wait) for i, wait in enumerate(order)})
            size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    finally:
        shutil.rmtree(root)
    counted = pairs[1:]
    print(f"checkpoints of {size / 1e9:.2f} GB; {described(machine)}")
    for name, ratios in {
        "copy / disk": [each["copy"]["waited"] / each["disk"]["waited"] for each in counted],
        "written / disk": [each["copy"]["written"] / each["disk"]["written"] for each in counted],
    }.items():
        print(f"{name:15} {spread(ratios)}")
    if args.out is not None:
        args.out.write_text(json.dumps(pairs, indent=1))


if __name__ == "__main__":
    main()
