"""Moving tensors between the processes of two meshes, by the way that their placement allows.

By value, through the object store, which the processes of a node read without a copy; lent where they lie, to
processes on the same GPUs (CUDA IPC); or, between GPUs, cast to all at once (a broadcast over NCCL). Whichever way they
take, a sample of them bears a checksum, which is compared where they arrive.
"""

import itertools
import os
import pickle
import threading
import zlib
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

from nrl.errors import CorruptedTransfer, TransferError
from nrl.runtime.mesh.current_process import process
from nrl.runtime.mesh.placement import Mesh, Out

__all__ = ["Route", "Tensors", "by_value", "cast", "checksum", "lend", "opened", "route", "sampled", "sent"]

type Tensors = Mapping[str, Tensor]

_SECONDS = 300  # that processes wait for each other
_ALIGNED = 16  # bytes, so that every dtype can be read where it lies
_SAMPLE = 8  # one tensor in so many bears a checksum


class Route(NamedTuple):
    """How tensors travel.

    Args:
        send: called in each process of the sending mesh, with the same tensors; what it returns is what travels.
        out: which of them do.
    """

    send: Callable[[Tensors], Any]
    out: Out


def route(source: Mesh, to: Sequence[Mesh]) -> Route:
    """How tensors that every process of ``source`` has get to all processes of other meshes.

    >>> from nrl.runtime import cluster
    >>> with cluster("local") as here:
    ...     slots = here.reserve(2)
    ...     route(slots[:1].mesh(), [slots[1:].mesh()]).send.__name__
    'by_value'
    """
    here, there = set(source.slots.indices), [set(mesh.slots.indices) for mesh in to]
    if source.cluster.gpus and there:
        if source.dp == source.size and all(each <= here for each in there):
            return Route(lend, Out.each)
        if not any(each & here for each in there):
            return Route(_Cast(tuple(map(_number, to)), sum(mesh.size for mesh in to)), Out.first)
    return Route(by_value, Out.first)


def sent(send: Callable[[Tensors], Any], tensors: Tensors) -> tuple[Any, dict[str, int]]:
    """What travels of tensors, and the checksums of a sample of them.

    Args:
        send: of a `Route`.
        tensors: by their names, by which the sample is taken.

    >>> sent(by_value, {"x": torch.ones(1)})
    ({'x': tensor([1.])}, {'x': 1065353216})
    """
    if not process().first:  # whose go along
        return send(tensors), {}
    sample = list(filter(sampled, tensors)) or list(tensors)[:1]
    return send(tensors), {name: checksum(tensors[name]) for name in sample}


def sampled(name: str) -> bool:
    """Whether a tensor of this name always bears a checksum.

    >>> [i for i in range(20) if sampled(f"layer.{i}")]
    [4, 17]
    """
    return zlib.crc32(name.encode()) % _SAMPLE == 0


def checksum(tensor: Tensor) -> int:
    """The sum of a tensor's bits, read as integers, modulo 2^64; computed where it is.

    >>> checksum(torch.tensor([1.5, -0.0])) == checksum(torch.tensor([1.5, 0.0]))
    False
    """
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return int((flat.view(torch.int32) if len(flat) % 4 == 0 else flat).sum(dtype=torch.int64))


def opened(results: Sequence[tuple[Any, Mapping[str, int]]]) -> Tensors:
    """What was `sent`, in the process that receives it.

    Raises:
        TransferError: it cannot be had, though by value it could.
        CorruptedTransfer: it is not what was sent.

    >>> opened([sent(by_value, {"x": torch.ones(1)})])
    {'x': tensor([1.])}
    """
    tensors = _opened([what for what, _ in results])
    for name, expected in results[0][1].items():
        found = checksum(tensors[name])
        if found != expected:
            raise CorruptedTransfer(
                f"transfer: '{name}' did not arrive as it was sent (checksum {found}, and not {expected})"
            )
    return tensors


def _opened(sent: Sequence[Any]) -> Tensors:
    lent = {each.device: each.handles for each in sent if isinstance(each, _Lent)}
    if lent and _device() not in lent:
        raise TransferError(f"transfer: tensors were lent on {', '.join(lent)}, and this process is on {_device()}")
    if lent:
        tensors: Tensors = pickle.loads(lent[_device()])
        return tensors
    first = sent[0]
    return _received(first) if isinstance(first, _Parcel) else first


