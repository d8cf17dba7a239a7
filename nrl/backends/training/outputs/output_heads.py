"""Outputs of heads from hidden states: log-probabilities and entropy of words, logits, or one number."""

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from nrl.algos import LogitsOutput, logprobs_at, output_kind
from nrl.backends.training.outputs.fused_logprobs import linear_logprobs, linear_top_k
from nrl.backends.training.outputs.head_functions import linear_logits, map_logits
from nrl.backends.training.outputs.vocab_parallel import VocabularyShard
from nrl.backends.types import top_k_of

__all__ = ["LARGE", "PROVIDES", "numbers", "predictions", "states", "widths"]

PROVIDES = {
    "lm": frozenset({"logprobs", "entropy", "logprobs_at", "top_k", "logits", "from_logits", "hidden_states"}),
    "value": frozenset({"values", "hidden_states"}),
    "reward": frozenset({"rewards"}),
}
"""The kinds of outputs of each head."""

LARGE = frozenset({"logits", "hidden_states"})
"""The outputs that have as many numbers a token as a model has words, or as its states are wide."""


def widths(weight: Tensor, provides: Collection[str]) -> dict[str, int]:
    """Return the last dimension of logits and of hidden states, if a head with this weight provides them.

    >>> widths(torch.zeros(23, 16), PROVIDES["value"])
    {'hidden_states': 16}
    """
    sizes = {"logits": weight.shape[0], "hidden_states": weight.shape[1]}
    return {kind: width for kind, width in sizes.items() if kind in provides}


def numbers(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``[n]``, the output of a head of one number, in float32 at least."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    result = (hidden.to(dtype) * weight[0].to(dtype)).sum(-1)
    return result if bias is None else result + bias[0].to(dtype)


def states(hidden: Tensor) -> Tensor:
    """Return ``[n, H]``, the hidden states as an output: in float32 at least, and copied."""
    return hidden.to(torch.promote_types(hidden.dtype, torch.float32), copy=True)


def predictions(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Mapping[str, Tensor],
    columns: Mapping[str, Tensor],
    temperature: Tensor | None,
    needs: Collection[str],
    shard: VocabularyShard | None = None,
    guard: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, Tensor]:
    """Compute the outputs of a language-model head that ``needs`` names; only ``logits`` holds the matrix of logits.

    Args:
        hidden: ``[n, H]``, the states that predict the wanted tokens.
        weight: ``[V, H]`` of the head.
        bias: ``[V]``, or None.
        targets: ``[n]`` or ``[n, k]`` each, as in `Plan`, on the device of the states.
        columns: ``[n, ...]`` each, as in `Plan`, likewise.
        temperature: ``[n]``, or None.
        needs: the names of the outputs.
        shard: which words ``weight`` and ``bias`` are of, where processes share the vocabulary.
        guard: what calls of functions of logits happen in; it may hold their errors back.
    """
    weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
    values = {}
    k = top_k_of(needs)
    if k is not None:
        top = linear_top_k(hidden, weight, k, temperature=temperature, bias=bias, shard=shard)
        values["top_k_ids"], values["top_k_logprobs"] = top
    if {"logprobs", "entropy", "logprobs_at"} & {output_kind(need) for need in needs}:  # All targets share one softmax.
        wide = [x if x.ndim > 1 else x[:, None] for x in targets.values()]
        logprobs, entropy = linear_logprobs(
            hidden,
            weight,
            torch.cat(wide, 1),
            temperature=temperature,
            bias=bias,
            entropy="entropy" in needs,
            shard=shard,
        )
        names = ["logprobs", *(logprobs_at(column) for column in targets if column != "input_ids")]
        parts = logprobs.split([x.shape[1] for x in wide], 1)
        # Copies, because FSDP begins its backward at the outputs, and cannot at views that have changed
        values |= {n: part.view(x.shape).clone() for n, part, x in zip(names, parts, targets.values(), strict=True)}
        if entropy is not None:
            values["entropy"] = entropy
    if "logits" in needs:
        values["logits"] = linear_logits(hidden, weight, temperature=temperature, bias=bias, shard=shard)
    for need in sorted(needs):  # processes that share the vocabulary meet in each of them, in one order
        if isinstance(need, LogitsOutput):
            inputs = [columns[column] for column in need.columns] if len(hidden) else []  # no token has no columns
            values[str(need)] = map_logits(
                need, hidden, weight, inputs, temperature=temperature, bias=bias, shard=shard, guard=guard
            )
    if "hidden_states" in needs:
        # Processes that share the vocabulary add up what they know of the states' gradient, and all know this one
        values["hidden_states"] = states(hidden if shard is None or shard.start == 0 else hidden.detach())
    return values
