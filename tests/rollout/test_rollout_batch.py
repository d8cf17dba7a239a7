"""Rollouts with a real sampler: rows, failures, and agreement with the trainer."""

import asyncio
import math
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import nrl
from nrl import data
from nrl.algos import advantages, grpo_loss
from nrl.backends import Sampling, Trainer
from nrl.backends.sampling.pool import EnginePool
from nrl.batch.metrics import finalize
from nrl.envs import Environment, Step, Trace, by_source, exact, number, single_turn
from nrl.envs.inprocess.threads import stuck
from nrl.errors import DataError, GenerationError
from nrl.rollout import rollout, rollouts
from nrl.rollout.summaries import summary
from tests.processes import settled
from tests.rollout.scripted import TASKS, Scripted


def test_rows_hold_prompt_and_completion(sampler: EnginePool) -> None:
    batch = rollout(sampler, single_turn(exact), TASKS, n=3, seed=5, first_group=7)
    assert batch.is_locked
    assert batch["group_ids"].tolist() == [7, 7, 7, 8, 8, 8]
    assert batch["valid"].all()
    prompts = [sampler.tokenizer.encode(task["prompt"]) for task in TASKS for _ in range(3)]
    for row, prompt in enumerate(prompts):
        length = int(batch["attention_mask"][row].sum())
        assert batch["input_ids"][row, : len(prompt)].tolist() == prompt
        mask = batch["loss_mask"][row]
        assert mask.nonzero()[:, 0].tolist() == list(range(len(prompt), length))
        assert (batch["rollout_logprobs"][row][mask] < 0).all()
        assert (batch["rollout_logprobs"][row][~mask] == 0).all()
    assert batch["temperature"].tolist() == [1.0] * 6
    assert batch["version"].tolist() == [sampler.version] * 6
    assert batch["truncated"].tolist() == [
        int(ids[int(real.sum()) - 1]) != sampler.tokenizer.eos_token_id
        for ids, real in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]


def test_a_row_depends_on_seed_group_and_place_alone(sampler: EnginePool) -> None:
    both = rollout(sampler, single_turn(exact), TASKS, n=2, seed=1)
    second = rollout(sampler, single_turn(exact), TASKS[1:], n=2, seed=1, first_group=1)
    width = second["input_ids"].shape[1]
    assert both["input_ids"][2:, :width].equal(second["input_ids"])
    other = rollout(sampler, single_turn(exact), TASKS, n=2, seed=2)
    assert not torch.equal(nrl.pad(both, 16)["input_ids"], nrl.pad(other, 16)["input_ids"])


def test_rows_of_a_group_differ(sampler: EnginePool) -> None:
    batch = rollout(sampler, single_turn(exact), TASKS[:1], n=8)
    assert len({tuple(row) for row in batch["input_ids"].tolist()}) > 1


def test_sampling_of_the_call_wins(sampler: EnginePool) -> None:
    batch = rollout(sampler, single_turn(exact), TASKS, n=2, sampling=Sampling(temperature=0, max_new_tokens=2))
    assert batch["temperature"].tolist() == [0.0] * 4
    assert batch["input_ids"][0].equal(batch["input_ids"][1])
    assert batch["loss_mask"].sum(1).max() <= 2


def test_sources_are_carried(sampler: EnginePool) -> None:
    tasks: list[dict[str, Any]] = [{**TASKS[0], "source": 3}, TASKS[1]]
    assert rollout(sampler, single_turn(exact), tasks, n=2)["source"].tolist() == [3, 3, 0, 0]
    assert "source" not in rollout(sampler, single_turn(exact), TASKS, n=2).keys()


def test_in_a_running_loop(sampler: EnginePool) -> None:
    async def notebook() -> nrl.Batch:
        return rollout(sampler, single_turn(exact), TASKS)

    assert len(asyncio.run(notebook())) == 2


# --- failures


def failing(task: Mapping[str, Any], trace: Trace) -> float:
    if task["answer"] == "3":
        raise RuntimeError("the verifier broke")
    return 1.0


def test_a_verifier_that_raises_makes_the_row_invalid(sampler: EnginePool) -> None:
    with pytest.warns(UserWarning, match="2 of 4 episodes failed .* RuntimeError: the verifier broke"):
        batch = rollout(sampler, single_turn(failing), TASKS, n=2)
    assert batch["valid"].tolist() == [False, False, True, True]
    assert not batch["loss_mask"][:2].any()
    assert batch["rewards"][2:].tolist() == [1.0, 1.0]
    assert batch["rewards"][:2].isnan().all()  # a failure is never a reward of 0
    numbers = finalize(summary(batch))
    assert (numbers["reward"], numbers["invalid"]) == (1.0, 2.0)
    assert (advantages(batch)["advantages"][:2] == 0).all()


