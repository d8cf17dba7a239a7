"""Models whose weights are read when somebody asks for them, a block of one at a time: nobody holds a whole model.

The weights of a folder are still in its safetensors files, and those of a config are still to be drawn.
"""

import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor, nn

from nrl.backends.models import loading, weight_layout
from nrl.backends.models.deferred_init import record_init
from nrl.backends.models.named_weights import is_head, is_score, weights
from nrl.backends.models.shards import full_shard
from nrl.backends.types import Model, Piece
from nrl.errors import ModelError

__all__ = ["LazyModel", "build_lazy", "without_weights"]

_INDEX, _ONE = "model.safetensors.index.json", "model.safetensors"
_PLAIN = {"F64", "F32", "BF16", "F16"}
"""The dtypes of weights; other dtypes are of quantized weights, which only transformers reads."""


class LazyModel(NamedTuple):
    """A model whose weights are to be read.

    Args:
        module: the model; a parameter on the device ``meta`` is to be read, all others have values.
        fill: fills a piece of a weight, by its name in the model.
        digest: of the sources, without reading all of them: processes with equal digests read the same.
    """

    module: nn.Module
    fill: Callable[[Piece], None]
    digest: str = ""

    def load(self, name: str) -> Tensor:
        """Return a full weight, in the dtype of the model."""
        like = weights(self.module)[name]
        weight = torch.empty(like.shape, dtype=like.dtype)
        self.fill(full_shard(name, weight))
        return weight

    def compute_digest(self) -> str:
        """Compute a digest of the sources and of all values in memory, such as those of an adapter."""
        digest = hashlib.sha256(self.digest.encode())
        for name, tensor in weights(self.module).items():
            digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
            if not tensor.is_meta:
                digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
        return digest.hexdigest()


def build_lazy(model: Model, *, dtype: torch.dtype | None = None) -> LazyModel | None:
    """Build a model as `nrl.backends.models.loading.build` does, without reading or drawing a weight.

    None: only `build` can do it, as where transformers cuts a weight of files, or there are no safetensors files; or
    nobody can, and `build` says why.

    >>> from nrl import tiny
    >>> lazy, module = build_lazy(tiny.model(seed=3)), loading.build(tiny.model(seed=3))
    >>> torch.equal(lazy.load("model.embed_tokens.weight"), module.model.embed_tokens.weight)
    True
    """
    dtype = dtype or getattr(torch, model.dtype)
    try:
        return _build_random(model, dtype) if isinstance(model.source, Mapping) else _build_from_files(model, dtype)
    except ModelError:
        return None


def _build_random(model: Model, dtype: torch.dtype) -> LazyModel | None:
    try:
        with record_init(model.seed) as draws:
            module = loading.from_config(model)
            draws.end(module.parameters())
    except Exception:  # Errors are of all kinds, and `build` reports them.
        return None
    readers: dict[nn.Parameter, Callable[[], Tensor]] = {}
    parameters: dict[nn.Parameter, nn.Parameter] = {}  # tied ones once
    for part in module.modules():
        for name, old in part._parameters.items():
            if old is not None and old not in parameters:
                reader = draws.reader(old)
                value = old.detach().to(dtype) if reader is None else old.detach().to("meta", dtype)
                parameters[old] = nn.Parameter(value, old.requires_grad)
                if reader is not None:
                    readers[parameters[old]] = reader
            part._parameters[name] = None if old is None else parameters[old]
    named = dict(module.named_parameters(remove_duplicate=False))

    def fill(piece: Piece) -> None:
        if is_score(piece.name):
            piece.tensor.zero_()
        else:
            piece.tensor.copy_(readers[named[piece.name]]()[piece.index])

    with torch.no_grad():
        for name, parameter in named.items():
            if is_score(name) and not parameter.is_meta:
                parameter.zero_()
    return LazyModel(loading.finish(module, model), fill)


