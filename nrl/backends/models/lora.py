"""LoRA by the peft library: adapters beside the linear layers of a transformers model.

A layer computes with W + s B A; A and B are trained and W is not. The model stays a transformers model, whose linear
layers peft has wrapped. Its weights keep their names, and those of the adapter have the names in peft's files. peft is
imported inside functions.
"""

import copy
import dataclasses
import difflib
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import attrs
import torch
from torch import Tensor, nn

from nrl.backends.models import lazy_weights, loading, named_weights, shards
from nrl.backends.types import Bucket, Model, Piece
from nrl.errors import ModelError

__all__ = [
    "LoraReceiver",
    "adapter",
    "build",
    "build_lazy",
    "build_without_weights",
    "check_base",
    "clear",
    "export",
    "is_trained",
    "layers",
    "merge_weights",
    "read_adapter",
    "scales",
    "select_published",
    "select_weights",
    "signature",
    "skeleton",
    "unwrap",
]

_CONFIG, _FILE, _PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
_GIVEN = {
    "r",
    "lora_alpha",
    "target_modules",
    "exclude_modules",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "layers_to_transform",
    "layers_pattern",
    "init_lora_weights",
}
"""The arguments of ``peft.LoraConfig`` that make plain LoRA."""
_ABOUT = {
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "peft_version",
    "revision",
}
"""Further fields of a folder's config, which are ignored."""
_CHECKED = {"modules_to_save", "peft_type", "task_type"}
_TASKS = {"lm": "CAUSAL_LM", "value": "TOKEN_CLS", "reward": "SEQ_CLS"}
_SUMS: WeakKeyDictionary[nn.Module, tuple[dict[str, int], dict[str, float]]] = WeakKeyDictionary()
"""For each model, how often each weight of the base had been written to, and its sum then."""
_HEADS = {"score", "classifier"}  # peft's names of heads that it trains with an adapter


def build(model: Model, *, dtype: torch.dtype | None = None) -> nn.Module:
    """Build a model as `nrl.backends.models.loading.build`, and its adapter, if it has one.

    A new adapter changes nothing at first, as B is 0. With an adapter, only that and a value or reward head require
    gradients.

    Raises:
        ModelError: there is no such model or adapter, or the adapter is more than plain LoRA.

    >>> from nrl import tiny
    >>> module = build(tiny.model(lora={"r": 2, "target_modules": ["q_proj"]}))
    >>> sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    1024
    """
    return _add_adapter(loading.build(model, dtype=dtype), model)


def build_lazy(model: Model, *, dtype: torch.dtype | None = None) -> lazy_weights.LazyModel | None:
    """Build a model with a base whose weights are still to be read; see `nrl.backends.models.lazy_weights.build_lazy`.

    A value or reward head is read now if an adapter's folder has one, which replaces it.
    """
    lazy = lazy_weights.build_lazy(model, dtype=dtype)
    if lazy is not None:
        head: Any = lazy.module.score if isinstance(model.lora, str) and model.head != "lm" else nn.Identity()
        for name, _ in list(head.named_parameters()):
            setattr(head, name, nn.Parameter(lazy.load(f"{named_weights.SCORE}.{name}")))
        linear = [part for part in lazy.module.modules() if isinstance(part, nn.Linear)]
        unread_weights = {part: part.weight for part in linear if part.weight.is_meta}
        for (
            part,
            weight,
        ) in unread_weights.items():  # peft makes an adapter where its layer is: there, and without memory
            part.weight = nn.Parameter(torch.zeros((), dtype=weight.dtype).expand(weight.shape))
        _add_adapter(lazy.module, model)
        for part, weight in unread_weights.items():
            part.weight = weight.requires_grad_(part.weight.requires_grad)
    return lazy


def build_without_weights(model: Model, *, dtype: torch.dtype | None = None) -> lazy_weights.LazyModel:
    """Build a model whose weights are never read: they come from elsewhere, or do not matter."""
    return lazy_weights.without_weights(skeleton(model, dtype=dtype))


