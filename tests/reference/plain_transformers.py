"""The gradient of a loss by plain transformers: one row at a time, without padding, packing or micro-batches."""

from collections.abc import Mapping

import torch
from tensordict import TensorDict
from torch import Tensor

from nrl.algos import Loss, ids_column, needed, output_kind, output_shape
from nrl.backends.models import weight_layout
from nrl.backends.models.shards import full_shards
from nrl.backends.training.loss.loss_terms import terms_of
from nrl.batch import Batch, lengths

__all__ = ["gradients", "outputs", "tensors_in_files"]


def outputs(module: torch.nn.Module, head: str, batch: Batch, needs: frozenset[str]) -> dict[str, Tensor]:
    """What a loss reads: of each token from the second on, or of a row, by the definition of each output."""
    ids, width = batch["input_ids"].flatten(0, -2), batch["input_ids"].shape[-1]
    dtype = next(module.parameters()).dtype
    found: dict[str, list[Tensor]] = {name: [] for name in needs}
    for row, length in enumerate(lengths(batch).flatten().tolist()):
        hidden = None
        if length:
            inputs = ids[row : row + 1, :length]
            hidden = module.base_model(input_ids=inputs, use_cache=False).last_hidden_state[0]  # type: ignore[operator]
        for name in needs:
            shape = output_shape(name, batch)[len(batch.batch_size) :]
            value = torch.zeros(shape, dtype=dtype)
            if hidden is not None and output_kind(name) == "rewards":
                value = module.score(hidden[-1])[0]  # type: ignore[operator]
            elif hidden is not None and length > 1:
                of_tokens = _of_tokens(module, head, hidden, batch, row, name)
                value = torch.cat([value[:1], of_tokens, value[length:width]])
            found[name].append(value)
    return {name: torch.stack(rows).view(output_shape(name, batch)) for name, rows in found.items()}


def _of_tokens(module: torch.nn.Module, head: str, hidden: Tensor, batch: Batch, row: int, name: str) -> Tensor:
    """An output at the tokens from the second on, from the hidden states before them."""
    length, depth = len(hidden), len(batch.batch_size)
    if head == "value":
        values: Tensor = module.score(hidden[:-1])[:, 0]  # type: ignore[operator]
        return values
    logits = module.lm_head(hidden[:-1])  # type: ignore[operator]
    if "temperature" in batch.keys():
        temperature = float(batch["temperature"].flatten()[row])
        logits = logits / (temperature or 1.0)
    logprobs = logits.log_softmax(-1)
    if output_kind(name) == "entropy":
        entropy: Tensor = -(logprobs.exp() * logprobs).sum(-1)
        return entropy
    column = "input_ids" if name == "logprobs" else ids_column(name)
    targets = batch[column].flatten(0, depth - 1)[row, 1:length]
    wanted: Tensor = logprobs.gather(-1, targets.reshape(length - 1, -1))
    return wanted.view(targets.shape)


def gradients(module: torch.nn.Module, head: str, loss: Loss, batch: Batch) -> tuple[float, dict[str, Tensor]]:
    """The loss, and its gradient for each weight by its name in files; a weight that it does not reach has zeros."""
    own = {"lm": "logprobs", "value": "values", "reward": "rewards"}[head]
    out = outputs(module, head, batch, needed(loss) | {own})
    terms, _ = terms_of("loss", loss(TensorDict(out, batch_size=batch.batch_size), batch))
    total = torch.stack([term.total / term.weight for term in terms.values()]).sum()
    module.zero_grad()
    total.backward()
    grads = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in module.named_parameters()
    }
    return float(total.detach()), tensors_in_files(module, grads)


def tensors_in_files(module: torch.nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that are shaped like a model's weights, under the names and in the shapes of its files."""
    return {
        name: piece.tensor
        for name, piece in weight_layout.map_to_files(full_shards(tensors), weight_layout.find_parts(module)).items()
    }
