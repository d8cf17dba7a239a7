"""Megatron Core on a CPU: what it asks of CUDA, answered by the host. On a GPU nothing is changed.

Megatron asks for devices, streams and random states of CUDA wherever it builds a model, steps or waits. `host` answers
while its block runs, and takes all back afterwards; nothing is patched by importing this module.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["host"]


@contextlib.contextmanager
def host(device: torch.device) -> Iterator[None]:
    """Let Megatron Core run on the CPU inside of the block, if that is the device."""
    if device.type != "cpu":
        yield
        return
    with contextlib.ExitStack() as stack:
        for owner, name, answer in _answers():
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, answer)
        stack.enter_context(_OnTheHost())
        yield


def _answers() -> list[tuple[Any, str, Callable[..., Any]]]:
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    cuda: Any = torch.cuda
    return [
        (cuda, "current_device", lambda: torch.device("cpu")),
        (cuda, "current_stream", lambda *_: _Stream()),
        (cuda, "Stream", lambda *_, **__: _Stream()),
        (cuda, "stream", lambda *_: contextlib.nullcontext()),
        (cuda, "synchronize", lambda *_: None),
        (cuda, "empty_cache", lambda: None),
        (cuda, "get_rng_state", lambda *_: torch.get_rng_state()),
        (cuda, "set_rng_state", lambda state, *_: torch.set_rng_state(state)),
        (cuda, "manual_seed", torch.default_generator.manual_seed),
        (token_dispatcher, "maybe_move_tensor_to_cpu", _as_if_moved),
        (random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
        (random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
    ]


def _as_if_moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return the numbers of tokens that travel, in the form in which a copy from a GPU has them."""
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


class _Stream:
    """A stream whose work is always done: on the host each operation ends before the next begins."""

    cuda_stream = 0

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self) -> "_Stream":
        return self

    def synchronize(self) -> None: ...


class _OnTheHost(TorchFunctionMode):
    """Tensors that are asked for on a GPU, or in pinned memory, are made on the host."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        device = options.get("device")
        if isinstance(device, int) or str(device).startswith("cuda"):
            options["device"] = "cpu"
        if options.get("pin_memory"):
            options["pin_memory"] = False
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.type and len(args) == 1 and not options:
            # The optimizers take the types of a GPU alone, and compute rightly with float64.
            name: str = func(*args).replace("torch.", "torch.cuda.", 1)
            return name.replace("Double", "Float")
        return func(*args, **options)