def by_value(tensors: Tensors) -> Tensors:
    """The tensors themselves.

    >>> by_value({})
    {}
    """
    return dict(tensors)


@attrs.frozen
class _Lent:
    device: str
    handles: bytes


def lend(tensors: Tensors) -> Any:
    """Let processes on the same device see tensors where they are; what is not on a GPU goes by value.

    >>> lend({"x": torch.ones(1)})
    {'x': tensor([1.])}
    """
    if not all(map(_lendable, tensors.values())):
        return by_value(tensors) if process().first else {}
    return _Lent(_device(), bytes(ForkingPickler.dumps({name: x.detach() for name, x in tensors.items()})))


def _lendable(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _device() -> str:
    return str(torch.cuda.get_device_properties(0).uuid) if torch.cuda.is_available() else "cpu"


@attrs.frozen
class _Parcel:
    """Where tensors are cast, and what they are."""

    meeting: tuple[str, int]
    receivers: int
    content: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]


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
    """Send tensors to all receivers at once, in the background; each of them has to open what this returns.

    Args:
        tensors: on one device.
        to: the same as long as the receivers are, who meet but once.
        receivers: how many processes they are.

    Raises:
        TransferError: the last ones did not arrive.

    >>> cast({"x": torch.ones(2)}, (), 0).content
    (('x', torch.float32, (2,)),)
    """
    if to not in _SENDERS:
        _SENDERS.clear()  # receivers of earlier weights have died, and others have come
        _SENDERS[to] = _Sender(receivers)
    try:
        return _SENDERS[to].send(tensors)
    except TransferError:
        del _SENDERS[to]
        raise


class _Sender:
    def __init__(self, receivers: int) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self._receivers = receivers
        limit = timedelta(seconds=_SECONDS)
        self._store = TCPStore(_address(), 0, is_master=True, wait_for_workers=False, timeout=limit)
        self._group: Any = None
        self._background = ThreadPoolExecutor(1, thread_name_prefix="cast")
        self._sending: Future[None] | None = None

    def send(self, tensors: Tensors) -> _Parcel:
        if self._sending is not None:
            self._sending.result()  # there is one buffer on its way, not two
        content = tuple((name, x.dtype, tuple(x.shape)) for name, x in tensors.items())
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
            store = TCPStore(*parcel.meeting, timeout=timedelta(seconds=_SECONDS))
            _GROUPS[parcel.meeting] = _met(store, store.add("receivers", 1), 1 + parcel.receivers)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        sizes = [prod(shape) * dtype.itemsize for _, dtype, shape in parcel.content]
        flat = torch.empty(sum(map(_padded, sizes)), dtype=torch.uint8, device=device)
        _GROUPS[parcel.meeting].broadcast(flat, 0).wait()
    pieces = flat.split([_padded(size) for size in sizes])
    return {
        name: piece[:size].view(dtype).view(shape)
        for piece, size, (name, dtype, shape) in zip(pieces, sizes, parcel.content, strict=True)
    }


def _flat(tensors: Tensors) -> Tensor:
    """All of them one after the other, in memory that is taken once."""
    sizes = [_padded(x.numel() * x.element_size()) for x in tensors.values()]
    flat = torch.empty(sum(sizes), dtype=torch.uint8, device="cuda" if torch.cuda.is_available() else "cpu")
    for x, piece in zip(tensors.values(), flat.split(sizes), strict=True):
        piece[: x.numel() * x.element_size()].view(x.dtype).view(x.shape).copy_(x.detach())
    return flat


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _met(store: Any, rank: int, size: int) -> Any:
    """A process group of its own: that of the mesh knows nothing of the others."""
    limit = timedelta(seconds=_SECONDS)
    if not torch.cuda.is_available():
        return dist.ProcessGroupGloo(store, rank, size, limit)
    # Otherwise NCCL takes down a whole process if one that it waits for has died
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


def _number(mesh: Mesh) -> int:
    """The same for the same processes, as long as they live."""
    with _LOCK:
        return _NUMBERS.setdefault(mesh.processes, next(_COUNT))
