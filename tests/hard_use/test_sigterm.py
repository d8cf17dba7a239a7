"""SIGTERM at any moment: a checkpoint of the last step, the status 143, nothing left, and the numbers of one run."""

import os
import random
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
from tensordict import TensorDict

import nrl
from nrl import data, run, tiny
from nrl.algos import advantages, grpo_loss
from nrl.backends import Sampling, adamw, fsdp, hf
from nrl.batch import Batch
from nrl.envs import Environment, Step, Trace, single_turn
from nrl.log import Sink, open_sinks
from nrl.run.checkpoint import Checkpoints, checkpoints
from tests.children import server
from tests.jsonlines import untimed
from tests.processes import marked, settled, titles

pytestmark = pytest.mark.slow

STEPS = 8


@attrs.frozen
class Config:
    out: str
    steps: int = STEPS
    cluster: str = "local"
    lag: int = 0
    sleeps: float = 0.05  # seconds: a verifier
    hangs: bool = False  # a verifier, in the third batch, for ever
    trains: float = 0.05  # seconds: a step
    tracks: bool = False  # with a tracker whose end hangs
    checkpoints: Checkpoints = Checkpoints(every=5)


def slow_loss(seconds: float) -> Any:
    def loss(out: TensorDict, batch: Batch) -> Any:
        if out["logprobs"].requires_grad:
            time.sleep(seconds)
        return grpo_loss(out, batch)

    return loss


def train(cfg: Config) -> None:
    def verifier(task: Any, trace: Trace) -> float:
        time.sleep(cfg.sleeps / 8)
        return float(len(trace.text) % 2)

    asked = 0

    def reset(task: Any) -> Any:
        nonlocal asked
        asked += 1
        if cfg.hangs and asked > 16:
            time.sleep(10**6)
        return task, task["prompt"]

    env = single_turn(verifier)
    if cfg.hangs:
        env = Environment(
            reset, lambda task, turn: Step(task, verifier(task, Trace(task["prompt"], [turn]))), timeout=None
        )
    with nrl.run(cfg) as run, nrl.cluster(cfg.cluster, deadline=200) as cluster:
        slots = cluster.reserve(2)
        trainer = fsdp.trainer(slots[:1].mesh(executable="system"), tiny.model(), adamw(lr=1e-3))
        sampler = hf.sampler(slots[1:].mesh(executable="system"), tiny.model(), Sampling(max_new_tokens=4))
        groups = nrl.rollouts(sampler, env, data.tasks("arithmetic"), n=4)
        state, stream = run.restore(policy=trainer, stream=nrl.ahead(nrl.batched(groups, 2), cfg.lag))
        nrl.publish(state.params, sampler)
        step = trainer.train_step(slow_loss(cfg.trains))
        for i, batch in run.steps(stream):
            batch = nrl.assign(advantages(batch), old_logprobs=batch["rollout_logprobs"])
            state, metrics = step(state, batch)
            nrl.publish(state.params, sampler)
            run.log(i, metrics, nrl.summary(batch))
            run.save(i, policy=state, stream=stream)
        trainer.export(state.params, run.out / "model")


@contextmanager
def hanging(*args: Any, **named: Any) -> Iterator[Sink]:
    """What trackers do without a network."""
    with open_sinks(*args, **named) as sink:
        try:
            yield sink
        finally:
            time.sleep(10**6)


def main(folder: str, mark: str, cfg: Config) -> None:
    for descriptor, file in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{file}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.environ["NRL_TEST_MARK"] = mark
    if cfg.tracks:
        vars(run)["open_sinks"] = hanging
    nrl.retrying(train)(cfg)


def start(folder: Path, mark: str = "", **settings: Any) -> Any:
    folder.mkdir(exist_ok=True)
    child = server().Process(target=main, args=(str(folder), mark, Config(str(folder / "run"), **settings)))
    child.start()
    return child


def steps(folder: Path) -> int:
    path = folder / "run/metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def reached(child: Any, folder: Path, least: int) -> None:
    settled(lambda: child.is_alive() and steps(folder) < least, 200)


def saved(folder: Path) -> int:
    return checkpoints(folder / "run/checkpoints/train")[-1].step + 1


