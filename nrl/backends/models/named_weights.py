"""The weights of a transformers model by their Hugging Face names."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from torch import Tensor, nn

from nrl.errors import ModelError

__all__ = [
    "SAME",
    "SCORE",
    "a_few",
    "check_arrived",
    "check_weight",
    "head_weight",
    "is_head",
    "is_score",
    "named_tensors",
    "weight_name",
    "weights",
]

SCORE = "score"
"""transformers' name of the head of a classifier."""

SAME = "build both sides from the same Model"
"""How to mend weights that do not fit, in errors."""

_HEADS = ("lm_head", SCORE)
_WRAPPED = re.compile(r"(\.)base_layer\.|(\.lora_[AB]\.)default\.")


def is_score(name: str) -> bool:
    """Return whether a weight is of a value or reward head.

    >>> is_score("score.weight"), is_score("lm_head.weight")
    (True, False)
    """
    return name.split(".")[0] == SCORE


def is_head(name: str) -> bool:
    """Return whether a weight is of any head.

    >>> is_head("score.weight"), is_head("lm_head.weight"), is_head("model.norm.weight")
    (True, True, False)
    """
    return name.split(".")[0] in _HEADS


def head_weight(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return weight ``[V, H]`` and bias ``[V]`` of a language-model head; ``[1, H]`` and ``[1]`` of another one."""
    head = getattr(module, SCORE, None) or module.get_output_embeddings()  # type: ignore[operator]
    return head.weight, getattr(head, "bias", None)


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by their Hugging Face names; an adapter's by the names in its files."""
    return {weight_name(name): tensor for name, tensor in module.state_dict(keep_vars=True).items()}


def weight_name(name: str) -> str:
    """Return the name of a weight in files, whether peft has wrapped its layer or not.

    >>> weight_name("q_proj.base_layer.weight"), weight_name("q_proj.lora_A.default.weight")
    ('q_proj.weight', 'q_proj.lora_A.weight')
    """
    return _WRAPPED.sub(r"\1\2", name)


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """`weights`, detached, tied ones once."""
    seen: set[int] = set()
    for name, tensor in weights(module).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor.detach()


def check_weight(name: str, shape: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]], caller: str) -> None:
    """Check the name and shape of a weight against those of a model.

    Raises:
        ModelError: the model has no weight of this name, or one of another shape.
    """
    if name not in shapes:
        raise ModelError(f"{caller}: the model has no weight '{name}'; it has {a_few(shapes)}; {SAME}")
    if shapes[name] != shape:
        raise ModelError(f"{caller}: '{name}' has shape {list(shape)}, and here it is {list(shapes[name])}; {SAME}")


def check_arrived(missing: Collection[str], caller: str) -> None:
    """Check that no weight is missing.

    Raises:
        ModelError: some are.
    """
    if missing:
        raise ModelError(f"{caller}: {len(missing)} weights did not arrive: {a_few(missing)}; send all of them")


def a_few(names: Iterable[str], limit: int = 5) -> str:
    """Return the first names of a list, and the number of the others.

    >>> a_few("abcd", 3)
    'a, b, c and 1 more'
    """
    items = list(names)
    return ", ".join(items[:limit]) + (f" and {len(items) - limit} more" if len(items) > limit else "")
