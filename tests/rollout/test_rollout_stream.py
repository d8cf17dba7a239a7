"""The stream of groups: its state, its lag, where everything fails, and Ctrl-C."""

import gc
import itertools
import os
import signal
import threading
import time
from concurrent import futures
from typing import Any

import pytest

import nrl
from nrl import data, tiny
from nrl.algos import advantages, grpo_loss
from nrl.backends import Capabilities, Completion, Sampling, Trainer, adamw, fsdp, hf
from nrl.backends.sampling.pool import EnginePool
from nrl.batch.metrics import finalize
from nrl.envs import Environment, Step, Trace, by_source, exact, number, single_turn
from nrl.errors import DataError, EnvError, LostRequest, PlacementError
from nrl.rollout import rollouts
from nrl.rollout.summaries import summary
from nrl.runtime import Slots
from tests.rollout.scripted import TASKS, Scripted


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
    assert state == {"tasks": {"cursor": 3}, "groups": 3, "num_rewards": 0}


def test_a_take_that_is_broken_off_has_taken_nothing(sampler: EnginePool) -> None:
    breaks = [False, True, False]

    def verifier(task: Any, trace: Trace) -> float:
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


@pytest.mark.parametrize("n", [0, 1, 3])
def test_the_lag_of_ahead_is_exactly_min_k_n(slots: Slots, trainer: Trainer, n: int) -> None:
    sampler = hf.sampler(slots[2:3], tiny.model(num_hidden_layers=1), Sampling(max_new_tokens=2))
    env = single_turn(lambda task, trace: float(len(trace.text)))
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


def test_a_lag_is_refused_where_the_sampler_shares_the_trainers_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster of this process that says its slots are GPUs."""
    with nrl.cluster("local") as here:
        monkeypatch.setattr(here, "are_gpus", lambda indices: True)
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
        monkeypatch.setattr(here, "are_gpus", lambda indices: False)
        assert nrl.publish(state.params, lagging(slots[1:], 2)) == 1


# --- failures


def test_rollouts_that_fail_whole_end_the_stream(sampler: EnginePool) -> None:
    fails = iter([True, True, False, True, True, True])

    def reset(task: Any) -> Any:
        return task["fails"], task["prompt"]

    def step(state: bool, action: str) -> Step:
        return Step(state, 1 / (not state))

    tasks = nrl.data.counting(lambda index: {**TASKS[0], "fails": next(fails) if index % 2 == 0 else True})
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
    tasks = nrl.data.counting(lambda index: {**TASKS[0], "fails": next(fails)})
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

    tasks = nrl.data.counting(lambda index: TASKS[0])
    with pytest.warns(UserWarning, match="2 of 2"), pytest.raises(LostRequest, match=r"look at the sampler.*gone"):
        rollouts(Lost([]), single_turn(exact), tasks, n=2, patience=1).take(1)
    with pytest.raises(DataError, match="rollouts: patience is 0; it must be at least 1"):
        rollouts(Lost([]), single_turn(exact), tasks, n=2, patience=0)


def test_dropped_failures_are_counted(sampler: EnginePool) -> None:
    count = itertools.count()
    env = single_turn(lambda task, trace: float(next(count)) if task["answer"] != "3" else 1 / 0)
    tasks = nrl.data.counting(lambda index: TASKS[index % 2])
    with pytest.warns(UserWarning, match="ZeroDivisionError"):
        [batch] = nrl.batched(nrl.drop_uniform(rollouts(sampler, env, tasks, n=8)), 1).take(1)
    assert finalize(summary(batch))["invalid"] == 8


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
        time.sleep(3600)


class Streaming(Pressed):
    """Takes rows as they come, and never answers."""

    capabilities = Capabilities(streams=True)

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
    """Where the driver waits for a sampler, and where a thread does for it; neither would end by itself."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a program in the background may ignore it
    sampler = kind([])
    monkeypatch.setattr(kind, "remote", lag > 0, raising=False)
    groups = rollouts(sampler, single_turn(exact), nrl.data.counting(lambda index: TASKS[index % 2]), n=4)
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            nrl.ahead(nrl.batched(groups, 2), lag).take(1)
    finally:
        signal.signal(signal.SIGINT, before)
    assert caught.value.__context__ is None
    assert caught.value.__cause__ is None
    gc.collect()
    assert caplog.records == []  # asyncio says what it did not expect
    if isinstance(sampler, Streaming) and not lag:
        assert all(answer.cancelled() for answer in sampler.asked)


