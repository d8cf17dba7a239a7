"""The records of all backends: models, samplings, completions, and the names of outputs.

Authors of backends implement the protocols of `nrl.backends.engine`.
"""

import hashlib
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import attrs
from torch import Tensor

from nrl.arguments import checked, register_kind
from nrl.batch.raw import flat_bytes
from nrl.errors import ArgumentError

__all__ = [
    "Bucket",
    "Chunks",
    "Completion",
    "Lora",
    "Media",
    "Model",
    "ModelSource",
    "Piece",
    "Sampling",
    "length_of",
    "outputs_of",
    "top_k",
    "top_k_of",
]


@attrs.frozen(eq=False)
class Piece:
    """A block of a weight: the full weight, or a process's part of it.

    Args:
        name: of the weight, as in Hugging Face's files.
        shape: of the whole weight, as there.
        index: where the block lies in the whole: a slice for each dimension, with a start and a stop.
        tensor: the numbers of the block.

    >>> import torch
    >>> Piece("score.weight", (1, 4), (slice(0, 1), slice(2, 4)), torch.zeros(1, 2)).shape
    (1, 4)
    """

    name: str
    shape: tuple[int, ...]
    index: tuple[slice, ...]
    tensor: Tensor


type Bucket = Sequence[Piece]
"""Pieces of some weights, as many as travel at once."""


@checked("Media")
@attrs.frozen(eq=False)
class Media:
    """A part of a prompt other than tokens, for example a picture. Two parts are equal if their contents are.

    Args:
        kind: for example ``"image"``; a sampler lists its kinds in `nrl.backends.Capabilities`.
        data: of any shape, as the model's processor makes it.
        length: the number of tokens in the context.

    >>> import torch
    >>> Media("image", torch.zeros(2), 4) == Media("image", torch.zeros(2), 4)
    True
    """

    kind: str
    data: Tensor
    length: int = attrs.field(default=1, validator=attrs.validators.ge(0))
    _content: tuple[Any, ...] = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        data = self.data.detach().cpu()
        content = hashlib.blake2b(flat_bytes(data).numpy().tobytes(), digest_size=16).digest()
        identity = self.kind, self.length, tuple(data.shape), str(data.dtype), content
        object.__setattr__(self, "_content", identity)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Media) and self._content == other._content

    def __hash__(self) -> int:
        return hash(self._content)


type Chunks = Sequence[int | Media]
"""A prompt as a sampler takes it: token ids, and between them what is not tokens."""


def length_of(prompt: Chunks) -> int:
    """Return the number of tokens that a prompt takes in the context.

    >>> import torch
    >>> length_of([5, Media("image", torch.zeros(2), 4), 6])
    6
    """
    if Media not in map(type, prompt):
        return len(prompt)
    return sum(part.length if isinstance(part, Media) else 1 for part in prompt)


type ModelSource = str | os.PathLike[str] | Mapping[str, Any]
"""The source of a `Model`."""


def _source(value: ModelSource) -> str | Mapping[str, Any]:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


type Lora = str | Mapping[str, Any] | None
"""An adapter: a folder in peft's format, or arguments of ``peft.LoraConfig``; None: there is none."""

register_kind(
    Lora,
    lambda value: (
        "give a folder in peft's format, or a mapping with arguments of peft.LoraConfig, such as "
        '{"r": 8, "target_modules": "all-linear"}'
    ),
    lambda value: value is None or isinstance(value, str | Mapping),
)


