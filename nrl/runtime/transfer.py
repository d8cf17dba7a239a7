"""Moving tensors between the processes of two meshes, by the way that their placement allows.

There are three ways. By value: each process puts what it holds into the object store, which the processes of a node
read without a copy. Lent: to processes on the same GPUs, which read a copy there (CUDA IPC). Cast: between
GPUs, to all receivers at once (a broadcast over NCCL). For the last two, the sending processes first give each other
what they hold (`gathered`). A sample of the tensors bears checksums, which the receiver compares.
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
    "by_value",
    "cast",
    "checksum",
    "gathered",
    "has_checksum",
    "lend",
    "opened",
    "route",
    "sent",
]

type Tensors = Mapping[str, Tensor]
type _Content = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]

_SECONDS = 300  # that processes wait for each other
_ALIGNED = 16  # bytes, so that every dtype can be read where it lies
_SAMPLE = 8  # one tensor in so many bears a checksum


class Route(NamedTuple):
    """How tensors travel.

    Args:
        send: called with tensors in each process of the sending mesh; its results travel.
        out: which of the results do.
        same: whether all processes have to send the same tensors; otherwise each sends those that it holds.
    """

    send: Callable[[Tensors], Any]
    out: Out
    same: bool


def route(source: Mesh, to: Sequence[Mesh]) -> Route:
    """Choose how tensors travel that the processes of ``source`` hold and that all processes of ``to`` receive."""
    here, there = set(source.slots.indices), [set(mesh.slots.indices) for mesh in to]
    if source.slots.gpus and there and all(mesh.slots.gpus for mesh in to):
        if source.dp == source.size and all(each <= here for each in there):
            ranks = {rank for rank, slot in enumerate(source.slots.indices) if any(slot in each for each in there)}
            return Route(_Lend(frozenset(ranks)), Out.each, True)
        if not any(each & here for each in there):
            return Route(_Cast(tuple(map(_key, to)), sum(mesh.size for mesh in to)), Out.first, True)
    return Route(by_value, Out.all, False)


def gathered(tensors: Tensors, about: Any = None, group: Any = None) -> list[tuple[Tensors, Any]]:
    """The tensors of all processes, by rank, in each of them, and what each says about them; a collective.

    Args:
        tensors: on the device of this process.
        about: what to tell the others.
        group: the ``torch.distributed`` process group; None: all processes.

    >>> gathered({"x": torch.ones(1)}, "mine")
    [({'x': tensor([1.])}, 'mine')]
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [(tensors, about)]
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, (_content(tensors), about), group=group)
    found = list[tuple[Tensors, Any]]()
    for rank, (content, said) in enumerate(told):
        size = _bytes(content)
        flat = _flat(tensors) if rank == dist.get_rank(group) else _room(size)
        if size:
            dist.broadcast(flat, group=group, group_src=rank)
        found.append((_tensors(flat, content), said))
    return found


def sent(send: Callable[[Tensors], Any], tensors: Tensors) -> tuple[Any, dict[str, int]]:
    """Send tensors; `opened` is the inverse.

    Args:
        send: of a `Route`.
        tensors: by name; the names decide which of them bear a checksum.

    Returns:
        What travels, and the checksums: of what it sends itself, or of what all send from the first process.
    """
    if send is not by_value and not process().first:
        return send(tensors), {}
    sample = list(filter(has_checksum, tensors)) or list(tensors)[:1]
    return send(tensors), {name: checksum(tensors[name]) for name in sample}


def has_checksum(name: str) -> bool:
    """Whether a tensor of this name always bears a checksum."""
    return zlib.crc32(name.encode()) % _SAMPLE == 0


def checksum(tensor: Tensor) -> int:
    """The sum of a tensor's bits, read as integers, modulo 2^64; computed where it is.

    >>> checksum(torch.tensor([1.5, -0.0])) == checksum(torch.tensor([1.5, 0.0]))
    False
    """
    flat = flat_bytes(tensor.detach())
    widest = next(each for each in (torch.int64, torch.int32, torch.uint8) if len(flat) % each.itemsize == 0)
    aligned = flat if flat.storage_offset() % widest.itemsize == 0 else flat.clone()
    return int(aligned.view(widest).sum(dtype=torch.int64))  # whole words: widening them takes 30 times as long


def opened(results: Sequence[tuple[Any, Mapping[str, int]]]) -> Tensors:
    """The tensors that were `sent`, in the process that receives them.

    Args:
        results: of `sent`, as `Route.out` picked them.

    Raises:
        TransferError: they do not arrive in this way; by value they would.
        CorruptedTransfer: one of them is not what was sent.

    >>> opened([sent(by_value, {"x": torch.ones(1)})])
    {'x': tensor([1.])}
    """
    tensors = _arrived([travelled for travelled, _ in results])
    for name, expected in ChainMap(*(dict(sums) for _, sums in results)).items():
        found = checksum(tensors[name])
        if found != expected:
            raise CorruptedTransfer(
                f"transfer: '{name}' did not arrive as it was sent (checksum {found}, and not {expected})"
            )
    return tensors


