"""Rollouts with a real sampler: rows, failures, several turns, streams, and agreement with the trainer."""

import asyncio
import gc
import itertools
import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest
import torch

import nrl
from nrl import data, tiny
from nrl.algos import advantages, grpo_loss
from nrl.backends import Completion, Sampling, Trainer, adamw, fsdp, hf
from nrl.backends.sampling.pool import EnginePool
from nrl.envs import Environment, Step, by_source, exact, number, single_turn
from nrl.episodes import rollout, rollouts, run_episode
from nrl.episodes.call_threads import stuck
from nrl.episodes.summaries import summary
from nrl.errors import DataError, EnvError, GenerationError, LostRequest, PlacementError
from nrl.reduce import finalize
from nrl.runtime import Cluster

TASKS = [{"prompt": "1+2=", "answer": "3"}, {"prompt": "12+7=", "answer": "19"}]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with nrl.cluster("local") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def sampler(cluster: Cluster) -> EnginePool:
    return hf.sampler(cluster.reserve(1), tiny.model(num_hidden_layers=1), Sampling(max_new_tokens=5))


@pytest.fixture(scope="module")
def trainer(cluster: Cluster) -> Trainer:
    return fsdp.trainer(cluster.reserve(1), tiny.model(num_hidden_layers=1), adamw(lr=1e-2))


class Scripted:
    """Answers each prompt with the next of its texts; everything else is the real thing."""

    def __init__(self, texts: list[str]) -> None:
        self.texts, self.tokenizer = texts, tiny.tokenizer()
        self.version, self.context_length, self.sampling = 1, 4096, Sampling()

    def generate(self, prompts: Any, *, seeds: Any = None, sampling: Any = None) -> Any:
        texts, self.texts = self.texts[: len(prompts)], self.texts[len(prompts) :]
        ids = [torch.tensor([*self.tokenizer.encode(text), self.tokenizer.eos_token_id]) for text in texts]
        return nrl.runtime.done([Completion(x, -torch.ones(len(x)), truncated=False, version=1) for x in ids])

    def receive(self, buckets: Any, version: int, *, inflight: Any = "wait") -> None:
        raise AssertionError("nothing is published")


# --- rows


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


def failing(task: Mapping[str, Any], response: str) -> float:
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


@pytest.mark.parametrize("reward", [math.nan, math.inf, 1e39, (0.0, -1e39)])
def test_a_reward_that_is_no_number_makes_the_row_invalid(sampler: EnginePool, reward: Any) -> None:
    with pytest.warns(UserWarning, match="EnvError: the reward is"):
        batch = rollout(sampler, single_turn(lambda task, response: reward), TASKS)
    assert not batch["valid"].any()


def test_the_largest_rewards_of_float32_count(sampler: EnginePool) -> None:
    batch = rollout(sampler, single_turn(lambda task, response: 3.4e38), TASKS)
    assert batch["rewards"].tolist() == pytest.approx([3.4e38] * 2)
    twice = Environment(lambda task: (0, "1"), lambda state, _: Step(1, 3e38, done=state == 1, observation="2"))
    with pytest.warns(
        UserWarning, match=r"the reward is 6e\+38; rewards are float32, whose largest number is 3.4e\+38"
    ):
        assert not rollout(sampler, twice, TASKS)["valid"].any()


@pytest.mark.parametrize("error", [SystemExit(), asyncio.CancelledError(), GeneratorExit()])
@pytest.mark.parametrize("part", ["reset", "step"])
def test_whatever_an_environment_raises_is_its_rows_failure(
    sampler: EnginePool, error: BaseException, part: str
) -> None:
    def reset(task: Any) -> Any:
        if part == "reset" and task["answer"] == "3":
            raise error
        return task, task["prompt"]

    def step(state: Any, action: str) -> Step:
        if part == "step" and state["answer"] == "3":
            raise error
        return Step(state, 1.0)

    with pytest.warns(UserWarning, match=f"2 of 4 episodes failed .* the first: {type(error).__name__}: "):
        batch = rollout(sampler, Environment(reset, step), TASKS, n=2)
    assert batch["valid"].tolist() == [False, False, True, True]


