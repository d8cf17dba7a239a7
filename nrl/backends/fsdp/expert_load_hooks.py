"""The loads of experts in a transformers model: how many of the outputs that a loss reads come from tokens of each."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nrl.backends.models.moe_routers import routers
from nrl.backends.training.collectives import ProcessGroup
from nrl.backends.training.expert_load import balance
from nrl.batch.metrics import Metrics

__all__ = ["ExpertLoads", "count_loads"]


class ExpertLoads:
    """Counts of the choices of each router for the tokens of the current micro-batch; nothing waits for them."""

    def __init__(self) -> None:
        self.reads: Tensor | None = None
        """``[n]``, how many outputs are read at each token of the forward; None: nobody counts."""
        self._found: dict[str, Tensor] = {}

    def add(self, name: str, router: Any, inputs: Any, outputs: Any) -> None:
        """Note the choice of a router, of which transformers' return logits, weights and experts."""
        if self.reads is None or not (isinstance(outputs, tuple) and len(outputs) == 3):
            return
        logits, _, chosen = outputs
        load = self._found.setdefault(name, logits.new_zeros(logits.shape[-1], dtype=torch.float32))
        reads = self.reads.to(torch.float32)[:, None].expand(chosen.shape)
        load.index_add_(0, chosen.flatten(), reads.flatten())

    def clear(self) -> None:
        """Count from zero."""
        self._found = {}

    def metrics(self, peers: ProcessGroup) -> Metrics:
        """The balance of all processes; a collective, if the model has experts."""
        if not self._found:
            return {}
        gathered = peers.gather(torch.stack(list(self._found.values())).cpu())
        return balance(torch.stack(gathered).sum(0))


@contextmanager
def count_loads(module: nn.Module) -> Iterator[ExpertLoads]:
    """Count the choices of a model's routers while the block runs."""
    loads = ExpertLoads()
    hooks = [router.register_forward_hook(partial(loads.add, name)) for name, router in routers(module).items()]
    try:
        yield loads
    finally:
        for hook in hooks:
            hook.remove()
