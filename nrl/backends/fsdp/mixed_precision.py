"""A model of float32 weights that computes in bfloat16 in one process, and rounds where a sharded one does.

``fully_shard`` gathers the weights of a layer in bfloat16 when the layer begins, and those outside of layers when the
model does. In one process nothing is gathered, so the same weights are cast at the same places. All that the model
computes is then in bfloat16, as it is where transformers or vLLM have loaded it in that dtype; what a model computes in
float32 it casts itself. Weights and the sums of their gradients stay in float32.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

__all__ = ["cast_outside_layers", "layers", "restore_weights_after", "round_layers"]

type _Masters = list[tuple[dict[str, Any], str, Any]]
_ONE_AT_A_TIME = threading.RLock()


def layers(module: nn.Module) -> list[nn.Module]:
    """The layers of a transformers model: what activation checkpointing computes again."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]


def round_layers(module: nn.Module, dtype: torch.dtype, compiled: bool = False) -> None:
    """Cast the weights of each layer while it computes, also where the backward pass computes it again.

    Args:
        module: a transformers model; a copy of it does the same.
        dtype: of the weights in a layer.
        compiled: whether layers are compiled, which leaves the casts out: they name the weights of one layer, and torch
            would compile them anew for each.
    """
    begin, end = (torch.compiler.disable(hook) if compiled else hook for hook in (partial(_begin, dtype), _end))
    module.nrl_rounds = True  # type: ignore[assignment]
    for layer in layers(module):
        layer.register_forward_pre_hook(begin)
        layer.register_forward_hook(end, always_call=True)


@contextlib.contextmanager
def restore_weights_after(module: nn.Module) -> Iterator[None]:
    """Restore the weights after the block, also after an interrupt; one thread at a time runs such a block.

    torch calls the hooks of a layer after an error, but not after a ``KeyboardInterrupt``. For a model that
    `round_layers` has not changed nothing is done.
    """
    if not getattr(module, "nrl_rounds", False):
        yield
        return
    with _ONE_AT_A_TIME:
        try:
            yield
        finally:
            for layer in layers(module):
                _end(layer)


@contextlib.contextmanager
def cast_outside_layers(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Cast the weights outside of layers inside of the block, tied ones once."""
    inside = {id(part) for layer in layers(module) for part in layer.modules()}
    masters = _cast([part for part in module.modules() if id(part) not in inside], dtype)
    try:
        yield
    finally:
        _restore(masters)


def _begin(dtype: torch.dtype, layer: Any, args: Any) -> None:
    """Cast the weights of a layer, and have a checkpoint within its hooks cast them again.

    transformers 5.23 checkpoints ``forward``, within the hooks, so the backward pass calls none; older versions
    checkpoint around them. The layer refers to itself only while it computes: a model that did so longer would keep its
    memory until Python collects cycles.
    """
    layer.nrl_masters = _cast(list(layer.modules()), dtype)
    if (checkpoint := layer.__dict__.get("_gradient_checkpointing_func")) is not None:
        layer.nrl_masters.append((layer.__dict__, "_gradient_checkpointing_func", checkpoint))
        layer._gradient_checkpointing_func = partial(_checkpoint_cast, dtype, layer, checkpoint)


def _checkpoint_cast(
    dtype: torch.dtype, layer: Any, checkpoint: Callable[..., Any], fn: Callable[..., Any], *args: Any
) -> Any:
    """Checkpoint a function with its own casts of the weights, for the second call in the backward pass."""

    def call_cast(*inputs: Any) -> Any:
        _end(layer)
        masters = _cast(list(layer.modules()), dtype)
        try:
            return fn(*inputs)
        finally:
            _restore(masters)

    return checkpoint(call_cast, *args)


def _end(layer: Any, args: Any = None, output: Any = None) -> None:
    _restore(layer.__dict__.pop("nrl_masters", []))


def _cast(parts: list[nn.Module], dtype: torch.dtype) -> _Masters:
    """Replace parameters by casts; return the replaced ones."""
    masters: _Masters = [
        (part._parameters, name, x)
        for part in parts
        for name, x in part._parameters.items()
        if x is not None and x.is_floating_point()
    ]
    casts = {id(x): x.to(dtype) for _, _, x in masters}
    for parameters, name, x in masters:
        parameters[name] = casts[id(x)]
    return masters


def _restore(masters: _Masters) -> None:
    for names, name, x in masters:
        names[name] = x
