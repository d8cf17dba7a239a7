"""The function and the arguments of a call, on their way to the processes of a mesh: packed once for all of them."""

import functools
import hashlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import attrs
from tensordict import TensorDict

from nrl.batch.columns import declared, declaring
from nrl.errors import ForeignState, MutatedBatch
from nrl.runtime.mesh.placement import Donated, Rows
from nrl.runtime.ray.calls import Actors, Call, Ref
from nrl.runtime.ray.messages import FUNCTIONS, Argument
from nrl.runtime.ray.pickling import shipped, shipper, size, written
from nrl.runtime.ray.results import Part, Pending

__all__ = ["Arguments", "Kept", "Stored"]

_INLINE = 64 * 1024  # bytes up to which a value travels with the call itself


@attrs.frozen(eq=False)
class Kept:
    """The name of a value that an actor keeps."""

    actors: Actors
    rank: int
    key: int
    call: Call


class Stored:
    """What is in Ray's object store for the processes of a mesh, as long as it may be sent again."""

    def __init__(self) -> None:
        self.batches: dict[Any, Any] = {}
        self.functions: dict[bytes, Ref] = {}

    def batch(self, whole: TensorDict, writes: tuple[int, ...], index: bytes | None, pack: Callable[[], Any]) -> Any:
        """What is packed of ``whole``, or these rows of it: once as long as it lives with so many `written`."""
        if not whole.is_locked:
            return pack()
        key = (id(whole), index, writes)
        if key not in self.batches:
            self.batches[key] = pack()
            weakref.finalize(whole, self.batches.pop, key, None).atexit = False
        return self.batches[key]

    def function(self, digest: bytes, parts: list[Any]) -> Any:
        """What to send of a function with this hash: a large one is put once, as long as processes remember it, too."""
        import ray

        if size(parts) <= _INLINE:
            return parts
        found = self.functions.pop(digest, None) or ray.put(parts)
        self.functions[digest] = found  # as the one that was used last
        for old in list(self.functions)[:-FUNCTIONS]:
            self.functions.pop(old, None)
        return found

    def forget(self) -> None:
        """Nothing is used again: somebody wrote into it."""
        self.batches.clear()


class Arguments:
    """What goes to the processes of a mesh with one call; the same thing is packed once for all of them.

    Args:
        actors: the processes.
        stored: what they have been sent before.
        who: how errors name the call.
        fn: what is called.
    """

    def __init__(self, actors: Actors, stored: Stored, who: str, fn: Callable[..., Any]) -> None:
        self.actors, self.stored, self.who = actors, stored, who
        self.before: list[Call] = []  # those whose values stay where they are
        self.read: list[Call] = []  # those whose results are read from the object store
        self._packed: dict[int, tuple[Any, Any]] = {}  # by identity; what was packed is kept, so that it stays unique
        self._found: dict[tuple[Any, int], Any] = {}  # of batches, by identity, too
        kinds = declared()
        function = shipped(functools.partial(declaring, kinds, fn) if kinds else fn, who)
        found = hashlib.blake2b(digest_size=16)
        for part in function:
            found.update(part)
        self.digest = found.digest()
        self._function = stored.function(self.digest, function)

    def load(self, rank: int, args: Sequence[Any]) -> tuple[tuple[Argument, ...], list[Any]]:
        """What to say of some arguments, and what to send beside."""
        beside = [self._function]
        return tuple(self._argument(rank, arg, beside) for arg in args), beside

    def _argument(self, rank: int, arg: Any, beside: list[Any]) -> Argument:
        def add(item: Any) -> int:
            beside.append(item)
            return len(beside) - 1

        match arg:
            case Kept():
                return Argument(key=self._key(rank, arg))
            case Donated(Kept() as value):
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

    def _key(self, rank: int, value: Kept) -> int:
        if value.actors is not self.actors or value.rank != rank:
            raise ForeignState(f"{self.who}: a value of mesh '{value.actors.name}' was given to another mesh")
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
                return self.stored.batch(whole, self._of(written, whole), index, pack)
            case TensorDict():
                put = functools.partial(self._put, value)  # however small it is: it is for all
                return self.stored.batch(value, self._of(written, value), None, put)
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
