"""A CUDA that is not there: its tensors are fake, and what happens to them is counted.

CPU tensors stay real, since layouts of rows depend on their numbers. This is the one file that replaces anything, and
all that it replaces is torch's. `install` changes the process for good, so it is called in a process of its own.
"""

import contextlib
import ctypes
import importlib
import os
import traceback
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from nrl.errors import ConfigError

__all__ = ["SLOTS", "Counting", "check_torch", "choose_attention", "install", "where"]

SLOTS = {"2.13": 4}
"""By version of torch with which this file was tested: the slot of ``CUDAHooks::hasPrimaryContext`` in its table."""
_NRL, _TORCH = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent)
_KEPT: list[Any] = []
_ATEN: Any = torch.ops.aten


def check_torch(version: str = torch.__version__) -> int:
    """The slot of this version of torch.

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


def where() -> str:
    """The line of nrl that runs, or else of another package."""
    frames = [frame for frame in reversed(traceback.extract_stack(limit=80)) if Path(frame.filename) != Path(__file__)]
    for frame in frames:
        if frame.filename.startswith(_NRL):
            return f"{frame.filename.removeprefix(_NRL + '/')}:{frame.lineno} {frame.line}"[:110]
    frame = next(frame for frame in frames if not frame.filename.startswith(_TORCH + "/utils/_"))
    return f"{frame.filename.split('site-packages/')[-1]}:{frame.lineno}"


def install(capability: tuple[int, int], waited: Callable[[str], None], world: int) -> None:
    """Change this process so that CUDA seems to be there, and a process group of any size.

    Args:
        capability: of the device, such as (9, 0).
        waited: told of each wait for the device, by its kind.
        world: the number of processes; each other one says what this one says.

    Raises:
        ConfigError: this version of torch was not tested.
    """
    _no_primary_context(check_torch())
    torch.autograd.set_multithreading_enabled(False)
    torch._C._ensureCUDADeviceGuardSet()
    _stub(capability, waited)
    _fully_shard_makes_new_parameters()
    if world > 1:
        importlib.import_module("torch.distributed._tools.fake_collectives")  # which registers them
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)

        def gather(found: list[Any], value: Any, group: Any = None) -> None:
            found[:] = [value] * len(found)

        dist.all_gather_object = gather  # type: ignore[assignment]
        dist.broadcast_object_list = lambda *args, **kwargs: None


def _no_primary_context(slot: int) -> None:
    """Autograd asks for a primary context, which raises without a driver: it is told that there is none."""
    library = ctypes.CDLL(f"{_TORCH}/lib/libtorch_cpu.so")
    hooks = library._ZN2at6detail12getCUDAHooksEv
    hooks.restype = ctypes.c_void_p
    table = ctypes.cast(hooks(), ctypes.POINTER(ctypes.c_void_p))[0] or 0
    no = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_byte)(lambda self, index: False)
    _KEPT.append(no)
    page, place = os.sysconf("SC_PAGE_SIZE"), table + 8 * slot
    if ctypes.CDLL(None).mprotect(ctypes.c_void_p(place & -page), ctypes.c_size_t(2 * page), 3):
        raise ConfigError("plan: this system does not let a process change its tables; use driven=false")
    ctypes.cast(place, ctypes.POINTER(ctypes.c_void_p))[0] = ctypes.cast(no, ctypes.c_void_p).value


def _stub(capability: tuple[int, int], waited: Callable[[str], None]) -> None:
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

        def __enter__(self) -> "Stream":
            return self

        def __exit__(self, *args: object) -> None: ...

    the = Stream()
    stubs: dict[str, Any] = {
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
        "_lazy_init": lambda: None,
        "is_current_stream_capturing": lambda: False,
    }
    for name, stub in stubs.items():
        setattr(torch.cuda, name, stub)
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.accelerator.current_stream = lambda device=None: the  # type: ignore[assignment,return-value]
    Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign,assignment]


def _fully_shard_makes_new_parameters() -> None:
    """It sets ``.data`` to move a parameter to the device, and a real one cannot hold a fake tensor."""
    from torch.distributed.fsdp._fully_shard import _fsdp_init as init

    managed = init._get_managed_states

    def moved(modules: list[nn.Module], *args: Any) -> Any:
        made: dict[int, Tensor] = {}
        for module in modules:
            for states in (module._parameters, module._buffers):
                for name, old in states.items():
                    if old is None or old.device.type != "cpu":
                        continue
                    if id(old) not in made:
                        new = old.detach().to("cuda")
                        made[id(old)] = nn.Parameter(new, old.requires_grad) if states is module._parameters else new
                    _KEPT.append(old)  # so that no other gets its id
                    states[name] = made[id(old)]  # type: ignore[assignment]
        return managed(modules, *args)

    init._get_managed_states = moved  # type: ignore[assignment]


class Counting(TorchDispatchMode):
    """Makes CUDA tensors fake, and counts.

    Attributes:
        now, peak, at: bytes of live storages, their maximum, and the line where that was.
        waits: waits for the device and copies between it and the host, by (kind, line).
        flops: of products of matrices, by dtype of the operands; attention is under "attention".
        products: the flops of products of float32 matrices, by line.
        attention: calls of torch's varlen kernel; its scores are counted as if all rows had the keys of the longest.
        sent: bytes of the largest tensor of each collective, by name, which is the whole that it gathers or reduces.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = FakeTensorMode(allow_non_fake_inputs=False)
        self.live: dict[int, int] = {}
        self.now = self.peak = 0
        self.at = ""
        self.forget()
        resize = torch.UntypedStorage.resize_

        def resized(storage: Any, size: int) -> Any:
            found = resize(storage, size)
            self._sized(id(storage), storage.nbytes())
            return found

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign,assignment]

    def forget(self) -> None:
        """Count from here on."""
        self.waits, self.sent = Counter[tuple[str, str]](), Counter[str]()
        self.flops, self.products, self.attention = Counter[str](), Counter[str](), Counter[str]()
        self.peak, self.at = self.now, ""

    def waited(self, kind: str) -> None:
        """Count a wait or copy here."""
        self.waits[kind, where()] += 1

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if id(storage) not in self.live:
            self.live[id(storage)] = 0
            weakref.finalize(storage, self._gone, id(storage))
        self._sized(id(storage), storage.nbytes())

    def _sized(self, key: int, size: int) -> None:
        if key in self.live:
            self.now += size - self.live[key]
            self.live[key] = size
            if self.now > self.peak:
                self.peak, self.at = self.now, where()

    def _gone(self, key: int) -> None:
        self.now -= self.live.pop(key, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.distributed.tensor import DTensor

        kwargs = kwargs or {}
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # which comes back here with its local tensors
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        fakes = [x for x in tensors if isinstance(x, FakeTensor)]
        to = None if kwargs.get("device") is None else torch.device(kwargs["device"]).type
        if active_fake_mode() is not None or not (fakes or to == "cuda"):
            return func(*args, **kwargs)
        name = str(func)
        found = self._at_host(func, name, args, kwargs, tensors, fakes, to)
        if found is not None:
            return found
        convert = self.fake.from_tensor
        args, kwargs = tree_map_only(Tensor, lambda x: x if isinstance(x, FakeTensor) else convert(x), (args, kwargs))
        with self.fake:
            out = func(*args, **kwargs)
        self._count(name, args, fakes)
        for each in tree_leaves(out):
            if isinstance(each, FakeTensor) and each.device.type == "cuda":
                self._see(each)
        return out

    def _at_host(
        self, func: Any, name: str, args: Any, kwargs: Any, tensors: list[Tensor], fakes: list[FakeTensor], to: Any
    ) -> Any:
        """What the host gets, which is ones; None: it gets nothing."""
        copies = func is _ATEN._to_copy.default
        if func in (_ATEN._local_scalar_dense.default, _ATEN.equal.default, _ATEN.is_nonzero.default):
            self.waited(name)
            dtype = fakes[0].dtype
            return True if dtype == torch.bool or "equal" in name else 1.0 if dtype.is_floating_point else 1
        if func in (_ATEN.nonzero.default, _ATEN.masked_select.default):
            self.waited(name)
        if copies and fakes and to == "cpu":
            self.waited("copy to the host")
            return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if copies and not fakes:
            self.waited("copy to the device" + ("" if kwargs.get("non_blocking") else ", blocking"))
        if func is _ATEN.copy_.default:
            if not isinstance(args[0], FakeTensor):
                self.waited("copy to the host")
                return args[0].fill_(1)
            if not isinstance(args[1], FakeTensor) and args[1].ndim:
                self.waited("copy to the device")
            return None
        stray = [tuple(x.shape) for x in tensors if not isinstance(x, FakeTensor) and x.ndim and x.device.type == "cpu"]
        if stray and not copies and "c10d" not in name:
            raise RuntimeError(f"{name}: tensors of the CPU of shapes {stray} beside those of the device, at {where()}")
        return None

    def _count(self, name: str, args: Any, fakes: list[FakeTensor]) -> None:
        kind = name.split(".")[1]
        if "c10d" in name and kind not in ("_wrap_tensor_autograd", "wait_tensor"):
            self.sent[kind] += max((x.numel() * x.element_size() for x in fakes), default=0)
        if kind in ("mm", "addmm", "addmm_", "bmm", "baddbmm"):
            one, other = [x for x in fakes if x.ndim >= 2][-2:] if ".out" not in name else [
                x for x in args if isinstance(x, FakeTensor)
            ][-2:]  # fmt: skip
            flops = 2 * one.numel() * other.shape[-1]
            self.flops[str(one.dtype).removeprefix("torch.")] += flops
            if one.dtype == torch.float32:
                self.products[where()] += flops
        elif kind in ("_varlen_attn", "_varlen_attn_backward"):
            forward = kind == "_varlen_attn"
            numbers, longest = (args[0].numel(), args[6]) if forward else (args[1].numel(), args[9])
            self.attention["varlen"] += forward
            self.flops["attention"] += 2 * (2 if forward else 5) * numbers * longest
        elif "attention" in kind:
            query, key, value = ([x for x in fakes if x.ndim == 4][1:] if "backward" in kind else fakes)[:3]
            scores = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
            times = (2, 3) if "backward" in kind else (1, 1)  # products over the head's size: of keys, and of values
            self.flops["attention"] += 2 * scores * (times[1] * query.shape[3] + times[0] * value.shape[3])


def choose_attention(capability: tuple[int, int], kernels: Counter[str]) -> None:
    """Call the attention kernel that a GPU would take, which torch does not choose without a driver.

    Args:
        capability: of the device.
        kernels: gets the number of calls of each.
    """

    def attend(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        half = q.dtype in (torch.bfloat16, torch.float16)
        found: Any
        if half and capability >= (9, 0):
            kernels["cudnn" if attn_mask is None else "cudnn with a dense mask"] += 1
            op = _ATEN._scaled_dot_product_cudnn_attention
            found = op(q, k, v, attn_mask, True, 0.0, is_causal, False, scale=scale)
        elif half and attn_mask is None:
            kernels["flash"] += 1
            found = _ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, False, scale=scale)
        elif not enable_gqa:
            kernels["memory-efficient"] += 1
            op = _ATEN._scaled_dot_product_efficient_attention
            found = op(q, k, v, attn_mask, True, 0.0, is_causal, scale=scale)
        else:
            kernels["math, which keeps all scores"] += 1
            op = _ATEN._scaled_dot_product_attention_math
            found = op(q, k, v, attn_mask, 0.0, is_causal, None, scale=scale, enable_gqa=enable_gqa)
        return found[0]  # type: ignore[no-any-return]

    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", attend, "AutogradCUDA")
    _KEPT.append(library)
