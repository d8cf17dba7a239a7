"""Formats that name the columns of a row: which of them is the prompt, which the answer."""

from collections.abc import Mapping, Sequence
from typing import Any

from nrl.data.checks import fields, kind, shown
from nrl.data.formats.base import Format, with_history
from nrl.data.messages import is_chat
from nrl.envs.types import Task
from nrl.errors import DataError

__all__ = ["columns", "columns_of_text"]

_FIELDS = ("prompt", "response", "answer", "chosen", "rejected", "system", "tools", "reasoning", "messages", "history")
_TEXTS = ("prompt", "system")
"""The fields that may be made of several columns, with an empty line between."""


def columns(**names: str | Sequence[str]) -> Format:
    """Make a format of the names of columns.

    A ``reasoning`` stands before the response, as the chat template writes it. Columns that are not named stay as they
    are.

    Args:
        names: the column of each field: ``prompt``, ``response``, ``answer``, ``chosen``, ``rejected``, ``system``,
            ``tools``, ``messages``, ``reasoning``, or ``history``, pairs of a question and its answer. A dot leads into
            an object: ``"info.answer"``. ``prompt`` and ``system`` may be of several columns, of which the first must
            be there.

    Raises:
        DataError: there is no such field; or, of a row, it lacks a column, or one is of another type.

    >>> format = columns(prompt=["instruction", "context"], response="output")
    >>> format({"instruction": "Add.", "context": "1 and 1", "output": "2", "id": 7})
    {'id': 7, 'prompt': 'Add.\\n\\n1 and 1', 'response': '2'}
    """
    unknown = [field for field in names if field not in _FIELDS]
    if unknown or not names:
        found = f"no field '{unknown[0]}'" if unknown else "no field"
        raise DataError(f"columns: {found}; give columns of {', '.join(_FIELDS)}")
    several = [field for field, column in names.items() if not isinstance(column, str) and field not in _TEXTS]
    if several:
        raise DataError(f"columns: '{several[0]}' has several columns; only {' and '.join(_TEXTS)} may have them")
    if "reasoning" in names and "response" not in names:
        raise DataError("columns: 'reasoning' stands before a response; give 'response', too")
    if "history" in names and "prompt" not in names:
        raise DataError("columns: 'history' stands before a prompt; give 'prompt', too")
    parts = {field: [column] if isinstance(column, str) else list(column) for field, column in names.items()}
    used = {column for of_field in parts.values() for column in of_field if "." not in column}

    def renamed(row: Task) -> Task:
        values = {field: _value(row, field, of_field) for field, of_field in parts.items()}
        if reasoning := values.pop("reasoning", None):
            if not isinstance(reasoning, str) or not isinstance(values["response"], str):
                raise DataError(f"columns: 'reasoning' is {kind(reasoning)}; give it and the response as texts")
            message = {"role": "assistant", "content": values["response"], "reasoning_content": reasoning}
            values["response"] = [message]
        if "history" in values:
            values["prompt"] = with_history(values["prompt"], values.pop("history"), "columns: 'history'")
        others = {key: value for key, value in row.items() if key not in used}
        return {**others, **{field: value for field, value in values.items() if value is not None}}

    renamed.__name__ = "columns"
    return renamed


def columns_of_text(text: str) -> Format:
    """Make a format of a text such as ``"prompt=question,response=solution"``.

    A field that stands twice has several columns.

    Raises:
        DataError: as `columns` does.

    >>> columns_of_text("prompt=question,response=solution")({"question": "1+1=", "solution": "2"})
    {'prompt': '1+1=', 'response': '2'}
    """
    names: dict[str, str | list[str]] = {}
    for pair in text.split(","):
        field, mark, column = (part.strip() for part in pair.partition("="))
        if not mark or not column:
            raise DataError(f"columns: '{shown(pair)}' names no column; write prompt=question,response=solution")
        known = names.get(field)
        names[field] = column if known is None else [*([known] if isinstance(known, str) else known), column]
    return columns(**names)


def _value(row: Task, field: str, names: Sequence[str]) -> Any:
    """Return the value of a field; of several columns, their texts."""
    values = [_in_column(row, name) for name in names]
    if values[0] is None:
        if field in ("system", "tools", "reasoning", "answer", "history"):
            return None
        raise DataError(f"columns: the row has no '{names[0]}'; it has {fields(row)}")
    if len(names) == 1:
        return values[0]
    texts = [value for value in values if value is not None]
    if not all(isinstance(value, str) for value in texts):
        wrong = next(value for value in texts if not isinstance(value, str))
        raise DataError(f"columns: '{field}' is made of several columns, and one has {kind(wrong)}; give texts")
    return "\n\n".join(text for text in texts if text.strip())


def _in_column(row: Task, name: str) -> Any:
    value: Any = row
    for key in [name] if name in row else name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    is_single = isinstance(value, list | tuple) and len(value) == 1 and not is_chat(value)
    return value[0] if is_single and isinstance(value[0], str) else value
