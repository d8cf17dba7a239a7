"""Tensor parallelism: one engine over several processes of a mesh, each with a part of every layer.

Each process runs all of vLLM, gets the same requests, and schedules them alike; the processes meet inside of the
layers. Only their clocks differ, so they take decisions on time from the first process.
"""

import uuid
from typing import Any

import torch
import torch.distributed as dist

from nrl.runtime.mesh.current_process import process

__all__ = ["arguments", "end", "tp_consensus"]


def arguments() -> dict[str, Any]:
    """Return vLLM's arguments for the processes of an engine."""
    if not _spans_processes():
        _leave_process_group()
        return {"distributed_executor_backend": "uni"}
    peers = process().device_mesh["tp"]
    return {
        "distributed_executor_backend": _make_executor_class(peers),
        "tensor_parallel_size": peers.size(),
        "disable_custom_all_reduce": True,  # it wants to see the GPUs of the others, and Ray shows a process its own
    }


def tp_consensus(mine: bool) -> bool:
    """Return the first process's value, in all processes of the engine; a collective."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return mine
    decision = torch.tensor([mine])
    dist.broadcast(decision, group=group.cpu_group, group_src=0)
    return bool(decision)


def end(engine: Any) -> None:
    """Shut an engine down, but keep the mesh's process group, which the next engine needs."""
    destroy = dist.destroy_process_group
    dist.destroy_process_group = lambda group=None: None if group is None and _spans_processes() else destroy(group)
    try:
        engine.engine_core.shutdown()
    finally:
        dist.destroy_process_group = destroy


def _spans_processes() -> bool:
    mesh = process().device_mesh
    return mesh is not None and mesh.size(mesh.mesh_dim_names.index("tp")) > 1


def _leave_process_group() -> None:
    """Leave the mesh's process group: vLLM makes its own, and engines do not talk to each other."""
    from vllm.distributed import parallel_state

    if dist.is_initialized() and not parallel_state.model_parallel_is_initialized():
        dist.destroy_process_group()


def _make_executor_class(peers: Any) -> type[Any]:
    """Define the executor's class here, since it inherits from vLLM's, which may not be installed."""
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    name = [uuid.uuid4().hex]
    dist.broadcast_object_list(name, group=peers.get_group(), group_src=0)

    class OfMesh(ExecutorWithExternalLauncher):  # type: ignore[misc]
        """A worker for which the mesh's process group is the world; vLLM makes engines of consecutive ranks."""

        def _distributed_args(self) -> tuple[str, int, int]:
            # Nobody meets at this address, but on a CPU vLLM names an engine's shared memory after it
            return f"mesh:{name[0]}", peers.get_local_rank(), 0

    return OfMesh
