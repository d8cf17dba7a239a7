"""What a format is, and how it reads texts of a row."""

from collections.abc import Callable, Mapping, Sequence

from nrl.data.checks import fields, kind
from nrl.envs.contract import Task
from nrl.errors import DataError

__all__ = ["Format", "FormatName", "texts_of"]

type Format = Callable[[Task], Task | Sequence[Task] | None]
"""From one row to a row, several, or none."""

type FormatName = str | Mapping[str, str | Sequence[str]]
"""A name that `nrl.data.formats.format_of` takes, or the columns of fields."""


def texts_of(format: str, row: Task, *names: str) -> list[str]:
    """Return texts of a row.

    Args:
        format: by which errors name the format.
        row: any.
        names: of the fields.

    Raises:
        DataError: one of them is missing or no text.
    """
    for name in names:
        if name not in row:
            raise DataError(f"{format}: the row has no '{name}'; it has {fields(row)}")
        if not isinstance(row[name], str):
            raise DataError(f"{format}: '{name}' is {kind(row[name])}; give a text")
    return [row[name] for name in names]
