"""Rollouts and training at the same time, where they have meshes of their own."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import nrl
from nrl import data, tiny
from nrl.algos import advantages, grpo_loss
from nrl.backends import Sampling, adamw, fsdp, hf
from nrl.batch import Batch
from nrl.envs import Environment, Step, Task
from nrl.run import checkpoint
from nrl.runtime import Cluster, Slots

pytestmark = pytest.mark.ray

STEPS, ROWS = 6, 16


def slow_loss(out: TensorDict, batch: Batch) -> Any:
    if out["logprobs"].requires_grad:
        time.sleep(PACE["train"] * len(batch) / ROWS)  # however many micro-batches there are
    return grpo_loss(out, batch)


PACE = {"train": 2.0, "rollout": 2.0}  # seconds of sleep, more than of work: of a step of the trainer, of an episode


async def slow_step(state: Task, text: str) -> Step:
    await asyncio.sleep(PACE["rollout"])
    return Step(state, float(len(text) % 2), done=True)


@pytest.fixture(scope="module")
def slots(on_ray: Cluster) -> Slots:
    return on_ray.reserve(2)


@pytest.fixture(scope="module")
def parts(slots: Slots) -> Any:
    mesh = slots[:1].mesh(executable="system", name="ahead: trainer")
    trainer = fsdp.trainer(mesh, tiny.model(), adamw(lr=1e-3))
    sampler = hf.sampler(
        slots[1:].mesh(executable="system", name="ahead: sampler"), tiny.model(), Sampling(max_new_tokens=4)
    )
    return trainer, sampler


def loop(parts: Any, lag: int, *, steps: int = STEPS, caught_up: bool = False) -> tuple[float, list[int]]:
    """Seconds of all steps but the first, and how old the oldest row of each was.

    Where production has ``caught_up`` before weights are published, the lag does not depend on who is faster.
    """
    trainer, sampler = parts
    env = Environment(lambda task: (task, task["prompt"]), slow_step)
    groups = nrl.rollouts(sampler, env, data.tasks("arithmetic", seed=0), n=4)
    stream = nrl.ahead(nrl.batched(groups, 4), lag)
    step, state, lags = trainer.train_step(slow_loss), trainer.init(), []
    first = nrl.publish(state.params, sampler)
    for i in range(steps):
        (batch,) = stream.take(1)
        if i == 1:
            began = time.monotonic()
        lags.append(first + i - int(batch["version"].min()))
        batch = nrl.assign(advantages(batch), old_logprobs=batch["rollout_logprobs"])
        asked = time.monotonic()
        state, metrics = step(state, batch)
        metrics.result()
        PACE["trained"] = time.monotonic() - asked
        if caught_up:
            stream.state()  # waits for what is pending
        nrl.publish(state.params, sampler)
    took = time.monotonic() - began
    assert len(stream.state()["pending"]) == lag
    return took, lags


@pytest.mark.slow
def test_rollouts_go_on_while_the_trainer_trains(parts: Any) -> None:
    loop(parts, 0, steps=2)  # what is slow only once
    PACE["rollout"] = PACE["trained"]  # so that they take equally long
    waiting, none = loop(parts, 0)
    overlapping, one = loop(parts, 1)
    assert none == [0] * STEPS
    assert one == [0, *[1] * (STEPS - 1)]
    assert overlapping < 0.65 * waiting, (overlapping, waiting)


def test_a_lag_is_at_most_what_was_allowed(parts: Any) -> None:
    PACE.update(train=0.1, rollout=0.1)
    _, lags = loop(parts, 3)
    assert max(lags) <= 3
    assert lags[0] == 0
    _, lags = loop(parts, 3, caught_up=True)
    assert lags == [0, 1, 2, 3, 3, 3]
    for lag in (0, 1):
        _, lags = loop(parts, lag, caught_up=True)
        assert lags == [0, *[lag] * (STEPS - 1)]


def test_what_is_pending_is_in_the_checkpoint(parts: Any, tmp_path: Path) -> None:
    """Rows that were sampled with weights that are gone are trained on after a restart, and no task is lost."""
    PACE["rollout"] = 0.1

    def stream() -> Any:
        env = Environment(lambda task: (task, task["prompt"]), slow_step)
        return nrl.ahead(nrl.batched(nrl.rollouts(parts[1], env, data.tasks("arithmetic", seed=0), n=2), 2), 2)

    before, after = stream(), stream()
    before.take(1)
    checkpoint.save(tmp_path / "000001", 0, {"stream": before})  # while it is made
    (restored,) = checkpoint.load(tmp_path / "000001", stream=after)
    nrl.publish(parts[0].init().params, parts[1])
    for _ in range(2):
        (made,), (found,) = before.take(1), restored.take(1)
        assert all(torch.equal(made[name], found[name]) for name in made.keys())
    assert before.take(1)[0]["group_ids"].tolist() == restored.take(1)[0]["group_ids"].tolist() == [6, 6, 7, 7]


def test_what_a_rollout_raises_is_raised_by_a_pull(parts: Any) -> None:
    tasks = data.tasks("arithmetic", seed=0)

    async def fails(state: Task, text: str) -> Step:
        raise AssertionError("never asked for")

    short = Sampling(max_new_tokens=1, stop_token_ids=(10**6,))  # no token of this model
    groups = nrl.rollouts(parts[1], Environment(lambda task: (task, task["prompt"]), fails), tasks, n=2, sampling=short)
    with pytest.raises(nrl.errors.GenerationError, match="1000000"):
        nrl.ahead(nrl.batched(groups, 2), 2).take(1)
