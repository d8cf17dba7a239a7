"""The plan of a micro-batch: the tokens that go through the model for the outputs that are read.

A language model predicts a token from the hidden state before it, and a critic reads its value there, too. A reward
model reads the last token of a row.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nrl.algos import LogitsOutput, ids_column, output_kind
from nrl.backends.models.moe_routers import Routers
from nrl.backends.training.router_replay import select_routes
from nrl.batch import Batch, lengths
from nrl.batch.columns import kind_of
from nrl.batch.packed_rows import Packing, Rectangles, Sequences
from nrl.batch.packing import pack
from nrl.errors import BatchError

__all__ = [
    "LOGITS_BYTES",
    "Outputs",
    "Plan",
    "check_room",
    "columns_at",
    "find_skipped",
    "last_mask",
    "output_mask",
    "plan",
    "predicted_mask",
    "read_mask",
]


class Outputs(NamedTuple):
    """Outputs at tokens of a batch, or for rows of a batch.

    Args:
        values: ``[n, ...]`` each, on the device, by name.
        source: ``[n]`` int64, on the device: the token of the flattened batch that each value is for, or the row.
        shape: of the outputs of the whole batch, ``(*b, T)``, or ``(*b)`` for rows.
        around: the context of a backward pass, which may compute layers again.

    >>> out = Outputs({"logprobs": torch.tensor([-2.0])}, torch.tensor([1]), torch.Size([1, 3]))
    >>> out.scatter(out.values["logprobs"])
    tensor([[ 0., -2.,  0.]])
    """

    values: dict[str, Tensor]
    source: Tensor
    shape: torch.Size
    around: Callable[[], AbstractContextManager[Any]] = nullcontext

    def scatter(self, values: Tensor) -> Tensor:
        """Return values in the shape of the batch, with zeros elsewhere."""
        full = values.new_zeros(self.shape.numel(), *values.shape[1:]).index_copy(0, self.source, values)
        return full.view(*self.shape, *values.shape[1:])

    def backward(self, gradients: Mapping[str, Tensor] | None) -> None:
        """Backpropagate gradients for the scattered values into the parameters; None: zeros."""
        if gradients is None:
            gradients = {key: self.scatter(torch.zeros_like(x)) for key, x in self.values.items()}
        depth = len(self.shape)
        parts = [(x, gradients[key].flatten(0, depth - 1)[self.source]) for key, x in self.values.items()]
        parts = [(x, gradient) for x, gradient in parts if x.requires_grad]
        with self.around():
            torch.autograd.backward([x for x, _ in parts], [gradient for _, gradient in parts])


def predicted_mask(batch: Batch) -> Tensor:
    """Return ``[*b, T]`` bool: the tokens with another token before them in their row.

    >>> predicted_mask(Batch({"input_ids": torch.tensor([[5, 6, 7]])}, batch_size=[1]))
    tensor([[False,  True,  True]])
    """
    column = torch.arange(batch["input_ids"].shape[-1])
    return (column > 0) & (column < lengths(batch).unsqueeze(-1))


def last_mask(batch: Batch) -> Tensor:
    """Return ``[*b, T]`` bool: the last token of each row that has one.

    >>> last_mask(Batch({"input_ids": torch.tensor([[5, 6, 7]])}, batch_size=[1]))
    tensor([[False, False,  True]])
    """
    return torch.arange(batch["input_ids"].shape[-1]) == lengths(batch).unsqueeze(-1) - 1


def output_mask(batch: Batch, head: str) -> Tensor:
    """Return ``[*b, T]`` bool: the tokens that a head has outputs for, by its name in `nrl.backends.Model`."""
    return last_mask(batch) if head == "reward" else predicted_mask(batch)


def read_mask(batch: Batch, head: str, everywhere: bool) -> Tensor:
    """Return ``[*b, T]`` bool: the tokens of `output_mask` that a loss reads: all, or those of ``loss_mask``."""
    outputs = output_mask(batch, head)
    return (
        outputs if everywhere or head == "reward" or "loss_mask" not in batch.keys() else outputs & batch["loss_mask"]
    )


def find_skipped(batch: Batch, computed: Tensor, head: str) -> Tensor:
    """Return ``[k]`` int64, the indices of the flattened outputs that are not computed.

    >>> batch = Batch({"input_ids": torch.tensor([[5, 6, 7]])}, batch_size=[1])
    >>> find_skipped(batch, torch.tensor([[False, True, False]]), "lm")
    tensor([2])
    """
    return torch.nonzero((output_mask(batch, head) & ~computed).flatten())[:, 0]


class Plan(NamedTuple):
    """The tokens that go through the model, and the outputs to compute; made on the CPU before the forward.

    Args:
        inputs: of the body of the model, on the CPU.
        rows: of packed tokens; None: tokens are padded.
        places: ``[n]`` int64, the tokens of the flattened inputs whose hidden states are read; None: no forward.
        targets: ``[n]`` or ``[n, k]`` int64, for each column of ids whose log-probabilities are wanted.
        columns: ``[n, ...]``, what functions of logits read, by column.
        temperature: ``[n]``, or None.
        source: ``[n]`` int64, as in `Outputs`.
        shape: as in `Outputs`.
        routes: ``[n, layers, k]`` int16, the experts of each token of the flattened inputs; None: routers choose.
        computed: how many tokens of the batch are among the inputs; padding is not counted.
        saved: how many more these stand for, because rows have them in common.
    """

    inputs: dict[str, Tensor]
    rows: Rectangles | Sequences | None
    places: Tensor | None
    targets: Mapping[str, Tensor]
    columns: Mapping[str, Tensor]
    temperature: Tensor | None
    source: Tensor
    shape: torch.Size
    routes: Tensor | None = None
    computed: int = 0
    saved: int = 0

    @property
    def reads(self) -> Tensor:
        """``[n]`` int64, how many outputs are read at each token of the flattened inputs."""
        places = self.source.new_zeros(0) if self.places is None else self.places
        return torch.bincount(places, minlength=self.inputs["input_ids"].numel())


def plan(
    batch: Batch,
    wanted: Tensor,
    packing: Packing | None,
    *,
    words: int,
    needs: Collection[str] = ("logprobs",),
    always: bool = False,
    routers: Routers | None = None,
) -> Plan:
    """Plan the forward for the ``wanted`` tokens of a batch.

    The token at t is predicted from the hidden state at t - 1, which sees no token after it. So each row goes through
    the model up to the last token that predicts a wanted one, and rows without any do not. Rewards are read at the
    wanted token itself.

    Args:
        batch: on the CPU, where all indices are computed.
        wanted: ``[*b, T]`` bool, within `predicted_mask`; for rewards, within `last_mask`.
        packing: the flat layout of the tokens; None: rows are padded, for the model's own forward.
        words: how many tokens the model knows.
        needs: the names of the outputs.
        always: send a token through the model even if no output is wanted, to make the collectives of any other
            micro-batch. The token has no outputs, and its gradient is exactly 0.
        routers: replay the column ``routes``, if the batch has one; None: the trainer cannot.

    Raises:
        BatchError: a token outside the vocabulary, an impossible route, or too many logits.

    >>> batch = Batch({"input_ids": torch.tensor([[5, 6, 7]])}, batch_size=[1])
    >>> planned = plan(batch, torch.tensor([[False, True, False]]), Rectangles, words=8)
    >>> planned.inputs["input_ids"], planned.targets
    (tensor([[5]]), {'input_ids': tensor([6])})
    """
    ids = batch["input_ids"]
    if "logits" in needs:
        check_room("logits of a micro-batch", ids.numel(), words, "give the trainer a smaller max_tokens=")
    of_rows = "rewards" in needs
    before = 0 if of_rows else 1  # how many tokens before a wanted one its hidden state lies
    ends = (wanted * torch.arange(1 - before, 1 - before + ids.shape[-1])).amax(-1)
    source = torch.nonzero(wanted.flatten())[:, 0]
    laid = _lay_out(batch, packing, ends, source - before, always)
    _check_known("input_ids", laid.inputs["input_ids"], words)
    routes = select_routes(batch, laid.tokens, laid.read, routers)
    columns = [ids_column(need) for need in sorted(needs) if output_kind(need) == "logprobs_at"]
    targets = {}
    for name in ["input_ids", *columns]:
        targets[name] = batch[name].flatten(0, ids.ndim - 1)[source]
        _check_known(name, targets[name], words)
    temperature = None
    if "temperature" in batch.keys() and not of_rows:
        temperatures = batch["temperature"].flatten()[source // ids.shape[-1]]
        temperature = torch.where(temperatures == 0, 1.0, temperatures)
    return Plan(
        inputs=laid.inputs,
        rows=laid.rows,
        places=laid.places,
        targets=targets,
        columns=columns_at(batch, needs, source),
        temperature=temperature,
        source=source // ids.shape[-1] if of_rows else source,
        shape=ids.shape[:-1] if of_rows else ids.shape,
        routes=routes,
        computed=laid.computed,
        saved=laid.saved,
    )


def columns_at(batch: Batch, needs: Collection[str], source: Tensor) -> dict[str, Tensor]:
    """Return the columns ``[n, ...]`` that functions of logits read, at tokens of the flattened batch.

    Args:
        batch: has the columns, per token or per row.
        needs: names of outputs, functions of logits among them.
        source: ``[n]`` int64.

    Raises:
        BatchError: a column is ragged.
    """
    columns, width = {}, batch["input_ids"].shape[-1]
    for name in {column for need in needs if isinstance(need, LogitsOutput) for column in need.columns}:
        value = batch[name]
        kind = kind_of(name, value, batch.ndim, width, "from_logits")
        if kind == "ragged":
            raise BatchError(f"from_logits: the column '{name}' is ragged; give columns per token or per row")
        per_token = kind == "token"
        rows = value.flatten(0, batch.ndim) if per_token else value.flatten(0, batch.ndim - 1)
        columns[name] = rows[source if per_token else source // width]
    return columns


LOGITS_BYTES = 8 * 2**30
"""The most bytes that the logits of a micro-batch, or of a forward, may take in float32; a step holds several such."""


def check_room(subject: str, tokens: int, words: int, remedy: str) -> None:
    """Check that logits of all tokens are not more than a device holds.

    Args:
        subject: the logits, in the error.
        tokens: their number, with padding.
        words: of the model.
        remedy: how to have fewer tokens.

    Raises:
        BatchError: they are more than `LOGITS_BYTES`.

    >>> check_room("logits", 1024, 151_936, "give fewer rows")
    """
    size = 4 * tokens * words
    if size > LOGITS_BYTES:
        raise BatchError(
            f"{subject}: {tokens:,} tokens by {words:,} words take {size / 2**30:.1f} GiB, and at most "
            f"{LOGITS_BYTES / 2**30:g} GiB are computed; {remedy}, or compute the numbers that are needed chunk by "
            "chunk: @needs(nrl.algos.from_logits(fn))"
        )


def _check_known(column: str, tokens: Tensor, words: int) -> None:
    unknown = tokens[(tokens < 0) | (tokens >= words)]
    if len(unknown):
        raise BatchError(
            f"forward: {column} has the token {int(unknown[0])}, and the model knows those from 0 to {words - 1}; "
            "encode with the model's own tokenizer"
        )


class _TokenLayout(NamedTuple):
    """Inputs of the model, and the layout of their tokens.

    ``places`` are the indices of the wanted tokens among the inputs, ``tokens`` says which token of the batch each
    input is, and ``read`` whether anything depends on it. ``computed`` counts the tokens without padding, ``saved``
    the tokens that rows have in common with these.
    """

    inputs: dict[str, Tensor]
    rows: Rectangles | Sequences | None
    places: Tensor | None
    tokens: Tensor
    read: Tensor
    computed: int = 0
    saved: int = 0


_ONE = torch.zeros(1, dtype=torch.int64)
"""The token of a forward that has no outputs, which may be any."""


def _lay_out(batch: Batch, packing: Packing | None, ends: Tensor, places: Tensor, always: bool) -> _TokenLayout:
    """Lay out rows up to their ends, and find ``places``, which are of the flattened batch, among the inputs."""
    if packing is None:
        return _lay_out_padded(batch, ends, places, always)
    tokens = pack(batch, packing=packing, ends=ends, share=None)
    indices: Tensor | None = tokens.place[places]
    source, rows = tokens.source, tokens.rows
    read = rows.real if isinstance(rows, Rectangles) else torch.ones_like(source, dtype=torch.bool)
    computed = int(read.sum())
    if len(source) == 0:
        single = Batch({"input_ids": _ONE[None]}, batch_size=[1])
        tokens, indices = pack(single, packing=packing), indices if always else None
        source, read = _ONE, _ONE.bool()
    inputs = {"input_ids": tokens.input_ids[None], "position_ids": tokens.position_ids[None]}
    return _TokenLayout(inputs, tokens.rows, indices, source, read, computed, int(ends.sum()) - computed)


def _lay_out_padded(batch: Batch, ends: Tensor, places: Tensor, always: bool) -> _TokenLayout:
    """Lay out padded rows, without rows that have no wanted token."""
    ids = batch["input_ids"].flatten(0, -2)
    width, sizes = ids.shape[-1], lengths(batch).flatten()
    rows = torch.nonzero(ends.flatten())[:, 0]  # a row without any token has no softmax
    if len(rows) == 0:
        single = {"input_ids": _ONE[None], "attention_mask": _ONE[None] + 1}
        return _TokenLayout(single, None, places if always else None, _ONE, _ONE.bool())
    column = torch.arange(width)
    mask = column < sizes[rows, None]
    row_index = torch.zeros(len(ids), dtype=torch.int64)
    row_index[rows] = torch.arange(len(rows))
    indices = row_index[places // width] * width + places % width
    tokens, read = (rows[:, None] * width + column).flatten(), (column < ends.flatten()[rows, None]).flatten()
    inputs = {"input_ids": ids[rows], "attention_mask": mask.long()}
    return _TokenLayout(inputs, None, indices, tokens, read, int(mask.sum()))
