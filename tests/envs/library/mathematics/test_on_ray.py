"""GRPO on mathematics, with its verifier on two slots of the run's own Ray cluster."""

import asyncio
import contextlib
import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nrl
from nrl import tiny
from nrl.algos import advantages, grpo_loss, sft_loss
from nrl.backends import Sampling, adamw, fsdp, hf
from nrl.envs import Task, Trace, extractor, single_turn
from nrl.runtime import Cluster, Mesh
from tests.envs.library.mathematics.test_mathematics import STARVED, patiently
from tests.meshes import end

pytestmark = pytest.mark.ray

PROMPTS, GROUP = 8, 4


def sums(seed: int, index: int) -> Task:
    """A sum of terms, which math-verify has to compare wherever the answer is not written as the reference is."""
    first, second = 1 + (7 * index + seed) % 3, 1 + (5 * index + seed // 3) % 3
    return {"prompt": f"{first}x+{second}x=", "answer": f"{first + second}x", "response": f"{first + second}x"}


@pytest.fixture(scope="module")
def meshes(on_ray: Cluster) -> Iterator[tuple[Mesh, Mesh]]:
    """One slot to train and to sample, two to verify."""
    slots = on_ray.reserve(3)
    made = tuple(
        place.mesh(executable="system", name=name) for place, name in ((slots[:1], "policy"), (slots[1:], "judges"))
    )
    yield made  # type: ignore[misc]
    end(*made)


def test_grpo_on_mathematics_verifies_on_slots_of_its_cluster(meshes: tuple[Mesh, Mesh], tmp_path: Path) -> None:
    """Each reward is that of the verifier in this process; a helper that is killed fails the row that it had."""
    policy, judges = meshes
    plain = nrl.math_verifier(workers=1)
    flag = tmp_path / "kill"

    async def verify(task: Task, trace: Trace) -> Any:
        with contextlib.suppress(FileNotFoundError):
            flag.unlink()  # one helper alone can
            os.kill(os.getpid(), signal.SIGKILL)
        return await plain(task, trace)

    there = nrl.on(judges, timeout=120)(verify)
    trainer = fsdp.trainer(policy, tiny.model(), adamw(lr=1e-3))
    sampler = hf.sampler(policy, tiny.model(), Sampling(max_new_tokens=3))
    state, teach, step = trainer.init(), trainer.train_step(sft_loss), trainer.train_step(grpo_loss)
    for i in range(20):
        state, _ = teach(state, nrl.data.supervised([sums(i, place) for place in range(32)], sampler.tokenizer))
    nrl.publish(state.params, sampler)
    rewards, failed = [], []
    for i in range(4):
        tasks = [sums(100 + i, place) for place in range(PROMPTS)]
        if i == 2:
            flag.touch()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            batch = nrl.rollout(sampler, single_turn(there, timeout=None), tasks, n=GROUP)
        failed.append([str(each.message) for each in said if "episodes failed" in str(each.message)])
        valid = batch["valid"]
        assert int((~valid).sum()) == (i == 2)
        for row in map(int, valid.nonzero()):
            ids = batch["input_ids"][row][batch["loss_mask"][row]].tolist()
            text = sampler.tokenizer.decode(ids, skip_special_tokens=True)
            score = nrl.envs.score_of(_value(plain, tasks[row // GROUP], Trace("", [text])))
            assert float(batch["rewards"][row]) == score.reward
        rewards.append(batch["rewards"][valid].mean().item())
        state, metrics = step(state, nrl.assign(advantages(batch), old_logprobs=batch["rollout_logprobs"]))
        assert nrl.finalize(metrics.result())["tokens"] > 0
        nrl.publish(state.params, sampler)
    assert 0 < sum(rewards) / 4 < 1, rewards
    assert [len(each) for each in failed] == [0, 0, 1, 0]
    assert "1 of 32 episodes failed" in failed[2][0]
    assert "its helper is gone" in failed[2][0]


def test_the_verifier_of_mathematics_moves_as_it_is(meshes: tuple[Mesh, Mesh]) -> None:
    """Its own pool is made anew there."""
    plain = nrl.math_verifier(workers=1)
    there = nrl.on(meshes[1])(plain)
    assert extractor(there) is extractor(plain)
    for reference, text in ((r"\frac{1}{2}", "0.5"), ("(x+1)^2", "x^2+2x+1"), ("(x+1)^2", "x^2"), ("x", "9^{9^{9}}")):
        found = [patiently(verify, reference, rf"\boxed{{{text}}}") for verify in (there, plain)]
        assert found[0] == found[1] != STARVED


def _value(verify: Any, task: Task, trace: Trace) -> Any:
    return asyncio.run(verify(task, trace))
