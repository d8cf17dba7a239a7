"""The interface of a mesh's processes: calls of functions, their arguments and their results."""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Protocol

import attrs
import torch
from tensordict import TensorDict
from torch import Tensor

from nrl.batch.ragged import take
from nrl.runtime.mesh.futures import Future, Submitted

__all__ = ["Donated", "Out", "Processes", "Results", "RowSlice", "Value"]


class Out(Enum):
    """The destination of a result of a function that runs in each process."""

    on_rank = "on_rank"  # The value stays in its process; the driver holds a `Value` for each process.
    per_shard = "per_shard"  # One value per shard, in order, from the shard's leader; see `Layout.shard_leader`.
    all = "all"  # One value per rank, in order.
    replicated = "replicated"  # One value, after a check that all ranks have the same one.
    first = "first"  # One value, from the leader of the first shard.


class Value(Protocol):
    """A name, on the driver, of a value that lives in a process."""


@attrs.frozen
class Donated:
    """An argument: a value that the call consumes unless it fails."""

    value: Value


@attrs.frozen(eq=False)
class RowSlice:
    """An argument: a subset of the rows of a tensor or of a batch, which is locked.

    >>> import torch
    >>> RowSlice(torch.arange(3) + 10, torch.tensor([2, 0])).open().tolist()
    [12, 10]
    """

    source: Tensor | TensorDict
    index: Tensor

    def open(self) -> Tensor | TensorDict:
        """Return the rows."""
        part: Tensor | TensorDict = take(self.source, self.index)
        return part.lock_() if isinstance(part, TensorDict) else part

    def are_all(self) -> bool:
        """Return whether these are all rows in their order, so that ``source`` itself can be sent."""
        return len(self.index) == len(self.source) and torch.equal(self.index, torch.arange(len(self.source)))


class Results(Protocol):
    """Pending results of a call in several processes, for one of its `Out` values."""

    def then[T](
        self, combine: Callable[[list[Any]], T], rows: Sequence[Tensor] | None = None, like: Tensor | None = None
    ) -> Future[T]:
        """Return a future of ``combine(results)``, which may run in this process or in another.

        Args:
            combine: makes the value of the list of results.
            rows: which rows of the value each result holds, where ``combine`` puts rows in order, in new memory.
            like: stands for the value; see `nrl.runtime.mesh.futures.RemoteFuture`.
        """
        ...


class Processes(Protocol):
    """The processes of a mesh."""

    @property
    def count(self) -> int:
        """Number of processes."""
        ...

    @property
    def has_ended(self) -> bool:
        """True if the processes are gone, since one died or a call exceeded its deadline."""
        ...

    def end(self, reason: BaseException) -> None:
        """Kill the processes, unless they are this one; from now on calls raise ``reason``."""
        ...

    def call(
        self,
        caller: str,
        fn: Callable[..., Any],
        args: Sequence[Sequence[Any]],
        outs: Out | tuple[Out, ...],
        *,
        turn: bool = True,
        sent: Callable[[], object] | None = None,
    ) -> list[Any]:
        """Call ``fn`` in each process, with that process's arguments.

        Args:
            caller: how errors name the call.
            fn: what to call.
            args: a list of arguments for each process: plain values, a `Value` (borrowed) or `Donated`, `RowSlice`, and
                futures of other meshes (`nrl.runtime.mesh.futures.RemoteFuture`) or parts of them. One process that
                stands for many calls ``fn`` with each list in turn.
            outs: one for each result if ``fn`` returns a tuple, else one.
            turn: whether this mesh takes its turn on devices that it shares with others: their values leave the
                devices, and its own come back. False: all values stay where they are.
            sent: called once the call cannot be taken back, before the handler of a signal can run. Whoever donates a
                value marks it here as consumed.

        Returns:
            For each of ``outs``, a list of `Value` where it is kept, else `Results`.
        """
        ...

    def submit(
        self, caller: str, fn: Callable[..., Any], args: Sequence[Any], rank: int | None, deadline: float | None
    ) -> Submitted[Any]:
        """Call ``fn`` beside one process, and beside its calls; see `Mesh.submit`."""
        ...
