"""Calls under way on Ray actors: their futures, results and failures."""

import contextlib
import functools
import pickle
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from nrl.errors import DeadlineExceeded, FailedStart, LostActor, MutatedBatch, PlacementError
from nrl.log.waits import SILENCE, wait_until
from nrl.runtime.mesh.local import DIFFER
from nrl.runtime.ray.raising import Raised
from nrl.runtime.ray.shipping import opened
from nrl.runtime.ray.worker import NeverMade, Receipt
from nrl.runtime.trace import timeline

__all__ = ["Actors", "Call", "Part", "Pending", "Ref", "Reply"]

_ENDING = threading.Lock()  # held for a moment, where a call ends
_TOLD: deque[BaseException] = deque(maxlen=1000)  # errors that somebody who waited has been given

type Ref = Any  # ray.ObjectRef, which is not imported here

_ANSI = re.compile(r"\x1b\[[0-9;]*m")  # Ray writes its tracebacks in colours
_GRACE = 10.0  # seconds in which the others of a call may tell what became of them, once one has failed


class Actors(Protocol):
    """What a call needs to know of the actors that it was made to."""

    name: str
    executable: str
    nodes: list[tuple[str, str]]
    deadline: float
    starting: "Call"
    longest: dict[str, float]  # seconds that a call of each name has taken

    def last_lines(self, rank: int) -> str:
        """What a process wrote last."""
        ...

    def end(self, why: BaseException) -> None:
        """Kill all of them."""
        ...

    def forget(self) -> None:
        """Send anew what was sent to them before."""
        ...

    def after_end(self, who: str) -> BaseException | None:
        """What a call raises if they have been ended; None: they have not."""
        ...

    def earlier(self, call: "Call") -> "list[Call]":
        """The calls that were made before this one, as far as they are not known to have ended."""
        ...