def _build_from_files(model: Model, dtype: torch.dtype) -> LazyModel | None:
    from safetensors import safe_open

    stored: dict[str, tuple[Path, list[int]]] = {}
    try:
        folder = loading.files(model)
        paths = [] if folder is None else sorted(_paths(folder))
        module: Any = loading.skeleton(model, dtype=dtype)
        for path in paths:
            with safe_open(path, "pt") as file:
                for name in file.keys():
                    if not _is_ignored(module, name):
                        lazy = file.get_slice(name)
                        stored[name] = path, lazy.get_shape()
                        if lazy.get_dtype() not in _PLAIN:
                            return None
    except Exception:  # Errors are of all kinds, and `build` reports them.
        return None
    tensors: dict[str, Tensor] = dict(module.state_dict(keep_vars=True))
    if all(name in tensors or is_head(name) for name in stored):
        module._weight_conversions = []  # files have the model's own form; so transformers remembers what it turned
    parts = weight_layout.find_parts(module)
    shapes = {part.name: list(part.shape) for file_parts in parts.values() for part in file_parts}
    names: dict[int, list[str]] = {}
    for name, file_parts in parts.items():
        if all(part.name in stored for part in file_parts):
            names.setdefault(id(tensors[name]), []).append(name)
    lacks = [name for name, tensor in tensors.items() if id(tensor) not in names and not is_score(name)]
    unknown = [name for name in stored if name not in shapes and not is_head(name)]
    misshapen = [name for name in shapes if name in stored and stored[name][1] != shapes[name]]
    if lacks or unknown or misshapen or getattr(module.config, "quantization_config", None):
        return None

    def fill(piece: Piece) -> None:
        aliases = names.get(id(tensors[piece.name]))
        if aliases is None:
            piece.tensor.zero_()  # a head that the files have not
            return
        with ExitStack() as stack:  # An open file keeps all blocks mapped that were read: close it after each weight.
            opened = functools.cache(lambda path: stack.enter_context(safe_open(path, "pt")))
            for part in weight_layout.split_for_files([attrs.evolve(piece, name=aliases[0])], parts):
                if part.tensor.numel():
                    path, _ = stored[part.name]
                    value = opened(path).get_slice(part.name)[part.index]
                    if not all(end.isfinite() for end in torch.aminmax(value)):
                        raise ModelError(
                            f"Model(source={loading.display_name(model)}): '{part.name}' in {path.name} has numbers "
                            "that are not finite; the file is damaged, or what was trained had diverged"
                        )
                    part.tensor.copy_(value)

    model_on_disk = LazyModel(module, fill, _digest(paths))
    for tied_names in names.values():
        values = {_digest_parts(file_parts, parts, stored) for file_parts in tied_names} if len(tied_names) > 1 else ()
        if len(values) > 1:  # files have two tied weights, which differ: transformers does not tie them
            return None
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if name in tensors:
                fill(full_shard(name, buffer))
    return model_on_disk


def without_weights(module: nn.Module) -> LazyModel:
    """Wrap a model whose weights are never read: they come from elsewhere, or do not matter."""
    return LazyModel(module, lambda piece: None)


def _paths(folder: Path) -> Iterator[Path]:
    """Yield the files that transformers reads."""
    if (folder / "adapter_config.json").is_file():  # transformers would put the adapter on
        return
    if (folder / _ONE).is_file():
        yield folder / _ONE
    elif (folder / _INDEX).is_file():
        yield from {folder / name for name in json.loads((folder / _INDEX).read_text())["weight_map"].values()}


def _is_ignored(module: Any, name: str) -> bool:
    """Return whether the model's class lists a weight of files as unused."""
    return any(re.search(pattern, name) for pattern in module._keys_to_ignore_on_load_unexpected or ())


def _digest_parts(
    name: str, parts: weight_layout.Parts, stored: Mapping[str, tuple[Path, list[int]]]
) -> tuple[bytes, ...]:
    """Return digests of the weights of files that a weight of a model consists of."""
    from safetensors import safe_open

    digests = []
    for part in parts[name]:
        with safe_open(stored[part.name][0], "pt") as file:
            value = file.get_tensor(part.name).contiguous().view(-1).view(torch.uint8)
            digests.append(hashlib.sha256(value.numpy()).digest())
    return tuple(digests)


def _digest(paths: list[Path]) -> str:
    """Compute a digest of files: their names and sizes, and 64 blocks of each, from the header on."""
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for block in range(64):
                file.seek(block * size // 64)
                digest.update(file.read(4096))
    return digest.hexdigest()
