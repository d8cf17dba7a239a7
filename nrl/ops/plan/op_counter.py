"""What happens to fake CUDA tensors, counted: memory, waits, copies, products and collectives.

CPU tensors stay real, since layouts of rows depend on their numbers; where weights are on the host, large ones do not.
"""

import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["Counting", "where"]

_NRL, _TORCH = str(Path(__file__).parents[2]), str(Path(torch.__file__).parent)
_OWN = {str(Path(__file__).with_name(name)) for name in ("op_counter.py", "fake_cuda.py")}
_HEAD = {str(Path(_NRL) / "backends/training/outputs" / name) for name in ("fused_logprobs.py", "head_functions.py")}
_ATEN: Any = torch.ops.aten
_READ = 2**16
"""So many numbers, at most, of a tensor on the host are real, where it holds weights."""


def where() -> str:
    """The line of nrl that runs, or else of another package."""
    frames = [frame for frame in reversed(traceback.extract_stack(limit=80)) if frame.filename not in _OWN]
    for frame in frames:
        if frame.filename.startswith(_NRL):
            return f"{frame.filename.removeprefix(_NRL + '/')}:{frame.lineno} {frame.line}"[:110]
    frame = next(frame for frame in frames if not frame.filename.startswith(_TORCH + "/utils/_"))
    return f"{frame.filename.split('site-packages/')[-1]}:{frame.lineno}"


