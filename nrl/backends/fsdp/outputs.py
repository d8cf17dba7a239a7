"""What a model says about some tokens of a batch, and nothing else: no other token is computed than these need."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nrl.backends import models
from nrl.backends.fsdp.attention import Layout
from nrl.backends.fsdp.linear_logprobs import linear_logprobs
from nrl.batch import Batch, lengths
from nrl.errors import BatchError
from nrl.pack import Block, pack

__all__ = ["Outputs", "Plan", "compute", "plan", "predicted"]


class Outputs(NamedTuple):
    """Outputs at some tokens of a batch.

    Args:
        values: ``[n]`` each, on the device, by name.
        source: ``[n]`` int64, on the device, which tokens of the flattened batch they are for.
        shape: of the batch, ``(*b, T)``.

    >>> out = Outputs({"logprobs": torch.tensor([-2.0])}, torch.tensor([1]), torch.Size([1, 3]))
    >>> out.spread(out.values["logprobs"])
    tensor([[ 0., -2.,  0.]])
    """

    values: dict[str, Tensor]
    source: Tensor
    shape: torch.Size

    def spread(self, values: Tensor) -> Tensor:
        """In the shape of the batch, with zeros elsewhere."""
        return values.new_zeros(self.shape.numel()).index_copy(0, self.source, values).view(self.shape)

    def backward(self, gradients: Mapping[str, Tensor] | None) -> None:
        """Add to the parameters' gradients what follows from those of the spread values; None: zeros."""
        if gradients is None:
            gradients = {key: x.new_zeros(self.shape) for key, x in self.values.items()}
        parts = [(x, gradients[key].flatten().index_select(0, self.source)) for key, x in self.values.items()]
        parts = [(x, gradient) for x, gradient in parts if x.requires_grad]
        torch.autograd.backward([x for x, _ in parts], [gradient for _, gradient in parts])


def predicted(batch: Batch) -> Tensor:
    """``[*b, T]`` bool: the tokens that another one comes before in their row.

    >>> predicted(Batch({"input_ids": torch.tensor([[5, 6, 7]])}, batch_size=[1]))
    tensor([[False,  True,  True]])
    """
    column = torch.arange(batch["input_ids"].shape[-1])
    return (column > 0) & (column < lengths(batch).unsqueeze(-1))


class Plan(NamedTuple):
    """Which tokens go through the model, and which of them come out; made on the CPU before anything is computed.

    Args:
        inputs: what the body of the model is called with, on the CPU.
        blocks: how packed tokens lie; None: the rows are padded.
        places: ``[n]`` int64, the tokens of the flattened inputs whose hidden states predict; None: no forward.
        targets: ``[n]`` int64, what they predict.
        temperature: ``[n]``, or None.
        source: ``[n]`` int64, which tokens of the flattened batch they are for.
        shape: of the batch, ``(*b, T)``.
    """

    inputs: dict[str, Tensor]
    blocks: Sequence[Block] | None
    places: Tensor | None
    targets: Tensor
    temperature: Tensor | None
    source: Tensor
    shape: torch.Size


