"""Measure the cost of a call on a mesh of Ray actors beyond Ray itself, and of a large batch on its way.

    python benchmarks/ray_calls.py            # some minutes
    python benchmarks/ray_calls.py --quick    # does it run?

**Calls.** A function that does nothing, mapped by `nrl.shard_map` over a mesh, takes turns with a method that does
nothing of as many plain Ray actors. The result is the difference of wall-clock time within each pair, and how long the
program is busy until it can go on, since a call returns before it has run. The latter is also measured for a train
step.

**Batches.** A locked batch of token columns goes to the processes of a mesh, whose function looks at nothing of it: a
first time, when it has to be brought into the shared memory of the node, and again, when it is there already. Then its
rows come back as the result. Each time is divided by that of one copy of as many bytes in this process, made in the
same round.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import nrl
from benchmarks._machine import Machine, described, watched
from benchmarks._paired import pair, spread
from nrl import tiny
from nrl.algos import sft_loss
from nrl.backends import adamw, fsdp
from nrl.batch import Batch
from nrl.runtime import Cluster, Mesh, P, shard_map
from nrl.runtime.intraop import set_threads

__all__ = ["batches", "calls", "main", "options", "report", "token_batch"]

type Times = dict[str, float]
"""Seconds by what was measured."""

_PHASES = {"first": "first", "again": "again", "back": "and back"}


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line.

    >>> options(["--quick"]).calls
    5
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=300, help="of each kind, after some that do not count")
    parser.add_argument("--batches", type=int, default=9, help="with a fresh one each, after one that does not count")
    parser.add_argument("--megabytes", type=float, default=100.0)
    parser.add_argument("--width", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--executable", default="system", help="what the actors run in; system: this interpreter")
    parser.add_argument("--out", type=Path, default=None, help="write every measurement as JSON")
    parser.add_argument("--quick", action="store_true", help="small and few: shows that it runs, measures nothing")
    args = parser.parse_args(words)
    if args.quick:
        args.calls, args.batches, args.megabytes, args.width, args.processes = 5, 1, 1.0, 64, [1, 2]
    return args


def main() -> None:
    """Measure and print the tables."""
    args = options()
    set_threads(args.threads)
    with nrl.cluster("ray") as cluster:
        meshes = {n: cluster.reserve(n).mesh(executable=args.executable, name=f"mesh of {n}") for n in args.processes}
        step = train_step(cluster, args.executable)
        with watched() as during_calls:
            made = {n: calls(mesh, args.calls) for n, mesh in meshes.items() if n <= 2}
            steps = [step() for _ in range(args.calls // 5 + 3)][2:]
        with watched() as during_batches:
            moved = {n: batches(mesh, args.batches, args.megabytes, args.width) for n, mesh in meshes.items()}
    print(report(made, steps, moved, args.megabytes, [during_calls, during_batches], args.threads))
    if args.out:
        found = {"calls": made, "train_step": steps, "batches": moved, "machine": [during_calls, during_batches]}
        args.out.write_text(json.dumps({"settings": vars(args)} | found, default=str, indent=1))


def nothing() -> None:
    """What is called."""


class Idle:
    """A plain Ray actor."""

    def call(self) -> None:
        """What is called."""


def calls(mesh: Mesh, times: int) -> list[tuple[Times, Times]]:
    """Pairs of a call on the mesh and one on as many plain actors: until it was ``sent``, until ``done``, ``cpu``."""
    import ray

    kind: Any = ray.remote(Idle)
    actors = [kind.options(num_cpus=0).remote() for _ in range(mesh.size)]
    mapped = shard_map(nothing, mesh, (), P())

    def on_mesh() -> Times:
        return _timed(mapped, lambda future: future.result())

    def on_actors() -> Times:
        return _timed(lambda: [actor.call.remote() for actor in actors], ray.get)

    found = [pair(on_mesh, on_actors, number) for number in range(times + 10)]
    for actor in actors:
        ray.kill(actor)
    return found[10:]


def _timed(send: Callable[[], Any], wait: Callable[[Any], Any]) -> Times:
    start, cpu = time.perf_counter(), time.process_time()
    future = send()
    sent = time.perf_counter()
    wait(future)
    return {"sent": sent - start, "done": time.perf_counter() - start, "cpu": time.process_time() - cpu}


def train_step(cluster: Cluster, executable: str) -> Callable[[], Times]:
    """A step on four rows of a tiny model, which takes the state of the step before."""
    mesh = cluster.reserve(1).mesh(executable=executable, name="trainer")
    trainer = fsdp.trainer(mesh, tiny.model(), adamw(lr=1e-3), max_tokens=1024)
    step, state = trainer.train_step(sft_loss), trainer.init()
    ids = torch.arange(64).view(4, 16)
    batch = nrl.assign(Batch({}, batch_size=[4]), input_ids=ids, loss_mask=ids > 0, attention_mask=ids > -1)

    def once() -> Times:
        nonlocal state

        def send() -> Any:
            nonlocal state
            state, metrics = step(state, batch)
            return metrics

        return _timed(send, lambda metrics: metrics.result())

    return once


def token_batch(megabytes: float, width: int, seed: int) -> Batch:
    """A locked batch of so many bytes with rows of different lengths, in the columns that a policy is trained on."""
    rows = max(8, round(megabytes * 1e6 / width / (8 + 1 + 1 + 4 + 4)))
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(width // 4, width + 1, (rows, 1), generator=random)
    mask = torch.arange(width) < lengths
    return nrl.assign(
        Batch({}, batch_size=[rows]),
        input_ids=torch.randint(0, 150_000, (rows, width), generator=random),
        attention_mask=mask,
        loss_mask=mask.clone(),
        rollout_logprobs=torch.rand(rows, width, generator=random),
        advantages=torch.rand(rows, width, generator=random),
    )


def batches(mesh: Mesh, rounds: int, megabytes: float, width: int) -> list[Times]:
    """For each round, seconds of ``memcpy`` and of ``first``, ``again`` and ``back`` for both specs."""

    def look(batch: Batch) -> None:
        return None

    def give(batch: Batch) -> Batch:
        return batch

    found = []
    source = np.ones(round(megabytes * 1e6), dtype=np.uint8)
    target = np.ones_like(source)
    for number in range(rounds + 1):
        times = {"memcpy": _seconds(np.copyto, target, source)}
        for spec in (P("dp"), P()):
            batch = token_batch(megabytes, width, number)  # not seen before, and the one before is gone
            looked, given = shard_map(look, mesh, spec, P()), shard_map(give, mesh, spec, spec)
            times[f"{spec} first"] = _seconds(_result, looked, batch)
            times[f"{spec} again"] = _seconds(_result, looked, batch)
            times[f"{spec} back"] = _seconds(_result, given, batch)
        found.append(times)
    return found[1:]


def _seconds(fn: Callable[..., Any], *args: Any) -> float:
    start = time.perf_counter()
    fn(*args)
    return time.perf_counter() - start


def _result(fn: Callable[..., Any], *args: Any) -> Any:
    return fn(*args).result()


def report(
    made: dict[int, list[tuple[Times, Times]]],
    steps: Sequence[Times],
    moved: dict[int, list[Times]],
    megabytes: float,
    machine: Sequence[Machine],
    threads: int,
) -> str:
    """Medians and ranges, as Markdown."""

    def quartiles(values: Sequence[float]) -> str:
        low, middle, high = statistics.quantiles(values, n=4)
        return f"{1e3 * middle:.2f} ({1e3 * low:.2f}-{1e3 * high:.2f})"

    lines = [
        "| a call, ms: median (quartiles) | beyond Ray's no-op | Ray's no-op | until sent | Ray's, until sent |",
        "|---|---|---|---|---|",
    ]
    for n, pairs in made.items():
        beyond = [mine["done"] - plain["done"] for mine, plain in pairs]
        plain_done = [plain["done"] for _, plain in pairs]
        sent = [[sides[side]["sent"] for sides in pairs] for side in (0, 1)]
        columns = [beyond, plain_done, *sent]
        lines.append(f"| {n} process(es) | {' | '.join(map(quartiles, columns))} |")
    lines.append(f"\n`train_step` on 4 x 16 tokens is sent within {quartiles([step['sent'] for step in steps])} ms.\n")
    names = [f"`{spec}` {phase}" for spec in (P("dp"), P()) for phase in _PHASES.values()]
    lines.append(f"| {megabytes:g} MB, in copies of as much: median (range) | {' | '.join(names)} |")
    lines.append("|---|" + "---|" * len(names))
    for n, rounds in moved.items():
        shown = [
            spread([times[f"{spec} {phase}"] / times["memcpy"] for times in rounds])
            for spec in (P("dp"), P())
            for phase in _PHASES
        ]
        lines.append(f"| {n} process(es) | {' | '.join(shown)} |")
    copies = [1e3 * times["memcpy"] for rounds in moved.values() for times in rounds]
    lines.append(f"\nOne copy took {statistics.median(copies):.0f} ms ({min(copies):.0f}-{max(copies):.0f}).")
    told = list(map(described, machine))
    lines.append(f"Threads: {threads}. All cores meanwhile: calls {told[0]}; batches {told[1]}.")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
