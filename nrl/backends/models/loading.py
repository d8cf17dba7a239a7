"""Building transformers models and tokenizers from `Model`; the one loading path of every backend.

Imports transformers inside its functions, so that importing a backend stays cheap.
"""

import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nrl.backends.models.named_weights import SCORE, a_few, is_score
from nrl.backends.types import Model
from nrl.errors import ModelError
from nrl.log import waiting

__all__ = [
    "GENERATION",
    "build",
    "display_name",
    "dropout_off",
    "end_tokens",
    "files",
    "finish",
    "from_config",
    "frozen_token",
    "load_config",
    "load_configs",
    "load_tokenizer",
    "locate_source",
    "save_model",
    "skeleton",
]

GENERATION = "generation_config.json"
"""The file of a generation config."""

_TOKENIZERS = ("tokenizer*", "vocab*", "*.model")
_WANTED, _UNWANTED = ["*.json", "*.safetensors"], ["original/*", "consolidated*"]  # files on the hub


def build(model: Model, *, dtype: torch.dtype | None = None) -> nn.Module:
    """Build the transformers model that ``model`` names, without its adapter.

    `nrl.backends.models.lora.build` adds the adapter. Dropout is off, so that a policy has ratio 1 to itself. Random
    weights depend on ``model.seed`` alone. A value head is transformers' token classification of one label, a reward
    head its sequence classification.

    Args:
        model: what to build.
        dtype: of its weights; None: the model's.

    Raises:
        ModelError: there is no such folder, name or config, or it is no causal language model, or has no such head.

    >>> from nrl import tiny
    >>> build(tiny.model(head="value")).score.out_features
    1
    """
    dtype = dtype or getattr(torch, model.dtype)
    auto, labels, kind_name = _kind(model)
    try:
        if isinstance(model.source, Mapping):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(model.seed)
                module = from_config(model)
            for parameter in module.parameters():  # not buffers: rotary frequencies stay exact
                parameter.data = parameter.data.to(dtype)
            missing = {name for name in module.state_dict() if is_score(name)}
        else:
            with _quiet(model.head != "lm"), _replace_progress_bars(f"loading the weights of {model.source}"):
                module, info = auto.from_pretrained(
                    locate_source(model.source),
                    dtype=dtype,
                    output_loading_info=True,
                    trust_remote_code=model.trust_remote_code,  # None would make transformers ask on stdin.
                    **labels,
                )
            missing = {name for name in info["missing_keys"] if is_score(name)}
            if lacking := set(info["missing_keys"]) - missing:  # transformers has filled them at random, and warned
                raise ValueError(f"its files lack the weights {a_few(sorted(lacking))}")
    except Exception as error:  # transformers, and libraries that it reads files with, raise all kinds
        raise ModelError(f"Model(source={display_name(model)}): {_reason(model.source, error, kind_name)}") from error
    for name, parameter in module.named_parameters():
        if name in missing:
            nn.init.zeros_(parameter)
    return finish(module, model)


def _kind(model: Model) -> tuple[Any, dict[str, int], str]:
    """Return the class of transformers for a model with this head, its arguments, and the name of such a model."""
    import transformers

    kind, kind_name = _KINDS[model.head]
    return getattr(transformers, kind), {} if model.head == "lm" else {"num_labels": 1}, kind_name


def from_config(model: Model) -> Any:
    """Build the model of a config as transformers does, in float32; it draws from torch's own generator.

    Raises:
        Exception: of any kind, from transformers.
    """
    import transformers

    auto, labels, _ = _kind(model)
    fields = dict(model.source) | labels  # type: ignore[arg-type]
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    return auto.from_config(config, dtype=torch.float32)


def finish(module: Any, model: Model) -> nn.Module:
    """Return the model without dropout, its pad embedding frozen or not, its experts computing in any dtype.

    torch has no grouped products in float64, so there experts are computed one after the other.

    Raises:
        ModelError: it has no such head.
    """
    if model.head != "lm":
        _check_score(module)
    if model.train_pad_embedding:
        module.get_input_embeddings().padding_idx = None
    if module.dtype == torch.float64 and hasattr(module, "set_experts_implementation"):
        module.set_experts_implementation("eager")
    return dropout_off(module)


