"""The weights of a transformers model by their Hugging Face names, and loading others into their place."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from nrl.errors import ModelError

__all__ = [
    "SAME",
    "SCORE",
    "Loading",
    "a_few",
    "check_arrived",
    "check_weight",
    "head_weight",
    "is_score",
    "load_tensors",
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
    """Whether a weight is of a value or reward head.

    >>> is_score("score.weight"), is_score("lm_head.weight")
    (True, False)
    """
    return name.split(".")[0] == SCORE


def head_weight(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight ``[V, H]`` and bias ``[V]`` of a language-model head; ``[1, H]`` and ``[1]`` of another one."""
    head = getattr(module, SCORE, None) or module.get_output_embeddings()  # type: ignore[operator]
    return head.weight, getattr(head, "bias", None)


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by their Hugging Face names; those of an adapter by the names in its files."""
    return {weight_name(name): tensor for name, tensor in module.state_dict(keep_vars=True).items()}


def weight_name(name: str) -> str:
    """The name that a weight has in files, whether peft has wrapped its layer or not.

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


def load_tensors(own: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]], *, who: str) -> None:
    """Copy weights in by name, in place, one at a time; the inverse of `named_tensors`.

    Of a model with another head all but the head is used; value and reward heads share their weight.

    Args:
        own: `weights`, which are replaced.
        tensors: names and values, of any dtype and device; of tied weights one name is enough.
        who: how errors name the caller.

    Raises:
        ModelError: a name that the model does not have, a wrong shape, weights that are missing, or tied ones that
            differ. Some weights may have been replaced by then.
    """
    loading = Loading(own, who)
    loading.add(_for_head(own, tensors))
    loading.end()


def _for_head(own: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Weights of a model that may have another head: without its head, and with this model's own in its place."""
    came = set()
    for name, tensor in tensors:
        if name in own or name.split(".")[0] not in _HEADS:
            came.add(name)
            yield name, tensor
    yield from ((name, tensor) for name, tensor in own.items() if is_score(name) and name not in came)


class Loading:
    """`load_tensors` for weights that come a few at a time: any number of `add`, then `end`.

    Args:
        own: `weights`, which are replaced.
        who: how errors name the caller.
    """

    def __init__(self, own: Mapping[str, Tensor], who: str) -> None:
        self._own = own
        self._waiting = {tensor.data_ptr(): name for name, tensor in self._own.items()}  # tied ones once
        self._shapes = {name: tuple(tensor.shape) for name, tensor in self._own.items()}
        self._who = who

    @torch.no_grad()
    def add(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy some weights in."""
        for name, tensor in tensors:
            check_weight(name, tuple(tensor.shape), self._shapes, self._who)
            held = self._own[name]
            if self._waiting.pop(held.data_ptr(), None) is not None:
                held.copy_(tensor)
            elif not torch.equal(held, tensor.to(held)):
                raise ModelError(
                    f"{self._who}: '{name}' came twice with different values, or is tied to another weight here and "
                    f"not where it came from; {SAME}"
                )

    def end(self) -> None:
        """Check that no weight is missing."""
        check_arrived(self._waiting.values(), self._who)


def check_weight(name: str, shape: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]], who: str) -> None:
    """Check the name and shape of a weight against those of a model.

    Raises:
        ModelError: the model has no weight of this name, or one of another shape.
    """
    if name not in shapes:
        raise ModelError(f"{who}: the model has no weight '{name}'; it has {a_few(shapes)}; {SAME}")
    if shapes[name] != shape:
        raise ModelError(f"{who}: '{name}' has shape {list(shape)}, and here it is {list(shapes[name])}; {SAME}")


def check_arrived(missing: Collection[str], who: str) -> None:
    """Check that no weight is missing.

    Raises:
        ModelError: some are.
    """
    if missing:
        raise ModelError(f"{who}: {len(missing)} weights did not arrive: {a_few(missing)}; send all of them")


def a_few(names: Iterable[str], most: int = 5) -> str:
    """The first of some names, and how many more there are.

    >>> a_few("abcd", 3)
    'a, b, c and 1 more'
    """
    found = list(names)
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")
