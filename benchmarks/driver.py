"""Measure the CPU seconds that a step costs the program itself, by part, as processes are added.

    python benchmarks/driver.py             # two minutes on one CPU core
    python benchmarks/driver.py --quick     # does it run?

The program is nrl's own: batches, a trainer's half on the driver, calls on a mesh, a sampler that spreads requests. The
processes behind it are fakes: actors accept what they are sent and return prepared answers, so a thousand of them fit
here. Sending or putting an object costs its serialisation and its copy. A step is: log-probabilities of a fresh batch
and back, a train step with its metrics, a function whose sums come from every process, and requests for the next batch,
spread over as many engines. Rows are few, long, and of very different lengths: most of a padded batch is padding.

**This leaves out** Ray's own work for each call and object (0.1 to 0.2 ms each: `benchmarks/ray_calls.py`), networks,
threads that ask engines, memory that nobody has touched before, and all work of the processes.
"""

import argparse
import gc
import json
import pickle
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import numpy as np
import torch

import nrl
from benchmarks._machine import described, watched
from nrl import tiny
from nrl.algos import grpo_loss
from nrl.backends import Sampling
from nrl.backends.sampling import pool
from nrl.backends.training import trainer as driver_half
from nrl.batch import Batch, deal
from nrl.batch.metrics import Mean, Sum
from nrl.run.step_log import gc_paused
from nrl.runtime import P, cluster, merged, shard_map
from nrl.runtime.mesh import mapping
from nrl.runtime.mesh.local import LocalCluster
from nrl.runtime.mesh.placement import Mesh
from nrl.runtime.mesh.processes import Processes
from nrl.runtime.ray.call_arguments import Arguments
from nrl.runtime.ray.codec.messages import CallReply
from nrl.runtime.ray.codec.pickling import serialize
from nrl.runtime.ray.pending_call import ActorLocation
from nrl.runtime.ray.ray_processes import RayProcesses
from nrl.runtime.venvs.registry import Executable

__all__ = ["Nowhere", "Parts", "Replies", "main", "measure", "options", "report", "skewed", "stood_in"]

PARTS = {
    "split": "which rows go where",
    "weights": "the weights of the loss",
    "checks": "columns are finite",
    "shards": "packing what travels",
    "puts": "copies of it for the object store",
    "calls": "orders, and sending them",
    "results": "putting rows and sums together",
    "requests": "spreading requests over engines",
    "rest": "what is left",
    "collector": "Python's, which looks at what the imports left",
}


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line.

    >>> options(["--quick"]).ranks
    [2, 4]
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[10, 30, 100, 300, 1000])
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=2**20, help="that are real, in all rows together")
    parser.add_argument("--width", type=int, default=8192, help="tokens of the longest row")
    parser.add_argument("--requests", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=5, help="that count; one more does not")
    parser.add_argument("--out", type=Path, default=None, help="write every step as JSON")
    parser.add_argument("--quick", action="store_true", help="small and few: shows that it runs, measures nothing")
    args = parser.parse_args(words)
    if args.quick:
        args.ranks, args.rows, args.tokens, args.width, args.requests, args.steps = [2, 4], 16, 512, 128, 32, 1
    return args


def main() -> None:
    """Measure and print the table."""
    args = options()
    torch.set_num_threads(1)
    with watched() as machine:
        found = {
            ranks: measure(ranks, args.rows, args.tokens, args.width, args.requests, args.steps) for ranks in args.ranks
        }
    print(report(found))
    print(f"\n{args.rows} rows, {args.tokens} tokens, {args.width} wide. All cores meanwhile: {described(machine)}.")
    if args.out:
        args.out.write_text(json.dumps({"settings": vars(args), "steps": found, "machine": machine}, default=str))


def skewed(rows: int, tokens: int, width: int, seed: int) -> Batch:
    """A locked batch of rollouts: so many tokens, the longest row ``width``, all else in its columns padding.

    >>> lengths = nrl.lengths(skewed(16, 512, 128, seed=0))
    >>> int(lengths.sum()), int(lengths.max())
    (512, 128)
    """
    random = torch.Generator().manual_seed(seed)
    drawn = torch.empty(rows).exponential_(generator=random)
    sizes = (drawn * tokens / drawn.sum()).long().clamp(min=4, max=width)
    sizes[0] = width
    while (missing := tokens - int(sizes.sum())) != 0:
        free = ((sizes < width) if missing > 0 else (sizes > 4)).nonzero()[:, 0]
        free = free[free > 0]
        sizes[free[: abs(missing)]] += 1 if missing > 0 else -1
    mask = torch.arange(width) < sizes.unsqueeze(1)
    numbers = [torch.randn(rows, width, generator=random) * mask for _ in range(3)]
    return nrl.assign(
        Batch({}, batch_size=[rows]),
        input_ids=torch.randint(1, 150_000, (rows, width), generator=random) * mask,
        attention_mask=mask,
        loss_mask=mask & (torch.arange(width) > 2),
        rollout_logprobs=-numbers[0].abs(),
        old_logprobs=-numbers[1].abs(),
        advantages=numbers[2],
        versions=torch.where(mask, 3, -1),
        rewards=torch.rand(rows, generator=random),
        temperature=torch.ones(rows),
        group_ids=torch.arange(rows) // 8,
        version=torch.full((rows,), 3),
        valid=torch.ones(rows, dtype=torch.bool),
        truncated=torch.zeros(rows, dtype=torch.bool),
    )


