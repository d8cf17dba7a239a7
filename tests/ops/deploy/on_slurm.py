"""A program that a test submits to a Slurm: a trainer with a process on each of two nodes."""

import time

import attrs

import nrl
from nrl import tiny
from nrl.algos import sft_loss
from nrl.backends import adamw, fsdp
from nrl.run.checkpoint import Checkpoints

__all__ = ["Config", "main"]


@attrs.frozen
class Config:
    out: str | None = None
    steps: int = 4
    cluster: str = "local"
    checkpoints: Checkpoints = Checkpoints(every=1000)


def main(cfg: Config) -> None:
    """Steps that leave time to disturb them, where there are other processes."""
    with nrl.run(cfg) as run, nrl.cluster(cfg.cluster) as cluster:
        slots = cluster.reserve(2, per_host=1)
        print("slots on", *sorted(slots.hosts))
        trainer = fsdp.trainer(slots.mesh(executable="system", name="trainer"), tiny.model(), adamw(lr=1e-2))
        step = trainer.train_step(sft_loss)
        state, stream = run.restore(policy=trainer, stream=tiny.sums(8))
        for i, batch in run.steps(stream):
            state, metrics = step(state, batch)
            run.log(i, metrics)
            run.save(i, policy=state, stream=stream)
            time.sleep(0.3 if cluster.remote else 0.0)


if __name__ == "__main__":
    nrl.launch(main, Config)
