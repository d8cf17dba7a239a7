"""A reward model as a verifier: what it gives, how often it is asked, and what its failures are."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import nrl
from nrl import data, tiny
from nrl.algos import reward_model_loss
from nrl.backends import Params, TrainState, adamw, fsdp, hf
from nrl.envs import Trace, single_turn

TASKS = data.tasks("arithmetic", seed=3).take(6)
TOKENIZER = tiny.tokenizer()


@pytest.fixture(scope="module")
def judged() -> Iterator[tuple[Any, TrainState]]:
    """A reward model that says something, and the cluster it is on."""
    with nrl.cluster("local") as cluster:
        trainer = fsdp.trainer(cluster.reserve(1), tiny.model(head="reward"), adamw(lr=1e-2), max_tokens=64)
        step, state = trainer.train_step(reward_model_loss), trainer.init()
        for _ in range(2):
            state, _ = step(state, data.preferences(TASKS, TOKENIZER))
        yield cluster, state


class Counted:
    """Params whose trainer counts how often it is asked."""

    def __init__(self, params: Params) -> None:
        self.calls, self.params, self.trainer = 0, params, self

    def rewards(self, _: Any, batch: nrl.Batch) -> Any:
        self.calls += 1
        return self.params.trainer.rewards(self.params, batch)


def test_rewards_are_the_models_and_those_of_one_moment_are_one_call(judged: tuple[Any, TrainState]) -> None:
    cluster, state = judged
    params: Any = Counted(state.params)
    sampler = hf.sampler(cluster.reserve(1), tiny.model(), nrl.Sampling(max_new_tokens=3))
    batch = nrl.rollout(sampler, single_turn(nrl.scored_by(params, TOKENIZER)), TASKS, n=2)
    assert params.calls == 1
    assert bool(batch["valid"].all())
    answers = [
        TOKENIZER.decode(row[mask], skip_special_tokens=True)
        for row, mask in zip(batch["input_ids"], batch["loss_mask"], strict=True)
    ]
    rows = [{"prompt": TASKS[i // 2]["prompt"], "response": answer} for i, answer in enumerate(answers)]
    expected = state.trainer.rewards(state.params, data.supervised(rows, TOKENIZER)).result()
    torch.testing.assert_close(batch["rewards"], expected, atol=1e-5, rtol=0)
    assert len(set(expected.tolist())) > 3


def test_a_row_that_cannot_be_scored_fails_alone(judged: tuple[Any, TrainState]) -> None:
    verify = nrl.scored_by(judged[1].params, TOKENIZER)

    async def both() -> list[Any]:
        two, three = Trace("", ["2"]), Trace("", ["3"])
        asked = [verify({"prompt": "1+1="}, two), verify({"question": "1+1="}, two), verify({"prompt": "1+2="}, three)]
        return list(await asyncio.gather(*asked, return_exceptions=True))

    first, failed, last = asyncio.run(both())
    assert isinstance(failed, nrl.errors.EnvError)
    assert str(failed) == "scored_by: the task has no 'prompt', only 'question'"
    assert isinstance(first, float)
    assert isinstance(last, float)
    assert asyncio.run(verify({"prompt": "1+1="}, Trace("", ["2"]))) == pytest.approx(first, abs=1e-6)


def test_what_the_trainer_raises_is_everybodys(judged: tuple[Any, TrainState]) -> None:
    """As a row that is longer than its micro-batches; rollout makes failures of them, and not rewards of 0."""
    cluster, state = judged
    sampler = hf.sampler(cluster.reserve(1), tiny.model(), nrl.Sampling(max_new_tokens=3))
    long = [{"prompt": "1" * 70}]
    with pytest.warns(UserWarning, match=r"2 of 2 episodes failed .*more than max_tokens=64"):
        batch = nrl.rollout(sampler, single_turn(nrl.scored_by(state.params, TOKENIZER)), long, n=2)
    assert not batch["valid"].any()
    assert bool(batch["rewards"].isnan().all())


def test_an_answer_that_nobody_waits_for_leaves_the_others_alone(judged: tuple[Any, TrainState]) -> None:
    _, state = judged
    params: Any = Counted(state.params)
    verify = nrl.scored_by(params, TOKENIZER)

    async def ask() -> float:
        first, second = (asyncio.ensure_future(verify(TASKS[0], Trace("", [answer]))) for answer in ("1", "2"))
        await asyncio.sleep(0)  # both have asked
        first.cancel()
        found = await asyncio.wait_for(second, 60)
        only = asyncio.ensure_future(verify(TASKS[0], Trace("", ["3"])))
        await asyncio.sleep(0)
        only.cancel()
        await asyncio.sleep(0.01)
        return found

    rows = data.supervised([{"prompt": TASKS[0]["prompt"], "response": "2"}], TOKENIZER)
    (expected,) = state.trainer.rewards(state.params, rows).result().tolist()
    assert asyncio.run(ask()) == pytest.approx(expected, abs=1e-5)
    assert asyncio.run(verify(TASKS[0], Trace("", ["2"]))) == pytest.approx(expected, abs=1e-5)  # another loop
    assert params.calls == 2


def test_a_judge_has_no_limit_unless_one_is_given(judged: tuple[Any, TrainState]) -> None:
    verify = nrl.scored_by(judged[1].params, TOKENIZER)
    assert single_turn(verify).timeout is None
    assert single_turn(verify, timeout=5.0).timeout == 5.0


def test_a_judge_that_takes_longer_than_others_may_is_waited_for(
    judged: tuple[Any, TrainState], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nrl.envs.types.TIMEOUT", 0.1)
    cluster, state = judged
    params: Any = Counted(state.params)
    rewards = params.trainer.rewards

    def slow(*args: Any) -> Any:
        time.sleep(0.5)
        return rewards(*args)

    params.rewards = slow
    sampler = hf.sampler(cluster.reserve(1), tiny.model(), nrl.Sampling(max_new_tokens=3))
    env = single_turn(nrl.scored_by(params, TOKENIZER))
    assert nrl.rollout(sampler, env, TASKS, n=2)["valid"].all()
    (graded,) = nrl.grade(sampler, nrl.scored_by(params, TOKENIZER), TASKS[:1])
    assert graded.rewards != [None]
    assert params.calls == 2