def plan(batch: Batch, wanted: Tensor, packed: bool, *, words: int, always: bool = False) -> Plan:
    """Find what to compute for the ``wanted`` tokens of a batch.

    The token at t is predicted from the hidden state at t - 1, which sees no token after it. So each row goes through
    the model up to the last token that predicts a wanted one, and rows without any do not.

    Args:
        batch: on the CPU, where all indices are computed.
        wanted: ``[*b, T]`` bool, within `predicted`.
        packed: lay the tokens out flat; otherwise use the model's own padded forward.
        words: how many tokens the model knows.
        always: send a token through the model even where none is wanted: its outputs are none and its gradient is
            exactly 0, but its collectives are those of any other micro-batch.

    Raises:
        BatchError: a token that the model does not know.

    >>> batch = Batch({"input_ids": torch.tensor([[5, 6, 7]])}, batch_size=[1])
    >>> found = plan(batch, torch.tensor([[False, True, False]]), True, words=8)
    >>> found.inputs["input_ids"], found.targets
    (tensor([[5]]), tensor([6]))
    """
    ids = batch["input_ids"]
    ends = (wanted * torch.arange(ids.shape[-1])).amax(-1)
    source = torch.nonzero(wanted.flatten())[:, 0]
    inputs, blocks, places = (_packed if packed else _padded)(batch, ends, source - 1, always)
    targets = ids.flatten()[source]
    tokens = torch.cat([inputs["input_ids"].flatten(), targets])
    unknown = tokens[(tokens < 0) | (tokens >= words)]
    if len(unknown):
        raise BatchError(
            f"forward: input_ids has the token {int(unknown[0])}, and the model knows those from 0 to {words - 1}; "
            "encode with the model's own tokenizer"
        )
    temperature = None
    if "temperature" in batch.keys():
        each = batch["temperature"].flatten()[source // ids.shape[-1]]
        temperature = torch.where(each == 0, 1.0, each)
    return Plan(inputs, blocks, places, targets, temperature, source, ids.shape)


def compute(module: Any, work: Plan, needs: frozenset[str]) -> Outputs:
    """Outputs at the wanted tokens.

    Args:
        module: a Hugging Face causal language model; for packed tokens with the attention of
            `nrl.backends.fsdp.attention`.
        work: from `plan`.
        needs: outputs besides ``logprobs``.
    """
    device = module.device
    weight, bias = models.head_weight(module)
    hidden = weight[:0]
    if work.places is not None:
        inputs: dict[str, Any] = {name: x.to(device) for name, x in work.inputs.items()}
        if work.blocks is not None:
            inputs["nrl_blocks"] = Layout(work.blocks, device)
        states = module.base_model(use_cache=False, **inputs).last_hidden_state
        hidden = states.flatten(0, 1).index_select(0, work.places.to(device))
    logprobs, entropy = linear_logprobs(
        hidden,
        weight.to(hidden.dtype),
        work.targets.to(device),
        temperature=None if work.temperature is None else work.temperature.to(device),
        bias=None if bias is None else bias.to(hidden.dtype),
        entropy="entropy" in needs,
    )
    values = {"logprobs": logprobs} | ({} if entropy is None else {"entropy": entropy})
    return Outputs(values, work.source.to(device), work.shape)


type _Inputs = tuple[dict[str, Tensor], Sequence[Block] | None, Tensor | None]


def _packed(batch: Batch, ends: Tensor, places: Tensor, always: bool) -> _Inputs:
    """Rows laid out flat; ``places`` are of the flattened batch."""
    tokens = pack(batch, ends=ends, share=None)
    if len(tokens.input_ids) == 0:
        one = torch.zeros(1, 1, dtype=torch.int64)
        return {"input_ids": one, "position_ids": one}, (Block(1, 1),), places if always else None
    inputs = {"input_ids": tokens.input_ids[None], "position_ids": tokens.position_ids[None]}
    return inputs, tokens.blocks, tokens.place[places]


def _padded(batch: Batch, ends: Tensor, places: Tensor, always: bool) -> _Inputs:
    """Rows as they are."""
    ids = batch["input_ids"].flatten(0, -2)
    width, sizes = ids.shape[-1], lengths(batch).flatten()
    rows = torch.nonzero(ends.flatten())[:, 0]  # a row without any token has no softmax
    if len(rows) == 0:
        one = torch.zeros(1, 1, dtype=torch.int64)
        return {"input_ids": one, "attention_mask": one + 1}, None, places if always else None
    mask = torch.arange(width) < sizes[rows, None]
    place = torch.zeros(len(ids), dtype=torch.int64)
    place[rows] = torch.arange(len(rows))
    at = place[places // width] * width + places % width
    return {"input_ids": ids[rows], "attention_mask": mask.long()}, None, at
