"""Processes on Ray that are killed at any moment: of a run, in a collective, while they start. Nothing hangs, and a run
ends with the numbers and weights of one that was left alone."""

import os
import random
import signal
import threading
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

import nrl
from nrl import data, tiny
from nrl.algos import advantages, grpo_loss, sft_loss
from nrl.backends import Sampling, adamw, fsdp, hf
from nrl.batch.metrics import Max, Metrics, Min
from nrl.envs import Task, Trace, single_turn
from nrl.errors import LostActor
from nrl.run.checkpoint import Checkpoints
from nrl.runtime import Cluster, Future, Mesh, P, shard_map
from tests.children import server
from tests.jsonlines import untimed
from tests.processes import alive, descendants, settled, titles

pytestmark = pytest.mark.ray

STEPS = 10
SOON = 100.0  # seconds until an error must have come, far below the cluster's deadline


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
        trainer.export(state.params, run.out / "model")


def unlike(task: Task, trace: Trace) -> float:
    """A reward that answers seldom share, so that every step has a gradient."""
    return float(sum(map(ord, trace.text)) % 97)


def ahead(out: str) -> None:
    """Rollouts that go on while it trains, up to two updates ahead."""
    with nrl.run(Config(out)) as run, nrl.cluster("ray", deadline=200) as cluster:
        slots = cluster.reserve(2)
        trainer = fsdp.trainer(slots[:1].mesh(executable="system"), tiny.model(), adamw(lr=1e-3))
        sampler = hf.sampler(slots[1:].mesh(executable="system"), tiny.model(), Sampling(max_new_tokens=4))
        groups = nrl.rollouts(sampler, single_turn(unlike), data.tasks("arithmetic"), n=4)
        state, stream = run.restore(policy=trainer, stream=nrl.ahead(nrl.batched(groups, 2), 2))
        nrl.publish(state.params, sampler)
        step = trainer.train_step(grpo_loss)
        for i, batch in run.steps(stream):
            of_step = batch["group_ids"].float()
            seen: Metrics = {"first": Min(of_step.min()), "last": Max(of_step.max())}
            batch = nrl.assign(advantages(batch), old_logprobs=batch["rollout_logprobs"])
            state, metrics = step(state, batch)
            nrl.publish(state.params, sampler)
            run.log(i, metrics, seen)
            run.save(i, policy=state, stream=stream)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_program_with_rollouts_ahead(tmp_path: Path) -> None:
    """What was pending when it was killed is trained on by the next one: each group once, in order."""
    lines = tmp_path / "metrics.jsonl"
    for least in (1, 5, STEPS + 1):
        child = server().Process(target=ahead, args=(str(tmp_path),))
        child.start()
        settled(partial(_writes, child, lines, least), 300)
        assert (child.exitcode == 0) is (least > STEPS)
        child.kill()
        child.join()
    found = untimed(tmp_path)["metrics.jsonl"]
    assert [(x["first"], x["last"]) for x in found] == [(2 * i, 2 * i + 1) for i in range(STEPS)]
    assert min(x["grad_norm"] for x in found) > 0
    assert max(x["lag"] for x in found) <= 2 < sum(x["lag"] for x in found)


def _writes(child: Any, path: Path, least: int) -> bool:
    """Whether it still has to write as many lines."""
    return child.is_alive() and not (path.exists() and len(path.read_text().splitlines()) >= least)


def at_work() -> set[int]:
    """The processes of this one's Ray that are there for Python's sake, and have told it so."""
    return {pid for pid, title in titles(descendants(os.getpid())).items() if title.startswith("ray::")}


def busy(pids: Iterable[int]) -> dict[int, str]:
    """Those that run an actor. Ray keeps idle ones for the next."""
    return {pid: title for pid, title in titles(list(pids)).items() if not title.startswith("ray::IDLE")}


class Killer(threading.Thread):
    """Kills a process of the mesh at random moments, again and again while there is one, and notes the phase.

    The first kill is of processes that start, and each second one of a run that has logged something.
    """

    def __init__(self, out: Path, kills: int, took: float, draw: random.Random) -> None:
        super().__init__(daemon=True)
        self.out, self.kills, self.took, self.draw = out, kills, took, draw
        self.spared, self.ended = at_work(), threading.Event()
        self.phases: list[str] = []

    def run(self) -> None:
        while len(self.phases) < self.kills and not self.ended.wait(self.moment()):
            settled(lambda: not at_work() - self.spared and not self.ended.is_set(), 100)
            mesh = sorted(at_work() - self.spared)
            if mesh and not self.ended.is_set():
                self.phases.append(self.phase())
                os.kill(self.draw.choice(mesh), signal.SIGKILL)
                settled(partial(_any_alive, mesh), 100)  # its peers are ended, too

    def moment(self) -> float:
        if not self.phases:
            return 0.0
        if len(self.phases) % 2:
            settled(lambda: not self.logged() and not self.ended.is_set(), 100)
        return self.draw.uniform(0, self.took)

    def logged(self) -> bool:
        return (self.out / "metrics.jsonl").exists()

    def phase(self) -> str:
        return f"{len(list(self.out.glob('checkpoints/train/[0-9]*')))} checkpoints" if self.logged() else "start"


