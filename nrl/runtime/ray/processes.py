"""The driver's side of a mesh of Ray actors: sending calls, and ending the actors and their helpers."""

import functools
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from nrl.errors import ClusterError, StateError
from nrl.runtime.mesh.futures import Submitted
from nrl.runtime.mesh.placement import Mesh
from nrl.runtime.mesh.processes import Donated, Out
from nrl.runtime.mesh.task_queue import Desk
from nrl.runtime.ray.call_arguments import Arguments, Kept, Stored
from nrl.runtime.ray.codec.messages import Order, folded
from nrl.runtime.ray.helpers import ActorHelper, packed
from nrl.runtime.ray.nodes import last_lines
from nrl.runtime.ray.pending_call import Call, Ref, Seat
from nrl.runtime.ray.results import ActorResults
from nrl.runtime.ray.signal_guard import deferred
from nrl.runtime.trace import profiles
from nrl.runtime.venvs.registry import executable

__all__ = ["RayProcesses"]

_KEYS = itertools.count(1)
_ORDER = threading.RLock()  # so that all processes get their calls in the same order, across meshes that share them


class RayProcesses:
    """The actors of a mesh; satisfies `nrl.runtime.mesh.processes.Processes`.

    They start while the program goes on; the first wait for a call raises if one could not start.

    Args:
        mesh: of these processes.
        actors: one for each rank.
        nodes: for each actor, where it is.
        deadline: seconds that a call may take.
        helper: starts the actor of a rank's helper.
        others: meshes that may share devices with this one. Where they do, a call on this one makes them rest: their
            values leave the device.
    """

    def __init__(
        self,
        mesh: Mesh,
        actors: Sequence[Any],
        nodes: Sequence[Seat],
        deadline: float,
        helper: Callable[[int], Any],
        others: Sequence["RayProcesses"] = (),
    ) -> None:
        self.mesh, self.actors, self.nodes, self.deadline = mesh, list(actors), list(nodes), deadline
        self.name, self.executable = mesh.name, executable(mesh.executable).name
        self.longest: dict[str, float] = {}  # seconds that a call of each name has taken
        self.dropped: list[deque[int]] = [deque() for _ in actors]
        self._ended: BaseException | None = None
        self._others, self._awake = others, False
        self._open: deque[Call] = deque()
        self._failed: list[Call] = []
        self.stored = Stored()
        self._desk = Desk(self.name, mesh.size, deadline, functools.partial(ActorHelper, self, helper))
        self._speakers = [mesh.layout.speaker(shard) for shard in range(mesh.dp)]
        self._logs = [actor.do.remote("logs") for actor in actors]
        meeting = actors[0].do.remote("listen", deadline) if mesh.size > 1 else None
        axes = [(axis, mesh.axes[axis]) for axis in ("pp", "dp", "cp", "tp")]
        joined = [actor.do.remote("join", meeting, axes, deadline) for actor in actors]
        self.starting = Call(self, f"mesh '{mesh.name}', while it started", joined, [])

    @property
    def count(self) -> int:
        """How many processes there are."""
        return len(self.actors)

    @property
    def ended(self) -> bool:
        """Whether they have been killed."""
        return self._ended is not None

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
        """Send every process its order; returns at once."""
        self.mesh.cluster.check_open(who)
        kinds = outs if isinstance(outs, tuple) else (outs,)
        wanted = [tuple(self._sends(rank, kind) for kind in kinds) for rank in range(self.count)]
        keys = [tuple(next(_KEYS) if kind is Out.kept else None for kind in kinds) for _ in self.actors]
        arguments = Arguments(self, self.stored, who, fn)
        loads = [arguments.load(rank, given) for rank, given in enumerate(args)]
        trace = profiles.trace_path(self.name, who)
        with deferred(), _ORDER:
            if (ended := self.after_end(who)) is not None:
                raise ended
            resting = self._take_turns() if turn else []
            self._awake = True
            letters = [
                folded(
                    Order(
                        who=who,
                        function=arguments.digest,
                        args=given,
                        outs=outs,
                        keys=keys[rank],
                        wanted=wanted[rank],
                        compared=tuple(kind is Out.same and self.count > 1 for kind in kinds),
                        dropped=_taken(self.dropped[rank]),
                        trace=trace,
                        turn=turn,
                    ),
                    beside,
                )
                for rank, (given, beside) in enumerate(loads)
            ]
            rested = [ref for other in resting for ref in other.receipts]
            refs = self._send(who, letters, rested, [1 + sum(each) for each in wanted])
            before = [*arguments.before, *arguments.read, *resting]
            call = Call(self, who, [given[0] for given in refs], before, arguments.read)
            consumed = [[arg.value for arg in given if isinstance(arg, Donated)] for given in args]
            if kinds.count(Out.kept) == 1 and all(len(values) == 1 for values in consumed):
                call.instead = [value for (value,) in consumed]
            self._remember(call)
            returned = [iter(given[1:]) for given in refs]
            found: list[Any] = []
            for place, kind in enumerate(kinds):
                if kind is Out.kept:
                    found.append([self._kept(rank, key[place] or 0, call) for rank, key in enumerate(keys)])
                else:
                    results = [next(refs) for refs, sends in zip(returned, wanted, strict=True) if sends[place]]
                    found.append(ActorResults(call, results))
            if sent is not None:
                sent()  # now that each kept value has its name: without one, the processes would keep it for good
        return found

    def submit(
        self, who: str, fn: Callable[..., Any], args: Sequence[Any], rank: int | None, deadline: float | None
    ) -> Submitted[Any]:
        """Let a helper call a function; returns at once."""
        if (ended := self.after_end(who)) is not None:
            raise ended
        return self._desk.submit(who, fn, args, rank, deadline, functools.partial(packed, self, self.stored, who))

    def _send(
        self, who: str, letters: Sequence[list[Any]], rested: Sequence[Ref], returns: Sequence[int]
    ) -> list[list[Ref]]:
        """Send all orders, or end the mesh: where only some got a call, the next one would meet it in a collective."""
        refs: list[list[Ref]] = []
        try:
            for actor, letter, count in zip(self.actors, letters, returns, strict=True):
                given = actor.do.options(num_returns=count).remote("call", *letter, *rested)
                refs.append(given if isinstance(given, list) else [given])
        except BaseException as error:  # an interrupt, too
            why = ClusterError(
                f"{who} had gone out to {len(refs)} of {self.count} processes of mesh '{self.name}' when "
                f"{type(error).__name__} was raised, so the mesh has been ended; make another one"
            )
            self.end(why)
            error.add_note(str(why))
            raise
        return refs

    def _take_turns(self) -> list[Call]:
        """Make meshes on the same devices rest; the calls to wait for before the devices are free."""
        resting: list[Call] = []
        for other in self._others:
            shared = set(other.mesh.slots.indices) & set(self.mesh.slots.indices)
            if other is not self and shared and other._awake and other._ended is None:
                resting.append(Call(other, "rest", [actor.do.remote("rest") for actor in other.actors], []))
                other._remember(resting[-1])
                other._awake = False
        return resting

    def _kept(self, rank: int, key: int, call: Call) -> Kept:
        """Name a value that a process keeps; when the name is gone, the next call lets the process drop the value."""
        value = Kept(self, rank, key, call)
        weakref.finalize(value, self.dropped[rank].append, key).atexit = False
        return value

    def _sends(self, rank: int, kind: Out) -> bool:
        """Whether a rank sends a result: of several ranks that hold the same one, the first does."""
        if kind in (Out.kept, Out.all):
            return kind is Out.all
        return rank in (self._speakers if kind is Out.each else self._speakers[:1])

    def _remember(self, call: Call) -> None:
        """Keep a call until it has ended, so that one that nobody waits for gets into the timeline, too."""
        self._open.append(call)
        while self._open and (self._open[0].done or (len(self._open) > 16 and self._open[0].poll())):
            ended = self._open.popleft()
            if ended.untold is not None:
                self._failed.append(ended)

    def earlier(self, call: Call) -> list[Call]:
        """The calls that were made before this one and are not known to have ended."""
        return list(itertools.takewhile(lambda other: other is not call, list(self._open)))

    def finish(self) -> None:
        """Wait for all calls, and raise what one raised whose results nobody has read."""
        for call in list(self._open):
            call.finish()
        for call in [*self._failed, *self._open]:
            error = call.untold
            if error is not None:
                error.add_note(f"No result of {call.who} was read, so this is said when the cluster is left.")
                raise error

    def where(self, rank: int) -> str:
        """How errors name a process: with its node, if that is not the driver's."""
        import ray

        node, address, _ = self.nodes[rank]
        away = ray.is_initialized() and node != ray.get_runtime_context().get_node_id()
        return f"rank {rank} of mesh '{self.name}'" + (f" on node {address}" if away else "")

    def gone(self) -> int | None:
        """The first rank whose node is gone; None: all nodes are there."""
        import ray

        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        return next((rank for rank, seat in enumerate(self.nodes) if seat.node not in alive), None)

    def last_lines(self, rank: int, most: int = 20) -> str:
        """The last lines of a process's log; empty where they cannot be read any more."""
        return last_lines(self.nodes[rank][0], self._logs[rank], most)

    def end(self, why: BaseException) -> None:
        """Kill every process; from now on calls raise ``why``."""
        import ray

        with deferred(), _ORDER:
            self._ended = self._ended or why
            for actor in self.actors:
                ray.kill(actor, no_restart=True)
        self._desk.close(lambda who: self.after_end(who) or why)

    def after_end(self, who: str) -> BaseException | None:
        """What a call raises if the processes have been ended; None: they have not."""
        why = self._ended
        if why is None or isinstance(why, ClusterError | StateError):
            return why and why.with_traceback(None)
        error = ClusterError(f"{who}: mesh '{self.name}' has been ended, after {type(why).__name__}: {why}")
        error.__cause__ = why
        return error

    def forget(self) -> None:
        """Send batches anew: somebody wrote into the object store."""
        self.stored.forget()

    def close(self, why: BaseException) -> None:
        """End the processes when the cluster is left."""
        for call in self._open:
            call.poll()
        self.end(why)


def _taken(keys: deque[int]) -> tuple[int, ...]:
    """Empty a queue, and return what was in it."""
    found = []
    while keys:
        found.append(keys.popleft())
    return tuple(found)
