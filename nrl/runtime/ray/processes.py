"""The driver's side of a mesh of Ray actors: sending calls and their arguments."""

import functools
import hashlib
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import attrs
from tensordict import TensorDict

from nrl.errors import ClusterError, ForeignState, MutatedBatch, StateError
from nrl.runtime.executables.registry import executable
from nrl.runtime.mesh.placement import Donated, Mesh, Out, Rows, nothing
from nrl.runtime.ray.calls import Call, Part, Pending, Ref, Reply
from nrl.runtime.ray.interrupts import deferred
from nrl.runtime.ray.on_node import by_value, tail
from nrl.runtime.ray.shipping import shipped, shipper, size, written
from nrl.runtime.ray.worker import FUNCTIONS, Argument, Order, folded
from nrl.runtime.trace import profiles

__all__ = ["RayProcesses"]

_INLINE = 64 * 1024  # bytes up to which a value travels with the call itself
_KEYS = itertools.count(1)
_ORDER = threading.RLock()  # all processes get their calls in the same order, also of meshes that share them


@attrs.frozen(eq=False)
class _There:
    """A value that an actor keeps; when nobody has this name of it any more, the actor is told with the next call."""

    processes: "RayProcesses"
    rank: int
    key: int
    call: Call

    def __attrs_post_init__(self) -> None:
        weakref.finalize(self, self.processes.dropped[self.rank].append, self.key).atexit = False


