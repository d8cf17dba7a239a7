"""A process of a mesh inside its actor: keeps values and calls functions on them. A helper is one that keeps none."""

import os
import pickle
import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from tensordict import TensorDict

from nrl.batch.ragged import is_ragged, parts_of, take
from nrl.batch.raw import flat_bytes
from nrl.runtime.intraop import set_threads
from nrl.runtime.mesh.current_process import Process, entered, perform
from nrl.runtime.mesh.offload import rest, wake
from nrl.runtime.ports import store
from nrl.runtime.ray.codec.exceptions import carried
from nrl.runtime.ray.codec.messages import FUNCTIONS, Argument, NeverMade, Order, Receipt, unfolded
from nrl.runtime.ray.codec.pickling import deserialized, serialized
from nrl.runtime.ray.codec.shared_memory import Shared
from nrl.runtime.ray.sockets import bind
from nrl.runtime.trace import profiles
from nrl.runtime.trace.timeline import stopwatch

__all__ = ["Worker"]


class Worker:
    """A process of a mesh.

    Args:
        mesh: the name of the mesh.
        rank: of the process in the mesh.
        size: the number of processes.
        share: how many processes share the cores of the node.
        threads: for torch; None: the cores of the node divided by ``share``.
        seed: of the global random generators; the rank is added.
    """

    def __init__(self, mesh: str, rank: int, size: int, share: int, threads: int | None, seed: int) -> None:
        self.here = Process(rank, size, None, mesh)
        self._store: Any = None
        self._resting: set[int] | None = None  # the values that left the device, if it rests
        self._values: dict[int, Any] = {}
        self._functions: OrderedDict[bytes, Callable[..., Any]] = OrderedDict()
        self._guard = threading.Lock()  # of `_functions`: a helper has several threads
        set_threads(threads, share)
        seed = (seed + rank) % 2**32
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)

    def logs(self) -> tuple[str, ...]:
        """The files that the process writes its output to."""
        return tuple(dict.fromkeys(filter(os.path.isfile, map(_file_of, (1, 2)))))

    def listen(self, timeout: float) -> tuple[str, int]:
        """Open the store at which the processes of the mesh meet."""
        import ray

        host = ray.util.get_node_ip_address()
        self._store = store(host, timedelta(seconds=timeout))
        return host, self._store.port

    def join(self, meeting: tuple[str, int] | None, axes: Sequence[tuple[str, int]], timeout: float) -> bytes:
        """Make a process group with the others (NCCL and gloo, or gloo), and a device mesh with these axes."""
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
            met = self._store or TCPStore(*meeting, timeout=timedelta(seconds=timeout))
            backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
            dist.init_process_group(backend, store=met, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
            names, extents = zip(*axes, strict=True)
            mesh = init_device_mesh("cuda" if cuda else "cpu", extents, mesh_dim_names=names)
            self.here = Process(rank, size, mesh, self.here.mesh)
        return pickle.dumps(Receipt(start, now(), ()))

    def rest(self) -> bytes:
        """Move all values off the device until the next call: another mesh works there."""
        start, now = stopwatch()
        self._resting = {key for key, value in self._values.items() if rest(value)} | (self._resting or set())
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return pickle.dumps(Receipt(start, now(), ()))

    def call(self, letter: bytes, *arrived: Any) -> Any:
        """Carry out an order that `messages.folded` made; a pickled receipt, and the results that the order wants.

        Raises:
            Raised: the function raised something; the values that it was to consume are still there.
        """
        order, beside = unfolded(letter, arrived)
        with carried(order.who):
            return self._call(order, beside)

    def submitted(self, letter: bytes, *arrived: Any) -> Any:
        """As `call`, in a thread; no exception, not even `sys.exit`, ends the process and what else runs in it."""
        order, beside = unfolded(letter, arrived)
        with carried(order.who, BaseException):
            return self._call(order, beside)

    def stay(self) -> None:
        """Never return, so that the driver is told when the process ends."""
        threading.Event().wait()

    def _call(self, order: Order, beside: Sequence[Any]) -> Any:
        for key in order.dropped:
            self._values.pop(key, None)
        if self._resting is not None and order.turn:
            for key in self._resting:
                wake(self._values.get(key))
            self._resting = None
        shared: list[Shared] = []
        function = self._function(order.function, beside[0])
        keeps = any(key is not None for key in order.keys)  # a kept value must not lie in memory that others read
        args = [self._argument(order.who, arg, beside, shared, copy=keeps) for arg in order.args]
        start, now = stopwatch()
        try:
            with entered(self.here), profiles.tracing(order.trace, self.here.rank):
                results = perform(order.who, function, args, order.outs)
        finally:  # a function that raises may have written before
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
        sent = [serialized(result, of) for result, wanted in zip(results, order.wanted, strict=True) if wanted]
        digests = tuple(
            _digest(result) if compared else None for result, compared in zip(results, order.compared, strict=True)
        )
        receipt = pickle.dumps(Receipt(start, end, digests))
        return (receipt, *(each if len(each) > 1 else each[0] for each in sent)) if sent else receipt

    def _function(self, key: bytes, parts: Any) -> Callable[..., Any]:
        found = self._functions.get(key)
        if found is None:
            found = deserialized(parts, copy=True)[0]
        with self._guard:
            self._functions[key] = found
            self._functions.move_to_end(key)
            if len(self._functions) > FUNCTIONS:
                self._functions.popitem(last=False)
        return found

    def _argument(self, who: str, arg: Argument, beside: Sequence[Any], shared: list[Shared], copy: bool) -> Any:
        if arg.key is not None:
            if arg.key not in self._values:
                raise NeverMade(f"{who}: an argument of this call was never made")
            return self._values[arg.key]
        values = []
        for part in arg.parts:
            value, held = deserialized(beside[part], copy=copy)
            values.append(value)
            shared.append(held)
        value = values[0] if arg.combine is None else deserialized(beside[arg.combine], copy=True)[0](values)
        return value if arg.rows is None else take(value, deserialized(beside[arg.rows])[0])


def _digest(value: Any) -> bytes:
    """A digest that is the same for equal values, in any order of keys and with or without shared parts."""
    found = xxhash.xxh3_128()  # fast, since results may be large; nobody forges them
    for piece in _pieces(value):
        found.update(piece)
    return found.digest()


def _pieces(value: Any) -> Iterator[Any]:
    match value:
        case torch.Tensor() if is_ragged(value):
            yield from _pieces(parts_of(value))
        case torch.Tensor():
            yield f"{value.dtype} {tuple(value.shape)}".encode()
            numbers = value.detach().cpu()
            numbers = numbers + 0 if numbers.is_floating_point() else numbers  # there are two zeros
            yield flat_bytes(numbers).numpy()
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
            yield from serialized(value, "P()")


def _file_of(descriptor: int) -> str:
    try:
        return str(Path(f"/proc/self/fd/{descriptor}").readlink())
    except OSError:  # no such folder on this system
        return ""