def test_the_run_goes_on_after_a_verifier_has_raised(sampler: EnginePool, trainer: Trainer) -> None:
    with pytest.warns(UserWarning, match="episodes failed"):
        batch = rollout(sampler, single_turn(failing), TASKS, n=2)
    batch = nrl.assign(advantages(batch), old_logprobs=batch["rollout_logprobs"])
    _, metrics = trainer.train_step(grpo_loss)(trainer.init(), batch)
    assert finalize(metrics.result())["skipped"] == 0
    with pytest.warns(UserWarning, match="episodes failed"):
        batch = rollout(sampler, single_turn(failing), TASKS[:1], n=2)
    batch = nrl.assign(advantages(batch), old_logprobs=batch["rollout_logprobs"])
    state, metrics = trainer.train_step(grpo_loss)(trainer.init(), batch)
    assert (finalize(metrics.result())["skipped"], state.step) == (1, 0)


def test_an_interrupt_of_an_environment_ends_the_rollout(sampler: EnginePool) -> None:
    def interrupts(task: Any, trace: Trace) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rollout(sampler, single_turn(interrupts), TASKS)


@pytest.mark.parametrize("form", ["plain", "async"])
def test_a_verifier_that_does_not_return_fails_its_row_alone(sampler: EnginePool, form: str) -> None:
    waits = threading.Event()

    def plain(task: Any, trace: Trace) -> float:
        if task["answer"] == "3":
            waits.wait()
        return 1.0

    async def blocks(task: Any, trace: Trace) -> float:
        return plain(task, trace)

    verifier: Any = {"plain": plain, "async": blocks}[form]
    with pytest.warns(
        UserWarning, match=rf"TimeoutError: {verifier.__name__} did not return within 0.3 s.*; 2 threads are still in"
    ):
        batch = rollout(sampler, single_turn(verifier, timeout=0.3), TASKS, n=2)
    assert batch["valid"].tolist() == [False, False, True, True]
    waits.set()
    settled(stuck, 60)


