"""Where rows come from: mappings, files, folders and names of the Hugging Face hub, each as a table of rows."""

import glob
import math
import os.path
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, cast

from nrl.arguments import described
from nrl.data.checks import exists, kind, shown
from nrl.data.hub import load
from nrl.data.readers import Table, read_file
from nrl.envs.types import Task
from nrl.errors import DataError

__all__ = ["is_glob", "read"]


def read(source: str | Path | Sequence[Task | str | Path]) -> Table:
    """Open a source as a table. The ending of a file's name decides how it is read.

    Args:
        source: a file (``.parquet``, ``.csv``, ``.tsv``, ``.json``, any other: JSON Lines; all but Parquet also with
            ``.gz`` or ``.zst`` behind it); a pattern such as ``"data/*.jsonl"``, whose files follow each other in the
            order of their names; a folder that ``datasets.save_to_disk`` wrote, or one of data files; the name of a
            dataset on the Hugging Face hub with its split, ``"owner/name:split"`` or ``"owner/name/config:split"`` (a
            folder takes ``":split"`` too; a split may be cut, ``"train[:100]"``); mappings; a DataFrame of pandas or
            polars, or a table of pyarrow; or a list of sources, which follow each other.

    Raises:
        DataError: nothing of the kind is there, or it cannot be read.
    """
    if not isinstance(source, str | Path):
        if (rows := _rows_of_columns(source)) is not None:
            return Table("the source", rows, "row {}".format, lambda index: True)
        _check_rows(source)
        if len(source) and isinstance(source[0], str | Path):
            return _joined(cast(Sequence[str | Path], source))
        of_arrow = type(source).__module__.partition(".")[0] == "datasets"
        return Table("the source", source, "row {}".format, lambda index: of_arrow)
    path = Path(source)
    if is_glob(source):
        found = glob.glob(str(source), recursive=True)  # noqa: PTH207 - takes absolute patterns
        names = sorted(name for name in found if not Path(name).is_dir())
        if not names:
            raise DataError(f"tasks: no file matches the pattern {shown(repr(str(source)), 300)} (from {Path.cwd()})")
        return _joined(names, str(source))
    named = not exists(path) and ":" in str(source)
    if named or os.path.isdir(path):  # noqa: PTH112 - false, and no error, if permission is denied
        return load(str(source))
    return read_file(path)


def _rows_of_columns(source: Any) -> list[Any] | None:
    """Return the rows of a DataFrame of pandas or polars, or of a table of pyarrow; None: it is something else."""
    if isinstance(source, Sequence | Mapping) or not any(hasattr(source, name) for name in ("columns", "to_pylist")):
        return None
    for method in ("to_pylist", "to_dicts"):  # of pyarrow and polars; both have None where there is no value
        if callable(getattr(source, method, None)):
            return list(getattr(source, method)())
    try:
        return [_plain(row) for row in source.to_dict("records")]
    except (AttributeError, TypeError, ValueError):
        return None


def _plain(value: Any) -> Any:
    """Return a value of pandas as Python has it: lists for arrays, and None for NaN, which stands for no value."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if hasattr(value, "tolist"):  # of NumPy
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    is_missing = type(value).__name__ in ("NAType", "NaTType") or (isinstance(value, float) and math.isnan(value))
    return None if is_missing else value


def _check_rows(source: Any) -> None:
    """Check that a source has rows by number, in the order of which it is read."""
    if isinstance(source, Mapping):
        splits = ", ".join(map(repr, source))
        is_splits = type(source).__module__.partition(".")[0] == "datasets"
        remedy = f"give one of its splits, {splits}" if is_splits else "give a list of mappings, one for each row"
        raise DataError(f"tasks: the source is {described(source)}; {remedy}")
    try:
        if len(source):
            source[0]
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise DataError(
            f"tasks: the source is {described(source)}, which has no rows by number ({error!r}); give a list of "
            "mappings, one for each row, such as list(source) or source.to_dict('records')"
        ) from error


def is_glob(source: str | Path) -> bool:
    """Return whether a source is a pattern of names, and neither a file nor the cut split of a dataset.

    >>> is_glob("data/*.jsonl"), is_glob("openai/gsm8k/main:train[:100]")
    (True, False)
    """
    return glob.has_magic(str(source)) and ":" not in str(source) and not exists(Path(source))


def _joined(sources: Sequence[str | Path], name: str = "") -> Table:
    """Several sources as one table."""
    for source in sources:
        if not isinstance(source, str | Path):
            raise DataError(f"tasks: a list of files has {kind(source)}; give names of files alone, or mappings alone")
    if len(sources) == 1:
        return read(sources[0])
    tables = [read(source) for source in sources]
    ends = list(accumulate(len(table.rows) for table in tables))

    def at(index: int) -> tuple[Table, int]:
        number = bisect_right(ends, index)
        return tables[number], index - ends[number] + len(tables[number].rows)

    def place(index: int) -> str:
        table, row = at(index)
        return table.place(row)

    def filled(index: int) -> bool:
        table, row = at(index)
        return table.filled(row)

    name = name or f"{shown(str(sources[0]))} and {len(sources) - 1} more"
    return Table(name, _Rows([table.rows for table in tables], at), place, filled)


class _Rows(Sequence[Any]):
    """The rows of several tables, one after the other."""

    def __init__(self, parts: Sequence[Sequence[Any]], at: Callable[[int], tuple[Table, int]]) -> None:
        self._parts, self._at = parts, at

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __getitem__(self, index: Any) -> Any:
        table, row = self._at(range(len(self))[index])
        return table.rows[row]

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self._parts)