def test_an_interrupt_of_an_environment_ends_the_rollout(sampler: EnginePool) -> None:
    def interrupts(task: Any, response: str) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rollout(sampler, single_turn(interrupts), TASKS)


@pytest.mark.parametrize("form", ["plain", "async"])
def test_a_verifier_that_does_not_return_fails_its_row_alone(sampler: EnginePool, form: str) -> None:
    waits = threading.Event()

    def plain(task: Any, response: str) -> float:
        if task["answer"] == "3":
            waits.wait()
        return 1.0

    async def blocks(task: Any, response: str) -> float:
        return plain(task, response)

    verifier: Any = {"plain": plain, "async": blocks}[form]
    began = time.monotonic()
    with pytest.warns(
        UserWarning, match=rf"TimeoutError: {verifier.__name__} did not return within 0.3 s.*; 2 threads are still in"
    ):
        batch = rollout(sampler, single_turn(verifier, timeout=0.3), TASKS, n=2)
    assert time.monotonic() - began < 5
    assert batch["valid"].tolist() == [False, False, True, True]
    waits.set()
    until = time.monotonic() + 5
    while stuck() and time.monotonic() < until:
        time.sleep(0.01)


def test_what_is_warned_of_is_at_the_users_line_and_masked(
    sampler: EnginePool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_API_KEY", "correct-horse-battery")

    def verifier(task: Any, response: str) -> float:
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
    until = time.monotonic() + 5
    while stuck() and time.monotonic() < until:
        time.sleep(0.01)


def test_each_environment_of_a_mixture_keeps_its_own_limit(sampler: EnginePool) -> None:
    def slow(task: Any, response: str) -> float:
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
    def verifier(task: Any, response: str) -> float:
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


def test_rollouts_that_fail_whole_end_the_stream(sampler: EnginePool) -> None:
    fails = iter([True, True, False, True, True, True])

    def reset(task: Any) -> Any:
        return task["fails"], task["prompt"]

    def step(state: bool, action: str) -> Step:
        return Step(state, 1 / (not state))

    tasks = nrl.stream.counting(lambda index: {**TASKS[0], "fails": next(fails) if index % 2 == 0 else True})
    groups = rollouts(sampler, Environment(reset, step), tasks, n=2)
    for _ in range(2):
        with pytest.warns(UserWarning, match="4 of 4 episodes failed"):
            groups.take(2)
    with pytest.warns(UserWarning, match="2 of 4 episodes failed"):  # which begins anew
        groups.take(2)
    said = (
        r"rollouts: all rows of 3 rollouts in a row failed, 12 of them, so there is nothing to learn from; mend the "
        r"environment or its verifier. The first of the last: ZeroDivisionError: division by zero"
    )
    for _ in range(2):
        with pytest.warns(UserWarning, match="4 of 4 episodes failed"):
            groups.take(2)
    with pytest.warns(UserWarning, match="4 of 4 episodes failed"), pytest.raises(EnvError, match=said):
        groups.take(2)


def test_few_rows_that_fail_are_no_rollout_that_fails(sampler: EnginePool) -> None:
    """As where `drop_uniform` asks for single groups."""
    fails = iter([False] * 8 + [True] * 10)
    tasks = nrl.stream.counting(lambda index: {**TASKS[0], "fails": next(fails)})
    groups = rollouts(
        sampler, Environment(lambda task: (task["fails"], "1"), lambda s, _: Step(s, 1 / (not s))), tasks, n=1
    )
    groups.take(8)
    for _ in range(10):
        with pytest.warns(UserWarning, match="1 of 1"):
            groups.take(1)


def test_requests_that_are_lost_throughout_are_the_samplers_fault() -> None:
    class Lost(Scripted):
        def generate(self, prompts: Any, *, seeds: Any = None, sampling: Any = None) -> Any:
            raise LostRequest("gone")

    tasks = nrl.stream.counting(lambda index: TASKS[0])
    with pytest.warns(UserWarning, match="2 of 2"), pytest.raises(LostRequest, match=r"look at the sampler.*gone"):
        rollouts(Lost([]), single_turn(exact), tasks, n=2, patience=1).take(1)
    with pytest.raises(DataError, match="rollouts: patience is 0; it must be at least 1"):
        rollouts(Lost([]), single_turn(exact), tasks, n=2, patience=0)


def test_a_take_that_is_broken_off_has_taken_nothing(sampler: EnginePool) -> None:
    breaks = [False, True, False]

    def verifier(task: Any, response: str) -> float:
        if breaks[0]:
            raise KeyboardInterrupt
        return 1.0

    groups = rollouts(sampler, single_turn(verifier), data.tasks("arithmetic", seed=1), n=2, seed=4)
    stream = nrl.ahead(nrl.batched(groups, 2), 1)
    expected = [
        nrl.ahead(
            nrl.batched(rollouts(sampler, single_turn(exact), data.tasks("arithmetic", seed=1), n=2, seed=4), 2), 1
        )
    ]
    stream.take(1)
    before = stream.state()
    del breaks[0]
    with pytest.raises(KeyboardInterrupt):
        stream.take(1)
    assert str(stream.state()) == str(before)
    del breaks[0]
    expected[0].take(1)
    for _ in range(3):
        (found,), (wanted,) = stream.take(1), expected[0].take(1)
        assert found["input_ids"].tolist() == wanted["input_ids"].tolist()


def test_a_task_without_prompt_makes_the_row_invalid(sampler: EnginePool) -> None:
    with pytest.warns(UserWarning, match="no 'prompt'"):
        batch = rollout(sampler, single_turn(exact), [{"answer": "3"}, TASKS[1]])
    assert batch["valid"].tolist() == [False, True]
    assert batch["attention_mask"][0].sum() == 0


def test_a_prompt_that_fills_the_context_is_counted(sampler: EnginePool) -> None:
    limit = sampler.context_length
    tasks = [{"prompt": "1" * limit, "answer": "1"}, {"prompt": "1" * (limit - 1), "answer": "1"}]
    with pytest.warns(UserWarning, match=f"1 of 2 .* the prompt has {limit} tokens and fills the context of {limit}"):
        batch = rollout(sampler, single_turn(exact), tasks)
    assert batch["valid"].tolist() == [False, True]
    assert batch["input_ids"].shape[1] == limit


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


# --- several turns


def test_turns_are_appended_and_observations_not_trained_on(sampler: EnginePool) -> None:
    turns: list[str] = []

    async def step(state: int, action: str) -> Step:
        turns.append(action)
        await asyncio.sleep(0)
        return Step(state + 1, reward=0.5, done=state == 2, observation="\nagain: ", info={"turns": state + 1})

    env = Environment(lambda task: (0, task["prompt"]), step)
    batch = rollout(sampler, env, TASKS[:1], n=2)
    assert batch["rewards"].tolist() == [1.5, 1.5]
    assert batch["env/turns"].tolist() == [3.0, 3.0]
    assert finalize(summary(batch))["env/turns"] == 3.0
    told = sampler.tokenizer.encode("\nagain: ")
    for ids, mask, real in zip(batch["input_ids"], batch["loss_mask"], batch["attention_mask"], strict=True):
        untrained = ids[real & ~mask].tolist()
        assert untrained == sampler.tokenizer.encode("1+2=") + told + told
    assert len(turns) == 6


def test_later_turns_draw_fresh_noise(sampler: EnginePool) -> None:
    seen: list[list[int]] = []

    async def generate(tokens: list[int]) -> Any:
        [completion] = sampler.generate([tokens], seeds=[3], sampling=Sampling(max_new_tokens=1)).result()
        seen.append(completion.token_ids.tolist())
        return completion

    env = Environment(lambda task: (0, "1"), lambda state, _: Step(state + 1, done=state == 19, observation=[]))
    episode = asyncio.run(run_episode(generate, env, {}, tokenizer=sampler.tokenizer, context_length=64))
    assert episode.failure is None
    assert len(seen) == 20
    assert len({tuple(ids) for ids in seen}) > 5


def test_an_episode_ends_where_the_context_does(sampler: EnginePool) -> None:
    env = Environment(lambda task: (0, "1" * 500), lambda state, _: Step(state, 1.0, done=False, observation="22222"))
    batch = rollout(sampler, env, TASKS[:1])
    assert batch["truncated"].all()
    assert batch["valid"].all()
    assert batch["input_ids"].shape[1] <= sampler.context_length


def test_a_step_without_observation_is_a_failure(sampler: EnginePool) -> None:
    env = Environment(lambda task: (0, "1"), lambda state, _: Step(state, done=False))
    with pytest.warns(UserWarning, match="not done, and it has no observation"):
        assert not rollout(sampler, env, TASKS[:1])["valid"].any()


def test_several_rewards(sampler: EnginePool) -> None:
    batch = rollout(sampler, single_turn(lambda task, response: (1.0, 0.25)), TASKS)
    assert batch["rewards"].tolist() == [[1.0, 0.25]] * 2
    assert finalize(summary(batch))["reward"] == 1.25


# --- streams


def test_rollouts_are_groups_and_continue_from_their_state(sampler: EnginePool) -> None:
    def stream() -> Any:
        return rollouts(sampler, single_turn(number), data.tasks("arithmetic", seed=1), n=2, seed=4)

    first = stream()
    first.take(3)
    state = first.state()
    expected = [group["input_ids"].tolist() for group in first.take(2)]
    again = stream()
    again.restore(state)
    groups = again.take(2)
    assert [group["input_ids"].tolist() for group in groups] == expected
    assert [group["group_ids"].tolist() for group in groups] == [[3, 3], [4, 4]]
    assert state == {"tasks": {"cursor": 3}, "groups": 3}


@pytest.mark.parametrize("n", [0, 1, 3])
def test_the_lag_of_ahead_is_exactly_min_k_n(cluster: Cluster, trainer: Trainer, n: int) -> None:
    sampler = hf.sampler(cluster.reserve(1), tiny.model(num_hidden_layers=1), Sampling(max_new_tokens=2))
    env = single_turn(lambda task, response: float(len(response)))
    stream = nrl.ahead(nrl.batched(rollouts(sampler, env, data.tasks("arithmetic"), n=4), 2), n)
    state, step = trainer.init(), trainer.train_step(grpo_loss)
    nrl.publish(state.params, sampler)
    lags = []
    for _ in range(6):
        [batch] = stream.take(1)
        batch = nrl.assign(advantages(batch), old_logprobs=batch["rollout_logprobs"])
        state, metrics = step(state, batch)
        nrl.publish(state.params, sampler)
        lags.append(finalize(metrics.result())["lag"])
    assert lags == [min(k, n) for k in range(6)]


def test_a_lag_is_refused_where_the_sampler_shares_the_trainers_gpus(trainer: Trainer) -> None:
    """A cluster of this process that says its slots are GPUs."""
    with nrl.cluster("local") as here:
        here.gpus = True
        slots = here.reserve(3)
        learner = fsdp.trainer(slots[:2], tiny.model(num_hidden_layers=1), adamw(lr=1e-2))
        state = learner.init()

        def lagging(place: Any, lag: int) -> EnginePool:
            sampler = hf.sampler(place, tiny.model(num_hidden_layers=1))
            nrl.ahead(nrl.batched(rollouts(sampler, single_turn(exact), data.tasks("arithmetic"), n=2), 2), lag)
            return sampler

        said = (
            r"publish: the sampler shares 1 GPUs with the trainer's mesh '\w+' \(slots 1\), and nrl.ahead lets it "
            r"sample up to 2 publishes early, while that trains; give it slots of its own, or take a lag of 0"
        )
        with pytest.raises(PlacementError, match=said):
            nrl.publish(state.params, lagging(slots[1:], 2))
        assert nrl.publish(state.params, lagging(slots[1:], 0)) == 1
        assert nrl.publish(state.params, lagging(slots[2:], 2)) == 1
        here.gpus = False
        assert nrl.publish(state.params, lagging(slots[1:], 2)) == 1


# --- Ctrl-C


class Pressed(Scripted):
    """Once it has been asked for something, somebody presses Ctrl-C: once, however often it is asked."""

    pressed = False

    def press(self) -> None:
        if not self.pressed:
            self.pressed = True
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()


class Slow(Pressed):
    """Decodes for ever."""

    def generate(self, prompts: Any, *, seeds: Any = None, sampling: Any = None) -> Any:
        self.press()
        time.sleep(30)


class Streaming(Pressed):
    """Takes rows as they come, and never answers."""

    def stream(self, prompts: Any, seeds: Any, sampling: Any = None) -> Any:
        self.press()
        self.asked = [Waiting() for _ in prompts]
        return self.asked


class Waiting(futures.Future[Completion]):
    """Of the standard library."""


@pytest.mark.parametrize("kind", [Slow, Streaming])
@pytest.mark.parametrize("lag", [0, 1])
def test_an_interrupt_is_one_and_comes_at_once(
    kind: type[Scripted], lag: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the driver waits for a sampler, and where a thread does for it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a program in the background may ignore it
    sampler = kind([])
    monkeypatch.setattr(kind, "remote", lag > 0, raising=False)
    groups = rollouts(sampler, single_turn(exact), nrl.stream.counting(lambda index: TASKS[index % 2]), n=4)
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            nrl.ahead(nrl.batched(groups, 2), lag).take(1)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began < 5
    assert caught.value.__context__ is None
    assert caught.value.__cause__ is None
    gc.collect()
    assert caplog.records == []  # asyncio says what it did not expect
    if isinstance(sampler, Streaming) and not lag:
        assert all(answer.cancelled() for answer in sampler.asked)


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


def test_what_the_sampler_raises_is_no_failure_of_the_environment() -> None:
    class Broken(Scripted):
        def generate(self, prompts: Any, *, seeds: Any = None, sampling: Any = None) -> Any:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        rollout(Broken([]), single_turn(exact), TASKS)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (
            Step(None, 1.0, info={"note": "x"}),  # type: ignore[dict-item]
            "could not convert string to float",
        ),
        (1.0, "step returned float; return a Step"),
        (Step(None, done=False, observation=[{"role": "user", "content": "x"}]), "observation is chat messages"),  # type: ignore[list-item]
    ],
)
def test_a_step_that_is_malformed_makes_the_row_invalid(sampler: EnginePool, step: Any, said: str) -> None:
    env = Environment(lambda task: (0, task["prompt"]), lambda state, action: step)
    with pytest.warns(UserWarning, match=said):
        assert not rollout(sampler, env, TASKS)["valid"].any()


