"""The contract of losses: their signature, the outputs that they need, what a row counts, and their sums.

A loss sees the outputs of a model, ``out["logprobs"]`` ``[*B, T]`` and others that it `needs`, but never the model.
Gradients flow through ``out`` alone, weights depend on the batch alone, and all sums run over rows. So no loss can see
how a batch was split.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import torch
from tensordict import TensorDict
from torch import Tensor

from nrl.algos._arguments import check_terms
from nrl.batch import Batch, require
from nrl.batch.metrics import Mean, Metrics
from nrl.errors import ArgumentError

__all__ = [
    "LogitsOutput",
    "Loss",
    "MeanLoss",
    "add",
    "by_episode",
    "episode_shares",
    "from_logits",
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
_WIDTH = {"logits": "V", "hidden_states": "H"}
"""Outputs whose last dimension is one of the model, and the letter that stands for its size."""


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
        """Evaluate the loss on outputs, ``[*B, T, ...]`` or a number a row, and the rows that they belong to."""
        ...


type MeanLoss = Callable[[TensorDict, Batch], tuple[Mean, Metrics]]
"""A `Loss` of one term."""


def needs[F: Callable[..., Any]](*outputs: str) -> Callable[[F], F]:
    """Declare the outputs that a loss reads besides ``logprobs``; a backend computes them, or says that it cannot.

    Args:
        outputs: names, such as ``"entropy"`` or ``"values"``; `output_shape` has their shapes. They add to the outputs
            that the function needs already. ``"logits"`` and ``"hidden_states"`` are large: `from_logits` computes
            a number a token from the logits without holding those of all tokens.

    Raises:
        TypeError: used without its brackets, as ``@needs``.
        ValueError: two functions of logits have one name.

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
        fn.__dict__["needs"] = _union(needed(fn), outputs)
        return fn

    return decorate


def _union(*groups: Iterable[str]) -> frozenset[str]:
    outputs: dict[str, str] = {}
    for output in itertools.chain(*groups):
        first = outputs.setdefault(output, output)
        if isinstance(output, LogitsOutput) and not output.is_same(first):
            raise ValueError(
                f"needs: '{output}' stands for two different functions of logits, columns or k; give one of them a "
                "name of its own: from_logits(fn, name='...')"
            )
    return frozenset(outputs)


