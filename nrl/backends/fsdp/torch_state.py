"""What the torch engine keeps on a mesh: models, models in training, and adapters alone."""

from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn

from nrl.backends.fsdp.optimizing import TorchOptimizer
from nrl.backends.training.adapters import Adapter
from nrl.runtime.mesh.current_process import rest, wake

__all__ = ["FROZEN", "TorchParams", "TorchState"]

FROZEN: WeakSet[nn.Module] = WeakSet()
"""Frozen models of this process: they leave the device when a model trains, and come back for their next forward."""


class TorchState(NamedTuple):
    """A model in training, its optimizer, and how many steps it has taken."""

    module: nn.Module
    optimizer: TorchOptimizer
    step: int

    def rest(self) -> None:
        """Move model and moments off the device; see `nrl.runtime.mesh.current_process.Rests`."""
        rest(self.module)
        self._move_moments(torch.device("cpu"))

    def wake(self) -> None:
        """Move them back."""
        wake(self.module)
        self._move_moments(next(self.module.parameters()).device)

    def _move_moments(self, device: torch.device) -> None:
        for moments in self.optimizer.state.values():
            # Single numbers stay: where they have to be is up to the optimizer
            moments |= {key: x.to(device) for key, x in moments.items() if isinstance(x, Tensor) and x.ndim}


type TorchParams = nn.Module | Adapter[nn.Module]
