"""Files of stages: models to read, checkpoints in part or whole, exported models and adapters."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from nrl.backends.megatron import lora_layers
from nrl.backends.megatron.groups import Groups
from nrl.backends.megatron.weight_views import local_shards
from nrl.backends.models import lora, weight_layout
from nrl.backends.models.exporting import export_weights
from nrl.backends.models.model_files import save_beside
from nrl.backends.models.named_weights import named_tensors
from nrl.backends.models.shards import empty_shard, full_shards
from nrl.backends.training.adapters import AdapterParams, params_of
from nrl.backends.training.saving import storage
from nrl.backends.training.saving.save_plan import SavePlan
from nrl.backends.training.weight_stream import write_full_weights
from nrl.backends.types import Model, Piece
from nrl.files import Folder

__all__ = ["export", "plan_save", "read_model", "restore", "shards_to_fill", "skeleton"]

type _Stages = Sequence[Any]


def _accept_all(name: str) -> bool:
    return True


def skeleton(model: Model) -> Any:
    """Build the transformers model with its adapter, with weights that take no memory."""
    return lora.skeleton(model, dtype=getattr(torch, model.dtype))


def read_model(model: Model) -> tuple[Any, Callable[[str], Tensor]]:
    """Build a transformers model with its adapter; return it and a reader of the weights that take no memory yet."""
    dtype = getattr(torch, model.dtype)
    if model.lora is not None:
        dtype = torch.promote_types(dtype, torch.float32)  # Draw A in the dtype that other engines draw it in.
    if (lazy := lora.build_lazy(model, dtype=dtype)) is not None:
        return lazy.module, lazy.load
    return lora.build(model, dtype=dtype), _read_nothing


def _read_nothing(name: str) -> Tensor:
    """Read nothing: all weights have values."""
    raise KeyError(name)


def _map_to_files(module: Any) -> dict[str, Piece]:
    """Return the weights of a transformers model by their names in files; tied ones once."""
    return weight_layout.map_to_files(full_shards(dict(named_tensors(module))), weight_layout.find_parts(module))


def shards_to_fill(
    stages: _Stages, module: Any, groups: Groups, is_wanted: Callable[[str], bool] = _accept_all
) -> dict[str, Sequence[Piece]]:
    """Return this process's pieces of each wanted weight; an empty piece of a weight that only other processes have.

    Args:
        stages: of this process.
        module: their `skeleton`.
        groups: the groups.
        is_wanted: by the names that files have.
    """
    mine: dict[str, list[Piece]] = {}
    for _, piece, _ in local_shards(stages, groups):
        mine.setdefault(piece.name, []).append(piece)
    return {
        name: mine.get(name) or [empty_shard(like)] for name, like in _map_to_files(module).items() if is_wanted(name)
    }


def plan_save(
    params: _Stages | AdapterParams[_Stages], pieces: Callable[..., Iterator[Piece]], step: int, groups: Groups
) -> SavePlan:
    """Plan to save the pieces that this process owns, of an adapter without its base; a collective.

    Args:
        params: what is saved.
        pieces: called with ``is_wanted=``, which the names of weights have to be.
        step: for the record.
        groups: the groups.
    """
    stages, alone = params_of(params), isinstance(params, AdapterParams)
    model = stages[0].model
    base = lora_layers.signature(stages, skeleton(model), groups) if alone else None
    record = {"step": step, "lora": model.lora is not None, "base": base}
    return storage.plan_save(partial(pieces, is_wanted=lora.is_trained if alone else _accept_all), groups.peers, record)


def restore(
    folder: Folder,
    stages: _Stages,
    pieces: Callable[..., Iterator[Piece]],
    record: Mapping[str, Any],
    groups: Groups,
) -> None:
    """Read what was saved, by any engine; a collective.

    Args:
        folder: with the files.
        stages: that are filled.
        pieces: called with the names that are there and ``is_wanted=``; gives what is filled.
        record: of `plan_save`.
        groups: the groups.

    Raises:
        ModelError: the files are of another model, or of an adapter on another base.
        CheckpointError: a part is missing.
    """
    module, base = skeleton(stages[0].model), record["base"]
    is_wanted = _accept_all if base is None else lora.is_trained
    shapes = {name: piece.shape for name, piece in _map_to_files(module).items() if is_wanted(name)}
    storage.load_shards(folder, shapes, partial(pieces, is_wanted=is_wanted), groups.peers)
    if base is not None:
        lora.check_base(lora_layers.signature(stages, module, groups), base)


def export(folder: Path, params: _Stages | AdapterParams[_Stages], pieces: Iterator[Piece], groups: Groups) -> None:
    """Write a folder that transformers and vLLM load; of an adapter, one that peft loads. A collective."""
    model = params_of(params)[0].model

    def write(weights: Iterator[tuple[str, Tensor]]) -> None:
        if isinstance(params, AdapterParams):
            lora.export(skeleton(model), dict(weights), model, folder)
            return
        export_weights(weights, skeleton(attrs.evolve(model, lora=None)), folder)
        save_beside(model, folder)

    write_full_weights(pieces, groups.peers, write)
