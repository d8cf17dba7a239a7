"""Recording the experts that a model's routers choose, forward by forward."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nrl.backends.models.moe_routers import routers, sizes
from nrl.errors import ModelError

__all__ = ["Recording"]


class Recording:
    """Hooks on the routers of a model, which note the experts of the last forward.

    Args:
        module: a transformers model.

    Raises:
        ModelError: the model has no routers, or its routers cannot be recorded.

    >>> from nrl import tiny
    >>> from nrl.backends.models.loading import build
    >>> fields = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    >>> module = build(tiny.model(model_type="qwen3_moe", **fields))
    >>> recording = Recording(module)
    >>> with recording.on(), torch.no_grad():
    ...     _ = module(torch.tensor([[1, 2, 3]]))
    ...     recording.take_routes().shape
    torch.Size([3, 2, 2])
    """

    def __init__(self, module: nn.Module) -> None:
        sizes(module)
        self._module, self._routers = module, routers(module)
        self._found: dict[str, Tensor] = {}

    @contextmanager
    def on(self) -> Iterator[None]:
        """Record while the block runs."""
        hooks = [router.register_forward_hook(partial(self._note, name)) for name, router in self._routers.items()]
        try:
            yield
        finally:
            self._found.clear()
            for hook in hooks:
                hook.remove()

    def _note(self, name: str, router: nn.Module, args: Any, output: Any) -> None:
        self._found[name] = output[2].to(torch.int16)

    def take_routes(self) -> Tensor:
        """Return and forget the experts of the last forward: ``[n, layers, k]`` int16, of its n tokens in their order.

        Raises:
            ModelError: a router did not run.
        """
        if missing := [name for name in self._routers if name not in self._found]:
            raise ModelError(
                f"{type(self._module).__name__}: the router '{missing[0]}' did not run in a forward, so there is no "
                "route of its tokens; leave routes= out"
            )
        routes = torch.stack([self._found[name] for name in self._routers], 1)
        self._found.clear()
        return routes
