"""The contract of losses: their signature, the outputs that they need, what a row counts, and their sums.

A loss sees the outputs of a model, ``out["logprobs"]`` ``[*B, T]`` and others that it `needs`, but never the model.
Gradients flow through ``out`` alone, weights depend on the batch alone, and all sums run over rows. So no loss can see
how a batch was split.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from tensordict import TensorDict
from torch import Tensor

from nrl.algos._arguments import weighted
from nrl.batch import Batch, require
from nrl.errors import ArgumentError
from nrl.reduce import Mean, Metrics

__all__ = [
    "Loss",
    "MeanLoss",
    "add",
    "by_episode",
    "episode_shares",
    "ids_column",
    "logprobs_at",
    "name_of",
    "named",
    "needed",
    "needs",
    "output_kind",
    "output_shape",
]

_AT = "logprobs_at("


class Loss(Protocol):
    """A loss: a function of a model's outputs and a batch.

    Returns one `Mean`, or one for each term under its own key, and metrics. The loss is the sum of total / weight over
    the terms. Gradients flow only through ``out``; weights are functions of the batch alone.

    >>> from nrl.algos import token_mean
    >>> def my_loss(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
    ...     return token_mean(-batch["advantages"] * out["logprobs"], batch["loss_mask"]), {}
    >>> loss: Loss = my_loss
    """

    def __call__(self, out: TensorDict, batch: Batch, /) -> tuple[Mean | dict[str, Mean], Metrics]:
        """Evaluate the loss on outputs, ``[*B, T]`` or a number a row, and the rows that they belong to."""
        ...


type MeanLoss = Callable[[TensorDict, Batch], tuple[Mean, Metrics]]
"""A `Loss` of one term."""


def needs[F: Callable[..., Any]](*outputs: str) -> Callable[[F], F]:
    """Declare the outputs that a loss reads besides ``logprobs``; a backend computes them, or says that it cannot.

    Args:
        outputs: names, such as ``"entropy"`` or ``"values"``; `output_shape` has their shapes. They add to the outputs
            that the function needs already.

    Raises:
        TypeError: used without its brackets, as ``@needs``.

    >>> from nrl.algos import token_mean
    >>> @needs("entropy")
    ... def entropy_loss(out, batch):
    ...     return token_mean(out["entropy"], batch["loss_mask"]), {}
    >>> sorted(entropy_loss.needs)
    ['entropy']
    """
    if any(callable(output) for output in outputs):
        raise ArgumentError("needs: give the names of outputs and then decorate: @needs('entropy')")

    def decorate(fn: F) -> F:
        fn.__dict__["needs"] = needed(fn) | frozenset(outputs)
        return fn

    return decorate


def episode_shares(batch: Batch) -> Tensor:
    """The share that each row has of its episode, in trained tokens: the column, or what this batch says.

        share_i = |y_i| / Σ_j |y_j|,   over the rows j of the episode of row i

    Shares of an episode add up to 1, and a row that is an episode has 1. A training step computes the column over its
    whole batch, where an episode has several rows. So this is right in every part of it, and on any whole batch.

    Args:
        batch: ``[*B]``, has ``loss_mask`` and, where they are there, ``episode_shares`` or ``episode_ids``; without
            these a row is an episode.

    Returns:
        ``[*B]`` float64, a row without a trained token 0; or the column as it is.

    Raises:
        MissingColumn: the batch lacks ``loss_mask``.

    >>> mask = torch.tensor([[True, False, False], [True, True, True], [True, False, True]])
    >>> episode_shares(Batch({"loss_mask": mask, "episode_ids": torch.tensor([7, 7, 2])}, batch_size=[3])).tolist()
    [0.25, 0.75, 1.0]
    """
    if "episode_shares" in batch.keys():
        known: Tensor = batch["episode_shares"]
        return known
    require(batch, "loss_mask", reader="episode_shares")
    counts: Tensor = batch["loss_mask"].sum(-1)
    if "episode_ids" not in batch.keys():
        return (counts > 0).double()
    # Losses call this on a device, which no size that depends on numbers makes wait
    ids: Tensor = batch["episode_ids"].flatten()
    first = torch.searchsorted(ids.sort().values, ids)
    whole = torch.zeros_like(ids).index_add(0, first, counts.flatten())[first]
    return counts.double() / whole.view(counts.shape).clamp(min=1)


def by_episode[F: Callable[..., Any]](aggregate: F) -> F:
    """Declare that an aggregate counts episodes: losses call it as ``(x, mask, shares) -> Mean``.

    `seq_mean` and ``seq_sum(L)`` are declared. An aggregate of your own is called as ``(x, mask)`` without that. One
    that divides by the number of rows, or calls these, then counts each row of a fork; one that divides by the number
    of tokens needs no shares.

    Args:
        aggregate: takes the `episode_shares` ``[*B]`` as its third argument.

    >>> from nrl.algos import seq_mean
    >>> @by_episode
    ... def seq_square(x, mask, shares):
    ...     return seq_mean(x.square(), mask, shares)
    >>> columns = {"loss_mask": torch.ones(2, 1, dtype=torch.bool), "episode_ids": torch.tensor([5, 5])}
    >>> batch, x = Batch(columns, batch_size=[2]), torch.tensor([[1.0], [3.0]])
    >>> [part.item() for part in seq_square(x, batch["loss_mask"], episode_shares(batch))]
    [5.0, 1.0]
    """
    aggregate.__dict__["by_episode"] = True
    return aggregate


def logprobs_at(column: str) -> str:
    """The name of an output: log-probabilities of the tokens in a column of ids, at each place.

    Args:
        column: of the batch, ``[*B, T, k]`` int64; at t, tokens that may stand at t. The output has its shape.

    >>> logprobs_at("teacher_ids")
    'logprobs_at(teacher_ids)'
    """
    return f"{_AT}{column})"


def ids_column(output: str) -> str:
    """The column of ids of a `logprobs_at` output.

    >>> ids_column("logprobs_at(teacher_ids)")
    'teacher_ids'
    """
    return output.removeprefix(_AT).removesuffix(")")


def output_kind(output: str) -> str:
    """The kind of output that a name stands for; backends list the kinds that they provide.

    >>> output_kind("entropy"), output_kind("logprobs_at(teacher_ids)")
    ('entropy', 'logprobs_at')
    """
    return output.partition("(")[0]


def output_shape(output: str, batch: Batch) -> torch.Size:
    """The shape of an output for a batch.

        logprobs, entropy, values    [*B, T]
        rewards                      [*B]
        logprobs_at(column)          [*B, T, k], that of the column

    Args:
        output: its name.
        batch: has ``input_ids``, and the column.

    Raises:
        MissingColumn: the batch lacks the column.

    >>> batch = Batch({"input_ids": torch.ones(2, 5, dtype=torch.int64)}, batch_size=[2])
    >>> output_shape("entropy", batch), output_shape("rewards", batch)
    (torch.Size([2, 5]), torch.Size([2]))
    """
    if output == "rewards":
        return batch.batch_size
    column = "input_ids"
    if output.startswith(_AT):
        column = ids_column(output)
        require(batch, column, reader=output)
    shape: torch.Size = batch[column].shape
    return shape


def needed(*fns: Callable[..., Any] | None) -> frozenset[str]:
    """All outputs that functions need besides ``logprobs``; None, and functions without a declaration, need none.

    >>> sorted(needed(needs("entropy")(lambda out, batch: ...), needs("values")(lambda out, batch: ...), None))
    ['entropy', 'values']
    """
    parts = (fn.func if isinstance(fn, functools.partial) and not hasattr(fn, "needs") else fn for fn in fns)
    return frozenset().union(*(getattr(fn, "needs", frozenset()) for fn in parts))


def name_of(fn: Callable[..., Any]) -> str:
    """The name of a function in errors and metrics.

    >>> name_of(add), name_of(functools.partial(add))
    ('add', 'partial')
    """
    return getattr(fn, "__name__", type(fn).__name__)


def named[F: Callable[..., Any]](name: str, doc: str, fn: F) -> F:
    """Give a function made by another one a name, which errors and metrics use, and a docstring.

    >>> double = named("double", "Twice.", lambda x: 2 * x)
    >>> double.__name__, double.__doc__
    ('double', 'Twice.')
    """
    fn.__name__ = fn.__qualname__ = name
    fn.__doc__ = doc
    return fn


def add(*terms: tuple[float, Loss]) -> Loss:
    """A weighted sum of losses that keeps each term's own denominator.

        Σ_k c_k total_k / weight_k

    Losses name their terms; terms of a nested `add` keep their names. A name of a term or a metric that is taken gets
    the suffix ``_2``, ``_3``, ...

    Args:
        terms: pairs ``(coefficient, loss)``.

    Returns:
        A loss with one `Mean` a term, its total already times the coefficient. It needs the outputs of its terms.

    Raises:
        ValueError: there are no terms, or a coefficient is not finite.
        TypeError: a term is not such a pair.

    >>> import torch
    >>> from nrl.algos import sft_loss
    >>> batch = Batch({"loss_mask": torch.tensor([[False, True]])}, batch_size=[1])
    >>> out = TensorDict({"logprobs": torch.tensor([[0.0, -3.0]])}, batch_size=[1])
    >>> loss, _ = add((1.0, sft_loss), (0.5, sft_loss))(out, batch)
    >>> {key: term.total.item() for key, term in loss.items()}
    {'sft_loss': 3.0, 'sft_loss_2': 1.5}
    """
    weighted("add", "loss", terms)

    @needs(*needed(*(loss for _, loss in terms)))
    def total(out: TensorDict, batch: Batch) -> tuple[dict[str, Mean], Metrics]:
        means: dict[str, Mean] = {}
        metrics: Metrics = {}
        for coef, loss in terms:
            found, extra = loss(out, batch)
            for key, mean in ({name_of(loss): found} if isinstance(found, Mean) else found).items():
                means[_distinct(key, means)] = Mean(coef * mean.total, mean.weight)
            for key, metric in extra.items():
                metrics[_distinct(key, metrics)] = metric
        return means, metrics

    total.__name__ = f"add({', '.join(name_of(loss) for _, loss in terms)})"
    return total


def _distinct(key: str, taken: dict[str, Any]) -> str:
    names = itertools.chain([key], (f"{key}_{n}" for n in itertools.count(2)))
    return next(name for name in names if name not in taken)
