"""`fit`: the plain training loop over a loss; `minibatched`: several optimizer steps on one batch."""

import inspect
from typing import Any

from nrl.algos import Loss, name_of
from nrl.arguments import checked
from nrl.backends import Trainer, TrainState, TrainStep
from nrl.batch import Batch, assign, minibatches
from nrl.batch.metrics import Metrics, merge, without
from nrl.data.cursors import Stream
from nrl.errors import ArgumentError, ConfigError
from nrl.run import Run
from nrl.runtime import Future, done

__all__ = ["fit", "minibatched"]


@checked("fit")
def fit(run: Run, name: str, trainer: Trainer, loss: Loss, stream: Stream[Batch], steps: int) -> TrainState:
    """Train on the batches of a stream, as a loop of a run: restored, logged and saved.

    Args:
        run: from `nrl.run`.
        name: of the loop; its metrics are in ``<name>.jsonl``.
        trainer: the loop begins with its fresh train state.
        loss: to minimise.
        stream: of batches.
        steps: optimizer steps.

    Returns:
        The train state after the last one.

    >>> import attrs, tempfile
    >>> import nrl
    >>> from nrl import tiny
    >>> from nrl.algos import sft_loss
    >>> from nrl.backends import adamw, fsdp
    >>> @attrs.frozen
    ... class Config:
    ...     out: str = tempfile.mkdtemp()
    >>> with nrl.run(Config()) as entered, nrl.cluster("local") as here:
    ...     trainer = fsdp.trainer(here.reserve(1), tiny.model(), adamw(lr=1e-3))
    ...     fit(entered, "warmup", trainer, sft_loss, tiny.sums(4), steps=2).step
    warmup ...
    2
    done in ...
    """
    step = trainer.train_step(loss)
    state: TrainState
    state, stream = run.restore(name, policy=trainer, stream=stream)
    for i, batch in run.steps(stream, steps, name=name):
        state, metrics = step(state, batch)
        run.log(i, metrics)
        run.save(i, policy=state, stream=stream)
    return state


@checked("minibatched")
def minibatched(step: TrainStep, n: int, seed: int = 0) -> TrainStep:
    """Make a train step take ``n`` optimizer steps on a batch, each on a part of its rows.

    Statistics of the whole batch, such as advantages, are columns by then. The parts are `nrl.minibatches`, drawn by
    the seed and the number of earlier optimizer steps, so a resumed run draws the same ones.

    Args:
        step: from ``trainer.train_step(loss)``.
        n: at least 1; 1 returns ``step`` itself.
        seed: of the parts.

    Returns:
        ``(state, batch, **columns) -> (state, Future[Metrics])``. The metrics are merged over the parts; those under
        ``mismatch/`` are of the first part, which still has the sampler's weights.

    Raises:
        ConfigError: ``n`` is less than 1.
        BatchError: (when called) the batch has fewer rows than ``n``.

    >>> import nrl
    >>> from nrl import tiny
    >>> from nrl.algos import sft_loss
    >>> from nrl.backends import adamw, fsdp
    >>> with nrl.cluster("local") as here:
    ...     trainer = fsdp.trainer(here.reserve(1), tiny.model(), adamw(lr=1e-3))
    ...     state, metrics = minibatched(trainer.train_step(sft_loss), 4)(trainer.init(), tiny.sums(8).take(1)[0])
    >>> state.step
    4
    """
    if n < 1:
        raise ConfigError(f"minibatched: n is {n}; a batch is at least one part")
    if next(iter(inspect.signature(step).parameters), "") == "out":
        raise ArgumentError(f"minibatched: step is the loss {name_of(step)}; give trainer.train_step(loss)", "step")
    if n == 1:
        return step

    def steps(state: TrainState, batch: Batch, **columns: Any) -> tuple[TrainState, Future[Metrics]]:
        metrics_of_all: Metrics = {}
        for number, part in enumerate(minibatches(assign(batch, **columns), n, seed + state.step)):
            state, metrics = step(state, part)
            metrics_of_all = merge(
                metrics_of_all, without("mismatch/", metrics.result()) if number else metrics.result()
            )
        return state, done(metrics_of_all)

    return steps
