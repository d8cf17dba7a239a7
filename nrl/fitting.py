"""The plain loop over a loss that many runs begin with, and some are all of."""

from nrl.algos import Loss
from nrl.backends.base import Trainer, TrainState
from nrl.batch import Batch
from nrl.runs import Run
from nrl.stream import Stream

__all__ = ["fit"]


def fit(run: Run, name: str, trainer: Trainer, loss: Loss, stream: Stream[Batch], steps: int) -> TrainState:
    """Train on batches as they come, as a loop of a run: restored, logged and saved.

    Args:
        run: from `nrl.run`.
        name: of the loop; its metrics are in ``<name>.jsonl``.
        trainer: whose fresh train state it begins with.
        loss: what it minimises.
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
