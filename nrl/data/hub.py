"""Datasets of the Hugging Face hub, and folders that the `datasets` library reads."""

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nrl.data.checks import exists, shown
from nrl.data.readers import Table
from nrl.errors import DataError

__all__ = ["load"]

_NAME = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96}){0,2}")
_SPLIT = re.compile(r"[\w.+\[\]:%-]+")


def load(source: str) -> Table:
    """Open a dataset as a table. `datasets` keeps it on disk, and a row is read when it is asked for.

    Args:
        source: ``"owner/name:split"``, ``"owner/name/config:split"``, or a folder with or without ``":split"``.

    Raises:
        DataError: no such dataset, configuration or split, or it cannot be read or reached.
    """
    name, split = (source, "") if exists(Path(source)) else _named(source)
    path = Path(name)
    if name and exists(path):
        if path.is_dir():
            return _table(source, *_folder(path, split))
        raise DataError(f"tasks: {name} is a file, which has no splits; leave ':{split}' out")
    if not _NAME.fullmatch(name) or not _SPLIT.fullmatch(split):
        raise DataError(
            f"tasks: {shown(repr(source), 300)} is neither a file or folder (looked in {Path.cwd()}) nor the name of a "
            "dataset with its split, such as 'openai/gsm8k/main:train'"
        )
    owner, _, rest = name.partition("/")
    dataset, _, config = rest.partition("/")
    arguments = [f"{owner}/{dataset}" if dataset else owner, *([config] if config else [])]
    return _table(source, *_loaded(arguments, split))


def _named(source: str) -> tuple[str, str]:
    """Name and split. The first colon parts them, since a split such as ``train[:100]`` has a colon of its own."""
    name, _, split = source.partition(":")
    return name, split


def _folder(path: Path, split: str) -> tuple[Any, str]:
    import datasets

    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        tried = f"datasets.load_from_disk({str(path)!r})"
        try:
            with _quiet():
                return datasets.load_from_disk(str(path)), split
        except Exception as error:
            raise _fault(tried, error, folder=True) from error
    return _loaded([str(path)], split)


def _loaded(arguments: list[str], split: str) -> tuple[Any, str]:
    import datasets

    tried = f"datasets.load_dataset({', '.join(map(repr, arguments))}{f', split={split!r}' if split else ''})"
    try:
        with _quiet():
            return datasets.load_dataset(*arguments, split=split or None), ""
    except Exception as error:  # of the hub, the network, the builder of the dataset, the files
        raise _fault(tried, error, folder=exists(Path(arguments[0]))) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Switch progress bars off where stderr is no terminal: they would fill logs."""
    import datasets

    shown = not datasets.are_progress_bars_disabled()
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def _fault(tried: str, error: Exception, *, folder: bool) -> DataError:
    import datasets

    cause = error.__cause__ or error
    found = shown(" ".join(str(cause).split()), 200)
    advice = "check the files"
    if not folder:
        offline = "HF_HUB_OFFLINE is set, so the hub is not asked; " if datasets.config.HF_HUB_OFFLINE else ""
        advice = f"{offline}check the name ('owner/name/config:split') and the network, or give a file or folder"
    return DataError(f"tasks: {tried} failed with {type(cause).__name__}: {found.rstrip('.')}; {advice}")


def _table(source: str, found: Any, split: str) -> Table:
    import datasets

    if isinstance(found, dict):
        names = sorted(map(str, found))
        if not split and len(names) == 1:
            split = names[0]
        if split not in names:
            asked = f"has no split {split!r}" if split else "has several splits"
            raise DataError(f"tasks: {source} {asked}; name one of {', '.join(names)}: '{source.split(':')[0]}:...'")
        found = found[split]
    elif split:
        raise DataError(f"tasks: {source.split(':')[0]} is one dataset without splits; leave ':{split}' out")
    if not isinstance(found, datasets.Dataset):
        raise DataError(f"tasks: {source} is a {type(found).__name__}, not a datasets.Dataset")
    if not len(found):
        raise DataError(f"tasks: {source} has no rows")
    return Table(source, found, lambda index: f"{source}, row {index}", lambda index: True)