@pytest.mark.parametrize("lag", [0, 2])
def test_a_run_that_is_ended_again_and_again_is_one_run(tmp_path: Path, lag: int) -> None:
    whole, broken, draw = tmp_path / "whole", tmp_path / "broken", random.Random(lag)
    child = start(whole, lag=lag)
    child.join(200)
    assert child.exitcode == 0, (whole / "err").read_text()
    ended: list[int] = []
    while True:
        child = start(broken, lag=lag)
        reached(child, broken, steps(broken) + 1 if ended else 2)
        time.sleep(draw.uniform(0, 0.3))
        os.kill(child.pid, signal.SIGTERM) if child.is_alive() else None
        began = time.monotonic()
        child.join(60)
        assert time.monotonic() - began < 30
        if child.exitcode == 0:
            break
        assert child.exitcode == 143, (broken / "err").read_text()
        ended.append(saved(broken))
        assert ended[-1] == steps(broken)  # every step that was logged is saved
    assert len(ended) >= 2
    assert ended == sorted(ended)
    assert untimed(broken / "run") == untimed(whole / "run")
    model = "run/model/model.safetensors"
    assert (broken / model).read_bytes() == (whole / model).read_bytes()


@pytest.mark.parametrize("cluster", ["local", pytest.param("ray", marks=pytest.mark.ray)])
@pytest.mark.parametrize("lag", [0, 2])
def test_a_verifier_that_hangs_keeps_nothing_alive(tmp_path: Path, cluster: str, lag: int) -> None:
    """Ahead it hangs in a thread beside, and what it makes cannot be waited for."""
    mark = uuid.uuid4().hex
    child = start(tmp_path, mark, lag=lag, hangs=True, cluster=cluster)
    least = 2 if not lag else 1 if cluster == "ray" else 0  # the first save waits for what is pending
    reached(child, tmp_path, least)
    time.sleep(1.0 if least else 8.0)
    os.kill(child.pid, signal.SIGTERM)
    began = time.monotonic()
    child.join(60)
    assert time.monotonic() - began < 30
    assert child.exitcode == 143, (tmp_path / "err").read_text()
    if least:
        assert saved(tmp_path) == steps(tmp_path) == least
    assert settled(lambda: titles(marked(mark)), 10) == {}


def test_a_step_that_takes_longer_than_there_is_time(tmp_path: Path) -> None:
    keep = Checkpoints(every=5, grace=4.0)
    child = start(tmp_path, trains=20.0, checkpoints=keep, steps=1)
    settled(lambda: child.is_alive() and not (tmp_path / "run/config.yaml").exists(), 100)
    time.sleep(8.0)  # in the step, one hopes; anywhere else it ends sooner
    os.kill(child.pid, signal.SIGTERM)
    began = time.monotonic()
    child.join(60)
    assert time.monotonic() - began < 4.5
    assert child.exitcode == 143
    assert "run: SIGTERM; " in (tmp_path / "err").read_text()


def test_a_tracker_whose_end_hangs(tmp_path: Path) -> None:
    child = start(tmp_path, tracks=True, checkpoints=Checkpoints(every=5, grace=5.0), steps=10**6)
    reached(child, tmp_path, 1)
    os.kill(child.pid, signal.SIGTERM)
    began = time.monotonic()
    child.join(60)
    assert time.monotonic() - began < 5.5
    assert child.exitcode == 143, (tmp_path / "err").read_text()
    assert saved(tmp_path) == steps(tmp_path)


@pytest.mark.ray
@pytest.mark.parametrize("later", [0.0, 5.0], ids=["in a batch", "in a step"])
def test_a_scheduler_that_ends_the_processes_of_meshes_too(tmp_path: Path, later: float) -> None:
    """Those of the meshes die at once."""
    mark = uuid.uuid4().hex
    child = start(tmp_path, mark, cluster="ray", trains=8.0, steps=10**6)
    reached(child, tmp_path, 1)
    time.sleep(later)
    os.kill(child.pid, signal.SIGTERM)
    began = time.monotonic()
    for pid, title in titles(marked(mark)).items():
        if title.startswith("ray::Actor"):
            os.kill(pid, signal.SIGKILL)
    child.join(60)
    assert time.monotonic() - began < 30
    assert child.exitcode == 143, (tmp_path / "err").read_text()
    assert "retrying: attempt" not in (tmp_path / "out").read_text()
    assert settled(lambda: titles(marked(mark)), 10) == {}
