"""The engines of one mesh, as the driver sees them: the state that they share, and who waits for what from them.

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

__all__ = ["Awaited", "Seat", "SeatState", "Work", "meshes"]

# The completion of a request that was given up: whoever asked for other prompts in the same call still waits for all.
_NOTHING = Completion(torch.zeros(0, dtype=torch.int64), torch.zeros(0), truncated=True, version=0)
_PAUSE, _LONGEST = 0.05, 10.0  # seconds: of a pause that shows in the timeline, and of a bar

type SeatState = Literal["starting", "serving", "receiving", "empty", "lost"]
"""What the engines of a seat do: they are started (again), answer, are given weights, have none, or are gone."""

type Work = tuple[list[Request], list[int]]
"""The work for an engine: new requests, and the numbers of those that nobody wants any more."""


@attrs.define(eq=False)
class Awaited:
    """A request that somebody waits for.

    Args:
        request: what is to be done.
        answer: of it.
        times: how often an engine has been asked.
        deaths: how many engines died with it.
        is_given_up: returns whether nobody waits any more, although the answer is not cancelled.

    >>> Awaited(Request(0, [1], 0, None)).times
    0
    """

    request: Request
    answer: "futures.Future[Completion]" = attrs.field(factory=futures.Future)
    times: int = 0
    deaths: int = 0
    is_given_up: Callable[[], bool] = lambda: False

    @property
    def is_wanted(self) -> bool:
        """Whether somebody still waits for it."""
        return not (self.answer.cancelled() or self.is_given_up())

    def give(self, completion: Completion) -> None:
        """Answer it."""
        with suppress(futures.InvalidStateError):  # it has been cancelled
            self.answer.set_result(completion._replace(times=self.times))

    def fail(self, error: BaseException) -> None:
        """Say why it is not answered."""
        with suppress(futures.InvalidStateError):
            self.answer.set_exception(error)


def meshes(place: Slots | Mesh, executable: str | Executable, tp: int = 1) -> list[Mesh]:
    """A mesh as it is; of slots, one for each ``tp``, so that an engine dies alone. In this process one stands for all.

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


