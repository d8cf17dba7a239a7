"""Small models of the same class as a large one, for checks of what the class computes."""

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from nrl.backends.models.loading import dropout_off
from nrl.errors import ModelError

__all__ = ["miniature"]

_WIDE = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "intermediate_size_mlp")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_WIDTH, _WORDS = 64, 128


def miniature(module: Any) -> Any:
    """Make a model of the same class and config with fewer layers, words, heads and experts, in float32 on the CPU.

    It has two layers, or the fewest of the first layers with each kind. Its weights are random and large enough to
    show mistakes, norms and biases included. If the class refuses a narrower config, fewer changes are tried; at last
    only the layers are fewer.

    Args:
        module: a transformers model; its parameters need not take memory, and are not read.

    Raises:
        ModelError: such a model computes nothing.

    >>> from nrl import tiny
    >>> from nrl.backends.models import loading
    >>> large = loading.skeleton(tiny.model(num_hidden_layers=40, intermediate_size=4096))
    >>> sum(parameter.numel() for parameter in miniature(large).parameters()) < 200_000
    True
    """
    error: Exception | None = None
    for narrow, few_words in ((True, True), (False, True), (False, False)):
        config = copy.deepcopy(module.config)
        for sub_config in _iter_configs(config):
            _shrink(sub_config, narrow, few_words)
        try:
            model: Any = _make_with_each_kind(module, config)
            with torch.no_grad():
                model.base_model(input_ids=torch.tensor([[1, 2]]), use_cache=False)
            return model
        except Exception as found:  # transformers raises all kinds
            error = found
    raise ModelError(
        f"{type(module).__name__}: a model of this kind with random weights computes nothing "
        f"({type(error).__name__}: {error}), so it cannot be shown that this backend computes its numbers"
    ) from error


def _iter_configs(config: Any) -> Iterator[Any]:
    """Yield a config and its sub-configs."""
    yield config
    for name in getattr(config, "sub_configs", {}):
        if (part := getattr(config, name, None)) is not None:
            yield from _iter_configs(part)


def _shrink(config: Any, narrow: bool, few_words: bool) -> None:
    def cap(name: str, limit: int) -> None:
        if isinstance(value := getattr(config, name, None), int) and not isinstance(value, bool):
            setattr(config, name, min(value, limit))

    if few_words:
        cap("vocab_size", _WORDS)
        words = getattr(config, "vocab_size", math.inf)
        for name, value in list(vars(config).items()):
            if name.endswith("_token_id") and isinstance(value, int) and value >= (words or math.inf):
                setattr(config, name, None)
    if not narrow:
        return
    for name in {field for field in vars(config) if field.endswith(_WIDE)}:
        cap(name, _WIDTH)
    chosen = getattr(config, "num_experts_per_tok", None)
    for name in _EXPERTS:
        cap(name, 2 * chosen if isinstance(chosen, int) else 8)
    heads, width = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    shared = getattr(config, "num_key_value_heads", None) or heads
    if isinstance(heads, int) and isinstance(width, int) and isinstance(shared, int) and not heads % shared:
        few = heads // shared * min(shared, 2)
        if few < heads and not width * few % heads:
            config.hidden_size, config.num_attention_heads = width * few // heads, few
            cap("num_key_value_heads", 2)


def _make_with_each_kind(module: Any, config: Any) -> Any:
    """Make a model with the fewest layers, at least two, that have each kind of part of the model."""
    needed_kinds = {type(part) for part in module.modules() if not _is_adapter(part)}
    depths = {id(sub_config): getattr(sub_config, "num_hidden_layers", None) for sub_config in _iter_configs(config)}
    deepest = max((depth for depth in depths.values() if isinstance(depth, int)), default=2)
    for depth in range(2, deepest + 1):
        short = copy.deepcopy(config)
        complete = True
        for sub_config, full in zip(_iter_configs(short), depths.values(), strict=True):
            complete &= _keep_first_layers(sub_config, full, depth)
        with torch.device("meta"):
            kinds = {type(part) for part in type(module)._from_config(short, dtype=torch.float32).modules()}
        if (complete and needed_kinds <= kinds) or depth == deepest:
            return _randomize(_make_model(module, short))
    return _randomize(_make_model(module, config))


def _make_model(module: Any, config: Any) -> Any:
    """Make a model of a config without advancing the program's random generators."""
    with torch.random.fork_rng(devices=[]):
        return type(module)._from_config(config, dtype=torch.float32)


def _is_adapter(part: nn.Module) -> bool:
    """Return whether a module is of an adapter, which a miniature does not have."""
    return type(part).__module__.startswith("peft") or isinstance(part, nn.ModuleDict | nn.ParameterDict | nn.Identity)


def _keep_first_layers(config: Any, full: int | None, depth: int) -> bool:
    """Keep the first layers; return whether lists with a value a layer keep all of their distinct values."""
    if full is None or depth >= full:
        return True
    complete = True
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == full and len({str(item) for item in value}) < max(full, 3):
            complete &= {str(item) for item in value} == {str(item) for item in value[:depth]}
            setattr(config, name, value[:depth])
    config.num_hidden_layers = depth
    return complete


def _randomize(module: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(0.3 * noise)
    return dropout_off(module).eval()
