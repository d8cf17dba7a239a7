"""Packing the function and the arguments of a call for the processes of a mesh, each once for all of them."""

import functools
import hashlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import attrs
from tensordict import TensorDict

from nrl.batch.columns import declaring, get_declarations
from nrl.batch.handles import without_handles
from nrl.errors import ForeignState, MutatedBatch
from nrl.runtime.mesh.processes import Donated, Rows
from nrl.runtime.ray.codec.messages import FUNCTIONS, Argument
from nrl.runtime.ray.codec.pickling import serialized, size
from nrl.runtime.ray.codec.tensors import rows_serializer, written
from nrl.runtime.ray.column_refs import column_of, handles_in, opened
from nrl.runtime.ray.pending_call import Call, MeshActors, Ref
from nrl.runtime.ray.results import Pending, PendingRows

__all__ = ["Arguments", "Kept", "Stored"]

_INLINE = 64 * 1024  # bytes up to which a value travels with the call itself


@attrs.frozen(eq=False)
class Kept:
    """The name of a value that an actor keeps."""

    actors: MeshActors
    rank: int
    key: int
    call: Call


class Stored:
    """Batches and functions in Ray's object store that processes of a mesh may be sent again."""

    def __init__(self) -> None:
        self.batches: dict[Any, Any] = {}
        self.functions: dict[bytes, Ref] = {}

    def batch(self, whole: TensorDict, writes: tuple[int, ...], index: bytes | None, pack: Callable[[], Any]) -> Any:
        """Pack a batch, or these rows of it, once: until the batch dies or somebody writes into it (see `written`)."""
        if not whole.is_locked:
            return pack()
        key = (id(whole), index, writes)
        if key not in self.batches:
            self.batches[key] = pack()
            weakref.finalize(whole, self.batches.pop, key, None).atexit = False
        return self.batches[key]

    def function(self, digest: bytes, parts: list[Any]) -> Any:
        """What to send of a function: its parts, or where they are large, a reference, which later calls use again."""
        import ray

        if size(parts) <= _INLINE:
            return parts
        found = self.functions.pop(digest, None) or ray.put(parts)
        self.functions[digest] = found  # as the one that was used last
        for old in list(self.functions)[:-FUNCTIONS]:
            self.functions.pop(old, None)
        return found

    def forget(self) -> None:
        """Pack all batches anew: somebody wrote into the memory of one."""
        self.batches.clear()


class Arguments:
    """The function and arguments of one call; what several processes get is packed once.

    Args:
        actors: the processes.
        stored: packed batches and functions of earlier calls.
        who: how errors name the call.
        fn: what is called.
    """

    def __init__(self, actors: MeshActors, stored: Stored, who: str, fn: Callable[..., Any]) -> None:
        self.actors, self.stored, self.who = actors, stored, who
        self.before: list[Call] = []  # those that made the values which this call uses where they are
        self.read: list[Call] = []  # those whose results this call reads from the object store
        self._packed: dict[int, tuple[Any, Any]] = {}  # by identity, with the value, so that its id stays unique
        self._found: dict[tuple[Any, int], Any] = {}  # what `_of` found of batches, by identity, too
        kinds = get_declarations()
        function = serialized(functools.partial(declaring, kinds, fn) if kinds else fn, who)
        hashed = hashlib.blake2b(digest_size=16)
        for part in function:
            hashed.update(part)
        self.digest = hashed.digest()
        self._function = stored.function(self.digest, function)

    def load(self, rank: int, args: Sequence[Any]) -> tuple[tuple[Argument, ...], list[Any]]:
        """Where a process finds its arguments, and what comes with the order."""
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
            case PendingRows():
                self._reads(arg.whole.call)
                alone = arg.alone()
                if alone is not None:
                    return Argument(parts=(add(alone),))
                parts, combine = tuple(map(add, arg.whole.refs)), add(self._packing(arg.whole.combine))
                return Argument(parts=parts, combine=combine, rows=add(self._packing(arg.index)))
            case TensorDict() | Rows(whole=TensorDict()) if handles := handles_in(arg):
                places, columns = [add(self._packing(arg))], []
                for name, handle in handles.items():
                    column, refs, calls = column_of(name, handle)
                    columns.append(column)
                    places += map(add, refs)
                    for call in calls:
                        self._reads(call)
                put = self._packing(functools.partial(opened, columns))
                return Argument(parts=tuple(places), combine=add(put))
            case _:
                return Argument(parts=(add(self._packing(arg)),))

    def _reads(self, call: Call) -> None:
        if isinstance(call.error, MutatedBatch):
            raise call.error.with_traceback(None)
        self.read.append(call)

    def _key(self, rank: int, value: Kept) -> int:
        if value.actors is not self.actors or value.rank != rank:
            raise ForeignState(f"{self.who}: a value of mesh '{value.actors.name}' was given to another mesh")
        while value.call.error is not None and value.call.instead:  # a call that failed has left what it was to consume
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
                pack = functools.partial(self._pack_rows, value)
                return self.stored.batch(whole, self._of(written, whole), index, pack)
            case TensorDict():
                put = functools.partial(self._put, value)  # even if it is small, since all processes get it
                return self.stored.batch(value, self._of(written, value), None, put)
            case Rows():
                return self._put_if_large(serialized(value.open(), self.who))
            case _:
                return self._put_if_large(serialized(value, self.who))

    def _of[T](self, find: Callable[[TensorDict], T], whole: TensorDict) -> T:
        """What a function finds of a batch, once for all its parts."""
        key = find, id(whole)
        if key not in self._found:
            self._found[key] = find(whole)
        found: T = self._found[key]
        return found

    def _pack_rows(self, value: Rows) -> Any:
        here = self._of(without_handles, cast(TensorDict, value.whole))
        serialize = self._of(rows_serializer, here)
        parts = serialize(value.index.tolist()) if serialize else serialized(Rows(here, value.index).open(), self.who)
        return self._put_if_large(parts)

    def _put(self, value: TensorDict) -> Ref:
        import ray

        return ray.put(serialized(self._of(without_handles, value), self.who))

    def _put_if_large(self, parts: list[Any]) -> Any:
        import ray

        return parts if size(parts) <= _INLINE else ray.put(parts)
