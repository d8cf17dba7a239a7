"""Building transformers models and tokenizers from `Model`; the one loading path of every backend.

Imports transformers inside its functions, so that importing a backend stays cheap.
"""

import contextlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nrl.backends.base import Model
from nrl.errors import ModelError
from nrl.log import waiting

__all__ = [
    "Loading",
    "build",
    "check_arrived",
    "check_weight",
    "context_length",
    "end_tokens",
    "head_weight",
    "load_config",
    "load_tensors",
    "load_tokenizer",
    "named_tensors",
    "save_model",
    "weight_name",
    "weights",
]


_WRAPPED = re.compile(r"(\.)base_layer\.|(\.lora_[AB]\.)default\.")
_TOKENIZERS = ("tokenizer*", "vocab*", "*.model")


def build(model: Model, *, dtype: torch.dtype | None = None) -> nn.Module:
    """The transformers model that ``model`` names, in its dtype unless ``dtype`` says otherwise; without its adapter.

    `nrl.backends.models.lora.build` makes it with one. Dropout is off, so that a policy has ratio 1 to itself. Random
    weights depend on ``model.seed`` alone. A value head is transformers' token classification of one label, a reward
    head its sequence classification.

    Raises:
        ModelError: there is no such folder, name or config, or it is no causal language model, or has no such head.

    >>> tiny = {
    ...     "model_type": "qwen3",
    ...     "vocab_size": 32,
    ...     "hidden_size": 16,
    ...     "num_hidden_layers": 1,
    ...     "head_dim": 8,
    ...     "num_attention_heads": 2,
    ...     "num_key_value_heads": 1,
    ...     "intermediate_size": 32,
    ... }
    >>> build(Model(tiny)).config.vocab_size
    32
    """
    import transformers

    dtype = dtype or getattr(torch, model.dtype)
    kind, wanted = _KINDS[model.head]
    auto: Any = getattr(transformers, kind)
    labels = {} if model.head == "lm" else {"num_labels": 1}
    try:
        if isinstance(model.source, Mapping):
            fields = dict(model.source) | labels
            config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(model.seed)
                module = auto.from_config(config, dtype=torch.float32)
            for parameter in module.parameters():  # not buffers: rotary frequencies stay exact
                parameter.data = parameter.data.to(dtype)
            missing = {name for name in module.state_dict() if _is_score(name)}
        else:
            with _quiet(model.head != "lm"), _counting(f"loading the weights of {model.source}"):
                module, info = auto.from_pretrained(
                    model.source,
                    dtype=dtype,
                    output_loading_info=True,
                    trust_remote_code=model.trust_remote_code,  # None would ask on stdin
                    **labels,
                )
            missing = {name for name in info["missing_keys"] if _is_score(name)}
            if others := set(info["missing_keys"]) - missing:  # filled in at random, with no more than a warning
                raise ValueError(f"its files lack the weights {_some(sorted(others))}")
    except Exception as error:  # transformers and what it reads files with raise all kinds
        raise ModelError(f"Model(source={_name(model)}): {_reason(model.source, error, wanted)}") from error
    if model.head != "lm":
        _check_score(module)
        for name, parameter in module.named_parameters():
            if name in missing:
                nn.init.zeros_(parameter)
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        if isinstance(getattr(part, "attention_dropout", None), float):
            part.attention_dropout = 0.0
    built: nn.Module = module
    return built


_KINDS = {
    "lm": ("AutoModelForCausalLM", "causal language model"),
    "value": ("AutoModelForTokenClassification", "language model with a value head"),
    "reward": ("AutoModelForSequenceClassification", "language model with a reward head"),
}
_SCORE = "score"
"""What transformers calls the head of a model that classifies."""
_HEADS = ("lm_head", _SCORE)


def _is_score(name: str) -> bool:
    return name.split(".")[0] == _SCORE


def _check_score(module: nn.Module) -> None:
    head = getattr(module, _SCORE, None)
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise ModelError(
            f"{type(module).__name__}: it has no linear layer '{_SCORE}' of one output, which value and reward heads "
            "are; take another architecture"
        )


