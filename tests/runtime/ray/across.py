"""Programs that run on several machines of `tests.machines`.

    python -m tests.runtime.ray.across PROGRAM ADDRESS DEADLINE TIMES

The last two are the seconds of `nrl.cluster`, and how often `nrl.retrying` begins again. Each line of the standard
output that is JSON is for the test.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import attrs

import nrl
from nrl import tiny
from nrl.algos import advantages, grpo_loss, sft_loss
from nrl.backends import Model, Sampling, adamw, fsdp, hf
from nrl.batch.metrics import finalize
from nrl.data import tasks
from nrl.envs import single_turn
from nrl.run.checkpoint import Checkpoints
from nrl.runtime import Cluster
from nrl.runtime.venvs.registry import Executable
from tests.run.checkpoint import on_s3

__all__ = ["PROGRAMS"]

STEPS, LONGER, SAVED = 3, 12, 6


def say(**words: Any) -> None:
    """Tell the test something."""
    print(json.dumps({"at": time.time(), **words}), flush=True)


def digits(task: Any, trace: Any) -> float:
    """A reward that a model of random weights gets now and then."""
    return float(sum(character.isdigit() for character in trace.text))


def samples(cluster: Cluster, model: Model | None = None, turned: bool = False) -> None:
    """A trainer on the first machine and a sampler on the second; or the other way round."""
    slots, both = cluster.reserve(2, per_host=1), model or tiny.model()
    one, two = sorted(range(2), key=lambda place: slots.hosts[place], reverse=turned)
    trainer = fsdp.trainer(slots[one].mesh(executable="system", name="trainer"), both, adamw(lr=1e-2))
    engines = slots[two].mesh(executable="system", name="sampler")
    sampler = hf.sampler(engines, both, Sampling(max_new_tokens=3))
    step, state = trainer.train_step(grpo_loss), trainer.init()
    nrl.publish(state.params, sampler)
    asked, environment = tasks("arithmetic"), single_turn(digits)
    for i in range(STEPS):
        batch = nrl.rollout(sampler, environment, asked.take(4), n=4, seed=i, first_group=4 * i)
        batch = nrl.assign(advantages(batch), old_logprobs=batch["rollout_logprobs"])
        state, metrics = step(state, batch)
        numbers = finalize(metrics.result())
        say(publishing=i)
        nrl.publish(state.params, sampler)
        say(step=i, hosts=slots.hosts, loss=numbers["loss"], tokens=batch["input_ids"].tolist())


def publishes(cluster: Cluster, turned: bool = False) -> None:
    """The same with 27 MB of weights."""
    samples(cluster, tiny.model(hidden_size=512, intermediate_size=2048), turned)


def publishes_from_afar(cluster: Cluster) -> None:
    """The same with the trainer on the second machine."""
    publishes(cluster, turned=True)


def trains(cluster: Cluster, executable: str = "system", steps: int = LONGER) -> None:
    """A trainer with a process on each machine, which leaves time to disturb its steps."""
    slots = cluster.reserve(2, per_host=1)
    trainer = fsdp.trainer(slots.mesh(executable=executable, name="trainer"), tiny.model(), adamw(lr=1e-2))
    step, state = trainer.train_step(sft_loss), trainer.init()
    stream = tiny.sums(16)
    for i in range(steps):
        state, metrics = step(state, *stream.take(1))
        say(step=i, hosts=slots.hosts, loss=finalize(metrics.result())["loss"])
        time.sleep(0.5 if cluster.remote else 0.0)


def builds(cluster: Cluster) -> None:
    """The same in an environment that each machine builds."""
    trains(cluster, "base", STEPS)


@attrs.frozen
class Saving:
    """The configuration of `saves`."""

    out: str
    checkpoints: Checkpoints
    steps: int = SAVED


def saves(cluster: Cluster) -> None:
    """A run whose trainer has a process on each machine, with time for each checkpoint to be written."""
    to = {name: os.environ[name] for name in os.environ if name.startswith(("AWS_", "PYTHONPATH"))}
    mesh = cluster.reserve(2, per_host=1).mesh(executable=Executable("system", env=to), name="trainer")
    trainer = fsdp.trainer(mesh, tiny.model(), adamw(lr=1e-2))
    with nrl.run(Saving(os.environ["OUT"], Checkpoints(every=2, to=os.environ.get("TO")))) as run:
        step = trainer.train_step(sft_loss)
        state, stream = run.restore(policy=trainer, stream=tiny.sums(16))
        for i, batch in run.steps(stream):
            state, metrics = step(state, batch)
            loss = run.log(i, metrics)["loss"]
            if run.save(i, policy=state, stream=stream):
                say(saving=i)
                time.sleep(5.0 if cluster.remote else 0.0)
            say(step=i, hosts=mesh.slots.hosts, loss=loss)


def stores(cluster: Cluster) -> None:
    """A store of objects for other programs, at an address of this machine; until it is killed."""
    with on_s3.server(os.environ["AT"]):
        say(**{name: os.environ[name] for name in os.environ if name.startswith("AWS_")})
        time.sleep(3600)


PROGRAMS: dict[str, Callable[[Cluster], None]] = {
    each.__name__: each for each in (samples, publishes, publishes_from_afar, trains, builds, saves, stores)
}


def main(program: str) -> None:
    address, deadline = sys.argv[2], float(sys.argv[3])
    with nrl.cluster(address, deadline=deadline) as cluster:
        PROGRAMS[program](cluster)
    say(done=True)


if __name__ == "__main__":
    try:
        nrl.retrying(main, times=int(sys.argv[4]))(sys.argv[1])
    except nrl.errors.NrlError as error:
        say(error=type(error).__name__, text=str(error))
        raise