@checked("Model")
@attrs.frozen(kw_only=False)
class Model:
    """A model as frozen data, which every backend builds in its own way.

    Args:
        source: a folder, a name on the Hugging Face hub, or a config as a mapping with ``model_type``, which gives a
            model with random weights.
        head: the function of the last hidden states. ``"lm"``: a distribution over the next token; ``"value"``: a
            number before each token, the expected return of the episode from there; ``"reward"``: a number for a row,
            from its last token. A folder without a value or reward head gets one of zeros.
        dtype: of the computation. Under ``"bfloat16"`` a trainer keeps its weights and moments in float32.
        lora: low-rank adapters on the linear layers, trained instead of the weights. Arguments of
            ``peft.LoraConfig``, such as ``{"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}``, or a folder in
            peft's format; None: all weights are trained.
        tokenizer: a folder, a hub name, or a transformers tokenizer; None: the tokenizer of ``source``.
        seed: of the random weights, where ``source`` is a config, and of a new adapter. The same seed gives the same
            weights everywhere.
        trust_remote_code: let Python files of the model or the tokenizer run, which some architectures need. The files
            have all of your rights. If false, a model with code is a `ModelError`.
        train_pad_embedding: train the input embedding of the pad token, which transformers freezes by
            ``nn.Embedding(padding_idx=)``. This matters where rows hold the pad token as a token of their own, for
            example where it also ends a turn. A head tied to the embedding is trained in full either way.

    Raises:
        ValueError: a field that cannot be used.

    >>> Model({"model_type": "qwen3", "vocab_size": 32}).dtype
    'float32'
    """

    source: str | Mapping[str, Any] = attrs.field(converter=_source)
    head: Literal["lm", "value", "reward"] = attrs.field(
        default="lm", validator=attrs.validators.in_(["lm", "value", "reward"])
    )
    dtype: Literal["float32", "bfloat16", "float64"] = attrs.field(
        default="float32", validator=attrs.validators.in_(["float32", "bfloat16", "float64"])
    )
    lora: Lora = None
    tokenizer: Any = None
    seed: int = 0
    trust_remote_code: bool = False
    train_pad_embedding: bool = False

    def __attrs_post_init__(self) -> None:
        if isinstance(self.source, Mapping) and "model_type" not in self.source:
            raise ArgumentError(
                f"Model: a config needs 'model_type' (such as 'qwen3'); found the keys {sorted(self.source)}"
            )

    @property
    def adapter(self) -> tuple[Any, ...] | None:
        """The identity of its adapter: an adapter of another model fits if this is equal. None: it has no adapter."""
        return None if self.lora is None else (self.source, self.seed, self.lora)


def _instead_of_source(value: Any) -> str:
    if hasattr(value, "to_dict"):  # a config of transformers
        return "give its content: nrl.Model(config.to_dict())"
    name = getattr(value, "name_or_path", "") or "folder or name on the hub"
    if hasattr(value, "state_dict"):
        return f"give where it was loaded from: nrl.Model({name!r}), which each process builds for itself"
    return "give a folder, a name on the Hugging Face hub, or a config as a mapping with model_type"


def _instead_of_model(value: Any) -> str:
    if isinstance(value, str | os.PathLike):
        return f"give nrl.Model({os.fspath(value)!r})"
    if hasattr(value, "to_dict") or isinstance(value, Mapping):
        return f"give nrl.Model({'config' if isinstance(value, Mapping) else 'config.to_dict()'})"
    name = getattr(value, "name_or_path", "") or "folder or name on the hub"
    if hasattr(value, "state_dict"):
        return f"give nrl.Model({name!r}): it says what to load, and each process loads it for itself"
    if hasattr(value, "convert_tokens_to_ids"):
        return f"give nrl.Model({name!r}, tokenizer=tokenizer)"
    return "give nrl.Model('folder or name on the hub')"


register_kind(
    ModelSource,
    _instead_of_source,
    lambda value: (
        isinstance(value, str | os.PathLike) or (isinstance(value, Mapping) and not hasattr(value, "to_dict"))
    ),
)
register_kind(Model, _instead_of_model)


_LEAST, _MOST = 1e-3, 1e3


def _in_range(sampling: "Sampling", attribute: "attrs.Attribute[Any]", value: float) -> None:
    if value != 0 and not _LEAST <= value <= _MOST:
        raise ArgumentError(
            f"Sampling: temperature is {value}; give 0, which is greedy, or a number from {_LEAST:g} to {_MOST:g}: "
            "beyond these float32 has no log-probabilities",
            "temperature",
        )


def _not_negative(sampling: "Sampling", attribute: "attrs.Attribute[Any]", value: int) -> None:
    if value < 0:
        raise ArgumentError(f"Sampling: top_k is {value}; give 0 for all tokens, or how many to keep", "top_k")


def _ids(value: int | Iterable[int]) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)


