"""The column ``routes`` in a forward: the experts of each token that goes through the model.

The experts of a token decide its hidden state, so every token whose state is read needs its route. A missing one is an
error, and never what the live router would choose.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from nrl.backends.models.moe_routers import Routers
from nrl.batch import Batch, lengths
from nrl.errors import BatchError

__all__ = ["NOWHERE", "require_routes", "select_routes"]

NOWHERE = -1
"""The expert of a token that has no route: one that the sampler never had as an input, or padding."""

_LIVE = "leave the column out, so that the live router chooses: batch.exclude('routes')"


def select_routes(batch: Batch, source: Tensor, read: Tensor, sizes: Routers | None) -> Tensor | None:
    """Return the routes of the tokens that go through the model, in their order there.

    Args:
        batch: on the CPU, with a column ``routes`` or without.
        source: ``[n]`` int64, the token of the flattened batch that each one is.
        read: ``[n]`` bool, whether anything depends on it. Padding and what comes after it do not matter; these get a
            route that exists.
        sizes: of the model's routers; None: they cannot be told what to choose.

    Returns:
        ``[n, layers, k]`` int16; None: there is no such column.

    Raises:
        BatchError: a token that is read has no route or an impossible one, or the model is another one than the
            sampler's.

    >>> ids, routes = torch.tensor([[5, 6]]), torch.tensor([[[[1, 0]], [[-1, -1]]]], dtype=torch.int16)
    >>> batch = Batch({"input_ids": ids, "routes": routes}, batch_size=[1])
    >>> select_routes(batch, torch.tensor([0, 1]), torch.tensor([True, False]), Routers(1, 2, 4)).tolist()
    [[[1, 0]], [[0, 1]]]
    """
    if "routes" not in batch.keys():
        return None
    if sizes is None:
        raise BatchError(f"forward: the batch has the column 'routes', and this trainer does not replay them; {_LIVE}")
    column = batch["routes"].flatten(0, batch["input_ids"].ndim - 1)
    if tuple(column.shape[1:]) != (sizes.layers, sizes.k):
        raise BatchError(
            f"forward: 'routes' has {column.shape[1]} layers with {column.shape[2]} experts a token, and the model has "
            f"{sizes.layers} layers with a router, each of which chooses {sizes.k} of {sizes.experts}; the sampler has "
            f"to have the trainer's model, or {_LIVE}"
        )
    found: Tensor = column[source]
    _check(batch, found[read], source[read], sizes.experts)
    found[~read] = torch.arange(sizes.k, dtype=found.dtype)
    return found


def _check(batch: Batch, found: Tensor, source: Tensor, experts: int) -> None:
    """Check that every token has experts that exist, each of them once."""
    flat = found.flatten(1)
    ordered = found.sort(-1).values
    outside = ((flat < 0) | (flat >= experts)).any(1)
    twice = (ordered[..., 1:] == ordered[..., :-1]).flatten(1).any(1)
    bad = torch.nonzero(outside | twice)[:, 0]
    if len(bad) == 0:
        return
    width, at = batch["input_ids"].shape[-1], int(source[bad[0]])
    row, position = divmod(at, width)
    token, length = int(batch["input_ids"].flatten()[at]), int(lengths(batch).flatten()[row])
    where = f"forward: 'routes' of row {row} of a micro-batch at position {position} (token {token} of {length})"
    route = found[bad[0]].tolist()
    if bool((found[bad[0]] == NOWHERE).any()):
        raise BatchError(
            f"{where} is {route}, and {NOWHERE} is no route: the sampler never had this token as an input, so what "
            "comes after it was not sampled from it. Do not train on such tokens, which is what loss_mask is for, or "
            f"{_LIVE}"
        )
    raise BatchError(
        f"{where} is {route}, and each layer has the experts 0 to {experts - 1}, of which a token gets different ones; "
        f"the sampler has to have the trainer's model, or {_LIVE}"
    )


def require_routes(wanted: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
    """Leave out the tokens that nobody trains on and that cannot be computed, since one before them has no route.

    Such are the last ones of an episode that an observation ended, and those of an episode that failed. For the tokens
    of ``loss_mask``, and where there is none, a missing route stays an error.

    Args:
        wanted: of a batch, ``[*b, T]`` bool, the tokens to compute outputs for, each from the state before it.

    >>> ids, routes = torch.tensor([[5, 6, 7]]), torch.tensor([0, -1, -1], dtype=torch.int16).view(1, 3, 1, 1)
    >>> batch = Batch({"input_ids": ids, "loss_mask": ids == 6, "routes": routes}, batch_size=[1])
    >>> require_routes(lambda batch: batch["input_ids"] > 5)(batch)
    tensor([[False,  True, False]])
    """

    def where(batch: Batch) -> Tensor:
        every = wanted(batch)
        if not {"routes", "loss_mask"} <= set(batch.keys()):
            return every
        there = (batch["routes"] != NOWHERE).flatten(-2).all(-1).cumprod(-1).bool()
        before = torch.cat([torch.ones_like(there[..., :1]), there[..., :-1]], -1)
        some: Tensor = every & (before | batch["loss_mask"])
        return some

    return where
