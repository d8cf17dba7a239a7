"""A fake CUDA: replacements for parts of torch, so that it treats fake tensors as tensors of a GPU.

`install` changes the process permanently, so it is called in a process of its own. All replacements of torch are in
this module, except the storages that `nrl.ops.plan.op_counter` watches.
"""

import contextlib
import ctypes
import importlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nrl.errors import ConfigError

__all__ = ["SLOTS", "OtherRanks", "as_rank", "check_torch", "choose_attention", "install"]

SLOTS = {"2.13": 4}
"""By version of torch with which this file was tested: the slot of ``CUDAHooks::hasPrimaryContext`` in its table."""
_TORCH = str(Path(torch.__file__).parent)
_KEEP_ALIVE: list[Any] = []
_ATEN: Any = torch.ops.aten


def check_torch(version: str = torch.__version__) -> int:
    """Return the slot of this version of torch.

    Raises:
        ConfigError: this file was not tested with it.
    """
    for tested, slot in SLOTS.items():
        if version.startswith(f"{tested}."):
            return slot
    raise ConfigError(
        f"plan: found torch {version}, and fake CUDA tensors are tested with {', '.join(SLOTS)} alone; "
        "use closed forms (driven=false), or install that version"
    )


class OtherRanks:
    """Stand-ins for the other processes in collectives of objects.

    Attributes:
        reply: called with a rank, and with the value of this process; at first it returns that value.
    """

    def __init__(self) -> None:
        self.reply: Callable[[int, Any], Any] = lambda rank, value: value

    def gather(self, values: list[Any], value: Any, group: Any = None) -> None:
        """Replace ``torch.distributed.all_gather_object``."""
        values[:] = [value if index == dist.get_rank() else self.reply(index, value) for index in range(len(values))]

    def broadcast(self, box: list[Any], group: Any = None, group_src: int = 0) -> None:
        """Replace ``torch.distributed.broadcast_object_list``."""
        if group_src != dist.get_rank():
            box[:] = [self.reply(group_src, value) for value in box]


def install(
    capability: tuple[int, int], memory: int, waited: Callable[[str], None], world: int = 1, rank: int = 0
) -> OtherRanks:
    """Change this process so that CUDA seems to be there, and a process group of any size.

    Args:
        capability: of the device, such as (9, 0).
        memory: of the device, in bytes.
        waited: told of each wait for the device, by its kind.
        world: the number of processes.
        rank: of this one.

    Returns:
        The other processes.

    Raises:
        ConfigError: this version of torch was not tested.
    """
    _hide_primary_context(check_torch())
    torch.autograd.set_multithreading_enabled(False)
    torch._C._ensureCUDADeviceGuardSet()
    _stub_cuda(capability, memory, waited)
    # A real parameter that is moved becomes a fake one, tied ones once. Fake tensors have weak references to all others
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch.utils.weakref = SimpleNamespace(getweakrefs=lambda tensor: [])  # type: ignore[assignment,attr-defined]
    _patch_fully_shard()
    importlib.import_module("torch.distributed._tools.fake_collectives")  # The import registers the collectives.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    ranks = OtherRanks()
    dist.all_gather_object = ranks.gather  # type: ignore[assignment]
    dist.broadcast_object_list = ranks.broadcast  # type: ignore[assignment]
    return ranks


@contextlib.contextmanager
def as_rank(rank: int) -> Iterator[None]:
    """Act as another rank in the block: in each mesh of one axis, with its shards, without memory."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as part

    def local(tensor: Any) -> Tensor:
        return torch.empty(
            part(tensor.shape, tensor.device_mesh, tensor.placements)[0], dtype=tensor.dtype, device="meta"
        )

    methods: dict[str, Any] = {
        "get_coordinate": lambda mesh: (rank,),
        "_sym_get_coordinate": lambda mesh, axis: rank,
        "get_local_rank": lambda mesh, axis=None: rank,
    }
    replaced = [(DeviceMesh, name, new) for name, new in methods.items()] + [(DTensor, "to_local", local)]
    before = [getattr(owner, name) for owner, name, _ in replaced]
    for owner, name, new in replaced:
        setattr(owner, name, new)
    try:
        yield
    finally:
        for (owner, name, _), old in zip(replaced, before, strict=True):
            setattr(owner, name, old)


def _hide_primary_context(slot: int) -> None:
    """Report that there is no primary context: autograd's query would raise without a driver."""
    library = ctypes.CDLL(f"{_TORCH}/lib/libtorch_cpu.so")
    hooks = library._ZN2at6detail12getCUDAHooksEv
    hooks.restype = ctypes.c_void_p
    table = ctypes.cast(hooks(), ctypes.POINTER(ctypes.c_void_p))[0] or 0
    no = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_byte)(lambda self, index: False)
    _KEEP_ALIVE.append(no)
    page, entry = os.sysconf("SC_PAGE_SIZE"), table + 8 * slot
    if ctypes.CDLL(None).mprotect(ctypes.c_void_p(entry & -page), ctypes.c_size_t(2 * page), 3):
        raise ConfigError("plan: this system does not let a process change its tables; use driven=false")
    ctypes.cast(entry, ctypes.POINTER(ctypes.c_void_p))[0] = ctypes.cast(no, ctypes.c_void_p).value


