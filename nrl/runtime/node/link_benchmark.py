"""A benchmark of the link between two hosts: two processes connect over gloo or NCCL, as the processes of a mesh do.

The module travels by value, and needs torch and the standard library alone.
"""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

__all__ = ["LinkBenchmark"]

_ROUNDS = 3  # repetitions of a measured send; the fastest counts
_PINGS = 20


class LinkBenchmark:
    """An actor on a node, in a Python that has torch.

    Args:
        address: of the node, as Ray knows it.
        interface_of: finds the interface with that address; gloo and NCCL use it, as in the processes of a mesh.
    """

    def __init__(self, address: str, interface_of: Callable[[str], str | None]) -> None:
        self._address, self._store = address, dict[str, Any]()
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # c10d warns where an address has no name
        if name := interface_of(address):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")

    def describe_torch(self) -> dict[str, Any]:
        """Return torch's version, its CUDA and its devices; the import takes seconds."""
        import torch
        import torch.distributed as dist

        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if devices and dist.is_nccl_available() else None
        return {"torch": torch.__version__, "cuda": torch.version.cuda, "devices": devices, "nccl": nccl}

    def open_store(self, name: str, seconds: float) -> int:
        """Open a store for the rendezvous of a pair; return its port."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        store = TCPStore(self._address, 0, 2, True, timedelta(seconds=seconds), wait_for_workers=False)
        self._store[name] = store
        port: int = store.port
        return port

    def measure(
        self, name: str, backend: str, address: str, port: int, rank: int, size: int, seconds: float
    ) -> dict[str, Any]:
        """Connect to the other process, and measure sends of a tensor.

        Args:
            name: the name of the pair.
            backend: ``"gloo"`` or ``"nccl"``.
            address: the address of the store's process.
            port: the port of the store.
            rank: 0 has the store, 1 connects to it.
            size: bytes of the tensor.
            seconds: for each step.

        Returns:
            ``rate``, bytes a second that this process sends; ``latency``, seconds of half a round trip; ``interface``.

        Raises:
            RuntimeError: the processes did not connect; both have the error of the first.
        """
        import torch
        import torch.distributed as dist
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        limit = timedelta(seconds=seconds)
        store = self._store[name] if rank == 0 else TCPStore(address, port, 2, False, limit)
        device = "cuda" if backend == "nccl" else "cpu"
        try:
            dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=limit)
        except Exception as error:  # The other process would only see a timeout: store the error.
            raise RuntimeError(store.compare_set("why", "", str(error)).decode()) from error
        try:
            large, small = torch.zeros(size // 4, device=device), torch.zeros(1, device=device)

            def exchange(first: int, tensor: torch.Tensor) -> float:
                """Measure the seconds in which one process sends a tensor and gets a reply."""
                began = time.perf_counter()
                for sender, sent in ((first, tensor), (1 - first, small)):
                    dist.send(sent, 1 - rank) if rank == sender else dist.recv(sent, 1 - rank)
                small.item()  # A GPU runs asynchronously.
                return time.perf_counter() - began

            exchange(0, large)  # connections are made at the first use
            latency = min(exchange(0, small) for _ in range(_PINGS)) / 2
            took = [min(exchange(first, large) for _ in range(_ROUNDS)) for first in (0, 1)]
            rate = size / max(took[rank] - latency, 1e-9)
        finally:
            dist.destroy_process_group()
            self._store.pop(name, None)
        interface = os.environ.get(f"{backend.upper()}_SOCKET_IFNAME", "")
        return {"rate": rate, "latency": latency, "interface": interface.removeprefix("=")}
