"""All that a folder of a model has beside its weights: config, generation config, tokenizer, code."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nrl.backends.models.loading import GENERATION, display_name, load_tokenizer, locate_source, save_model, skeleton
from nrl.backends.types import Model
from nrl.errors import ModelError

__all__ = ["DESCRIPTION", "description", "save_beside"]

DESCRIPTION = "model"
"""The folder of these files, within that of what a trainer saved."""


def description(model: Model) -> dict[str, bytes] | ModelError:
    """Write a model without its weights, as an export at the end of a run writes it.

    Returns:
        Files by their names; without a tokenizer, where the model has none. Or the error for which the model cannot be
        loaded on this host, although it may be on those that train it.

    Raises:
        ModelError: it can be loaded, but not be written.

    >>> from nrl import tiny
    >>> files = description(tiny.model())
    >>> "config.json" in files, "tokenizer.json" in files, "model.safetensors" in files
    (True, True, False)
    """
    try:
        module, tokenizer = skeleton(model), _load_own_tokenizer(model)
    except ModelError as error:
        return error
    with TemporaryDirectory() as folder:
        try:
            save_model(module, folder, {})
            save_beside(model, Path(folder), tokenizer)
        except Exception as error:  # transformers raises all kinds
            raise ModelError(
                f"export: the model {display_name(model)} is loaded, but its files cannot be written, so its "
                f"training would be lost at the export ({type(error).__name__}: {' '.join(str(error).split())}); mend "
                "its config and its tokenizer"
            ) from error
        return {
            path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.suffix != ".safetensors"
        }


def save_beside(model: Model, folder: Path, tokenizer: Any = None) -> None:
    """Write what lies beside a saved model: its tokenizer, and its generation config, the very bytes of its source.

    Args:
        model: that `nrl.backends.models.loading.save_model` has written.
        folder: where it is.
        tokenizer: of the model; None: it is loaded, if there is one.
    """
    tokenizer = _load_own_tokenizer(model) if tokenizer is None else tokenizer
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    if isinstance(model.source, str) and (folder / GENERATION).exists():
        from transformers.utils.hub import cached_file

        source = cached_file(locate_source(model.source), GENERATION, _raise_exceptions_for_missing_entries=False)
        if source is not None:
            (folder / GENERATION).write_bytes(Path(source).read_bytes())


def _load_own_tokenizer(model: Model) -> Any:
    """Load the tokenizer of a model; None: it has none, which is an error only where one is named."""
    try:
        return load_tokenizer(model)
    except ModelError:
        if model.tokenizer is not None:
            raise
        return None
