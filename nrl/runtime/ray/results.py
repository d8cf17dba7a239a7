"""Futures of the results of calls on Ray actors, which other calls take as arguments."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from nrl.runtime.ray.codec.pickling import deserialize
from nrl.runtime.ray.pending_call import Call, Ref

__all__ = ["ActorResults", "Pending", "PendingRows"]


class ActorResults:
    """The results of a call in some processes; satisfies `nrl.runtime.mesh.processes.Results`."""

    def __init__(self, call: Call, refs: Sequence[Ref]) -> None:
        self._call, self._refs = call, list(refs)

    def then(
        self, combine: Callable[[list[Any]], Any], rows: Sequence[Tensor] | None = None, like: Tensor | None = None
    ) -> "Pending":
        """Return a future of ``combine(results)``."""
        return Pending(self._call, self._refs, combine, rows, like)


class Pending:
    """A future of a value made of several processes' results; satisfies `nrl.runtime.mesh.futures.RemoteFuture`."""

    def __init__(
        self,
        call: Call,
        refs: Sequence[Ref],
        combine: Callable[[list[Any]], Any],
        rows: Sequence[Tensor] | None,
        like: Tensor | None,
    ) -> None:
        self.call, self.refs, self.combine, self.rows, self.like = call, list(refs), combine, rows, like
        self._value: list[Any] = []

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the value and fetch it. Raises as `Call.wait`."""
        if not self._value:
            started = time.monotonic()
            self.call.wait(timeout)
            remaining = self.call.actors.deadline - (time.monotonic() - started)
            copy = self.rows is None  # putting rows in order makes a copy anyway
            parts = [deserialize(parts, copy=copy)[0] for parts in self.call.fetch(self.refs, remaining)]
            self._value.append(self.combine(parts))
        return self._value[0]

    def failure(self) -> BaseException | None:
        """Return the error that the call has raised by now."""
        return self.call.failure()

    @functools.cached_property
    def results_by_rows(self) -> dict[bytes, Ref]:
        """Results by the bytes of the index of the rows that they hold."""
        pairs = list(zip(self.rows or (), self.refs, strict=False))
        return {rows.numpy().tobytes(): ref for rows, ref in reversed(pairs)}

    def part(self, index: Tensor) -> "PendingRows":
        """Return rows of the value, as an argument of a call."""
        return PendingRows(self, index)

    def __reduce__(self) -> Any:
        raise TypeError("a future is known to its own program only; give it to the call as an argument of its own")


class PendingRows:
    """A subset of the rows of a pending value."""

    def __init__(self, future: Pending, index: Tensor) -> None:
        self.future, self.index = future, index

    def find_exact_result(self) -> Ref | None:
        """Return the result that holds exactly these rows, if there is one."""
        return self.future.results_by_rows.get(self.index.numpy().tobytes())
