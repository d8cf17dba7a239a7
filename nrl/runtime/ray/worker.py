"""A process of a mesh inside its actor: keeps values and calls functions on them."""

import os
import pickle
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import numpy as np
import torch
import xxhash
from tensordict import TensorDict

from nrl.runtime.mesh.current_process import Process, entered, perform, rest, wake
from nrl.runtime.mesh.placement import Out
from nrl.runtime.ray.raising import carried
from nrl.runtime.ray.shipping import Shared, opened, shipped
from nrl.runtime.ray.sockets import bind
from nrl.runtime.trace import profiles
from nrl.runtime.trace.timeline import stopwatch

__all__ = ["FUNCTIONS", "Argument", "NeverMade", "Order", "Receipt", "Worker", "folded", "unfolded"]

FUNCTIONS = 64  # that a process remembers; an older one is opened again


class NeverMade(Exception):
    """A value is not there, because the call that was to make it has failed."""


class Argument(NamedTuple):
    """How a process finds an argument of a call.

    Args:
        key: of a value that it keeps.
        donated: that value is consumed.
        parts: where, in what came with the order, the parts of the argument are.
        combine: where what makes one value of them is; None: there is one part.
        rows: where the numbers of the rows to take of it are; None: all.
    """

    key: int | None = None
    donated: bool = False
    parts: tuple[int, ...] = ()
    combine: int | None = None
    rows: int | None = None


class Order(NamedTuple):
    """What a process is asked to do. What it needs for it comes beside, shipped.

    Args:
        who: how errors name the call.
        function: a hash of the function, which is the first of what comes beside.
        args: its arguments.
        outs: what it returns.
        keys: for each of ``outs``, under which key a value is kept; None: it is not.
        wanted: for each of ``outs``, whether this process sends it.
        compared: for each of ``outs``, whether its digest is part of the receipt.
        dropped: keys of values that nobody has a name for any more.
        trace: where to write a profile of the call.
        turn: whether what rests comes back to the device for it.
    """

    who: str
    function: bytes
    args: tuple[Argument, ...]
    outs: Out | tuple[Out, ...]
    keys: tuple[int | None, ...]
    wanted: tuple[bool, ...]
    compared: tuple[bool, ...]
    dropped: tuple[int, ...] = ()
    trace: str | None = None
    turn: bool = True


@attrs.frozen
class Receipt:
    """When a call ran, in seconds of the epoch, and the digests of results that have to be the same everywhere."""

    start: float
    end: float
    digests: tuple[bytes | None, ...]


def folded(order: Order, beside: Sequence[Any]) -> list[Any]:
    """An order and what is small of what comes beside as bytes, which Ray sends several times as fast as objects.

    Args:
        order: what to do.
        beside: `Shipped` values that are small, and references to others.

    Returns:
        The bytes, and the references.

    >>> letter, reference = folded("order", [[b"small"], "reference"])
    >>> unfolded(letter, ["value"])
    ('order', [[b'small'], 'value'])
    """
    small = [item if isinstance(item, list) else None for item in beside]
    return [pickle.dumps((order, small)), *(item for item in beside if not isinstance(item, list))]


def unfolded(letter: bytes, arrived: Sequence[Any]) -> tuple[Order, list[Any]]:
    """The order and what came beside it; the inverse of `folded`, once Ray has replaced references by values.

    >>> unfolded(folded("order", [])[0], [])
    ('order', [])
    """
    order, small = pickle.loads(letter)
    values = iter(arrived)
    return order, [next(values) if item is None else item for item in small]


