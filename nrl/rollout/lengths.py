"""Requests and answers that cannot fit into the context of a sampler.

A request is told from a part of its text: to encode a megabyte takes a second.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from nrl.backends.sampling.base import Sampler
from nrl.backends.types import Sampling
from nrl.data.encoding import encode
from nrl.errors import ArgumentError

__all__ = ["check_answer_length", "least_tokens"]

_PROBED = 8  # characters for each token of the context; of a longer text this much is encoded


def check_answer_length(caller: str, sampler: Sampler, sampling: Sampling | None) -> None:
    """Check before anything is sampled that an answer may be as long as the sampling says.

    Args:
        caller: how the error begins.
        sampler: has a context.
        sampling: None: the sampler's own.

    Raises:
        ArgumentError: ``max_new_tokens`` are more than the context has for prompt and answer together.
    """
    chosen = sampling or sampler.sampling
    if chosen.max_new_tokens > sampler.context_length:
        raise ArgumentError(
            f"{caller}: sampling.max_new_tokens={chosen.max_new_tokens} is more than the {sampler.context_length} "
            "tokens that prompt and answer may have together (the positions of the model, unless its tokenizer or its "
            f"engine has a smaller limit); set sampling.max_new_tokens below {sampler.context_length}, or take a model "
            "with more positions",
            "sampling",
        )


def least_tokens(request: Any, tokenizer: Any, context_length: int) -> int:
    """Return how many tokens a request has at least, if that is more than fits into the context; else 0.

    Args:
        request: messages and tools, as agents send them, or a text.
        tokenizer: of the model.
        context_length: the most tokens of the model.
    """
    budget = remaining = _PROBED * context_length
    parts = list[str]()
    for text in _texts(request):
        parts.append(text[:remaining])
        remaining -= len(parts[-1])
        if not remaining:
            break
    if remaining:
        return 0
    tokens = len(encode("".join(parts)[:budget], tokenizer))
    return tokens if tokens > context_length else 0


def _texts(value: Any) -> Iterator[str]:
    """All texts of a request that a chat template writes, whatever it is; some leave out what was thought earlier."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            if key == "content" and isinstance(part, str) and value.get("role") == "assistant":
                yield part.rpartition("</think>")[2]
            elif key not in ("reasoning", "reasoning_content"):
                yield from _texts(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part)
