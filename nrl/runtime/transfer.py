"""Moving tensors between the processes of two meshes, by the route that their placement allows.

There are three routes. By value: each process puts its tensors into the object store, which the processes of a node
read without a copy. Lent: to processes on the same GPUs, which read a copy there (CUDA IPC). Cast: between GPUs, to all
receivers at once (a broadcast over NCCL). For the last two, the sending processes first exchange their tensors
(`all_gather_tensors`). A sample of the tensors bears checksums, which the receiver compares.
"""

import itertools
import os
import pickle
import threading
import zlib
from collections import ChainMap, Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from math import prod
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from nrl.batch.raw import flat_bytes
from nrl.errors import CorruptedTransfer, TransferError
from nrl.runtime import cuda_allocator
from nrl.runtime.mesh.current_process import process
from nrl.runtime.mesh.placement import Mesh
from nrl.runtime.mesh.processes import Out
from nrl.runtime.ports import store

__all__ = [
    "Route",
    "Tensors",
    "all_gather_tensors",
    "by_value",
    "cast",
    "checksum",
    "choose_route",
    "has_checksum",
    "lend",
    "receive_tensors",
    "send_tensors",
]

type Tensors = Mapping[str, Tensor]
type _Content = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]

_SECONDS = 300  # The timeout of a rendezvous.
_ALIGNED = 16  # bytes, so that every dtype can be read where it lies
_SAMPLE = 8  # Every eighth tensor, on average, bears a checksum.


class Route(NamedTuple):
    """A route of tensors from one mesh to others.

    Args:
        send: called with tensors in each process of the sending mesh; its results travel.
        out: the results that travel.
        same: whether all processes have to send the same tensors; otherwise each sends its own.
    """

    send: Callable[[Tensors], Any]
    out: Out
    same: bool


def choose_route(source: Mesh, to: Sequence[Mesh]) -> Route:
    """Choose the route of tensors from the processes of ``source`` to all processes of ``to``."""
    source_slots, target_slots = set(source.slots.indices), [set(mesh.slots.indices) for mesh in to]
    if source.slots.gpus and target_slots and all(mesh.slots.gpus for mesh in to):
        if source.dp == source.size and all(slots <= source_slots for slots in target_slots):
            ranks = {
                rank for rank, slot in enumerate(source.slots.indices) if any(slot in slots for slots in target_slots)
            }
            return Route(_Lend(frozenset(ranks)), Out.per_shard, True)
        if not any(slots & source_slots for slots in target_slots):
            return Route(_Cast(tuple(map(_mesh_key, to)), sum(mesh.size for mesh in to)), Out.first, True)
    return Route(by_value, Out.all, False)


