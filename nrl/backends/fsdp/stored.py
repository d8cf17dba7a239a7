"""What the torch engine stores of a model and its optimizer, by the names of `nrl.backends.training.storage`."""

from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor, nn

from nrl.backends.models.named_weights import named_tensors, weight_name
from nrl.backends.training.storage import KEYS, MODEL, MOMENTS

__all__ = ["fresh_moments", "shapes", "tensors"]

type _Wanted = Callable[[str], bool] | None


def tensors(module: nn.Module, optimizer: torch.optim.Optimizer | None, wanted: _Wanted = None) -> dict[str, Tensor]:
    """A model's tensors, tied weights once, and an optimizer's moments.

    Args:
        module: the model.
        optimizer: of its parameters; None: the model alone.
        wanted: whether a weight of this name is stored; None: all are.
    """
    found = {MODEL + name: tensor for name, tensor in _weights(module, wanted)}
    if optimizer is None:
        return found
    return found | {
        f"{MOMENTS}{name}.{key}": optimizer.state[parameter][key]
        for name, parameter in _parameters(module)
        if optimizer.state.get(parameter)
        for key in KEYS
    }


def shapes(module: nn.Module, wanted: _Wanted = None) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's weights, by name."""
    return {name: tuple(tensor.shape) for name, tensor in _weights(module, wanted)}


def fresh_moments(module: nn.Module, optimizer: torch.optim.Optimizer, names: Collection[str]) -> None:
    """Moments of zeros for the parameters that have some among the stored names."""
    for name, parameter in _parameters(module):
        if f"{MOMENTS}{name}.step" in names:
            zeros = {key: torch.zeros_like(parameter) for key in KEYS[1:]}
            step = torch.zeros((), dtype=torch.float32, device=parameter.device)
            optimizer.state[parameter] = {"step": step, **zeros}


def _parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((weight_name(name), parameter) for name, parameter in module.named_parameters())


def _weights(module: nn.Module, wanted: _Wanted) -> Iterator[tuple[str, Tensor]]:
    return ((name, tensor) for name, tensor in named_tensors(module) if wanted is None or wanted(name))
