"""Calls on Ray actors: waiting for them, and finding out why one failed."""

import contextlib
import pickle
import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from nrl.errors import DeadlineExceeded, LostActor, MutatedBatch, PlacementError
from nrl.log.slow_wait import SILENCE, wait_until
from nrl.runtime.mesh.local import DIFFER
from nrl.runtime.ray.codec.messages import NeverMade, Receipt
from nrl.runtime.ray.failures import cause, error_of, is_death, is_of_a_lost_value, lost, raised
from nrl.runtime.trace import timeline

__all__ = ["Call", "MeshActors", "Ref", "Seat"]

_ENDING = threading.Lock()  # held for a moment, where a call ends
_TOLD: deque[BaseException] = deque(maxlen=1000)  # errors that a waiting caller has got

type Ref = Any  # ray.ObjectRef, which is not imported here

_GRACE = 10.0  # seconds for the other processes of a call to return, once one has failed


class Seat(NamedTuple):
    """Where a process is.

    Args:
        node: the Ray id of its node.
        address: of the node.
        ahead: seconds that the node's clock is ahead of the driver's.
    """

    node: str
    address: str
    ahead: float = 0.0


class MeshActors(Protocol):
    """The actors of a mesh, as their calls see them; see `nrl.runtime.ray.processes.RayProcesses`."""

    name: str
    executable: str
    deadline: float  # seconds that a call may take
    longest: dict[str, float]  # seconds that a call of each name has taken
    nodes: list[Seat]
    starting: "Call"  # the call by which they start

    def earlier(self, call: "Call") -> list["Call"]:
        """Return the calls made before this one that are not known to have ended."""

    def gone(self) -> int | None:
        """Return the first rank whose node is gone, or None."""

    def where(self, rank: int) -> str:
        """Name a process as errors do."""

    def last_lines(self, rank: int) -> str:
        """Return the last lines of a process's log."""

    def end(self, why: BaseException) -> None:
        """Kill every process."""

    def after_end(self, who: str) -> BaseException | None:
        """Return what a call raises if the processes have been ended, or None."""

    def forget(self) -> None:
        """Send batches anew."""