class RayProcesses:
    """Satisfies `nrl.runtime.mesh.placement.Processes`, and `nrl.runtime.ray.calls.Actors`.

    They start while the program goes on; the first wait for a call finds out how that went.

    Args:
        mesh: what they are the processes of.
        actors: one for each rank.
        nodes: where each of them is: Ray's number of the node, and its address.
        deadline: seconds that a call may take.
        others: meshes that may share devices with this one. Where they do, a call on this one makes them rest: what
            they hold leaves the device.
    """

    def __init__(
        self,
        mesh: Mesh,
        actors: Sequence[Any],
        nodes: Sequence[tuple[str, str]],
        deadline: float,
        others: Sequence["RayProcesses"] = (),
    ) -> None:
        self.mesh, self.actors, self.nodes, self.deadline = mesh, list(actors), list(nodes), deadline
        self.name, self.executable = mesh.name, executable(mesh.executable).name
        self.longest: dict[str, float] = {}
        self.dropped: list[deque[int]] = [deque() for _ in actors]
        self._ended: BaseException | None = None
        self._others, self._awake = others, False
        self._open: deque[Call] = deque()
        self._failed: list[Call] = []
        self._put: dict[Any, Any] = {}
        self._functions: dict[bytes, Ref] = {}
        ranks = range(mesh.size)
        self._speakers = {next(rank for rank in ranks if mesh.shard_of(rank) == shard) for shard in range(mesh.dp)}
        self._logs = [actor.logs.remote() for actor in actors]
        meeting = actors[0].listen.remote(deadline) if mesh.size > 1 else None
        axes = [(axis, mesh.axes[axis]) for axis in ("pp", "dp", "cp", "tp")]
        joined = [actor.join.remote(meeting, axes, deadline) for actor in actors]
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
        sent: Callable[[], object] = nothing,
    ) -> list[Any]:
        """Ask every process; returns at once."""
        self.mesh.cluster.check_open(who)
        kinds = outs if isinstance(outs, tuple) else (outs,)
        wanted = [tuple(self._sends(rank, kind) for kind in kinds) for rank in range(self.count)]
        keys = [tuple(next(_KEYS) if kind is Out.kept else None for kind in kinds) for _ in self.actors]
        luggage = _Luggage(self, who, fn)
        loads = [luggage.load(rank, given) for rank, given in enumerate(args)]
        trace = profiles.wanted(self.name, who)
        with deferred(), _ORDER:
            if (ended := self.after_end(who)) is not None:
                raise ended
            resting = self._take_turns() if turn else []
            self._awake = True
            letters = [
                folded(
                    Order(
                        who=who,
                        function=luggage.digest,
                        args=arguments,
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
                for rank, (arguments, beside) in enumerate(loads)
            ]
            rested = [ref for other in resting for ref in other.receipts]
            refs = self._send(who, letters, rested, [1 + sum(each) for each in wanted])
            before = [*luggage.before, *luggage.read, *resting]
            call = Call(self, who, [given[0] for given in refs], before, luggage.read)
            consumed = [[arg.value for arg in given if isinstance(arg, Donated)] for given in args]
            if kinds.count(Out.kept) == 1 and all(len(values) == 1 for values in consumed):
                call.instead = [value for (value,) in consumed]
            self._remember(call)
            returned = [iter(given[1:]) for given in refs]
            found: list[Any] = []
            for place, kind in enumerate(kinds):
                if kind is Out.kept:
                    found.append([_There(self, rank, key[place] or 0, call) for rank, key in enumerate(keys)])
                else:
                    results = [next(refs) for refs, sends in zip(returned, wanted, strict=True) if sends[place]]
                    found.append(Reply(call, results))
            sent()  # after what was made has its names: without one, the processes would keep it for good
        return found

    def _send(
        self, who: str, letters: Sequence[list[Any]], rested: Sequence[Ref], returns: Sequence[int]
    ) -> list[list[Ref]]:
        """Ask all of them, or end them: where only some got a call, the next one would meet it in a collective."""
        refs: list[list[Ref]] = []
        try:
            for actor, letter, count in zip(self.actors, letters, returns, strict=True):
                given = actor.call.options(num_returns=count).remote(*letter, *rested)
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
        """Make meshes on the same devices rest; what has to be waited for before the devices are free."""
        resting: list[Call] = []
        for other in self._others:
            shared = set(other.mesh.slots.indices) & set(self.mesh.slots.indices)
            if other is not self and shared and other._awake and other._ended is None:
                resting.append(Call(other, "rest", [actor.rest.remote() for actor in other.actors], []))
                other._remember(resting[-1])
                other._awake = False
        return resting

    def _sends(self, rank: int, kind: Out) -> bool:
        """Whether a rank sends a result: where several hold the same, one of them does."""
        if kind in (Out.kept, Out.all):
            return kind is Out.all
        return rank in (self._speakers if kind is Out.each else {0})

    def _remember(self, call: Call) -> None:
        """Calls that nobody waits for go into the timeline, too."""
        self._open.append(call)
        while self._open and (self._open[0].done or (len(self._open) > 16 and self._open[0].poll())):
            ended = self._open.popleft()
            if ended.untold is not None:
                self._failed.append(ended)

    def earlier(self, call: Call) -> list[Call]:
        """The calls that were made before this one, as far as they are not known to have ended."""
        return list(itertools.takewhile(lambda other: other is not call, list(self._open)))

    def finish(self) -> None:
        """Wait for all calls, and raise what one raised whose results nobody has read."""
        for call in list(self._open):
            call.settle()
        for call in [*self._failed, *self._open]:
            error = call.untold
            if error is not None:
                error.add_note(f"No result of {call.who} was read, so this is said when the cluster is left.")
                raise error

    def stored(self, whole: TensorDict, writes: tuple[int, ...], index: bytes | None, pack: Callable[[], Any]) -> Any:
        """What is packed of ``whole``, or these rows of it: once as long as it lives with so many `written`."""
        if not whole.is_locked:
            return pack()
        key = (id(whole), index, writes)
        if key not in self._put:
            self._put[key] = pack()
            weakref.finalize(whole, self._put.pop, key, None).atexit = False
        return self._put[key]

    def function(self, digest: bytes, parts: list[Any]) -> Any:
        """What to send of a function with this hash: a large one is put once, as long as processes remember it, too."""
        import ray

        if size(parts) <= _INLINE:
            return parts
        found = self._functions.pop(digest, None) or ray.put(parts)
        self._functions[digest] = found  # as the one that was used last
        for old in list(self._functions)[:-FUNCTIONS]:
            self._functions.pop(old, None)
        return found

    def last_lines(self, rank: int, most: int = 20) -> str:
        """What a process wrote last, as far as that can be found out now."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        try:
            files = ray.get(self._logs[rank], timeout=1)
            here = ray.get_runtime_context().get_node_id() == self.nodes[rank][0]
            if here:
                return tail(files, most)
            there = NodeAffinitySchedulingStrategy(self.nodes[rank][0], soft=False)
            reading: Any = ray.remote(by_value(tail)).options(num_cpus=0, scheduling_strategy=there)
            return str(ray.get(reading.remote(files, most), timeout=10))
        except ray.exceptions.RayError:  # it, or its node, is gone
            return ""

    def end(self, why: BaseException) -> None:
        """Kill every process; from now on calls raise ``why``."""
        import ray

        with deferred(), _ORDER:
            self._ended = self._ended or why
            for actor in self.actors:
                ray.kill(actor, no_restart=True)

    def after_end(self, who: str) -> BaseException | None:
        """What a call raises if they have been ended; None: they have not."""
        why = self._ended
        if why is None or isinstance(why, ClusterError | StateError):
            return why and why.with_traceback(None)
        error = ClusterError(f"{who}: mesh '{self.name}' has been ended, after {type(why).__name__}: {why}")
        error.__cause__ = why
        return error

    def forget(self) -> None:
        """What is in the object store is not used again: somebody wrote into it."""
        self._put.clear()

    def close(self, why: BaseException) -> None:
        """End the processes when the cluster is left."""
        for call in self._open:
            call.poll()
        self.end(why)


class _Luggage:
    """What goes to the processes of a mesh with one call; the same thing is packed once for all of them."""

    def __init__(self, processes: RayProcesses, who: str, fn: Callable[..., Any]) -> None:
        self.processes, self.who = processes, who
        self.before: list[Call] = []  # those whose values stay where they are
        self.read: list[Call] = []  # those whose results are read from the object store
        self._packed: dict[int, tuple[Any, Any]] = {}  # by identity; what was packed is kept, so that it stays unique
        self._found: dict[tuple[Any, int], Any] = {}  # of batches, by identity, too
        function = shipped(fn, who)
        found = hashlib.blake2b(digest_size=16)
        for part in function:
            found.update(part)
        self.digest = found.digest()
        self._function = processes.function(self.digest, function)

    def load(self, rank: int, args: Sequence[Any]) -> tuple[tuple[Argument, ...], list[Any]]:
        """What to say of some arguments, and what to send beside."""
        beside = [self._function]
        return tuple(self._argument(rank, arg, beside) for arg in args), beside

    def _argument(self, rank: int, arg: Any, beside: list[Any]) -> Argument:
        def add(item: Any) -> int:
            beside.append(item)
            return len(beside) - 1

        match arg:
            case _There():
                return Argument(key=self._key(rank, arg))
            case Donated(_There() as value):
                return Argument(key=self._key(rank, value), donated=True)
            case Pending():
                self._reads(arg.call)
                return Argument(parts=tuple(map(add, arg.refs)), combine=add(self._packing(arg.combine)))
            case Part():
                self._reads(arg.whole.call)
                alone = arg.alone()
                if alone is not None:
                    return Argument(parts=(add(alone),))
                parts, combine = tuple(map(add, arg.whole.refs)), add(self._packing(arg.whole.combine))
                return Argument(parts=parts, combine=combine, rows=add(self._packing(arg.index)))
            case _:
                return Argument(parts=(add(self._packing(arg)),))

    def _reads(self, call: Call) -> None:
        if isinstance(call.error, MutatedBatch):
            raise call.error.with_traceback(None)
        self.read.append(call)

    def _key(self, rank: int, value: _There) -> int:
        if value.processes is not self.processes or value.rank != rank:
            raise ForeignState(f"{self.who}: a value of mesh '{value.processes.name}' was given to another mesh")
        while value.call.error is not None and value.call.instead:  # a step that failed has left its state
            value = value.call.instead[rank]
        self.before.append(value.call)
        return value.key

    def _packing(self, value: Any) -> Any:
        if id(value) not in self._packed:
            self._packed[id(value)] = value, self._pack(value)
        return self._packed[id(value)][1]

    def _pack(self, value: Any) -> Any:
        match value:
            case Rows() if value.are_all():
                return self._packing(value.whole)
            case Rows(whole=TensorDict() as whole):
                index = value.index.numpy().tobytes()
                pack = functools.partial(self._rows, value)
                return self.processes.stored(whole, self._of(written, whole), index, pack)
            case TensorDict():
                put = functools.partial(self._put, value)  # however small it is: it is for all
                return self.processes.stored(value, self._of(written, value), None, put)
            case Rows():
                return self._light(shipped(value.open(), self.who))
            case _:
                return self._light(shipped(value, self.who))

    def _of[T](self, find: Callable[[TensorDict], T], whole: TensorDict) -> T:
        """What is the same for all parts of a batch."""
        key = find, id(whole)
        if key not in self._found:
            self._found[key] = find(whole)
        found: T = self._found[key]
        return found

    def _rows(self, value: Rows) -> Any:
        ship = self._of(shipper, cast(TensorDict, value.whole))
        return self._light(ship(value.index.tolist()) if ship else shipped(value.open(), self.who))

    def _put(self, value: TensorDict) -> Ref:
        import ray

        return ray.put(shipped(value, self.who))

    def _light(self, parts: list[Any]) -> Any:
        import ray

        return parts if size(parts) <= _INLINE else ray.put(parts)


def _taken(keys: deque[int]) -> tuple[int, ...]:
    """All of them, and none is left."""
    found = []
    while keys:
        found.append(keys.popleft())
    return tuple(found)