def _add_adapter(module: nn.Module, model: Model) -> nn.Module:
    """Add its adapter to a model, if it has one."""
    if model.lora is not None:
        _wrap(module, model)
        if isinstance(model.lora, str):
            caller = f"Model(lora='{model.lora}')"
            shards.fill(shards.full_shards(select_weights(module, is_trained)), read_adapter(model.lora), caller=caller)
    return module


def skeleton(model: Model, *, dtype: torch.dtype | None = None) -> nn.Module:
    """Build a model with parameters that take no memory; see `nrl.backends.models.loading.skeleton`.

    >>> from nrl import tiny
    >>> found = skeleton(tiny.model(lora={"r": 2, "target_modules": ["q_proj"]}))
    >>> {parameter.device.type for parameter in found.parameters()}
    {'meta'}
    """
    module = loading.skeleton(model, dtype=dtype)
    if model.lora is not None:
        with torch.device("meta"):
            _wrap(module, model)
    return module


def layers(module: nn.Module) -> dict[str, Any]:
    """Return the layers that have an adapter, by name."""
    return {name: part for name, part in module.named_modules() if hasattr(part, "base_layer")}


def is_trained(name: str) -> bool:
    """Return whether a weight of a model with an adapter is trained: of the adapter, or of a value or reward head.

    >>> is_trained("q_proj.lora_B.weight"), is_trained("score.weight"), is_trained("q_proj.weight")
    (True, True, False)
    """
    return _is_of_adapter(name) or name.startswith("score.")


def _is_of_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def merge_weights(
    module: nn.Module,
    piece: Callable[[str, Tensor], Piece] = shards.full_shard,
    gather: Callable[[Tensor], Tensor] = _identity,
) -> Iterator[Piece]:
    """Yield the weights of a model with its adapters added, one at a time.

    Args:
        module: with adapters or without.
        piece: what this process gives of a weight.
        gather: makes a whole tensor of one that is sharded.
    """
    adapted = {f"{named_weights.weight_name(name)}.weight": layer for name, layer in layers(module).items()}
    for name, tensor in named_weights.named_tensors(module):
        if not _is_of_adapter(name):
            shard = piece(name, tensor)
            if name in adapted:
                shard = attrs.evolve(shard, tensor=shard.tensor + _delta(adapted[name], shard.index, gather))
            yield shard


