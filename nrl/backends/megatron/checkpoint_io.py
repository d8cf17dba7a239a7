"""What stages are in files: models that are read, checkpoints in part or whole, exported models and adapters."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from nrl.backends.megatron import adapters
from nrl.backends.megatron.groups import Groups
from nrl.backends.megatron.weights import own
from nrl.backends.models import lora, weight_layout
from nrl.backends.models.exporting import export_weights
from nrl.backends.models.model_files import save_beside
from nrl.backends.models.named_weights import named_tensors
from nrl.backends.models.shards import nothing, wholes
from nrl.backends.training.adapters import Adapter, params_of
from nrl.backends.training.saving import storage
from nrl.backends.training.saving.save_plan import ToSave
from nrl.backends.training.weight_stream import written_whole
from nrl.backends.types import Model, Piece
from nrl.files import Folder

__all__ = ["export", "fillable", "read", "restore", "skeleton", "to_save"]

type _Stages = Sequence[Any]


def _every(name: str) -> bool:
    return True


def skeleton(model: Model) -> Any:
    """The transformers model with its adapter, whose weights take no memory."""
    return lora.skeleton(model, dtype=getattr(torch, model.dtype))


def read(model: Model) -> tuple[Any, Callable[[str], Tensor]]:
    """A transformers model with its adapter, and what reads the weights of it that take no memory yet."""
    dtype = getattr(torch, model.dtype)
    if model.lora is not None:
        dtype = torch.promote_types(dtype, torch.float32)  # so that A is drawn as elsewhere
    if (found := lora.unread(model, dtype=dtype)) is not None:
        return found.module, found.read
    return lora.build(model, dtype=dtype), _nothing


def _nothing(name: str) -> Tensor:
    """All weights are there."""
    raise KeyError(name)


def _in_files(module: Any) -> dict[str, Piece]:
    """The weights of a transformers model by the names that files have; tied ones once."""
    return weight_layout.in_files(wholes(dict(named_tensors(module))), weight_layout.parts(module))


def fillable(
    stages: _Stages, module: Any, at: Groups, wanted: Callable[[str], bool] = _every
) -> dict[str, Sequence[Piece]]:
    """What this process has of each weight whose name is wanted; of one that only others have, an empty piece.

    Args:
        stages: of this process.
        module: their `skeleton`.
        at: the groups.
        wanted: by the names that files have.
    """
    mine: dict[str, list[Piece]] = {}
    for _, piece, _ in own(stages, at):
        mine.setdefault(piece.name, []).append(piece)
    return {name: mine.get(name) or [nothing(like)] for name, like in _in_files(module).items() if wanted(name)}


def to_save(
    params: _Stages | Adapter[_Stages], pieces: Callable[..., Iterator[Piece]], step: int, at: Groups
) -> ToSave:
    """What this process speaks for, of an adapter without its base; a collective.

    Args:
        params: what is saved.
        pieces: called with ``wanted=``, which the names of weights have to be.
        step: for the record.
        at: the groups.
    """
    stages, alone = params_of(params), isinstance(params, Adapter)
    model = stages[0].model
    base = adapters.signature(stages, skeleton(model), at) if alone else None
    record = {"step": step, "lora": model.lora is not None, "base": base}
    return storage.to_save(partial(pieces, wanted=lora.trained if alone else _every), at.peers, record)


def restore(
    folder: Folder,
    stages: _Stages,
    pieces: Callable[..., Iterator[Piece]],
    record: Mapping[str, Any],
    at: Groups,
) -> None:
    """Read what was saved, by any engine; a collective.

    Args:
        folder: with the files.
        stages: that are filled.
        pieces: called with the names that are there and ``wanted=``; gives what is filled.
        record: of `to_save`.
        at: the groups.

    Raises:
        ModelError: the files are of another model, or of an adapter on another base.
        CheckpointError: a part is missing.
    """
    module, base = skeleton(stages[0].model), record["base"]
    wanted = _every if base is None else lora.trained
    shapes = {name: piece.shape for name, piece in _in_files(module).items() if wanted(name)}
    storage.read(folder, shapes, partial(pieces, wanted=wanted), at.peers)
    if base is not None:
        lora.check_base(adapters.signature(stages, module, at), base)


def export(folder: Path, params: _Stages | Adapter[_Stages], pieces: Iterator[Piece], at: Groups) -> None:
    """Write a folder that transformers and vLLM load; of an adapter, one that peft loads. A collective."""
    model = params_of(params)[0].model

    def write(weights: Iterator[tuple[str, Tensor]]) -> None:
        if isinstance(params, Adapter):
            lora.export(skeleton(model), dict(weights), model, folder)
            return
        export_weights(weights, skeleton(attrs.evolve(model, lora=None)), folder)
        save_beside(model, folder)

    written_whole(pieces, at.peers, write)
