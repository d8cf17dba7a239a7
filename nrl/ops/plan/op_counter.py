"""Counts of operations on fake CUDA tensors: memory, waits, copies, products and collectives.

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

__all__ = ["OpCounter", "find_line"]

_NRL, _TORCH = str(Path(__file__).parents[2]), str(Path(torch.__file__).parent)
_OWN = {str(Path(__file__).with_name(name)) for name in ("op_counter.py", "fake_cuda.py")}
_HEAD = {str(Path(_NRL) / "backends/training/outputs" / name) for name in ("fused_logprobs.py", "head_functions.py")}
_ATEN: Any = torch.ops.aten
_READ = 2**16
"""The most numbers of a real tensor on the host, if the host holds weights."""


def find_line() -> str:
    """Return the running line of nrl, or else of another package."""
    frames = [frame for frame in reversed(traceback.extract_stack(limit=80)) if frame.filename not in _OWN]
    for frame in frames:
        if frame.filename.startswith(_NRL):
            return f"{frame.filename.removeprefix(_NRL + '/')}:{frame.lineno} {frame.line}"[:110]
    frame = next(frame for frame in frames if not frame.filename.startswith(_TORCH + "/utils/_"))
    return f"{frame.filename.split('site-packages/')[-1]}:{frame.lineno}"


def _in_head() -> bool:
    """Return whether log-probabilities, other functions of logits, or their gradients are being computed."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename in _HEAD:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class OpCounter(TorchDispatchMode):
    """A dispatch mode that makes CUDA tensors fake, and counts operations.

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
        self.peak_line = ""
        self.forget()
        resize = torch.UntypedStorage.resize_

        def resize_and_count(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            self._resize(id(storage), storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = resize_and_count  # type: ignore[method-assign,assignment]

    def forget(self) -> None:
        """Count from here on."""
        self.waits, self.sent, self.copied = Counter[tuple[str, str]](), Counter[str](), Counter[str]()
        self.flops, self.products, self.attention = Counter[str](), Counter[str](), Counter[str]()
        self.recomputed, self._lines = Counter[str](), set[str]()
        self.peak, self.peak_line = self.now, ""
        self.head_most = self.head_then = self.head
        self._made_then = self._made

    def model_flops(self) -> float:
        """Return the products so far as a log's MFU counts them: no recomputation, and half of attention's squares."""
        attention = self.flops["attention"] - self.recomputed["attention"]  # Six of its seven products count.
        return self.flops.total() - self.recomputed.total() - attention * (1 - 6 / 7 / 2)

    def count_wait(self, kind: str) -> None:
        """Count a wait or copy here."""
        self.waits[kind, find_line()] += 1

    def _count_copy(self, kind: str, tensor: Tensor) -> None:
        self.count_wait(kind)
        self.copied[kind.partition(",")[0].removeprefix("copy ")] += tensor.numel() * tensor.element_size()

    def _track(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if id(storage) not in self.live:
            self._made += 1
            self.live[id(storage)], self._born[id(storage)] = 0, self._made
            if _in_head():
                self._of_head.add(id(storage))
            weakref.finalize(storage, self._forget_storage, id(storage))
        self._resize(id(storage), storage.nbytes())

    def _resize(self, key: int, size: int) -> None:
        if key in self.live:
            growth = size - self.live[key]
            self.now += growth
            self.live[key] = size
            if key in self._of_head:
                self.head += growth
                self.head_most = max(self.head_most, self.head)
            if self.now > self.peak:
                self.peak, self.peak_line, self.head_then, self._made_then = (
                    self.now,
                    find_line(),
                    self.head,
                    self._made,
                )

    def _forget_storage(self, key: int) -> None:
        size = self.live.pop(key, 0)
        self.now -= size
        del self._born[key]
        if key in self._of_head:
            self._of_head.remove(key)
            self.head -= size

    def bytes_by_birth(self, tensors: Iterable[Tensor]) -> dict[int, int]:
        """Return the bytes of the tensors' storages, by their order of birth."""
        storages = {id(x.untyped_storage()) for x in tensors}
        return {self._born[key]: self.live[key] for key in storages if key in self.live}

    def bytes_at_peak(self, born: Mapping[int, int]) -> int:
        """Return the bytes of these storages, which still live, that existed at the peak."""
        return sum(size for birth, size in born.items() if birth <= self._made_then)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.distributed.tensor import DTensor

        kwargs = kwargs or {}
        if any(issubclass(value, DTensor) for value in types):
            return NotImplemented  # The call returns here with its local tensors.
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
            if kwargs.get("pin_memory"):  # Pinning memory needs a driver.
                return self._pin(func(*args, **kwargs | {"pin_memory": False}))
            return func(*args, **kwargs)
        name = str(func)
        result = self._run_on_host(func, name, args, kwargs, tensors, fakes, to)
        if result is not None:
            return result
        convert = self.fake.from_tensor
        args, kwargs = tree_map_only(Tensor, lambda x: x if isinstance(x, FakeTensor) else convert(x), (args, kwargs))
        with self.fake:
            out = func(*args, **kwargs)
        self._count(name, args, fakes)
        for value in tree_leaves(out):
            if isinstance(value, FakeTensor) and value.device.type == "cuda":
                self._track(value)
        return out

    def _run_on_host(
        self, func: Any, name: str, args: Any, kwargs: Any, tensors: list[Tensor], fakes: list[FakeTensor], to: Any
    ) -> Any:
        """Return the host's result: ones, or any numbers in a large tensor; None: the host gets nothing."""
        copies, on_device = func is _ATEN._to_copy.default, any(x.device.type == "cuda" for x in fakes)
        if func in (_ATEN._local_scalar_dense.default, _ATEN.equal.default, _ATEN.is_nonzero.default):
            if on_device:
                self.count_wait(name)
            dtype = fakes[0].dtype
            return True if dtype == torch.bool or "equal" in name else 1.0 if dtype.is_floating_point else 1
        if func in (_ATEN.nonzero.default, _ATEN.masked_select.default):
            self.count_wait(name)
        if copies and on_device and to == "cpu":
            self._count_copy("copy to the host" + ("" if kwargs.get("non_blocking") else ", blocking"), args[0])
            if self._host and args[0].numel() > _READ:
                return None
            return _make_on_host(args[0].shape, kwargs.get("dtype") or args[0].dtype)
        if copies and to == "cuda" and not on_device:
            self._count_copy("copy to the device" + self._blocking_suffix(args[0], kwargs.get("non_blocking")), args[0])
        if func is _ATEN.copy_.default:
            to_device, other = (x.device.type for x in args[:2])
            if (to_device, other) == ("cpu", "cuda"):
                self._count_copy("copy to the host" + self._blocking_suffix(args[0], args[2:3] == (True,)), args[0])
            if (to_device, other) == ("cuda", "cpu") and args[1].ndim:
                self._count_copy("copy to the device" + self._blocking_suffix(args[1], args[2:3] == (True,)), args[0])
            if isinstance(args[0], FakeTensor):
                return None
            return args[0] if args[0].numel() > _READ else args[0].fill_(1)  # large ones would take a host's memory
        stray = [tuple(x.shape) for x in tensors if not isinstance(x, FakeTensor) and x.ndim and x.device.type == "cpu"]
        if stray and on_device and not copies and "c10d" not in name:
            raise RuntimeError(
                f"{name}: tensors of the CPU of shapes {stray} beside those of the device, at {find_line()}"
            )
        return None

    def _pin(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._pinned.add(storage.data_ptr())
        weakref.finalize(storage, self._pinned.discard, storage.data_ptr())
        return tensor

    def _is_pinned(self, tensor: Tensor) -> bool:
        return not isinstance(tensor, FakeTensor) and tensor.untyped_storage().data_ptr() in self._pinned

    def _blocking_suffix(self, host_tensor: Tensor, asynchronous: Any) -> str:
        """Return a suffix if the host waits for a copy of its tensor: only pinned memory is copied asynchronously."""
        return (
            ""
            if asynchronous and (self._is_pinned(host_tensor) or isinstance(host_tensor, FakeTensor))
            else ", blocking"
        )

    def _count(self, name: str, args: Any, fakes: list[FakeTensor]) -> None:
        kind = name.split(".")[1]
        if "c10d" in name and kind not in ("_wrap_tensor_autograd", "wait_tensor"):
            self.sent[kind] += max((x.numel() * x.element_size() for x in fakes), default=0)
        if kind in ("mm", "addmm", "addmm_", "bmm", "baddbmm", "addbmm", "mv", "addmv", "_grouped_mm"):
            operands = [x for x in args if isinstance(x, FakeTensor)]
            first, second = operands[:2] if kind == "_grouped_mm" else operands[-2:]  # then the groups' ends follow
            flops, line = 2 * first.numel() * (second.shape[-1] if second.ndim > 1 else 1), find_line()
            self._count_product(str(first.dtype).removeprefix("torch."), flops, line)
            if first.dtype == torch.float32:
                self.products[line] += flops
        elif kind in ("_varlen_attn", "_varlen_attn_backward"):
            forward = kind == "_varlen_attn"
            numbers, longest = (args[0].numel(), args[6]) if forward else (args[1].numel(), args[9])
            self.attention["varlen"] += forward
            self._count_product("attention", 2 * (2 if forward else 5) * numbers * longest, find_line())
        elif "attention" in kind:
            query, key, value = ([x for x in fakes if x.ndim == 4][1:] if "backward" in kind else fakes)[:3]
            scores = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
            times = (2, 3) if "backward" in kind else (1, 1)  # products over the head's size: of keys, and of values
            flops = 2 * scores * (times[1] * query.shape[3] + times[0] * value.shape[3])
            self._count_product("attention", flops, find_line())

    def _count_product(self, kind: str, flops: int, line: str) -> None:
        """Count a product; in the backward pass, count recomputation too: lines of the forward pass."""
        self.flops[kind] += flops
        if torch._C._current_graph_task_id() == -1:
            self._lines.add(line)
        elif torch.is_grad_enabled() or line in self._lines:  # gradients are computed without grad
            name = "attention" if kind == "attention" else line if line in self._lines else "layers"
            self.recomputed[name] += flops


def _make_on_host(shape: Any, dtype: torch.dtype) -> Tensor:
    """Return ones, or untouched pages for a large tensor."""
    return torch.empty(shape, dtype=dtype) if shape.numel() > 2**20 else torch.ones(shape, dtype=dtype)
