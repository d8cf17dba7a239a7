"""The process that a function runs in: its rank, its device mesh, and values that leave its device."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import attrs
import torch
from torch import nn

from nrl.errors import PlacementError
from nrl.runtime.mesh.placement import Out

__all__ = ["Process", "Rests", "entered", "perform", "process", "rest", "wake"]


@attrs.frozen
class Process:
    """A process of a mesh, as a function that runs there sees it.

    Args:
        rank: its number in the mesh.
        size: the number of processes.
        device_mesh: a ``torch.distributed`` `DeviceMesh` with the named axes pp, dp, cp and tp; None in a mesh of one
            process, and on the local cluster, where one process stands for all of them.
        mesh: the name of the mesh.

    >>> Process().size
    1
    """

    rank: int = 0
    size: int = 1
    device_mesh: Any = None
    mesh: str = ""

    @property
    def first(self) -> bool:
        """Whether it speaks for the first shard, and so for all where all have the same; see `Layout.speaker`."""
        if self.device_mesh is None:
            return self.rank == 0
        ranks, names = self.device_mesh.mesh, self.device_mesh.mesh_dim_names or ()
        return self.rank == int((ranks.select(names.index("pp"), -1) if "pp" in names else ranks).flatten()[0])


_HERE: ContextVar[Process] = ContextVar("process", default=Process())  # noqa: B039  it is frozen


def process() -> Process:
    """The process that the calling function runs in; outside of a mesh, one that is alone.

    >>> import torch
    >>> from nrl.runtime import P, cluster, shard_map
    >>> with cluster("local") as here:
    ...     ranks = shard_map(lambda x: x + process().rank, here.reserve(2).mesh(), P("dp"), P("dp"))
    ...     ranks(torch.zeros(2)).result().tolist()
    [0.0, 1.0]
    """
    return _HERE.get()


@contextmanager
def entered(here: Process) -> Iterator[None]:
    """Let `process` say ``here`` inside of the block."""
    token = _HERE.set(here)
    try:
        yield
    finally:
        _HERE.reset(token)


def perform(who: str, fn: Callable[..., Any], args: Sequence[Any], outs: Out | tuple[Out, ...]) -> list[Any]:
    """Call a function, and return its results, one for each of ``outs``.

    Raises:
        PlacementError: it returned another number of results.
    """
    result = fn(*args)
    if isinstance(outs, Out):
        return [result]
    if not isinstance(result, tuple) or len(result) != len(outs):
        raise PlacementError(f"{who}: {len(outs)} out_specs, so it must return a tuple of {len(outs)} values")
    return list(result)


@runtime_checkable
class Rests(Protocol):
    """A value on a mesh that can leave its device while another mesh works there."""

    def rest(self) -> None:
        """Move to the memory of the host."""
        ...

    def wake(self) -> None:
        """Move back."""
        ...


def rest(value: Any) -> None:
    """Move a value to the memory of the host, if it satisfies `Rests` or is a module."""
    if isinstance(value, Rests):
        value.rest()
    elif isinstance(value, nn.Module) and (device := _device(value)).type != "cpu":
        _AWAY[value] = device
        value.to("cpu")


def wake(value: Any) -> None:
    """Move a value back to where it was before `rest`."""
    if isinstance(value, Rests):
        value.wake()
    elif isinstance(value, nn.Module) and value in _AWAY:
        value.to(_AWAY.pop(value))


_AWAY: WeakKeyDictionary[nn.Module, torch.device] = WeakKeyDictionary()


def _device(module: nn.Module) -> torch.device:
    found = next(module.parameters(), None)
    return torch.device("cpu") if found is None else found.device