class Call:
    """A call of one function in every process of a mesh.

    Args:
        actors: the processes.
        who: how errors name the call.
        receipts: a reference to the receipt that each process returns.
        before: the calls that made its arguments.
        read: those of them whose results lie in memory that it shares with others.
    """

    def __init__(
        self,
        actors: "MeshActors",
        who: str,
        receipts: Sequence[Ref],
        before: Sequence["Call"] = (),
        read: Sequence["Call"] = (),
    ) -> None:
        self.actors, self.who, self.receipts, self.began = actors, who, list(receipts), time.time()
        self.before, self.read = list(before), list(read)
        self.instead: list[Any] = []  # for each rank, the value that it consumes; if all ranks raise, it is still there
        self.done, self.shown = False, timeline.shown()
        self.error: BaseException | None = None

    @property
    def untold(self) -> BaseException | None:
        """What it raised, if no caller has got that."""
        return None if any(self.error is error for error in _TOLD) else self.error

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every process is done.

        Raises:
            LostActor: a process died; the others have been ended.
            DeadlineExceeded: it took longer than a call may, so all processes have been ended; or longer than
                ``timeout``, after which one may wait again.
            Exception: what the function raised.
        """
        self.finish(timeout)
        if self.error is not None:
            _TOLD.append(self.error)
            raise self.error.with_traceback(None)  # a traceback would keep alive the frames of earlier waits

    def finish(self, timeout: float | None = None) -> None:
        """As `wait`, but keep what the function raised in ``error``.

        It first waits for earlier calls, each of which has a deadline of its own.
        """
        until = None if timeout is None else time.monotonic() + timeout

        def left() -> float | None:
            return None if until is None else max(0.0, until - time.monotonic())

        first = [] if self is self.actors.starting else [self.actors.starting, *self.actors.earlier(self)]
        for call in [*first, self]:
            if not call.done and not self.done:
                for given in [given for given in call.before if not given.done]:
                    given.finish(left())  # on other meshes, too: if one is late, this call is not to blame
                if not call._finish_alone(left()):
                    raise self._late(timeout or 0.0, ended=False)
            spoilt = isinstance(call.error, MutatedBatch) and call is not self  # it may have written into anything
            if (call is self.actors.starting or spoilt) and call.error is not None and not self.done:
                self._fail(call.error)

    def poll(self) -> bool:
        """Whether it is done, without waiting; raises nothing."""
        if not self.done and len(self._ready()) == len(self.receipts):
            self.finish()  # which keeps an error for whoever reads the results
        return self.done

    def failure(self, patience: float = 0.0) -> BaseException | None:
        """What it raises, if one of its processes has failed by now or fails within ``patience`` seconds."""
        if not self.done and any(error_of(ref) for ref in self._ready(patience)):
            self.finish()
        return self.error

    def fetch(self, refs: Sequence[Ref], timeout: float) -> list[Any]:
        """Results of this call, which is done; raises as `wait`."""
        import ray

        try:
            return list(ray.get(list(refs), timeout=max(timeout, 1.0)))
        except ray.exceptions.GetTimeoutError:
            raise DeadlineExceeded(
                f"{self.who}: a result is ready on mesh '{self.actors.name}', but did not arrive within {timeout:g} s"
            ) from None
        except ray.exceptions.RayError as error:  # the node that held a result is gone
            death = self.ended_by_node()
            if death is None:
                self.error = death = LostActor(self.who, self.actors.name, None, "?", cause(error))
                self.actors.end(death)
            _TOLD.append(death)
            raise death from None

    def ended_by_node(self) -> LostActor | None:
        """End the mesh if the node of one of its processes is gone, and with it results of this call, which had ended.

        Returns:
            The error of those results; None: all nodes are there.
        """
        rank = self.actors.gone()
        if rank is None:
            return None
        address = self.actors.nodes[rank].address
        self.error = death = LostActor(self.who, self.actors.name, rank, address, "its node is gone")
        self.actors.end(death)
        return death

    def _ready(self, patience: float = 0.0) -> list[Ref]:
        """The receipts that are there, or get there within ``patience`` seconds."""
        import ray

        ready: list[Ref] = ray.wait(self.receipts, num_returns=len(self.receipts), timeout=patience)[0]
        return ready

    def _finish_alone(self, timeout: float | None) -> bool:
        """Wait for this call and no other; whether it has ended, in whatever way."""
        import ray

        whole = self.actors.deadline
        limit = whole if timeout is None else min(timeout, whole)
        receipts: list[bytes] = []

        def arrived(seconds: float) -> bool:
            with contextlib.suppress(ray.exceptions.GetTimeoutError):
                receipts[:] = ray.get(self.receipts, timeout=seconds)
            return bool(receipts)

        try:
            usual = self.actors.longest.get(self.who, 0.0)  # nobody wants to read that each step takes a minute
            if wait_until(arrived, limit, self._progress, max(SILENCE, 2 * usual)):
                self._succeed([pickle.loads(each) for each in receipts])
            elif limit < whole:
                return False
            else:
                error = self._late(limit, ended=True)
                self._fail(error)
                self.actors.end(error)
        except ray.exceptions.RayError as failure:
            self._fail(self._diagnosed(failure), alike=bool(self.instead) and self._raised_everywhere())
        return True

    def _progress(self, seconds: float) -> str:
        """A line about the processes that have not returned."""
        of = f"{len(self.receipts) - len(self._ready())} of {len(self.receipts)} processes"
        if self is self.actors.starting:
            return f"mesh '{self.actors.name}': waiting for {of} to start ({self.actors.executable}, {seconds:.0f} s)"
        return f"mesh '{self.actors.name}': waiting for {self.who} in {of} ({seconds:.0f} s)"

    def _succeed(self, receipts: list[Receipt]) -> None:
        with _ENDING:
            if self.done:  # in another thread that waited
                return
            if len({receipt.digests for receipt in receipts}) > 1:
                self.error = PlacementError(f"{self.who}: {DIFFER}")
            self.done, self.before, self.read, self.instead = True, [], [], []
        took = max(receipt.end - receipt.start for receipt in receipts)
        self.actors.longest[self.who] = max(took, self.actors.longest.get(self.who, 0.0))
        for rank, receipt in enumerate(receipts if self.shown else []):
            ahead = self.actors.nodes[rank].ahead  # rows of one timeline have one clock, the driver's
            start = self.began if self is self.actors.starting else receipt.start - ahead
            timeline.record(self.actors.name, rank, self.who, start, receipt.end - ahead)

    def _fail(self, error: BaseException, *, alike: bool = False) -> None:
        with _ENDING:
            if not self.done:
                self.done, self.error, self.before, self.read = True, error, [], []
                self.instead = self.instead if alike else []

    def _late(self, waited: float, *, ended: bool) -> DeadlineExceeded:
        ready = self._ready()
        ranks = [rank for rank, ref in enumerate(self.receipts) if ref not in ready]
        text = f"{self.who}: {_listed(ranks)} of mesh '{self.actors.name}' did not return within {waited:.3g} s"
        if not ended:
            return DeadlineExceeded(f"{text}; it goes on, and may be waited for again")
        log = self.actors.last_lines(ranks[0]) if ranks else ""
        said = f" The last lines of the log of rank {ranks[0]}:\n{_indented(log)}" if log else ""
        return DeadlineExceeded(
            f"{text}, so the mesh has been ended. If it needs longer, give nrl.cluster(..., deadline=) more "
            f"seconds.{said}"
        )

    def _diagnosed(self, failure: BaseException) -> BaseException:
        """The error behind a failure: a death explains the errors of other ranks, and an earlier call those of this."""
        for call in self.before:
            if (earlier := call.failure()) is not None:
                return earlier
        if (ended := self.actors.after_end(self.who)) is not None:
            return ended
        errors, silent = self._errors()
        for rank, error in errors.items():
            if is_death(error):
                log = partial(self.actors.last_lines, rank)
                death = lost(self.who, self.actors.name, rank, self.actors.nodes[rank].address, error, log)
                self.actors.end(death)
                return death
        if any(map(is_of_a_lost_value, errors.values())):
            for call in [self, *self.before]:
                if (gone := call.ended_by_node()) is not None:
                    return gone
        rank, first = next(iter(errors.items()), (0, failure))
        found = raised(first, self.actors.name, self.actors.where(rank))
        if isinstance(found, MutatedBatch):
            self.actors.forget()
            for call in self.read:
                call.error = found
        if isinstance(found, NeverMade):
            for call in self.before:
                if (earlier := call.failure(_GRACE)) is not None:
                    return earlier
        if silent:
            found.add_note(
                f"{_listed(silent)} did not return within {_GRACE:g} s after that, as when they wait for rank {rank}; "
                f"mesh '{self.actors.name}' has been ended"
            )
            self.actors.end(found)
        return found

    def _errors(self) -> tuple[dict[int, BaseException], list[int]]:
        """The errors of the ranks until one has died or all have returned; and the ranks that have not returned."""
        import ray

        until = time.monotonic() + _GRACE
        ranks = {ref: rank for rank, ref in enumerate(self.receipts)}
        errors: dict[int, BaseException] = {}
        while ranks:
            ready, _ = ray.wait(list(ranks), num_returns=1, timeout=max(0.0, until - time.monotonic()))
            if not ready:
                break
            rank = ranks.pop(ready[0])
            error = error_of(ready[0])
            if error is not None:
                errors[rank] = error
                if is_death(error):
                    break
        return errors, sorted(ranks.values())

    def _raised_everywhere(self) -> bool:
        """Whether the function raised in every process, and none has died."""
        self._ready(_GRACE)
        errors = [error_of(ref) for ref in self.receipts]
        return all(error is not None and not is_death(error) for error in errors)


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.rstrip().splitlines())