def all_gather_tensors(tensors: Tensors, about: Any = None, group: Any = None) -> list[tuple[Tensors, Any]]:
    """Gather the tensors of all processes, by rank, with a note of each process; a collective.

    Args:
        tensors: on the device of this process.
        about: the note of this process.
        group: the ``torch.distributed`` process group; None: all processes.

    >>> all_gather_tensors({"x": torch.ones(1)}, "mine")
    [({'x': tensor([1.])}, 'mine')]
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [(tensors, about)]
    messages: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(messages, (_describe(tensors), about), group=group)
    gathered = list[tuple[Tensors, Any]]()
    for rank, (content, note) in enumerate(messages):
        size = _num_bytes(content)
        flat = _flatten(tensors) if rank == dist.get_rank(group) else _allocate(size)
        if size:
            dist.broadcast(flat, group=group, group_src=rank)
        gathered.append((_unflatten(flat, content), note))
    return gathered


def send_tensors(send: Callable[[Tensors], Any], tensors: Tensors) -> tuple[Any, dict[str, int]]:
    """Send tensors; `receive_tensors` is the inverse.

    Args:
        send: of a `Route`.
        tensors: by name; the names decide which of them bear a checksum.

    Returns:
        The data to send, and checksums: of the process's own tensors, or from the first process those of all.
    """
    if send is not by_value and not process().first:
        return send(tensors), {}
    sample = list(filter(has_checksum, tensors)) or list(tensors)[:1]
    return send(tensors), {name: checksum(tensors[name]) for name in sample}


def has_checksum(name: str) -> bool:
    """Return whether a tensor of this name always bears a checksum."""
    return zlib.crc32(name.encode()) % _SAMPLE == 0


def checksum(tensor: Tensor) -> int:
    """Compute the sum of a tensor's bits, read as integers, modulo 2^64, on the tensor's device.

    >>> checksum(torch.tensor([1.5, -0.0])) == checksum(torch.tensor([1.5, 0.0]))
    False
    """
    flat = flat_bytes(tensor.detach())
    widest = next(dtype for dtype in (torch.int64, torch.int32, torch.uint8) if len(flat) % dtype.itemsize == 0)
    aligned = flat if flat.storage_offset() % widest.itemsize == 0 else flat.clone()
    return int(aligned.view(widest).sum(dtype=torch.int64))  # whole words: widening them takes 30 times as long


def receive_tensors(results: Sequence[tuple[Any, Mapping[str, int]]]) -> Tensors:
    """Receive tensors that `send_tensors` has sent.

    Args:
        results: results of `send_tensors`, as `Route.out` picked them.

    Raises:
        TransferError: the tensors cannot arrive by this route; by value they could.
        CorruptedTransfer: a tensor differs from the one that was sent.

    >>> receive_tensors([send_tensors(by_value, {"x": torch.ones(1)})])
    {'x': tensor([1.])}
    """
    tensors = _receive([travelled for travelled, _ in results])
    for name, expected in ChainMap(*(dict(sums) for _, sums in results)).items():
        received = checksum(tensors[name])
        if received != expected:
            raise CorruptedTransfer(
                f"transfer: '{name}' did not arrive as it was sent (checksum {received}, and not {expected})"
            )
    return tensors


def _receive(travelled: Sequence[Any]) -> Tensors:
    lent = {part.device: part.handles for part in travelled if isinstance(part, _Lent)}
    if lent and _device_id() not in lent:
        raise TransferError(f"transfer: tensors were lent on {', '.join(lent)}, and this process is on {_device_id()}")
    if lent:
        tensors: Tensors = pickle.loads(lent[_device_id()])
        return tensors
    if isinstance(travelled[0], _Parcel):
        return _receive_broadcast(travelled[0])
    times = Counter(name for part in travelled for name, tensor in part.items() if tensor.numel())
    if twice := [name for name, count in times.items() if count > 1]:
        raise CorruptedTransfer(f"transfer: '{twice[0]}' came from two processes; one has to speak for it")
    return {name: tensor for part in travelled for name, tensor in part.items()}


def by_value(tensors: Tensors) -> Tensors:
    """Send the tensors themselves."""
    return dict(tensors)


@attrs.frozen
class _Lent:
    device: str
    handles: bytes


def lend(tensors: Tensors) -> Any:
    """Let processes on the same device see a copy of tensors; where one is not on a GPU, all go by value."""
    if not all(map(_is_lendable, tensors.values())):
        return by_value(tensors) if process().first else {}
    with cuda_allocator.use_fixed_segments():
        flat = _flatten(tensors)
    return _Lent(_device_id(), bytes(ForkingPickler.dumps(_unflatten(flat, _describe(tensors)))))


@attrs.frozen
class _Lend:
    """A sender that lends from these ranks only: memory without a borrower would never be given back."""

    ranks: frozenset[int]

    def __call__(self, tensors: Tensors) -> Any:
        return lend(tensors) if process().rank in self.ranks or not all(map(_is_lendable, tensors.values())) else {}


def _is_lendable(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _device_id() -> str:
    return str(torch.cuda.get_device_properties(0).uuid) if torch.cuda.is_available() else "cpu"


@attrs.frozen
class _Parcel:
    """The address of the sender's rendezvous, and the names, dtypes and shapes of the tensors."""

    meeting: tuple[str, int]
    receivers: int
    content: _Content


@attrs.frozen
class _Cast:
    """A sender that is called in each process of a mesh; the first casts tensors to ``receivers`` others."""

    to: tuple[int, ...]
    receivers: int

    def __call__(self, tensors: Tensors) -> "_Parcel | Tensors | None":
        if not tensors:
            return by_value(tensors)
        return cast(tensors, self.to, self.receivers) if process().first else None


