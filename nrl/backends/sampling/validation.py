"""Checks of requests: whether prompts can be completed, and whether top-k or top-p leave out tokens."""

import warnings
from collections.abc import Collection, Sequence
from typing import Any, cast

import torch

from nrl.backends.types import Chunks, Completion, Media, Sampling, length_of
from nrl.errors import GenerationError, LostRequest

__all__ = ["check_completion", "check_prompts", "truncates", "warn_of_truncation"]

_ABOVE = 0.01  # nats, above 0: what rounding may add to a log-probability


def check_prompts(
    prompts: Sequence[Chunks],
    seeds: Sequence[int],
    stop_token_ids: Sequence[int],
    vocabulary: int,
    context_length: int,
    media: Collection[str] = (),
) -> None:
    """Check that prompts can be completed.

    Args:
        prompts: token ids, and media.
        seeds: one for each prompt.
        stop_token_ids: that end a completion.
        vocabulary: how many tokens the model knows.
        context_length: the most tokens that a prompt and its completion may have together.
        media: the kinds that the sampler takes.

    Raises:
        GenerationError: one cannot.
    """
    if len(seeds) != len(prompts):
        raise GenerationError(f"decode: {len(seeds)} seeds for {len(prompts)} prompts; give one for each")
    for row, prompt in enumerate([prompts] if isinstance(prompts, str) else prompts):
        if isinstance(prompt, str) or not hasattr(prompt, "__len__") or str in map(type, prompt):
            raise GenerationError(
                f"generate: row {row} of the prompts is {prompt!r:.80}; prompts are lists of token ids, such as "
                "[[5, 6, 7]]; encode texts with the sampler's tokenizer first"
            )
        if len(prompt) == 0:
            raise GenerationError(
                f"decode: the prompt of row {row} has 0 tokens; give it from 1 to {context_length - 1}, such as the "
                "tokenizer's beginning-of-sequence token"
            )
        if (length := length_of(prompt)) >= context_length:
            raise GenerationError(
                f"decode: the prompt of row {row} has {length} tokens, which leaves no room in a context "
                f"of {context_length}; shorten or drop the prompt, or use a model with a longer context"
            )
        tokens = cast(Sequence[int], prompt)
        if Media in map(type, prompt):
            tokens = [part for part in prompt if not isinstance(part, Media)]
            for part in prompt:
                if isinstance(part, Media) and part.kind not in media:
                    raise GenerationError(
                        f"generate: the prompt of row {row} has media of the kind '{part.kind}', and the sampler takes "
                        f"{', '.join(sorted(media)) or 'tokens alone'}; see its capabilities.media"
                    )
        if len(tokens) and (min(tokens) < 0 or max(tokens) >= vocabulary):
            unknown = next(token for token in tokens if not 0 <= token < vocabulary)
            raise GenerationError(
                f"decode: the prompt of row {row} has the token id {unknown}, outside of the model's vocabulary of "
                f"{vocabulary}; encode it with the model's own tokenizer"
            )
    for token in stop_token_ids:
        if not 0 <= token < vocabulary:
            raise GenerationError(
                f"decode: the stop token {token} is outside of the model's vocabulary of {vocabulary}; "
                "give ids of the model's own tokenizer"
            )


def check_completion(completion: Any) -> None:
    """Check that the answer of a sampler can be trained on: ids, and for each a finite log-probability.

    Raises:
        LostRequest: it cannot; in a rollout its row is not valid.

    >>> check_completion(Completion(torch.tensor([7]), torch.tensor([-0.5]), truncated=False, version=1))
    """
    if not isinstance(completion, Completion):
        raise LostRequest(f"generate: the sampler's answer is {completion!r:.80}; give a Completion for each prompt")
    ids, logprobs, versions = completion.token_ids, completion.logprobs, completion.versions
    for name, column in (("token_ids", ids), ("logprobs", logprobs), ("versions", versions)):
        if column is None and name == "versions":
            continue
        if not isinstance(column, torch.Tensor) or column.ndim != 1 or len(column) != len(ids):
            description = (
                f"shape {list(column.shape)}" if isinstance(column, torch.Tensor) else f"a {type(column).__name__}"
            )
            raise LostRequest(
                f"generate: the sampler's answer has {description} as its {name}; give a tensor with an entry for each "
                "sampled token"
            )
        if column.is_floating_point() != (name == "logprobs") or column.dtype in (torch.bool, torch.complex64):
            raise LostRequest(
                f"generate: the sampler's answer has {name} of {column.dtype}; give int64 for ids and versions, and "
                "float32 for log-probabilities"
            )
    if not len(ids):
        return
    if int(ids.min()) < 0:
        raise LostRequest(f"generate: the sampler's answer has the token id {int(ids.min())}; ids begin at 0")
    if not bool((logprobs.isfinite() & (logprobs < _ABOVE)).all()):
        wrong = logprobs[~(logprobs.isfinite() & (logprobs < _ABOVE))][0].item()
        raise LostRequest(
            f"generate: the sampler's answer has {wrong:g} as a log-probability; give finite numbers up to 0, and look "
            "for weights that are not finite"
        )


def truncates(sampling: Sampling, vocabulary: int) -> bool:
    """Return whether top-k or top-p leave out tokens of a vocabulary of this size.

    >>> truncates(Sampling(top_k=9), 8), truncates(Sampling(top_k=7), 8)
    (False, True)
    """
    return 0 < sampling.top_k < vocabulary or sampling.top_p < 1


def warn_of_truncation(caller: str, sampling: Sampling, vocabulary: int, stacklevel: int = 3) -> bool:
    """Warn if top-k or top-p make log-probabilities incomparable with a trainer's; return whether it warned."""
    if not truncates(sampling, vocabulary) or sampling.temperature == 0:
        return False
    warnings.warn(
        f"{caller}: with top_k={sampling.top_k}, top_p={sampling.top_p} the rollout_logprobs are those of the "
        "truncated distribution q, renormalised over the kept tokens. A trainer's p is over all tokens, so E[p/q] "
        "is the kept mass and not 1, and ratios to rollout_logprobs are biased. To train on these rollouts sample "
        "with top_k=0 and top_p=1, or take old_logprobs from trainer.logprobs",
        UserWarning,
        stacklevel=stacklevel,
    )
    return True
