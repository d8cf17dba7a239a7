"""The outputs of a transformers model at the tokens of a plan: log-probabilities, logits, states, values, rewards."""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from nrl.backends.models.moe_routers import replay_routes
from nrl.backends.models.named_weights import SCORE, head_weight
from nrl.backends.training.layout import packed_attention
from nrl.backends.training.layout.microbatch_plan import Outputs, Plan
from nrl.backends.training.outputs.output_heads import numbers, predictions, states

__all__ = ["compute"]


def compute(
    module: Any,
    work: Plan,
    needs: Collection[str],
    guard: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Outputs:
    """Compute outputs at the wanted tokens.

    Args:
        module: a Hugging Face causal language model, or one with another head; for packed tokens with the attention of
            `nrl.backends.fsdp.attention`.
        work: from `plan`, on the device of the model.
        needs: the names of the outputs. A value or reward head computes its own output whether it is among them or not,
            so that each parameter has a gradient.
        guard: what calls of functions of logits happen in; it may hold their errors back.
    """
    weight, bias = head_weight(module)
    hidden = weight[:0]
    if work.places is not None:
        inputs: dict[str, Any] = dict(work.inputs)
        if work.rows is not None:
            inputs["nrl_attention"] = packed_attention.make_attention(work.rows)
        with replay_routes(module, work.routes):
            last = module.base_model(use_cache=False, **inputs).last_hidden_state
        hidden = last.flatten(0, 1).index_select(0, work.places)
    if getattr(module, SCORE, None) is None:
        values = predictions(hidden, weight, bias, work.targets, work.columns, work.temperature, needs, guard=guard)
    else:
        values = {"rewards" if "rewards" in needs else "values": numbers(hidden, weight, bias)}
        if "hidden_states" in needs:
            values["hidden_states"] = states(hidden)
    again = partial(replay_routes, module, work.routes, again=True)
    return Outputs(values, work.source, work.shape, again)