def dropout_off(module: nn.Module) -> nn.Module:
    """Let a model compute the same in training as else."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        if isinstance(getattr(part, "attention_dropout", None), float):
            part.attention_dropout = 0.0  # type: ignore[assignment]
    return module


def frozen_token(model: Model) -> int | None:
    """Return the token whose input embedding is not trained, although others are: the pad token in most models.

    None: there is no such token, or ``model.lora`` trains an adapter alone.

    >>> from nrl import tiny
    >>> frozen_token(tiny.model(pad_token_id=5)), frozen_token(tiny.model(pad_token_id=5, train_pad_embedding=True))
    (5, None)
    """
    if model.lora is not None:
        return None
    return getattr(skeleton(model).get_input_embeddings(), "padding_idx", None)  # type: ignore[operator]


def files(model: Model) -> Path | None:
    """Return the folder of a model's files, fetched once a node from the hub; None: the source is a config.

    Raises:
        Exception: of any kind; the hub does not give it.
    """
    from huggingface_hub import snapshot_download

    if isinstance(model.source, Mapping):
        return None
    if Path(model.source).is_dir():
        return Path(model.source)
    patterns = [*_WANTED, "*.py"] if model.trust_remote_code else _WANTED
    return Path(snapshot_download(str(model.source), allow_patterns=patterns, ignore_patterns=_UNWANTED))


def locate_source(source: str | Path) -> str:
    """Return where transformers reads: a folder, a name of the hub, or the cached copy while the hub is unreachable.

    It asks the hub once: transformers itself asks again for each file, for a minute and longer.
    """
    from huggingface_hub import constants, get_session, snapshot_download

    if Path(source).exists():
        return str(source)
    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        return str(source)
    except Exception as unreachable:  # Its HTTP client may be any.
        with contextlib.suppress(Exception):
            return snapshot_download(str(source), local_files_only=True)
        raise OSError(
            f"it cannot be reached ({unreachable}), and nothing of this name was fetched before; give a folder that is "
            "there, or a hub name where there is a network"
        ) from unreachable


def skeleton(model: Model, *, dtype: torch.dtype | None = None) -> nn.Module:
    """Build the model with parameters that take no memory; buffers have their values.

    >>> from nrl import tiny
    >>> next(skeleton(tiny.model()).parameters()).device
    device(type='meta')
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig, GenerationConfig

    auto, labels, kind_name = _kind(model)
    try:
        folder = files(model)
        if isinstance(model.source, Mapping):
            fields = dict(model.source) | labels
            config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        else:
            config = AutoConfig.from_pretrained(str(folder), trust_remote_code=model.trust_remote_code, **labels)
        with init_empty_weights(include_buffers=False):
            module = auto.from_config(
                config, dtype=dtype or getattr(torch, model.dtype), trust_remote_code=model.trust_remote_code
            )
        module.tie_weights()  # accelerate has untied them
        if folder is not None and module.can_generate():  # transformers reads it where it loads weights.
            alone = (folder / GENERATION).is_file()
            within: dict[str, Any] = {"config_file_name": "config.json", "_from_model_config": True}
            with contextlib.suppress(Exception):  # it has a default where the file cannot be used
                module.generation_config = GenerationConfig.from_pretrained(folder, **({} if alone else within))
    except Exception as error:  # transformers raises all kinds
        raise ModelError(f"Model(source={display_name(model)}): {_reason(model.source, error, kind_name)}") from error
    return finish(module, model)


_KINDS = {
    "lm": ("AutoModelForCausalLM", "causal language model"),
    "value": ("AutoModelForTokenClassification", "language model with a value head"),
    "reward": ("AutoModelForSequenceClassification", "language model with a reward head"),
}


def _check_score(module: nn.Module) -> None:
    head = getattr(module, SCORE, None)
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise ModelError(
            f"{type(module).__name__}: it has no linear layer '{SCORE}' of one output, which value and reward heads "
            "are; take another architecture"
        )