def test_rows_have_as_many_rewards_as_the_first(sampler: EnginePool) -> None:
    env = single_turn(lambda task, response: (1.0, 2.0) if task["answer"] == "3" else 1.0)
    with pytest.warns(UserWarning, match="other episodes have 2 rewards"):
        batch = rollout(sampler, env, TASKS)
    assert batch["valid"].tolist() == [True, False]


def test_a_source_is_an_integer(sampler: EnginePool) -> None:
    with pytest.raises(DataError, match="task 0 has the source 'gsm8k'; give an integer"):
        rollout(sampler, single_turn(exact), [{**TASKS[0], "source": "gsm8k"}])


def test_the_oldest_version_may_be_0(sampler: EnginePool) -> None:
    versions = iter([0, 3])

    async def generate(tokens: list[int]) -> Completion:
        return Completion(torch.tensor([20]), torch.tensor([-1.0]), truncated=False, version=next(versions))

    env = Environment(lambda task: (0, "1"), lambda state, _: Step(state + 1, done=state == 1, observation="2"))
    episode = asyncio.run(run_episode(generate, env, {}, tokenizer=sampler.tokenizer, context_length=64))
    assert episode.version == 0


def test_dropped_failures_are_counted(sampler: EnginePool) -> None:
    count = itertools.count()
    env = single_turn(lambda task, response: float(next(count)) if task["answer"] != "3" else 1 / 0)
    tasks = nrl.stream.counting(lambda index: TASKS[index % 2])
    with pytest.warns(UserWarning, match="ZeroDivisionError"):
        [batch] = nrl.batched(nrl.drop_uniform(rollouts(sampler, env, tasks, n=8)), 1).take(1)
    assert finalize(summary(batch))["invalid"] == 8
