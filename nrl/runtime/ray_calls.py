"""Calls on Ray actors that are under way: their futures, and what became of them."""

import pickle
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from nrl.errors import DeadlineExceeded, LostActor, PlacementError
from nrl.runtime import timeline
from nrl.runtime.local import DIFFER
from nrl.runtime.shipping import opened
from nrl.runtime.worker import CallFailed, Receipt

__all__ = ["Actors", "Call", "Part", "Pending", "Ref", "Reply"]

type Ref = Any  # ray.ObjectRef, which is not imported here

_ANSI = re.compile(r"\x1b\[[0-9;]*m")  # Ray writes its tracebacks in colours
_GRACE = 10.0  # seconds in which the others of a call may tell what became of them, once one has failed


class Actors(Protocol):
    """What a call needs to know of the actors that it was made to."""

    name: str
    nodes: list[tuple[str, str]]
    deadline: float
    starting: "Call"

    def last_lines(self, rank: int) -> str:
        """What a process wrote last."""
        ...

    def end(self, why: BaseException) -> None:
        """Kill all of them."""
        ...


class Call:
    """A call of one function in every process of a mesh.

    Args:
        actors: where.
        who: how errors name it.
        receipts: what each process returns when it is done.
        before: the calls that made what it was given.
    """

    def __init__(self, actors: Actors, who: str, receipts: Sequence[Ref], before: Sequence["Call"]) -> None:
        self.actors, self.who, self.receipts, self.before = actors, who, list(receipts), list(before)
        self.done = False
        self.error: BaseException | None = None

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every process is done.

        Raises:
            LostActor: one of them died; the others have been ended.
            DeadlineExceeded: it took longer than a call may, so all of them have been ended; or longer than
                ``timeout``, after which one may wait again.
            Exception: what the function raised.
        """
        import ray
        from ray.exceptions import GetTimeoutError

        if self is not self.actors.starting:
            self.actors.starting.wait(timeout)
        if not self.done:
            limit = self.actors.deadline if timeout is None else min(timeout, self.actors.deadline)
            try:
                self._finish([pickle.loads(each) for each in ray.get(self.receipts, timeout=limit)])
            except GetTimeoutError:
                error = DeadlineExceeded(f"{self.who}: no result from mesh '{self.actors.name}' after {limit:g} s")
                if limit < self.actors.deadline:
                    raise error from None
                self._fail(error)
                self.actors.end(error)
            except ray.exceptions.RayError as failure:
                self._fail(self._diagnosed(failure))
        if self.error is not None:
            raise self.error

    def poll(self) -> bool:
        """Whether it is done; does not wait, and raises nothing."""
        import ray

        if not self.done:
            ready, _ = ray.wait(self.receipts, num_returns=len(self.receipts), timeout=0)
            if len(ready) == len(self.receipts):
                try:
                    self.wait()
                except Exception:
                    return True  # whoever reads its results is told
        return self.done

    def _finish(self, receipts: list[Receipt]) -> None:
        for rank, receipt in enumerate(receipts):
            timeline.record(self.actors.name, rank, self.who, receipt.start, receipt.end)
        if len({receipt.digests for receipt in receipts}) > 1:
            self.error = PlacementError(f"{self.who}: {DIFFER}")
        self.done, self.before = True, []

    def _fail(self, error: BaseException) -> None:
        self.done, self.error, self.before = True, error, []

    def _diagnosed(self, failure: BaseException) -> BaseException:
        """What really happened: a death explains errors of the others, and an earlier call those of this one."""
        import ray

        for call in self.before:
            if call.poll() and call.error is not None:
                return call.error
        ray.wait(self.receipts, num_returns=len(self.receipts), timeout=_GRACE)
        found = enumerate(map(_error_of, self.receipts))
        errors = {rank: error for rank, error in found if error is not None}
        for rank, error in errors.items():
            if isinstance(error, ray.exceptions.RayActorError | ray.exceptions.WorkerCrashedError):
                node, log = self.actors.nodes[rank][1], self.actors.last_lines(rank)
                lost = LostActor(self.who, self.actors.name, rank, node, _cause(error), log)
                self.actors.end(lost)
                return lost
        first = min(errors, default=0)
        return _original(errors.get(first, failure), f"raised in rank {first} of mesh '{self.actors.name}'")


def _error_of(receipt: Ref) -> BaseException | None:
    import ray

    try:
        ray.get(receipt, timeout=0)
    except ray.exceptions.GetTimeoutError:
        return None
    except ray.exceptions.RayError as error:
        return error
    return None


def _original(error: BaseException, where: str) -> BaseException:
    """What a function raised in another process, with a note of where."""
    from ray.exceptions import RayTaskError

    if not isinstance(error, RayTaskError):
        return error
    cause: BaseException | None = error.cause
    text = _ANSI.sub("", str(error))
    found = RuntimeError(text) if cause is None else cause
    if isinstance(found, CallFailed):
        text, found = found.text, found.original()
    found.add_note(f"{where}:\n{text}")
    return found


def _cause(error: BaseException) -> str:
    """Why an actor died, in Ray's words, on one line."""
    text = str(error)
    for mark in ("Worker exit detail:", "The actor died because", "The actor is dead because"):
        if mark in text:
            text = text[text.index(mark) + (len(mark) if mark.endswith(":") else 0) :]
            break
    text = text.partition("Some common causes include")[0]  # which are guesses, for anybody
    return " ".join(text.split())[:500].rstrip(".")


class Reply:
    """Satisfies `nrl.runtime.placement.Reply`."""

    def __init__(self, call: Call, refs: Sequence[Ref]) -> None:
        self._call, self._refs = call, list(refs)

    def then(self, combine: Callable[[list[Any]], Any], rows: Sequence[Tensor] | None = None) -> "Pending":
        """A future of what ``combine`` makes of the results."""
        return Pending(self._call, self._refs, combine, rows)


class Pending:
    """A future of a value that is made of what some processes return; satisfies `nrl.runtime.futures.Coming`."""

    def __init__(
        self, call: Call, refs: Sequence[Ref], combine: Callable[[list[Any]], Any], rows: Sequence[Tensor] | None
    ) -> None:
        self.call, self.refs, self.combine, self.rows = call, list(refs), combine, rows
        self._value: list[Any] = []

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the value and fetch it; see `Call.wait`."""
        import ray

        if not self._value:
            started = time.monotonic()
            self.call.wait(timeout)
            left = self.call.actors.deadline - (time.monotonic() - started)
            copy = self.rows is None  # where rows are put in order that makes a copy anyway
            parts = [opened(parts, copy=copy)[0] for parts in ray.get(self.refs, timeout=max(left, 1.0))]
            self._value.append(self.combine(parts))
        return self._value[0]

    def part(self, index: Tensor) -> "Part":
        """Some rows of the value, as an argument of a call."""
        return Part(self, index)


class Part:
    """Rows of a value that is on its way."""

    def __init__(self, whole: Pending, index: Tensor) -> None:
        self.whole, self.index = whole, index

    def alone(self) -> Ref | None:
        """The result that holds just these rows, if there is one."""
        rows = self.whole.rows or ()
        found = [ref for ref, held in zip(self.whole.refs, rows, strict=False) if torch.equal(held, self.index)]
        return found[0] if found else None