def _any_alive(pids: list[int]) -> bool:
    return any(map(alive, pids))


def check(tmp_path: Path, kills: int, seed: int) -> list[str]:
    """Returns the phases that kills have hit."""
    began = time.monotonic()
    main(Config(str(tmp_path / "whole")))
    took = time.monotonic() - began
    expected, weights = untimed(tmp_path / "whole"), load_file(tmp_path / "whole" / "model" / "model.safetensors")
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
        assert untimed(out) == expected
        resumed = load_file(out / "model" / "model.safetensors")
        assert resumed.keys() == weights.keys()
        assert all(torch.equal(resumed[name], weight) for name, weight in weights.items())
        if not killer.phases:  # it was faster than the first one
            took = min(took, time.monotonic() - started)
        phases += killer.phases
        runs += 1
    print(f"{time.monotonic() - began:.1f} s with {len(phases)} kills in {runs} runs: {phases}")
    return phases


TWICE = [2, pytest.param(20, marks=pytest.mark.slow)]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kills", TWICE)
def test_a_run(on_ray: Cluster, tmp_path: Path, kills: int) -> None:
    phases = check(tmp_path, kills, seed=kills)
    assert len(phases) == kills
    if kills == 20:
        assert "start" in phases
        assert set(phases) - {"start"}


def pids(mesh: Mesh) -> list[int]:
    found = shard_map(lambda x: torch.full_like(x, os.getpid(), dtype=torch.long), mesh, P("dp"), P("dp"))
    return [int(pid) for pid in found(torch.zeros(2)).result()]


def adds_up(x: Tensor) -> Tensor:
    """Its time goes into collectives."""
    for _ in range(10**9):
        dist.all_reduce(x)
    return x


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kills", TWICE)
def test_in_a_collective(on_ray: Cluster, kills: int) -> None:
    draw = random.Random(kills)
    slots = on_ray.reserve(2)
    for kill in range(kills):
        mesh = slots.mesh(executable="system", name=f"together{kill}")
        both = pids(mesh)
        coming = shard_map(adds_up, mesh, P("dp"), P("dp"))(torch.zeros(2))
        time.sleep(draw.uniform(0, 1))
        rank = draw.randrange(2)
        os.kill(both[rank], signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(LostActor) as caught:
            coming.result()
        assert time.monotonic() - began < SOON
        assert (caught.value.mesh, caught.value.rank) == (mesh.name, rank)
        assert settled(partial(_any_alive, both), 5) is False


def loss(coming: Future[Tensor]) -> LostActor | None:
    try:
        coming.result()
    except LostActor as error:
        return error
    return None


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kills", TWICE)
def test_while_it_starts(on_ray: Cluster, kills: int) -> None:
    """Of a process that Ray has not heard of yet, Ray starts another one; all else is told, and the peer is ended."""
    draw = random.Random(kills)
    took, told, unheard = 0.0, 0, 0
    while told < kills:
        spared = at_work()

        def young(spared: set[int] = spared) -> list[int]:
            return sorted(at_work() - spared)

        with nrl.cluster("ray", deadline=200) as cluster:
            began = time.monotonic()
            mesh = cluster.reserve(2).mesh(executable="system", name=f"young{told}")
            coming = shard_map(lambda x: x, mesh, P("dp"), P("dp"))(torch.zeros(2))
            if not took:  # the first one is left alone
                coming.result()
                took = time.monotonic() - began
                continue
            while not young():
                time.sleep(0.05)
            time.sleep(draw.uniform(0, took / 2))
            os.kill(draw.choice(young()), signal.SIGKILL)
            began = time.monotonic()
            error = loss(coming)
            if error is None:
                unheard += 1
                assert unheard <= kills
                continue
            assert time.monotonic() - began < SOON
            assert error.mesh == mesh.name
            assert error.rank in (0, 1)
            assert settled(lambda: busy(young()), 20) == {}
            told += 1
