"""Packing of the function and the arguments of a call, once for all processes of a mesh."""

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
from nrl.runtime.mesh.processes import Donated, RowSlice
from nrl.runtime.ray.codec.messages import CACHED_FUNCTIONS, Argument
from nrl.runtime.ray.codec.pickling import num_bytes, serialize
from nrl.runtime.ray.codec.tensors import count_writes, make_row_serializer
from nrl.runtime.ray.column_refs import assemble_batch, describe_column, find_handles
from nrl.runtime.ray.pending_call import Call, MeshActors, Ref
from nrl.runtime.ray.results import Pending, PendingRows

__all__ = ["Arguments", "KeptValue", "ObjectStoreCache"]

_INLINE = 64 * 1024  # bytes up to which a value travels with the call itself


@attrs.frozen(eq=False)
class KeptValue:
    """A handle of a value that an actor keeps."""

    actors: MeshActors
    rank: int
    key: int
    call: Call


class ObjectStoreCache:
    """Batches and functions in Ray's object store that processes of a mesh may be sent again."""

    def __init__(self) -> None:
        self.batches: dict[Any, Any] = {}
        self.functions: dict[bytes, Ref] = {}

    def pack_batch(
        self, batch: TensorDict, writes: tuple[int, ...], index: bytes | None, pack: Callable[[], Any]
    ) -> Any:
        """Pack a batch, or these rows of it, once until the batch is deleted or written to (see `count_writes`)."""
        if not batch.is_locked:
            return pack()
        key = (id(batch), index, writes)
        if key not in self.batches:
            self.batches[key] = pack()
            weakref.finalize(batch, self.batches.pop, key, None).atexit = False
        return self.batches[key]

    def pack_function(self, digest: bytes, parts: list[Any]) -> Any:
        """Return a function's parts to send; if they are large, a reference that later calls reuse."""
        import ray

        if num_bytes(parts) <= _INLINE:
            return parts
        reference = self.functions.pop(digest, None) or ray.put(parts)
        self.functions[digest] = reference  # The last entry is the one used last.
        for old in list(self.functions)[:-CACHED_FUNCTIONS]:
            self.functions.pop(old, None)
        return reference

    def forget(self) -> None:
        """Pack all batches anew, after a write into the memory of one."""
        self.batches.clear()


class Arguments:
    """The function and arguments of one call; an argument of several processes is packed once.

    Args:
        actors: the processes.
        stored: packed batches and functions of earlier calls.
        caller: how errors name the call.
        fn: what is called.
    """

    def __init__(self, actors: MeshActors, stored: ObjectStoreCache, caller: str, fn: Callable[..., Any]) -> None:
        self.actors, self.stored, self.caller = actors, stored, caller
        self.before: list[Call] = []  # The calls that made the kept values that this call uses.
        self.read: list[Call] = []  # The calls whose results this call reads from the object store.
        self._packed: dict[int, tuple[Any, Any]] = {}  # By identity, with the value, so that its id stays unique.
        self._cache: dict[tuple[Any, int], Any] = {}  # of `_cache_result`, by function and identity.
        kinds = get_declarations()
        function = serialize(functools.partial(declaring, kinds, fn) if kinds else fn, caller)
        hashed = hashlib.blake2b(digest_size=16)
        for part in function:
            hashed.update(part)
        self.digest = hashed.digest()
        self._function = stored.pack_function(self.digest, function)

    def pack(self, rank: int, args: Sequence[Any]) -> tuple[tuple[Argument, ...], list[Any]]:
        """Return references to a process's arguments, and the items that come with the request."""
        items = [self._function]
        return tuple(self._pack_argument(rank, arg, items) for arg in args), items

    def _pack_argument(self, rank: int, arg: Any, items: list[Any]) -> Argument:
        def add(item: Any) -> int:
            items.append(item)
            return len(items) - 1

        match arg:
            case KeptValue():
                return Argument(key=self._get_key(rank, arg))
            case Donated(KeptValue() as value):
                return Argument(key=self._get_key(rank, value), donated=True)
            case Pending():
                self._note_read(arg.call)
                return Argument(parts=tuple(map(add, arg.refs)), combine=add(self._pack_once(arg.combine)))
            case PendingRows():
                self._note_read(arg.future.call)
                exact = arg.find_exact_result()
                if exact is not None:
                    return Argument(parts=(add(exact),))
                parts, combine = tuple(map(add, arg.future.refs)), add(self._pack_once(arg.future.combine))
                return Argument(parts=parts, combine=combine, rows=add(self._pack_once(arg.index)))
            case TensorDict() | RowSlice(source=TensorDict()) if handles := find_handles(arg):
                places, columns = [add(self._pack_once(arg))], []
                for name, handle in handles.items():
                    column, refs, calls = describe_column(name, handle)
                    columns.append(column)
                    places += map(add, refs)
                    for call in calls:
                        self._note_read(call)
                put = self._pack_once(functools.partial(assemble_batch, columns))
                return Argument(parts=tuple(places), combine=add(put))
            case _:
                return Argument(parts=(add(self._pack_once(arg)),))

    def _note_read(self, call: Call) -> None:
        if isinstance(call.error, MutatedBatch):
            raise call.error.with_traceback(None)
        self.read.append(call)

    def _get_key(self, rank: int, value: KeptValue) -> int:
        if value.actors is not self.actors or value.rank != rank:
            raise ForeignState(f"{self.caller}: a value of mesh '{value.actors.name}' was given to another mesh")
        while value.call.error is not None and value.call.instead:  # A failed call has not consumed its donated value.
            value = value.call.instead[rank]
        self.before.append(value.call)
        return value.key

    def _pack_once(self, value: Any) -> Any:
        if id(value) not in self._packed:
            self._packed[id(value)] = value, self._pack(value)
        return self._packed[id(value)][1]

    def _pack(self, value: Any) -> Any:
        match value:
            case RowSlice() if value.are_all():
                return self._pack_once(value.source)
            case RowSlice(source=TensorDict() as batch):
                index = value.index.numpy().tobytes()
                pack = functools.partial(self._pack_rows, value)
                return self.stored.pack_batch(batch, self._cache_result(count_writes, batch), index, pack)
            case TensorDict():
                put = functools.partial(self._put, value)  # Even a small batch, since all processes get it.
                return self.stored.pack_batch(value, self._cache_result(count_writes, value), None, put)
            case RowSlice():
                return self._put_if_large(serialize(value.open(), self.caller))
            case _:
                return self._put_if_large(serialize(value, self.caller))

    def _cache_result[T](self, find: Callable[[TensorDict], T], batch: TensorDict) -> T:
        """Return the result of a function on a batch, computed once for all its parts."""
        key = find, id(batch)
        if key not in self._cache:
            self._cache[key] = find(batch)
        result: T = self._cache[key]
        return result

    def _pack_rows(self, value: RowSlice) -> Any:
        batch = self._cache_result(without_handles, cast(TensorDict, value.source))
        pack_rows = self._cache_result(make_row_serializer, batch)
        parts = (
            pack_rows(value.index.tolist())
            if pack_rows
            else serialize(RowSlice(batch, value.index).open(), self.caller)
        )
        return self._put_if_large(parts)

    def _put(self, value: TensorDict) -> Ref:
        import ray

        return ray.put(serialize(self._cache_result(without_handles, value), self.caller))

    def _put_if_large(self, parts: list[Any]) -> Any:
        import ray

        return parts if num_bytes(parts) <= _INLINE else ray.put(parts)
