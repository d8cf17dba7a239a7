"""The outputs of a transformers model at the tokens of a plan: log-probabilities, entropy, values, rewards."""

from collections.abc import Collection
from functools import partial
from typing import Any

from nrl.backends.models.named_weights import head_weight
from nrl.backends.models.routers import replaying
from nrl.backends.training import packed_attention
from nrl.backends.training.heads import numbers, predictions
from nrl.backends.training.plans import Outputs, Plan

__all__ = ["compute"]


def compute(module: Any, work: Plan, needs: Collection[str]) -> Outputs:
    """Compute outputs at the wanted tokens.

    Args:
        module: a Hugging Face causal language model, or one with another head; for packed tokens with the attention of
            `nrl.backends.fsdp.attention`.
        work: from `plan`, on the device of the model.
        needs: the names of the outputs; a model with a value or reward head has that one alone.
    """
    weight, bias = head_weight(module)
    hidden = weight[:0]
    if work.places is not None:
        inputs: dict[str, Any] = dict(work.inputs)
        if work.rows is not None:
            inputs["nrl_attention"] = packed_attention.over(work.rows)
        with replaying(module, work.routes):
            states = module.base_model(use_cache=False, **inputs).last_hidden_state
        hidden = states.flatten(0, 1).index_select(0, work.places)
    if asked := {"values", "rewards"} & set(needs):
        (name,) = asked
        values = {name: numbers(hidden, weight, bias)}
    else:
        values = predictions(hidden, weight, bias, work.targets, work.temperature, needs)
    again = partial(replaying, module, work.routes, again=True)
    return Outputs(values, work.source, work.shape, again)
