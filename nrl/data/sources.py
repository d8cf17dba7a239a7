"""Where rows come from: mappings, files, folders and names of the Hugging Face hub, each as a table of rows."""

import os.path
from collections.abc import Sequence
from pathlib import Path

from nrl.data.checks import exists
from nrl.data.hub import load
from nrl.data.readers import Table, read_file
from nrl.envs.contract import Task

__all__ = ["read"]


def read(source: str | Path | Sequence[Task]) -> Table:
    """Open a source as a table. The ending of a file's name decides how it is read.

    Args:
        source: a file (``.parquet``, ``.csv``, ``.tsv``, any other: JSON Lines); a folder that
            ``datasets.save_to_disk`` wrote, or one of data files; the name of a dataset on the Hugging Face hub with
            its split, ``"owner/name:split"`` or ``"owner/name/config:split"`` (a folder takes ``":split"`` too; a
            split may be cut, ``"train[:100]"``); or mappings.

    Raises:
        DataError: nothing of the kind is there, or it cannot be read.
    """
    if not isinstance(source, str | Path):
        return Table("the source", source, "row {}".format)
    path = Path(source)
    named = not exists(path) and ":" in str(source)
    if named or os.path.isdir(path):  # noqa: PTH112 - false, and no error, if permission is denied
        return load(str(source))
    return read_file(path)
