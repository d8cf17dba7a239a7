"""The command ``nrl export``: a folder that transformers and vLLM load, from the checkpoint of a run."""

from pathlib import Path
from typing import Any, Literal

import attrs
import torch

from nrl.backends.models.exporting import export_described
from nrl.backends.models.model_files import DESCRIPTION
from nrl.backends.training.saving.storage import iter_weights
from nrl.cli.evaluation import retention_of
from nrl.errors import CheckpointError
from nrl.files import (
    MANIFEST,
    NOT_FINITE,
    Folder,
    check_sizes,
    on_disk,
    read_saved,
    resolve_output,
    to_folder,
    without_file_scheme,
)
from nrl.run import checkpoint

__all__ = ["Export", "main"]


@attrs.frozen
class Export:
    """Write the weights of a checkpoint as a folder that transformers and vLLM load. One weight is held at a time."""

    run: str  # the folder of a run, or of one checkpoint of it, or the URL of that
    to: str | None = None  # the folder to write; none: the run's "model"
    checkpoint: str = "best"  # or "newest", or a step, such as 000050; best: the newest, where the run has no best
    value: str = "policy"  # of what run.save was given, by its name there
    dtype: Literal["float32", "bfloat16", "float16"] | None = None  # none: as trainer.export has it
    trust_remote_code: bool = False  # let Python files run that the checkpoint has taken from its model


def main(cfg: Export) -> Path:
    """Export, and return the folder that was written.

    Raises:
        CheckpointError: the checkpoint or the value does not exist, or the value cannot be exported.
    """
    root, source = _find_checkpoint(to_folder(cfg.run), cfg.checkpoint)
    folder, target = source / cfg.value, root / "model"
    if cfg.to is not None:
        target = resolve_output("export: to", without_file_scheme("export: to", cfg.to))
    if not isinstance(target, Path):
        raise CheckpointError(
            f"export: {target} is in a store, where no model can be loaded from; give a folder as to="
        )
    saved = read_saved(folder) if folder.is_dir() else None
    if saved is None:
        content = ", ".join(sorted(path.name for path in source.iterdir() if path.is_dir())) or "no weights"
        raise CheckpointError(
            f"export: {source} has no weights of the name {cfg.value!r}; it has {content}: give value="
        )
    files, record = saved
    if names := record.get(NOT_FINITE):
        raise CheckpointError(
            f"export: {folder} has NaN or infinite numbers ({names[0]}), so training had diverged when it was saved; "
            "give an earlier checkpoint="
        )
    check_sizes(folder, files)
    about: Any = record.get("model")
    if record["adapter"] or about is None:
        kind = "an adapter alone" if record["adapter"] else "the weights of a model that only its program knows"
        content = f"trainer.export(trainer.restore({str(folder)!r}).params, {str(target)!r})"
        raise CheckpointError(f"export: {folder} has {kind}; export in the program: {content}")
    dtype = getattr(torch, cfg.dtype or about["dtype"])
    target.mkdir(parents=True, exist_ok=True)
    names = [name.removeprefix(f"{DESCRIPTION}/") for name in files if name.startswith(f"{DESCRIPTION}/")]
    with on_disk(folder / DESCRIPTION, names) as described:
        export_described(iter_weights(folder), described, about["head"], dtype, target, cfg.trust_remote_code)
    return target


def _find_checkpoint(run: Folder, which: str) -> tuple[Folder, Folder]:
    """The folder of a run, and that of the checkpoint."""
    if not isinstance(run, Path):
        if (run / MANIFEST).is_file():
            return run, run
        raise CheckpointError(
            f"export: {run} is no checkpoint: it has no {MANIFEST}; give the folder of a run, or the URL of one "
            "checkpoint, such as s3://bucket/run/train/000050"
        )
    if run.parent.parent.name == "checkpoints" and run.is_dir():
        return run.parents[2], run
    checkpoints = checkpoint.checkpoints(run / "checkpoints" / "train")
    if not checkpoints:
        raise CheckpointError(f"export: {run} has no checkpoints, which a run has in checkpoints/train")
    good = checkpoint.finite(checkpoints) or checkpoints  # If none is finite, an error names the newest.
    if which == "newest":
        return run, good[-1].folder
    if which == "best":
        return run, (checkpoint.best(good, retention_of(run)) or good[-1]).folder
    for candidate in checkpoints:
        if candidate.folder.name.lstrip("0") == which.lstrip("0"):
            return run, candidate.folder
    names = ", ".join(candidate.folder.name for candidate in checkpoints)
    raise CheckpointError(f"export: {run} has no checkpoint {which!r}; it has {names}")
