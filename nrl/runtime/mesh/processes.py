"""The processes of a mesh as everything above them sees them: they call functions, and something comes of it."""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Protocol

import attrs
import torch
from tensordict import TensorDict
from torch import Tensor

from nrl.batch.ragged import take
from nrl.runtime.mesh.futures import Future, Submitted

__all__ = ["Donated", "Out", "Processes", "Results", "Rows", "Value"]


class Out(Enum):
    """How a result of a function that runs in each process comes back."""

    kept = "kept"  # it stays where it is; the driver holds a `Value` for each process
    each = "each"  # for every shard, in their order, from the rank that speaks for it; see `Layout.speaker`
    all = "all"  # from every rank, in their order
    same = "same"  # once, and it is checked that all have the same
    first = "first"  # from the rank that speaks for the first shard


class Value(Protocol):
    """A name, on the driver, of a value that lives in a process."""


@attrs.frozen
class Donated:
    """An argument: a value that the call consumes unless it fails."""

    value: Value


@attrs.frozen(eq=False)
class Rows:
    """An argument: some rows of a tensor or batch, locked if it is one.

    >>> import torch
    >>> Rows(torch.arange(3) + 10, torch.tensor([2, 0])).open().tolist()
    [12, 10]
    """

    whole: Tensor | TensorDict
    index: Tensor

    def open(self) -> Tensor | TensorDict:
        """The rows themselves."""
        part: Tensor | TensorDict = take(self.whole, self.index)
        return part.lock_() if isinstance(part, TensorDict) else part

    def are_all(self) -> bool:
        """Whether these are all rows in their order, so that ``whole`` will do."""
        return len(self.index) == len(self.whole) and torch.equal(self.index, torch.arange(len(self.whole)))


class Results(Protocol):
    """Results on their way from processes, for one of the `Out` of a call."""

    def then[T](
        self, combine: Callable[[list[Any]], T], rows: Sequence[Tensor] | None = None, like: Tensor | None = None
    ) -> Future[T]:
        """A future of ``combine(results)``; it may run in this process or in another.

        Args:
            combine: makes the value of the list of results.
            rows: which rows of the value each result holds, where ``combine`` puts rows in order, in new memory.
            like: stands for the value; see `nrl.runtime.mesh.futures.Coming`.
        """
        ...


class Processes(Protocol):
    """The processes of a mesh."""

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    @property
    def ended(self) -> bool:
        """Whether they are gone, since one died or a call exceeded its deadline."""
        ...

    def end(self, why: BaseException) -> None:
        """Kill them, unless they are this process; from now on calls raise ``why``."""
        ...

    def call(
        self,
        who: str,
        fn: Callable[..., Any],
        args: Sequence[Sequence[Any]],
        outs: Out | tuple[Out, ...],
        *,
        turn: bool = True,
        sent: Callable[[], object] | None = None,
    ) -> list[Any]:
        """Call ``fn`` in each process, with that process's arguments.

        Args:
            who: how errors name the call.
            fn: what to call.
            args: a list of arguments for each process: plain values, a `Value` (borrowed) or `Donated`, `Rows`, and
                futures of other meshes (`nrl.runtime.mesh.futures.Coming`) or parts of them. One process that stands
                for many calls ``fn`` with each list in turn.
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
        self, who: str, fn: Callable[..., Any], args: Sequence[Any], rank: int | None, deadline: float | None
    ) -> Submitted[Any]:
        """Call ``fn`` beside one process, and beside its calls; see `Mesh.submit`."""
        ...
