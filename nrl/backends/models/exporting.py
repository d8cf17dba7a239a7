"""Writing a model in Hugging Face format from weights that come one at a time, so that nobody holds all of them."""

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nrl.backends.models import safetensors, shards, weight_layout
from nrl.backends.models.loading import GENERATION, save_model, skeleton
from nrl.backends.models.named_weights import check_arrived, named_tensors
from nrl.backends.types import Model
from nrl.log import waiting

__all__ = ["export_described", "export_weights"]

_FILE, _INDEX, _LARGEST = "model{suffix}.safetensors", "model.safetensors.index.json", "50GB"  # transformers' own


def export_described(
    weights: Iterable[tuple[str, Tensor]],
    described: Path,
    head: Any,
    dtype: torch.dtype,
    folder: Path,
    trust_remote_code: bool = False,
) -> None:
    """Export a model whose config and tokenizer are in a folder of `model_files.description`; see `export_weights`.

    Args:
        weights: of the model, whole; tied ones once.
        described: the folder of its config, its generation config and its tokenizer.
        head: of the model, as `Model` has it.
        dtype: that files get.
        folder: where to.
        trust_remote_code: as in `Model`: let Python files of the described folder run.

    Raises:
        ModelError: a weight did not come, or the model has code, which is not trusted.
    """
    model = Model(str(described), head=head, trust_remote_code=trust_remote_code)
    export_weights(weights, skeleton(model, dtype=dtype), folder)
    for path in described.iterdir():  # the tokenizer, and what else lies there; the config came with the weights
        has_no_generation = path.name == GENERATION and not (folder / GENERATION).exists()
        if path.name != "config.json" and not has_no_generation:
            shutil.copyfile(path, folder / path.name)


def export_weights(weights: Iterable[tuple[str, Tensor]], skeleton: nn.Module, folder: Path) -> None:
    """Write config and weights.

    Where a weight of files is made of several of the model's, all are held until the last one came.

    Args:
        weights: of the model, whole, as `nrl.backends.models.weight_layout.split_for_files` gives them; tied ones once.
        skeleton: the model without its adapter; its weights take no memory, and have the dtypes that files get.
        folder: where to.

    Raises:
        ModelError: a weight did not come.
    """
    for stale in chain(folder.glob("model*.safetensors"), folder.glob(_INDEX)):
        stale.unlink()
    parts = weight_layout.find_parts(skeleton)
    tensors = dict(named_tensors(skeleton))
    files = {
        piece.name: piece.tensor
        for piece in weight_layout.split_for_files(map(shards.full_shard, tensors, tensors.values()), parts)
    }
    if _shapes(files) != _shapes(_revert_conversion(skeleton, tensors)):
        module: Any = skeleton.to_empty(device="cpu")
        module.tie_weights()  # torch has untied them
        remaining = dict(named_tensors(module))
        for name, tensor in weights:
            remaining.pop(name).copy_(tensor)
        check_arrived(remaining, "export")
        save_model(module, folder)
        return
    save_model(skeleton, folder, {})
    missing = set(files)
    with waiting(f"writing the model to {folder}") as far, ExitStack() as stack:
        places = _open_files(files, folder, stack)
        for done, (name, tensor) in enumerate(weights):
            file, offset = places[name]
            file.seek(offset)
            file.write(safetensors.content(tensor.to(files[name].dtype)))
            far(done, len(files))
            missing.discard(name)
    check_arrived(missing, "export")


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _revert_conversion(skeleton: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights in the form of files."""
    from transformers.core_model_loading import revert_weight_conversion

    reverted: dict[str, Tensor] = revert_weight_conversion(skeleton, dict(tensors))  # type: ignore[arg-type]
    return reverted


def _open_files(tensors: Mapping[str, Tensor], folder: Path, stack: ExitStack) -> dict[str, tuple[Any, int]]:
    """Open files with room for all tensors; return for each tensor its file and the offset of its content."""
    from huggingface_hub import split_torch_state_dict_into_shards

    split = split_torch_state_dict_into_shards(dict(tensors), filename_pattern=_FILE, max_shard_size=_LARGEST)
    places: dict[str, tuple[Any, int]] = {}
    for name, names in split.filename_to_tensors.items():
        file = stack.enter_context((folder / name).open("wb"))
        ordered = sorted(names, key=lambda tensor_name: -tensors[tensor_name].element_size())
        places |= {
            tensor_name: (file, offset)
            for tensor_name, offset in zip(ordered, _write_header(file, tensors, ordered), strict=True)
        }
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return places


def _write_header(file: Any, tensors: Mapping[str, Tensor], ordered: Sequence[str]) -> list[int]:
    """Write the header of a file, and return the offset of the content of each of its tensors."""
    end = file.write(safetensors.header({name: (tensors[name].dtype, tensors[name].shape) for name in ordered}, _ABOUT))
    offsets = []
    for name in ordered:
        offsets.append(end)
        end += tensors[name].numel() * tensors[name].element_size()
    return offsets


_ABOUT = {"format": "pt"}
