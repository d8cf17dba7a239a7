"""How long a step of rollouts takes under each schedule, over an engine that is simulated, and what episodes cost.

    python benchmarks/schedules.py             # four minutes
    python benchmarks/schedules.py --quick     # does it run?

``engine``: 64 slots, 64 groups of 8 episodes a step, whose times are log-normal draws (mean 0.1 s, the longest of a
step about 1.2 s). A step takes an engine that is always full the work of its episodes over 64: that is what its time is
compared with.
``refill`` and ``partial`` have one step's groups more under way (``refill 2``: two steps'), and `nrl.ahead` takes again
at once.

``late``: 256 episodes, one of which sleeps for 30 s in its environment, with ``cut(2)``.

``episodes``: how many episodes a second there are where neither the engine nor the environment takes any time.
"""

import argparse
import asyncio
import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from contextlib import suppress
from typing import Any

import numpy as np
import torch

import nrl
from benchmarks._engine import SimulatedEngine
from benchmarks._paired import in_units
from nrl import tiny
from nrl.backends import Capabilities, Completion, Sampling
from nrl.data import Source
from nrl.envs import single_turn
from nrl.errors import ClosedCluster
from nrl.run.step_log import gc_paused

__all__ = [
    "SCHEDULES",
    "bare_tasks",
    "episodes",
    "late",
    "main",
    "options",
    "rate_of",
    "seconds_of",
    "steps",
    "tasks_of_an_episode",
]

SCHEDULES: dict[str, Callable[[Source[nrl.Batch], int], Any]] = {
    "none": lambda groups, prompts: groups,
    "ahead": lambda groups, prompts: groups,
    "oversample": lambda groups, prompts: nrl.oversample(groups, 6),
    "refill": nrl.refill,
    "refill 2": lambda groups, prompts: nrl.refill(groups, 2 * prompts),
    "partial": nrl.partial,
}
"""By name: from groups, and how many a step has, to groups."""


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line.

    >>> options([]).slots
    64
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="little of everything")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=64, help="groups a step")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--mean", type=float, default=0.1, help="seconds of an episode")
    found = parser.parse_args(words)
    if found.quick:
        found.slots, found.prompts, found.steps, found.mean = 8, 4, 2, 0.02
    return found


def seconds_of(mean: float) -> Callable[[int], float]:
    """The time of an episode by its seed: log-normal with sigma 1.

    >>> 0 < seconds_of(0.1)(3) < 5
    True
    """
    place = math.log(mean) - 0.5
    return lambda seed: float(np.random.default_rng(seed).lognormal(place, 1.0))


def steps(name: str, given: argparse.Namespace) -> float:
    """The mean time of a step over that of an engine that is always full; without the first step, which fills it."""
    engine = SimulatedEngine(given.slots, functools.cache(seconds_of(given.mean)))
    tasks = nrl.data.counting(lambda index: {"prompt": f"{index}+1="})
    groups = nrl.rollouts(engine, single_turn(lambda task, trace: float(len(trace.text))), tasks, n=8)
    stream = nrl.batched(SCHEDULES[name](groups, given.prompts), given.prompts)
    stream = nrl.ahead(stream, 0 if name in ("none", "oversample") else 1)
    stream.take(1)
    began, worked = time.monotonic(), engine.worked
    for _ in range(given.steps):
        stream.take(1)
    found = float((time.monotonic() - began) / ((engine.worked - worked) / given.slots))
    engine.close()
    with suppress(ClosedCluster):
        stream.state()  # which waits for what is under way
    return found


def late(given: argparse.Namespace) -> float:
    """Seconds of a step of 256 episodes with ``cut(2)``, one of which sleeps for 30 s."""
    engine = SimulatedEngine(given.slots, lambda seed: 0.01)
    tasks = nrl.data.counting(lambda index: {"prompt": f"{index}+1=", "index": index})

    def verdict(task: nrl.envs.Task, trace: nrl.envs.Trace) -> float:
        time.sleep(30.0 if task["index"] == 7 else 0.0)
        return 1.0

    env = single_turn(verdict)
    groups = nrl.cut(nrl.rollouts(engine, env, tasks, n=1), 2.0)
    began = time.monotonic()
    [batch] = nrl.batched(groups, 256).take(1)
    assert batch["cut"].nonzero().tolist() == [[7]], batch["cut"]
    return time.monotonic() - began


class Instant:
    """A sampler that answers at once."""

    capabilities = Capabilities(streams=True)
    version, context_length, sampling = 0, 64, Sampling(max_new_tokens=48)

    def __init__(self) -> None:
        self.tokenizer = tiny.tokenizer()

    def stream(self, prompts: Sequence[Any], seeds: Sequence[int], sampling: Any = None) -> list[Any]:
        """A future for each prompt, which has its answer."""
        answer = Completion(torch.tensor([5, 6, 2]), -torch.ones(3), truncated=False, version=0)
        asked: list[futures.Future[Completion]] = [futures.Future() for _ in prompts]
        for each in asked:
            each.set_result(answer)
        return asked


def episodes(given: argparse.Namespace) -> float:
    """Episodes a second, of one turn, where nothing but nrl takes time."""
    env = single_turn(lambda task, trace: float(trace.text == "2"))
    return rate_of(env, *((8, 2) if given.quick else (256, 12)))


def rate_of(env: nrl.envs.Env, prompts: int, takes: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Episodes a second, of a sampler that answers at once; the median of some takes, the first of which is left out.

    Args:
        env: whose tasks are sums.
        prompts: of a take; each is asked 8 times.
        takes: at least 2.
        clock: what seconds are; of `time.process_time` those of the processor, of which other programs take none.
    """
    tasks = nrl.data.counting(lambda index: {"prompt": f"{index}+1=", "answer": "2"})
    stream = nrl.batched(nrl.rollouts(Instant(), env, tasks, n=8), prompts)  # type: ignore[arg-type]
    rates = []
    with gc_paused():  # as in a run
        for _ in range(takes):
            began = clock()
            [batch] = stream.take(1)
            rates.append(len(batch) / (clock() - began))
    return statistics.median(rates[1:])


def bare_tasks(number: int) -> float:
    """Tasks of asyncio a second of this process's CPU time that wait twice and return a dict; 2,048 at once."""

    async def one(index: int) -> dict[str, str]:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return {"prompt": f"{index}+1=", "answer": "2"}

    async def every() -> float:
        began = time.process_time()
        for first in range(0, number, 2048):
            await asyncio.gather(*map(one, range(first, min(first + 2048, number))))
        return number / (time.process_time() - began)

    return asyncio.run(every())


def tasks_of_an_episode() -> float:
    """How many bare tasks cost a core as much as an episode that waits for nothing."""
    env = single_turn(lambda task, trace: float(trace.text == "2"))
    return in_units(lambda: bare_tasks(20_000), lambda: rate_of(env, 256, 2, time.process_time))


def main(given: argparse.Namespace) -> dict[str, Any]:
    """Measure, print, and return what was found."""
    found: dict[str, Any] = {}
    found["episodes_per_second"] = round(episodes(given))
    found["late_seconds"] = None if given.quick else round(late(given), 2)
    found["step_over_always_full"] = {name: round(steps(name, given), 3) for name in SCHEDULES}
    print(json.dumps(found, indent=1))
    return found


if __name__ == "__main__":
    main(options())
