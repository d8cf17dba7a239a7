"""The process groups of Megatron Core, laid out as a mesh's `Layout` says."""

import gc
import warnings
from typing import Any

import attrs
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh

from nrl.backends.training.collectives import ProcessGroup
from nrl.errors import PlacementError
from nrl.runtime.mesh.layout import Layout

__all__ = ["Groups", "groups", "instances", "is_expert"]


@attrs.frozen
class Groups:
    """The place of this process in a layout, and its process groups.

    Args:
        layout: of the processes.
        peers: all processes of the mesh.
        collection: Megatron's ``ProcessGroupCollection``.
    """

    layout: Layout
    peers: ProcessGroup
    collection: Any

    @property
    def tp(self) -> int:
        """The rank along tp."""
        return int(self.collection.tp.rank())

    @property
    def cp(self) -> int:
        """The rank along cp."""
        return int(self.collection.cp.rank())

    def first_copy(self, parameter: Tensor) -> bool:
        """Return whether no earlier process at the same place along tp holds the same part of a parameter."""
        return int((self.collection.expt_dp if is_expert(parameter) else self.collection.dp_cp).rank()) == 0

    def first_shards(self, parameter: Tensor) -> bool:
        """Return whether no earlier process keeps the same part of a parameter's training state."""
        expert = is_expert(parameter)
        copies = self.collection.expt_dp if expert else self.collection.dp_cp
        sharing = self.collection.intra_expt_dp if expert else self.collection.intra_dp_cp
        return int(copies.rank()) < int(sharing.size())

    @property
    def is_output_rank(self) -> bool:
        """True for the first of the processes that have the same outputs: only its outputs count."""
        return int(self.collection.pp.rank()) == self.layout.pp - 1 and self.tp == 0 and self.cp == 0


def is_expert(parameter: Tensor) -> bool:
    """Return whether a parameter is an expert's, which lies whole in one of the processes along ep."""
    return not getattr(parameter, "allreduce", True)


def instances(layout: Layout) -> int:
    """Return the number of copies of the optimizer, each shared by ``layout.shard`` processes; 1 if none is shared.

    >>> instances(Layout(dp=4, shard=2)), instances(Layout(dp=4)), instances(Layout(dp=4, shard=1))
    (2, 1, 1)
    """
    return layout.dp // layout.shard if layout.shard is not None and layout.shard > 1 else 1


_LAID_OUT: list[Layout] = []
"""The layout of Megatron's groups in this process, which are global there."""


def groups(layout: Layout, mesh: DeviceMesh | None) -> Groups:
    """Make the groups of a layout; a collective of all processes of the mesh, which have to be all processes.

    Raises:
        PlacementError: there are not as many processes as the layout takes.
    """
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    if mesh is None and not dist.is_initialized():  # Megatron speaks to itself, too
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    if dist.get_world_size() != layout.slots:
        raise PlacementError(
            f"megatron.trainer: {layout} takes {layout.slots} processes; found {dist.get_world_size()}"
        )
    if [layout] != _LAID_OUT:
        _end(parallel_state)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parallel_state.initialize_model_parallel(
                layout.tp,
                layout.pp,
                layout.vp if layout.vp > 1 else None,
                context_parallel_size=layout.cp,
                expert_model_parallel_size=layout.ep,
                expert_tensor_parallel_size=1,
                num_distributed_optimizer_instances=instances(layout),
                create_gloo_process_groups=False,
            )
        _LAID_OUT[:] = [layout]
    world = None
    if layout.slots > 1:
        assert mesh is not None
        assert dist.group.WORLD is not None
        world = DeviceMesh.from_group(dist.group.WORLD, mesh.device_type, mesh_dim_names=("all",))
    return Groups(layout, ProcessGroup(world), ProcessGroupCollection.use_mpu_process_groups())


def _end(parallel_state: Any) -> None:
    """End the groups of an earlier layout, of which each has threads of its own."""
    process_groups = {id(x): x for x in vars(parallel_state).values() if isinstance(x, dist.ProcessGroup)}
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    for group in process_groups.values():
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    # Megatron's copies refer to themselves and keep their groups, each with threads, which poll over gloo.
    if process_groups:
        gc.collect()
