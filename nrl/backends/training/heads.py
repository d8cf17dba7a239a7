"""What heads compute from hidden states: log-probabilities and entropy of words, or one number."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from nrl.algos import logprobs_at
from nrl.backends.base import top_k, top_k_of
from nrl.backends.training.fused_logprobs import linear_logprobs, linear_top_k
from nrl.backends.training.vocabulary import VocabularyShard

__all__ = ["PROVIDES", "numbers", "predictions"]

PROVIDES = {
    "lm": frozenset({"logprobs", "entropy", "logprobs_at", "top_k"}),
    "value": frozenset({"values"}),
    "reward": frozenset({"rewards"}),
}
"""The kinds of outputs of each head."""


def numbers(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``[n]``, the output of a head of one number, in float32 at least."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    found = (hidden.to(dtype) * weight[0].to(dtype)).sum(-1)
    return found if bias is None else found + bias[0].to(dtype)


def predictions(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Mapping[str, Tensor],
    temperature: Tensor | None,
    needs: Collection[str],
    shard: VocabularyShard | None = None,
) -> dict[str, Tensor]:
    """The outputs of a language-model head that ``needs`` names, without the matrix of logits.

    Args:
        hidden: ``[n, H]``, the states that predict the wanted tokens.
        weight: ``[V, H]`` of the head.
        bias: ``[V]``, or None.
        targets: ``[n]`` or ``[n, k]`` each, as in `Plan`, on the device of the states.
        temperature: ``[n]``, or None.
        needs: the names of the outputs.
        shard: which words ``weight`` and ``bias`` are of, where processes share the vocabulary.
    """
    weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
    values = {}
    k = top_k_of(needs)
    if k is not None:
        found = linear_top_k(hidden, weight, k, temperature=temperature, bias=bias, shard=shard)
        values["top_k_ids"], values["top_k_logprobs"] = found
    if k is None or set(needs) != {top_k(k)}:  # one softmax for all targets
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
    return values
