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
from nrl.runtime.ray.codec.messages import CallReply, MissingInput
from nrl.runtime.ray.failures import describe_death, explain_raised, get_error, is_death, is_lost_value, make_lost_error
from nrl.runtime.trace import timeline

__all__ = ["ActorLocation", "Call", "MeshActors", "Ref"]

_ENDING = threading.Lock()  # Held for a moment at the end of a call.
_REPORTED: deque[BaseException] = deque(maxlen=1000)  # Errors that a caller has received.

type Ref = Any  # ray.ObjectRef, which is not imported here

_GRACE = 10.0  # seconds for the other processes of a call to return, once one has failed


class ActorLocation(NamedTuple):
    """The location of a process.

    Args:
        node: the Ray id of its node.
        address: of the node.
        clock_skew: seconds by which the node's clock is ahead of the driver's.
    """

    node: str
    address: str
    clock_skew: float = 0.0


class MeshActors(Protocol):
    """The actors of a mesh, as their calls see them; see `nrl.runtime.ray.ray_processes.RayProcesses`."""

    name: str
    executable: str
    deadline: float  # seconds that a call may take
    longest: dict[str, float]  # seconds that a call of each name has taken
    nodes: list[ActorLocation]
    starting: "Call"  # the call by which they start

    def earlier_calls(self, call: "Call") -> list["Call"]:
        """Return the calls made before this one that are not known to have ended."""

    def find_lost_rank(self) -> int | None:
        """Return the first rank whose node is gone, or None."""

    def describe_rank(self, rank: int) -> str:
        """Name a process as errors do."""

    def last_lines(self, rank: int) -> str:
        """Return the last lines of a process's log."""

    def end(self, reason: BaseException) -> None:
        """Kill every process."""

    def error_after_end(self, caller: str) -> BaseException | None:
        """Return what a call raises if the processes have been ended, or None."""

    def forget(self) -> None:
        """Send batches anew."""