def _delta(layer: Any, index: tuple[slice, ...], gather: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute what an adapter adds to a block of the weight of its layer."""
    a, b = (gather(part["default"].weight.detach()) for part in (layer.lora_A, layer.lora_B))
    rows, columns = index
    delta: Tensor = layer.scaling["default"] * (b[rows] @ a[:, columns])
    return delta


def adapter(module: nn.Module, piece: Callable[[str, Tensor], Piece] = shards.full_shard) -> Iterator[Piece]:
    """Yield the trained weights of a model with an adapter, one at a time; ``piece`` is as for `merge_weights`."""
    return (piece(name, tensor) for name, tensor in named_weights.named_tensors(module) if is_trained(name))


def select_weights(module: nn.Module, is_wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """Return the weights of a model that have wanted names."""
    return {name: tensor for name, tensor in named_weights.weights(module).items() if is_wanted(name)}


def select_published(module: nn.Module) -> dict[str, Tensor]:
    """Return the weights that a publish replaces in a sampler's model: of its adapter, if it has one, or all."""
    return select_weights(module, is_trained) if layers(module) else named_weights.weights(module)


class LoraReceiver:
    """A receiver of the adapter of a model on the same base, or of all weights under a fresh adapter.

    Satisfies `nrl.backends.engine.WeightReceiver`. The first weight that comes decides between the two. The weights may
    be of a model with another head: then all but the head is used.

    Args:
        select: returns this process's pieces of the weights with wanted names, which are then filled.
        clear: sets each B to 0.
        caller: the name of the caller in errors.
    """

    def __init__(
        self,
        select: Callable[[Callable[[str], bool]], Mapping[str, Piece | Sequence[Piece]]],
        clear: Callable[[], None],
        caller: str,
    ) -> None:
        self._own, self._clear, self._who = select, clear, caller
        self._filling: shards.ShardLoader | None = None

    def add(self, bucket: Bucket) -> None:
        """Copy some weights into the model."""
        if bucket:
            self._choose_loader(any(_is_of_adapter(piece.name) for piece in bucket)).add(bucket)

    def end(self) -> None:
        """Check that all weights have come."""
        self._choose_loader(False).end()

    @torch.no_grad()
    def _choose_loader(self, alone: bool) -> shards.ShardLoader:
        if self._filling is None:
            is_wanted = is_trained if alone else lambda name: not _is_of_adapter(name)
            self._filling = shards.ShardLoader(self._own(is_wanted), self._who, other_head=True)
            if not alone:
                self._clear()
        return self._filling


@torch.no_grad()
def clear(module: nn.Module) -> None:
    """Set each B of a model's adapter to 0: the adapter then changes nothing."""
    for layer in layers(module).values():
        layer.lora_B["default"].weight.zero_()


def signature(module: nn.Module, gather: Callable[[Tensor], Tensor] = _identity) -> dict[str, float]:
    """Compute numbers that tell one base from another: the sum of each weight, and the scale of each adapter.

    A base is summed up once, as it does not change while an adapter is trained. ``gather`` is as for `merge_weights`.
    """
    base = {name: tensor for name, tensor in named_weights.named_tensors(module) if not is_trained(name)}
    writes = {name: tensor._version for name, tensor in base.items()}  # torch counts them
    seen, sums = _SUMS.get(module, ({}, {}))
    if writes != seen:
        sums = {name: float(gather(tensor.sum(dtype=torch.float64))) for name, tensor in base.items()}
        _SUMS[module] = writes, sums
    return sums | scales(module)


def scales(module: nn.Module) -> dict[str, float]:
    """Return the scales of adapters, by their names in a `signature`."""
    return {f"scaling of {name}": layer.scaling["default"] for name, layer in layers(module).items()}


def check_base(actual: Mapping[str, float], expected: Mapping[str, float]) -> None:
    """Check that an adapter is on the base of its checkpoint.

    Args:
        actual: the `signature` of this base.
        expected: that of the saved one.

    Raises:
        ModelError: they differ.
    """
    for name, value in expected.items():
        if not math.isclose(actual.get(name, math.nan), value, rel_tol=1e-6, abs_tol=1e-6):
            raise ModelError(
                f"restore: an adapter was saved without its base, and here is another: the sum or scale of '{name}' "
                f"was {value:g}, and is {actual.get(name, math.nan):g}; give the Model that it was saved with"
            )


def unwrap(module: nn.Module) -> nn.Module:
    """Take the adapter off a model, in place."""
    for name, layer in layers(module).items():
        module.set_submodule(name, layer.base_layer)
    if hasattr(module, "peft_config"):
        del module.peft_config
    return module


def export(module: nn.Module, tensors: Mapping[str, Tensor], model: Model, folder: Path) -> None:
    """Write an adapter in peft's format.

    Args:
        module: the model with the adapter; its weights are not read.
        tensors: of the adapter.
        model: that ``module`` was built from.
        folder: for the files.
    """
    from safetensors.torch import save_file

    config: Any = copy.copy(module.peft_config["default"])  # type: ignore[index]
    config.base_model_name_or_path = model.source if isinstance(model.source, str) else None
    config.task_type, config.inference_mode = _TASKS[model.head], True
    config.modules_to_save = None if model.head == "lm" else ["score"]
    config.save_pretrained(str(folder))
    save_file({_PREFIX + name: tensor.contiguous() for name, tensor in tensors.items()}, folder / _FILE)


def _wrap(module: Any, model: Model) -> None:
    """Let peft wrap the layers that ``model.lora`` names, and freeze the base."""
    from peft import inject_adapter_in_model

    if getattr(module.config, "quantization_config", None):
        raise _make_error(model, "the base is quantized, so that merged weights would be rounded; give one that is not")
    config = _make_config(model)
    names = [f".{name}" for name, _ in module.named_modules()]
    targets = config.target_modules if isinstance(config.target_modules, set) else set()  # or a pattern
    if missed := sorted(target for target in targets if not any(name.endswith(f".{target}") for name in names)):
        linear = {name.rpartition(".")[2] for name, part in module.named_modules() if isinstance(part, nn.Linear)}
        available = f"its linear layers are named {', '.join(sorted(linear))}"
        raise _make_error(
            model, f"target_modules names {', '.join(missed)}, which the model does not have; {available}"
        )
    read = [module.get_input_embeddings(), module.get_output_embeddings(), getattr(module, "score", None)]
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")  # refused below
            torch.manual_seed(model.seed)
            inject_adapter_in_model(config, module)
    except (AttributeError, TypeError, ValueError) as error:
        raise _make_error(model, f"peft says: {error}") from error
    for name, layer in layers(module).items():
        if any(layer.base_layer is part for part in read):
            raise _make_error(
                model,
                f"target_modules names '{name}', an embedding or a head, whose weight nrl reads without calling the "
                "layer; leave it out",
            )
        if not isinstance(layer.base_layer, nn.Linear):
            kind = type(layer.base_layer).__name__
            raise _make_error(model, f"target_modules names '{name}', a {kind}; give linear layers")
    if model.head != "lm":
        module.score.requires_grad_(True)


def _make_config(model: Model) -> Any:
    """Make a ``peft.LoraConfig``; refuse anything but plain LoRA."""
    from peft import LoraConfig

    from_folder = isinstance(model.lora, str)
    fields = _read_config(model) if isinstance(model.lora, str) else dict(model.lora or {})
    defaults = dataclasses.asdict(LoraConfig())
    if from_folder:  # another version of peft may say more, and no dropout is used here
        fields = {name: x for name, x in fields.items() if (name in defaults or x) and name != "lora_dropout"}
    if unknown := sorted(fields.keys() - defaults.keys()):
        close = difflib.get_close_matches(unknown[0], _GIVEN, n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"plain LoRA has {', '.join(sorted(_GIVEN))}"
        raise _make_error(model, f"peft.LoraConfig has no argument '{unknown[0]}'; {hint}")
    if fields.get("peft_type", "LORA") != "LORA":
        raise _make_error(model, f"it is a {fields['peft_type']} adapter; only LoRA can be used")
    allowed = _GIVEN | _CHECKED | (_ABOUT if from_folder else set())
    for name, value in fields.items():
        other = name not in allowed and value is not None and value != defaults[name]
        other |= name == "init_lora_weights" and value not in (True, False, "gaussian")  # Other values change the base.
        other |= name == "modules_to_save" and not set(value or ()) <= _HEADS
        if other:
            raise _make_error(model, f"{name} is {value!r}, and nrl trains plain LoRA without dropout; leave it out")
    used = {name: value for name, value in fields.items() if name in _GIVEN}
    return LoraConfig(**used, task_type="SEQ_CLS")  # With this task type "all-linear" leaves out a head 'score'.


def _read_config(model: Model) -> dict[str, Any]:
    folder = Path(str(model.lora))
    if missing := [name for name in (_CONFIG, _FILE) if not (folder / name).is_file()]:
        problem = f"the folder has no {' and no '.join(missing)}" if folder.is_dir() else "there is no such folder"
        wrote = "peft's save_pretrained or trainer.export(params.adapter, ...)"
        raise _make_error(model, f"{problem}; give one that {wrote} wrote")
    config: dict[str, Any] = json.loads((folder / _CONFIG).read_text())
    return config


def read_adapter(folder: str) -> Iterator[Piece]:
    """Yield the weights of an adapter in a folder."""
    from safetensors import safe_open

    with safe_open(Path(folder) / _FILE, "pt") as file:
        for name in file.keys():
            yield shards.full_shard(name.removeprefix(_PREFIX), file.get_tensor(name))


def _make_error(model: Model, reason: str) -> ModelError:
    source = f"'{model.lora}'" if isinstance(model.lora, str) else "..."
    return ModelError(f"Model(lora={source}): {reason}")
