"""A loss as a measurement: forward only, on rows that are held out."""

from tensordict import TensorDict

from nrl.algos import Loss, name_of, needed
from nrl.arguments import checked
from nrl.backends.training.loss.loss_terms import LOGPROBS, terms_of
from nrl.backends.training.states import Params
from nrl.backends.training.trainer import Trainer
from nrl.batch import Batch
from nrl.batch.metrics import Metrics
from nrl.errors import MissingOutput

__all__ = ["evaluate"]


@checked("evaluate")
def evaluate(loss: Loss, trainer: Trainer, params: Params, batch: Batch) -> Metrics:
    """Compute a loss and its metrics on a batch, by the same function that trains.

    Args:
        loss: any that the trainer can train on.
        trainer: computes the outputs that the loss reads.
        params: from ``state.params``, or frozen ones.
        batch: with the columns that the loss reads; of any size, since the trainer makes micro-batches of it.

    Returns:
        The loss as ``eval/loss`` (``eval/loss/<term>`` where it has several terms) and its metrics as ``eval/<name>``,
        for ``run.log``.

    Raises:
        MissingOutput: the loss needs what the trainer does not provide.

    >>> import nrl
    >>> from nrl import data, tiny
    >>> from nrl.algos import sft_loss
    >>> from nrl.backends import adamw, fsdp
    >>> with nrl.cluster("local") as cluster:
    ...     trainer = fsdp.trainer(cluster.reserve(1), tiny.model(), adamw(lr=1e-3))
    ...     batch = data.supervised([{"prompt": "1+1=", "response": "2"}], tiny.tokenizer())
    ...     found = evaluate(sft_loss, trainer, trainer.load(), batch)
    >>> list(found), found["eval/loss"].weight.item()
    (['eval/loss'], 2.0)
    """
    name = name_of(loss)
    try:
        computed = trainer.forward(params, batch, needed(loss) | (trainer.provides & LOGPROBS))
    except MissingOutput as error:
        raise MissingOutput(f"evaluate({name}): {error}") from None
    out = TensorDict({key: x.result() for key, x in computed.items()}, batch_size=batch.batch_size)
    terms, metrics = terms_of(name, loss(out, batch))
    single = len(terms) == 1
    losses: Metrics = {"eval/loss" if single else f"eval/loss/{key}": term for key, term in terms.items()}
    return losses | {f"eval/{key}": value for key, value in metrics.items()}
