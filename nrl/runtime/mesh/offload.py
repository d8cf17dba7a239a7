"""Values that leave their device while another mesh works there, and come back."""

import itertools
from collections.abc import Callable
from itertools import chain
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

__all__ = ["FROZEN", "Offloadable", "offload_value", "onload_value", "to_host"]

FROZEN: WeakSet[nn.Module] = WeakSet()
"""Modules of this process that nobody changes. They leave the device without a copy, once the host has one."""


@runtime_checkable
class Offloadable(Protocol):
    """A value on a mesh that can leave its device while another mesh works there."""

    def offload(self) -> None:
        """Move to the memory of the host."""
        ...

    def onload(self) -> None:
        """Move back."""
        ...


def offload_value(value: Any) -> bool:
    """Move a value to the memory of the host, if it is `Offloadable` or a module; return whether anything moved."""
    if isinstance(value, Offloadable):
        value.offload()
        return True
    if not isinstance(value, nn.Module) or (device := _device(value)).type == "cpu":
        return False
    _HOME_DEVICES[value] = device
    move = to_host(value, same=value in FROZEN)
    on_host = {id(x): move(x) for x in chain(value.parameters(), value.buffers())}
    if torch.cuda.is_available():  # A sharded module reads the copies at once, to pad uneven parts.
        torch.cuda.synchronize()
    value._apply(lambda x: on_host.get(id(x), x))
    return True


def onload_value(value: Any) -> None:
    """Move a value back to the device that it was on before `offload_value`."""
    if isinstance(value, Offloadable):
        value.onload()
    elif isinstance(value, nn.Module) and value in _HOME_DEVICES:
        device = _HOME_DEVICES.pop(value)
        value._apply(lambda x: x.to(device, non_blocking=True))


def to_host(owner: Any, same: bool = False) -> Callable[[Tensor], Tensor]:
    """Return a function that moves the tensors of a value to host memory, each into the buffer that it had before.

    On a GPU this memory is pinned, so that copies are as fast as the bus. Copies may go on when this returns.

    Args:
        owner: the value, whose tensors come in the same order each time; its buffers live as long as it does.
        same: whether the numbers have not changed either, so that nothing is copied.

    >>> state = nn.Linear(1, 1)
    >>> to_host(state)(torch.ones(2))
    tensor([1., 1.])
    """
    buffers, numbers = _HOST_BUFFERS.setdefault(owner, []), itertools.count()

    def move(x: Tensor) -> Tensor:
        if _is_on_host(x):
            return x
        number = next(numbers)
        buffer = buffers[number] if number < len(buffers) else None
        if buffer is None or (buffer.shape, buffer.dtype) != (x.shape, x.dtype):
            buffer = torch.empty_like(x.detach(), device="cpu", pin_memory=torch.cuda.is_available())
            buffers[number : number + 1] = [buffer]
        elif same:
            return buffer
        return buffer.copy_(x.detach(), non_blocking=True)

    return move


_HOME_DEVICES: WeakKeyDictionary[nn.Module, torch.device] = WeakKeyDictionary()
_HOST_BUFFERS: WeakKeyDictionary[Any, list[Tensor]] = WeakKeyDictionary()


def _is_on_host(x: Tensor) -> bool:
    return x.device.type == "cpu"


def _device(module: nn.Module) -> torch.device:
    parameter = next(module.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device
