"""Measure the needs of a run on Ray beside its actors: memory of the program, and time until the first step.

    python benchmarks/ray_runs.py             # some minutes
    python benchmarks/ray_runs.py --quick     # does it run?

**Memory.** A program trains a model of 20 million parameters on a mesh of 1, 2 or 4 processes, publishes the weights to
a sampler on a mesh of its own, and computes log-probabilities. The result is the growth of the program's own resident
memory, and of the shared memory that it has looked at, from the moment when the actors are there. Each number of
processes has a program of its own.

**Start.** ``examples/sft.py`` runs on the local cluster; on Ray, in an environment that is built then; and on Ray, in
the same environment again. The results are the seconds from the start of Python to the end of the first step, and those
of its parts. The three take turns.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks._machine import described, resident, watched
from benchmarks._paired import spread

__all__ = ["main", "memory", "options", "report", "start"]

ROOT = Path(__file__).parents[1]
SIZE = {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "head_dim": 64, "intermediate_size": 1536}
PARTS = ("imports", "Ray", "environment", "actors and engine", "data and the rest", "first step", "whole")
KINDS = ("local", "ray, built", "ray, there")


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line.

    >>> options(["--quick"]).rounds
    1
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2, 4], help="of the trainer; none: no memory")
    parser.add_argument("--steps", type=int, default=5, help="of each program whose memory is read")
    parser.add_argument("--rounds", type=int, default=3, help="starts of each kind; 0: none")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None, help="write every measurement as JSON")
    parser.add_argument("--quick", action="store_true", help="small and few: shows that it runs, measures nothing")
    parser.add_argument("--child", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.quick:
        args.processes, args.steps, args.rounds = [1], 2, 1
    return args


def main() -> None:
    """Measure and print the tables; or be one of the programs that are measured."""
    args = options()
    if args.child:
        kind, *rest = args.child
        print(json.dumps(memory(*rest) if kind == "memory" else start(*rest)))
        return
    env = os.environ | {"OMP_NUM_THREADS": str(args.threads)}
    small = "small" if args.quick else "large"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()  # where uv can link its files from
    with watched() as machine, tempfile.TemporaryDirectory(dir=cache) as folder:
        grown = {n: _child(env, "memory", str(n), str(args.steps), small) for n in args.processes}
        starts: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
        for number in range(args.rounds):
            venvs = {"NRL_VENV_DIR": f"{folder}/venvs{number}"}
            for kind in KINDS:
                starts[kind].append(_child(env | venvs, "start", kind.split(",")[0], str(time.time())))
    print(report(grown, starts, machine, args.threads))
    if args.out:
        found = {"settings": vars(args), "memory": grown, "starts": starts, "machine": machine}
        args.out.write_text(json.dumps(found, default=str, indent=1))


def _child(env: dict[str, str], *words: str) -> Any:
    command = [sys.executable, __file__, "--child", *words]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1800)
    if done.returncode != 0:
        raise RuntimeError(f"ray_runs: {' '.join(words)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def memory(processes: str, steps: str, size: str) -> list[dict[str, float]]:
    """Resident memory in MiB, from when the actors are there and after each step."""
    import torch

    import nrl
    from nrl import tiny
    from nrl.algos import sft_loss
    from nrl.backends import adamw, fsdp, hf
    from nrl.batch import Batch

    torch.set_num_threads(1)
    n = int(processes)
    model = tiny.model(**(SIZE if size == "large" else {}))
    with nrl.cluster("ray") as cluster:
        slots = cluster.reserve(n + 1)
        meshes = [part.mesh(executable="system") for part in (slots[:n], slots[n:])]
        trainer, sampler = fsdp.trainer(meshes[0], model, adamw(lr=1e-4)), hf.sampler(meshes[1], model)
        step = trainer.train_step(sft_loss)  # waits for the actors
        found = [resident()]
        state = trainer.init()
        for number in range(int(steps)):
            ids = torch.randint(5, 90, (16, 64), generator=torch.Generator().manual_seed(number))
            columns = {"input_ids": ids, "attention_mask": ids > 0, "loss_mask": ids > 9}
            batch = nrl.assign(Batch({}, batch_size=[16]), **columns)
            state, metrics = step(state, batch)
            metrics.result()
            nrl.publish(state.params, sampler)
            trainer.logprobs(state.params, batch).result()
            found.append(resident())
    return found


def start(cluster: str, started: str) -> dict[str, float]:
    """Seconds by part of ``examples/sft.py`` up to its first step."""
    from unittest import mock

    from examples import sft
    from nrl.backends import Trainer, adamw
    from nrl.run import Run

    marks = {"imports": time.time() - float(started)}

    def timed(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.time()
            try:
                return fn(*args, **kwargs)
            finally:
                marks[name] = time.time() - begin

        return call

    train_step = Trainer.train_step

    def waited_for(trainer: Trainer, loss: Any) -> Any:
        """A step that is waited for; it is the first one, so nothing would run meanwhile."""
        step = train_step(trainer, loss)

        def wait(state: Any, batch: Any) -> Any:
            state, metrics = step(state, batch)
            metrics.result()
            return state, metrics

        return timed("first step", wait)

    patches = [mock.patch.object(Trainer, "train_step", timed("actors and engine", waited_for))]
    if cluster == "ray":
        from nrl.runtime.ray.connection import connect
        from nrl.runtime.ray.nodes import find_interpreters

        patches.append(mock.patch("nrl.runtime.ray.cluster.connect", timed("Ray", connect)))
        patches.append(mock.patch("nrl.runtime.ray.cluster.find_interpreters", timed("environment", find_interpreters)))

    class Done(Exception):
        """The first step is over."""

    def stop(*args: Any, **kwargs: Any) -> None:
        marks["whole"] = time.time() - float(started)
        raise Done

    patches.append(mock.patch.object(Run, "log", stop))
    with tempfile.TemporaryDirectory() as folder:
        for patch in patches:
            patch.start()
        try:
            cfg = sft.Config(cluster=cluster, eval_data=None, out=f"{folder}/run", optimizer=adamw(lr=1e-3))
            sft.main(cfg)
        except Done:
            pass
        mock.patch.stopall()
    marks["data and the rest"] = 2 * marks["whole"] - sum(marks.values())
    return marks


def report(
    grown: dict[int, list[dict[str, float]]],
    starts: dict[str, list[dict[str, float]]],
    machine: dict[str, float],
    threads: int,
) -> str:
    """Two tables, as Markdown."""
    lines = [
        "| memory of the program, MiB | with actors | first step | later steps | shared |",
        "|---|---|---|---|---|",
    ]
    for n, readings in grown.items():
        own, shared = ([reading[key] for reading in readings] for key in ("own", "shared"))
        growth = (own[1] - own[0], own[-1] - own[1], shared[-1] - shared[0])
        columns = [f"{own[0]:.0f}", *(f"{each:+.1f}" for each in growth)]
        lines.append(f"| {n} process(es) and a sampler | {' | '.join(columns)} |")
    if any(starts.values()):
        lines += ["", f"| seconds to the first step: median (range) | {' | '.join(starts)} |", "|---|---|---|---|"]
        for part in PARTS:
            columns = [spread([found[part] for found in rounds if part in found]) for rounds in starts.values()]
            lines.append(f"| {part} | {' | '.join(columns)} |")
    lines.append(f"\nThreads: {threads}. All cores meanwhile: {described(machine)}.")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
