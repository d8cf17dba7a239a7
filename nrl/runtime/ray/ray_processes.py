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
from nrl.runtime.ray.call_arguments import Arguments, KeptValue, ObjectStoreCache
from nrl.runtime.ray.codec.messages import CallRequest, encode
from nrl.runtime.ray.connection import list_nodes
from nrl.runtime.ray.helpers import ActorHelper, pack_task
from nrl.runtime.ray.nodes import last_lines
from nrl.runtime.ray.pending_call import ActorLocation, Call, Ref
from nrl.runtime.ray.results import ActorResults
from nrl.runtime.ray.signal_guard import defer_signals
from nrl.runtime.trace import profiles
from nrl.runtime.venvs.registry import executable

__all__ = ["RayProcesses"]

_KEYS = itertools.count(1)
_ORDER = threading.RLock()  # All processes get their calls in one order, across meshes that share devices.


class RayProcesses:
    """The actors of a mesh; satisfies `nrl.runtime.mesh.processes.Processes`.

    They start while the program goes on; the first wait for a call raises if one could not start.

    Args:
        mesh: of these processes.
        actors: one for each rank.
        nodes: the location of each actor.
        deadline: seconds that a call may take.
        helper: starts the actor of a rank's helper.
        others: meshes that may share devices with this one. A call on this one offloads their values.
    """

    def __init__(
        self,
        mesh: Mesh,
        actors: Sequence[Any],
        nodes: Sequence[ActorLocation],
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
        self._open_calls: deque[Call] = deque()
        self._failed: list[Call] = []
        self.stored = ObjectStoreCache()
        self._queue = Desk(self.name, mesh.size, deadline, functools.partial(ActorHelper, self, helper))
        self._leaders = [mesh.layout.shard_leader(shard) for shard in range(mesh.dp)]
        self._logs = [actor.do.remote("logs") for actor in actors]
        rendezvous = actors[0].do.remote("listen", deadline) if mesh.size > 1 else None
        axes = [(axis, mesh.axes[axis]) for axis in ("pp", "dp", "cp", "tp")]
        replies = [actor.do.remote("join", rendezvous, axes, deadline) for actor in actors]
        self.starting = Call(self, f"mesh '{mesh.name}', while it started", replies, [])

    @property
    def count(self) -> int:
        """Number of processes."""
        return len(self.actors)

    @property
    def has_ended(self) -> bool:
        """True if the processes have been killed."""
        return self._ended is not None

    def call(
        self,
        caller: str,
        fn: Callable[..., Any],
        args: Sequence[Sequence[Any]],
        outs: Out | tuple[Out, ...],
        *,
        turn: bool = True,
        sent: Callable[[], object] | None = None,
    ) -> list[Any]:
        """Send every process its request; return at once."""
        self.mesh.cluster.check_open(caller)
        kinds = outs if isinstance(outs, tuple) else (outs,)
        returned = [tuple(self._sends_result(rank, kind) for kind in kinds) for rank in range(self.count)]
        keys = [tuple(next(_KEYS) if kind is Out.on_rank else None for kind in kinds) for _ in self.actors]
        arguments = Arguments(self, self.stored, caller, fn)
        loads = [arguments.pack(rank, values) for rank, values in enumerate(args)]
        trace = profiles.trace_path(self.name, caller)
        with defer_signals(), _ORDER:
            if (ended := self.error_after_end(caller)) is not None:
                raise ended
            offloading = self._take_turns() if turn else []
            self._awake = True
            payloads = [
                encode(
                    CallRequest(
                        caller=caller,
                        function=arguments.digest,
                        args=values,
                        outs=outs,
                        keys=keys[rank],
                        returned=returned[rank],
                        compared=tuple(kind is Out.replicated and self.count > 1 for kind in kinds),
                        dropped=_drain(self.dropped[rank]),
                        trace=trace,
                        turn=turn,
                    ),
                    beside,
                )
                for rank, (values, beside) in enumerate(loads)
            ]
            offloaded = [ref for other in offloading for ref in other.replies]
            refs = self._send(caller, payloads, offloaded, [1 + sum(flags) for flags in returned])
            before = [*arguments.before, *arguments.read, *offloading]
            call = Call(self, caller, [values[0] for values in refs], before, arguments.read)
            consumed = [[arg.value for arg in values if isinstance(arg, Donated)] for values in args]
            if kinds.count(Out.on_rank) == 1 and all(len(values) == 1 for values in consumed):
                call.instead = [value for (value,) in consumed]
            self._remember(call)
            iterators = [iter(values[1:]) for values in refs]
            results: list[Any] = []
            for index, kind in enumerate(kinds):
                if kind is Out.on_rank:
                    results.append([self.make_handle(rank, key[index] or 0, call) for rank, key in enumerate(keys)])
                else:
                    parts = [next(refs) for refs, sends in zip(iterators, returned, strict=True) if sends[index]]
                    results.append(ActorResults(call, parts))
            if sent is not None:
                sent()  # Each kept value has its handle now: without one, the processes would keep it for good.
        return results

    def submit(
        self, caller: str, fn: Callable[..., Any], args: Sequence[Any], rank: int | None, deadline: float | None
    ) -> Submitted[Any]:
        """Let a helper call a function; return at once."""
        if (ended := self.error_after_end(caller)) is not None:
            raise ended
        return self._queue.submit(
            caller, fn, args, rank, deadline, functools.partial(pack_task, self, self.stored, caller)
        )

    def _send(
        self, caller: str, payloads: Sequence[list[Any]], offloaded: Sequence[Ref], returns: Sequence[int]
    ) -> list[list[Ref]]:
        """Send all requests, or end the mesh: after a call in some processes only, collectives would not match."""
        refs: list[list[Ref]] = []
        try:
            for actor, payload, count in zip(self.actors, payloads, returns, strict=True):
                reply = actor.do.options(num_returns=count).remote("call", *payload, *offloaded)
                refs.append(reply if isinstance(reply, list) else [reply])
        except BaseException as error:  # an interrupt, too
            reason = ClusterError(
                f"{caller} had gone out to {len(refs)} of {self.count} processes of mesh '{self.name}' when "
                f"{type(error).__name__} was raised, so the mesh has been ended; make another one"
            )
            self.end(reason)
            error.add_note(str(reason))
            raise
        return refs

    def _take_turns(self) -> list[Call]:
        """Offload meshes on the same devices; return the calls to wait for before the devices are free."""
        offloading: list[Call] = []
        for other in self._others:
            shared = set(other.mesh.slots.indices) & set(self.mesh.slots.indices)
            if other is not self and shared and other._awake and other._ended is None:
                offloading.append(Call(other, "rest", [actor.do.remote("offload") for actor in other.actors], []))
                other._remember(offloading[-1])
                other._awake = False
        return offloading

    def make_handle(self, rank: int, key: int, call: Call) -> KeptValue:
        """Make a handle of a value in a process; once the handle is gone, the next call makes the process drop it."""
        value = KeptValue(self, rank, key, call)
        weakref.finalize(value, self.dropped[rank].append, key).atexit = False
        return value

    def _sends_result(self, rank: int, kind: Out) -> bool:
        """Return whether a rank sends a result: of several ranks with the same result, the first does."""
        if kind in (Out.on_rank, Out.all):
            return kind is Out.all
        return rank in (self._leaders if kind is Out.per_shard else self._leaders[:1])

    def _remember(self, call: Call) -> None:
        """Keep a call until it has ended, so that the timeline has calls without a waiting caller, too."""
        self._open_calls.append(call)
        while self._open_calls and (
            self._open_calls[0].done or (len(self._open_calls) > 16 and self._open_calls[0].poll())
        ):
            ended = self._open_calls.popleft()
            if ended.unreported_error is not None:
                self._failed.append(ended)

    def earlier_calls(self, call: Call) -> list[Call]:
        """Return the calls made before this one that are not known to have ended."""
        return list(itertools.takewhile(lambda other: other is not call, list(self._open_calls)))

    def finish(self) -> None:
        """Wait for all calls, and raise the error of a call whose results were not read."""
        for call in list(self._open_calls):
            call.finish()
        for call in [*self._failed, *self._open_calls]:
            error = call.unreported_error
            if error is not None:
                error.add_note(f"No result of {call.caller} was read, so this is said when the cluster is left.")
                raise error

    def describe_rank(self, rank: int) -> str:
        """Name a process for errors: with its node, if the driver is on another."""
        import ray

        node, address, _ = self.nodes[rank]
        away = ray.is_initialized() and node != ray.get_runtime_context().get_node_id()
        return f"rank {rank} of mesh '{self.name}'" + (f" on node {address}" if away else "")

    def find_lost_rank(self) -> int | None:
        """Return the first rank whose node is gone, or None."""
        alive = {node["NodeID"] for node in list_nodes()}
        return next((rank for rank, seat in enumerate(self.nodes) if seat.node not in alive), None)

    def last_lines(self, rank: int, limit: int = 20) -> str:
        """Return the last lines of a process's log; empty if they cannot be read any more."""
        return last_lines(self.nodes[rank][0], self._logs[rank], limit)

    def end(self, reason: BaseException) -> None:
        """Kill every process; from now on calls raise ``reason``."""
        import ray

        with defer_signals(), _ORDER:
            self._ended = self._ended or reason
            for actor in self.actors:
                ray.kill(actor, no_restart=True)
        self._queue.close(lambda who: self.error_after_end(who) or reason)

    def error_after_end(self, caller: str) -> BaseException | None:
        """Return the error that a call raises if the processes have been ended, or None."""
        reason = self._ended
        if reason is None or isinstance(reason, ClusterError | StateError):
            return reason and reason.with_traceback(None)
        error = ClusterError(f"{caller}: mesh '{self.name}' has been ended, after {type(reason).__name__}: {reason}")
        error.__cause__ = reason
        return error

    def forget(self) -> None:
        """Send batches anew, after a write into the object store."""
        self.stored.forget()

    def close(self, reason: BaseException) -> None:
        """End the processes when the cluster is left."""
        for call in self._open_calls:
            call.poll()
        self.end(reason)


def _drain(keys: deque[int]) -> tuple[int, ...]:
    """Empty a queue, and return its items."""
    drained = []
    while keys:
        drained.append(keys.popleft())
    return tuple(drained)
