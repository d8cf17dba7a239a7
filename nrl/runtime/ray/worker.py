"""A process of a mesh inside its actor: it keeps values and calls functions on them. A helper keeps no values."""

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
from nrl.runtime.mesh.current_process import Process, enter_process, perform
from nrl.runtime.mesh.offload import offload_value, onload_value
from nrl.runtime.ports import store
from nrl.runtime.ray.codec.exceptions import wrap_exceptions
from nrl.runtime.ray.codec.messages import CACHED_FUNCTIONS, Argument, CallReply, CallRequest, MissingInput, decode
from nrl.runtime.ray.codec.pickling import deserialize, serialize
from nrl.runtime.ray.codec.shared_memory import SharedTensors
from nrl.runtime.ray.sockets import choose_interface
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
        self.process = Process(rank, size, None, mesh)
        self._store: Any = None
        self._offloaded: set[int] | None = (
            None  # Keys of the values that left the device, while another mesh works there.
        )
        self._values: dict[int, Any] = {}
        self._functions: OrderedDict[bytes, Callable[..., Any]] = OrderedDict()
        self._guard = threading.Lock()  # Guards `_functions`: a helper has several threads.
        set_threads(threads, share)
        seed = (seed + rank) % 2**32
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)

    def logs(self) -> tuple[str, ...]:
        """Return the files that the process writes its output to."""
        return tuple(dict.fromkeys(filter(os.path.isfile, map(_path_of_fd, (1, 2)))))

    def listen(self, timeout: float) -> tuple[str, int]:
        """Open the store for the rendezvous of the mesh's processes."""
        import ray

        host = ray.util.get_node_ip_address()
        self._store = store(host, timedelta(seconds=timeout))
        return host, self._store.port

    def join(self, rendezvous: tuple[str, int] | None, axes: Sequence[tuple[str, int]], timeout: float) -> bytes:
        """Make a process group with the others (NCCL and gloo, or gloo), and a device mesh with these axes."""
        import ray
        import torch.distributed as dist
        from torch.distributed import TCPStore  # type: ignore[attr-defined]
        from torch.distributed.device_mesh import init_device_mesh

        start, clock = stopwatch()
        rank, size = self.process.rank, self.process.size
        choose_interface(ray.util.get_node_ip_address())
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(0)
        if rendezvous is not None:
            store = self._store or TCPStore(*rendezvous, timeout=timedelta(seconds=timeout))
            backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
            )
            names, extents = zip(*axes, strict=True)
            mesh = init_device_mesh("cuda" if cuda else "cpu", extents, mesh_dim_names=names)
            self.process = Process(rank, size, mesh, self.process.mesh)
        return pickle.dumps(CallReply(start, clock(), ()))

    def offload(self) -> bytes:
        """Offload all values until the next call, while another mesh works on the device."""
        start, clock = stopwatch()
        self._offloaded = {key for key, value in self._values.items() if offload_value(value)} | (
            self._offloaded or set()
        )
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return pickle.dumps(CallReply(start, clock(), ()))

    def call(self, payload: bytes, *resolved: Any) -> Any:
        """Carry out a request of `messages.encode`; return a pickled reply, and the results to send.

        Raises:
            RemoteException: the function raised; its donated values are still there.
        """
        request, items = decode(payload, resolved)
        with wrap_exceptions(request.caller):
            return self._call(request, items)

    def call_in_thread(self, payload: bytes, *resolved: Any) -> Any:
        """Carry out a request as `call` does, in a thread. No exception, not even `sys.exit`, ends the process."""
        request, items = decode(payload, resolved)
        with wrap_exceptions(request.caller, BaseException):
            return self._call(request, items)

    def stay(self) -> None:
        """Block forever, so that the driver learns when the process ends."""
        threading.Event().wait()

    def _call(self, request: CallRequest, items: Sequence[Any]) -> Any:
        for key in request.dropped:
            self._values.pop(key, None)
        if self._offloaded is not None and request.turn:
            for key in self._offloaded:
                onload_value(self._values.get(key))
            self._offloaded = None
        shared: list[SharedTensors] = []
        function = self._load_function(request.function, items[0])
        # A kept value must not lie in memory that other processes read.
        keeps = any(key is not None for key in request.keys)
        args = [self._load_argument(request.caller, arg, items, shared, copy=keeps) for arg in request.args]
        start, clock = stopwatch()
        try:
            with enter_process(self.process), profiles.tracing(request.trace, self.process.rank):
                results = perform(request.caller, function, args, request.outs)
        finally:  # A function that raises may have written before.
            for part in shared:
                part.check(request.caller)
        end = clock()
        for arg in request.args:
            if arg.donated and arg.key is not None:
                self._values.pop(arg.key)
        for name, result in zip(request.keys, results, strict=True):
            if name is not None:
                self._values[name] = result
        label = f"the result of {request.caller}"
        parts = [
            serialize(result, label) for result, returned in zip(results, request.returned, strict=True) if returned
        ]
        digests = tuple(
            _compute_digest(result) if compared else None
            for result, compared in zip(results, request.compared, strict=True)
        )
        receipt = pickle.dumps(CallReply(start, end, digests))
        return (receipt, *(part if len(part) > 1 else part[0] for part in parts)) if parts else receipt

    def _load_function(self, key: bytes, parts: Any) -> Callable[..., Any]:
        function = self._functions.get(key)
        if function is None:
            function = deserialize(parts, copy=True)[0]
        with self._guard:
            self._functions[key] = function
            self._functions.move_to_end(key)
            if len(self._functions) > CACHED_FUNCTIONS:
                self._functions.popitem(last=False)
        return function

    def _load_argument(
        self, caller: str, arg: Argument, items: Sequence[Any], shared: list[SharedTensors], copy: bool
    ) -> Any:
        if arg.key is not None:
            if arg.key not in self._values:
                raise MissingInput(f"{caller}: an argument of this call was never made")
            return self._values[arg.key]
        values = []
        for part in arg.parts:
            value, tensors = deserialize(items[part], copy=copy)
            values.append(value)
            shared.append(tensors)
        value = values[0] if arg.combine is None else deserialize(items[arg.combine], copy=True)[0](values)
        return value if arg.rows is None else take(value, deserialize(items[arg.rows])[0])


