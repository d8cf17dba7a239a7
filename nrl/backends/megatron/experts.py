"""Experts on Megatron Core: its own layer and router, told which tokens of which micro-batch they see."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

__all__ = ["experts", "forget_loads", "loads"]


class _Router(TopKRouter):  # type: ignore[misc]  # Megatron has no types
    """A router that counts, in training, how many of the outputs that are read come from tokens that it sends where."""

    reads: Tensor | None = None
    """``[n]``, how many outputs are read at each token of this process; along tp it sees a part of them."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.load = torch.zeros(self.num_experts, dtype=torch.float64)

    def forward(self, input: Tensor, padding_mask: Any = None) -> tuple[Tensor, Tensor]:
        """``input`` ``[n, 1, H]``; returns probabilities and choices ``[n, experts]``."""
        probs, chosen = super().forward(input)
        if self.training and self.reads is not None:
            reads = self.reads.view(-1, len(chosen))[self.tp_group.rank() if self.config.sequence_parallel else 0]
            self.load += (reads.double() @ chosen.double()).to(self.load.device)
        return probs, chosen


class _Experts(MoELayer):  # type: ignore[misc]
    """A layer of experts, which gets the rows of a micro-batch in the place of Megatron's mask of padding.

    Megatron hands that on to wherever a layer is computed, and computed again.
    """

    def forward(self, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Any = None) -> Any:
        """``hidden_states`` ``[n, 1, H]``."""
        self.router.reads = padding_mask.reads
        return super().forward(hidden_states, intermediate_tensors)


def experts() -> Any:
    """What makes a layer of experts; each is whole in one process along ep."""
    linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    parts = MoESubmodules(experts=partial(SequentialMLP, submodules=linear), router=_Router)
    return partial(_Experts, submodules=parts)


def _routers(stages: Sequence[Any]) -> list[_Router]:
    return [part for stage in stages for part in stage.modules() if isinstance(part, _Router)]


def forget_loads(stages: Sequence[Any]) -> None:
    """Count from zero."""
    for router in _routers(stages):
        router.load.zero_()


def loads(stages: Sequence[Any]) -> Tensor | None:
    """``[layers, experts]`` float64, what the routers of these stages have counted; zeros for layers elsewhere.

    None: the model has no experts.
    """
    config = stages[0].config
    if not config.num_moe_experts:
        return None
    found = torch.zeros(config.num_layers, config.num_moe_experts, dtype=torch.float64)
    for router in _routers(stages):
        found[router.layer_number - 1] = router.load
    return found[torch.tensor(config.moe_layer_freq) == 1]
