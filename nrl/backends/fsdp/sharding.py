"""Sharding a model over processes: each holds a part of every parameter, and whole layers only while they compute.

torch's ``fully_shard`` does the work, on a model without memory, and each process fills its part. It gathers a
module's parameters before the forward and again before the backward, and adds up their gradients after it. A sharded
module cannot be copied, so the unsharded one is remembered.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from nrl.backends.fsdp import mixed_precision
from nrl.backends.models import shards, weight_layout
from nrl.backends.models.lazy_weights import LazyModel
from nrl.backends.models.named_weights import weight_name
from nrl.backends.training.collectives import DeferredError, ProcessGroup
from nrl.backends.types import Piece
from nrl.errors import PlacementError

__all__ = [
    "ShardPlacement",
    "axis",
    "copy_frozen",
    "fill_parameters",
    "find_parts",
    "gather_full",
    "local_shard",
    "local_shards",
    "make_empty",
    "owned_shard",
    "reset_after",
    "run_gathered",
    "scatter",
    "single_process_mesh",
    "skeleton",
]


@attrs.frozen
class ShardPlacement:
    """The placement of a process's part of a model: device and dtype.

    Args:
        device: computes, and holds parameters and buffers.
        dtype: of gathered parameters; None: their own.
        offload: keep parameters and gradients on the host; each layer goes to the device when it computes.
    """

    device: torch.device
    dtype: torch.dtype | None = None
    offload: bool = False


_UNSHARDED: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()
"""For each sharded model, the same model before it was sharded, with parameters that take no memory."""


def axis(mesh: DeviceMesh | None) -> DeviceMesh | None:
    """Return the axis along which a model is sharded; None: one process holds all of it.

    Raises:
        PlacementError: the mesh has no axis ``dp``, or is larger than 1 along another one.
    """
    if mesh is None:
        return None
    names = mesh.mesh_dim_names or ()
    if "dp" not in names:
        raise PlacementError(
            f"TorchEngine: the mesh has {f'the axes {", ".join(names)}' if names else 'no named axes'}, and needs one "
            "named 'dp'; make it with init_device_mesh(device, (n,), mesh_dim_names=('dp',))"
        )
    for name, size in zip(names, mesh.shape, strict=True):
        if name != "dp" and size > 1:
            raise PlacementError(
                f"TorchEngine: the mesh has {name}={size}; the torch backend shards along dp only, so use {name}=1"
            )
    return mesh["dp"] if mesh["dp"].size() > 1 else None


def single_process_mesh(device: torch.device) -> DeviceMesh:
    """Make a mesh of this process alone, so that its model can be kept on the host as that of several processes.

    Raises:
        PlacementError: the process is one of several that have met, and was not given their mesh.
    """
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    if dist.get_world_size() > 1:
        raise PlacementError(
            f"TorchEngine: offload='cpu' without a mesh is for a process alone, and this is one of "
            f"{dist.get_world_size()} in a process group; give the engine a mesh with the axis 'dp'"
        )
    return init_device_mesh(device.type, (1,), mesh_dim_names=("dp",))["dp"]


def fill_parameters(
    module: nn.Module, unread: LazyModel, progress: Callable[[int, int], None] = lambda done, count: None
) -> None:
    """Fill this process's part of a model from `make_empty`; each process does so by itself.

    Meanwhile it holds, beside its part, a block of one weight of files, or one random weight.

    Args:
        module: the model.
        unread: the lazy model of its weights.
        progress: told how many parameters of how many are filled.
    """
    values, parameters = dict(unread.module.named_parameters()), dict(module.named_parameters())
    with torch.no_grad():
        for done, (name, parameter) in enumerate(parameters.items()):
            progress(done, len(parameters))
            mine = local_shard(weight_name(name), parameter)
            if values[name].is_meta:
                unread.fill(mine)
            else:
                mine.tensor.copy_(values[name][mine.index])


def scatter(
    module: nn.Module | None,
    read: Callable[[str], Tensor],
    deferred: DeferredError,
    placement: ShardPlacement,
) -> nn.Module:
    """Shard a model that the first process alone holds, or reads; a collective.

    Meanwhile each process holds its part and one tensor, beside the module that the first one was given.

    Args:
        module: a Hugging Face model on the CPU; None in all processes but the first.
        read: in the first process, reads a parameter that takes no memory (of the device ``meta``), by its name in
            files.
        deferred: of more than one process; an error of ``read`` is held back there, and the model is then of no use.
        placement: of the parts.
    """
    peers = deferred.peers
    skeleton = peers.broadcast(
        None if module is None else _copy_with_parameters(module, lambda x: torch.empty_like(x, device="meta"))
    )
    sharded = make_empty(skeleton, peers, placement)
    values = dict(module.named_parameters()) if module is not None else {}
    with torch.no_grad():
        for name, parameter in sharded.named_parameters():
            assert isinstance(parameter, DTensor)
            value = values.get(name, torch.empty(parameter.shape, dtype=parameter.dtype))
            if value.is_meta:
                value = torch.zeros(value.shape, dtype=value.dtype)
                with deferred.capture():
                    value = read(weight_name(name)).to(parameter.dtype)
            part = distribute_tensor(value.detach(), parameter.device_mesh, parameter.placements)  # the first sends
            parameter.to_local().copy_(part.to_local())
    return sharded


def copy_frozen(module: nn.Module, peers: ProcessGroup, placement: ShardPlacement) -> nn.Module:
    """Copy a sharded model and freeze the copy; no process ever holds more than its part."""
    copied = make_empty(_UNSHARDED[module], peers, placement)
    with torch.no_grad():
        for mine, other in zip(_states(copied), _states(module), strict=True):
            _local(mine).copy_(_local(other))
    return copied.requires_grad_(False)


def make_empty(skeleton: nn.Module, peers: ProcessGroup, placement: ShardPlacement) -> nn.Module:
    """Make this process's part of a model; its parameters are not initialised, its buffers have values.

    It is sharded layer by layer; embeddings and head, which are in no layer, are one more part. Gradients are sums over
    processes, in the parameters' own dtype. Until it is sharded, no parameter takes memory.

    Args:
        skeleton: a Hugging Face model; it is copied, and values of its parameters are not.
        peers: the processes; a single process holds the full model.
        placement: of the part that this process holds.
    """
    if peers.is_single:
        return _copy_with_parameters(skeleton, lambda x: torch.empty_like(x, device=placement.device)).to(
            placement.device
        )
    skeleton = _copy_with_parameters(skeleton, lambda x: torch.empty_like(x, device="meta"))
    module, mesh = copy.deepcopy(skeleton), peers.mesh
    policy = MixedPrecisionPolicy()
    if placement.dtype is not None:
        policy = MixedPrecisionPolicy(
            param_dtype=placement.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    offload, device = OffloadPolicy(), placement.device
    if placement.offload:  # pinned, so that copies need no wait
        offload, device = CPUOffloadPolicy(pin_memory=placement.device.type == "cuda"), torch.device("cpu")
    for layer in mixed_precision.layers(module):
        fully_shard(layer, mesh=mesh, mp_policy=policy, offload_policy=offload)
    fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload)
    module._apply(lambda x: torch.empty_like(x, device=device) if x.is_meta else x)
    for part in module.modules():
        if isinstance(part, FSDPModule):  # each part has settings of its own
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo has no other
            part.set_reduce_scatter_unused_params(True)  # All processes have to reduce the same parameters.
    # The head's weight is read outside of the head, so the root is gathered around the whole computation
    object.__setattr__(module, "nrl_run", MethodType(lambda self, compute: compute(), module))
    register_fsdp_forward_method(module, "nrl_run")
    _UNSHARDED[module] = skeleton
    return module


def run_gathered[T](module: Any, compute: Callable[[], T], dtype: torch.dtype | None = None) -> T:
    """Call a function while the parameters outside of layers are whole, and in the dtype; None: in their own."""
    if not isinstance(module, FSDPModule):
        with contextlib.nullcontext() if dtype is None else mixed_precision.cast_outside_layers(module, dtype):
            return compute()
    result: T = module.nrl_run(compute)  # type: ignore[attr-defined]
    return result


@contextlib.contextmanager
def reset_after(module: nn.Module) -> Iterator[None]:
    """Leave a model sharded, or with weights that are not rounded, and without gradients, also after an error.

    The block has to use the gradients: newer versions of torch discard them when they reset the model.
    """
    try:
        with (
            contextlib.nullcontext()
            if isinstance(module, FSDPModule)
            else mixed_precision.restore_weights_after(module)
        ):
            yield
    finally:
        if isinstance(module, FSDPModule):
            with contextlib.suppress(AttributeError):  # before the first forward it has nothing to reset
                module.reset_iter_state()
        module.zero_grad(set_to_none=True)


def gather_full(tensor: Tensor) -> Tensor:
    """Return the full tensor in every process; a collective if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_shard(name: str, tensor: Tensor) -> Piece:
    """Return this process's part of a weight, which may be empty."""
    if not isinstance(tensor, DTensor):
        return shards.full_shard(name, tensor)
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    index = tuple(slice(first, first + size) for first, size in zip(offsets, shape, strict=True))
    return Piece(name, tuple(tensor.shape), index, tensor.to_local())