def _arrived(travelled: Sequence[Any]) -> Tensors:
    lent = {each.device: each.handles for each in travelled if isinstance(each, _Lent)}
    if lent and _device() not in lent:
        raise TransferError(f"transfer: tensors were lent on {', '.join(lent)}, and this process is on {_device()}")
    if lent:
        tensors: Tensors = pickle.loads(lent[_device()])
        return tensors
    if isinstance(travelled[0], _Parcel):
        return _received(travelled[0])
    times = Counter(name for each in travelled for name, tensor in each.items() if tensor.numel())
    if twice := [name for name, count in times.items() if count > 1]:
        raise CorruptedTransfer(f"transfer: '{twice[0]}' came from two processes; one has to speak for it")
    return {name: tensor for each in travelled for name, tensor in each.items()}


def by_value(tensors: Tensors) -> Tensors:
    """Send the tensors themselves."""
    return dict(tensors)


@attrs.frozen
class _Lent:
    device: str
    handles: bytes


def lend(tensors: Tensors) -> Any:
    """Let processes on the same device see a copy of tensors; where one is not on a GPU, all go by value."""
    if not all(map(_lendable, tensors.values())):
        return by_value(tensors) if process().first else {}
    with cuda_allocator.fixed():
        flat = _flat(tensors)
    return _Lent(_device(), bytes(ForkingPickler.dumps(_tensors(flat, _content(tensors)))))


@attrs.frozen
class _Lend:
    """Lends from the processes of these ranks; memory that nobody borrows would never be given back."""

    ranks: frozenset[int]

    def __call__(self, tensors: Tensors) -> Any:
        return lend(tensors) if process().rank in self.ranks or not all(map(_lendable, tensors.values())) else {}


def _lendable(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _device() -> str:
    return str(torch.cuda.get_device_properties(0).uuid) if torch.cuda.is_available() else "cpu"


@attrs.frozen
class _Parcel:
    """Where the receivers of tensors meet the sender, and the names, dtypes and shapes of the tensors."""

    meeting: tuple[str, int]
    receivers: int
    content: _Content


@attrs.frozen
class _Cast:
    """Called in each process of a mesh, of which one casts tensors to ``receivers`` others."""

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
        self._store = store(_address(), timedelta(seconds=_SECONDS))
        self._group: Any = None
        self._background = ThreadPoolExecutor(1, thread_name_prefix="cast")
        self._sending: Future[None] | None = None

    def send(self, tensors: Tensors) -> _Parcel:
        if self._sending is not None:
            self._sending.result()  # so that one buffer is on its way, and not two
        content = _content(tensors)
        self._sending = self._background.submit(self._send, _flat(tensors))
        return _Parcel((self._store.host, self._store.port), self._receivers, content)

    def _send(self, flat: Tensor) -> None:
        with _failing("cast"):
            self._group = self._group or _met(self._store, 0, 1 + self._receivers)
            self._group.broadcast(flat, 0).wait()


_SENDERS: dict[tuple[int, ...], _Sender] = {}
_GROUPS: dict[tuple[str, int], Any] = {}


def _received(parcel: _Parcel) -> Tensors:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    with _failing("receive"):
        if parcel.meeting not in _GROUPS:
            _GROUPS.clear()
            meeting = TCPStore(*parcel.meeting, timeout=timedelta(seconds=_SECONDS))
            _GROUPS[parcel.meeting] = _met(meeting, meeting.add("receivers", 1), 1 + parcel.receivers)
        flat = _room(_bytes(parcel.content))
        _GROUPS[parcel.meeting].broadcast(flat, 0).wait()
    return _tensors(flat, parcel.content)


def _content(tensors: Tensors) -> _Content:
    return tuple((name, x.dtype, tuple(x.shape)) for name, x in tensors.items())


def _bytes(content: _Content) -> int:
    return sum(-(-prod(shape) * dtype.itemsize // _ALIGNED) * _ALIGNED for _, dtype, shape in content)


def _room(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda" if torch.cuda.is_available() else "cpu")


def _flat(tensors: Tensors) -> Tensor:
    """The bytes of all tensors one after the other, in memory that is allocated once."""
    content = _content(tensors)
    flat = _room(_bytes(content))
    for x, place in zip(tensors.values(), _tensors(flat, content).values(), strict=True):
        place.copy_(x.detach())
    return flat


def _tensors(flat: Tensor, content: _Content) -> dict[str, Tensor]:
    """The tensors whose bytes lie one after the other."""
    found, begin = {}, 0
    for each in content:
        name, dtype, shape = each
        found[name] = flat[begin : begin + prod(shape) * dtype.itemsize].view(dtype).view(shape)
        begin += _bytes((each,))
    return found


def _met(store: Any, rank: int, size: int) -> Any:
    """A process group of sender and receivers: the group of a mesh does not reach other meshes."""
    limit = timedelta(seconds=_SECONDS)
    if not torch.cuda.is_available():
        return dist.ProcessGroupGloo(store, rank, size, limit)
    # Without it, NCCL takes down the whole process where a peer that it waits for has died
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
def _failing(who: str) -> Any:
    try:
        yield
    except Exception as error:
        _GROUPS.clear()
        raise TransferError(f"{who}: weights were not cast to all engines: {error}") from error


def _address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


_NUMBERS: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_COUNT, _LOCK = itertools.count(), threading.Lock()


def _key(mesh: Mesh) -> int:
    """A number that the processes of a mesh keep as long as they live."""
    with _LOCK:
        return _NUMBERS.setdefault(mesh.processes, next(_COUNT))
