"""The context length of a model, by its positions."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from nrl.errors import ModelError

__all__ = ["context_length", "count_positions"]

_LONGER = ("linear", "dynamic")  # kinds of rotary positions that stretch max_position_embeddings by their factor


def count_positions(config: Any) -> int | None:
    """Return the most tokens that a row may have, by a transformers config; None: the config does not say.

    The config of the text model counts, if it lies within that of a model of several kinds of input. Scaled rotary
    positions count as far as they reach: ``linear`` and ``dynamic`` ones ``factor`` times ``max_position_embeddings``,
    ``yarn`` ones ``factor`` times ``original_max_position_embeddings``. The other kinds have their reach in
    ``max_position_embeddings``.

    >>> from transformers import LlamaConfig
    >>> count_positions(LlamaConfig(max_position_embeddings=512))
    512
    >>> yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 1e4}
    >>> count_positions(LlamaConfig(max_position_embeddings=512, rope_parameters=yarn))
    2048
    """
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        return None
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    # Where layers of several types have their own positions, the config's number is the reach of all of them.
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        return limit
    kind, factor = rope.get("rope_type", rope.get("type")), float(rope.get("factor") or 1.0)
    if kind in _LONGER:
        return int(limit * factor)
    if kind == "yarn":
        return max(limit, int((rope.get("original_max_position_embeddings") or limit) * factor))
    return limit


def context_length(module: nn.Module) -> int:
    """Return the most tokens that a row may have, by the model's positions.

    Raises:
        ModelError: the config has no such number.
    """
    limit = count_positions(module.config)
    if limit is None:
        raise ModelError(
            f"{type(module).__name__}: the config has no max_position_embeddings, so its context is unknown"
        )
    return limit
