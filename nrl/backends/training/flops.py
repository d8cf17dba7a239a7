"""The floating-point operations that a model needs in a training step.

They are for model FLOPs utilization (MFU), so what is computed again under activation checkpointing does not count.
"""

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from nrl.backends.models.moe_routers import routers, sizes
from nrl.backends.models.named_weights import is_head, weight_name
from nrl.backends.training.layout.microbatch_plan import Plan
from nrl.batch.packed_rows import Rectangles

__all__ = ["Cost", "cost", "step_flops"]

_SCORES = {None, "full_attention", "sliding_attention", "chunked_attention"}
"""The types of layers that compute scores; those of linear attention have products of weights alone."""


class Cost(NamedTuple):
    """The floating-point operations of a model in a forward and a backward pass.

    Args:
        token: FLOPs of a token in the layers, attention's scores left out: 6 a weight of a matrix, 2 of them in the
            forward pass and 2 for each gradient; 4 a weight that is not trained. Of experts those that are chosen.
        output: FLOPs of the head for a token whose next one is predicted.
        scores: for each layer that attends, the FLOPs of a token and one that it attends to, ``6 H (D + D_v)`` with H
            heads of size D, and D_v of values; and the window within which it attends, or None.
    """

    token: float
    output: float
    scores: tuple[tuple[float, int | None], ...]


_FOUND: WeakKeyDictionary[nn.Module, Cost | None] = WeakKeyDictionary()


def cost(module: Any) -> Cost | None:
    """Return the cost of a transformers model; None: its config does not name its heads.

    Args:
        module: with an adapter or without; it may be sharded.
    """
    if module not in _FOUND:
        _FOUND[module] = _cost(module)
    return _FOUND[module]


def _cost(module: Any) -> Cost | None:
    config = module.config.get_text_config()
    heads, chosen = getattr(config, "num_attention_heads", None), 1.0
    if routers(module):
        of_experts = sizes(module)
        chosen = of_experts.k / of_experts.experts
    if not isinstance(heads, int):
        return None
    tables = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    head = module.get_output_embeddings()
    token = output = 0.0
    for name, weight in module.named_parameters():
        flops = (6.0 if weight.requires_grad else 4.0) * weight.numel()
        if (head is not None and weight is head.weight) or is_head(weight_name(name)):
            output += flops
        elif weight.ndim > 1 and id(weight) not in tables:
            token += flops * (chosen if weight.ndim == 3 else 1.0)
    size = getattr(config, "qk_head_dim", None) or getattr(config, "head_dim", None) or config.hidden_size // heads
    of_pair = 6.0 * heads * (size + (getattr(config, "v_head_dim", None) or size))
    kinds = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    scores = tuple((of_pair, None if kind in (None, "full_attention") else window) for kind in kinds if kind in _SCORES)
    return Cost(token, output, scores)


def step_flops(cost: Cost, work: Plan) -> float:
    """Count the FLOPs of a forward and a backward pass over a micro-batch.

    A token at position t attends to ``t + 1`` tokens, or as many as the window has, itself counted. Tokens that rows
    have in common count once, as they are computed.

    >>> from nrl.batch import Batch
    >>> from nrl.batch.packed_rows import Sequences
    >>> from nrl.backends.training.layout.microbatch_plan import plan, predicted_mask
    >>> batch = Batch({"input_ids": torch.tensor([[5, 6, 7]])}, batch_size=[1])  # two tokens predict: 1 + 2 pairs
    >>> step_flops(Cost(100.0, 10.0, ((1.0, None), (1.0, 1))), plan(batch, predicted_mask(batch), Sequences, words=8))
    225.0
    """
    if not work.computed:
        return 0.0
    keys = _keys(work)
    scores = sum(
        flops * int(keys.sum() if window is None else keys.clamp(max=window).sum()) for flops, window in cost.scores
    )
    return cost.token * work.computed + cost.output * len(work.source) + scores


def _keys(work: Plan) -> torch.Tensor:
    """Return the number of tokens that each computed token attends to, ``[n]`` int64."""
    if work.rows is None:
        mask = work.inputs["attention_mask"]
        return (mask.cumsum(-1) * mask).flatten()
    keys = work.inputs["position_ids"].flatten() + 1
    return keys[work.rows.real] if isinstance(work.rows, Rectangles) else keys
