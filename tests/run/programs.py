"""The programs that tests of runs start, kill and start again."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import attrs
import numpy as np
import torch

from nrl import ahead
from nrl.batch import Batch
from nrl.batch.metrics import Mean
from nrl.data import Source, counting
from nrl.run import Run, run
from nrl.run.checkpoint import Checkpoints


@attrs.frozen
class Optimizer:
    lr: float = 1e-3


@attrs.frozen
class Config:
    steps: int = 3
    out: Path | None = None
    optimizer: Optimizer = Optimizer()


def batches() -> Source[Batch]:
    return counting(lambda index: Batch({"rewards": torch.tensor([float(index)])}, batch_size=[1]))


def mean(total: float, weight: float = 1.0) -> Mean:
    return Mean(torch.tensor(total), torch.tensor(weight))


def names(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir() if path.name not in (".lock", "report.html"))


class Controller(NamedTuple):
    mean: float
    seen: torch.Tensor


@attrs.frozen
class Resumable:
    out: Path
    steps: int = 7
    checkpoints: Checkpoints = Checkpoints(every=3)
    lr: float = 0.5


def drawn(index: int) -> Batch:
    return Batch({"rewards": torch.rand(2) + index}, batch_size=[2])


def walk(cfg: Resumable, at: Callable[[str, int], None] = lambda place, step: None) -> tuple[float, Controller]:
    """A program with a warm-up, evaluations within both loops, samples, and randomness of all kinds.

    Args:
        cfg: its configuration.
        at: is told of each place that the program passes.
    """
    total, kl = 0.0, Controller(0.0, torch.zeros(1, dtype=torch.float64))

    def evaluate(entered: Run, step: int, where: str) -> dict[str, Mean]:
        for j, batch in entered.steps(batches(), 2, name="eval"):
            entered.log(j, {"loss": mean(float(batch["rewards"]) + step)})
            at(f"{where} eval", step)
        return {"eval/loss": mean((step - 4.0) ** 2)}

    with run(cfg) as entered:
        at("entered", 0)
        total, stream = entered.restore("warmup", total=total, stream=counting(drawn))
        for i, batch in entered.steps(stream, 4, name="warmup"):
            total += float(batch["rewards"].sum())
            evaluate(entered, i, "warmup")
            entered.log(i, {"loss": mean(total)}, samples={"text": "warm"})
            at("warmup logged", i)
            entered.save(i, total=total, stream=stream)
            at("warmup saved", i)
        at("between", 0)
        total, kl, stream = entered.restore(total=total, kl=kl, stream=ahead(counting(drawn), 2))
        for i, batch in entered.steps(stream):
            at("pulled", i)
            noise = random.random() + float(np.random.normal()) + float(torch.rand(1))
            total += float(batch["rewards"].sum()) + noise
            kl = Controller(kl.mean + noise, kl.seen + total)
            metrics = evaluate(entered, i, "train") if i % 2 else {}
            entered.log(i, {"loss": mean(total), **metrics}, samples={"text": f"{i}"})
            at("logged", i)
            entered.save(i, total=total, kl=kl, stream=stream)
            at("saved", i)
    return total, kl