def measure(ranks: int, rows: int, tokens: int, width: int, requests: int, steps: int) -> list[dict[str, float]]:
    """CPU seconds of each step by part, with ``whole``, on a mesh of ``ranks`` and as many engines."""
    clock = Parts()
    found: list[dict[str, float]] = []
    with Nowhere("nowhere") as here, cluster("local") as local, stood_in(clock), ExitStack() as stack:
        mesh = here.reserve(ranks).mesh(dp=ranks, executable="system", name="trainer")
        sampler = _sampler(local, ranks)
        trainer = driver_half.make_trainer(mesh, _nothing, name="nobody", max_tokens=width)
        provided = serialize(frozenset({"logprobs"}), "")
        here.replies.each = partial(_all, provided)
        step, state = trainer.train_step(grpo_loss), trainer.init()
        count = shard_map(_nothing, mesh, P("dp"), merged)
        stack.enter_context(gc_paused())  # as `run.steps` does
        for number in range(steps + 1):
            batch = skewed(rows, tokens, width, number)
            prompts = _prompts(requests)
            shards = [serialize(torch.zeros(len(part), width), "") for part in deal(batch.clone(), ranks)]
            sums = serialize({f"metric {i}": Mean(torch.ones(()), torch.ones(())) for i in range(20)}, "")
            taken = serialize({"loss": Mean(torch.ones(()), torch.ones(())), "tokens": Sum(torch.ones(()))}, "")
            clock.seconds.clear()
            with clock("rest"):
                here.replies.each = partial(_each, shards)
                coming = trainer.logprobs(state.params, batch)
                with clock("results"):
                    logprobs = coming.result()
                batch = nrl.assign(batch, ref_logprobs=logprobs)
                here.replies.each = partial(_all, taken)
                state, metrics = step(state, batch)
                with clock("results"):
                    metrics.result()
                here.replies.each = partial(_all, sums)
                counted = count(batch)
                with clock("results"):
                    counted.result()
                for seat in sampler._replicas:
                    seat.waiting = [[]]
                sampler.stream(prompts, range(requests))
            found.append(dict(clock.seconds) | {"whole": sum(clock.seconds.values())})
    return found[1:]


class Parts:
    """CPU seconds by part; those of a part within another count for the inner one alone.

    >>> parts = Parts()
    >>> with parts("outer"), parts("inner"):
    ...     pass
    >>> sorted(parts.seconds)
    ['inner', 'outer']
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._since = 0.0

    def _mark(self) -> None:
        now = time.process_time()
        if self._open:
            self.seconds[self._open[-1]] = self.seconds.get(self._open[-1], 0.0) + now - self._since
        self._since = now

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Count what happens inside of the block for a part."""
        self._mark()
        self._open.append(part)
        try:
            yield
        finally:
            self._mark()
            self._open.pop()

    def wrap[**Q, R](self, part: str, fn: Callable[Q, R]) -> Callable[Q, R]:
        """The same function, which counts for a part."""

        def timed(*args: Q.args, **kwargs: Q.kwargs) -> R:
            with self(part):
                return fn(*args, **kwargs)

        return timed

    def collected(self, phase: str, _: object) -> None:
        """What Python's collector calls."""
        self._mark()
        if not self._open:
            return
        if phase == "start":
            self._open.append("collector")
        elif self._open[-1] == "collector":
            self._open.pop()


@contextmanager
def stood_in(clock: Parts) -> Iterator[None]:
    """What is timed, timed; and in Ray's place what serialises and copies."""

    def put(value: Any) -> "_Ref":
        with clock("puts"):
            buffers: list[pickle.PickleBuffer] = []
            head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
            return _Ref(None, [head, *(bytearray(buffer.raw()) for buffer in buffers)])

    ray: Any = types.ModuleType("ray")
    ray.put, ray.get = put, lambda refs, timeout=None: [ref.value for ref in refs]
    ray.wait = lambda refs, num_returns=1, timeout=None: (list(refs), [])
    ray.exceptions = types.SimpleNamespace(GetTimeoutError=TimeoutError, RayError=ConnectionError)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(sys.modules, {"ray": ray}))
        for owner, name, part in (
            (driver_half, "deal", "split"),
            (mapping, "deal", "split"),
            (driver_half, "global_weights", "weights"),
            (driver_half, "check_finite", "checks"),
            (Arguments, "__init__", "shards"),
            (Arguments, "pack", "shards"),
            (RayProcesses, "call", "calls"),
            (pool.EnginePool, "_ask", "requests"),
        ):
            stack.enter_context(mock.patch.object(owner, name, clock.wrap(part, getattr(owner, name))))
        stack.enter_context(mock.patch.object(pool.EnginePool, "_start_work"))
        gc.callbacks.append(clock.collected)
        stack.callback(gc.callbacks.remove, clock.collected)
        yield


