"""Random weights that are drawn when they are read: the numbers of a model from a config, without the model.

What a model draws depends on the order of all draws. So the model is made as always, and each write into memory that
was only reserved is recorded instead of done, with the state of the generator; random numbers are drawn and dropped, so
that the generator goes on. To read a weight, its recorded writes are replayed: one weight at a time. Reserved memory
that nobody writes to takes none.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["DeferredInit", "record_init"]

_aten = torch.ops.aten
_RESERVE = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty}
_ALL_OF_IT = {_aten.normal_, _aten.uniform_, _aten.fill_, _aten.zero_, _aten.copy_}
"""Writes that make earlier writes irrelevant, if they write all of the memory."""
_WRITES = _ALL_OF_IT | {
    _aten.add_,
    _aten.sub_,
    _aten.mul_,
    _aten.div_,
    _aten.clamp_,
    _aten.erfinv_,
    _aten.log_,
    _aten.bernoulli_,
    _aten.exponential_,
}
"""Writes that are recorded. Before any other operation on reserved memory, the memory gets its numbers."""


class _View(NamedTuple):
    """A tensor as a view of reserved memory."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, memory: Tensor) -> Tensor:
        return memory.as_strided(self.size, self.stride, self.offset)


class _Write(NamedTuple):
    call: Any
    args: Any
    kwargs: Any
    state: Tensor | None
    """State of the generator before the write; None: the write draws nothing."""


class DeferredInit(TorchDispatchMode):
    """A mode that records the writes of a block; see `record_init`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorded: dict[int, tuple[Tensor, list[_Write]]] = {}

    def reader(self, tensor: Tensor) -> Callable[[], Tensor] | None:
        """Return a function that computes the numbers of a tensor, which need not be kept; None: it has its numbers."""
        if (recorded := self._recorded.get(_memory(tensor))) is None:
            return None
        length, view, writes = len(recorded[0]), _view_of(tensor), recorded[1]
        dtype = tensor.dtype

        def materialize() -> Tensor:
            memory = torch.empty(length, dtype=dtype)
            _replay(writes, memory)
            return view.of(memory)

        return materialize

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record a write into reserved memory, and run any other operation."""
        kwargs = kwargs or {}
        zeros = call is _aten.zeros.default
        if zeros or call.overloadpacket in _RESERVE:
            reserved = (_aten.empty.memory_format if zeros else call)(*args, **kwargs)
            if reserved.device.type == "cpu":
                length = reserved.untyped_storage().nbytes() // reserved.itemsize
                self._recorded[_memory(reserved)] = reserved.as_strided((length,), (1,), 0), []
            return self.__torch_dispatch__(_aten.zero_.default, (), (reserved,)) if zeros else reserved
        touched = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and _memory(x) in self._recorded]
        if not touched or call.is_view:
            return call(*args, **kwargs)
        target: Any = args[0] if call.overloadpacket in _WRITES and kwargs.get("generator") is None else None
        is_recorded = (
            target is not None and _memory(target) in self._recorded and target.dtype == self._memory_of(target).dtype
        )
        for tensor in touched:
            if not (is_recorded and tensor is target):
                self.fill(tensor)
        if not is_recorded or _memory(target) not in self._recorded:  # it was read in the same call, too
            return call(*args, **kwargs)
        self._record(call, target, args, kwargs)
        return target

    def _memory_of(self, tensor: Tensor) -> Tensor:
        return self._recorded[_memory(tensor)][0]

    def _record(self, call: Any, target: Tensor, args: Any, kwargs: Any) -> None:
        memory, writes = self._recorded[_memory(target)]
        cloned = tree_map_only(Tensor, Tensor.clone, (args[1:], kwargs))
        random = torch.Tag.nondeterministic_seeded in call.tags
        state = torch.get_rng_state() if random else None
        if call.overloadpacket in _ALL_OF_IT and target.numel() == len(memory):
            writes.clear()
        writes.append(_Write(call, (_view_of(target), *cloned[0]), cloned[1], state))
        if random:
            call(torch.empty_like(target), *args[1:], **kwargs)

    def fill(self, tensor: Tensor) -> None:
        """Give reserved memory its numbers."""
        if (recorded := self._recorded.pop(_memory(tensor), None)) is not None:
            with torch.random.fork_rng(devices=[]):
                _replay(recorded[1], recorded[0])

    def end(self, tensors: Iterator[Tensor]) -> None:
        """Give all reserved memory its numbers, except the memory of these tensors."""
        skipped = {_memory(tensor) for tensor in tensors}
        for memory, (content, writes) in list(self._recorded.items()):
            if memory not in skipped and writes:
                self.fill(content)


@contextmanager
def record_init(seed: int) -> Iterator[DeferredInit]:
    """Record the writes of a block into memory that it reserves; its random numbers are those of this seed.

    Args:
        seed: the generator is set to it, and has its own state again after the block.

    >>> with record_init(3) as draws:
    ...     weight = torch.empty(2, 3).normal_()
    >>> torch.equal(draws.reader(weight)(), torch.empty(2, 3).normal_(generator=torch.Generator().manual_seed(3)))
    True
    """
    draws = DeferredInit()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with draws:
            yield draws


def _replay(writes: list[_Write], memory: Tensor) -> None:
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for call, (view, *args), kwargs, state in writes:
            if state is not None:
                torch.set_rng_state(state)
            call(view.of(memory), *args, **kwargs)


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _view_of(tensor: Tensor) -> _View:
    return _View(tensor.size(), tensor.stride(), int(tensor.storage_offset()))