def _in_head() -> bool:
    """Whether log-probabilities, other functions of logits, or their gradients are computed."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename in _HEAD:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class Counting(TorchDispatchMode):
    """Makes CUDA tensors fake, and counts.

    Args:
        host: whether weights are on the host, where the large ones are as fake as on the device.

    Attributes:
        now, peak, at: bytes of live storages, their maximum, and the line where that was.
        head, head_most, head_then: bytes of live storages that log-probabilities and their gradients have made: now, at
            most, and at the peak.
        waits: waits for the device and copies between it and the host, by (kind, line).
        flops: of products of matrices, by dtype of the operands; attention is under "attention".
        products: the flops of products of float32 matrices, by line.
        attention: calls of torch's varlen kernel; its scores are counted as if all rows had the keys of the longest.
        recomputed: the flops that the backward pass computes again, by what has it computed again.
        sent: bytes of the largest tensor of each collective, by name, which is the whole that it gathers or reduces.
        copied: bytes between device and host, by direction.
    """

    def __init__(self, host: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._host = host
        self.fake = FakeTensorMode(allow_non_fake_inputs=False)
        self.live: dict[int, int] = {}
        self._pinned, self._of_head, self._born = set[int](), set[int](), dict[int, int]()
        self.now = self.peak = self.head = self._made = 0
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
        self.waits, self.sent, self.copied = Counter[tuple[str, str]](), Counter[str](), Counter[str]()
        self.flops, self.products, self.attention = Counter[str](), Counter[str](), Counter[str]()
        self.recomputed, self._lines = Counter[str](), set[str]()
        self.peak, self.at = self.now, ""
        self.head_most = self.head_then = self.head
        self._made_then = self._made

    def of_model(self) -> float:
        """Products until here, as a log's MFU counts them: none again, also in attention's kernel, and half squares."""
        attention = self.flops["attention"] - self.recomputed["attention"]  # of whose seven products six count
        return self.flops.total() - self.recomputed.total() - attention * (1 - 6 / 7 / 2)

    def waited(self, kind: str) -> None:
        """Count a wait or copy here."""
        self.waits[kind, where()] += 1

    def _copies(self, kind: str, tensor: Tensor) -> None:
        self.waited(kind)
        self.copied[kind.partition(",")[0].removeprefix("copy ")] += tensor.numel() * tensor.element_size()

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if id(storage) not in self.live:
            self._made += 1
            self.live[id(storage)], self._born[id(storage)] = 0, self._made
            if _in_head():
                self._of_head.add(id(storage))
            weakref.finalize(storage, self._gone, id(storage))
        self._sized(id(storage), storage.nbytes())

    def _sized(self, key: int, size: int) -> None:
        if key in self.live:
            more = size - self.live[key]
            self.now += more
            self.live[key] = size
            if key in self._of_head:
                self.head += more
                self.head_most = max(self.head_most, self.head)
            if self.now > self.peak:
                self.peak, self.at, self.head_then, self._made_then = self.now, where(), self.head, self._made

    def _gone(self, key: int) -> None:
        size = self.live.pop(key, 0)
        self.now -= size
        del self._born[key]
        if key in self._of_head:
            self._of_head.remove(key)
            self.head -= size

    def born(self, tensors: Iterable[Tensor]) -> dict[int, int]:
        """The bytes of the storages of tensors, by their order of birth."""
        storages = {id(x.untyped_storage()) for x in tensors}
        return {self._born[key]: self.live[key] for key in storages if key in self.live}

    def at_the_peak(self, born: Mapping[int, int]) -> int:
        """The bytes of these storages, which have lived on, that were there at the peak."""
        return sum(size for birth, size in born.items() if birth <= self._made_then)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.distributed.tensor import DTensor

        kwargs = kwargs or {}
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # which comes back here with its local tensors
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        fakes = [x for x in tensors if isinstance(x, FakeTensor)]
        to = None if kwargs.get("device") is None else torch.device(kwargs["device"]).type
        if func is _ATEN.is_pinned.default:
            return self._is_pinned(args[0])
        if func is _ATEN._pin_memory.default:
            return self._pin(args[0])
        if self._host and func is _ATEN.empty_like.default and to == "cpu" and args[0].numel() > _READ:
            return self.fake.from_tensor(torch.empty(args[0].shape, dtype=args[0].dtype))
        if active_fake_mode() is not None or not (fakes or to == "cuda"):
            if kwargs.get("pin_memory"):  # which takes a driver
                return self._pin(func(*args, **kwargs | {"pin_memory": False}))
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
        """What the host gets, which is ones, or anything where it has a large place for it; None: it gets nothing."""
        copies, there = func is _ATEN._to_copy.default, any(x.device.type == "cuda" for x in fakes)
        if func in (_ATEN._local_scalar_dense.default, _ATEN.equal.default, _ATEN.is_nonzero.default):
            if there:
                self.waited(name)
            dtype = fakes[0].dtype
            return True if dtype == torch.bool or "equal" in name else 1.0 if dtype.is_floating_point else 1
        if func in (_ATEN.nonzero.default, _ATEN.masked_select.default):
            self.waited(name)
        if copies and there and to == "cpu":
            self._copies("copy to the host" + ("" if kwargs.get("non_blocking") else ", blocking"), args[0])
            if self._host and args[0].numel() > _READ:
                return None
            return _on_host(args[0].shape, kwargs.get("dtype") or args[0].dtype)
        if copies and to == "cuda" and not there:
            self._copies("copy to the device" + self._blocking(args[0], kwargs.get("non_blocking")), args[0])
        if func is _ATEN.copy_.default:
            one, other = (x.device.type for x in args[:2])
            if (one, other) == ("cpu", "cuda"):
                self._copies("copy to the host" + self._blocking(args[0], args[2:3] == (True,)), args[0])
            if (one, other) == ("cuda", "cpu") and args[1].ndim:
                self._copies("copy to the device" + self._blocking(args[1], args[2:3] == (True,)), args[0])
            if isinstance(args[0], FakeTensor):
                return None
            return args[0] if args[0].numel() > _READ else args[0].fill_(1)  # large ones would take a host's memory
        stray = [tuple(x.shape) for x in tensors if not isinstance(x, FakeTensor) and x.ndim and x.device.type == "cpu"]
        if stray and there and not copies and "c10d" not in name:
            raise RuntimeError(f"{name}: tensors of the CPU of shapes {stray} beside those of the device, at {where()}")
        return None

    def _pin(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._pinned.add(storage.data_ptr())
        weakref.finalize(storage, self._pinned.discard, storage.data_ptr())
        return tensor

    def _is_pinned(self, tensor: Tensor) -> bool:
        return not isinstance(tensor, FakeTensor) and tensor.untyped_storage().data_ptr() in self._pinned

    def _blocking(self, there: Tensor, asynchronous: Any) -> str:
        """Whether the host waits for a copy from or to a tensor of it: only memory that is pinned goes by itself."""
        return "" if asynchronous and (self._is_pinned(there) or isinstance(there, FakeTensor)) else ", blocking"

    def _count(self, name: str, args: Any, fakes: list[FakeTensor]) -> None:
        kind = name.split(".")[1]
        if "c10d" in name and kind not in ("_wrap_tensor_autograd", "wait_tensor"):
            self.sent[kind] += max((x.numel() * x.element_size() for x in fakes), default=0)
        if kind in ("mm", "addmm", "addmm_", "bmm", "baddbmm", "addbmm", "mv", "addmv", "_grouped_mm"):
            given = [x for x in args if isinstance(x, FakeTensor)]
            one, other = given[:2] if kind == "_grouped_mm" else given[-2:]  # then the groups' ends follow
            flops, line = 2 * one.numel() * (other.shape[-1] if other.ndim > 1 else 1), where()
            self._product(str(one.dtype).removeprefix("torch."), flops, line)
            if one.dtype == torch.float32:
                self.products[line] += flops
        elif kind in ("_varlen_attn", "_varlen_attn_backward"):
            forward = kind == "_varlen_attn"
            numbers, longest = (args[0].numel(), args[6]) if forward else (args[1].numel(), args[9])
            self.attention["varlen"] += forward
            self._product("attention", 2 * (2 if forward else 5) * numbers * longest, where())
        elif "attention" in kind:
            query, key, value = ([x for x in fakes if x.ndim == 4][1:] if "backward" in kind else fakes)[:3]
            scores = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
            times = (2, 3) if "backward" in kind else (1, 1)  # products over the head's size: of keys, and of values
            flops = 2 * scores * (times[1] * query.shape[3] + times[0] * value.shape[3])
            self._product("attention", flops, where())

    def _product(self, kind: str, flops: int, line: str) -> None:
        """Count it; in the backward pass, also whether it is computed again, as a line of the forward pass is."""
        self.flops[kind] += flops
        if torch._C._current_graph_task_id() == -1:
            self._lines.add(line)
        elif torch.is_grad_enabled() or line in self._lines:  # gradients are computed without grad
            name = "attention" if kind == "attention" else line if line in self._lines else "layers"
            self.recomputed[name] += flops


def _on_host(shape: Any, dtype: torch.dtype) -> Tensor:
    """Ones; where they are many, pages that nobody has touched."""
    return torch.empty(shape, dtype=dtype) if shape.numel() > 2**20 else torch.ones(shape, dtype=dtype)