class Call:
    """A call of one function in every process of a mesh.

    Args:
        actors: the processes.
        caller: how errors name the call.
        replies: a reference to the reply of each process.
        before: the calls that made its arguments.
        read: the calls among them whose results lie in memory that it shares with others.
    """

    def __init__(
        self,
        actors: "MeshActors",
        caller: str,
        replies: Sequence[Ref],
        before: Sequence["Call"] = (),
        read: Sequence["Call"] = (),
    ) -> None:
        self.actors, self.caller, self.replies, self.began = actors, caller, list(replies), time.time()
        self.before, self.read = list(before), list(read)
        self.instead: list[Any] = []  # For each rank, the donated value; if all ranks raise, it is still there.
        self.done, self.shown = False, timeline.are_calls_shown()
        self.error: BaseException | None = None

    @property
    def unreported_error(self) -> BaseException | None:
        """The error of the call, if no caller has received it."""
        return None if any(self.error is error for error in _REPORTED) else self.error

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
            _REPORTED.append(self.error)
            raise self.error.with_traceback(None)  # a traceback would keep alive the frames of earlier waits

    def finish(self, timeout: float | None = None) -> None:
        """Wait as `wait` does, but keep the function's error in ``error``.

        Earlier calls come first, each with a deadline of its own.
        """
        until = None if timeout is None else time.monotonic() + timeout

        def remaining() -> float | None:
            return None if until is None else max(0.0, until - time.monotonic())

        first = [] if self is self.actors.starting else [self.actors.starting, *self.actors.earlier_calls(self)]
        for call in [*first, self]:
            if not call.done and not self.done:
                for producer in [producer for producer in call.before if not producer.done]:
                    # The call may be on another mesh: if it is late, this call is not to blame.
                    producer.finish(remaining())
                if not call._finish_alone(remaining()):
                    raise self._deadline_error(timeout or 0.0, ended=False)
            # A mutating call may have written into any value.
            spoilt = isinstance(call.error, MutatedBatch) and call is not self
            if (call is self.actors.starting or spoilt) and call.error is not None and not self.done:
                self._set_error(call.error)

    def poll(self) -> bool:
        """Return whether the call is done, without waiting; raises nothing."""
        if not self.done and len(self._ready_replies()) == len(self.replies):
            self.finish()  # An error is kept for the reader of the results.
        return self.done

    def failure(self, patience: float = 0.0) -> BaseException | None:
        """Return the call's error, if one of its processes has failed or fails within ``patience`` seconds."""
        if not self.done and any(get_error(ref) for ref in self._ready_replies(patience)):
            self.finish()
        return self.error

    def fetch(self, refs: Sequence[Ref], timeout: float) -> list[Any]:
        """Fetch results of this call, which is done. Raises as `wait`."""
        import ray

        try:
            return list(ray.get(list(refs), timeout=max(timeout, 1.0)))
        except ray.exceptions.GetTimeoutError:
            raise DeadlineExceeded(
                f"{self.caller}: a result is ready on mesh '{self.actors.name}', but did not arrive within "
                f"{timeout:g} s"
            ) from None
        except ray.exceptions.RayError as error:  # The node that held a result is gone.
            death = self.ended_by_node()
            if death is None:
                self.error = death = LostActor(self.caller, self.actors.name, None, "?", describe_death(error))
                self.actors.end(death)
            _REPORTED.append(death)
            raise death from None

    def ended_by_node(self) -> LostActor | None:
        """End the mesh if the node of one of its processes is gone, and with it results of this call, which had ended.

        Returns:
            The error of these results; None: all nodes are alive.
        """
        rank = self.actors.find_lost_rank()
        if rank is None:
            return None
        address = self.actors.nodes[rank].address
        self.error = death = LostActor(self.caller, self.actors.name, rank, address, "its node is gone")
        self.actors.end(death)
        return death

    def _ready_replies(self, patience: float = 0.0) -> list[Ref]:
        """Return the replies that have arrived, or arrive within ``patience`` seconds."""
        import ray

        ready: list[Ref] = ray.wait(self.replies, num_returns=len(self.replies), timeout=patience)[0]
        return ready

    def _finish_alone(self, timeout: float | None) -> bool:
        """Wait for this call alone; return whether it has ended, with or without an error."""
        import ray

        deadline = self.actors.deadline
        limit = deadline if timeout is None else min(timeout, deadline)
        replies: list[bytes] = []

        def fetch_replies(seconds: float) -> bool:
            with contextlib.suppress(ray.exceptions.GetTimeoutError):
                replies[:] = ray.get(self.replies, timeout=seconds)
            return bool(replies)

        try:
            usual = self.actors.longest.get(self.caller, 0.0)  # Lines about each ordinary, long step would be noise.
            if wait_until(fetch_replies, limit, self._progress, max(SILENCE, 2 * usual)):
                self._set_success([pickle.loads(reply) for reply in replies])
            elif limit < deadline:
                return False
            else:
                error = self._deadline_error(limit, ended=True)
                self._set_error(error)
                self.actors.end(error)
        except ray.exceptions.RayError as failure:
            self._set_error(self._diagnose(failure), alike=bool(self.instead) and self._raised_everywhere())
        return True

    def _progress(self, seconds: float) -> str:
        """Return a line about the processes that have not returned."""
        share = f"{len(self.replies) - len(self._ready_replies())} of {len(self.replies)} processes"
        if self is self.actors.starting:
            return (
                f"mesh '{self.actors.name}': waiting for {share} to start ({self.actors.executable}, {seconds:.0f} s)"
            )
        return f"mesh '{self.actors.name}': waiting for {self.caller} in {share} ({seconds:.0f} s)"

    def _set_success(self, replies: list[CallReply]) -> None:
        with _ENDING:
            if self.done:  # Another thread has ended the call.
                return
            if len({receipt.digests for receipt in replies}) > 1:
                self.error = PlacementError(f"{self.caller}: {DIFFER}")
            self.done, self.before, self.read, self.instead = True, [], [], []
        took = max(receipt.end - receipt.start for receipt in replies)
        self.actors.longest[self.caller] = max(took, self.actors.longest.get(self.caller, 0.0))
        for rank, receipt in enumerate(replies if self.shown else []):
            skew = self.actors.nodes[rank].clock_skew  # rows of one timeline have one clock, the driver's
            start = self.began if self is self.actors.starting else receipt.start - skew
            timeline.record(self.actors.name, rank, self.caller, start, receipt.end - skew)

    def _set_error(self, error: BaseException, *, alike: bool = False) -> None:
        with _ENDING:
            if not self.done:
                self.done, self.error, self.before, self.read = True, error, [], []
                self.instead = self.instead if alike else []

    def _deadline_error(self, waited: float, *, ended: bool) -> DeadlineExceeded:
        ready = self._ready_replies()
        ranks = [rank for rank, ref in enumerate(self.replies) if ref not in ready]
        text = f"{self.caller}: {_list_ranks(ranks)} of mesh '{self.actors.name}' did not return within {waited:.3g} s"
        if not ended:
            return DeadlineExceeded(f"{text}; it goes on, and may be waited for again")
        log = self.actors.last_lines(ranks[0]) if ranks else ""
        last_lines = f" The last lines of the log of rank {ranks[0]}:\n{_indent(log)}" if log else ""
        return DeadlineExceeded(
            f"{text}, so the mesh has been ended. If it needs longer, give nrl.cluster(..., deadline=) more "
            f"seconds.{last_lines}"
        )

    def _diagnose(self, failure: BaseException) -> BaseException:
        """Find the cause of a failure: a death causes errors of other ranks, an earlier call's error those of this."""
        for call in self.before:
            if (earlier := call.failure()) is not None:
                return earlier
        if (ended := self.actors.error_after_end(self.caller)) is not None:
            return ended
        errors, silent = self._collect_errors()
        for rank, error in errors.items():
            if is_death(error):
                log = partial(self.actors.last_lines, rank)
                death = make_lost_error(
                    self.caller, self.actors.name, rank, self.actors.nodes[rank].address, error, log
                )
                self.actors.end(death)
                return death
        if any(map(is_lost_value, errors.values())):
            for call in [self, *self.before]:
                if (lost_node := call.ended_by_node()) is not None:
                    return lost_node
        rank, first = next(iter(errors.items()), (0, failure))
        error_raised = explain_raised(first, self.actors.name, self.actors.describe_rank(rank))
        if isinstance(error_raised, MutatedBatch):
            self.actors.forget()
            for call in self.read:
                call.error = error_raised
        if isinstance(error_raised, MissingInput):
            for call in self.before:
                if (earlier := call.failure(_GRACE)) is not None:
                    return earlier
        if silent:
            error_raised.add_note(
                f"{_list_ranks(silent)} did not return within {_GRACE:g} s after that, as when they wait for rank "
                f"{rank}; mesh '{self.actors.name}' has been ended"
            )
            self.actors.end(error_raised)
        return error_raised

    def _collect_errors(self) -> tuple[dict[int, BaseException], list[int]]:
        """Collect the ranks' errors until one has died or all have returned; return also the silent ranks."""
        import ray

        until = time.monotonic() + _GRACE
        ranks = {ref: rank for rank, ref in enumerate(self.replies)}
        errors: dict[int, BaseException] = {}
        while ranks:
            ready, _ = ray.wait(list(ranks), num_returns=1, timeout=max(0.0, until - time.monotonic()))
            if not ready:
                break
            rank = ranks.pop(ready[0])
            error = get_error(ready[0])
            if error is not None:
                errors[rank] = error
                if is_death(error):
                    break
        return errors, sorted(ranks.values())

    def _raised_everywhere(self) -> bool:
        """Return whether the function raised in every process, and none has died."""
        self._ready_replies(_GRACE)
        errors = [get_error(ref) for ref in self.replies]
        return all(error is not None and not is_death(error) for error in errors)


def _list_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.rstrip().splitlines())
