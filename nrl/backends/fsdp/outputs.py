"""The outputs of a transformers model at the tokens of a plan: log-probabilities, entropy, values, rewards."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from nrl.algos import logprobs_at
from nrl.backends.base import top_k, top_k_of
from nrl.backends.fsdp import attention
from nrl.backends.models.named_weights import head_weight
from nrl.backends.training.fused_logprobs import linear_logprobs, linear_top_k
from nrl.backends.training.plans import Outputs, Plan

__all__ = ["compute"]


def compute(module: Any, work: Plan, needs: Collection[str]) -> Outputs:
    """Compute outputs at the wanted tokens.

    Args:
        module: a Hugging Face causal language model, or one with another head; for packed tokens with the attention of
            `nrl.backends.fsdp.attention`.
        work: from `plan`.
        needs: the names of the outputs; a model with a value or reward head has that one alone.
    """
    device = module.device
    weight, bias = head_weight(module)
    hidden = weight[:0]
    if work.places is not None:
        inputs: dict[str, Any] = {name: x.to(device) for name, x in work.inputs.items()}
        if work.rows is not None:
            inputs["nrl_attention"] = attention.over(work.rows, device)
        states = module.base_model(use_cache=False, **inputs).last_hidden_state
        hidden = states.flatten(0, 1).index_select(0, work.places.to(device))
    if numbers := {"values", "rewards"} & set(needs):
        (name,) = numbers
        values = {name: _numbers(hidden, weight, bias)}
    else:
        temperature = None if work.temperature is None else work.temperature.to(device)
        values = _predictions(hidden, weight, bias, work.targets, temperature, needs)
    return Outputs(values, work.source.to(device), work.shape)


def _numbers(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``[n]``, the output of a head of one number, in float32 at least."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    found = (hidden.to(dtype) * weight[0].to(dtype)).sum(-1)
    return found if bias is None else found + bias[0].to(dtype)


def _predictions(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Mapping[str, Tensor],
    temperature: Tensor | None,
    needs: Collection[str],
) -> dict[str, Tensor]:
    weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
    values = {}
    k = top_k_of(needs)
    if k is not None:
        found = linear_top_k(hidden, weight, k, temperature=temperature, bias=bias)
        values["top_k_ids"], values["top_k_logprobs"] = found
    if k is None or set(needs) != {top_k(k)}:  # one softmax for all targets
        wide = [(x if x.ndim > 1 else x[:, None]).to(hidden.device) for x in targets.values()]
        logprobs, entropy = linear_logprobs(
            hidden, weight, torch.cat(wide, 1), temperature=temperature, bias=bias, entropy="entropy" in needs
        )
        names = ["logprobs", *(logprobs_at(column) for column in targets if column != "input_ids")]
        parts = logprobs.split([x.shape[1] for x in wide], 1)
        # Copies, because FSDP begins its backward at the outputs, and cannot at views that have changed
        values |= {n: part.view(x.shape).clone() for n, part, x in zip(names, parts, targets.values(), strict=True)}
        if entropy is not None:
            values["entropy"] = entropy
    return values