def episode_shares(batch: Batch) -> Tensor:
    """The share that each row has of its episode, in trained tokens: the column, or what this batch says.

        share_i = |y_i| / Σ_j |y_j|,   over the rows j of the episode of row i

    Shares of an episode add up to 1, and a row that is an episode has 1. A training step computes the column over its
    whole batch, where an episode has several rows. So this is right in every part of it, and on any whole batch.

    Args:
        batch: ``[*B]``, has ``loss_mask`` and, if present, ``episode_shares`` or ``episode_ids``; without
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
        shares: Tensor = batch["episode_shares"]
        return shares
    require(batch, "loss_mask", reader="episode_shares")
    counts: Tensor = batch["loss_mask"].sum(-1)
    if "episode_ids" not in batch.keys():
        return (counts > 0).double()
    # Losses call this on a device, which no size that depends on numbers makes wait
    ids: Tensor = batch["episode_ids"].flatten()
    first = torch.searchsorted(ids.sort().values, ids)
    episode_counts = torch.zeros_like(ids).index_add(0, first, counts.flatten())[first]
    return counts.double() / episode_counts.view(counts.shape).clamp(min=1)


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


class LogitsOutput(str):
    """The name of an output that a function makes of each token's logits, with that function; see `from_logits`.

    >>> output = from_logits(lambda logits: logits.amax(-1), name="largest")
    >>> output == "from_logits(largest)", output.columns, output.k
    (True, (), None)
    """

    fn: Callable[..., Tensor]
    columns: tuple[str, ...]
    k: int | None

    def __new__(cls, name: str, fn: Callable[..., Tensor], columns: tuple[str, ...], k: int | None) -> "LogitsOutput":
        """Make the name."""
        output = super().__new__(cls, name)
        output.fn, output.columns, output.k = fn, columns, k
        return output

    def __reduce__(self) -> tuple[Any, ...]:
        return LogitsOutput, (str(self), self.fn, self.columns, self.k)

    def is_same(self, other: str) -> bool:
        """Return whether another output of this name computes the same."""
        return isinstance(other, LogitsOutput) and (self.fn, self.columns, self.k) == (other.fn, other.columns, other.k)


def from_logits(
    fn: Callable[..., Tensor], *columns: str, k: int | None = None, name: str | None = None
) -> LogitsOutput:
    """The name of an output: numbers that a function makes of the logits over the whole vocabulary, token by token.

    Nothing of the size ``[tokens, V]`` is ever held. A backend calls ``fn`` on the logits of some tokens at a time, and
    again in the backward, where it computes these logits anew. Use it for the logarithm of the normaliser (z-loss), for
    label smoothing, or for a divergence over the whole vocabulary.

    Args:
        fn: ``fn(logits, *columns) -> Tensor``, differentiable by autograd. It gets ``logits`` ``[N, V]`` in float32
            (float64 for a float64 model), under the row's temperature, of the N tokens of a chunk. Row n is the
            distribution from which token n was drawn, as in ``out["logits"]``. It returns ``[N]``, or ``[N, k]``.
            It treats each token alone, may not change its arguments, and is called several times: keep it pure.
        columns: of the batch, such as ``"input_ids"``. ``fn`` gets what they have for each of these tokens, ``[N,
            ...]``, of a column that is per row the entry of the token's row.
        k: how many numbers ``fn`` returns for each token. None: one, and the output is ``[*B, T]``.
        name: in the output's name. None: the name of ``fn``.

    Returns:
        The name, for `needs` and for ``out``: a string with the function inside.

    Raises:
        ArgumentError: ``fn`` is not callable, a column is not a name, or k is less than 1.

    >>> from nrl.algos import token_mean
    >>> def log_normalizer(logits):
    ...     return logits.logsumexp(-1)
    >>> log_z = from_logits(log_normalizer)
    >>> @needs(log_z)
    ... def z_loss(out, batch):
    ...     return token_mean(1e-4 * out[log_z].square(), batch["loss_mask"]), {}
    >>> sorted(z_loss.needs)
    ['from_logits(log_normalizer)']
    """
    if not callable(fn):
        raise ArgumentError(f"from_logits: fn is {fn!r}; give a function fn(logits, *columns) -> Tensor", "fn")
    if strange := [column for column in columns if not isinstance(column, str)]:
        message = f"from_logits: {strange[0]!r} is not the name of a column; give names, such as 'input_ids'"
        raise ArgumentError(message, "columns")
    if k is not None and k < 1:
        raise ArgumentError(f"from_logits: k is {k}; it must be at least 1, or None for one number a token", "k")
    return LogitsOutput(f"from_logits({name or name_of(fn)})", fn, columns, k)


def output_kind(output: str) -> str:
    """The kind of output that a name stands for; backends list the kinds that they provide.

    >>> output_kind("entropy"), output_kind("logprobs_at(teacher_ids)")
    ('entropy', 'logprobs_at')
    """
    return output.partition("(")[0]


def output_shape(output: str, batch: Batch, widths: Mapping[str, int] = MappingProxyType({})) -> torch.Size:
    """The shape of an output for a batch.

        logprobs, entropy, values    [*B, T]
        rewards                      [*B]
        logprobs_at(column)          [*B, T, k], that of the column
        logits                       [*B, T, V]
        hidden_states                [*B, T, H]
        from_logits(fn)              [*B, T], or [*B, T, k]

    As everywhere, position t describes token t: ``out["logits"][:, t]`` is the distribution from which token t was
    drawn, and ``out["hidden_states"][:, t]`` is the state from which the head predicts token t (or ``values[:, t]``),
    which is the state at token t - 1, after the final norm. Position 0 is zeros. Logits are under the row's
    temperature, as log-probabilities are: ``log_softmax`` of them, at token t, is ``out["logprobs"][:, t]``.

    Args:
        output: its name.
        batch: has ``input_ids``, and the column.
        widths: V by ``"logits"`` and H by ``"hidden_states"``, which are the model's.

    Raises:
        MissingColumn: the batch lacks the column.
        ValueError: ``widths`` lacks the one of this output.

    >>> batch = Batch({"input_ids": torch.ones(2, 5, dtype=torch.int64)}, batch_size=[2])
    >>> output_shape("entropy", batch), output_shape("rewards", batch)
    (torch.Size([2, 5]), torch.Size([2]))
    """
    if output == "rewards":
        return batch.batch_size
    column, last = "input_ids", tuple[int, ...]()
    if output.startswith(_AT):
        column = ids_column(output)
        require(batch, column, reader=output)
    elif isinstance(output, LogitsOutput):
        require(batch, *output.columns, reader=output)
        last = () if output.k is None else (output.k,)
    elif output in _WIDTH:
        if output not in widths:
            letter = _WIDTH[output]
            raise ValueError(f"output_shape: {letter} of {output} is the model's; give widths={{'{output}': {letter}}}")
        last = (widths[output],)
    return torch.Size((*batch[column].shape, *last))


def needed(*fns: Callable[..., Any] | None) -> frozenset[str]:
    """All outputs that functions need besides ``logprobs``; None, and functions without a declaration, need none.

    Raises:
        ValueError: two functions of logits have one name.

    >>> sorted(needed(needs("entropy")(lambda out, batch: ...), needs("values")(lambda out, batch: ...), None))
    ['entropy', 'values']
    """
    parts = (fn.func if isinstance(fn, functools.partial) and not hasattr(fn, "needs") else fn for fn in fns)
    return _union(*(getattr(fn, "needs", frozenset()) for fn in parts))


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
        ValueError: no terms are given, or a coefficient is not finite.
        TypeError: a term is not such a pair.

    >>> import torch
    >>> from nrl.algos import sft_loss
    >>> batch = Batch({"loss_mask": torch.tensor([[False, True]])}, batch_size=[1])
    >>> out = TensorDict({"logprobs": torch.tensor([[0.0, -3.0]])}, batch_size=[1])
    >>> loss, _ = add((1.0, sft_loss), (0.5, sft_loss))(out, batch)
    >>> {key: term.total.item() for key, term in loss.items()}
    {'sft_loss': 3.0, 'sft_loss_2': 1.5}
    """
    check_terms("add", "loss", terms)

    @needs(*needed(*(loss for _, loss in terms)))
    def total(out: TensorDict, batch: Batch) -> tuple[dict[str, Mean], Metrics]:
        means: dict[str, Mean] = {}
        metrics: Metrics = {}
        for coef, loss in terms:
            value, extra = loss(out, batch)
            for key, mean in ({name_of(loss): value} if isinstance(value, Mean) else value).items():
                means[_distinct(key, means)] = Mean(coef * mean.total, mean.weight)
            for key, metric in extra.items():
                metrics[_distinct(key, metrics)] = metric
        return means, metrics

    total.__name__ = f"add({', '.join(name_of(loss) for _, loss in terms)})"
    return total


def _distinct(key: str, taken: dict[str, Any]) -> str:
    names = itertools.chain([key], (f"{key}_{n}" for n in itertools.count(2)))
    return next(name for name in names if name not in taken)
