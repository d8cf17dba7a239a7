"""Measure the CPU seconds of `examples/grpo.py` alone, and beside processes that keep all cores busy.

    python benchmarks/busy.py                 # the README's job three times: five minutes on two cores
    python benchmarks/busy.py --steps 20      # a shorter one
    python benchmarks/busy.py --threads 2     # with OMP_NUM_THREADS=2: what a second thread costs there
    python benchmarks/busy.py --sizes         # what all threads give and cost, by the size of the model

Beside the job run as many processes as this one has cores: loops of Python, or torch's matrix products with torch's own
number of threads. The CPU seconds, user and system, are those of the job and of all that it started. They are compared
because seconds by the clock double where two programs share a core.

`--sizes` runs a train step and a rollout of 256 rows, with one thread and with all, in turns. A ratio of the clock near
1 means that more threads do not pay; the ratio of CPU seconds says what they cost. This needs a quiet machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

import nrl
from benchmarks._machine import described, watched
from benchmarks._paired import Clock, Times, pair, ratios, spread
from benchmarks.by_hand import make_batch
from nrl import tiny
from nrl.algos import grpo_loss
from nrl.backends import adamw, fsdp
from nrl.backends.hf.cache import prepare
from nrl.backends.hf.decoding import decode
from nrl.backends.models.loading import build
from nrl.runtime.node.cgroups import allowed_cores

__all__ = ["BESIDE", "compare_threads", "main", "measure", "options"]

ROOT = Path(__file__).resolve().parent.parent
BESIDE = {
    "alone": None,
    "beside loops of Python": "print(flush=True)\nwhile True: pass",
    "beside torch": "import torch\nx = torch.randn(512, 512)\nx @ x\nprint(flush=True)\nwhile True: x @ x",
}
"""The program of each busy process, which prints a line once it is busy."""
SIZES = ((64, 2), (128, 2), (256, 2), (256, 4), (512, 4))  # width and layers


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line.

    >>> options(["--steps", "20"]).steps
    20
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="of the job, after a warm-up of at most 40")
    parser.add_argument("--threads", type=int, default=None, help="OMP_NUM_THREADS of the job; none: nrl chooses")
    parser.add_argument("--sizes", action="store_true", help="compare one thread and all, by the size of the model")
    parser.add_argument("--turns", type=int, default=8, help="of --sizes, after one that does not count")
    parser.add_argument("--out", type=Path, default=None, help="write every measurement as JSON")
    return parser.parse_args(words)


def environment(threads: int | None = None) -> dict[str, str]:
    """The variables of a job for which the user has chosen no number of threads, or this one."""
    own = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    return own if threads is None else own | {"OMP_NUM_THREADS": str(threads)}


@contextmanager
def busy(program: str | None) -> Iterator[None]:
    """While entered, as many processes as there are cores run a program; none where it is None."""
    command = [sys.executable, "-c", program or ""]
    count = allowed_cores() if program else 0
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(), text=True) for _ in range(count)]
    try:
        for process in processes:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise RuntimeError(f"a busy process ended with exit code {process.wait()}; its error is above")
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def measure(steps: int, program: str | None, threads: int | None = None) -> Times:
    """Seconds of the README's job: ``cpu/job`` of it and of all that it started, and ``wall/job``.

    Args:
        steps: of the job; its warm-up has at most 40.
        program: what other processes run meanwhile; None: there are none.
        threads: the job's OMP_NUM_THREADS; None: it is not set.

    Raises:
        RuntimeError: the job fails.
    """
    with tempfile.TemporaryDirectory() as folder, busy(program):
        words = [f"steps={steps}", f"warmup={min(steps, 40)}", f"out={folder}/run"]
        with (Path(folder) / "said").open("w+") as said:
            began = time.perf_counter()
            job = subprocess.Popen(
                [sys.executable, "examples/grpo.py", *words],
                cwd=ROOT,
                env=environment(threads),
                stdout=said,
                stderr=subprocess.STDOUT,
            )
            _, status, usage = os.wait4(job.pid, 0)
            wall = time.perf_counter() - began
            job.returncode = os.waitstatus_to_exitcode(status)
            if job.returncode:
                said.seek(0)
                raise RuntimeError(f"the job ended with exit code {job.returncode}:\n{said.read()[-2000:]}")
    return {"cpu/job": usage.ru_utime + usage.ru_stime, "wall/job": wall}


def compare_threads(width: int, layers: int, turns: int, rows: int = 256) -> dict[str, Any]:
    """Pairs of all threads and of one, of a train step and of a rollout of a model of this size."""
    heads = max(2, width // 32)
    fields = {"num_attention_heads": heads, "num_key_value_heads": heads // 2, "intermediate_size": 3 * width}
    model = tiny.model(hidden_size=width, num_hidden_layers=layers, **fields)
    module = build(model).eval().requires_grad_(False)
    prepare(module)
    batch = make_batch(argparse.Namespace(rows=rows, tokens=12, prompt=6), 100, 0, 0)
    prompts = [[int(token) for token in row[:6]] for row in batch["input_ids"]]
    pairs: dict[str, list[tuple[Times, Times]]] = {}
    with nrl.cluster("local") as cluster:
        trainer = fsdp.trainer(cluster.reserve(1), model, adamw(lr=1e-4))
        state, step = trainer.init(), trainer.train_step(grpo_loss)

        def train() -> None:
            nonlocal state
            state, metrics = step(state, batch)
            metrics.result()

        def generate() -> None:
            decode(module, prompts, range(rows), max_new_tokens=4, context_length=512)

        def timed(act: Callable[[], None], threads: int) -> Times:
            torch.set_num_threads(threads)
            clock = Clock()
            with clock("act"):
                act()
            return clock.take()

        acts: dict[str, Callable[[], None]] = {"train": train, "rollout": generate}
        for name, act in acts.items():
            sides = partial(timed, act, allowed_cores()), partial(timed, act, 1)
            pairs[name] = [pair(*sides, turn) for turn in range(turns + 1)][1:]
    return {"parameters": sum(each.numel() for each in module.parameters()), "pairs": pairs}


def main(given: argparse.Namespace) -> None:
    """Measure, and print a table."""
    results: dict[str, Any] = {}
    with watched() as machine:
        if given.sizes:
            print(
                f"{allowed_cores()} threads / 1 thread\n\n"
                "| width, layers | parameters | | CPU | wall |\n|---|---|---|---|---|"
            )
            for width, layers in SIZES:
                found = results[f"{width}, {layers}"] = compare_threads(width, layers, given.turns)
                for name, pairs in found["pairs"].items():
                    cells = " | ".join(spread(ratios(pairs, f"{kind}/act")) for kind in ("cpu", "wall"))
                    size = f"{found['parameters'] / 1e6:.2f}M"
                    print(f"| {width}, {layers} | {size} | {name} | {cells} |", flush=True)
        else:
            print("| | CPU seconds | of those alone | seconds |\n|---|---|---|---|")
            for name, program in BESIDE.items():
                times = results[name] = measure(given.steps, program, given.threads)
                ratio = times["cpu/job"] / results["alone"]["cpu/job"]
                print(f"| {name} | {times['cpu/job']:.1f} | {ratio:.2f} | {times['wall/job']:.1f} |", flush=True)
    print(f"\nAll cores meanwhile: {described(machine)}.")
    if given.out:
        given.out.write_text(json.dumps({"settings": vars(given), "results": results}, default=str, indent=1))


if __name__ == "__main__":
    main(options())