@contextlib.contextmanager
def _quiet(wanted: bool) -> Iterator[None]:
    """Without the report that a language model's head was left out, and a new one made, as was asked for."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    if wanted:
        logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _name(model: Model) -> str:
    return f"a {model.source['model_type']} config" if isinstance(model.source, Mapping) else repr(model.source)


def _reason(source: Any, error: Exception, wanted: str) -> str:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if "trust_remote_code=True" in str(error):
        return (
            "it comes with Python code of its own, which is not run unless you say so; read it, and give "
            "Model(..., trust_remote_code=True), which on a command line is trust_remote_code=true"
        )
    if isinstance(source, str) and (source.startswith((".", "/", "~")) or Path(source).exists()):
        if not Path(source).exists():
            return "there is no such folder; give a folder with config.json and weights, a hub name, or a config"
        return f"the folder cannot be loaded as a {wanted}: {first}"
    if isinstance(source, str):
        return f"neither a folder here nor a {wanted} that the Hugging Face hub gives: {first}"
    return f"the config does not make a {wanted}: {first}"


def save_model(module: nn.Module, folder: str | Path) -> None:
    """Write config and weights in Hugging Face format."""
    # Whoever calls this wants it written; transformers by itself writes nothing in all processes of a group but one
    module.should_save_on_this_rank = lambda is_main_process: is_main_process  # type: ignore[assignment]
    try:
        with _counting(f"writing the model to {folder}"):
            module.save_pretrained(folder)  # type: ignore[operator]
    finally:
        del module.should_save_on_this_rank


@contextlib.contextmanager
def _counting(what: str) -> Iterator[None]:
    """Without transformers' progress bars, which fill logs and lie across a run's own; a line says what takes long."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    with waiting(what) as far:

        def bar(made: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
            counted = options.get("desc") == "Loading weights" and args
            return _counted(args[0], far) if counted else made(*args, **options)

        before = logging.set_tqdm_hook(bar)
        try:
            yield
        finally:
            logging.set_tqdm_hook(before)
            if shown:
                logging.enable_progress_bar()


def _counted(items: Any, far: Callable[[int, int], None]) -> Iterator[Any]:
    for done, item in enumerate(items):
        far(done, len(items))
        yield item


def load_config(model: Model) -> tuple[Any, Any]:
    """The transformers config of ``model``'s language model, and its generation config; no weights are loaded.

    Raises:
        ModelError: there is none.

    >>> config, generation = load_config(Model({"model_type": "qwen3", "vocab_size": 32, "eos_token_id": 3}))
    >>> config.vocab_size, generation.eos_token_id
    (32, 3)
    """
    import transformers

    try:
        if isinstance(model.source, Mapping):
            fields = dict(model.source)
            config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
            return config.get_text_config(), transformers.GenerationConfig.from_model_config(config)
        config = transformers.AutoConfig.from_pretrained(model.source, trust_remote_code=model.trust_remote_code)
        try:
            generation = transformers.GenerationConfig.from_pretrained(model.source)
        except OSError:  # many models have none
            generation = transformers.GenerationConfig.from_model_config(config)
    except Exception as error:  # transformers and what it reads files with raise all kinds
        raise ModelError(
            f"Model(source={_name(model)}): {_reason(model.source, error, 'causal language model')}"
        ) from error
    return config.get_text_config(), generation


def load_tokenizer(model: Model) -> Any:
    """The transformers tokenizer of ``model``.

    Raises:
        ModelError: there is none.
    """
    import transformers

    if model.tokenizer is not None and not isinstance(model.tokenizer, str | Path):
        return model.tokenizer
    source = model.tokenizer or model.source
    if isinstance(source, Mapping):
        raise ModelError(
            "Model: a model made from a config has no tokenizer of its own; give one with Model(config, "
            "tokenizer=...), a folder, a hub name or a transformers tokenizer"
        )
    try:
        if Path(source).is_dir() and not any(file for kind in _TOKENIZERS for file in Path(source).glob(kind)):
            raise ValueError("it has no tokenizer files; save a tokenizer into it, or give Model(..., tokenizer=...)")
        return transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=model.trust_remote_code)
    except Exception as error:
        raise ModelError(f"Model: the tokenizer of '{source}': {_reason(source, error, 'tokenizer')}") from error