def local_shards(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Piece]:
    """Return this process's parts of weights of a model, by the names of files.

    A weight that has two names is one piece.
    """
    pieces: dict[int, Piece] = {}
    for name, tensor in tensors.items():
        if id(tensor) not in pieces:
            pieces[id(tensor)] = local_shard(name, tensor)
    return weight_layout.map_to_files(
        {name: pieces[id(tensor)] for name, tensor in tensors.items()}, find_parts(module)
    )


def find_parts(module: nn.Module) -> weight_layout.Parts:
    """Return the weights of files that a model's weights consist of.

    The model may be sharded, which changes the names of its classes.
    """
    return weight_layout.find_parts(_UNSHARDED.get(module, module))


def owned_shard(peers: ProcessGroup, name: str, tensor: Tensor) -> Piece:
    """Return this process's part of a weight; empty, if another process owns the same."""
    shard, copy = local_shard(name, tensor), peers.rank > 0
    if isinstance(tensor, DTensor):
        places = zip(tensor.placements, tensor.device_mesh.get_coordinate() or (), strict=True)
        copy = any(coordinate for placement, coordinate in places if placement.is_replicate())
    return shards.empty_shard(shard) if copy else shard


def skeleton(module: nn.Module) -> nn.Module:
    """Return the model before sharding, with parameters that take no memory."""
    return _copy_with_parameters(_UNSHARDED.get(module, module), lambda x: torch.empty_like(x, device="meta"))


def _copy_with_parameters(module: nn.Module, make: Callable[[Tensor], Tensor]) -> nn.Module:
    """Copy a module with new parameters, tied ones once; the memo keeps `deepcopy` from copying the old ones."""
    memo: dict[int, Any] = {id(x): nn.Parameter(make(x.detach()), x.requires_grad) for x in module.parameters()}
    return copy.deepcopy(module, memo)


def _states(module: nn.Module) -> Iterator[Tensor]:
    return chain(module.parameters(), module.buffers())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
