"""The process that a function runs in: its rank and its device mesh."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import attrs

from nrl.errors import PlacementError
from nrl.runtime.mesh.processes import Out

__all__ = ["Process", "enter_process", "measure_idle", "perform", "process"]


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
        """True for the leader of the first shard, which stands for all processes with equal values."""
        if self.device_mesh is None:
            return self.rank == 0
        ranks, names = self.device_mesh.mesh, self.device_mesh.mesh_dim_names or ()
        return self.rank == int((ranks.select(names.index("pp"), -1) if "pp" in names else ranks).flatten()[0])


_HERE: ContextVar[Process] = ContextVar("process", default=Process())  # noqa: B039  it is frozen


def process() -> Process:
    """Return the process that the calling function runs in; outside of a mesh, a mesh of one process.

    >>> import torch
    >>> from nrl.runtime import P, cluster, shard_map
    >>> with cluster("local") as here:
    ...     ranks = shard_map(lambda x: x + process().rank, here.reserve(2).mesh(), P("dp"), P("dp"))
    ...     ranks(torch.zeros(2)).result().tolist()
    [0.0, 1.0]
    """
    return _HERE.get()


@contextmanager
def enter_process(current: Process) -> Iterator[None]:
    """Let `process` return ``current`` inside of the block."""
    token = _HERE.set(current)
    try:
        yield
    finally:
        _HERE.reset(token)


def perform(caller: str, fn: Callable[..., Any], args: Sequence[Any], outs: Out | tuple[Out, ...]) -> list[Any]:
    """Call a function, and return its results, one for each of ``outs``.

    Raises:
        PlacementError: it returned another number of results.
    """
    begun = time.perf_counter()
    since, _ = _CALLS.setdefault(process().mesh, (begun, 0.0))
    try:
        result = fn(*args)
    finally:
        since, spent = _CALLS[process().mesh]  # The call itself may have called `measure_idle`.
        _CALLS[process().mesh] = since, spent + time.perf_counter() - max(begun, since)
    if isinstance(outs, Out):
        return [result]
    if not isinstance(result, tuple) or len(result) != len(outs):
        raise PlacementError(f"{caller}: {len(outs)} out_specs, so it must return a tuple of {len(outs)} values")
    return list(result)


_CALLS: dict[str, tuple[float, float]] = {}
"""For each mesh, the time since when calls are counted, and the seconds that calls have taken since then."""


def measure_idle(begun: float, end: float) -> tuple[float, float]:
    """Return how long this process has had no call of its mesh to run, since the last query or its first call.

    Args:
        begun: the time at which the calling function's call began, by `time.perf_counter`.
        end: the time.

    Returns:
        Seconds without a call, and all seconds.

    >>> measure_idle(3.0, 5.0)  # no call was counted before
    (0.0, 2.0)
    >>> measure_idle(9.0, 10.0)
    (4.0, 5.0)
    """
    since, spent = _CALLS.get(process().mesh, (begun, 0.0))
    _CALLS[process().mesh] = end, 0.0
    return max(0.0, max(begun, since) - since - spent), end - since
