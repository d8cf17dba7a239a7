"""What the torch engine stores of a model and its optimizer, by the names of `nrl.backends.training.storage`."""

from collections.abc import Callable, Collection, Iterator

import attrs
import torch
from torch import Tensor, nn

from nrl.backends.base import Piece
from nrl.backends.fsdp import sharding
from nrl.backends.models import splitting
from nrl.backends.models.named_weights import named_tensors, weight_name
from nrl.backends.models.pieces import whole
from nrl.backends.training.storage import KEYS, MODEL, MOMENTS

__all__ = ["fresh_moments", "pieces", "shapes"]

type _Wanted = Callable[[str], bool] | None


def pieces(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    piece: Callable[[str, Tensor], Piece],
    wanted: _Wanted = None,
) -> Iterator[Piece]:
    """A model's tensors, tied weights once, and an optimizer's moments, by the names that files have.

    Args:
        module: the model.
        optimizer: of its parameters; None: the model alone.
        piece: makes a piece of a tensor with a name.
        wanted: whether a weight of this name is stored; None: all are.
    """
    found = sharding.parts(module)

    def cut(prefix: str, name: str, tensor: Tensor, suffix: str = "") -> Iterator[Piece]:
        for part in splitting.cut([piece(name, tensor.detach())], found):
            yield attrs.evolve(part, name=f"{prefix}{part.name}{suffix}")

    for name, tensor in _weights(module, wanted):
        yield from cut(MODEL, name, tensor)
    for name, parameter in _parameters(module) if optimizer is not None else ():
        assert optimizer is not None
        if state := optimizer.state.get(parameter):
            for key in KEYS[1:]:
                yield from cut(MOMENTS, name, state[key], f".{key}")
            for part in _files(found, name):
                yield piece(f"{MOMENTS}{part}.step", state["step"])


def shapes(module: nn.Module, wanted: _Wanted = None) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's weights, by the names that files have."""
    tensors = {name: whole(name, tensor) for name, tensor in _weights(module, wanted)}
    return {name: piece.shape for name, piece in splitting.in_files(tensors, sharding.parts(module)).items()}


def fresh_moments(module: nn.Module, optimizer: torch.optim.Optimizer, names: Collection[str]) -> None:
    """Moments of zeros for the parameters that have some among the stored names."""
    found = sharding.parts(module)
    for name, parameter in _parameters(module):
        if f"{MOMENTS}{_files(found, name)[0]}.step" in names:
            zeros = {key: torch.zeros_like(parameter) for key in KEYS[1:]}
            step = torch.zeros((), dtype=torch.float32, device=parameter.device)
            optimizer.state[parameter] = {"step": step, **zeros}


def _files(found: splitting.Parts, name: str) -> list[str]:
    """What files call the weights that a model's weight is made of."""
    return [part.name for part in found.get(name, ())] or [name]


def _parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((weight_name(name), parameter) for name, parameter in module.named_parameters())


def _weights(module: nn.Module, wanted: _Wanted) -> Iterator[tuple[str, Tensor]]:
    return ((name, tensor) for name, tensor in named_tensors(module) if wanted is None or wanted(name))