class Seat:
    """The engines of a mesh: how many there are, what state they are in, and what they were asked.

    Args:
        mesh: where they are.
        name: how errors name the sampler.
        make: makes an engine, in each process.
        changed: guards the state and the queues; every new state notifies it.
    """

    def __init__(self, mesh: Mesh, name: str, make: Callable[[], SampleEngine], changed: threading.Condition) -> None:
        self.mesh, self._name, self._make = mesh, name, make
        self.engines = 1 if mesh.processes.count == 1 else mesh.dp
        self.waiting: list[list[Awaited]] = [[] for _ in range(self.engines)]
        self.asked: list[dict[int, Awaited]] = [{} for _ in range(self.engines)]
        self._unwanted: list[list[int]] = [[] for _ in range(self.engines)]
        self._changed = changed
        self._state: SeatState = "starting"
        self._error: Exception | None = None
        self._finishes = False  # what is under way, before it receives
        self._deaths = 0  # since it last answered something
        self._decoded = 0.0, 0.0  # from when to when, in seconds since the epoch, as far as that is not yet shown
        self._start()
        self.serve()

    @property
    def state(self) -> SeatState:
        """What its engines do; see the picture above."""
        return self._state

    @property
    def error(self) -> Exception | None:
        """Of what they died, while they are starting; why they are lost."""
        return self._error

    def serve(self) -> None:
        """They have weights, and answer from now on."""
        self._become("serving", "starting", "receiving")

    def receive(self, *, finish: bool = False) -> None:
        """They are given weights, when nobody asks them any more; with ``finish``, after what is under way."""
        self._become("receiving", "serving", "empty")
        self._finishes = finish

    def lack(self) -> None:
        """They have no weights, or only some, and wait for others."""
        self._become("empty", "starting", "receiving")

    def die(self, error: Exception) -> None:
        """Their processes are gone, and have to be started again; see `restart`."""
        self._become("starting", "serving", "receiving", "empty", error=error)

    def lose(self, error: Exception) -> None:
        """They are not started again."""
        self._become("lost", "starting", error=error)

    def _become(self, state: SeatState, *since: SeatState, error: Exception | None = None) -> None:
        with self._changed:
            if self._state not in since:
                raise RuntimeError(f"Seat: '{self._state}' cannot become '{state}'; only {', '.join(since)} can")
            self._state, self._error = state, error
            self._changed.notify_all()

    @property
    def load(self) -> list[float]:
        """For each engine, how many requests it has; infinitely many, while it cannot work on them."""
        away = 0 if self.state in ("serving", "receiving") else math.inf
        return [away + len(waiting) + len(asked) for waiting, asked in zip(self.waiting, self.asked, strict=True)]

    @property
    def under_way(self) -> bool:
        """Whether they have been asked something that they have not answered."""
        return any(self.asked)

    @property
    def finishing(self) -> bool:
        """Whether they have still to answer something before they receive."""
        return self.state == "receiving" and self._finishes and self.under_way

    @property
    def wanted(self) -> bool:
        """Whether there is something to do."""
        return self.state == "starting" or self.under_way or any(self.waiting)

    @property
    def free(self) -> bool:
        """Whether who looks after them may go on, and ask them, start them, or leave; otherwise they need weights."""
        match self.state:
            case "receiving":
                return self.finishing
            case "empty":
                return not self.wanted
            case _:
                return True

    def _start(self) -> None:
        self._there = Each(call(self.mesh, self._name, self._make))

    def restart(self, times: int, ready: Callable[[], None]) -> None:
        """Take new processes on the same slots, whose engines have the weights that the model began with.

        Args:
            times: how often in a row they may die, the last time included.
            ready: what else has to be done before they serve; they may die of that.

        Raises:
            Exception: they died as often as that, or would do so again. Where something else keeps them from starting,
                such as that their host is gone, its cause is the death; of a loss, since `nrl.retrying` looks for one.
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
                self.about()  # they are there
                return ready()
            except Exception as again:
                self.mesh.cluster.check_open("generate")
                if (error := self.death(again)) is None:
                    raise

    def death(self, error: Exception) -> Exception | None:
        """How to say of what they died, if they have to be started again after this; None: they go on.

        What nrl did not raise on purpose, such as an error of CUDA, leaves an engine in a state that nobody knows. Its
        processes are ended then, if they are others than this one.
        """
        if self.mesh.processes.has_ended:
            return error
        if not self.mesh.cluster.remote or isinstance(error, NrlError):
            return None
        lost = LostActor(self._name, self.mesh.name, None, "?", f"its engine raised {type(error).__name__}: {error}")
        self.mesh.processes.end(lost)
        return lost

    def about(self) -> tuple[int, int, torch.dtype | None]:
        """The context length, the vocabulary, and the dtype that matrices may come in."""
        found: tuple[int, int, torch.dtype | None] = from_first(self.mesh, self._name, _about, self._there)
        return found

    def take(self) -> list[Work]:
        """What to tell each engine: what waits, if it serves; and what nobody wants any more."""
        work, new = [], self.state == "serving"
        for waiting, asked, unwanted in zip(self.waiting, self.asked, self._unwanted, strict=True):
            gone = [number for number, each in asked.items() if not each.is_wanted]
            for number in gone:
                asked.pop(number).give(_NOTHING)
            taken = [each for each in waiting if each.is_wanted] if new else []
            for each in waiting if new else []:
                if not each.is_wanted:
                    each.give(_NOTHING)
            for each in taken:
                each.times += 1
                asked[each.request.number] = each
            work.append(([each.request for each in taken], [*unwanted, *gone]))
            unwanted.clear()
            if new:
                waiting.clear()
        return work

    def take_back(self) -> tuple[list[Awaited], list[Awaited]]:
        """What engines were asked, which they will be told to forget, and what waits to be asked."""
        asked = [each for held in self.asked for each in held.values()]
        waiting = [each for queue in self.waiting for each in queue]
        for queue, held, unwanted in zip(self.waiting, self.asked, self._unwanted, strict=True):
            unwanted.extend(held)
            held.clear()
            queue.clear()
        return asked, waiting

    def answered(self, engine: int, number: int, answer: Completion | Exception) -> Awaited | None:
        """Who waits for this, no more from now on; None: nobody wants it any more."""
        awaited = self.asked[engine].pop(number, None)
        if awaited is not None and not isinstance(answer, Exception):
            self._deaths = 0
        return awaited

    def advance(self, work: Sequence[Work], version: int) -> list[list[tuple[int, Completion | Exception]]]:
        """Let every engine decode for a while, with weights of this version; what each has finished."""
        began = time.time()
        with timeline.hide_calls():
            reply = self._call("generate", "advance", *zip(*work, strict=True))
        found: list[Sequence[tuple[int, Decoded | Exception]]] = reply.then(list).result()
        if began - self._decoded[1] > _PAUSE or began - self._decoded[0] > _LONGEST:
            self.show()
            self._decoded = began, began
        self._decoded = self._decoded[0], time.time()
        return [[(number, _stamped(answer, version)) for number, answer in each] for each in found]

    def complete(self, request: Request, version: int) -> list[Completion]:
        """Let every engine complete a prompt, while it has nothing else to do."""
        found: dict[int, Completion] = {}
        requests = [request]
        while len(found) < self.engines:
            for engine, answers in enumerate(self.advance([(requests, [])] * self.engines, version)):
                for _, answer in answers:
                    if isinstance(answer, Exception):
                        raise answer
                    found[engine] = answer
            requests = []
        return [found[engine] for engine in range(self.engines)]

    def show(self) -> None:
        """Note in the timeline how long it has decoded since the last pause: there are many calls, and all alike."""
        began, ended = self._decoded
        for rank in range(self.mesh.processes.count if ended > began else 0):
            timeline.record(self.mesh.name, rank, "generate", began, ended)
        self._decoded = 0.0, 0.0

    def load_weights(self, step: Literal["begin", "add", "end"], *args: Any) -> Future[Any]:
        """Let every engine take a step of `nrl.backends.engine.SampleEngine` towards new weights; returns at once."""
        columns = [[arg] * self.engines for arg in args]
        # Where the trainer is on the same device, it stays there: what it sends may lie on it
        return self._call("receive", step, *columns, turn=False).then(only)

    def _call(self, who: str, name: str, *columns: Sequence[Any], turn: bool = True) -> Results:
        """A method of the engine in each process, with the arguments of its engine."""
        count = self.mesh.processes.count
        engines = [0 if count == 1 else self.mesh.shard_of(rank) for rank in range(count)]
        args = (Each([column[engine] for engine in engines]) for column in columns)
        reply: Results = call(self.mesh, who, partial(method, name), self._there, *args, outs=Out.per_shard, turn=turn)
        return reply


def _about(engine: SampleEngine) -> tuple[int, int, torch.dtype | None]:
    return engine.context_length, engine.vocabulary, getattr(engine, "matrices", None)


def _stamped(answer: Decoded | Exception, version: int) -> Completion | Exception:
    if isinstance(answer, Exception):
        return answer
    oldest = version if answer.versions is None else int(answer.versions.min())
    ids, logprobs, truncated, versions, routes = answer
    return Completion(ids, logprobs, truncated, oldest, versions, routes=routes)
