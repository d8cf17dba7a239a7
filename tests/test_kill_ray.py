"""A run on Ray, of which a process is killed at any moment, ends with the numbers of one that was left alone."""

import os
import random
import signal
import threading
import time
from functools import partial
from pathlib import Path

import attrs
import pytest

import nrl
from nrl import data, tiny
from nrl.algos import sft_loss
from nrl.backends import adamw, fsdp
from nrl.checkpoint import Checkpoints
from nrl.runtime import Cluster
from tests.processes import alive, descendants, settled, titles
from tests.test_kill import numbers

pytestmark = pytest.mark.ray

STEPS = 10


@attrs.frozen
class Config:
    out: str
    steps: int = STEPS
    seed: int = 0
    cluster: str = "ray"
    checkpoints: Checkpoints = Checkpoints(every=2)


def main(cfg: Config) -> None:
    """Supervised training on two processes, which add up gradients in every step."""
    with nrl.run(cfg) as run, nrl.cluster(cfg.cluster, deadline=200) as cluster:
        mesh = cluster.reserve(2).mesh(executable="system", name="trainer")
        trainer = fsdp.trainer(mesh, tiny.model(hidden_size=64), adamw(lr=1e-3))
        step = trainer.train_step(sft_loss)
        collate = partial(data.supervised, tokenizer=tiny.tokenizer())
        tasks = data.tasks("arithmetic", seed=cfg.seed, collate=data.supervised)
        stream = nrl.batched(tasks, 16, collate=collate)
        state, stream = run.restore(policy=trainer, stream=stream)
        for i, batch in run.steps(stream):
            state, metrics = step(state, batch)
            run.log(i, metrics)
            run.save(i, policy=state, stream=stream)


class Killer(threading.Thread):
    """Kills a process of the mesh at random moments, again and again while there is one, and notes the phase."""

    def __init__(self, out: Path, kills: int, took: float, draw: random.Random) -> None:
        super().__init__(daemon=True)
        self.out, self.kills, self.took, self.draw = out, kills, took, draw
        self.spared, self.ended = self.running(), threading.Event()
        self.phases: list[str] = []

    def running(self) -> set[int]:
        """The processes of this one's Ray that are there for Python's sake, and have told it so."""
        return {pid for pid, title in titles(descendants(os.getpid())).items() if title.startswith("ray::")}

    def run(self) -> None:
        while len(self.phases) < self.kills and not self.ended.wait(self.draw.uniform(0, self.took)):
            settled(lambda: not self.running() - self.spared and not self.ended.is_set(), 100)
            mesh = sorted(self.running() - self.spared)
            if mesh and not self.ended.is_set():
                self.phases.append(self.phase())
                os.kill(self.draw.choice(mesh), signal.SIGKILL)
                settled(partial(_any_alive, mesh), 100)  # its peers are ended, too

    def phase(self) -> str:
        logged = (self.out / "metrics.jsonl").exists()
        return f"{len(list(self.out.glob('checkpoints/train/[0-9]*')))} checkpoints" if logged else "start"


def _any_alive(pids: list[int]) -> bool:
    return any(map(alive, pids))


def check(tmp_path: Path, kills: int, seed: int) -> list[str]:
    """Returns the phases that kills have hit."""
    began = time.monotonic()
    main(Config(str(tmp_path / "whole")))
    took = time.monotonic() - began
    expected = numbers(tmp_path / "whole")
    assert len(expected["metrics.jsonl"]) == STEPS
    draw = random.Random(seed)
    phases: list[str] = []
    runs = 0
    while len(phases) < kills:
        out = tmp_path / f"broken {runs}"
        started = time.monotonic()
        killer = Killer(out, kills - len(phases), took, draw)
        killer.start()
        nrl.retrying(main, times=kills, pause=0)(Config(str(out)))
        killer.ended.set()
        killer.join()
        assert numbers(out) == expected
        if not killer.phases:  # it was faster than the first one
            took = min(took, time.monotonic() - started)
        phases += killer.phases
        runs += 1
    print(f"{time.monotonic() - began:.1f} s with {len(phases)} kills in {runs} runs: {phases}")
    return phases


@pytest.mark.timeout(900)
def test_killed_twice(on_ray: Cluster, tmp_path: Path) -> None:
    assert len(check(tmp_path, kills=2, seed=1)) == 2


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_at_twenty_random_moments(on_ray: Cluster, tmp_path: Path) -> None:
    phases = check(tmp_path, kills=20, seed=2)
    assert len(phases) == 20
    assert "start" in phases
    assert set(phases) - {"start"}