class Call:
    """A call of one function in every process of a mesh.

    Args:
        actors: where.
        who: how errors name it.
        receipts: what each process returns when it is done.
        before: the calls that made what it was given.
        read: those of them whose results lie in memory that it shares with others.
    """

    def __init__(
        self,
        actors: Actors,
        who: str,
        receipts: Sequence[Ref],
        before: Sequence["Call"] = (),
        read: Sequence["Call"] = (),
    ) -> None:
        self.actors, self.who, self.receipts, self.began = actors, who, list(receipts), time.time()
        self.before, self.read = list(before), list(read)
        self.instead: list[Any] = []  # for each rank, the value that it consumes, which is there still if all raise
        self.done, self.shown = False, timeline.shown()
        self.error: BaseException | None = None

    @property
    def untold(self) -> BaseException | None:
        """What it raised, if nobody has been told."""
        return None if any(self.error is error for error in _TOLD) else self.error

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every process is done.

        Raises:
            LostActor: one of them died; the others have been ended.
            DeadlineExceeded: it took longer than a call may, so all of them have been ended; or longer than
                ``timeout``, after which one may wait again.
            Exception: what the function raised.
        """
        self.settle(timeout)
        if self.error is not None:
            _TOLD.append(self.error)
            raise self.error.with_traceback(None)  # which would keep alive what earlier waits had in their frames

    def settle(self, timeout: float | None = None) -> None:
        """Wait for it, and first for those before it, each of which has its own deadline; raises as `wait` for time."""
        until = None if timeout is None else time.monotonic() + timeout

        def left() -> float | None:
            return None if until is None else max(0.0, until - time.monotonic())

        first = [] if self is self.actors.starting else [self.actors.starting, *self.actors.earlier(self)]
        for call in [*first, self]:
            if not call.done and not self.done:
                for given in [given for given in call.before if not given.done]:
                    given.settle(left())  # of other meshes, too: they are late, and not this one
                if not call._settle(left()):
                    raise self._late(timeout or 0.0, ended=False)
            spoilt = isinstance(call.error, MutatedBatch) and call is not self  # who knows what it wrote into
            if (call is self.actors.starting or spoilt) and call.error is not None and not self.done:
                self._fail(call.error)

    def poll(self) -> bool:
        """Whether it is done; does not wait, and raises nothing."""
        import ray

        if not self.done:
            ready, _ = ray.wait(self.receipts, num_returns=len(self.receipts), timeout=0)
            if len(ready) == len(self.receipts):
                self.settle()  # whoever reads its results is told how it ended
        return self.done

    def failure(self, patience: float = 0.0) -> BaseException | None:
        """What it raises, if one of its processes has failed by now, or does within so many seconds."""
        import ray

        if not self.done:
            ready, _ = ray.wait(self.receipts, num_returns=len(self.receipts), timeout=patience)
            if any(_error_of(ref) for ref in ready):
                self.settle()
        return self.error

    def fetch(self, refs: Sequence[Ref], timeout: float) -> list[Any]:
        """Results of this call, which is done; errors as in `wait`."""
        import ray

        try:
            return list(ray.get(list(refs), timeout=max(timeout, 1.0)))
        except ray.exceptions.GetTimeoutError:
            raise DeadlineExceeded(
                f"{self.who}: a result is ready on mesh '{self.actors.name}', but did not arrive within {timeout:g} s"
            ) from None
        except ray.exceptions.RayError as error:  # the node that held it is gone
            lost = LostActor(self.who, self.actors.name, None, "?", _cause(error))
            self.actors.end(lost)
            raise lost from None

    def _settle(self, timeout: float | None) -> bool:
        """Wait for it alone; whether it has ended, in whatever way."""
        import ray

        whole = self.actors.deadline
        limit = whole if timeout is None else min(timeout, whole)
        receipts: list[bytes] = []

        def arrived(seconds: float) -> bool:
            with contextlib.suppress(ray.exceptions.GetTimeoutError):
                receipts[:] = ray.get(self.receipts, timeout=seconds)
            return bool(receipts)

        try:
            usual = self.actors.longest.get(self.who, 0.0)  # nobody wants to read of each step that it takes a minute
            if wait_until(arrived, limit, self._told, max(SILENCE, 2 * usual)):
                self._finish([pickle.loads(each) for each in receipts])
            elif limit < whole:
                return False
            else:
                error = self._late(limit, ended=True)
                self._fail(error)
                self.actors.end(error)
        except ray.exceptions.RayError as failure:
            self._fail(self._diagnosed(failure), alike=bool(self.instead) and self._raised_everywhere())
        return True

    def _told(self, seconds: float) -> str:
        """What is waited for."""
        import ray

        ready, _ = ray.wait(self.receipts, num_returns=len(self.receipts), timeout=0)
        of = f"{len(self.receipts) - len(ready)} of {len(self.receipts)} processes"
        if self is self.actors.starting:
            return f"mesh '{self.actors.name}': waiting for {of} to start ({self.actors.executable}, {seconds:.0f} s)"
        return f"mesh '{self.actors.name}': waiting for {self.who} in {of} ({seconds:.0f} s)"

    def _finish(self, receipts: list[Receipt]) -> None:
        with _ENDING:
            if self.done:  # another thread waited, too
                return
            if len({receipt.digests for receipt in receipts}) > 1:
                self.error = PlacementError(f"{self.who}: {DIFFER}")
            self.done, self.before, self.read, self.instead = True, [], [], []
        took = max(receipt.end - receipt.start for receipt in receipts)
        self.actors.longest[self.who] = max(took, self.actors.longest.get(self.who, 0.0))
        for rank, receipt in enumerate(receipts if self.shown else []):
            start = self.began if self is self.actors.starting else receipt.start
            timeline.record(self.actors.name, rank, self.who, start, receipt.end)

    def _fail(self, error: BaseException, *, alike: bool = False) -> None:
        with _ENDING:
            if not self.done:
                self.done, self.error, self.before, self.read = True, error, [], []
                self.instead = self.instead if alike else []

    def _late(self, waited: float, *, ended: bool) -> DeadlineExceeded:
        import ray

        ready, _ = ray.wait(self.receipts, num_returns=len(self.receipts), timeout=0)
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
        """What really happened: a death explains errors of the others, and an earlier call those of this one."""
        for call in self.before:
            if (earlier := call.failure()) is not None:
                return earlier
        if (ended := self.actors.after_end(self.who)) is not None:
            return ended
        errors, silent = self._errors()
        for rank, error in errors.items():
            if _is_death(error):
                lost = self._lost(rank, error)
                self.actors.end(lost)
                return lost
        rank, raised = next(iter(errors.items()), (0, failure))
        found = _original(raised, f"raised in rank {rank} of mesh '{self.actors.name}'")
        if isinstance(found, MutatedBatch):
            self.actors.forget()
            for call in self.read:
                call.error = found
        if isinstance(found, ModuleNotFoundError) and found.name:
            package = found.name.partition(".")[0]
            found.add_note(
                f"The environment of mesh '{self.actors.name}' has no package '{package}': name it in the requirements "
                "of its Executable, or use executable='system' if the driver's own interpreter has it"
            )
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
        """The errors of the ranks as they come, until one has died or all have told; and which ranks have not."""
        import ray

        until = time.monotonic() + _GRACE
        ranks = {ref: rank for rank, ref in enumerate(self.receipts)}
        errors: dict[int, BaseException] = {}
        while ranks:
            ready, _ = ray.wait(list(ranks), num_returns=1, timeout=max(0.0, until - time.monotonic()))
            if not ready:
                break
            rank = ranks.pop(ready[0])
            error = _error_of(ready[0])
            if error is not None:
                errors[rank] = error
                if _is_death(error):
                    break
        return errors, sorted(ranks.values())

    def _raised_everywhere(self) -> bool:
        """Whether no process did what it was asked to, and none has died."""
        import ray

        ray.wait(self.receipts, num_returns=len(self.receipts), timeout=_GRACE)
        errors = [_error_of(ref) for ref in self.receipts]
        return all(error is not None and not _is_death(error) for error in errors)

    def _lost(self, rank: int, error: BaseException) -> LostActor:
        node, trace = self.actors.nodes[rank][1], _raised_at_start(error)
        if trace:
            return FailedStart(self.who, self.actors.name, rank, node, f"it raised {trace.splitlines()[-1]}", trace)
        return LostActor(self.who, self.actors.name, rank, node, _cause(error), self.actors.last_lines(rank))


def _is_death(error: BaseException) -> bool:
    """Whether an error says that the process itself, or its node, is gone."""
    from ray import exceptions

    gone = exceptions.RayActorError | exceptions.WorkerCrashedError | exceptions.NodeDiedError
    unstarted = exceptions.OutOfMemoryError | exceptions.RuntimeEnvSetupError | exceptions.ActorPlacementGroupRemoved
    return isinstance(error, gone | unstarted) and not isinstance(error, exceptions.RayTaskError)


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
    raised = cause if isinstance(cause, Raised) else None
    text = _ANSI.sub("", str(error)) if raised is None else raised.trace
    found = raised.original() if raised is not None else cause or RuntimeError(text)
    found.add_note(f"{where}:\n{text.rstrip()}")
    return found


def _raised_at_start(error: BaseException) -> str:
    """The traceback of what a constructor raised, or the import of its class; empty where it was not that."""
    text = _ANSI.sub("", str(error)).partition("\nAn unexpected internal error")[0].rstrip()
    _, constructor, raised = text.partition("raised in its creation task, ")
    if constructor:
        return raised[max(raised.find("  File "), 0) :]
    _, found, trace = text.rpartition("Traceback (most recent call last):")
    return f"{found}{trace}" if found else ""


def _cause(error: BaseException) -> str:
    """Why an actor died, on one line: what Ray knows, without its guesses."""
    from ray.exceptions import ActorUnavailableError

    text = str(error)
    process = re.search(r"\bpid: (\d+)", text)
    if "connection error code 2" in text:
        return f"process {process[1] if process else '?'} was killed, or crashed"
    if isinstance(error, ActorUnavailableError):
        return "it cannot be reached any more, as when its node is gone"
    if code := re.search(r"exit code (\d+)", text):
        return f"process {process[1] if process else '?'} ended with exit code {code[1]}"
    for mark in ("Worker exit detail:", "The actor died because", "The actor is dead because"):
        if mark in text:
            text = text[text.index(mark) + (len(mark) if mark.endswith(":") else 0) :]
            break
    text = text.partition("Some common causes include")[0]  # which are guesses, for anybody
    return " ".join(_ANSI.sub("", text).split())[:500].rstrip(".")


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.rstrip().splitlines())


class Reply:
    """Satisfies `nrl.runtime.mesh.placement.Reply`."""

    def __init__(self, call: Call, refs: Sequence[Ref]) -> None:
        self._call, self._refs = call, list(refs)

    def then(
        self, combine: Callable[[list[Any]], Any], rows: Sequence[Tensor] | None = None, like: Tensor | None = None
    ) -> "Pending":
        """A future of what ``combine`` makes of the results."""
        return Pending(self._call, self._refs, combine, rows, like)


class Pending:
    """A future of a value that is made of what some processes return; satisfies `nrl.runtime.mesh.futures.Coming`."""

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
        """Wait for the value and fetch it; see `Call.wait`."""
        if not self._value:
            started = time.monotonic()
            self.call.wait(timeout)
            left = self.call.actors.deadline - (time.monotonic() - started)
            copy = self.rows is None  # where rows are put in order that makes a copy anyway
            parts = [opened(parts, copy=copy)[0] for parts in self.call.fetch(self.refs, left)]
            self._value.append(self.combine(parts))
        return self._value[0]

    def failure(self) -> BaseException | None:
        """What the call that makes it has raised by now."""
        return self.call.failure()

    @functools.cached_property
    def by_rows(self) -> dict[bytes, Ref]:
        """Which result holds just these rows."""
        held = list(zip(self.rows or (), self.refs, strict=False))
        return {rows.numpy().tobytes(): ref for rows, ref in reversed(held)}

    def part(self, index: Tensor) -> "Part":
        """Some rows of the value, as an argument of a call."""
        return Part(self, index)

    def __reduce__(self) -> Any:
        raise TypeError("a future is known to its own program only; give it to the call as an argument of its own")


class Part:
    """Rows of a value that is on its way."""

    def __init__(self, whole: Pending, index: Tensor) -> None:
        self.whole, self.index = whole, index

    def alone(self) -> Ref | None:
        """The result that holds just these rows, if there is one."""
        return self.whole.by_rows.get(self.index.numpy().tobytes())