def _stub_cuda(capability: tuple[int, int], memory: int, waited: Callable[[str], None]) -> None:
    class Event:
        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def record(self, stream: Any = None) -> "Event":
            return self

        def wait(self, stream: Any = None) -> None: ...
        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            waited("Event.synchronize")

    class Stream:
        device = torch.device("cuda:0")

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def wait_stream(self, stream: Any) -> None: ...
        def wait_event(self, event: Any) -> None: ...
        def record_event(self, event: Any = None) -> Any:
            return event or Event()

        def synchronize(self) -> None:
            waited("Stream.synchronize")

        def is_capturing(self) -> bool:
            return False

        def __enter__(self) -> "Stream":
            return self

        def __exit__(self, *args: object) -> None: ...

    the = Stream()
    stubs: dict[str, Any] = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "set_device": lambda device: None,
        "is_initialized": lambda: True,
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: the,
        "default_stream": lambda device=None: the,
        "stream": lambda stream: contextlib.nullcontext(),
        "is_bf16_supported": lambda *args, **kwargs: True,
        "synchronize": lambda device=None: waited("cuda.synchronize"),
        "empty_cache": lambda: None,
        "get_device_capability": lambda device=None: capability,
        "get_device_properties": lambda device=None: SimpleNamespace(total_memory=memory),
        "_lazy_init": lambda: None,
        "is_current_stream_capturing": lambda: False,
    }
    for name, stub in stubs.items():
        setattr(torch.cuda, name, stub)
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.accelerator.current_stream = lambda device=None: the  # type: ignore[assignment,return-value]
    Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign,assignment]


def _patch_fully_shard() -> None:
    """Let ``fully_shard`` make new parameters: it sets ``.data``, and a real parameter cannot hold a fake tensor."""
    from torch.distributed.fsdp._fully_shard import _fsdp_init as init

    managed = init._get_managed_states

    def move_to_cuda(modules: list[nn.Module], *args: Any) -> Any:
        moved_parameters: dict[int, Tensor] = {}
        for module in modules:
            for states in (module._parameters, module._buffers):
                for name, old in states.items():
                    if old is None or old.device.type != "cpu":
                        continue
                    if id(old) not in moved_parameters:
                        new = old.detach().to("cuda")
                        moved_parameters[id(old)] = (
                            nn.Parameter(new, old.requires_grad) if states is module._parameters else new
                        )
                    _KEEP_ALIVE.append(old)  # Its id must stay unique.
                    states[name] = moved_parameters[id(old)]  # type: ignore[assignment]
        return managed(modules, *args)

    init._get_managed_states = move_to_cuda  # type: ignore[assignment]


def choose_attention(capability: tuple[int, int], kernels: Counter[str]) -> None:
    """Call the attention kernel that a GPU would use, which torch does not choose without a driver.

    Args:
        capability: of the device.
        kernels: gets the number of calls of each.
    """

    def attend(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        half = q.dtype in (torch.bfloat16, torch.float16)
        result: Any
        if half and capability >= (9, 0):
            kernels["cudnn" if attn_mask is None else "cudnn with a dense mask"] += 1
            op = _ATEN._scaled_dot_product_cudnn_attention
            result = op(q, k, v, attn_mask, True, 0.0, is_causal, False, scale=scale)
        elif half and attn_mask is None:
            kernels["flash"] += 1
            result = _ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, False, scale=scale)
        elif not enable_gqa:
            kernels["memory-efficient"] += 1
            op = _ATEN._scaled_dot_product_efficient_attention
            result = op(q, k, v, attn_mask, True, 0.0, is_causal, scale=scale)
        else:
            kernels["math, which keeps all scores"] += 1
            op = _ATEN._scaled_dot_product_attention_math
            result = op(q, k, v, attn_mask, 0.0, is_causal, None, scale=scale, enable_gqa=enable_gqa)
        return result[0]  # type: ignore[no-any-return]

    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", attend, "AutogradCUDA")
    _KEEP_ALIVE.append(library)
