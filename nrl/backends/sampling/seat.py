"""An engine from the driver's side: its mesh, its state, and the requests that it has not answered.

Engines that are on one mesh live and die together, and take turns together.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from contextlib import suppress
from typing import Any

import attrs

from nrl.backends.base import Bucket, Completion
from nrl.backends.sampling import replica
from nrl.backends.sampling.replica import Held, Replica, Request
from nrl.errors import FailedStart, LostActor, NrlError, PlacementError
from nrl.runtime.executables.registry import Executable
from nrl.runtime.mesh.futures import Future, on_its_way
from nrl.runtime.mesh.placement import Mesh, Out, Reply, Slots, as_mesh
from nrl.runtime.trace import timeline

__all__ = ["Asked", "Order", "Seat", "meshes"]

_PAUSE, _LONGEST = 0.05, 10.0  # seconds: of a pause that shows in the timeline, and of a bar

type Order = tuple[list[Request], list[int]]
"""What an engine is told: new requests, and the numbers of those that nobody wants any more."""


@attrs.define(eq=False)
class Asked:
    """A request that somebody waits for.

    Args:
        request: what is to be done.
        answer: of it.
        times: how often an engine has been asked.
        deaths: how many engines died with it.

    >>> Asked(Request(0, [1], 0, None)).times
    0
    """

    request: Request
    answer: "futures.Future[Completion]" = attrs.field(factory=futures.Future)
    times: int = 0
    deaths: int = 0

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
    """The engines of a mesh: how many there are, what they do, and what they were asked.

    Args:
        mesh: where they are.
        name: how errors name the sampler.
        make: makes an engine, in each process.
    """

    def __init__(self, mesh: Mesh, name: str, make: Callable[[], Replica]) -> None:
        self.mesh, self._name, self._make = mesh, name, make
        self.engines = 1 if mesh.processes.count == 1 else mesh.dp
        self.waiting: list[list[Asked]] = [[] for _ in range(self.engines)]
        self.asked: list[dict[int, Asked]] = [{} for _ in range(self.engines)]
        self._unwanted: list[list[int]] = [[] for _ in range(self.engines)]
        self.worker: threading.Thread | None = None  # who asks the engines
        self.busy = False  # a call is under way
        self.died: Exception | None = None  # of what, until it has been started again
        self.empty = False  # it has been started again, and there were no weights to give it
        self.deaths = 0  # since it last answered something
        self.lost: Exception | None = None  # why it is not started again
        self._over = False  # its processes have been ended, as far as that can be
        self._decoded = 0.0, 0.0  # from when to when, in seconds since the epoch, as far as that is not yet shown
        self._start()

    def _start(self) -> None:
        count = self.mesh.processes.count
        (self._held,) = self.mesh.processes.call(self._name, Held, [[self._make]] * count, Out.kept)

    def restart(self, error: Exception, times: int, ready: Callable[[], None]) -> None:
        """Take new processes on the same slots, whose engines have the weights that the model began with.

        Args:
            error: what the last ones died of.
            times: how often in a row they may die, these included.
            ready: what else has to be done before they serve; they may die of that.

        Raises:
            Exception: they died as often as that, or would do so again.
        """
        while True:
            self.deaths += 1
            if isinstance(error, FailedStart) or self.deaths >= times:
                raise error
            try:
                self.mesh, self._over = attrs.evolve(self.mesh), False
                self._unwanted = [[] for _ in range(self.engines)]
                self._start()
                self.about()  # they are there
                return ready()
            except Exception as again:
                self.mesh.cluster.check_open("generate")
                if (death := self.death(again)) is None:
                    raise
                error = death

    @property
    def load(self) -> list[float]:
        """For each engine, how many requests it has; infinitely many, while it cannot work on them."""
        away = math.inf if self.lost or self.died or self.empty else 0
        return [away + len(waiting) + len(asked) for waiting, asked in zip(self.waiting, self.asked, strict=True)]

    @property
    def ended(self) -> bool:
        """Whether its processes are gone."""
        return self._over or self.mesh.processes.ended

    def death(self, error: Exception) -> Exception | None:
        """How to say of what it died, if it has to be started again after this; None: it goes on.

        What nrl did not raise on purpose, such as an error of CUDA, leaves an engine in a state that nobody knows. Its
        processes are ended then, if they are others than this one.
        """
        if self.ended:
            return error
        if not self.mesh.cluster.remote or isinstance(error, NrlError):
            return None
        lost = LostActor(self._name, self.mesh.name, None, "?", f"its engine raised {type(error).__name__}: {error}")
        self.mesh.processes.end(lost)
        self._over = True
        return lost

    @property
    def under_way(self) -> bool:
        """Whether engines have been asked something that they have not answered."""
        return any(self.asked)

    @property
    def wanted(self) -> bool:
        """Whether there is something to do."""
        return self.under_way or any(self.waiting)

    def about(self) -> tuple[int, int]:
        """The context length and the vocabulary."""
        found: tuple[int, int] = self._call(self._name, replica.about, Out.first).then(_only).result()
        return found

    def order(self, *, new: bool) -> list[Order]:
        """What to tell each engine: with ``new``, what waits is asked now; and what nobody wants any more."""
        orders = []
        for waiting, asked, unwanted in zip(self.waiting, self.asked, self._unwanted, strict=True):
            gone = [number for number, each in asked.items() if each.answer.cancelled()]
            for number in gone:
                del asked[number]
            taken = [each for each in waiting if not each.answer.cancelled()] if new else []
            for each in taken:
                each.times += 1
                asked[each.request.number] = each
            orders.append(([each.request for each in taken], [*unwanted, *gone]))
            unwanted.clear()
            if new:
                waiting.clear()
        return orders

    def advance(self, orders: Sequence[Order]) -> "list[list[tuple[int, Completion | Exception]]]":
        """Let every engine decode for a while; what each has finished."""
        began = time.time()
        with timeline.unshown():
            reply = self._call("generate", replica.advance, Out.each, *zip(*orders, strict=True))
        found: list[list[tuple[int, Completion | Exception]]] = reply.then(list).result()
        if began - self._decoded[1] > _PAUSE or began - self._decoded[0] > _LONGEST:
            self.show()
            self._decoded = began, began
        self._decoded = self._decoded[0], time.time()
        return found

    def complete(self, request: Request) -> list[Completion]:
        """Let every engine complete a prompt, while it has nothing else to do."""
        found: dict[int, Completion] = {}
        requests = [request]
        while len(found) < self.engines:
            for engine, answers in enumerate(self.advance([(requests, [])] * self.engines)):
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

    def take_back(self) -> tuple[list[Asked], list[Asked]]:
        """What engines were asked, which they will be told to forget, and what waits to be asked."""
        asked = [each for held in self.asked for each in held.values()]
        waiting = [each for queue in self.waiting for each in queue]
        for queue, held, unwanted in zip(self.waiting, self.asked, self._unwanted, strict=True):
            unwanted.extend(held)
            held.clear()
            queue.clear()
        return asked, waiting

    def begin(self) -> Future[Any]:
        """New weights will come; returns at once, as the next two."""
        return self._everywhere(replica.begin)

    def add(self, bucket: Bucket | Future[Bucket]) -> Future[Any]:
        """Some of them."""
        return self._everywhere(replica.add, on_its_way(bucket))

    def end(self, version: int) -> Future[Any]:
        """They have come."""
        return self._everywhere(replica.end, version)

    def _everywhere(self, fn: Callable[..., None], *args: Any) -> Future[Any]:
        # Where the trainer is on the same device, it stays there: what it sends may lie on it
        return self._call("receive", fn, Out.each, *([arg] * self.engines for arg in args), turn=False).then(_only)

    def _call(self, who: str, fn: Callable[..., Any], out: Out, *columns: Sequence[Any], turn: bool = True) -> Reply:
        """In each process, with the arguments of its engine."""
        self.mesh.cluster.check_open(who)
        count = self.mesh.processes.count
        of_engine: Mapping[int, int] = {rank: 0 if count == 1 else self.mesh.shard_of(rank) for rank in range(count)}
        args = [[held, *(column[of_engine[rank]] for column in columns)] for rank, held in enumerate(self._held)]
        reply: Reply
        (reply,) = self.mesh.processes.call(who, fn, args, out, turn=turn)
        return reply


def _only(results: list[Any]) -> Any:
    return results[0]
