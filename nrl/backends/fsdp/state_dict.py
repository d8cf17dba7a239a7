"""The stored state of the torch engine, model and optimizer, by the names of `nrl.backends.training.saving.storage`."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from nrl.backends.fsdp import sharding
from nrl.backends.fsdp.optimizer import TorchOptimizer
from nrl.backends.models import weight_layout
from nrl.backends.models.named_weights import a_few, named_tensors, weight_name
from nrl.backends.models.shards import full_shard
from nrl.backends.training.saving.storage import KEYS, MODEL, MOMENTS, NUMBER
from nrl.backends.types import Piece
from nrl.errors import CheckpointError

__all__ = ["fresh_state", "pieces", "shapes", "unwrap_numbers"]

type _Wanted = Callable[[str], bool] | None


def pieces(
    module: nn.Module,
    optimizer: TorchOptimizer | None,
    make_piece: Callable[[str, Tensor], Piece],
    is_wanted: _Wanted = None,
) -> Iterator[Piece]:
    """Yield a model's tensors, tied weights once, and an optimizer's state, by the names that files have.

    Args:
        module: the model.
        optimizer: of its parameters; None: the model alone.
        make_piece: makes a piece of a tensor with a name.
        is_wanted: whether a weight of this name is stored; None: all are.
    """
    parts = sharding.find_parts(module)

    def split(prefix: str, name: str, tensor: Tensor, suffix: str = "") -> Iterator[Piece]:
        for block in weight_layout.split_for_files([make_piece(name, tensor.detach())], parts):
            yield attrs.evolve(block, name=f"{prefix}{block.name}{suffix}")

    for name, tensor in _weights(module, is_wanted):
        yield from split(MODEL, name, tensor)
    for name, parameter in _parameters(module) if optimizer is not None else ():
        assert optimizer is not None
        for key, x in _tensors(optimizer.state.get(parameter, {})):
            if x.ndim:
                yield from split(MOMENTS, name, x, f".{key}")
            else:
                for part in _names_in_files(parts, name):
                    yield make_piece(f"{MOMENTS}{part}.{key}", x)


def shapes(module: nn.Module, is_wanted: _Wanted = None) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's weights, by the names that files have."""
    tensors = {name: full_shard(name, tensor) for name, tensor in _weights(module, is_wanted)}
    return {
        name: piece.shape for name, piece in weight_layout.map_to_files(tensors, sharding.find_parts(module)).items()
    }


def fresh_state(module: nn.Module, optimizer: TorchOptimizer, stored_tensors: Mapping[str, Tensor]) -> None:
    """Make a state of zeros for the parameters that have a stored state; fill it, then call `unwrap_numbers`.

    Args:
        module: the model.
        optimizer: of its parameters.
        stored_tensors: what is stored, without memory, by name.

    Raises:
        CheckpointError: it is of another optimizer.
    """
    keys, parts = defaultdict[str, list[str]](list), sharding.find_parts(module)
    for name in stored_tensors:
        if name.startswith(MOMENTS):
            weight, _, key = name.rpartition(".")
            keys[weight].append(key)
    names = {parameter: name for name, parameter in _parameters(module)}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            weight = f"{MOMENTS}{_names_in_files(parts, names[parameter])[0]}"
            if not (stored := keys.get(weight)):
                continue
            expected = stored if group.get("keeps") is None else group["keeps"]
            if unknown := sorted(set(stored) - set(expected)):
                raise CheckpointError(
                    f"restore: of the optimizer's state of '{names[parameter]}' the checkpoint has {a_few(unknown)}, "
                    f"and here it is {a_few(expected)}; leave the weight to the optimizer that it had"
                )
            # The reader says what is lost.
            like = {key: stored_tensors.get(f"{weight}.{key}", torch.empty(())) for key in expected}
            optimizer.state[parameter] = {key: _zeros(key, x, parameter, group) for key, x in like.items()}


def unwrap_numbers(optimizer: TorchOptimizer) -> None:
    """Let what was stored as a number be one again."""
    for state in optimizer.state.values():
        for key in [key for key in state if key.endswith(NUMBER)]:
            state[key.removesuffix(NUMBER)] = state.pop(key).item()


def _zeros(key: str, stored: Tensor, parameter: Tensor, group: Mapping[str, Any]) -> Tensor:
    if stored.ndim or (not parameter.ndim and key != "step"):
        dtype = stored.dtype
        if group["keeps"] == KEYS:  # the configuration says in which dtype AdamW keeps its moments
            dtype = group.get("moments", parameter.dtype)
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    on_device = group.get("fused") or group.get("capturable")  # torch's own load does the same.
    return torch.zeros((), dtype=stored.dtype, device=parameter.device if on_device else "cpu")


def _tensors(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for key, x in state.items():
        if isinstance(x, Tensor):
            yield key, x
        elif x is not None:
            yield key + NUMBER, torch.tensor(x, dtype=torch.float64 if isinstance(x, float) else None)


def _names_in_files(parts: weight_layout.Parts, name: str) -> list[str]:
    """Return the names in files of the weights that a model's weight consists of."""
    return [part.name for part in parts.get(name, ())] or [name]


def _parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((weight_name(name), parameter) for name, parameter in module.named_parameters())


def _weights(module: nn.Module, is_wanted: _Wanted) -> Iterator[tuple[str, Tensor]]:
    return ((name, tensor) for name, tensor in named_tensors(module) if is_wanted is None or is_wanted(name))
