"""Closed forms of an optimizer: the bytes of its state, and Muon's products and memory in a step."""

from collections.abc import Iterator

from nrl.backends.training.optim.optimizers import Optimizer
from nrl.errors import ConfigError
from nrl.ops.plan.shapes import Shape

__all__ = ["is_megatrons", "muon_flops", "muon_update_bytes", "state_bytes"]

_STEPS = 5
"""Of Newton-Schulz."""


def state_bytes(model: Shape, optimizer: Optimizer) -> float:
    """Return the bytes of the optimizer's state for all parameters.

    AdamW has two numbers of each, in float32 or bfloat16; SGD has one with a momentum, else none; Muon one of matrices
    in layers, and AdamW's of all else.

    Raises:
        ConfigError: one's own optimizer, or groups that keep Muon away from some matrices.
    """
    match optimizer.kind:
        case "adamw":
            return (4.0 if optimizer.moments == "bfloat16" else 8.0) * model.parameters
        case "sgd":
            return (4.0 if optimizer.momentum else 0.0) * model.parameters
        case "muon" if all(group.muon for group in optimizer.groups):
            return 4.0 * model.matrices + 8.0 * (model.parameters - model.matrices)
    kind = "of one's own" if optimizer.kind == "own" else "muon with groups that keep Muon away"
    raise ConfigError(
        f"plan: found an optimizer {kind}, of which closed forms do not know what it keeps; give moments=, its bytes "
        "for a parameter"
    )


def is_megatrons(optimizer: Optimizer) -> bool:
    """Return whether Megatron's trainer has this optimizer: AdamW in float32, without groups."""
    return optimizer.kind == "adamw" and optimizer.moments != "bfloat16" and not optimizer.groups


def muon_update_bytes(model: Shape, optimizer: Optimizer) -> float:
    """Return the bytes of Muon's updates of all matrices, which exist at once, in float32."""
    return 4.0 * model.matrices if optimizer.kind == "muon" else 0.0


def muon_flops(model: Shape, optimizer: Optimizer) -> dict[str, float]:
    """Return Newton-Schulz' products by dtype: ``5 (4 m^2 n + 2 m^3)`` for a matrix of m <= n rows or columns."""
    if optimizer.kind != "muon":
        return {}
    flops = sum(_STEPS * (4.0 * m * m * n + 2.0 * m**3) for m, n in map(sorted, _iter_matrices(model)))
    return {optimizer.precision or "float32": flops}


def _iter_matrices(model: Shape) -> Iterator[tuple[int, int]]:
    """Yield the shape of each matrix in layers."""
    d = model.hidden
    attention = [(model.queries, d), (model.keys, d), (model.keys, d), (d, model.queries)]
    yield from attention * model.layers
    yield from [(model.intermediate, d)] * 3 * (model.layers - model.sparse)
    yield from ([(model.expert, d)] * 3 * model.experts + [(model.experts, d)]) * model.sparse