class Worker:
    """A process of a mesh.

    Args:
        mesh: the name of the mesh.
        rank: its number there.
        size: the number of processes.
        share: how many processes share the cores of the node.
        threads: for torch; None: the cores of the node divided by ``share``.
        seed: of the global random generators, which are different in each rank.
    """

    def __init__(self, mesh: str, rank: int, size: int, share: int, threads: int | None, seed: int) -> None:
        self.here = Process(rank, size, None, mesh)
        self._store: Any = None
        self._resting = False
        self._values: dict[int, Any] = {}
        self._functions: OrderedDict[bytes, Callable[..., Any]] = OrderedDict()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(threads or max(1, cores // share))
        seed = (seed + rank) % 2**32
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)

    def logs(self) -> tuple[str, ...]:
        """The files that it writes to."""
        return tuple(dict.fromkeys(filter(os.path.isfile, map(_file_of, (1, 2)))))

    def listen(self, timeout: float) -> tuple[str, int]:
        """Open the store at which the processes of the mesh meet, at a port that the system chooses and keeps."""
        import ray
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        host = ray.util.get_node_ip_address()
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_seconds(timeout))
        return host, self._store.port

    def join(self, meeting: tuple[str, int] | None, axes: Sequence[tuple[str, int]], timeout: float) -> bytes:
        """Meet the others: a process group over NCCL and gloo, or gloo, and a device mesh with these axes."""
        import ray
        import torch.distributed as dist
        from torch.distributed import TCPStore  # type: ignore[attr-defined]
        from torch.distributed.device_mesh import init_device_mesh

        start, now = stopwatch()
        rank, size = self.here.rank, self.here.size
        bind(ray.util.get_node_ip_address())
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(0)
        if meeting is not None:
            store = self._store or TCPStore(*meeting, timeout=_seconds(timeout))
            backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_seconds(timeout))
            names, extents = zip(*axes, strict=True)
            mesh = init_device_mesh("cuda" if cuda else "cpu", extents, mesh_dim_names=names)
            self.here = Process(rank, size, mesh, self.here.mesh)
        return pickle.dumps(Receipt(start, now(), ()))

    def rest(self) -> bytes:
        """Let what is kept here leave the device, until the next call: another mesh on it has work to do."""
        start, now = stopwatch()
        self._resting = True
        for value in self._values.values():
            rest(value)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return pickle.dumps(Receipt(start, now(), ()))

    def call(self, letter: bytes, *arrived: Any) -> Any:
        """Do what is ordered, see `folded`: a receipt, pickled, and the results that are wanted.

        Raises:
            Raised: the function raised something; values that it was to consume are still there.
        """
        order, beside = unfolded(letter, arrived)
        with carried(order.who):
            return self._call(order, beside)

    def _call(self, order: Order, beside: Sequence[Any]) -> Any:
        for key in order.dropped:
            self._values.pop(key, None)
        if self._resting and order.turn:
            self._resting = False
            for value in self._values.values():
                wake(value)
        shared: list[Shared] = []
        function = self._function(order.function, beside[0])
        keeps = any(key is not None for key in order.keys)  # what stays must not lie in memory that others read
        args = [self._argument(order.who, arg, beside, shared, copy=keeps) for arg in order.args]
        start, now = stopwatch()
        try:
            with entered(self.here), profiles.tracing(order.trace, self.here.rank):
                results = perform(order.who, function, args, order.outs)
        finally:  # a function that raises may have written, too
            for each in shared:
                each.check(order.who)
        end = now()
        for arg in order.args:
            if arg.donated and arg.key is not None:
                self._values.pop(arg.key)
        for name, result in zip(order.keys, results, strict=True):
            if name is not None:
                self._values[name] = result
        of = f"the result of {order.who}"
        sent = [shipped(result, of) for result, wanted in zip(results, order.wanted, strict=True) if wanted]
        digests = tuple(
            _digest(result) if compared else None for result, compared in zip(results, order.compared, strict=True)
        )
        receipt = pickle.dumps(Receipt(start, end, digests))
        return (receipt, *(each if len(each) > 1 else each[0] for each in sent)) if sent else receipt

    def _function(self, key: bytes, parts: Any) -> Callable[..., Any]:
        if key not in self._functions:
            self._functions[key] = opened(parts, copy=True)[0]
            if len(self._functions) > FUNCTIONS:
                self._functions.popitem(last=False)
        self._functions.move_to_end(key)
        return self._functions[key]

    def _argument(self, who: str, arg: Argument, beside: Sequence[Any], shared: list[Shared], copy: bool) -> Any:
        if arg.key is not None:
            if arg.key not in self._values:
                raise NeverMade(f"{who}: an argument of this call was never made")
            return self._values[arg.key]
        values = []
        for part in arg.parts:
            value, held = opened(beside[part], copy=copy)
            values.append(value)
            shared.append(held)
        value = values[0] if arg.combine is None else opened(beside[arg.combine], copy=True)[0](values)
        return value if arg.rows is None else value[opened(beside[arg.rows])[0]]


def _digest(value: Any) -> bytes:
    """The same for values that are equal, whatever order their keys have and which of their parts are one object."""
    found = xxhash.xxh3_128()  # results may be large; nobody forges them
    for piece in _pieces(value):
        found.update(piece)
    return found.digest()


def _pieces(value: Any) -> Iterator[Any]:
    match value:
        case torch.Tensor():
            yield f"{value.dtype} {tuple(value.shape)}".encode()
            plain = value.detach().cpu().contiguous()
            plain = plain + 0 if plain.is_floating_point() else plain  # there are two zeros
            yield plain.reshape(-1).view(torch.uint8).numpy()
        case Mapping() | TensorDict():
            yield f"{type(value).__name__} {len(value.keys())}".encode()
            for key in sorted(value.keys(), key=repr):
                yield repr(key).encode()
                yield from _pieces(value[key])
        case list() | tuple():
            yield f"{type(value).__name__} {len(value)}".encode()
            for part in value:
                yield from _pieces(part)
        case set() | frozenset():
            yield repr(sorted(map(repr, value))).encode()
        case str() | bytes() | int() | float() | None:
            yield repr(value + 0.0 if isinstance(value, float) else value).encode()
        case _:
            yield from shipped(value, "P()")


def _file_of(descriptor: int) -> str:
    try:
        return str(Path(f"/proc/self/fd/{descriptor}").readlink())
    except OSError:  # no such folder on this system
        return ""


def _seconds(seconds: float) -> Any:
    from datetime import timedelta

    return timedelta(seconds=seconds)
