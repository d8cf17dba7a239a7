"""Values that leave their device while another mesh works there, and come back."""

import itertools
from collections.abc import Callable
from itertools import chain
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

__all__ = ["FROZEN", "Rests", "rest", "to_host", "wake"]

FROZEN: WeakSet[nn.Module] = WeakSet()
"""Modules of this process that nobody changes. They leave the device without a copy, once the host has one."""


@runtime_checkable
class Rests(Protocol):
    """A value on a mesh that can leave its device while another mesh works there."""

    def rest(self) -> None:
        """Move to the memory of the host."""
        ...

    def wake(self) -> None:
        """Move back."""
        ...


def rest(value: Any) -> bool:
    """Move a value to the memory of the host, if it satisfies `Rests` or is a module; whether there was any to move."""
    if isinstance(value, Rests):
        value.rest()
        return True
    if not isinstance(value, nn.Module) or (device := _device(value)).type == "cpu":
        return False
    _AWAY[value] = device
    move = to_host(value, same=value in FROZEN)
    there = {id(x): move(x) for x in chain(value.parameters(), value.buffers())}
    if torch.cuda.is_available():  # before a sharded module reads what has come, to fill up uneven parts
        torch.cuda.synchronize()
    value._apply(lambda x: there.get(id(x), x))
    return True


def wake(value: Any) -> None:
    """Move a value back to where it was before `rest`."""
    if isinstance(value, Rests):
        value.wake()
    elif isinstance(value, nn.Module) and value in _AWAY:
        device = _AWAY.pop(value)
        value._apply(lambda x: x.to(device, non_blocking=True))


def to_host(owner: Any, same: bool = False) -> Callable[[Tensor], Tensor]:
    """What moves the tensors of a value to the memory of the host, where each has the place that it had before.

    On a GPU this memory is pinned, so that copies are as fast as the bus. Copies may go on when this returns.

    Args:
        owner: the value, whose tensors come in the same order each time; its places live as long as it does.
        same: whether their numbers are what they were, too, so that nothing is copied.

    >>> state = nn.Linear(1, 1)
    >>> to_host(state)(torch.ones(2))
    tensor([1., 1.])
    """
    places, numbers = _PLACES.setdefault(owner, []), itertools.count()

    def move(x: Tensor) -> Tensor:
        if _is_there(x):
            return x
        number = next(numbers)
        place = places[number] if number < len(places) else None
        if place is None or (place.shape, place.dtype) != (x.shape, x.dtype):
            place = torch.empty_like(x.detach(), device="cpu", pin_memory=torch.cuda.is_available())
            places[number : number + 1] = [place]
        elif same:
            return place
        return place.copy_(x.detach(), non_blocking=True)

    return move


_AWAY: WeakKeyDictionary[nn.Module, torch.device] = WeakKeyDictionary()
_PLACES: WeakKeyDictionary[Any, list[Tensor]] = WeakKeyDictionary()


def _is_there(x: Tensor) -> bool:
    return x.device.type == "cpu"


def _device(module: nn.Module) -> torch.device:
    found = next(module.parameters(), None)
    return torch.device("cpu") if found is None else found.device