@attrs.frozen(eq=False)
class _Ref:
    """What stands for an object: an answer is made when it is read."""

    make: Callable[[], Any] | None
    held: Any = None

    @property
    def value(self) -> Any:
        return self.held if self.make is None else self.make()

    def __reduce__(self) -> Any:
        return _Ref, (None,)


@attrs.define
class Replies:
    """What actors answer: for each rank, the results that it sends. ``sent`` is told what they are sent."""

    each: Callable[[int], Sequence[Any]] = lambda rank: []
    sent: Callable[[tuple[Any, ...]], object] = lambda args: None


@attrs.frozen
class _Method:
    rank: int
    replies: Replies
    results: int = 0

    def options(self, num_returns: int) -> "_Method":
        return _Method(self.rank, self.replies, num_returns - 1)

    def remote(self, name: str, *args: Any) -> Any:
        pickle.dumps((name, args))
        self.replies.sent(args)
        answers, receipt = self.replies.each, _Ref(None, _RECEIPT)
        found = [receipt, *(_Ref(partial(_said, answers, self.rank, place)) for place in range(self.results))]
        return found if self.results else receipt


def _said(answers: Callable[[int], Sequence[Any]], rank: int, place: int) -> Any:
    return answers(rank)[place]


def _each(given: Sequence[Any], rank: int) -> list[Any]:
    return [given[rank]]


def _all(given: Any, rank: int) -> list[Any]:
    return [given]


_RECEIPT = pickle.dumps(CallReply(0.0, 0.0, (None, None)))


class _Actor:
    def __init__(self, rank: int, replies: Replies) -> None:
        self.do = _Method(rank, replies)


class Nowhere(LocalCluster):
    """A cluster whose actors are nobody."""

    remote = True

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.replies = Replies()

    def start(self, mesh: Mesh, executable: Executable) -> Processes:
        """Nobody, once for each slot."""
        actors = [_Actor(rank, self.replies) for rank in range(mesh.size)]
        return RayProcesses(mesh, actors, [ActorLocation("node", "address")] * mesh.size, 60.0, actors.__getitem__)

    def __enter__(self) -> "Nowhere":
        return self

    def __exit__(self, *_: object) -> None:
        self.open = False


class _Nobody:
    """An engine that is never asked."""

    context_length, vocabulary = 2**20, 150_000


def _nothing(*_: Any) -> Any:
    """What is called; nobody does."""


def _sampler(local: Any, engines: int) -> Any:
    slots = local.reserve(engines)
    meshes = [slots[place].mesh(name=f"engine {place}") for place in range(engines)]
    made: Any = _Nobody
    return pool.StreamingEnginePool("nobody", meshes, made, tiny.model(), Sampling(max_new_tokens=8))


def _prompts(requests: int, group: int = 8, width: int = 256) -> list[list[int]]:
    """Groups of equal prompts, fresh at each call."""
    random = np.random.default_rng(time.time_ns())
    return [row for row in random.integers(1, 1000, (-(-requests // group), width)).tolist() for _ in range(group)][
        :requests
    ]


def report(found: dict[int, list[dict[str, float]]]) -> str:
    """Medians over steps, as Markdown, and how the whole grows.

    >>> told = report({2: [{"split": 0.25, "whole": 0.5}], 4: [{"split": 0.25, "whole": 1.5}]})
    >>> print(told.splitlines()[2], told.splitlines()[-1], sep="|")
    | split: which rows go where | 0.250 | 0.250 ||A rank more costs: 500 ms from 2 to 4.
    """
    medians = {
        ranks: {key: statistics.median(step[key] for step in steps) for key in steps[0]}
        for ranks, steps in found.items()
    }
    head = " | ".join(f"{ranks} ranks" for ranks in medians)
    lines = [f"| CPU seconds of a step | {head} |", "|---|" + "---|" * len(medians)]
    for key, name in (PARTS | {"whole": "the whole step"}).items():
        if any(key in times for times in medians.values()):
            values = " | ".join(f"{times.get(key, 0.0):.3f}" for times in medians.values())
            lines.append(f"| {key}: {name} | {values} |")
    grows = [
        f"{1e3 * (medians[many]['whole'] - medians[few]['whole']) / (many - few):.3g} ms from {few} to {many}"
        for few, many in zip(list(medians), list(medians)[1:], strict=False)
    ]
    return "\n".join([*lines, "", f"A rank more costs: {', '.join(grows) or '-'}."])


if __name__ == "__main__":
    main()
