"""The engines of one mesh, as the driver sees them: their common state, and the requests that wait for them.

Engines on one mesh live and die together and take turns together, so they have one state:

                  serve                 receive
    +----------+         +---------+             +-----------+
    | starting | ------> | serving | ----------> | receiving |
    |          | <------ |         | <---------- |           |
    +----------+   die   +---------+    serve    +-----------+
     |  |  ^  ^                                    |  |  ^
     |  |  |  +-------------- die -----------------+  |  | receive
     |  |  |                                          |  |
     |  |  +---- die ----+-------+ <----- lack -------+  |
     |  +----- lack ---> | empty | ----------------------+
     | lose              +-------+
     v
    lost
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import attrs
import torch

from nrl.backends.engine import Decoded, Request, SampleEngine
from nrl.backends.types import Completion
from nrl.errors import FailedStart, LostActor, NrlError, PlacementError
from nrl.runtime.mesh.futures import Future
from nrl.runtime.mesh.placement import Mesh, Slots, as_mesh
from nrl.runtime.mesh.processes import Out, Results
from nrl.runtime.mesh.rpc import Each, call, from_first, method, only
from nrl.runtime.trace import timeline
from nrl.runtime.venvs.registry import Executable

__all__ = ["EngineReplica", "EngineStep", "PendingRequest", "ReplicaState", "meshes"]

# The completion of a request that was given up: whoever asked for other prompts in the same call still waits for all.
_NOTHING = Completion(torch.zeros(0, dtype=torch.int64), torch.zeros(0), truncated=True, version=0)
_PAUSE, _LONGEST = 0.05, 10.0  # seconds: of a pause that shows in the timeline, and of a bar

type ReplicaState = Literal["starting", "serving", "receiving", "empty", "lost"]
"""The state of a replica: its engines start (again), answer, are given weights, have none, or are gone."""

type EngineStep = tuple[list[Request], list[int]]
"""The work for an engine: new requests, and the numbers of those that nobody wants any more."""


@attrs.define(eq=False)
class PendingRequest:
    """A request that somebody waits for.

    Args:
        request: what is to be done.
        answer: of it.
        times: how often an engine has been asked.
        deaths: how many engines died with it.
        is_given_up: returns whether nobody waits any more, although the answer is not cancelled.

    >>> PendingRequest(Request(0, [1], 0, None)).times
    0
    """

    request: Request
    answer: "futures.Future[Completion]" = attrs.field(factory=futures.Future)
    times: int = 0
    deaths: int = 0
    is_given_up: Callable[[], bool] = lambda: False

    @property
    def is_wanted(self) -> bool:
        """True while somebody still waits for the answer."""
        return not (self.answer.cancelled() or self.is_given_up())

    def complete(self, completion: Completion) -> None:
        """Answer the request."""
        with suppress(futures.InvalidStateError):  # The future has been cancelled.
            self.answer.set_result(completion._replace(times=self.times))

    def fail(self, error: BaseException) -> None:
        """Answer the request with an error."""
        with suppress(futures.InvalidStateError):
            self.answer.set_exception(error)


def meshes(place: Slots | Mesh, executable: str | Executable, tp: int = 1) -> list[Mesh]:
    """Return the meshes of a sampler's engines: a given mesh, or one for each ``tp`` slots, so that engines die alone.

    On the local cluster one mesh stands for all slots.

    Raises:
        PlacementError: the slots cannot be divided by ``tp``, or the mesh has another.

    >>> from nrl.runtime import cluster
    >>> with cluster("local") as here:
    ...     len(meshes(here.reserve(2), "base"))
    1
    """
    if isinstance(place, Mesh) and tp not in (1, place.tp):
        raise PlacementError(f"sampler: tp={tp}, but a mesh was given that has tp={place.tp}; leave one out")
    if isinstance(place, Mesh) or not place.cluster.remote or (tp == 1 and len(place) < 2):
        return [as_mesh(place, executable, "sampler")]
    if tp < 1 or len(place) % tp:
        raise PlacementError(f"sampler: {len(place)} slots cannot be divided into engines of tp={tp} slots")
    parts = [place[first : first + tp] for first in range(0, len(place), tp)]
    return [part.mesh(tp=tp, executable=executable, name=f"sampler {i}") for i, part in enumerate(parts)]


class EngineReplica:
    """The engines of a mesh: their number, their state and their requests.

    Args:
        mesh: where they are.
        name: how errors name the sampler.
        make: makes an engine, in each process.
        changed: guards the state and the queues; every new state notifies it.
    """

    def __init__(self, mesh: Mesh, name: str, make: Callable[[], SampleEngine], changed: threading.Condition) -> None:
        self.mesh, self._name, self._make = mesh, name, make
        self.engines = 1 if mesh.processes.count == 1 else mesh.dp
        self.waiting: list[list[PendingRequest]] = [[] for _ in range(self.engines)]
        self.requests: list[dict[int, PendingRequest]] = [{} for _ in range(self.engines)]
        self._unwanted: list[list[int]] = [[] for _ in range(self.engines)]
        self._changed = changed
        self._state: ReplicaState = "starting"
        self._error: Exception | None = None
        self._finishes = False  # Requests in flight are finished before a receive.
        self._deaths = 0  # deaths since the last answer
        self._decoded = 0.0, 0.0  # begin and end in seconds since the epoch, not yet in the timeline
        self._start()
        self.serve()

    @property
    def state(self) -> ReplicaState:
        """The state of its engines; see the picture above."""
        return self._state

    @property
    def error(self) -> Exception | None:
        """The cause of the engines' death while they are starting, or of their loss."""
        return self._error

    def serve(self) -> None:
        """Note that the engines have weights and answer from now on."""
        self._become("serving", "starting", "receiving")

    def receive(self, *, finish: bool = False) -> None:
        """Note that the engines get weights after the current call; with ``finish``, after the requests in flight."""
        self._become("receiving", "serving", "empty")
        self._finishes = finish

    def lack(self) -> None:
        """Note that the engines have no weights, or only some, and wait for others."""
        self._become("empty", "starting", "receiving")

    def die(self, error: Exception) -> None:
        """Note that the engines' processes are gone and have to be started again; see `restart`."""
        self._become("starting", "serving", "receiving", "empty", error=error)

    def lose(self, error: Exception) -> None:
        """Note that the engines are not started again."""
        self._become("lost", "starting", error=error)

    def _become(self, state: ReplicaState, *since: ReplicaState, error: Exception | None = None) -> None:
        with self._changed:
            if self._state not in since:
                allowed = ", ".join(since)
                raise RuntimeError(f"EngineReplica: '{self._state}' cannot become '{state}'; only {allowed} can")
            self._state, self._error = state, error
            self._changed.notify_all()

    @property
    def load(self) -> list[float]:
        """The number of requests of each engine; infinite while it cannot work on them."""
        away = 0 if self.state in ("serving", "receiving") else math.inf
        return [
            away + len(waiting) + len(requests) for waiting, requests in zip(self.waiting, self.requests, strict=True)
        ]

    @property
    def under_way(self) -> bool:
        """True while the engines have unanswered requests."""
        return any(self.requests)

    @property
    def is_finishing(self) -> bool:
        """True while the engines still have requests to answer before they receive."""
        return self.state == "receiving" and self._finishes and self.under_way

    @property
    def has_work(self) -> bool:
        """True while there is work to do."""
        return self.state == "starting" or self.under_way or any(self.waiting)

    @property
    def is_ready(self) -> bool:
        """True if the replica's thread may go on: ask engines, start them, or end. Otherwise they need weights."""
        match self.state:
            case "receiving":
                return self.is_finishing
            case "empty":
                return not self.has_work
            case _:
                return True

    def _start(self) -> None:
        self._handles = Each(call(self.mesh, self._name, self._make))

    def restart(self, times: int, ready: Callable[[], None]) -> None:
        """Take new processes on the same slots, whose engines have the weights that the model began with.

        Args:
            times: how often in a row they may die, the last time included.
            ready: the last preparation before serving, in which engines may die, too.

        Raises:
            Exception: the engines died ``times`` times, or would die again. If another error keeps them from starting,
                such as a lost host, its cause is the death: `nrl.retrying` looks for a loss among the causes.
        """
        error = cause = self.error
        while True:
            assert error is not None
            cause = error if isinstance(error, LostActor) else cause
            self._deaths += 1
            if isinstance(error, FailedStart) or self._deaths >= times:
                raise error from (cause if cause is not error else None)
            try:
                self.mesh = attrs.evolve(self.mesh)
                self._unwanted = [[] for _ in range(self.engines)]
                self._start()
                self.about()  # Wait until the engines exist.
                return ready()
            except Exception as again:
                self.mesh.cluster.check_open("generate")
                if (error := self.describe_death(again)) is None:
                    raise

    def describe_death(self, error: Exception) -> Exception | None:
        """Return the error of the engines' death, if they have to be started again after this one; None: they go on.

        An unexpected error, such as one of CUDA, leaves an engine in an unknown state. Then its processes are ended,
        unless it runs in this process.
        """
        if self.mesh.processes.has_ended:
            return error
        if not self.mesh.cluster.remote or isinstance(error, NrlError):
            return None
        lost = LostActor(self._name, self.mesh.name, None, "?", f"its engine raised {type(error).__name__}: {error}")
        self.mesh.processes.end(lost)
        return lost

    def about(self) -> tuple[int, int, torch.dtype | None]:
        """Return the context length, the vocabulary, and the dtype in which matrices may come."""
        properties: tuple[int, int, torch.dtype | None] = from_first(self.mesh, self._name, _about, self._handles)
        return properties

    def take_steps(self) -> list[EngineStep]:
        """Return the next step of each engine: waiting requests, if it serves, and requests to forget."""
        work, new = [], self.state == "serving"
        for waiting, in_flight, unwanted in zip(self.waiting, self.requests, self._unwanted, strict=True):
            gone = [number for number, request in in_flight.items() if not request.is_wanted]
            for number in gone:
                in_flight.pop(number).complete(_NOTHING)
            taken = [request for request in waiting if request.is_wanted] if new else []
            for request in waiting if new else []:
                if not request.is_wanted:
                    request.complete(_NOTHING)
            for request in taken:
                request.times += 1
                in_flight[request.request.number] = request
            work.append(([request.request for request in taken], [*unwanted, *gone]))
            unwanted.clear()
            if new:
                waiting.clear()
        return work

    def take_back(self) -> tuple[list[PendingRequest], list[PendingRequest]]:
        """Take all requests back: those of engines, which will be told to forget them, and those that wait."""
        in_flight = [request for requests in self.requests for request in requests.values()]
        waiting = [request for queue in self.waiting for request in queue]
        for queue, requests, unwanted in zip(self.waiting, self.requests, self._unwanted, strict=True):
            unwanted.extend(requests)
            requests.clear()
            queue.clear()
        return in_flight, waiting

    def pop_request(self, engine: int, number: int, answer: Completion | Exception) -> PendingRequest | None:
        """Remove and return the request of an answer; None: nobody waits for it any more."""
        awaited = self.requests[engine].pop(number, None)
        if awaited is not None and not isinstance(answer, Exception):
            self._deaths = 0
        return awaited

    def advance(self, work: Sequence[EngineStep], version: int) -> list[list[tuple[int, Completion | Exception]]]:
        """Let every engine decode for a while, with weights of this version; return the finished answers of each."""
        began = time.time()
        with timeline.hide_calls():
            reply = self._call("generate", "advance", *zip(*work, strict=True))
        finished: list[Sequence[tuple[int, Decoded | Exception]]] = reply.then(list).result()
        if began - self._decoded[1] > _PAUSE or began - self._decoded[0] > _LONGEST:
            self.show()
            self._decoded = began, began
        self._decoded = self._decoded[0], time.time()
        return [[(number, _stamp_version(answer, version)) for number, answer in answers] for answers in finished]

    def complete(self, request: Request, version: int) -> list[Completion]:
        """Let every engine complete a prompt, while it has nothing else to do."""
        completions: dict[int, Completion] = {}
        requests = [request]
        while len(completions) < self.engines:
            for engine, answers in enumerate(self.advance([(requests, [])] * self.engines, version)):
                for _, answer in answers:
                    if isinstance(answer, Exception):
                        raise answer
                    completions[engine] = answer
            requests = []
        return [completions[engine] for engine in range(self.engines)]

    def show(self) -> None:
        """Note in the timeline the time of decoding since the last pause, as one bar for many calls."""
        began, ended = self._decoded
        for rank in range(self.mesh.processes.count if ended > began else 0):
            timeline.record(self.mesh.name, rank, "generate", began, ended)
        self._decoded = 0.0, 0.0

    def load_weights(self, step: Literal["begin", "add", "end"], *args: Any) -> Future[Any]:
        """Let every engine take a step of `nrl.backends.engine.SampleEngine` towards new weights; returns at once."""
        columns = [[arg] * self.engines for arg in args]
        # Where the trainer is on the same device, it stays there: what it sends may lie on it
        return self._call("receive", step, *columns, turn=False).then(only)

    def _call(self, caller: str, name: str, *columns: Sequence[Any], turn: bool = True) -> Results:
        """Call a method of the engine in each process, with the arguments of its engine."""
        count = self.mesh.processes.count
        engines = [0 if count == 1 else self.mesh.shard_of(rank) for rank in range(count)]
        args = (Each([column[engine] for engine in engines]) for column in columns)
        reply: Results = call(
            self.mesh, caller, partial(method, name), self._handles, *args, outs=Out.per_shard, turn=turn
        )
        return reply


def _about(engine: SampleEngine) -> tuple[int, int, torch.dtype | None]:
    return engine.context_length, engine.vocabulary, getattr(engine, "matrices", None)


def _stamp_version(answer: Decoded | Exception, version: int) -> Completion | Exception:
    if isinstance(answer, Exception):
        return answer
    oldest = version if answer.versions is None else int(answer.versions.min())
    ids, logprobs, truncated, versions, routes = answer
    return Completion(ids, logprobs, truncated, oldest, versions, routes=routes)