def cast(tensors: Tensors, to: tuple[int, ...], receivers: int) -> _Parcel:
    """Send tensors to all receivers at once, in the background; each receiver has to open what this returns.

    Args:
        tensors: on one device.
        to: a key of the receivers; while it is the same, they do not meet anew.
        receivers: how many processes receive.

    Raises:
        TransferError: the tensors before these did not arrive.

    >>> cast({"x": torch.ones(2)}, (), 0).content
    (('x', torch.float32, (2,)),)
    """
    if to not in _SENDERS:
        _SENDERS.clear()  # the receivers have died, and others have come
        _SENDERS[to] = _Sender(receivers)
    try:
        return _SENDERS[to].send(tensors)
    except TransferError:
        del _SENDERS[to]
        raise


class _Sender:
    def __init__(self, receivers: int) -> None:
        self._receivers = receivers
        self._store = store(_node_address(), timedelta(seconds=_SECONDS))
        self._group: Any = None
        self._background = ThreadPoolExecutor(1, thread_name_prefix="cast")
        self._sending: Future[None] | None = None

    def send(self, tensors: Tensors) -> _Parcel:
        if self._sending is not None:
            self._sending.result()  # At most one buffer is being sent at a time.
        content = _describe(tensors)
        self._sending = self._background.submit(self._send, _flatten(tensors))
        return _Parcel((self._store.host, self._store.port), self._receivers, content)

    def _send(self, flat: Tensor) -> None:
        with _translate_errors("cast"):
            self._group = self._group or _join_group(self._store, 0, 1 + self._receivers)
            self._group.broadcast(flat, 0).wait()


_SENDERS: dict[tuple[int, ...], _Sender] = {}
_GROUPS: dict[tuple[str, int], Any] = {}


def _receive_broadcast(parcel: _Parcel) -> Tensors:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    with _translate_errors("receive"):
        if parcel.meeting not in _GROUPS:
            _GROUPS.clear()
            meeting = TCPStore(*parcel.meeting, timeout=timedelta(seconds=_SECONDS))
            _GROUPS[parcel.meeting] = _join_group(meeting, meeting.add("receivers", 1), 1 + parcel.receivers)
        flat = _allocate(_num_bytes(parcel.content))
        _GROUPS[parcel.meeting].broadcast(flat, 0).wait()
    return _unflatten(flat, parcel.content)


def _describe(tensors: Tensors) -> _Content:
    return tuple((name, x.dtype, tuple(x.shape)) for name, x in tensors.items())


def _num_bytes(content: _Content) -> int:
    return sum(-(-prod(shape) * dtype.itemsize // _ALIGNED) * _ALIGNED for _, dtype, shape in content)


def _allocate(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda" if torch.cuda.is_available() else "cpu")


def _flatten(tensors: Tensors) -> Tensor:
    """Copy the bytes of all tensors into one buffer."""
    content = _describe(tensors)
    flat = _allocate(_num_bytes(content))
    for x, target in zip(tensors.values(), _unflatten(flat, content).values(), strict=True):
        target.copy_(x.detach())
    return flat


def _unflatten(flat: Tensor, content: _Content) -> dict[str, Tensor]:
    """Return views of the tensors in a buffer; the inverse of `_flatten`."""
    tensors, begin = {}, 0
    for entry in content:
        name, dtype, shape = entry
        tensors[name] = flat[begin : begin + prod(shape) * dtype.itemsize].view(dtype).view(shape)
        begin += _num_bytes((entry,))
    return tensors


def _join_group(store: Any, rank: int, size: int) -> Any:
    """Make a process group of sender and receivers: the group of a mesh does not reach other meshes."""
    limit = timedelta(seconds=_SECONDS)
    if not torch.cuda.is_available():
        return dist.ProcessGroupGloo(store, rank, size, limit)
    # Without this variable, NCCL ends the process if a peer that it waits for has died.
    before = os.environ.get("TORCH_NCCL_BLOCKING_WAIT")
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    try:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return dist.ProcessGroupNCCL(store, rank, size, options)
    finally:
        del os.environ["TORCH_NCCL_BLOCKING_WAIT"]
        if before is not None:
            os.environ["TORCH_NCCL_BLOCKING_WAIT"] = before


@contextmanager
def _translate_errors(caller: str) -> Any:
    try:
        yield
    except Exception as error:
        _GROUPS.clear()
        raise TransferError(f"{caller}: weights were not cast to all engines: {error}") from error


def _node_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


_NUMBERS: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_COUNT, _LOCK = itertools.count(), threading.Lock()


def _mesh_key(mesh: Mesh) -> int:
    """Return a number that the processes of a mesh keep as long as they live."""
    with _LOCK:
        return _NUMBERS.setdefault(mesh.processes, next(_COUNT))
