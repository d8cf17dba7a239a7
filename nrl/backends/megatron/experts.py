"""Experts on Megatron Core: its own layer and router, told which tokens of which micro-batch they see."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from nrl.backends.models.moe_routers import Routers

__all__ = ["experts", "forget_loads", "loads", "router_sizes"]


class _ReplayedChoice(NamedTuple):
    """A replacement of Megatron's ``RouterReplay``, which would be one for all micro-batches."""

    routes: Tensor

    def get_replay_topk(self, scores: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """``scores`` ``[n, experts]`` of the live router, at the experts that are replayed."""
        return scores.gather(1, self.routes), self.routes


class _Router(TopKRouter):  # type: ignore[misc]  # Megatron has no types
    """A router that replays given choices, and counts in training the outputs read at tokens of each expert."""

    rows: Any = None
    """Of the micro-batch that it sees; along tp it sees a part of the tokens."""

    router_replay: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.load: Tensor | None = None  # on the device, so that nothing waits for it

    def forward(self, input: Tensor, padding_mask: Any = None) -> tuple[Tensor, Tensor]:
        """``input`` ``[n, 1, H]``; returns probabilities and choices ``[n, experts]``."""
        first = self.tp_group.rank() * len(input) if self.config.sequence_parallel else 0
        mine = slice(first, first + len(input))
        if self.rows.routes is not None:
            layer = sum(self.config.moe_layer_freq[: self.layer_number - 1])
            self.router_replay = _ReplayedChoice(self.rows.routes[mine, layer].to(input.device, torch.int64))
        try:
            probs, chosen = super().forward(input)
        finally:
            self.router_replay = None
        if self.training:
            load = self.rows.reads[mine].float() @ chosen.float()
            self.load = load if self.load is None else self.load + load
        return probs, chosen


class _Experts(MoELayer):  # type: ignore[misc]
    """A layer of experts, which gets the rows of a micro-batch in the place of Megatron's mask of padding.

    Megatron hands that on to wherever a layer is computed, and computed again.
    """

    def forward(self, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Any = None) -> Any:
        """``hidden_states`` ``[n, 1, H]``."""
        self.router.rows = padding_mask
        return super().forward(hidden_states, intermediate_tensors)


def experts() -> Any:
    """Return a factory of layers of experts; each expert is whole in one process along ep."""
    linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    parts = MoESubmodules(experts=partial(SequentialMLP, submodules=linear), router=_Router)
    return partial(_Experts, submodules=parts)


def router_sizes(config: Any) -> Routers | None:
    """Return how many experts the routers of a model choose; None: it has no experts."""
    if not config.num_moe_experts:
        return None
    return Routers(sum(config.moe_layer_freq), config.moe_router_topk, config.num_moe_experts)


def _routers(stages: Sequence[Any]) -> list[_Router]:
    return [part for stage in stages for part in stage.modules() if isinstance(part, _Router)]


def forget_loads(stages: Sequence[Any]) -> None:
    """Count from zero."""
    for router in _routers(stages):
        router.load = None


def loads(stages: Sequence[Any]) -> Tensor | None:
    """Return the counts of the routers of these stages, ``[layers, experts]`` float64; zeros for layers elsewhere.

    None: the model has no experts.
    """
    config = stages[0].config
    if not config.num_moe_experts:
        return None
    counts = torch.zeros(config.num_layers, config.num_moe_experts, dtype=torch.float64)
    for router in _routers(stages):
        if router.load is not None:
            counts[router.layer_number - 1] = router.load.detach().cpu().double()
    return counts[torch.tensor(config.moe_layer_freq) == 1]
