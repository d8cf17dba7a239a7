"""From rows of a source to tasks: the format makes rows of a row, and each gets its prompt."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nrl.algos import name_of
from nrl.data.checks import check_messages, check_prompt, check_text_alone, fields, kind, shown
from nrl.data.collating import shared
from nrl.data.formats import FORMATS, Format
from nrl.data.sources import read
from nrl.envs.contract import Task
from nrl.errors import DataError

__all__ = ["PROMPT_KEYS", "rows", "tasks_of_row"]

PROMPT_KEYS = ("prompt", "messages", "question", "problem")
"""The fields that may hold a row's prompt; the first that the row has is taken."""


def rows(
    source: str | Path | Sequence[Task],
    *,
    format: str | Format | None = None,
    template: str | None = None,
    chat: bool = True,
) -> list[Task]:
    """Read the rows of a source, each with its ``"prompt"``, once and in order.

    The prompt is the first of the fields ``prompt``, ``messages``, ``question`` and ``problem`` that the row has: a
    text, a chat (messages with ``role`` and ``content``) or token ids. If ``messages`` end with the assistant's, the
    prompt leaves that one out. The prompt of two conversations is their common beginning. A text becomes a chat of one
    user message, because instruction-tuned models expect their chat template. With ``chat=False`` it stays a text, as
    base models and tokenizers without a chat template need it.

    Args:
        source: a file (JSON Lines, Parquet, CSV), a folder, a dataset of the Hugging Face hub such as
            ``"openai/gsm8k/main:train"``, or mappings; see `nrl.data.sources.read`.
        format: first makes of each row a row, several or none: a function, or its name in `FORMATS`.
        template: makes the text of the prompt from the fields of the row instead, as `str.format` does:
            ``"Q: {question}\\nA:"``. A brace that stands for itself is doubled.
        chat: whether a text becomes a chat.

    Returns:
        A new dict for each row: its fields and ``"prompt"``.

    Raises:
        DataError: no rows, a row that the format refuses, without a prompt or with one that is none of the three, or
            with pictures, films or sounds, which nothing reads; or a template that does not fit; it names the row.

    >>> rows([{"question": "1+1=", "answer": "2"}])[0]["prompt"]
    [{'role': 'user', 'content': '1+1='}]
    >>> rows([{"question": "1+1=", "answer": "2"}], template="Q: {question}", chat=False)[0]["prompt"]
    'Q: 1+1='
    """
    table = read(source)
    made = tasks_of_row(format, template, chat)
    found = [task for index, row in enumerate(table.rows) for task in made(row, table.place(index))]
    if not found:
        kept = " that the format keeps" if format else ""
        raise DataError(f"tasks: {table.name} has no rows{kept}; give at least one")
    return found


def tasks_of_row(format: str | Format | None, template: str | None, chat: bool) -> Callable[[Any, str], list[Task]]:
    """Make the function from a row, and where it stands, to its tasks; see `rows`.

    Raises:
        DataError: there is no format of this name.
    """
    if isinstance(format, str) and format not in FORMATS:
        raise DataError(f"tasks: there is no format '{format}'; there are {', '.join(FORMATS)}, or give a function")
    function = FORMATS[format] if isinstance(format, str) else format

    def made(row: Any, place: str) -> list[Task]:
        if not isinstance(row, Mapping):
            raise DataError(f"tasks: {place} is {kind(row)}; give a mapping, such as {{'prompt': '...'}}")
        if function is None:
            return [_task(row, place, template, chat)]
        try:
            found = function(row)
        except DataError as error:
            raise DataError(f"tasks: {place}: {error}") from error
        except Exception as error:
            fault = shown(f"{type(error).__name__}: {error}")
            raise DataError(f"tasks: {place}: the format {name_of(function)} raised {fault}") from error
        several = [found] if isinstance(found, Mapping) else [] if found is None else found
        if not isinstance(several, Sequence) or not all(isinstance(each, Mapping) for each in several):
            raise DataError(
                f"tasks: {place}: the format {name_of(function)} returned {kind(found)}; return a mapping, a list of "
                "mappings, or None to leave the row out"
            )
        return [_task(each, place, template, chat) for each in several]

    return made


def _task(row: Task, place: str, template: str | None, chat: bool) -> Task:
    check_text_alone(row, f"tasks: {place}", template or "")
    if template is not None:
        prompt: Any = _formatted(template, row, place)
    else:
        key = next((key for key in PROMPT_KEYS if key in row), None)
        if key is None and all(isinstance(row.get(side), list | tuple) for side in ("chosen", "rejected")):
            return _shared(row, place)
        if key is None:
            raise DataError(
                f"tasks: {place} has none of {', '.join(PROMPT_KEYS)}; it has {fields(row)}. Rename the field of the "
                "prompt, or make the prompt with template='... {field} ...'"
            )
        prompt = row[key]
        if key == "messages":
            prompt = _asked(prompt, f"tasks: {place}: '{key}'")
        check_prompt(prompt, f"tasks: {place}: '{key}'")
    if chat and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    return {**row, "prompt": prompt}


def _asked(messages: Any, what: str) -> Any:
    """The messages before the assistant's last one, if the conversation ends with it; else all of them."""
    whole = isinstance(messages, Sequence) and len(messages) > 1 and isinstance(messages[-1], Mapping)
    if not whole or messages[-1].get("role") != "assistant":
        return messages
    check_messages(messages, what)
    return messages[:-1]


def _shared(row: Mapping[str, Any], place: str) -> Task:
    """The task of a pair of conversations, whose prompt is their common beginning."""
    for side in ("chosen", "rejected"):
        check_messages(row[side], f"tasks: {place}: '{side}'")
    count = shared(row["chosen"], row["rejected"])
    prompt = row["chosen"][:count]
    check_prompt(prompt, f"tasks: {place}: what 'chosen' and 'rejected' share")
    return {**row, "prompt": prompt}


def _formatted(template: str, row: Mapping[str, Any], place: str) -> str:
    try:
        return template.format_map(row)
    except KeyError as error:
        found = f"the template reads {{{error.args[0]}}}, which the row does not have; it has {fields(row)}"
    except (ValueError, IndexError, AttributeError, TypeError) as error:
        found = f"the template {shown(repr(template))} does not fit the row: {error}"
    raise DataError(f"tasks: {place}: {found}. A brace that stands for itself is doubled: {{{{ and }}}}")
