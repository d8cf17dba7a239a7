"""Where rows come from: mappings, files, folders and names of the Hugging Face hub, each as a table of rows."""

import glob
import os.path
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, cast

from nrl.data.checks import exists, kind, shown
from nrl.data.hub import load
from nrl.data.readers import Table, read_file
from nrl.envs.contract import Task
from nrl.errors import DataError

__all__ = ["is_glob", "read"]


def read(source: str | Path | Sequence[Task | str | Path]) -> Table:
    """Open a source as a table. The ending of a file's name decides how it is read.

    Args:
        source: a file (``.parquet``, ``.csv``, ``.tsv``, ``.json``, any other: JSON Lines; all but Parquet also with
            ``.gz`` or ``.zst`` behind it); a pattern such as ``"data/*.jsonl"``, whose files follow each other in the
            order of their names; a folder that ``datasets.save_to_disk`` wrote, or one of data files; the name of a
            dataset on the Hugging Face hub with its split, ``"owner/name:split"`` or ``"owner/name/config:split"`` (a
            folder takes ``":split"`` too; a split may be cut, ``"train[:100]"``); mappings; or a list of sources, which
            follow each other.

    Raises:
        DataError: nothing of the kind is there, or it cannot be read.
    """
    if not isinstance(source, str | Path):
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
