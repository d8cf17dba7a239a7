"""The values of the torch engine on a mesh: models, models in training, and adapters alone."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from nrl.backends.fsdp.optimizer import TorchOptimizer
from nrl.backends.training.adapters import AdapterParams
from nrl.runtime.mesh.offload import offload_value, onload_value, to_host

__all__ = ["TorchParams", "TorchState"]


class TorchState(NamedTuple):
    """A model in training, its optimizer, and how many steps it has taken."""

    module: nn.Module
    optimizer: TorchOptimizer
    step: int

    def offload(self) -> None:
        """Move model and moments off the device; see `nrl.runtime.mesh.offload.Offloadable`."""
        self._move_moments(to_host(self.optimizer))
        offload_value(self.module)  # This waits for all copies.

    def onload(self) -> None:
        """Move them back."""
        onload_value(self.module)
        device = next(self.module.parameters()).device
        self._move_moments(lambda x: x.to(device, non_blocking=True))

    def _move_moments(self, move: Callable[[Tensor], Tensor]) -> None:
        for moments in self.optimizer.state.values():
            # Single numbers stay: where they have to be is up to the optimizer
            moments |= {key: move(x) for key, x in moments.items() if isinstance(x, Tensor) and x.ndim}


type TorchParams = nn.Module | AdapterParams[nn.Module]
