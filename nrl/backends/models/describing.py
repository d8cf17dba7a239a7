"""All that a folder of a model has beside its weights: config, generation config, tokenizer."""

from pathlib import Path
from tempfile import TemporaryDirectory

from nrl.backends.base import Model
from nrl.backends.models.loading import load_configs, load_tokenizer
from nrl.errors import ModelError

__all__ = ["DESCRIPTION", "description"]

DESCRIPTION = "model"
"""The folder of these files, within that of what a trainer saved."""


def description(model: Model) -> dict[str, bytes]:
    """Files by their names; without a tokenizer, where the model has none.

    Raises:
        ModelError: there is no config.

    >>> from nrl import tiny
    >>> "config.json" in description(tiny.model()), "tokenizer.json" in description(tiny.model())
    (True, True)
    """
    with TemporaryDirectory() as folder:
        for config in load_configs(model):
            config.save_pretrained(folder)
        try:
            load_tokenizer(model).save_pretrained(folder)
        except ModelError:
            if model.tokenizer is not None:
                raise
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