def _compute_digest(value: Any) -> bytes:
    """Compute a digest that is equal for equal values, in any order of keys and with or without shared parts."""
    digest = xxhash.xxh3_128()  # fast, since results may be large; nobody forges them
    for piece in _iter_pieces(value):
        digest.update(piece)
    return digest.digest()


def _iter_pieces(value: Any) -> Iterator[Any]:
    match value:
        case torch.Tensor() if is_ragged(value):
            yield from _iter_pieces(parts_of(value))
        case torch.Tensor():
            yield f"{value.dtype} {tuple(value.shape)}".encode()
            numbers = value.detach().cpu()
            numbers = numbers + 0 if numbers.is_floating_point() else numbers  # A negative zero becomes a positive one.
            yield flat_bytes(numbers).numpy()
        case Mapping() | TensorDict():
            yield f"{type(value).__name__} {len(value.keys())}".encode()
            for key in sorted(value.keys(), key=repr):
                yield repr(key).encode()
                yield from _iter_pieces(value[key])
        case list() | tuple():
            yield f"{type(value).__name__} {len(value)}".encode()
            for part in value:
                yield from _iter_pieces(part)
        case set() | frozenset():
            yield repr(sorted(map(repr, value))).encode()
        case str() | bytes() | int() | float() | None:
            yield repr(value + 0.0 if isinstance(value, float) else value).encode()
        case _:
            yield from serialize(value, "P()")


def _path_of_fd(descriptor: int) -> str:
    try:
        return str(Path(f"/proc/self/fd/{descriptor}").readlink())
    except OSError:  # no such folder on this system
        return ""
