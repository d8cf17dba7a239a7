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
    """Return the routes of the tokens of a forward, in their order in the forward.

    Args:
        batch: on the CPU, with a column ``routes`` or without.
        source: ``[n]`` int64, the token of the flattened batch that each one is.
        read: ``[n]`` bool, whether an output depends on the token. All other tokens, such as padding, get any valid
            route.
        sizes: of the model's routers; None: the routers cannot replay.

    Returns:
        ``[n, layers, k]`` int16; None: the batch has no column ``routes``.

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
    routes: Tensor = column[source]
    _check(batch, routes[read], source[read], sizes.experts)
    routes[~read] = torch.arange(sizes.k, dtype=routes.dtype)
    return routes


def _check(batch: Batch, routes: Tensor, source: Tensor, experts: int) -> None:
    """Check that every token has experts that exist, each of them once."""
    flat = routes.flatten(1)
    ordered = routes.sort(-1).values
    outside = ((flat < 0) | (flat >= experts)).any(1)
    twice = (ordered[..., 1:] == ordered[..., :-1]).flatten(1).any(1)
    bad = torch.nonzero(outside | twice)[:, 0]
    if len(bad) == 0:
        return
    width, flat_index = batch["input_ids"].shape[-1], int(source[bad[0]])
    row, position = divmod(flat_index, width)
    token, length = int(batch["input_ids"].flatten()[flat_index]), int(lengths(batch).flatten()[row])
    where = f"forward: 'routes' of row {row} of a micro-batch at position {position} (token {token} of {length})"
    route = routes[bad[0]].tolist()
    if bool((routes[bad[0]] == NOWHERE).any()):
        raise BatchError(
            f"{where} is {route}, and {NOWHERE} is no route: the sampler never had this token as an input, so what "
            "comes after it was not sampled from it. Do not train on such tokens, which is what loss_mask is for, or "
            f"{_LIVE}"
        )
    raise BatchError(
        f"{where} is {route}, and each layer has the experts 0 to {experts - 1}, of which a token gets different ones; "
        f"the sampler has to have the trainer's model, or {_LIVE}"
    )


def require_routes(select: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
    """Leave out untrained tokens after a token without a route, which cannot be computed.

    Examples are the last tokens of an episode ended by an observation, and the tokens of a failed episode. For the
    tokens of ``loss_mask``, and in a batch without it, a missing route stays an error.

    Args:
        select: of a batch, ``[*b, T]`` bool, the tokens to compute outputs for, each from the state before it.

    >>> ids, routes = torch.tensor([[5, 6, 7]]), torch.tensor([0, -1, -1], dtype=torch.int16).view(1, 3, 1, 1)
    >>> batch = Batch({"input_ids": ids, "loss_mask": ids == 6, "routes": routes}, batch_size=[1])
    >>> require_routes(lambda batch: batch["input_ids"] > 5)(batch)
    tensor([[False,  True, False]])
    """

    def where(batch: Batch) -> Tensor:
        candidates = select(batch)
        if not {"routes", "loss_mask"} <= set(batch.keys()):
            return candidates
        has_route = (batch["routes"] != NOWHERE).flatten(-2).all(-1).cumprod(-1).bool()
        before = torch.cat([torch.ones_like(has_route[..., :1]), has_route[..., :-1]], -1)
        computable: Tensor = candidates & (before | batch["loss_mask"])
        return computable

    return where
