"""The value and gradient of a loss on one micro-batch, and whether it reads outputs that were not computed.

The head is the most expensive part of small models, and most losses read its outputs only where ``loss_mask`` is true.
A loss is any function, so a step finds that out: it calls the loss twice on the real outputs, with different numbers in
the places of outputs that were not computed. If terms, metrics and gradients are the same to the last bit, the loss
ignores these places; otherwise the engine computes all outputs.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from nrl.algos import Loss, mismatch_metrics
from nrl.backends.training.loss.loss_terms import check_terms, terms_of
from nrl.batch import Batch, forbid_writes
from nrl.batch.metrics import Mean, Metrics

__all__ = ["ValueAndGrad", "ignores", "value_and_grad"]


class ValueAndGrad(NamedTuple):
    """The value of a loss on some outputs, and its gradient.

    Args:
        loss: scalar, the sum over terms of ``total / weight``.
        terms: detached.
        metrics: detached; those of the loss, and `nrl.algos.mismatch_metrics` of the outputs.
        gradients: of ``loss``, for each output ``[*b, T, ...]``; zeros for an output that it does not read.
        differentiable: whether the loss depends on any output by differentiable operations.
    """

    loss: Tensor
    terms: dict[str, Mean]
    metrics: Metrics
    gradients: dict[str, Tensor]
    differentiable: bool


def value_and_grad(
    loss: Loss, name: str, outputs: Mapping[str, Tensor], batch: Batch, weights: Mapping[str, float]
) -> ValueAndGrad:
    """Call a loss, and differentiate it with respect to the outputs.

        sum over terms of total / weights[term]

    Args:
        loss: any.
        name: of the loss in errors.
        outputs: ``[*b, T, ...]`` each; taken as constants.
        batch: their rows.
        weights: of each term, over the whole batch.

    Raises:
        WeightError: its terms are not those of ``weights``.

    >>> from nrl.algos import sft_loss
    >>> batch = Batch({"loss_mask": torch.tensor([[False, True]])}, batch_size=[1])
    >>> found = value_and_grad(sft_loss, "sft", {"logprobs": torch.tensor([[0.0, -3.0]])}, batch, {"loss": 2.0})
    >>> found.loss, found.gradients["logprobs"]
    (tensor(1.5000), tensor([[-0.0000, -0.5000]]))
    """
    leaves = {key: value.detach().requires_grad_() for key, value in outputs.items()}
    with torch.enable_grad(), forbid_writes(batch, name):
        terms, metrics = terms_of(name, loss(TensorDict(leaves, batch_size=batch.batch_size), batch))
        check_terms(name, terms, weights)
        total = torch.stack([term.total / weights[key] for key, term in terms.items()]).sum()
    gradients: tuple[Tensor | None, ...] = (None,) * len(leaves)
    if total.requires_grad:
        gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return ValueAndGrad(
        total.detach(),
        {key: Mean(*(x.detach() for x in term)) for key, term in terms.items()},
        {key: type(value)(*(x.detach() for x in value)) for key, value in metrics.items()}
        | mismatch_metrics(outputs, batch),
        {
            key: torch.zeros_like(leaf) if grad is None else grad
            for (key, leaf), grad in zip(leaves.items(), gradients, strict=True)
        },
        total.requires_grad,
    )


def ignores(
    loss: Loss,
    name: str,
    outputs: Mapping[str, Tensor],
    batch: Batch,
    weights: Mapping[str, float],
    places: Tensor,
    first: ValueAndGrad,
) -> Tensor:
    """Return whether a loss ignores the outputs at given places. Nothing waits for the device.

    Args:
        loss: called a second time here.
        name: of the loss in errors.
        outputs: ``[*b, T, ...]`` each, with zeros at ``places``.
        batch: their rows.
        weights: of each term, over the whole batch.
        places: ``[k]`` int64, tokens of the flattened batch.
        first: of the first call, on ``outputs``.

    Returns:
        Scalar bool: with other numbers at these places, the value, terms, metrics and gradients are the same to the
        last bit, and the gradient there is 0.

    >>> from nrl.algos import sft_loss, token_mean
    >>> batch = Batch({"loss_mask": torch.tensor([[False, True]])}, batch_size=[1])
    >>> outputs, first = {"logprobs": torch.tensor([[0.0, -3.0]])}, torch.tensor([0])
    >>> def everywhere(out, batch):
    ...     return token_mean(out["logprobs"], batch["loss_mask"].logical_not()), {}
    >>> for loss in (sft_loss, everywhere):
    ...     found = value_and_grad(loss, "loss", outputs, batch, {"loss": 1.0})
    ...     bool(ignores(loss, "loss", outputs, batch, {"loss": 1.0}, first, found))
    True
    False
    """
    other = {
        key: value.flatten(0, batch.ndim)
        .index_copy(0, places, _noise(places, value.shape[batch.ndim + 1 :], -1 if key == "logprobs" else 1).to(value))
        .view(value.shape)
        for key, value in outputs.items()
    }
    no = torch.zeros((), dtype=torch.bool, device=places.device)
    try:
        again = value_and_grad(loss, name, other, batch, weights)
    except Exception:  # a loss that refuses these numbers has looked at them
        return no
    pairs = list(zip(_leaves(first), _leaves(again), strict=False))
    if _shape(first) != _shape(again):
        return no
    same = [(a == b).all() for a, b in pairs]
    at_places = (grad.flatten(0, batch.ndim).index_select(0, places) for grad in first.gradients.values())
    same += [(grad == 0).all() for grad in at_places]
    return torch.stack(same).all()


def _noise(places: Tensor, shape: torch.Size, sign: int) -> Tensor:
    """Return numbers all over the range of log-probabilities: any threshold lies between some of them and the zeros.

    They differ within a token, too, because a softmax of equal logits does not show what they are.
    """
    count = torch.arange(1, len(places) * shape.numel() + 1, device=places.device, dtype=torch.float64)
    return sign * (1 + 16 * (0.618034 * count % 1)).view(len(places), *shape)


def _leaves(result: ValueAndGrad) -> list[Tensor]:
    reduced = [*result.terms.values(), *result.metrics.values()]
    return [result.loss, *(x for value in reduced for x in value), *result.gradients.values()]


def _shape(result: ValueAndGrad) -> list[object]:
    """Return names, types, shapes and dtypes of a result, which can be read without waiting for the device."""
    metrics = [(key, type(value)) for key, value in result.metrics.items()]
    return [metrics, [(x.shape, x.dtype) for x in _leaves(result)]]
