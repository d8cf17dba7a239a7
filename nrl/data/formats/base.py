"""What a format is, and how it reads texts of a row."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nrl.data.checks import fields, kind, shown
from nrl.data.row_fields import is_exchange
from nrl.envs.types import Task
from nrl.errors import DataError

__all__ = ["Format", "FormatName", "alternate", "texts_of", "with_history"]

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


def with_history(prompt: str, history: Any, where: str) -> str | list[dict[str, str]]:
    """Return a prompt behind earlier exchanges: a chat, or the text itself where there are none.

    Args:
        prompt: a text.
        history: pairs of a question and its answer; empty or None: there are none.
        where: how errors name it.

    Raises:
        DataError: they are no such pairs.
    """
    pairs = history or []
    if not isinstance(pairs, list | tuple) or not all(is_exchange(pair) for pair in pairs):
        raise DataError(f"{where} is {shown(repr(history))}; give pairs of a question and its answer")
    if not pairs:
        return prompt
    return alternate([*(text for pair in pairs for text in pair), prompt])


def alternate(texts: Sequence[str]) -> list[dict[str, str]]:
    """Return texts as messages of the user and the assistant in turn."""
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]