def _texts(value: str | Iterable[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


@checked("Sampling")
@attrs.frozen
class Sampling:
    """The options of sampling: temperature first, then top-k, then top-p, renormalised over the kept tokens.

    Args:
        temperature: the logits are divided by it, from 0.001 to 1000; 0 is greedy, with log-probabilities at
            temperature 1.
        top_k: keep the k most probable tokens; 0: all.
        top_p: keep the most probable tokens until their mass reaches this; 1: all.
        max_new_tokens: bound on the sampled tokens of a completion (of a turn, in an episode of several).
        stop_token_ids: tokens that end a completion, besides the model's own end-of-sequence tokens; one, or several.
        stop: texts that end a completion, with the token that completes one of them; one, or several.

    Raises:
        ValueError: a field out of its range.

    >>> Sampling(temperature=0, stop="END")
    Sampling(temperature=0, top_k=0, top_p=1.0, max_new_tokens=256, stop_token_ids=(), stop=('END',))
    """

    temperature: float = attrs.field(default=1.0, validator=[attrs.validators.ge(0), _in_range])
    top_k: int = attrs.field(default=0, validator=_not_negative)
    top_p: float = attrs.field(default=1.0, validator=[attrs.validators.gt(0), attrs.validators.le(1)])
    max_new_tokens: int = attrs.field(default=256, validator=attrs.validators.ge(1))
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=_ids)
    stop: tuple[str, ...] = attrs.field(
        default=(), converter=_texts, validator=attrs.validators.deep_iterable(attrs.validators.min_len(1))
    )


def _instead_of_sampling(value: Any) -> str:
    if isinstance(value, Mapping):
        return "give nrl.Sampling(**sampling)"
    number = isinstance(value, int | float)
    return f"give nrl.Sampling({f'temperature={value}' if number else 'temperature=1.0, max_new_tokens=256'})"


register_kind(Sampling, _instead_of_sampling)


class Completion(NamedTuple):
    """A sampler's answer to one prompt.

    Args:
        token_ids: ``[L]`` int64, the sampled tokens, with the stop token if one was sampled.
        logprobs: ``[L]`` float32, nats: of each token under the distribution that it was sampled from, so after the
            temperature, and renormalised over the kept tokens under top-k and top-p.
        truncated: a length limit ended the completion.
        version: the version of the sampling weights; the oldest, if the weights changed meanwhile.
        versions: ``[L]`` int64, of each token; None: the sampler gets no new weights while decoding.
        times: the number of requests to an engine or a server: more than one after a death, a restart or a failure.
        routes: ``[n, layers, k]`` int16, the experts of the first n tokens of prompt and completion in each layer with
            a router; n is all but the last token, which was no input yet. None: routes were not recorded.

    >>> import torch
    >>> Completion(torch.tensor([7, 2]), torch.tensor([-0.5, -0.1]), truncated=False, version=1).version
    1
    """

    token_ids: Tensor
    logprobs: Tensor
    truncated: bool
    version: int
    versions: Tensor | None = None
    times: int = 1
    routes: Tensor | None = None


_TOP_K = "top_k("


def top_k(k: int) -> str:
    """Return the name of the output of the k most probable tokens at each place; forward only.

    >>> top_k(8)
    'top_k(8)'
    """
    return f"{_TOP_K}{k})"


def top_k_of(needs: Collection[str]) -> int | None:
    """Return the k of the `top_k` among the names of outputs; None: there is none.

    >>> top_k_of({"logprobs", top_k(8)}), top_k_of({"logprobs"})
    (8, None)
    """
    return next((int(name.removeprefix(_TOP_K).removesuffix(")")) for name in needs if name.startswith(_TOP_K)), None)


def outputs_of(needs: Collection[str]) -> list[str]:
    """Return the names of the outputs that needs stand for, in order: their own, and two for `top_k`.

    >>> outputs_of({"values"}), outputs_of({"logprobs", top_k(8)})
    (['values'], ['logprobs', 'top_k_ids', 'top_k_logprobs'])
    """
    likely = set() if top_k_of(needs) is None else {"top_k_ids", "top_k_logprobs"}
    return sorted({name for name in needs if not name.startswith(_TOP_K)} | likely)