def context_length(module: nn.Module) -> int:
    """The most tokens that a row may have: what the model's positions reach.

    Raises:
        ModelError: the config does not say.
    """
    limit = getattr(module.config, "max_position_embeddings", None)
    if not isinstance(limit, int):
        raise ModelError(
            f"{type(module).__name__}: the config has no max_position_embeddings, so its context is unknown"
        )
    return limit


def end_tokens(generation: Any, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end a completion: the tokenizer's and the generation config's (None: there is none)."""
    found = {tokenizer.eos_token_id}
    extra = getattr(generation, "eos_token_id", None)
    found.update(extra if isinstance(extra, list | tuple) else [extra])
    return tuple(sorted(token for token in found if token is not None))


def head_weight(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight ``[V, H]`` and bias ``[V]`` of a language-model head; ``[1, H]`` and ``[1]`` of another one."""
    head = getattr(module, _SCORE, None) or module.get_output_embeddings()  # type: ignore[operator]
    return head.weight, getattr(head, "bias", None)


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by their Hugging Face names, those of an adapter by the names in its files."""
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

    Of a model of another head all goes along but the head; value and reward heads share their weight.

    Args:
        own: `weights`, which are replaced.
        tensors: Hugging Face name and value, of any dtype and device; of tied weights one name is enough.
        who: how errors name the caller.

    Raises:
        ModelError: a name that the model does not have, a wrong shape, weights that are missing, or tied ones that
            differ. Some weights may have been replaced by then.
    """
    loading = Loading(own, who)
    loading.add(_for_head(own, tensors))
    loading.end()


def _for_head(own: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Weights of a model of maybe another head: without what is not here; what only is here stays as it is."""
    came = set()
    for name, tensor in tensors:
        if name in own or name.split(".")[0] not in _HEADS:
            came.add(name)
            yield name, tensor
    yield from ((name, tensor) for name, tensor in own.items() if _is_score(name) and name not in came)


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
        """Copy these in."""
        for name, tensor in tensors:
            check_weight(name, tensor, self._shapes, self._who)
            held = self._own[name]
            if self._waiting.pop(held.data_ptr(), None) is not None:
                held.copy_(tensor)
            elif not torch.equal(held, tensor.to(held)):
                raise ModelError(
                    f"{self._who}: '{name}' came twice with different values, or is tied to another weight here and "
                    f"not where it came from; {_SAME}"
                )

    def end(self) -> None:
        """See that nothing is missing."""
        check_arrived(self._waiting.values(), self._who)


_SAME = "build both sides from the same Model"


def check_weight(name: str, tensor: Tensor, shapes: Mapping[str, tuple[int, ...]], who: str) -> None:
    """See that a weight is one of a model whose weights have these names and shapes.

    Raises:
        ModelError: there is none of its name, or that has another shape.

    >>> check_weight("norm", torch.zeros(2), {"norm": (2,)}, "receive")
    """
    if name not in shapes:
        raise ModelError(f"{who}: the model has no weight '{name}'; it has {_some(shapes)}; {_SAME}")
    if shapes[name] != tuple(tensor.shape):
        raise ModelError(
            f"{who}: '{name}' has shape {list(tensor.shape)}, and here it is {list(shapes[name])}; {_SAME}"
        )


def check_arrived(missing: Collection[str], who: str) -> None:
    """See that no weight is missing.

    Raises:
        ModelError: some are.

    >>> check_arrived([], "receive")
    """
    if missing:
        raise ModelError(f"{who}: {len(missing)} weights did not arrive: {_some(missing)}; send all of them")


def _some(names: Iterable[str], most: int = 5) -> str:
    found = list(names)
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")