def test_patience_is_each_source_s_own(recwarn: pytest.WarningsRecorder) -> None:
    """One environment of two fails throughout."""

    def broken(task: Any, trace: Any) -> float:
        raise RuntimeError("no such file")

    env = by_source(single_turn(exact), single_turn(broken))
    tasks = data.mixture({name: (data.tasks([{"prompt": "a", "answer": "a"}], chat=False), 1) for name in ("x", "y")})
    groups = rollouts(Scripted(["a"] * 200), env, tasks, n=2)
    told = r"all rows of source 1 of [3-5] rollouts in a row failed, [0-9]+ of them, .*no such file"
    with pytest.raises(EnvError, match=told):
        [groups.take(4) for _ in range(9)]
    assert len(recwarn) >= 2
    assert all("of 8 episodes failed" in str(each.message) for each in recwarn)


def test_a_task_that_an_environment_changes_is_its_own_episode_s() -> None:
    def first(task: Any, trace: Any) -> float:
        seen = task.setdefault("first", trace.text)
        return float(seen == trace.text)

    task = {"prompt": "a"}
    batch = nrl.rollout(Scripted(["a", "b", "c", "d"]), single_turn(first), [task], n=4)
    assert batch["rewards"].tolist() == [1, 1, 1, 1]
    assert task == {"prompt": "a"}


# --- Tasks without a right answer


UNREAD = {"prompt": "?", "answer": "two"}


def test_tasks_without_a_right_answer_are_left_out_before_the_first_take(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [UNREAD, *TASKS, {"prompt": "no answer"}]
    env = single_turn(number)
    groups = rollouts(Scripted(["3", "19", "3", "19"]), env, data.tasks(rows, shuffle=False, chat=False), n=2)
    printed = capsys.readouterr().out
    assert "data: 2 of 4 tasks of the source are left out, since no answer to them can be right" in printed
    assert "row 0: task['answer'] is 'two'" in printed
    assert [group["rewards"].tolist() for group in groups.take(2)] == [[1.0, 0.0], [0.0, 1.0]]
    state = groups.state()
    assert state["tasks"]["cursor"] == 2
    again = rollouts(Scripted(["3"]), env, data.tasks(rows, shuffle=False, chat=False), n=1)
    again.restore(state)
    assert again.take(1)[0]["rewards"].tolist() == [1.0]


def test_a_stream_whose_tasks_all_have_right_answers_stays(capsys: pytest.CaptureFixture[str]) -> None:
    stream = data.tasks(TASKS, shuffle=False, chat=False)
    groups = rollouts(Scripted(["3"]), single_turn(number), stream, n=1)
    groups.take(1)
    assert stream.state()["cursor"] == 1
    checked = data.tasks([UNREAD, *TASKS], shuffle=False, chat=False, check=lambda task: None)
    rollouts(Scripted([]), single_turn(number), checked, n=1)
    assert capsys.readouterr().out == ""


def test_tasks_of_a_mixture_and_generated_ones_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    def made(seed: int, index: int) -> Any:
        return {"prompt": str(index), "answer": "none" if index % 2 else str(index)}

    mixed = data.mixture({"rows": (data.tasks([UNREAD, *TASKS], chat=False), 1), "made": (data.tasks(made), 1)}, seed=3)
    env = by_source(single_turn(number), single_turn(number))
    groups = rollouts(Scripted(["1"] * 8), env, mixed, n=1)
    assert "1 of 3 tasks of the source are left out" in capsys.readouterr().out
    assert len(groups.take(8)) == 8
    assert "tasks of made are left out" in capsys.readouterr().out
    with pytest.raises(DataError, match="tasks: 1 of 1 tasks of the source are left out"):
        rollouts(Scripted([]), single_turn(number), data.tasks([UNREAD], chat=False), n=1)
