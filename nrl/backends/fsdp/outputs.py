"""What a model says about some tokens of a batch, and nothing else: no other token is computed than these need."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nrl.backends import models
from nrl.backends.fsdp.attention import Layout
from nrl.backends.fsdp.linear_logprobs import linear_logprobs
from nrl.batch import Batch, lengths
from nrl.pack import pack

__all__ = ["Outputs", "compute", "predicted"]


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

    def backward(self, gradients: Mapping[str, Tensor]) -> None:
        """Add to the parameters' gradients what follows from those of the spread values."""
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


def compute(module: Any, batch: Batch, wanted: Tensor, needs: frozenset[str], packed: bool) -> Outputs:
    """Outputs at the ``wanted`` tokens of a batch.

    The token at t is predicted from the hidden state at t - 1, which sees no token after it. So each row goes through
    the model up to the last token that predicts a wanted one, and rows without any do not.

    Args:
        module: a Hugging Face causal language model; ``packed``: with the attention of `nrl.backends.fsdp.attention`.
        batch: on the CPU, where all indices are computed.
        wanted: ``[*b, T]`` bool, within `predicted`.
        needs: outputs besides ``logprobs``.
        packed: lay the tokens out flat; otherwise use the model's own padded forward.
    """
    ids, device = batch["input_ids"], module.device
    ends = (wanted * torch.arange(ids.shape[-1])).amax(-1)
    source = torch.nonzero(wanted.flatten())[:, 0]
    hidden = (_packed if packed else _padded)(module, batch, ends, source - 1)
    weight, bias = models.head_weight(module)
    temperature = None
    if "temperature" in batch.keys():
        each = batch["temperature"].flatten()[source // ids.shape[-1]]
        temperature = torch.where(each == 0, 1.0, each).to(device)
    logprobs, entropy = linear_logprobs(
        hidden,
        weight.to(hidden.dtype),
        ids.flatten()[source].to(device),
        temperature=temperature,
        bias=None if bias is None else bias.to(hidden.dtype),
        entropy="entropy" in needs,
    )
    values = {"logprobs": logprobs} | ({} if entropy is None else {"entropy": entropy})
    return Outputs(values, source.to(device), ids.shape)


def _packed(module: Any, batch: Batch, ends: Tensor, places: Tensor) -> Tensor:
    """Hidden states of the tokens at ``places`` of the flattened batch."""
    tokens = pack(batch, ends=ends, share=None)
    if len(tokens.input_ids) == 0:
        return _nothing(module)
    hidden: Tensor = module.base_model(
        input_ids=tokens.input_ids[None].to(module.device),
        position_ids=tokens.position_ids[None].to(module.device),
        use_cache=False,
        nrl_blocks=Layout(tokens.blocks, module.device),
    ).last_hidden_state[0]
    return hidden.index_select(0, tokens.place[places].to(module.device))


def _padded(module: Any, batch: Batch, ends: Tensor, places: Tensor) -> Tensor:
    """The same by the model's stock padded forward."""
    ids = batch["input_ids"].flatten(0, -2)
    width, sizes = ids.shape[-1], lengths(batch).flatten()
    rows = torch.nonzero(ends.flatten())[:, 0]  # a row without any token has no softmax
    if len(rows) == 0:
        return _nothing(module)
    mask = torch.arange(width) < sizes[rows, None]
    hidden: Tensor = module.base_model(
        input_ids=ids[rows].to(module.device), attention_mask=mask.long().to(module.device), use_cache=False
    ).last_hidden_state
    place = torch.zeros(len(ids), dtype=torch.int64)
    place[rows] = torch.arange(len(rows))
    at = place[places // width] * width + places % width
    return hidden.flatten(0, 1).index_select(0, at.to(module.device))


def _nothing(module: Any) -> Tensor:
    weight, _ = models.head_weight(module)
    return weight[:0]
