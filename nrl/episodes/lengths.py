"""Requests that cannot fit into the context, told from a part of their text: to encode a megabyte takes a second."""

from collections.abc import Iterator, Mapping
from typing import Any

from nrl.data.encoding import encode

__all__ = ["least_tokens"]

_PROBED = 8  # characters for each token of the context; of a longer text this much is encoded


def least_tokens(request: Any, tokenizer: Any, context_length: int) -> int:
    """Return how many tokens a request has at least, if that is more than fits into the context; else 0.

    Args:
        request: messages and tools, as agents send them, or a text.
        tokenizer: of the model.
        context_length: the most tokens of the model.
    """
    budget = left = _PROBED * context_length
    parts = list[str]()
    for text in _texts(request):
        parts.append(text[:left])
        left -= len(parts[-1])
        if not left:
            break
    if left:
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