def test_what_is_warned_of_is_at_the_users_line_and_masked(
    sampler: EnginePool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_API_KEY", "correct-horse-battery")

    def verifier(task: Any, trace: Trace) -> float:
        raise LookupError(f"no answer for {os.environ['MY_API_KEY']}")

    for ask in (
        lambda: rollout(sampler, single_turn(verifier), TASKS),
        lambda: rollouts(sampler, single_turn(verifier), data.tasks("arithmetic"), n=2).take(2),
    ):
        with pytest.warns(UserWarning, match=r"the first: LookupError: no answer for \*\*\*$") as warned:
            ask()
        assert [each.filename for each in warned] == [__file__]
    shown = capfd.readouterr().err
    assert "LookupError: no answer for ***" in shown
    assert "correct-horse-battery" not in shown


def test_one_thread_is_still_in_a_call(sampler: EnginePool) -> None:
    waits = threading.Event()
    with pytest.warns(UserWarning, match="; 1 thread is still in calls that did not return$"):
        rollout(sampler, single_turn(lambda *_: waits.wait(), timeout=0.1), TASKS[:1])
    waits.set()
    settled(stuck, 60)


def test_each_environment_of_a_mixture_keeps_its_own_limit(sampler: EnginePool) -> None:
    def slow(task: Any, trace: Trace) -> float:
        time.sleep(0.5)
        return 1.0

    env = by_source(single_turn(slow, timeout=0.1), single_turn(slow, timeout=None))
    tasks = [{**task, "source": source} for source, task in enumerate(TASKS)]
    with pytest.warns(UserWarning, match=r"1 of 2 .* an environment's step did not return within 0.1 s"):
        assert rollout(sampler, env, tasks)["valid"].tolist() == [False, True]
    with pytest.raises(ValueError, match="the environment's timeout is 0; give seconds"):
        rollout(sampler, by_source(single_turn(slow), single_turn(slow, timeout=0)), tasks)
    while stuck():
        time.sleep(0.01)


def test_failures_are_counted_by_kind(sampler: EnginePool) -> None:
    def verifier(task: Any, trace: Trace) -> float:
        raise ValueError("a") if task["answer"] == "3" else LookupError("b")

    said = r"6 of 6 episodes failed \(3 ValueError, 3 LookupError\) and are not trained on; the first: ValueError: a$"
    with pytest.warns(UserWarning, match=said):
        rollout(sampler, single_turn(verifier), TASKS, n=3)


@pytest.mark.parametrize("timeout", [0, -1.0, math.nan])
def test_a_timeout_is_positive(sampler: EnginePool, timeout: float) -> None:
    with pytest.raises(ValueError, match=rf"rollout: the environment's timeout is {timeout}; give seconds, or None"):
        rollout(sampler, single_turn(exact, timeout=timeout), TASKS)


def test_an_environment_that_says_no_timeout_has_the_default(sampler: EnginePool) -> None:
    class Plain:
        def reset(self, task: Any) -> Any:
            return task, task["prompt"]

        def step(self, state: Any, action: str) -> Step:
            return Step(state, 1.0)

    assert rollout(sampler, Plain(), TASKS)["valid"].all()
    assert Environment(Plain().reset, Plain().step).timeout == 60.0


def test_all_of_one_call_may_fail_before_they_ask(sampler: EnginePool) -> None:
    with pytest.warns(UserWarning, match="2 of 2"):
        batch = rollout(sampler, single_turn(exact), [{}, {}])
    assert batch["input_ids"].shape == (2, 1)


def test_a_sampler_that_cannot_serve_ends_the_rollout(sampler: EnginePool) -> None:
    bad = Environment(lambda task: (task, [10**6]), lambda state, action: Step(state))
    with pytest.warns(UserWarning, match="vocabulary|last is"):  # an id outside of it is the environment's failure
        assert not rollout(sampler, bad, TASKS)["valid"].any()
    with pytest.raises(GenerationError, match="stop token"):
        rollout(sampler, single_turn(exact), TASKS, sampling=Sampling(stop_token_ids=(10**6,)))


@pytest.mark.parametrize(("tasks", "n"), [([], 1), (TASKS, 0)])
def test_nothing_to_roll_out(sampler: EnginePool, tasks: list[Any], n: int) -> None:
    with pytest.raises(DataError, match=f"rollout: {len(tasks)} tasks with n={n}"):
        rollout(sampler, single_turn(exact), tasks, n=n)
    with pytest.raises(DataError, match="rollouts: n is 0"):
        rollouts(sampler, single_turn(exact), data.tasks("arithmetic"), n=0)


def test_rows_have_as_many_rewards_as_most(sampler: EnginePool) -> None:
    env = single_turn(lambda task, trace: 1.0 if task["answer"] == "3" else (1.0, 2.0))
    with pytest.warns(UserWarning, match="other episodes have 2 rewards"):
        batch = rollout(sampler, env, [*TASKS, TASKS[1]])
    assert batch["valid"].tolist() == [False, True, True]


def test_a_source_is_an_integer(sampler: EnginePool) -> None:
    with pytest.raises(DataError, match="the task of group 0 has the source 'gsm8k'; give an integer"):
        rollout(sampler, single_turn(exact), [{**TASKS[0], "source": "gsm8k"}])


def test_rewards_and_failures_on_gsm8k_are_counted_exactly() -> None:
    path = Path(__file__).parents[1] / "data" / "gsm8k_sample.jsonl"
    tasks = [*data.rows(path, chat=False)[:2], {"prompt": "How many?", "answer": "no number"}]
    right, wrong = tasks[0]["answer"], "#### 123456789"
    sampler = Scripted([right, wrong, right, tasks[1]["answer"], "3", "4"])
    with pytest.warns(UserWarning, match="2 of 6 episodes failed"):
        batch = rollout(sampler, single_turn(number), tasks, n=2)
    assert batch["rewards"][:4].tolist() == [1.0, 0.0, 0.0, 1.0]
    assert batch["valid"].tolist() == [True, True, True, True, False, False]
    found = finalize(summary(batch))
    assert (found["reward"], found["invalid"]) == (0.5, 2.0)


# --- agreement


@pytest.mark.parametrize("temperature", [0.25, 0.5, 1.0, 2.0])
def test_the_sampler_and_the_trainer_speak_of_one_distribution(
    sampler: EnginePool, trainer: Trainer, temperature: float
) -> None:
    state = trainer.init()
    nrl.publish(state.params, sampler)
    tasks = data.tasks("arithmetic").take(8)
    batch = rollout(sampler, single_turn(number), tasks, n=4, sampling=Sampling(temperature, max_new_tokens=12))
    mask = batch["loss_mask"]
    found = trainer.logprobs(state.params, batch).result()
    torch.testing.assert_close(found[mask], batch["rollout_logprobs"][mask], atol=1e-4, rtol=0)


def test_under_top_k_the_sampler_speaks_of_the_kept_tokens(sampler: EnginePool, trainer: Trainer) -> None:
    state = trainer.init()
    nrl.publish(state.params, sampler)
    sampling = Sampling(top_k=3, max_new_tokens=8)
    with pytest.warns(UserWarning, match="kept mass") if not sampler._warned else pytest.MonkeyPatch.context():
        batch = rollout(sampler, single_turn(number), data.tasks("arithmetic").take(8), n=4, sampling=sampling)
    mask = batch["loss_mask"]
    gap = (trainer.logprobs(state.params, batch).result() - batch["rollout_logprobs"])[mask]
    assert (gap < 0).all()  # the log of the kept mass: the trainer's distribution has a tail
    assert (gap.exp() > 3 / 100).all()  # three of a hundred tokens hold at least their share