@contextlib.contextmanager
def _quiet(silence: bool) -> Iterator[None]:
    """Keep transformers from reporting, if ``silence``, that it left out one head and made a new one, as it should."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    if silence:
        logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def display_name(model: Model) -> str:
    """Return the name of a model in messages."""
    return f"a {model.source['model_type']} config" if isinstance(model.source, Mapping) else repr(model.source)


def _reason(source: Any, error: Exception, kind_name: str) -> str:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if "trust_remote_code=True" in str(error):
        return (
            "it comes with Python code of its own, which is not run unless you say so; read it, and give "
            "Model(..., trust_remote_code=True), which on a command line is trust_remote_code=true"
        )
    if isinstance(source, str) and (source.startswith((".", "/", "~")) or Path(source).exists()):
        if not Path(source).exists():
            problem = f"there is no such folder on host {socket.gethostname()}"
            return f"{problem}; give a folder with config.json and weights, a hub name, or a config"
        return f"the folder cannot be loaded as a {kind_name}: {first}"
    if isinstance(source, str):
        return f"neither a folder here nor a {kind_name} that the Hugging Face hub gives: {first}"
    return f"the config does not make a {kind_name}: {first}"


def save_model(module: nn.Module, folder: str | Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Write config and weights in Hugging Face format; ``weights`` are those to write, and None: the model's own.

    The generation config is written as it is. transformers refuses to write one that contradicts itself, such as
    ``do_sample=False`` with a ``temperature``, although it reads it.
    """
    from transformers import GenerationConfig

    # In a process group, transformers by itself writes in the first process alone
    module.should_save_on_this_rank = lambda is_main_process: is_main_process  # type: ignore[assignment]
    model: Any = module
    generation = model.generation_config if model.can_generate() else None
    try:
        if generation is not None:
            model.generation_config = GenerationConfig()
        with _replace_progress_bars(f"writing the model to {folder}"):
            model.save_pretrained(folder, state_dict=weights)
        if generation is not None:
            generation.to_json_file(Path(folder) / GENERATION, use_diff=True, keys_to_pop=["compile_config"])
    finally:
        del module.should_save_on_this_rank
        if generation is not None:
            model.generation_config = generation


@contextlib.contextmanager
def _replace_progress_bars(text: str) -> Iterator[None]:
    """Replace transformers' progress bars, which fill logs and disturb a run's own, by a line where it takes long."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    with waiting(text) as progress:

        def bar(make_bar: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
            counted = options.get("desc") == "Loading weights" and args
            return _report_progress(args[0], progress) if counted else make_bar(*args, **options)

        before = logging.set_tqdm_hook(bar)
        try:
            yield
        finally:
            logging.set_tqdm_hook(before)
            if shown:
                logging.enable_progress_bar()


def _report_progress(items: Any, progress: Callable[[int, int], None]) -> Iterator[Any]:
    for done, item in enumerate(items):
        progress(done, len(items))
        yield item


def load_config(model: Model) -> tuple[Any, Any]:
    """Load the transformers config of ``model``'s language model, and its generation config, without its weights.

    Raises:
        ModelError: there is no config.

    >>> config, generation = load_config(Model({"model_type": "qwen3", "vocab_size": 32, "eos_token_id": 3}))
    >>> config.vocab_size, generation.eos_token_id
    (32, 3)
    """
    config, generation = load_configs(model)
    return config.get_text_config(), generation


def load_configs(model: Model) -> tuple[Any, Any]:
    """Load the config of the whole model, which may read more than text, and its generation config."""
    import transformers

    try:
        if isinstance(model.source, Mapping):
            fields = dict(model.source)
            config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
            return config, transformers.GenerationConfig.from_model_config(config)
        source = locate_source(model.source)
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=model.trust_remote_code)
        try:
            generation = transformers.GenerationConfig.from_pretrained(source)
        except OSError:  # many models have none
            generation = transformers.GenerationConfig.from_model_config(config)
    except Exception as error:  # transformers, and libraries that it reads files with, raise all kinds
        raise ModelError(
            f"Model(source={display_name(model)}): {_reason(model.source, error, 'causal language model')}"
        ) from error
    return config, generation


def load_tokenizer(model: Model) -> Any:
    """Load the transformers tokenizer of ``model``.

    Raises:
        ModelError: it has no tokenizer.
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
        return transformers.AutoTokenizer.from_pretrained(
            locate_source(source), trust_remote_code=model.trust_remote_code
        )
    except Exception as error:
        raise ModelError(f"Model: the tokenizer of '{source}': {_reason(source, error, 'tokenizer')}") from error


def end_tokens(generation: Any, tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end a completion, of the tokenizer and of the generation config, which may be None."""
    tokens = {tokenizer.eos_token_id}
    extra = getattr(generation, "eos_token_id", None)
    tokens.update(extra if isinstance(extra, list | tuple) else [extra])
    return tuple(sorted(token for token in tokens if token is not None))
